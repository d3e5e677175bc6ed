"""Find the cheapest recipe of one family that fits the budget.

A family consists of the recipes with the same combination of techniques. They differ in the numbers
that this module chooses: micro-batches, segments, blocks, schedule bytes and copies in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from course_lib._check import InfeasibleBudget
from course_lib.budget.recipe import Recipe
from course_lib.schedule import Cost

from .candidates import RecipeSearch
from .lower_bounds import floor_bytes, held_bytes

# Largest number of schedules that are estimated per family and number of micro-batches, in addition
# to the schedule that needs the least memory.
ROUNDS = 3


def best_of(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Return the cheapest recipe with the techniques of `family` that fits the budget, or None."""
    if family.offload_activations:
        return best_in_flight(search, family)
    # The base recipe fixes the checkpoints, so the number of segments or bytes is fixed as well.
    if family.checkpoint == search.cache.base.checkpoint:
        return fewest_micro_batches(search, family)
    if family.checkpoint == "segments":
        return fewest_segments(search, family)
    return (best_schedule if family.checkpoint == "optimal" else fewest_micro_batches)(
        search, family
    )


def best_in_flight(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Return the family's recipe with the best numbers of copies in flight, or None.

    The given recipe `family` has the fewest copies in flight, which need the least memory. If it
    does not fit, the result is None. The number of copies to the lower tier changes the cost, but
    not the bytes that are moved. Therefore the cost of each recipe is computed from the estimate
    with the fewest of these copies. Then the recipes are estimated, starting with the cheapest one,
    until one fits.
    """
    if not search.fits(family):
        return None
    priced = []
    for copies in search.copies_for(family):
        trial = replace(family, **copies)
        fewest = replace(trial, in_flight=family.in_flight)
        if search.fits(fewest):
            priced.append(replace(search.cache.estimate(fewest), recipe=trial))
    return next(
        filter(search.fits, (found.recipe for found in sorted(priced, key=search.sort_key)))
    )


def fewest_micro_batches(
    search: RecipeSearch, family: Recipe, counts: Sequence[int] = ()
) -> Recipe | None:
    """Return the family's recipe with the fewest micro-batches that fits, or None.

    With two or more micro-batches, a larger number never needs more memory, because the
    micro-batches do not get larger. A single micro-batch is tried separately, because its
    activations are not live together with all gradients.

    Args:
        search: The search.
        family: A recipe of the family.
        counts: Numbers of micro-batches in rising order. The default is those of the search.
    """
    one, *more = [
        replace(family, micro_batches=n) for n in counts or search.micro_batch_counts_for(family)
    ]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def first_with_fewest_micro_batches(
    search: RecipeSearch, trials: Sequence[Recipe]
) -> Recipe | None:
    """Return the first of several recipes that fits, with the fewest micro-batches, or None.

    A recipe counts as one that fits if it does so with the largest or the smallest number of
    micro-batches. The recipe is found by bisection, so all recipes after it must fit as well.
    """

    def fits(recipe: Recipe) -> bool:
        most, least = (
            search.micro_batch_counts_for(recipe)[-1],
            search.micro_batch_counts_for(recipe)[0],
        )
        return search.fits(replace(recipe, micro_batches=most)) or search.fits(
            replace(recipe, micro_batches=least)
        )

    first = first_that_fits(trials, fits)
    return first and fewest_micro_batches(search, first)


def fewest_segments(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Return the family's recipe with the fewest segments that fits, or None.

    Up to the square root of the number of blocks, each additional segment saves memory. Above the
    square root, only one segment per block is tried.
    """
    blocks = search.cache.segments
    few = range(2, math.isqrt(blocks) + 1)
    most = replace(family, segments=blocks)
    if not first_with_fewest_micro_batches(search, [most]):
        return None
    return first_with_fewest_micro_batches(
        search, [replace(family, segments=count) for count in few]
    ) or first_with_fewest_micro_batches(search, [most])


def fewest_blocks(search: RecipeSearch, one_block: Recipe, most: int) -> Recipe | None:
    """Return the recipe that fits with the fewest leading blocks checkpointed, or None.

    Each equal block adds the same number of bytes at each point of the step, so the peak is a
    convex function of the number of checkpointed blocks. Therefore, if the step does not fit
    without checkpoints but fits with `most` of them, there is a smallest number of checkpoints with
    which the step fits, and the step also fits with every larger number up to `most`. The smallest
    number is found by bisection.

    Args:
        search: The search.
        one_block: Recipe that checkpoints only the first block.
        most: Largest number of blocks to checkpoint.
    """
    return first_with_fewest_micro_batches(
        search, [replace(one_block, first_blocks=n) for n in range(1, most + 1)]
    )


def best_schedule(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Return the family's cheapest recipe with a schedule that fits, or None.

    With smaller micro-batches, the schedule can keep the activations of more layers. The search
    starts from the smallest micro-batches and halves their number as long as the step does not get
    slower. The time of a schedule is computed without an estimate, so a schedule is not estimated
    if it cannot be faster than the best one found. With two or more micro-batches, fewer bytes
    remain for activations, because all gradients exist while the later micro-batches run.
    """
    cache = search.cache
    trials: list[tuple[float, Recipe]] = []
    allowed = search.micro_batch_counts_for(family)
    samples = search.micro_batch_counts[-1]
    count = allowed[-1]
    while count >= allowed[0]:
        number = max(number for number in allowed if number <= count)
        trial = replace(family, micro_batches=number)
        tensor_budget = search.budget - (
            held_bytes(cache, trial) if number == 1 else floor_bytes(cache, trial)
        )
        time = (
            fastest_within(search, trial, tensor_budget).time
            * samples
            / math.ceil(samples / number)
        )
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


def with_schedule(search: RecipeSearch, recipe: Recipe) -> Recipe | None:
    """Return the recipe with a fast schedule that fits, or None.

    The result is None if even the schedule with the least memory does not fit. A schedule may use
    the budget minus all bytes that are not its activations. As these other bytes differ from
    schedule to schedule, the limit `schedule_bytes` is found in at most `ROUNDS` rounds, which
    narrow the range between a limit with which the step fits and a limit with which it does not.
    """
    best = least_schedule(search, recipe)
    if not search.fits(best):
        return None
    taken = low = best.schedule_bytes
    high = math.inf
    spare = search.headroom_bytes(best)
    for _ in range(ROUNDS):
        taken = fastest_within(search, recipe, min(taken + spare, high - 1)).peak_bytes
        if taken <= low or 0 <= spare < search.budget // 200:
            break
        trial = replace(recipe, schedule_bytes=taken)
        spare = search.headroom_bytes(trial)
        if spare >= 0:
            best = trial
            low = taken
        else:
            high = taken
    return best


def fastest_within(search: RecipeSearch, recipe: Recipe, nbytes: int) -> Cost:
    """Return the cost of the fastest schedule whose activations need at most `nbytes` bytes.

    If there is no such schedule, the cost is that of the schedule that needs the least memory. The
    cost is computed from the measured chain, without an estimate of the step.
    """
    cost_of = search.cache.composer.schedule_cost
    try:
        return cost_of(replace(recipe, schedule_bytes=max(1, nbytes)))
    except InfeasibleBudget:
        return cost_of(least_schedule(search, recipe))


def least_schedule(search: RecipeSearch, recipe: Recipe) -> Recipe:
    """Return the recipe with the smallest `schedule_bytes` for which a schedule exists."""
    least = 1
    try:
        search.cache.composer.schedule_cost(replace(recipe, schedule_bytes=least))
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
