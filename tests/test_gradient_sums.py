"""Gradients that meet at a tensor are counted as autograd adds them without a dispatch mode."""

from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import allocations, at_end, bytes_of, empty_gradients, one_more_sample

from course_lib.memory import CATEGORIES, MemoryBudgetExceeded, MemoryMeter, symbolic

# Bytes of the Python numbers that an operator takes, which only the allocator sees.
NUMBERS = 16


def four_times(leaves, layer):
    """Return leaves, and a step in which their gradients are sums over four calls of a layer."""
    x = torch.randn(16, 64)

    def step():
        y = x
        for _ in range(4):
            y = torch.tanh(layer(y))
        y.sum().backward()

    return leaves, step


def shared_weight():
    weight = nn.Parameter(torch.randn(64, 64) / 8)
    return four_times([weight], lambda y: y @ weight)


def shared_layer():
    layer = nn.Linear(64, 64)
    return four_times(list(layer.parameters()), layer)


def uses_of(function):
    """Return a maker of steps in which gradients meet at the argument of a function."""

    def make():
        weight = nn.Parameter(torch.randn(64, 64))

        def step():
            used = weight * 2
            made = function(used)  # both stay live, so that the peak is where gradients meet
            made.sum().backward()

        return [weight], step

    return make


class SumsInBackward(torch.autograd.Function):
    """Function whose formula adds out of place. It holds each tensor until the next one exists."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        value = gradient * 2
        value = value + gradient
        value = value.exp()
        return value.sin()


def squared_slope(y):
    return torch.autograd.grad((y.tanh() ** 3).sum(), y, create_graph=True)[0] ** 2


SUMS = {
    "a weight four times": shared_weight,
    "a layer four times, whose gradients are views": shared_layer,
    "a product with itself": uses_of(lambda y: y * y),
    "a product of a sum with itself": uses_of(lambda y: (z := y + y) * z),
    "attention to itself": uses_of(lambda y: (y @ y.mT).softmax(-1) @ y),
    "views": uses_of(lambda y: y[:32].exp().sum() + y[32:].exp().sum() + y.t().tanh().sum()),
    "an expanded tensor": uses_of(lambda y: (y + y[0]) * y[0]),
    "a formula that adds": uses_of(lambda y: SumsInBackward.apply(y) * 3),
    "a formula that adds, in C++": uses_of(lambda y: torch.stack(torch.var_mean(y, 0)).exp()),
    "a hook that adds": uses_of(lambda y: y.register_hook(lambda grad: grad + grad * 2) and y * 3),
    "a gradient that is kept": uses_of(lambda y: y.retain_grad() or y.exp() + y.tanh() + y.sin()),
    "double backward": uses_of(lambda y: squared_slope(y) + y.tanh()),
    "the largest": uses_of(lambda y: y.max(-1)[0]),
    "gathered": uses_of(lambda y: y.gather(1, torch.zeros(64, 1, dtype=torch.long))),
    "elements": uses_of(lambda y: y[torch.arange(64), torch.arange(64)]),
    "rows": uses_of(lambda y: y.index_select(0, torch.arange(64))),
    "taken": uses_of(lambda y: y.take(torch.arange(64))),
    "by a mask": uses_of(lambda y: y.masked_select(y > 0)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients_take_the_bytes_of_the_allocator(name):
    leaves, step = SUMS[name]()
    step()
    expected = [leaf.grad.clone() for leaf in leaves]
    empty_gradients(nn.ParameterList(leaves))
    with MemoryMeter() as meter:
        step()
        one_more_sample()
    assert sum(meter.series().values()).max() == meter.peak_bytes
    assert at_end(meter) == dict.fromkeys(CATEGORIES, 0) | {"gradient": bytes_of(leaves)}
    assert all(torch.equal(leaf.grad, each) for leaf, each in zip(leaves, expected, strict=True))
    empty_gradients(nn.ParameterList(leaves))
    assert 0 <= max(accumulate(allocations(step))) - meter.peak_bytes <= NUMBERS


class Keeping(TorchDispatchMode):
    """Mode that keeps the tensors that operators take."""

    def __enter__(self):
        self.held = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.held += [value for value in args if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_gradient_that_is_kept_after_a_sum_stays_counted():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter, Keeping() as keeping:
        y = x * 2
        (y.sin() + y.cos()).sum().backward()
        live = {tensor.untyped_storage() for tensor in (*keeping.held, x.grad)}
        live.remove(x.untyped_storage())
        assert meter.live_bytes == sum(storage.nbytes() for storage in live)


def test_sums_in_a_python_backward_keep_nothing_alive():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter:
        SumsInBackward.apply(x).sum().backward()
    exp = next(sample for sample in meter.timeline if sample.operator == "aten.exp.default")
    # the loss and its gradient, the sum, and its exponential
    assert exp.live_bytes == 4 * (1 + 1000 + 1000 + 1)


def test_nested_and_symbolic_meters_count_sums_alike_and_a_budget_leaves_room_for_them():
    found = set()
    for context in (symbolic(), nullcontext()):
        with context:
            leaves, step = shared_weight()
            with MemoryMeter() as outer, MemoryMeter() as inner:
                step()
        found |= {outer.peak_bytes, inner.peak_bytes}
    assert len(found) == 1
    leaves[0].grad = None
    with MemoryMeter(budget_bytes=outer.peak_bytes):
        step()


def test_a_budget_counts_the_sum_and_a_gradient_whose_view_is_kept():
    def step():
        x, kept = torch.ones(1000, requires_grad=True), []
        terms = [-x, -x]
        for term in terms:
            term.grad_fn.register_hook(lambda inputs, _: kept.append(inputs[0].detach()))
        (terms[0] + terms[1]).sum().backward()

    with MemoryMeter() as meter:
        step()
    budget = MemoryMeter(budget_bytes=meter.peak_bytes - 1)
    with pytest.raises(MemoryBudgetExceeded, match=r"aten\.add"), budget:
        step()
