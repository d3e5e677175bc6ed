"""Lower bounds on the memory and the cost of recipes that have not been estimated.

The bounds are derived from estimates of other recipes.
"""

from __future__ import annotations

from dataclasses import replace

from course_lib.budget.estimate import Estimate
from course_lib.budget.rates import Rates
from course_lib.budget.recipe import Recipe
from course_lib.offload import chosen_below
from course_lib.symbolic import symbolic

from .estimate_cache import EstimateCache


def held_bytes(known: EstimateCache, recipe: Recipe) -> int:
    """Return the bytes on the device that are live throughout the step.

    They are the bytes of the model and of the part of the optimizer state that is not offloaded.
    """
    key = recipe.offload_optimizer, recipe.optimizer, recipe.update
    if key not in known.held:
        composer = known.composer
        # The bytes of the state do not depend on the page size, so one page size is enough.
        recipe = replace(recipe, page_bytes=known.base.page_bytes)
        below = chosen_below(composer.trained, recipe.offload_optimizer)
        with symbolic(composer.mode):
            state = composer.updates.of_all(recipe, below).held
        model = *known.model.parameters(), *known.model.buffers()
        known.held[key] = state + sum(tensor.nbytes for tensor in model)
    return known.held[key]


def exceeds(known: EstimateCache, recipe: Recipe, limit: int) -> bool:
    """Return whether a lower bound on a recipe's peak is above `limit`, in bytes."""
    # `held_bytes` is compared first, because it needs no estimate.
    return held_bytes(known, recipe) > limit or floor_bytes(known, recipe) > limit


def floor_bytes(known: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the peak of a recipe, in bytes.

    The bound is the larger of two numbers: the bytes that are live throughout the step, and the
    peak of the optimizer step, which does not depend on forward and backward. With `in_backward`,
    the optimizer step counts as 0.
    """
    step = 0 if recipe.in_backward else state_of(known, recipe).phase_peaks["optimizer"]
    return max(held_bytes(known, recipe), step)


def state_of(known: EstimateCache, recipe: Recipe) -> Estimate:
    """Return the estimate of the base recipe with the offload settings of `recipe`.

    These settings are `offload_optimizer`, `in_backward` and `page_bytes`.
    """
    names = ("offload_optimizer", "in_backward", "page_bytes")
    return known.with_base(**{name: getattr(recipe, name) for name in names})


def least_seconds(known: EstimateCache, recipe: Recipe, rates: Rates) -> float:
    """Return a lower bound on the seconds of a recipe's step.

    The bound counts the fewest FLOPs that the recipe can need (`least_flops`). Of the copies, it
    counts only those of the optimizer state.
    """
    down, up = state_moved(known, recipe)
    least = {"flops": least_flops(known, recipe), "bytes_down": down, "bytes_up": up}
    return rates.seconds(replace(state_of(known, recipe), **least))


def state_moved(known: EstimateCache, recipe: Recipe) -> tuple[int, int]:
    """Return two numbers of bytes of optimizer state: copied to the lower tier, and copied back."""
    state, none = state_of(known, recipe), state_of(known, replace(recipe, offload_optimizer=0.0))
    return state.bytes_down - none.bytes_down, state.bytes_up - none.bytes_up


def least_flops(known: EstimateCache, recipe: Recipe) -> int:
    """Return a lower bound on the FLOPs of a recipe's step.

    If a recipe with the same values of the fields in `estimate_cache.COMPUTED` has been estimated,
    the bound is the FLOPs of that recipe. Otherwise the bound is the FLOPs of an estimated recipe
    with fewer techniques, whose step does not need more FLOPs. If no such recipe has been
    estimated, the bound is 0.
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
        if (found := known.known_flops(part)) is not None:
            return found
    return 0


def recomputed_flops(known: EstimateCache, one: Recipe) -> int:
    """Return the FLOPs that the checkpoint of a recipe adds, or 0 if they are not known.

    These FLOPs do not depend on whether the loss head is chunked.
    """
    own = replace(one, head_chunk=known.base.head_chunk)
    plain = replace(own, checkpoint="none", blocks=None, first_blocks=None)
    flops = [known.known_flops(recipe) for recipe in (own, plain)]
    return 0 if None in flops else flops[0] - flops[1]


def moves_nothing(known: EstimateCache, recipe: Recipe) -> bool:
    """Return whether the recipe's step offloads no activation, because none is large enough."""
    return known.estimate(recipe).bytes_down == state_moved(known, recipe)[0]
