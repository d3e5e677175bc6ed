"""Tests of how a meter counts sums of gradients, compared with the allocator without a meter."""

from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import allocations, at_end, bytes_of, empty_gradients, metered, one_more_sample

from course_lib.memory import CATEGORIES, MemoryBudgetExceeded, MemoryMeter, symbolic

# Bytes of Python numbers that are arguments of operators, which only the allocator counts.
SCALAR_BYTES = 16


def shared_weight():
    """Return a weight, and a step in which its gradient is a sum over four uses."""
    weight, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(16, 64)

    def step():
        y = x
        for _ in range(4):
            y = torch.tanh(y @ weight)
        y.sum().backward()

    return [weight], step


def step_of(function):
    """Return a function that makes a step in which gradients meet at the argument of `function`."""

    def make():
        weight = nn.Parameter(torch.randn(64, 64))

        def step():
            argument = weight * 2
            result = function(argument)  # both stay live, so that the peak is where gradients meet
            result.sum().backward()

        return [weight], step

    return make


class SumsInBackward(torch.autograd.Function):
    """Function whose gradient formula adds out of place and releases each tensor afterwards."""

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
    "a weight used four times": shared_weight,
    "square": step_of(lambda y: y * y),
    "square of a sum": step_of(lambda y: (z := y + y) * z),
    "self-attention": step_of(lambda y: (y @ y.mT).softmax(-1) @ y),
    "views": step_of(lambda y: y[:32].exp().sum() + y[32:].exp().sum() + y.t().tanh().sum()),
    "an expanded tensor": step_of(lambda y: (y + y[0]) * y[0]),
    "a Python formula that adds": step_of(lambda y: SumsInBackward.apply(y) * 3),
    "a C++ formula that adds": step_of(lambda y: torch.stack(torch.var_mean(y, 0)).exp()),
    "a hook that adds": step_of(lambda y: y.register_hook(lambda grad: grad + grad * 2) and y * 3),
    "a gradient that is kept": step_of(lambda y: y.retain_grad() or y.exp() + y.tanh() + y.sin()),
    "double backward": step_of(lambda y: squared_slope(y) + y.tanh()),
    "maximum": step_of(lambda y: y.max(-1)[0]),
    "gather": step_of(lambda y: y.gather(1, torch.zeros(64, 1, dtype=torch.long))),
    "elements": step_of(lambda y: y[torch.arange(64), torch.arange(64)]),
    "rows": step_of(lambda y: y.index_select(0, torch.arange(64))),
    "take": step_of(lambda y: y.take(torch.arange(64))),
    "mask": step_of(lambda y: y.masked_select(y > 0)),
}


@pytest.mark.parametrize("name", SUMS)
def test_meter_peak_with_summed_gradients_equals_allocator_peak(name):
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
    assert 0 <= max(accumulate(allocations(step))) - meter.peak_bytes <= SCALAR_BYTES


class KeepInputs(TorchDispatchMode):
    def __enter__(self):
        self.tensors = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tensors.extend(value for value in args if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))


def test_meter_counts_gradient_still_referenced_after_summation():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter, KeepInputs() as mode:
        y = x * 2
        (y.sin() + y.cos()).sum().backward()
        live = {tensor.untyped_storage() for tensor in (*mode.tensors, x.grad)}
        live.remove(x.untyped_storage())
        assert meter.live_bytes == sum(storage.nbytes() for storage in live)


def test_nested_and_symbolic_meters_count_equal_bytes_for_gradient_sums():
    found = set()
    for context in (symbolic(), nullcontext()):
        with context:
            leaves, step = shared_weight()
            with MemoryMeter() as outer, MemoryMeter() as inner:
                step()
        found |= {outer.peak_bytes, inner.peak_bytes}
    assert len(found) == 1
    leaves[0].grad = None
    metered(step, budget_bytes=outer.peak_bytes)


def test_memory_budget_counts_summed_gradient_with_live_view():
    def step():
        x, kept = torch.ones(1000, requires_grad=True), []
        terms = [-x, -x]
        for term in terms:
            term.grad_fn.register_hook(lambda inputs, _: kept.append(inputs[0].detach()))
        (terms[0] + terms[1]).sum().backward()

    peak = metered(step).peak_bytes
    with pytest.raises(MemoryBudgetExceeded, match=r"aten\.add"):
        metered(step, budget_bytes=peak - 1)
