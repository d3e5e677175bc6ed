"""The budget of a meter: which operator raises, and what remains after the error."""

import pickle
from itertools import accumulate

import pytest
import torch
from torch import nn
from training_steps import (
    bytes_of,
    empty_gradients,
    everything_undone_afterwards,
    square_mean,
    train,
)

from course_lib.memory import PHASES, MemoryBudgetExceeded, MemoryMeter
from course_lib.models import deep_mlp


def fresh_step():
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    return train(model, x, optimizer=torch.optim.Adam, foreach=False)


@pytest.mark.parametrize("phase", PHASES)
def test_the_operator_that_takes_live_bytes_over_the_budget_raises(phase):
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer) as free:
        step()
    live = [free.entry_bytes] + [sample.live_bytes for sample in free.timeline]
    highest = list(accumulate(live, max))
    moments = [
        i for i in range(1, len(live)) if live[i] > highest[i - 1] and free.phases()[i - 1] == phase
    ]
    for moment in (moments[0], moments[-1]):
        model, optimizer, step = fresh_step()
        meter = MemoryMeter(model, optimizer, budget_bytes=live[moment] - 1)
        with everything_undone_afterwards(), pytest.raises(MemoryBudgetExceeded) as caught, meter:
            step()
        error = caught.value
        assert error.operator == free.timeline[moment - 1].operator
        assert error.live_bytes + error.wanted_bytes == live[moment] == meter.peak_bytes
        assert error.budget_bytes == live[moment] - 1 >= error.live_bytes
        assert meter.phases()[-1] == phase
        for part in (
            error.operator,
            f"{error.wanted_bytes:,}",
            f"{error.live_bytes:,}",
            f"{error.budget_bytes:,}",
        ):
            assert part in str(error)
    model, optimizer, step = fresh_step()
    with MemoryMeter(model, optimizer, budget_bytes=free.peak_bytes) as meter:
        step()
    assert meter.peak_bytes == free.peak_bytes


def test_after_the_error_the_same_model_trains_on_with_the_right_gradients():
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    with MemoryMeter(model) as free:
        square_mean(model(x)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    empty_gradients(model)
    with MemoryMeter(model, budget_bytes=free.peak_bytes - 1):
        with pytest.raises(MemoryBudgetExceeded):
            square_mean(model(x)).backward()
        empty_gradients(model)
        model(x[:1])  # in the same block too
    square_mean(model(x)).backward()
    assert all(
        torch.equal(p.grad, gradient)
        for p, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_what_the_refused_operator_made_is_gone():
    with MemoryMeter(budget_bytes=1000) as meter:
        x = torch.ones(10)
        with pytest.raises(MemoryBudgetExceeded) as caught:
            torch.ones(1000)
        assert meter.live_bytes == caught.value.live_bytes == x.nbytes
        assert caught.value.wanted_bytes == 4000


def test_a_budget_below_what_the_model_holds_raises_on_entry():
    model = nn.Linear(16, 16)
    held = bytes_of(model.parameters())
    meter = MemoryMeter(model, budget_bytes=held - 1)
    with (
        everything_undone_afterwards(),
        pytest.raises(MemoryBudgetExceeded, match="on entry") as caught,
        meter,
    ):
        pytest.fail("the block ran")
    assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, held)
    with MemoryMeter(model, budget_bytes=held):
        pass


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3)))
    assert (error.operator, error.live_bytes, error.wanted_bytes, error.budget_bytes) == (
        "aten.mm.default",
        1,
        2,
        3,
    )
