"""Gradients that meet at a tensor are counted as autograd adds them without a dispatch mode."""

from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import allocations, at_end, bytes_of, one_more_sample

from course_lib.memory import CATEGORIES, MemoryMeter, symbolic


def shared_weight(uses):
    weight, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(16, 64)

    def step():
        y = x
        for _ in range(uses):
            y = torch.tanh(y @ weight)
        y.sum().backward()

    return [weight], step


def rnn():
    inner, outer = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))
    xs = torch.randn(6, 8, 64)

    def step():
        h = torch.zeros(8, 64)
        for x in xs:
            h = torch.tanh(x @ inner + h @ outer)
        h.sum().backward()

    return [inner, outer], step


def uses_of(function):
    """A parameter of which `function` makes something, in which gradients meet or are added
    otherwise."""

    def make():
        weight = nn.Parameter(torch.randn(64, 64))

        def step():
            used = weight * 2
            made = function(used)  # both stay, so that the peak is where gradients meet
            made.sum().backward()

        return [weight], step

    return make


class AddsGradients(torch.autograd.Function):
    """Its formula's own sum, out of place, takes a tensor more than a gradient that meets
    another."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient * 2


def with_hook(y):
    y.register_hook(lambda gradient: gradient + gradient * 2)
    return y * 3


def with_kept_gradient(y):
    y.retain_grad()
    return y.exp() + y.tanh() + y.sin()


MEETINGS = {
    "a weight four times": lambda: shared_weight(4),
    "an RNN": rnn,
    "a product with itself": uses_of(lambda y: y * y),
    "a product of a sum with itself": uses_of(lambda y: (z := y + y) * z),
    "attention to itself": uses_of(lambda y: (y @ y.mT).softmax(-1) @ y),
    "views": uses_of(lambda y: y[:32].exp().sum() + y[32:].exp().sum() + y.t().tanh().sum()),
    "an expanded tensor": uses_of(lambda y: (y + y[0]) * y[0]),
    "a formula that adds": uses_of(lambda y: AddsGradients.apply(y) * 3),
    "a formula that adds, in C++": uses_of(lambda y: torch.stack(torch.var_mean(y, 0)).exp()),
    "a hook that adds": uses_of(with_hook),
    "a gradient that is kept": uses_of(with_kept_gradient),
    "double backward": uses_of(
        lambda y: (
            torch.autograd.grad((y.tanh() ** 3).sum(), y, create_graph=True)[0] ** 2 + y.tanh()
        )
    ),
    "the largest": uses_of(lambda y: y.max(-1)[0]),
    "the median": uses_of(lambda y: y.median(-1)[0]),
    "the largest two": uses_of(lambda y: y.topk(2)[0].exp()),
    "sorted": uses_of(lambda y: y.sort()[0].exp()),
    "gathered": uses_of(lambda y: y.gather(1, torch.zeros(64, 1, dtype=torch.long))),
    "places": uses_of(lambda y: y[torch.arange(64), torch.arange(64)]),
    "rows": uses_of(lambda y: y.index_select(0, torch.arange(64))),
    "taken": uses_of(lambda y: y.take(torch.arange(64))),
    "by a mask": uses_of(lambda y: y.masked_select(y > 0)),
    "layers, whose gradients meet in views": lambda: shared_layer(4),
}


def shared_layer(uses):
    layer, x = nn.Linear(64, 64), torch.randn(16, 64)

    def step():
        y = x
        for _ in range(uses):
            y = torch.tanh(layer(y))
        y.sum().backward()

    return list(layer.parameters()), step


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_that_meet_are_counted_as_autograd_alone_adds_them(name):
    leaves, step = MEETINGS[name]()
    step()
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    with MemoryMeter() as meter:
        step()
        one_more_sample()
    assert all(
        torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, gradients, strict=True)
    )
    for leaf in leaves:
        leaf.grad = None
    scalars = 16  # bytes of Python numbers that operators take
    assert 0 <= max(accumulate(allocations(step))) - meter.peak_bytes <= scalars
    assert sum(meter.series().values()).max() == meter.peak_bytes
    assert at_end(meter) == dict.fromkeys(CATEGORIES, 0) | {"gradient": bytes_of(leaves)}


class _Keeping(TorchDispatchMode):
    """Holds what operators are given."""

    def __enter__(self):
        self.held = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.held += [value for value in args if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_met_another_and_is_kept_by_somebody_counts_on():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter, _Keeping() as keeping:
        y = x * 2
        (y.sin() + y.cos()).sum().backward()
        there = {tensor.untyped_storage() for tensor in (*keeping.held, x.grad)}
        there.remove(x.untyped_storage())
        assert meter.live_bytes == sum(storage.nbytes() for storage in there)


class _SumsInBackward(torch.autograd.Function):
    """Whose backward lets go of each tensor as soon as the next one is made."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        value = gradient * 2
        value = value + 1
        value = value.exp()
        return value.sin()


def test_the_meter_keeps_nothing_alive_of_a_function_that_adds_in_backward():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter:
        _SumsInBackward.apply(x).sum().backward()
    exp = next(sample for sample in meter.timeline if sample.operator == "aten.exp.default")
    # the loss and its gradient, what was added, and its exponential
    assert exp.live_bytes == 4 * (1 + 1000 + 1000 + 1)


def test_a_symbolic_steps_gradients_meet_in_the_same_bytes():
    found = []
    for context in (nullcontext(), symbolic()):
        with context:
            _, step = shared_weight(4)
            with MemoryMeter() as outer, MemoryMeter() as inner:
                step()
        found += [outer.peak_bytes, inner.peak_bytes]
    assert found == [found[0]] * 4


def test_a_budget_does_not_count_what_autograd_alone_would_not_take():
    leaves, step = shared_weight(4)
    with MemoryMeter() as meter:
        step()
    leaves[0].grad = None
    with MemoryMeter(budget_bytes=meter.peak_bytes):
        step()
