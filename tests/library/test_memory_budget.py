"""Tests of a meter's budget: the operator that raises, and the state after the error."""

import pickle
from itertools import accumulate

import pytest
import torch
from torch import nn
from training_steps import bytes_of, hooks_restored, train

from course_lib.memory import PHASES, MemoryBudgetExceeded, MemoryMeter
from course_lib.models import deep_mlp


def metered_step(**options):
    """Return a training step, and a meter of its model and optimizer before it is entered."""
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    model, optimizer, step = train(model, x, optimizer=torch.optim.Adam, foreach=False)
    return step, MemoryMeter(model, optimizer, **options)


@pytest.mark.parametrize("phase", PHASES)
def test_operator_exceeding_memory_budget_raises_in_each_phase(phase):
    step, first = metered_step()
    with first:
        step()
    live = [first.entry_bytes] + [sample.live_bytes for sample in first.timeline]
    highest = [0, *accumulate(live, max)]
    point = next(
        i for i in range(1, len(live)) if live[i] > highest[i] and first.phases()[i - 1] == phase
    )
    step, meter = metered_step(budget_bytes=live[point] - 1)
    with hooks_restored(), pytest.raises(MemoryBudgetExceeded) as caught, meter:
        step()
    error = caught.value
    assert error.operator == first.timeline[point - 1].operator
    assert error.live_bytes + error.wanted_bytes == live[point] == meter.peak_bytes
    assert error.budget_bytes == live[point] - 1 >= error.live_bytes
    assert meter.phases()[-1] == phase
    numbers = error.wanted_bytes, error.live_bytes, error.budget_bytes
    assert all(part in str(error) for part in (error.operator, *map("{:,}".format, numbers)))


def test_model_can_be_trained_after_memory_budget_error():
    model, _, step = train(deep_mlp(3, 32), torch.ones(16, 32))
    with MemoryMeter(model) as first:
        step()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with MemoryMeter(model, budget_bytes=first.peak_bytes - 1):
        with pytest.raises(MemoryBudgetExceeded):
            step()
        model.zero_grad()
        model(torch.ones(1, 32))  # in the same block
    step()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


def test_budget_below_model_bytes_raises_when_meter_is_entered():
    model = nn.Linear(16, 16)
    held = bytes_of(model.parameters())
    meter = MemoryMeter(model, budget_bytes=held - 1)
    raises = pytest.raises(MemoryBudgetExceeded, match="on entry")
    with hooks_restored(), raises as caught, meter:
        pytest.fail("the block ran")
    assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, held)


def test_memory_budget_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3)))
    assert str(error) == str(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3))
