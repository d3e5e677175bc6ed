"""Compare an estimate with a run, and with the extrapolation that a search uses."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from course_lib._torch.steps import not_collecting
from course_lib.budget import Estimate, InfeasibleBudget, Recipe, estimate, run
from course_lib.budget.search.extrapolation import (
    BlockExtrapolator,
    ExtrapolationError,
    can_extrapolate,
)
from course_lib.memory import CATEGORIES


def assert_measured(make_model, make_batch, recipe, *, extrapolated=False, **options) -> Estimate:
    """Assert that an estimate equals a run, and return the estimate.

    All fields are compared: the peak, its categories and operator, the peak of each phase, FLOPs,
    and bytes moved.

    Args:
        extrapolated: Whether the estimate must also equal the one that a search computes.
    """
    found = estimate(make_model, make_batch, recipe, **options)
    # Some models make reference cycles that hold tensors. A garbage collection in the middle of a
    # step would free them, at a point that depends on earlier tests.
    with not_collecting():
        result = run(make_model, make_batch, recipe, **options)
    measured = Estimate.from_trace(result.meter.trace(), recipe, "file")
    moved = {"bytes_down": result.traffic.bytes_down, "bytes_up": result.traffic.bytes_up}
    losses = measured.phase_peaks["forward"] - found.phase_peaks["forward"]
    assert losses in (0, 4 * recipe.micro_batches)  # only a run stacks them to read their values
    phase_peaks = measured.phase_peaks | {"forward": measured.phase_peaks["forward"] - losses}
    assert found == replace(measured, **moved, phase_peaks=phase_peaks)
    assert sum(found.at_peak.values()) == found.peak_bytes == max(found.phase_peaks.values())
    assert set(found.at_peak) == set(CATEGORIES)
    if extrapolated and can_extrapolate(recipe):
        base = Recipe(precision=recipe.precision)
        with suppress(ExtrapolationError):  # the model needs all its blocks
            extrapolator = extrapolator_of(make_model, make_batch, base, **options)
            assert extrapolator.estimate(recipe) == found
    return found


@cache
def extrapolator_of(make_model, make_batch, base, loss_sum=None) -> BlockExtrapolator:
    """Return the extrapolator that all cases of a model, a batch and a precision share."""
    return BlockExtrapolator(make_model, make_batch, base, loss_sum, "file")


@cache
def feasible(make_model, make_batch, recipe, times=1.25) -> Recipe:
    """Return the recipe with `times` the fewest bytes that its schedule needs."""
    if recipe.checkpoint != "optimal":
        return recipe
    with pytest.raises(InfeasibleBudget) as caught:
        estimate(make_model, make_batch, replace(recipe, schedule_bytes=1))
    return replace(recipe, schedule_bytes=int(times * caught.value.least_bytes))
