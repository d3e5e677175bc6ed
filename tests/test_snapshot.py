"""State that `measure` restores after its runs."""

import copy
import gc
import random
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from training_steps import Wrapper, train

from course_lib.memory import measure
from course_lib.models import deep_mlp
from course_lib.offload import OffloadedOptimizer

pytestmark = pytest.mark.usefixtures("nothing_to_collect")


class Restless(nn.Module):
    """Model that changes everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        random.random(), np.random.rand()
        return self.last(F.dropout(self.norm(self.first(x)), 0.5))


def state_of(model, optimizer):
    """Return copies of all values, and the tensors that hold them."""
    _, keys, *rest = np.random.get_state()
    generators = torch.get_rng_state(), random.getstate(), keys.tolist(), rest
    gradients = [p.grad for p in model.parameters()]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *gradients, *model.buffers(), *moments]
    values = model.state_dict(), optimizer.state_dict(), gradients, generators
    return copy.deepcopy(values), tensors


def assert_equal(found, expected):
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_measure_restores_model_optimizer_and_generators(stepped, fails):
    model, x = Restless(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    runs = []

    def step():
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.weight.data.add_(1)  # does not increase the version
        optimizer.param_groups[0]["lr"] *= 0.5
        runs.append(1)
        if fails and len(runs) == 3:
            raise ZeroDivisionError

    if stepped:
        step()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    values, tensors = state_of(model, optimizer)
    runs.clear()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        found = measure(step, model=model, optimizer=optimizer, repeats=1)
        assert found.changed_parameters == 0
    after, same = state_of(model, optimizer)
    assert all(a is b for a, b in zip(same, tensors, strict=True))
    assert_equal(after, values)


@pytest.mark.parametrize(("stepped", "warmup"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (Wrapper, torch.float32),
        (OffloadedOptimizer, torch.float32),
        (partial(OffloadedOptimizer, fraction=0.5), torch.bfloat16),
    ],
)
def test_measure_restores_state_that_is_kept_elsewhere(optimizer, dtype, stepped, warmup):
    model, x = deep_mlp(2, 16).to(dtype), torch.ones(4, 16, dtype=dtype)
    _, optimizer, step = train(model, x, optimizer=optimizer)
    if stepped:
        step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = measure(step, model=model, optimizer=optimizer, repeats=1, warmup=warmup)
    assert_equal((model.state_dict(), optimizer.state_dict()), before)
    assert found.changed_parameters == 0 and found.notes == ()


def test_measure_without_a_model_restores_gradients():
    model, _, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=torch.optim.Adam)
    gradient = model[0].weight.grad = torch.ones(16, 16)
    found = measure(lambda: model(torch.ones(4, 16)).sum().backward(), repeats=1)
    assert found.changed_parameters == 0 and "changed" not in str(found)
    found = measure(step, repeats=1)
    assert found.changed_parameters == 4 and "the step changed 4 parameters" in str(found)
    assert model[0].weight.grad is gradient and torch.equal(gradient, torch.ones(16, 16))
    assert model[0].bias.grad is None


class Kernel(torch.autograd.Function):
    """Function whose input no operator reads, as if it called its own kernel."""

    forward = staticmethod(lambda ctx, x: torch.ones(x.shape))
    backward = staticmethod(lambda ctx, gradient: torch.ones(gradient.shape))


def test_gradients_of_leaves_that_no_operator_reads_are_restored():
    x = torch.randn(4, requires_grad=True)
    before = x.grad = torch.zeros(4)

    def step():
        Kernel.apply(x).sum().backward()
        assert x.grad.tolist() == [1] * 4

    measure(step, repeats=1)
    assert x.grad is before and before.tolist() == [0] * 4


def test_leaf_made_by_the_step_is_released():
    made = []

    def step():
        assert all(leaf() is None for leaf in made)
        x = torch.ones(8, requires_grad=True)
        made.append(weakref.ref(x))
        (x * 2).sum().backward()

    measure(step, repeats=1)


@pytest.mark.parametrize("enabled", [False, True])
def test_measure_restores_garbage_collection(enabled):
    model, before = nn.Linear(4, 4), gc.isenabled()
    switch = {True: gc.enable, False: gc.disable}
    switch[enabled]()
    try:
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), repeats=1)
        assert gc.isenabled() is enabled
    finally:
        switch[before]()
