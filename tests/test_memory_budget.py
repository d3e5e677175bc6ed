"""The budget of a meter: which operator raises, and what remains after the error."""

import pickle
from itertools import accumulate

import pytest
import torch
from torch import nn
from training_steps import bytes_of, everything_undone, train

from course_lib.memory import PHASES, MemoryBudgetExceeded, MemoryMeter
from course_lib.models import deep_mlp


def fresh_step():
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    return train(model, x, optimizer=torch.optim.Adam, foreach=False)


@pytest.mark.parametrize("phase", PHASES)
def test_operator_that_exceeds_the_budget_raises(phase):
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer) as free:
        step()
    live = [free.entry_bytes] + [sample.live_bytes for sample in free.timeline]
    highest = [0, *accumulate(live, max)]
    moments = [
        i for i in range(1, len(live)) if live[i] > highest[i] and free.phases()[i - 1] == phase
    ]
    for moment in (moments[0], moments[-1]):
        model, optimizer, step = fresh_step()
        meter = MemoryMeter(model, optimizer, budget_bytes=live[moment] - 1)
        with everything_undone(), pytest.raises(MemoryBudgetExceeded) as caught, meter:
            step()
        error = caught.value
        assert error.operator == free.timeline[moment - 1].operator
        assert error.live_bytes + error.wanted_bytes == live[moment] == meter.peak_bytes
        assert error.budget_bytes == live[moment] - 1 >= error.live_bytes
        assert meter.phases()[-1] == phase
        shown = f"{error.wanted_bytes:,}", f"{error.live_bytes:,}", f"{error.budget_bytes:,}"
        assert all(part in str(error) for part in (error.operator, *shown))
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer, budget_bytes=free.peak_bytes) as meter:
        step()
    assert meter.peak_bytes == free.peak_bytes


def test_model_can_train_on_after_the_error():
    model, _, step = train(deep_mlp(3, 32), torch.ones(16, 32))
    with MemoryMeter(model) as free:
        step()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with MemoryMeter(model, budget_bytes=free.peak_bytes - 1):
        with pytest.raises(MemoryBudgetExceeded):
            step()
        model.zero_grad()
        model(torch.ones(1, 32))  # in the same block too
    step()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


def test_outputs_of_the_refused_operator_are_released():
    with MemoryMeter(budget_bytes=1000) as meter:
        x = torch.ones(10)
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(1000)
        assert meter.live_bytes == caught.value.live_bytes == x.nbytes
        assert caught.value.wanted_bytes == 4000


def test_budget_below_the_bytes_of_the_model_raises_on_entry():
    model = nn.Linear(16, 16)
    held = bytes_of(model.parameters())
    meter = MemoryMeter(model, budget_bytes=held - 1)
    refused = pytest.raises(MemoryBudgetExceeded, match="on entry")
    with everything_undone(), refused as caught, meter:
        pytest.fail("the block ran")
    assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, held)
    with MemoryMeter(model, budget_bytes=held):
        pass


def test_budget_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3)))
    found = error.operator, error.live_bytes, error.wanted_bytes, error.budget_bytes
    assert found == ("aten.mm.default", 1, 2, 3)
