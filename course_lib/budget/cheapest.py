"""The cheapest recipe of one combination of techniques: how many micro-batches, segments, blocks, schedule bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.schedule import Cost

from .known import Search
from .recipe import Recipe


def best_of(search: Search, family: Recipe, limit: float = math.inf) -> Recipe | None:
    """The cheapest of the family that fits; segments only if they may take fewer FLOPs than the limit."""
    if family.offload_activations:
        return family if search.fits(family) else None
    if family.checkpoint == search.known.base.checkpoint:  # with as many segments or bytes as the base says
        return fewest_pieces(search, family)
    if family.checkpoint == "segments":
        return fewest_segments(search, family, limit)
    return (best_schedule if family.checkpoint == "optimal" else fewest_pieces)(search, family)


def fewest_pieces(search: Search, family: Recipe, pieces: Sequence[int] = ()) -> Recipe | None:
    """With as few micro-batches as fit. One has no full set of gradients beside its activations, so it is tried.

    From two on, each more takes less memory: a piece has no more samples than before.
    """
    one, *more = [replace(family, micro_batches=n) for n in pieces or search.known.pieces_for(family)]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def first_pieces(search: Search, trials: Sequence[Recipe]) -> Recipe | None:
    """The first of them that fits with some number of micro-batches, by bisection; with as few as fit."""

    def fits(recipe: Recipe) -> bool:
        most, least = search.known.pieces_for(recipe)[-1], search.known.pieces_for(recipe)[0]
        return search.fits(replace(recipe, micro_batches=most)) or search.fits(replace(recipe, micro_batches=least))

    first = first_that_fits(trials, fits)
    return first and fewest_pieces(search, first)


def fewest_segments(search: Search, family: Recipe, limit: float) -> Recipe | None:
    """As few as fit: of those up to the square root of the layers, where each more takes less memory; or one a layer.

    A segment that is recomputed stops before its last product. Each of its layers costs no less than with a checkpoint
    of its own.
    """
    known, layers = search.known, search.known.layers
    # In chunks the head takes more; of what was not estimated nothing is known.
    without, each = (known.known_flops(replace(family, segments=None, head_chunk=None, checkpoint=name, blocks=None))
                     for name in ("none", "layers"))  # fmt: skip
    each = max(0, each - without) / layers if each and without else 0
    counts = sorted({*range(2, math.isqrt(layers) + 1), layers})
    *few, most = [
        replace(family, segments=n) for n in counts if not without or without + (n - 1) * (layers // n) * each < limit
    ] or [None]
    if most is None or not first_pieces(search, [most]):
        return None
    return first_pieces(search, few) or first_pieces(search, [most])


def fewest_blocks(search: Search, plain: Recipe) -> Recipe | None:
    """Checkpoints around as few of the first blocks as fit.

    Of equal blocks each adds as much to each moment, so that the peak is convex in the number of those with a
    checkpoint: where none is too few and all but the last are enough, there is one number from which on all are.
    """
    blocks = replace(plain, checkpoint="layers", blocks=search.known.blocks)
    return first_pieces(search, [replace(blocks, first_blocks=n) for n in range(1, search.known.layers)])


def best_schedule(search: Search, family: Recipe) -> Recipe | None:
    """Smaller micro-batches leave the schedule room for more layers: half as many, as long as it costs no more.

    The time of each schedule is known before it is estimated; all gradients are there from the second piece on.
    """
    trials: list[tuple[float, Recipe]] = []
    known = search.known
    allowed, samples = known.pieces_for(family), known.pieces[-1]
    count = allowed[-1]
    while count >= allowed[0]:
        pieces = max(number for number in allowed if number <= count)
        trial = replace(family, micro_batches=pieces)
        room = search.budget - (known.held_bytes(trial) if pieces == 1 else known.floor_bytes(trial))
        with suppress(InfeasibleBudget):
            cost = _scheduled(search, replace(trial, schedule_bytes=max(1, room)))
            time = cost.time * samples / math.ceil(samples / pieces)
            if trials and time > trials[-1][0]:
                break
            trials.append((time, trial))
        count = pieces // 2
    best: Recipe | None = None
    for time, trial in reversed(trials):
        if best is None or time < search.flops(best):
            found = with_schedule(search, trial)
            if found is None or not search.fits(found):
                continue
            if best is None or search.flops(found) < search.flops(best):
                best = found
    return best


def _scheduled(search: Search, recipe: Recipe) -> Cost:
    return search.known.composer.scheduled(recipe)


def with_schedule(search: Search, recipe: Recipe) -> Recipe | None:
    """What parameters, state and gradients leave is for the schedule; then what the estimate shows to be left.

    None if no schedule fits: what is there besides the activations is there by any of them.
    """
    slack, best, seen = search.budget // 200, None, set()
    gradients = sum(p.nbytes for p in search.known.composer.trained)
    room = search.budget - search.known.held_bytes(recipe) - (slack if recipe.in_backward else gradients + slack // 2)
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
        spare = search.budget - search.known.estimate(trial).peak_bytes
        best = trial if spare >= 0 else best
        if 0 <= spare < slack or spare + taken < 0:
            return best
        room = (room if spare >= 0 else min(room, taken)) + spare
    return best or least_schedule(search, recipe)


def _besides(search: Search, recipe: Recipe) -> int:
    """What is there besides the activations of a schedule, or less: as it was with other schedules."""
    alike = replace(recipe, schedule_bytes=1, offload_optimizer=0.0)
    least, held_bytes = 0, search.known.held_bytes
    for other, e in search.known.estimates.items():
        if other.checkpoint == "optimal" and replace(other, schedule_bytes=1, offload_optimizer=0.0) == alike:
            peak = max(e.phase_peaks["forward"], e.phase_peaks["backward"]) - _scheduled(search, other).peak_bytes
            least = max(least, peak + held_bytes(recipe) - held_bytes(other))
    return least


def least_schedule(search: Search, recipe: Recipe) -> Recipe:
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
