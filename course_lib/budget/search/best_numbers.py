"""Find the cheapest recipe of one family that fits the budget.

A family is one combination of techniques. This module chooses the numbers in its recipe:
micro-batches, segments, blocks, schedule bytes and copies in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.budget.recipe import Recipe
from course_lib.schedule import Cost

from .candidates import Search
from .lower_bounds import floor_bytes, held_bytes

# Largest number of schedules that are estimated per family and number of micro-batches, in addition
# to the schedule that needs the least memory.
ROUNDS = 3


def best_of(search: Search, family: Recipe) -> Recipe | None:
    """Return the cheapest recipe of the family that fits the budget, or None if none fits."""
    if family.offload_activations:
        return best_copies(search, family)
    # The base recipe fixes the checkpoints, so the number of segments or bytes is fixed as well.
    if family.checkpoint == search.known.base.checkpoint:
        return fewest_micro_batches(search, family)
    if family.checkpoint == "segments":
        return fewest_segments(search, family)
    return (best_schedule if family.checkpoint == "optimal" else fewest_micro_batches)(
        search, family
    )


def best_copies(search: Search, family: Recipe) -> Recipe | None:
    """Return the cheapest recipe that fits, for the best number of copies in flight, or None.

    The given recipe `family` has the fewest copies in flight. If it does not fit, the result is
    None. The number of copies to the lower tier changes the cost but not the bytes that are moved.
    Therefore the cost is computed from the estimate with the fewest of these copies. Then the
    recipes are estimated from the cheapest one on, until one fits.
    """
    if not search.fits(family):
        return None
    priced = []
    for copies in search.copies_for(family):
        trial = replace(family, **copies)
        fewest = replace(trial, in_flight=family.in_flight)
        if search.fits(fewest):
            priced.append(replace(search.known.estimate(fewest), recipe=trial))
    return next(filter(search.fits, (found.recipe for found in sorted(priced, key=search.order))))


def fewest_micro_batches(
    search: Search, family: Recipe, counts: Sequence[int] = ()
) -> Recipe | None:
    """Return the family's recipe with the fewest micro-batches that fits, or None.

    From two micro-batches on, a larger number needs no more memory, because the micro-batches do
    not get larger. A single micro-batch is tried separately, because its activations are not live
    together with all gradients.
    """
    one, *more = [replace(family, micro_batches=n) for n in counts or search.counts_for(family)]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def first_with_fewest(search: Search, trials: Sequence[Recipe]) -> Recipe | None:
    """Return the first recipe that fits with some number of micro-batches, or None.

    The result has the fewest micro-batches with which the recipe fits. The recipe is found by
    bisection, so all recipes after it must fit as well.
    """

    def fits(recipe: Recipe) -> bool:
        most, least = search.counts_for(recipe)[-1], search.counts_for(recipe)[0]
        return search.fits(replace(recipe, micro_batches=most)) or search.fits(
            replace(recipe, micro_batches=least)
        )

    first = first_that_fits(trials, fits)
    return first and fewest_micro_batches(search, first)


def fewest_segments(search: Search, family: Recipe) -> Recipe | None:
    """Return the family's recipe with the fewest segments that fits, or None.

    Up to the square root of the number of blocks, each additional segment saves memory. Above the
    square root, only one segment per block is tried.
    """
    blocks = search.known.segments
    few = range(2, math.isqrt(blocks) + 1)
    most = replace(family, segments=blocks)
    if not first_with_fewest(search, [most]):
        return None
    return first_with_fewest(
        search, [replace(family, segments=count) for count in few]
    ) or first_with_fewest(search, [most])


def fewest_blocks(search: Search, one: Recipe, most: int) -> Recipe | None:
    """Return the recipe that fits with the fewest leading blocks checkpointed, or None.

    At most `most` blocks are checkpointed. Each equal block adds the same number of bytes at each
    moment, so the peak is a convex function of the number of checkpointed blocks. Therefore, if the
    step does not fit without checkpoints but fits with `most` of them, there is a smallest number
    of checkpoints with which the step fits, and the step also fits with every larger number up to
    `most`. The smallest number is found by bisection.
    """
    return first_with_fewest(search, [replace(one, first_blocks=n) for n in range(1, most + 1)])


def best_schedule(search: Search, family: Recipe) -> Recipe | None:
    """Return the family's cheapest recipe with a schedule that fits, or None.

    With smaller micro-batches, the schedule can keep the activations of more layers. The search
    starts from the smallest micro-batches and halves the number of micro-batches as long as the
    step does not get slower. The time of a schedule is computed before its step is estimated. From
    two micro-batches on, fewer bytes are left for activations, because all gradients exist while
    the later micro-batches run.
    """
    known = search.known
    trials: list[tuple[float, Recipe]] = []
    allowed = search.counts_for(family)
    samples = search.counts[-1]
    count = allowed[-1]
    while count >= allowed[0]:
        number = max(number for number in allowed if number <= count)
        trial = replace(family, micro_batches=number)
        room = search.budget - (
            held_bytes(known, trial) if number == 1 else floor_bytes(known, trial)
        )
        time = fastest_within(search, trial, room).time * samples / math.ceil(samples / number)
        if trials and time > trials[-1][0]:
            break
        trials.append((time, trial))
        count = number // 2
    best: Recipe | None = None
    for time, trial in reversed(trials):
        if best is None or time < search.flops(best):
            found = with_schedule(search, trial)
            if found and (best is None or search.flops(found) < search.flops(best)):
                best = found
    return best


def with_schedule(search: Search, recipe: Recipe) -> Recipe | None:
    """Return the recipe with a fast schedule that fits, or None.

    The result is None if even the schedule with the least memory does not fit. The bytes that are
    left for activations are the budget minus all other live bytes. These other bytes differ from
    schedule to schedule. Therefore the limit for the schedule is found in rounds, between a limit
    that fits and a limit that does not.
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
    """Return the cost of the fastest schedule whose activations take at most `nbytes` bytes.

    If there is no such schedule, return the cost of the schedule that needs the least memory. No
    step is estimated.
    """
    cost_of = search.known.composer.schedule_cost
    try:
        return cost_of(replace(recipe, schedule_bytes=max(1, nbytes)))
    except InfeasibleBudget:
        return cost_of(least_schedule(search, recipe))


def least_schedule(search: Search, recipe: Recipe) -> Recipe:
    """Return the recipe with the schedule that needs the least memory."""
    least = 1
    try:
        search.known.composer.schedule_cost(replace(recipe, schedule_bytes=least))
    except InfeasibleBudget as error:
        least = error.least_bytes
    return replace(recipe, schedule_bytes=least)


def first_that_fits(recipes: Sequence[Recipe], fits: Callable[[Recipe], Any]) -> Recipe | None:
    """Return the first recipe of the sequence that fits, or None if the last one does not fit.

    It is found by bisection. Therefore, if a recipe of the sequence fits, all later ones must fit
    too.
    """
    if not recipes or not fits(recipes[-1]):
        return None
    # The recipe at `low` does not fit, and the one at `high` does.
    low, high = -1, len(recipes) - 1
    while high - low > 1:
        middle = (low + high + 1) // 2
        low, high = (low, middle) if fits(recipes[middle]) else (middle, high)
    return recipes[high]
