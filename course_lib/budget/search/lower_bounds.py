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
    """Return the bytes on the device that are live throughout the training step of a recipe.

    The live bytes are those of the model's parameters and buffers, and the optimizer state that is
    not offloaded.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
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
    """Return whether the peak of a recipe's step is certainly above `limit`, in bytes.

    The result is True if a lower bound on the peak is above the limit. If the result is False, the
    peak may still be above the limit.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
        limit: Limit in bytes.
    """
    # `held_bytes` is compared first, because it needs no estimate.
    return held_bytes(cache, recipe) > limit or floor_bytes(cache, recipe) > limit


def floor_bytes(cache: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the peak memory of a recipe's training step, in bytes.

    The bound is the larger of two numbers: the bytes that are live throughout the step (see
    `held_bytes`), and the peak of the optimizer update, which does not depend on forward and
    backward. With `recipe.in_backward`, there is no separate update after backward, so only the
    first number is used.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
    """
    step = (
        0
        if recipe.in_backward
        else optimizer_state_estimate(cache, recipe).phase_peaks["optimizer"]
    )
    return max(held_bytes(cache, recipe), step)


def optimizer_state_estimate(cache: EstimateCache, recipe: Recipe) -> Estimate:
    """Return an estimate of a step that has the same optimizer update as a recipe's step.

    The result is the estimate of the base recipe (`cache.base`) with the fields
    `offload_optimizer`, `in_backward` and `page_bytes` of `recipe`. All recipes with the same
    values of these fields share the estimate.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
    """
    names = ("offload_optimizer", "in_backward", "page_bytes")
    return cache.with_base(**{name: getattr(recipe, name) for name in names})


def least_seconds(cache: EstimateCache, recipe: Recipe, rates: Rates) -> float:
    """Return a lower bound on the duration of a recipe's training step, in seconds.

    The bound is computed from the fewest FLOPs that the step can need (see `least_flops`) and from
    the copies of the optimizer state. Copies of activations are not counted.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
        rates: Speed of the machine.
    """
    down, up = offloaded_state_traffic(cache, recipe)
    least = {"flops": least_flops(cache, recipe), "bytes_down": down, "bytes_up": up}
    return rates.seconds(replace(optimizer_state_estimate(cache, recipe), **least))


def offloaded_state_traffic(cache: EstimateCache, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes that are copied because a recipe offloads optimizer state.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.

    Returns:
        The pair (bytes copied to the lower tier, bytes copied back). The lower tier is host memory
        or a file.
    """
    state, none = (
        optimizer_state_estimate(cache, recipe),
        optimizer_state_estimate(cache, replace(recipe, offload_optimizer=0.0)),
    )
    return state.bytes_down - none.bytes_down, state.bytes_up - none.bytes_up


def least_flops(cache: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the FLOPs of a recipe's training step.

    The bound is the number of FLOPs of a cached estimate with the same operators as `recipe`. If
    the cache has no such estimate, it is searched for an estimate of the recipe without its chunked
    loss head, then without its checkpoints, then without both. A step without these techniques does
    not need more FLOPs. If the cache has none of these estimates, the bound is 0.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
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
    """Return the FLOPs that a recipe's checkpoints add, or 0 if they are not known.

    The result is the difference between two cached estimates, one with and one without the
    checkpoints. The FLOPs are not known if one of these estimates is missing. The loss head of
    `checkpointed` is ignored, because the difference does not depend on it.

    Args:
        cache: Cache of estimates for the model and the batch.
        checkpointed: Recipe with checkpoints, for example around the first block only.
    """
    own = replace(checkpointed, head_chunk=cache.base.head_chunk)
    plain = replace(own, checkpoint="none", blocks=None, first_blocks=None)
    flops = [cache.known_flops(recipe) for recipe in (own, plain)]
    return 0 if None in flops else flops[0] - flops[1]


def offloads_no_activation(cache: EstimateCache, recipe: Recipe) -> bool:
    """Return whether the step of a recipe copies no activation to host memory or to a file.

    Even with `offload_activations`, no activation is copied if all saved tensors are smaller than
    `min_bytes`.

    Args:
        cache: Cache of estimates for the model and the batch.
        recipe: Memory-saving techniques of the step.
    """
    return cache.estimate(recipe).bytes_down == offloaded_state_traffic(cache, recipe)[0]
