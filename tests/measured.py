"""The contract of `course_lib.budget`: a step takes what is estimated, and a search composes it."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from course_lib._torch.steps import not_collecting
from course_lib.budget import Estimate, InfeasibleBudget, Recipe, estimate, run
from course_lib.budget.search.extrapolation import BlockExtrapolator, NotComposable
from course_lib.memory import CATEGORIES


def assert_measured(make_model, make_batch, recipe, **options) -> Estimate:
    """Assert that a step takes what is estimated and composed, and return the estimate.

    All fields are compared: the peak, its categories and operator, the peak of each phase, FLOPs,
    and bytes moved.
    """
    guess = estimate(make_model, make_batch, recipe, **options)
    # Some models make reference cycles that hold tensors. A collection in the middle of a step
    # would free them, at a moment that depends on what ran before.
    with not_collecting():
        real = run(make_model, make_batch, recipe, **options)
    taken = Estimate.from_trace(real.meter.trace(), recipe, "file")
    moved = {"bytes_down": real.traffic.bytes_down, "bytes_up": real.traffic.bytes_up}
    losses = taken.phase_peaks["forward"] - guess.phase_peaks["forward"]
    assert losses in (0, 4 * recipe.micro_batches)  # only a run stacks them to read their values
    phase_peaks = taken.phase_peaks | {"forward": taken.phase_peaks["forward"] - losses}
    assert guess == replace(taken, **moved, phase_peaks=phase_peaks)
    assert sum(guess.at_peak.values()) == guess.peak_bytes == max(guess.phase_peaks.values())
    assert set(guess.at_peak) == set(CATEGORIES)
    if BlockExtrapolator.takes(recipe):
        base = Recipe(precision=recipe.precision)
        options = {"loss_sum": None, **options, "tier": "file"}
        with suppress(NotComposable):  # the model needs all its blocks
            assert (
                BlockExtrapolator(make_model, make_batch, base, **options).estimate(recipe) == guess
            )
    return guess


@cache
def feasible(make_model, make_batch, recipe, times=1.25) -> Recipe:
    """Return the recipe with this many times the bytes that its schedule needs at least."""
    if recipe.checkpoint != "optimal":
        return recipe
    with pytest.raises(InfeasibleBudget) as told:
        estimate(make_model, make_batch, replace(recipe, schedule_bytes=1))
    return replace(recipe, schedule_bytes=int(times * told.value.least_bytes))
