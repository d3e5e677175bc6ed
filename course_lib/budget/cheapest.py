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


def best_of(search: _Search, family: Recipe, limit: float = math.inf) -> Recipe | None:
    """The cheapest of the family that fits; segments only if they may take fewer FLOPs than the limit."""
    if family.checkpoint == "segments":
        return fewest_segments(search, family, limit)
    return (best_schedule if family.checkpoint == "optimal" else fewest_pieces)(search, family)


def fewest_segments(search: _Search, family: Recipe, limit: float) -> Recipe | None:
    """As few as fit: of those up to the square root of the layers, where each more takes less memory; or one a layer.

    A segment that is recomputed stops before its last product. Each of its layers costs no less than with a checkpoint
    of its own.
    """
    layers, flops = search.layers, {}
    for name in ("none", "layers"):
        like = replace(family, checkpoint=name, segments=None, head_chunk=None)  # in chunks it takes more
        flops[name] = next((e.flops for recipe, e in search.known.items() if _same_flops(recipe, like)), -math.inf)
    each = max(0.0, flops["layers"] - flops["none"]) / layers
    counts = sorted({2, *range(2, math.isqrt(layers) + 1), layers})
    trials = [n for n in counts if flops["none"] + (n - 1) * (layers // n) * each < limit]

    def fits(recipe: Recipe) -> bool:
        most = 1 if family.in_backward else search.pieces[-1]
        return search.fits(replace(recipe, micro_batches=most)) or search.fits(replace(recipe, micro_batches=1))

    *few, most = [replace(family, segments=count) for count in trials or counts[-1:]]
    if not trials or not fits(most):
        return None
    return fewest_pieces(search, first_that_fits(few, fits) or most)


def _same_flops(recipe: Recipe, other: Recipe) -> bool:
    names = ("attention", "checkpoint", "first_blocks", "segments", "schedule_bytes", "head_chunk")
    return all(getattr(recipe, name) == getattr(other, name) for name in names)


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
            if found is None or not search.fits(found):
                continue
            if best is None or search.estimate(found).flops < search.estimate(best).flops:
                best = found
    return best


def _scheduled(search: _Search, recipe: Recipe) -> Cost:
    return search.estimates.composer_of(recipe).scheduled(recipe)


def with_schedule(search: _Search, recipe: Recipe) -> Recipe | None:
    """What parameters, state and gradients leave is for the schedule; then what the estimate shows to be left.

    None if no schedule fits: what is there besides the activations is there by any of them.
    """
    slack, best, seen = search.budget // 200, None, set()
    gradients = sum(p.nbytes for p in search.trained)
    room = search.budget - search.held_bytes(recipe) - (slack if recipe.in_backward else gradients + slack // 2)
    if (left := search.budget - _besides(search, recipe)) < 0:
        return None
    room = min(room, left)
    for _ in range(3):
        trial = replace(recipe, schedule_bytes=max(1, room))
        try:
            taken = _scheduled(search, trial).peak_bytes
        except InfeasibleBudget:
            break
        if taken in seen:  # the same schedule
            break
        seen.add(taken)
        spare = search.budget - search.estimate(trial).peak_bytes
        best = trial if spare >= 0 else best
        if 0 <= spare < slack or spare + taken < 0:
            return best
        room = (room if spare >= 0 else min(room, taken)) + spare
    return best or least_schedule(search, recipe)


def _besides(search: _Search, recipe: Recipe) -> int:
    """What is there besides the activations of a schedule, or less: as it was with other schedules."""
    alike = replace(recipe, schedule_bytes=1, offload_optimizer=0.0)
    least = 0
    for other, e in search.known.items():
        if other.checkpoint == "optimal" and replace(other, schedule_bytes=1, offload_optimizer=0.0) == alike:
            peak = max(e.phase_peaks["forward"], e.phase_peaks["backward"]) - _scheduled(search, other).peak_bytes
            least = max(least, peak + search.held_bytes(recipe) - search.held_bytes(other) - 4 * len(search.trained))
    return least


def least_schedule(search: _Search, recipe: Recipe) -> Recipe:
    """With the schedule that takes the least memory."""
    least = 1
    try:
        _scheduled(search, replace(recipe, schedule_bytes=least))
    except InfeasibleBudget as error:
        least = error.least_bytes
    return replace(recipe, schedule_bytes=least)


def first_that_fits(recipes: Sequence[Recipe], fits: Callable[[Recipe], Any]) -> Recipe | None:
    """The first one that fits, by bisection: where one fits, all after it do."""
    if not recipes or not fits(recipes[-1]):
        return None
    low, high = -1, len(recipes) - 1  # the one at low does not fit, the one at high does
    while high - low > 1:
        middle = (low + high + 1) // 2
        low, high = (low, middle) if fits(recipes[middle]) else (middle, high)
    return recipes[high]
