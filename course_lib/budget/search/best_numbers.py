"""Find the cheapest recipe of one family that fits the budget.

A family consists of the recipes with the same combination of memory-saving techniques. The recipes
of a family differ in numbers: micro-batches, segments, checkpointed blocks, saved bytes, and copies
in flight. This module chooses these numbers.
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
    """Return the cheapest recipe of a family that fits the memory budget, or None.

    A family consists of all recipes with the same memory-saving techniques. The recipes of a family
    differ only in numbers, such as the number of micro-batches or of segments. The cost of a recipe
    is the estimated duration of its training step.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Any recipe of the family.
    """
    if family.offload_activations:
        return best_in_flight(search, family)
    # If the base recipe sets `checkpoint`, it also sets the number of segments or the memory limit
    # of the schedule. In this case, only the number of micro-batches is searched.
    if family.checkpoint == search.cache.base.checkpoint:
        return fewest_micro_batches(search, family)
    if family.checkpoint == "segments":
        return fewest_segments(search, family)
    return (best_schedule if family.checkpoint == "optimal" else fewest_micro_batches)(
        search, family
    )


def best_in_flight(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Return the cheapest recipe that differs from `family` only in `prefetch` and `in_flight`.

    A recipe is a set of memory-saving techniques. The recipe `family` offloads activations, and the
    two fields limit the numbers of copies that run during the compute. Larger numbers hide more of
    the copying, but need more memory.

    The cost of a recipe is the duration of its step. To save time, the cost is computed from the
    estimate of a step with the smallest `in_flight`, because every value of `in_flight` copies the
    same number of bytes. Then the recipes themselves are estimated, the cheapest first, until one
    fits the memory budget.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Recipe with the smallest values of both fields. It needs less memory than the
            recipes with larger values.

    Returns:
        The cheapest recipe that fits; None if `family` itself does not fit the budget.
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
    """Return a copy of a recipe with the fewest micro-batches with which its step fits, or None.

    Among the numbers above 1, a larger number never needs more memory, because the micro-batches do
    not get larger. The smallest number that fits is therefore found by bisection. The number 1 is
    tried separately, because it can need less memory than 2: with two micro-batches, the
    activations of the second one are live together with all gradients of the first one.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Memory-saving techniques of the step. The field `micro_batches` is replaced.
        counts: Numbers of micro-batches to try, in rising order. By default, the numbers that the
            search allows for this recipe.

    Returns:
        The copy of the recipe; None if the step does not fit with any number of micro-batches.
    """
    one, *more = [
        replace(family, micro_batches=n) for n in counts or search.micro_batch_counts_for(family)
    ]
    return one if search.fits(one) else first_that_fits(more, search.fits)


def first_with_fewest_micro_batches(
    search: RecipeSearch, trials: Sequence[Recipe]
) -> Recipe | None:
    """Find by bisection the first recipe of a sorted sequence that fits the memory budget.

    A recipe is a set of memory-saving techniques. If one recipe of the sequence fits, all later
    recipes must fit, too. During the bisection, each recipe is tried only with the largest and the
    smallest number of micro-batches. It fits if one of these two steps fits.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        trials: Sorted recipes. Their field `micro_batches` is ignored.

    Returns:
        A copy of the first recipe that fits, with the fewest micro-batches with which it fits; None
        if no recipe fits.
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
    """Return a copy of a recipe with the fewest checkpointed segments with which its step fits.

    A segment consists of consecutive blocks, and only the input of the segment is saved. The
    numbers of segments from 2 to the square root of the number of blocks are tried by bisection,
    because in this range each additional segment saves memory. If the step fits with none of these
    numbers, the returned recipe has one segment per block.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Memory-saving techniques of the step, with checkpoint="segments".

    Returns:
        The recipe with this number of segments, and with the fewest micro-batches with which the
        step fits; None if the step does not fit with one segment per block.
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
    """Return a copy of a recipe with the fewest checkpointed blocks with which its step fits.

    Only the first blocks of the model get a checkpoint. The smallest number of checkpoints is found
    by bisection. The bisection is correct if three conditions hold: the blocks are equal, the step
    does not fit without checkpoints, and the step fits with `most` checkpoints. The peak is then a
    convex function of the number of checkpoints. Therefore the step also fits with every number
    between the smallest number that fits and `most`.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        one_block: Memory-saving techniques of a step that checkpoints only the first block.
        most: Largest number of blocks to checkpoint.

    Returns:
        The recipe with this number of checkpointed blocks, and with the fewest micro-batches with
        which the step fits; None if the step does not fit with `most` checkpointed blocks.
    """
    return first_with_fewest_micro_batches(
        search, [replace(one_block, first_blocks=n) for n in range(1, most + 1)]
    )


def best_schedule(search: RecipeSearch, family: Recipe) -> Recipe | None:
    """Find the micro-batches and the schedule with which a recipe is cheapest and fits the budget.

    The cost of a recipe is the duration of its step. A schedule decides which activations are
    saved, and which are recomputed. With smaller micro-batches, a schedule can save the activations
    of more layers.

    The search starts with the largest number of micro-batches, and halves it as long as the step
    does not get slower. To save time, the memory of a step is estimated only if the step may be
    faster than the fastest step found so far that fits.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Memory-saving techniques of the step, with checkpoint="optimal".

    Returns:
        A copy of the recipe with the fields `micro_batches` and `schedule_bytes` found; None if no
        schedule fits.
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
    """Return a copy of a recipe with a fast schedule that fits the memory budget, or None.

    A schedule decides which activations are saved, and which are recomputed. The field
    `schedule_bytes` limits the bytes of activations to the part of the budget that the other
    tensors of the step do not need. This part differs between schedules, so the limit is found by
    trial, in at most `ROUNDS` rounds. Each round narrows the range between a limit with which the
    step fits and a limit with which it does not fit.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        recipe: Memory-saving techniques of the step, with checkpoint="optimal".

    Returns:
        The copy of the recipe; None if the step does not fit even with the schedule that needs the
        least memory.
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

    A schedule decides which activations are saved, and which are recomputed. In the result, `time`
    is a number of FLOPs, and `peak_bytes` is the peak of the activations. If no schedule fits, the
    result is the cost of the schedule that needs the least memory. This function does not estimate
    the training step, so it is fast.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        recipe: Memory-saving techniques of the step, with checkpoint="optimal".
        nbytes: Limit in bytes for the activations.
    """
    cost_of = search.cache.composer.schedule_cost
    try:
        return cost_of(replace(recipe, schedule_bytes=max(1, nbytes)))
    except InfeasibleBudget:
        return cost_of(least_schedule(search, recipe))


