"""Everything that `measure` restores afterwards."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from training_steps import Wraps, square_mean

from course_lib.memory import measure
from course_lib.models import deep_mlp


class Restless(nn.Module):
    """Changes everything that a step can change."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        random.random(), np.random.rand()
        return self.last(F.dropout(self.norm(self.first(x)), 0.5))


def state_of(model, optimizer):
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return *state, *randoms


def assert_same_state(model, optimizer, before):
    weights, state, of_torch, of_python, of_numpy = state_of(model, optimizer)
    assert_close(weights, before[0], rtol=0, atol=0)
    assert state["param_groups"] == before[1]["param_groups"]
    assert_close(state["state"], before[1]["state"], rtol=0, atol=0)
    assert torch.equal(of_torch, before[2])
    assert of_python == before[3]
    assert np.array_equal(of_numpy[1], before[4][1]) and of_numpy[2:] == before[4][2:]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_measure_leaves_everything_as_it_was(stepped, fails):
    model, x = Restless(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    runs = []

    def step():
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.weight.data.add_(1)  # counts no version on
        optimizer.param_groups[0]["lr"] *= 0.5
        runs.append(1)
        if fails and len(runs) == 3:
            raise ZeroDivisionError

    if stepped:
        step()
    gradients = {parameter: torch.randn_like(parameter) for parameter in model.parameters()}
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    held = {parameter: parameter.grad.clone() for parameter in gradients}
    buffers = dict(model.named_buffers())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    before = state_of(model, optimizer)
    runs.clear()
    if fails:
        with pytest.raises(ZeroDivisionError):
            measure(step, model=model, optimizer=optimizer, repeats=1)
    else:
        assert measure(step, model=model, optimizer=optimizer, repeats=1).changed_parameters == 0
    assert_same_state(model, optimizer, before)
    for parameter, gradient in gradients.items():
        assert parameter.grad is gradient
        assert torch.equal(gradient, held[parameter])
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(moments, after, strict=True))


def optimizers_with_state_elsewhere():
    from course_lib.offload import OffloadedOptimizer

    return {
        "in another optimizer": Wraps,
        "in a file": lambda parameters: OffloadedOptimizer(parameters, lr=0.1),
    }


@pytest.mark.parametrize(("stepped", "warmup"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("kind", optimizers_with_state_elsewhere())
def test_measure_leaves_the_state_of_an_optimizer_that_keeps_it_elsewhere(kind, stepped, warmup):
    model = deep_mlp(2, 16)
    optimizer = optimizers_with_state_elsewhere()[kind](model.parameters())

    def step():
        square_mean(model(torch.ones(4, 16))).backward()
        optimizer.step()

    if stepped:
        step()
    before = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    found = measure(step, model=model, optimizer=optimizer, repeats=1, warmup=warmup)
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert found.changed_parameters == 0 and found.notes == ()


def test_a_leaf_that_the_step_makes_is_not_kept_alive_by_measure():
    made = []

    def step():
        assert all(leaf() is None for leaf in made)
        x = torch.ones(8, requires_grad=True)
        made.append(weakref.ref(x))
        (x * 2).sum().backward()

    measure(step, repeats=1)


def test_without_a_model_measure_puts_gradients_back_and_says_what_changed():
    model, x = deep_mlp(2, 16), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = model[0].weight.grad = torch.ones(16, 16)

    def backward():
        model(x).sum().backward()

    def step():
        backward()
        optimizer.step()

    found = measure(backward, repeats=1)
    assert found.changed_parameters == 0
    assert "changed" not in str(found)
    found = measure(step, repeats=1)
    assert found.changed_parameters == 4
    assert "the step changed 4 parameters" in str(found)
    assert model[0].weight.grad is gradient and torch.equal(gradient, torch.ones(16, 16))
    assert model[0].bias.grad is None


class _Kernel(torch.autograd.Function):
    """As one that calls a kernel of its own: no operator meets its input."""

    @staticmethod
    def forward(ctx, x):
        return torch.ones(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(gradient.shape)


def test_without_a_model_gradients_are_put_back_of_leaves_that_no_operator_meets():
    x = torch.randn(4, requires_grad=True)
    before = x.grad = torch.zeros(4)
    found = []

    def step():
        _Kernel.apply(x).sum().backward()
        found.append(x.grad.tolist())

    measure(step, repeats=1)
    assert x.grad is before and before.tolist() == [0] * 4
    assert all(gradient == [1] * 4 for gradient in found)


@pytest.mark.parametrize("enabled", [False, True])
def test_measure_leaves_garbage_collection_as_it_was(enabled):
    model, was = nn.Linear(4, 4), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), repeats=1)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
