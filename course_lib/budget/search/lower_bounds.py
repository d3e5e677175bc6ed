"""Lower bounds on the memory and the cost of recipes that have not been estimated.

The bounds are derived from estimates of other recipes. With them, the search skips recipes that
cannot fit the budget or cannot be the cheapest.
"""

from __future__ import annotations

from dataclasses import replace

from course_lib.budget.estimate import Estimate
from course_lib.budget.rates import Rates
from course_lib.budget.recipe import Recipe
from course_lib.offload import chosen_below
from course_lib.symbolic import symbolic

from .estimate_cache import EstimateCache


def held_bytes(cache: EstimateCache, recipe: Recipe) -> int:
    """Return the bytes on the device that are live throughout the step of a recipe.

    These are the model's parameters and buffers, and the optimizer state that is not offloaded.
    """
    key = recipe.offload_optimizer, recipe.optimizer, recipe.update
    if key not in cache.held:
        composer = cache.composer
        # The bytes of the state do not depend on the page size, so one page size is enough.
        recipe = replace(recipe, page_bytes=cache.base.page_bytes)
        offloaded = chosen_below(composer.trained, recipe.offload_optimizer)
        with symbolic(composer.mode):
            state = composer.updates.update_of_all(recipe, offloaded).held
        model = *cache.model.parameters(), *cache.model.buffers()
        cache.held[key] = state + sum(tensor.nbytes for tensor in model)
    return cache.held[key]


def exceeds(cache: EstimateCache, recipe: Recipe, limit: int) -> bool:
    """Return whether a lower bound on a recipe's peak is above `limit`, in bytes."""
    # `held_bytes` is compared first, because it needs no estimate.
    return held_bytes(cache, recipe) > limit or floor_bytes(cache, recipe) > limit


def floor_bytes(cache: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the peak of a recipe, in bytes.

    The bound is the larger of two numbers: the bytes that are live throughout the step, and the
    peak of the optimizer step, which does not depend on forward and backward. With `in_backward`
    there is no separate optimizer step, so only the first number counts.
    """
    step = (
        0
        if recipe.in_backward
        else optimizer_state_estimate(cache, recipe).phase_peaks["optimizer"]
    )
    return max(held_bytes(cache, recipe), step)


def optimizer_state_estimate(cache: EstimateCache, recipe: Recipe) -> Estimate:
    """Return the estimate of the base recipe with the offload settings of `recipe`.

    These settings are `offload_optimizer`, `in_backward` and `page_bytes`. The estimate has the
    optimizer step of `recipe`, and all recipes with these settings share it.
    """
    names = ("offload_optimizer", "in_backward", "page_bytes")
    return cache.with_base(**{name: getattr(recipe, name) for name in names})


def least_seconds(cache: EstimateCache, recipe: Recipe, rates: Rates) -> float:
    """Return a lower bound on the seconds of a recipe's step.

    The bound counts the fewest FLOPs that the recipe can need (`least_flops`). Of the copies, it
    counts only those of the optimizer state.
    """
    down, up = offloaded_state_traffic(cache, recipe)
    least = {"flops": least_flops(cache, recipe), "bytes_down": down, "bytes_up": up}
    return rates.seconds(replace(optimizer_state_estimate(cache, recipe), **least))


def offloaded_state_traffic(cache: EstimateCache, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of optimizer state copied to the lower tier, and the bytes copied back."""
    state, none = (
        optimizer_state_estimate(cache, recipe),
        optimizer_state_estimate(cache, replace(recipe, offload_optimizer=0.0)),
    )
    return state.bytes_down - none.bytes_down, state.bytes_up - none.bytes_up


def least_flops(cache: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the FLOPs of a recipe's step.

    The bound is the FLOPs of an estimated recipe that does not need more. It equals `recipe` in the
    fields of `estimate_cache.FLOPS_FIELDS`, or else differs only in using no chunked head, no
    checkpoints, or neither. If no such recipe has been estimated, the bound is 0.
    """
    plain = replace(
        recipe,
        checkpoint="none",
        blocks=None,
        first_blocks=None,
        segments=None,
        schedule_bytes=None,
    )
    for part in (
        recipe,
        replace(recipe, head_chunk=None),
        plain,
        replace(plain, head_chunk=None),
    ):
        if (found := cache.known_flops(part)) is not None:
            return found
    return 0


def recomputed_flops(cache: EstimateCache, checkpointed: Recipe) -> int:
    """Return the FLOPs that a recipe's checkpoint adds, or 0 if they are not known.

    They are the difference between two stored estimates, with and without the checkpoint. Both have
    the base recipe's loss head, because these FLOPs do not depend on the loss head.

    Args:
        cache: Estimates of the model and batch.
        checkpointed: Recipe with a checkpoint, such as one around the first block.
    """
    own = replace(checkpointed, head_chunk=cache.base.head_chunk)
    plain = replace(own, checkpoint="none", blocks=None, first_blocks=None)
    flops = [cache.known_flops(recipe) for recipe in (own, plain)]
    return 0 if None in flops else flops[0] - flops[1]


def offloads_no_activation(cache: EstimateCache, recipe: Recipe) -> bool:
    """Return whether the recipe's step copies no activation to the lower tier."""
    return cache.estimate(recipe).bytes_down == offloaded_state_traffic(cache, recipe)[0]
