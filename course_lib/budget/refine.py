"""The cheapest recipe of one combination of techniques: how many micro-batches, segments, blocks,
schedule bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.schedule import Cost

from .knowledge import Search
from .recipe import Recipe

# estimates of schedules for one family and number of micro-batches, besides that of the least
ROUNDS = 3


def refine(search: Search, family: Recipe) -> Recipe | None:
    """The cheapest of the family that fits."""
    if family.offload_activations:
        return best_copies(search, family)
    # with as many segments or bytes as the base says
    if family.checkpoint == search.known.base.checkpoint:
        return fewest_pieces(search, family)
    if family.checkpoint == "segments":
        return fewest_segments(search, family)
    return (best_schedule if family.checkpoint == "optimal" else fewest_pieces)(search, family)


def best_copies(search: Search, family: Recipe) -> Recipe | None:
    """The recipe with the cheapest number of activations' copies under way that fits; None where
    the fewest, the family's own, do not fit.

    How many go down at a time changes the price but not what is moved, so that each number is
    priced before it is estimated.
    """
    if not search.fits(family):
        return None
    priced = []
    for copies in search.known.copies_for(family):
        trial = replace(family, **copies)
        fewest = replace(trial, in_flight=family.in_flight)
        if search.fits(fewest):
            priced.append(replace(search.known.estimate(fewest), recipe=trial))
    return next(filter(search.fits, (found.recipe for found in sorted(priced, key=search.order))))


def fewest_pieces(search: Search, family: Recipe, pieces: Sequence[int] = ()) -> Recipe | None:
    """The recipe with as few micro-batches as fit; None if no number does. A single one is tried
    first: it has no full set of gradients beside its activations.

    From two on, each more takes less memory: a piece has no more samples than before.
    """
    one, *more = [
        replace(family, micro_batches=n) for n in pieces or search.known.pieces_for(family)
    ]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def first_pieces(search: Search, trials: Sequence[Recipe]) -> Recipe | None:
    """The first of them that fits with some number of micro-batches, by bisection; with as few as
    fit."""

    def fits(recipe: Recipe) -> bool:
        most, least = search.known.pieces_for(recipe)[-1], search.known.pieces_for(recipe)[0]
        return search.fits(replace(recipe, micro_batches=most)) or search.fits(
            replace(recipe, micro_batches=least)
        )

    first = first_that_fits(trials, fits)
    return first and fewest_pieces(search, first)


def fewest_segments(search: Search, family: Recipe) -> Recipe | None:
    """The fewest segments that fit: of those up to the square root of the blocks, where each more
    takes less; or one a block."""
    blocks = search.known.segments
    few = range(2, math.isqrt(blocks) + 1)
    most = replace(family, segments=blocks)
    if not first_pieces(search, [most]):
        return None
    return first_pieces(search, [replace(family, segments=count) for count in few]) or first_pieces(
        search, [most]
    )


def fewest_blocks(search: Search, one: Recipe, most: int) -> Recipe | None:
    """Checkpoints around as few of the first blocks as fit, and no more than the most.

    Of equal blocks each adds as much to each moment, so that the peak is convex in the number of
    those with a checkpoint: where none is too few and the most are enough, there is one number from
    which on all are.
    """
    return first_pieces(search, [replace(one, first_blocks=n) for n in range(1, most + 1)])


def best_schedule(search: Search, family: Recipe) -> Recipe | None:
    """The cheapest recipe with a schedule: smaller micro-batches leave it room to keep more layers,
    so that their number is halved for as long as that costs no more.

    The time of each schedule is known before it is estimated; all gradients are there from the
    second piece on.
    """
    known = search.known
    trials: list[tuple[float, Recipe]] = []
    allowed = known.pieces_for(family)
    samples = known.pieces[-1]
    count = allowed[-1]
    while count >= allowed[0]:
        pieces = max(number for number in allowed if number <= count)
        trial = replace(family, micro_batches=pieces)
        room = search.budget - (
            known.held_bytes(trial) if pieces == 1 else known.floor_bytes(trial)
        )
        time = fastest_within(search, trial, room).time * samples / math.ceil(samples / pieces)
        if trials and time > trials[-1][0]:
            break
        trials.append((time, trial))
        count = pieces // 2
    best: Recipe | None = None
    for time, trial in reversed(trials):
        if best is None or time < search.flops(best):
            found = with_schedule(search, trial)
            if found and (best is None or search.flops(found) < search.flops(best)):
                best = found
    return best


def with_schedule(search: Search, recipe: Recipe) -> Recipe | None:
    """A fast schedule that fits; None where the one that takes the least does not.

    The room for activations is what the budget leaves beside all else that there was with another
    schedule; as that is not the same with each, it is found in rounds, between what fits and what
    does not.
    """
    best = least_schedule(search, recipe)
    if not search.fits(best):
        return None
    taken = low = best.schedule_bytes
    high = math.inf
    spare = search.spare(best)
    for _ in range(ROUNDS):
        taken = fastest_within(search, recipe, min(taken + spare, high - 1)).peak_bytes
        if taken <= low or 0 <= spare < search.budget // 200:
            break
        trial = replace(recipe, schedule_bytes=taken)
        spare = search.spare(trial)
        if spare >= 0:
            best = trial
            low = taken
        else:
            high = taken
    return best


def fastest_within(search: Search, recipe: Recipe, nbytes: int) -> Cost:
    """Cost of the fastest schedule in so many bytes; where there is none, of the one that takes the
    least."""
    try:
        return scheduled(search, replace(recipe, schedule_bytes=max(1, nbytes)))
    except InfeasibleBudget:
        return scheduled(search, least_schedule(search, recipe))


def scheduled(search: Search, recipe: Recipe) -> Cost:
    return search.known.composer.scheduled(recipe)


def least_schedule(search: Search, recipe: Recipe) -> Recipe:
    """The recipe with the schedule that takes the least memory."""
    least = 1
    try:
        scheduled(search, replace(recipe, schedule_bytes=least))
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
