"""Decide which families of recipes are searched or skipped, and which recipes are returned.

A family consists of the recipes with the same combination of memory-saving techniques. The recipes
differ only in numbers, such as the number of micro-batches. The module `best_numbers` finds the
best of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import product

from course_lib._check import InfeasibleBudget
from course_lib.budget.estimate import Estimate
from course_lib.budget.loss import CHAINED
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import model_of
from course_lib.budget.techniques import BY_FIELD
from course_lib.budget.traces import rank_trace as rank
from course_lib.symbolic import symbolic

from .best_numbers import best_of, fewest_blocks, fewest_micro_batches, least_schedule
from .candidates import RecipeSearch
from .lower_bounds import (
    exceeds,
    floor_bytes,
    least_seconds,
    offloads_no_activation,
    recomputed_flops,
)


def fit_given_recipes(
    search: RecipeSearch, recipes: Iterable[Recipe]
) -> tuple[list[Estimate], list[Estimate]]:
    """Estimate the given recipes, and select those that fit the memory budget of the search.

    A recipe for which no schedule fits into its own `schedule_bytes` cannot be estimated. It is
    skipped, so neither of the two returned lists contains it.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        recipes: Recipes to estimate.

    Returns:
        Two lists: the estimates of the recipes that fit the memory budget, and the estimates of all
        recipes that were not skipped.
    """
    tried = []
    for recipe in dict.fromkeys(recipes):
        # InfeasibleBudget means that no schedule fits the recipe's own schedule_bytes.
        with suppress(InfeasibleBudget):
            tried.append(search.cache.estimate(recipe))
    return [e for e in tried if e.peak_bytes <= search.budget], tried


def fit_on_ranks(search: RecipeSearch, base: Recipe) -> tuple[list[Estimate], list[Estimate]]:
    """Find the recipes for several ranks that fit the memory budget of the search.

    The search tries combinations of the fields `shard`, `checkpoint` and `attention`, each with the
    fewest micro-batches with which the step fits. Checkpoints are tried only if the step does not
    fit without them.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        base: Recipe with several ranks (processes). Every recipe that is tried has the same values
            as `base` in all fields except `shard`, `checkpoint`, `blocks`, `attention` and
            `micro_batches`.

    Returns:
        Two lists: the estimates of the recipes that fit, and the estimates of all recipes tried.
    """
    cache = search.cache
    make_model, make_batch = cache.given
    with symbolic():
        shapes = rank.shapes_of(
            model_of(make_model, rank.one_rank_recipe(replace(base, shard="zero3")))
        )
        allowed = rank.micro_batch_counts_for(
            replace(base, micro_batches=1), make_batch(), cache.split
        )
    counts = search.allowed_values(
        "micro_batches", *search.limits.allowed_micro_batch_counts(allowed, base.ranks)
    )
    keeps = search.allowed_values("checkpoint", "none", "selective", "layers")
    keeps = tuple(keep for keep in keeps if search.limits.allow(checkpoint=keep))
    shards = [shard for shard in rank.MODES if search.limits.allow(shard=shard)]
    found = []
    for shard, keep, attention in product(shards, keeps, search.values("attention")):
        blocks = None if keep == "none" else cache.blocks
        family = replace(base, shard=shard, checkpoint=keep, blocks=blocks, attention=attention)
        if base.shard not in (None, shard) or rank.floor_bytes(shapes, family) > search.budget:
            continue
        without = replace(
            family, checkpoint=keeps[0], blocks=None if keeps[0] == "none" else blocks
        )
        if any(
            replace(e.recipe, micro_batches=1) == replace(without, micro_batches=1) for e in found
        ):
            # A recipe with this shard and this attention already fits without checkpoints.
            continue
        try:
            best = fewest_micro_batches(search, family, counts)
        except ValueError:
            # A ValueError can mean that the model has no blocks to checkpoint, or that its loss
            # does not call the model itself. The error is raised only for the first value of
            # `checkpoint`, and only if `base` sets the shard or each rank holds all parameters.
            # Otherwise these recipes are skipped.
            if keep == keeps[0] and (base.shard is not None or shard in rank.REPLICATED):
                raise
            continue
        if best:
            found.append(cache.estimate(best))
    tried = [e for recipe, e in cache.estimates.items() if recipe.ranks > 1]
    if not tried:
        # Nothing was estimated, because parameters, gradients and optimizer state alone exceed the
        # budget. Estimate one recipe with a low peak, so that the error message can state its peak.
        shard = base.shard or "zero3"
        blocks = None if keeps[-1] == "none" else cache.blocks
        more = {
            "attention": search.values("attention")[-1],
            "micro_batches": counts[-1],
            "blocks": blocks,
        }
        tried = [cache.estimate(replace(base, shard=shard, checkpoint=keeps[-1], **more))]
    return found, tried


def fit_families(search: RecipeSearch) -> list[Estimate]:
    """Find the recipes on a single rank that fit the memory budget of the search.

    A family consists of all recipes with the same memory-saving techniques. Its best recipe is the
    cheapest one that fits. Families with few techniques are tried first. If a recipe that fits is
    already known, families that only add techniques to this recipe are skipped, except for those
    that may contain the cheapest recipe of all.

    Returns:
        Estimates of the best recipes of the families. The best recipe of a family is left out if a
        cheaper recipe that fits uses only a subset of the same techniques.
    """
    cache = search.cache
    found: list[Recipe] = []
    too_large: set[Recipe] = set()
    for family in sorted(
        search.families(), key=lambda f: (search.technique_count(f), f.micro_batches)
    ):
        if exceeds(cache, family, search.budget) or (
            (leanest := search.least_memory_attention)
            and replace(family, attention=leanest[0]) in too_large
        ):
            too_large.add(family)
            continue
        if _cannot_be_cheaper(search, family, found) or _offloads_nothing(search, family):
            continue
        try:
            best = best_of(search, family)
        # A RuntimeError is raised, for example, if the model changes a tensor in place that was
        # saved because of checkpoint="selective".
        except (RuntimeError, InfeasibleBudget):
            continue
        if best is None:
            too_large.add(family)
        else:
            found.append(best)
    if not found:
        _find_least(search)
    else:
        _add_first_blocks(search, found)
    found = [_with_largest_pages(search, recipe) for recipe in found]
    return [
        search.cache.estimate(recipe)
        for recipe in found
        if not _is_dominated(search, recipe, found)
    ]


def _with_largest_pages(search: RecipeSearch, recipe: Recipe) -> Recipe:
    """Return a copy of the recipe with the largest page size with which the step fits the budget.

    A page is the part of an offloaded optimizer state that is updated at once. Smaller pages need
    less memory, but do not make the step faster.
    """
    pages = (replace(recipe, page_bytes=size) for size in search.pages_for(recipe))
    return next(filter(search.fits, pages))


def _cannot_be_cheaper(search: RecipeSearch, family: Recipe, found: list[Recipe]) -> bool:
    """Return whether a family can be skipped, because it cannot cost less than the recipes found.

    A family is skipped if it adds techniques to a recipe that fits, because additional techniques
    usually raise the cost. They may lower the cost in two cases: if the recipe that fits offloads
    activations, and the family may offload fewer bytes of them; or if the recipe that fits uses a
    schedule or segments, which recompute less when more memory is free. In these cases, the family
    is skipped only if a lower bound on its cost is at least the lowest cost found.

    Args:
        search: Model, batch and memory budget for which recipes are searched.
        family: Any recipe of the family.
        found: Recipes found so far that fit the budget.
    """
    smaller = [recipe for recipe in found if search.uses_techniques_of(family, recipe)]
    if any(
        recipe.checkpoint not in CHAINED and _offloads_as_much(family, recipe) for recipe in smaller
    ):
        return True
    return bool(smaller) and least_seconds(search.cache, family, search.rates) >= min(
        map(search.seconds, found)
    )


def _offloads_as_much(recipe: Recipe, smaller: Recipe) -> bool:
    """Return whether a recipe certainly offloads at least as many bytes of activations as another.

    The result is True if `smaller` offloads no activations, or if both recipes save the same
    activations in forward and have the same number of micro-batches.

    Args:
        recipe: Recipe with all techniques of `smaller`, and possibly with further techniques.
        smaller: Recipe to compare with.
    """
    names = [field for field, technique in BY_FIELD.items() if technique.in_forward]
    return not smaller.offload_activations or all(
        getattr(recipe, name) == getattr(smaller, name) for name in ("micro_batches", *names)
    )


def _offloads_nothing(search: RecipeSearch, family: Recipe) -> bool:
    """Return whether a recipe would offload activations, but no activation is large enough.

    The answer is taken from estimates of the same recipe with fewer micro-batches, whose
    activations are larger. If there are no such estimates, the result is False.
    """
    fewer = (
        replace(family, micro_batches=count)
        for count in search.micro_batch_counts_for(family)
        if count < family.micro_batches
    )
    tried = (recipe for recipe in fewer if recipe in search.cache.estimates)
    return family.offload_activations and any(
        offloads_no_activation(search.cache, recipe) for recipe in tried
    )


def _is_dominated(search: RecipeSearch, recipe: Recipe, found: list[Recipe]) -> bool:
    """Return whether a recipe is superfluous, because a better one uses a subset of its techniques.

    Args:
        search: Search whose method `sort_key` decides which recipe is better.
        recipe: Recipe to check.
        found: Recipes that fit the budget, among which a better recipe is looked for.
    """
    order = search.sort_key(search.cache.estimate(recipe))
    others = (
        other for other in found if other != recipe and search.uses_techniques_of(recipe, other)
    )
    return any(search.sort_key(search.cache.estimate(other)) < order for other in others)


def _add_first_blocks(search: RecipeSearch, found: list[Recipe]) -> None:
    """Try checkpoints around only the first few blocks, and append recipes that fit to `found`.

    A recipe is appended only if it is cheaper than all recipes in `found`.
    """
    cache = search.cache
    if (
        search.quick
        or not search.limits.allow(first_blocks=1)
        or cache.base.checkpoint != "none"
        or "layers" not in search.values("checkpoint")
    ):
        return
    cheapest = min(map(search.seconds, found))
    for plain in search.families():
        if plain.checkpoint != "none" or plain.offload_activations:
            continue
        if least_seconds(cache, plain, search.rates) >= cheapest:
            continue
        one_block = replace(plain, checkpoint="layers", blocks=cache.blocks, first_blocks=1)
        if exceeds(cache, plain, search.budget) or search.seconds(one_block) >= cheapest:
            continue
        fewest = fewest_blocks(search, one_block, max_first_blocks(search, one_block, cheapest))
        if fewest and search.seconds(fewest) < cheapest:
            found.append(fewest)
            cheapest = search.seconds(fewest)


def max_first_blocks(search: RecipeSearch, one_block: Recipe, cheapest: float) -> int:
    """Return the largest n for which a step with checkpoints around the first n blocks is fast.

    A step is fast if it takes less than `cheapest` seconds. At least one block always stays without
    a checkpoint. If the blocks are not equal, the result is only an upper bound, because their
    checkpoints can add different numbers of FLOPs.

    Args:
        search: Model and batch for which recipes are searched.
        one_block: Recipe that checkpoints only the first block.
        cheapest: Limit in seconds for the duration of the step.
    """
    cache = search.cache
    found = cache.estimate(one_block)
    equal = cache.blocks is None and len(cache.composer.blocks) == cache.layers
    each = recomputed_flops(cache, one_block) if equal else 0
    return sum(
        search.rates.seconds(replace(found, flops=found.flops + more * each)) < cheapest
        for more in range(cache.layers - 1)
    )


def _find_least(search: RecipeSearch) -> None:
    """Estimate the recipes that may have the lowest peak, so that an error can report this peak.

    Only the recipes that use the most techniques are estimated.
    """
    cache = search.cache
    attentions = search.least_memory_attention or search.values("attention")
    # For most fields, the last candidate needs the least memory. For the fields in `either`, this
    # is not always so.
    either = {"attention", "checkpoint", "offload_activations", "in_backward", "offload_optimizer"}
    most = {field: search.values(field)[-1] for field in BY_FIELD if field not in either}
    families = dict.fromkeys(
        replace(recipe, micro_batches=search.micro_batch_counts_for(recipe)[-1])
        for recipe in search.families()
        if recipe.attention in attentions
        and all(getattr(recipe, field) == value for field, value in most.items())
    )
    lean = [each for each in families if each.offload_activations or each.checkpoint == "optimal"]
    for recipe in sorted(lean or families, key=lambda each: -each.offload_optimizer):
        least = min(
            e.peak_bytes for e in cache.estimates.values() if not search.limits.conflict(e.recipe)
        )
        if floor_bytes(cache, recipe) >= least:
            continue
        # The step may raise these errors for the same reasons as in `fit_families`.
        with suppress(RuntimeError, InfeasibleBudget):
            cache.estimate(least_schedule(search, recipe) if recipe.schedule_bytes == 1 else recipe)
