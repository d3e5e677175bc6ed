"""The cheapest recipe of one combination of techniques: how many micro-batches, segments, blocks, schedule bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from course_lib._check import InfeasibleBudget
from course_lib.checkpoint import checkpoint_blocks
from course_lib.schedule import Cost

from .recipe import Recipe

if TYPE_CHECKING:
    from .search import _Search


def best_of(search: _Search, family: Recipe) -> Recipe | None:
    """The cheapest of the family that fits."""
    if family.checkpoint == "optimal":
        return best_schedule(search, family)
    if family.checkpoint != "segments":
        return fewest_pieces(search, family)
    counts = sorted({2, *range(2, math.isqrt(search.layers) + 1), search.layers})
    most = replace(family, segments=counts[-1], micro_batches=1 if family.in_backward else search.pieces[-1])
    if not search.fits(most) and not search.fits(replace(most, micro_batches=1)):
        return None
    trials = (fewest_pieces(search, replace(family, segments=count)) for count in counts)
    return next(trial for trial in trials if trial)


def fewest_pieces(search: _Search, family: Recipe) -> Recipe | None:
    """With as few micro-batches as fit. One has no full set of gradients beside its activations, so it is tried."""
    one, *more = [replace(family, micro_batches=count) for count in ([1] if family.in_backward else search.pieces)]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def fewest_blocks(search: _Search, all_blocks: Recipe, without: int) -> Recipe | None:
    """Checkpoints around so few of the first blocks as fit, where none takes as many bytes as are given.

    Each moment takes more, or less, evenly with each block, so that the peak is no more than a line says.
    """
    with checkpoint_blocks(search.estimates.composer_of(all_blocks).model, None) as handle:
        count = len(handle.names)
    saved = without - search.estimate(all_blocks).peak_bytes
    first = min(count - 1, math.ceil(count * (without - search.budget) / saved)) if saved > 0 else 0
    trial = None
    while first and search.fits(smaller := replace(all_blocks, first_blocks=first)):
        trial, first = smaller, first - 1
    return trial and fewest_pieces(search, trial)


def best_schedule(search: _Search, family: Recipe) -> Recipe | None:
    """Smaller micro-batches leave the schedule room for more layers: half as many, as long as it costs no more.

    The time of each schedule is known before it is estimated; all gradients are there from the second piece on.
    """
    trials: list[tuple[float, Recipe]] = []
    count, samples = 1 if family.in_backward else search.pieces[-1], search.pieces[-1]
    while count:
        pieces = max(number for number in search.pieces if number <= count)
        trial = replace(family, micro_batches=pieces)
        room = search.budget - (search.held_bytes(trial) if pieces == 1 else search.floor_bytes(trial))
        with suppress(InfeasibleBudget):
            cost = _scheduled(search, replace(trial, schedule_bytes=max(1, room)))
            time = cost.time * samples / math.ceil(samples / pieces)
            if trials and time > trials[-1][0]:
                break
            trials.append((time, trial))
        count = pieces // 2
    best: Recipe | None = None
    for time, trial in reversed(trials):
        if best is None or time < search.estimate(best).flops:
            found = with_schedule(search, trial)
            if search.fits(found) and (best is None or search.estimate(found).flops < search.estimate(best).flops):
                best = found
    return best


def _scheduled(search: _Search, recipe: Recipe) -> Cost:
    return search.estimates.composer_of(recipe).scheduled(recipe)


def with_schedule(search: _Search, recipe: Recipe) -> Recipe:
    """What parameters, state and gradients leave is for the schedule; then what the estimate shows to be left."""
    slack, best = search.budget // 200, None
    room = search.budget - slack // 2 - search.held_bytes(recipe)
    room -= 0 if recipe.in_backward else sum(p.nbytes for p in search.trained)
    for _ in range(3):
        trial = replace(recipe, schedule_bytes=max(1, room))
        try:
            taken = _scheduled(search, trial).peak_bytes
        except InfeasibleBudget:
            break
        spare = search.budget - search.estimate(trial).peak_bytes
        best = trial if spare >= 0 else best
        if 0 <= spare < slack:
            break
        room = (room if spare >= 0 else min(room, taken)) + spare
    if best is None:
        try:
            _scheduled(search, replace(recipe, schedule_bytes=1))
        except InfeasibleBudget as error:  # which says what the least schedule takes
            best = replace(recipe, schedule_bytes=error.least_bytes)
            search.estimate(best)
    return best


def first_that_fits(recipes: Sequence[Recipe], fits: Callable[[Recipe], Any]) -> Recipe | None:
    """The first one that fits, by bisection: where one fits, all after it do."""
    if not recipes or not fits(recipes[-1]):
        return None
    low, high = -1, len(recipes) - 1  # the one at low does not fit, the one at high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(recipes[middle]) else (middle, high)
    return recipes[high]