def least_schedule(search: RecipeSearch, recipe: Recipe) -> Recipe:
    """Return a copy of a recipe with the smallest `schedule_bytes` for which a schedule exists.

    A recipe is a set of memory-saving techniques for a training step. With checkpoint="optimal",
    its field `schedule_bytes` limits the bytes of activations. A schedule decides which activations
    are saved, and which are recomputed.
    """
    least = 1
    try:
        search.cache.composer.schedule_cost(replace(recipe, schedule_bytes=least))
    except InfeasibleBudget as error:
        least = error.least_bytes
    return replace(recipe, schedule_bytes=least)


def first_that_fits(recipes: Sequence[Recipe], fits: Callable[[Recipe], Any]) -> Recipe | None:
    """Find by bisection the first recipe of a sorted sequence that fits, or return None.

    A recipe is a set of memory-saving techniques. If one recipe of the sequence fits, all later
    recipes must fit, too. Therefore the result is None if the last recipe does not fit, or if the
    sequence is empty.

    Args:
        recipes: Sorted recipes.
        fits: Function that takes a recipe and returns whether the recipe fits.
    """
    if not recipes or not fits(recipes[-1]):
        return None
    # The recipe at index `low` does not fit, and the recipe at index `high` fits.
    low, high = -1, len(recipes) - 1
    while high - low > 1:
        middle = (low + high + 1) // 2
        low, high = (low, middle) if fits(recipes[middle]) else (middle, high)
    return recipes[high]
