"""Decide which families are searched, which are skipped, and which of their recipes are kept.

A family is one combination of techniques. `best_numbers` finds the best values of the numbers in a
family's recipe, such as the number of micro-batches.
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
from .candidates import Search
from .lower_bounds import exceeds, floor_bytes, least_seconds, moves_nothing, recomputed_flops


def fit_given(search: Search, recipes: Iterable[Recipe]) -> tuple[list[Estimate], list[Estimate]]:
    """Return two lists: the estimates of the given recipes that fit, and the estimates of all.

    A recipe is left out if no schedule fits its own `schedule_bytes`.
    """
    tried = []
    for recipe in dict.fromkeys(recipes):
        # InfeasibleBudget means that no schedule fits the recipe's own schedule_bytes.
        with suppress(InfeasibleBudget):
            tried.append(search.known.estimate(recipe))
    return [e for e in tried if e.peak_bytes <= search.budget], tried


def fit_on_ranks(search: Search, base: Recipe) -> tuple[list[Estimate], list[Estimate]]:
    """Return two lists: the estimates that fit on several ranks, and all estimates that were made.

    Each value of `shard` is tried with the fewest micro-batches that fit. Checkpoints are added
    only if the step does not fit without them.
    """
    known = search.known
    make_model, make_batch = known.given
    with symbolic():
        shapes = rank.shapes_of(model_of(make_model, rank.single(replace(base, shard="zero3"))))
        allowed = rank.counts_for(replace(base, micro_batches=1), make_batch(), known.split)
    counts = search.options("micro_batches", *search.limits.even_counts(allowed, base.ranks))
    keeps = search.options("checkpoint", "none", "selective", "layers")
    keeps = tuple(keep for keep in keeps if search.limits.allow(checkpoint=keep))
    shards = [shard for shard in rank.MODES if search.limits.allow(shard=shard)]
    found = []
    for shard, keep, attention in product(shards, keeps, search.values("attention")):
        blocks = None if keep == "none" else known.blocks
        family = replace(base, shard=shard, checkpoint=keep, blocks=blocks, attention=attention)
        if base.shard not in (None, shard) or rank.floor_bytes(shapes, family) > search.budget:
            continue
        without = replace(
            family, checkpoint=keeps[0], blocks=None if keeps[0] == "none" else blocks
        )
        if any(
            replace(e.recipe, micro_batches=1) == replace(without, micro_batches=1) for e in found
        ):
            # This shard and this attention fit without checkpoints.
            continue
        try:
            best = fewest_micro_batches(search, family, counts)
        except ValueError:
            # The model may have no blocks to checkpoint, or its loss may not call the model itself.
            # It is an error only for the first kind of checkpoint, and if `base` names the shard or
            # each rank holds all parameters. In other cases this recipe is skipped.
            if keep == keeps[0] and (base.shard is not None or shard in rank.REPLICATED):
                raise
            continue
        if best:
            found.append(known.estimate(best))
    tried = [e for recipe, e in known.estimates.items() if recipe.ranks > 1]
    if not tried:
        # Parameters, gradients and optimizer state alone exceed the budget.
        shard = base.shard or "zero3"
        blocks = None if keeps[-1] == "none" else known.blocks
        more = {
            "attention": search.values("attention")[-1],
            "micro_batches": counts[-1],
            "blocks": blocks,
        }
        tried = [known.estimate(replace(base, shard=shard, checkpoint=keeps[-1], **more))]
    return found, tried


def fit_families(search: Search) -> list[Estimate]:
    """Return the estimates of the best recipes of the families that fit the budget.

    Combinations with few techniques are tried first, because they decide which other ones are
    skipped. A recipe is left out if another recipe that fits uses a subset of its techniques and
    ranks ahead of it.
    """
    known = search.known
    found: list[Recipe] = []
    too_large: set[Recipe] = set()
    for family in sorted(search.families(), key=lambda f: (search.amounts(f), f.micro_batches)):
        if exceeds(known, family, search.budget) or (
            (leanest := search.least_memory_attention)
            and replace(family, attention=leanest[0]) in too_large
        ):
            too_large.add(family)
            continue
        if _cannot_be_cheaper(search, family, found) or _moves_nothing(search, family):
            continue
        try:
            best = best_of(search, family)
        # A RuntimeError is raised, for example, if the model changes a tensor in place that
        # "selective" has kept.
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
    found = [_with_large_pages(search, recipe) for recipe in found]
    return [
        search.known.estimate(recipe)
        for recipe in found
        if not _can_do_with_less(search, recipe, found)
    ]


def _with_large_pages(search: Search, recipe: Recipe) -> Recipe:
    """Return the recipe with the largest pages that fit.

    Smaller pages would not be cheaper.
    """
    pages = (replace(recipe, page_bytes=size) for size in search.pages_for(recipe))
    return next(filter(search.fits, pages))


def _cannot_be_cheaper(search: Search, family: Recipe, found: list[Recipe]) -> bool:
    """Return whether a family can be skipped, because it cannot cost less than the recipes found.

    A family is skipped if it extends a recipe that fits, because adding techniques usually raises
    the cost. It may lower the cost in two cases: the smaller recipe offloads activations and the
    family may offload fewer bytes of them; or the smaller recipe uses a schedule or segments, which
    recompute less if memory is saved. In these cases, the family is skipped only if a lower bound
    on its cost is not below the lowest cost found.
    """
    smaller = [recipe for recipe in found if search.adds_to(family, recipe)]
    if any(
        recipe.checkpoint not in CHAINED and _moves_as_much(family, recipe) for recipe in smaller
    ):
        return True
    return bool(smaller) and least_seconds(search.known, family, search.rates) >= min(
        map(search.seconds, found)
    )


def _moves_as_much(recipe: Recipe, smaller: Recipe) -> bool:
    """Return whether a recipe surely offloads at least as many bytes as the smaller recipe.

    The recipe extends `smaller`, and bytes of activations count. The result is true if `smaller`
    offloads no activations, or if both recipes keep the same activations in forward and have the
    same number of micro-batches.
    """
    names = [field for field, technique in BY_FIELD.items() if technique.in_forward]
    return not smaller.offload_activations or all(
        getattr(recipe, name) == getattr(smaller, name) for name in ("micro_batches", *names)
    )


def _moves_nothing(search: Search, family: Recipe) -> bool:
    """Return whether a family offloads activations, but no activation is large enough for that.

    The answer is taken from estimates of the same family with fewer micro-batches, whose
    activations are larger. If there are no such estimates, the result is False.
    """
    fewer = (
        replace(family, micro_batches=count)
        for count in search.counts_for(family)
        if count < family.micro_batches
    )
    tried = (recipe for recipe in fewer if recipe in search.known.estimates)
    return family.offload_activations and any(
        moves_nothing(search.known, recipe) for recipe in tried
    )


def _can_do_with_less(search: Search, recipe: Recipe, found: list[Recipe]) -> bool:
    """Return whether another found recipe uses a subset of these techniques and ranks ahead."""
    order = search.order(search.known.estimate(recipe))
    others = (other for other in found if other != recipe and search.adds_to(recipe, other))
    return any(search.order(search.known.estimate(other)) < order for other in others)


def _add_first_blocks(search: Search, found: list[Recipe]) -> None:
    """Append recipes that checkpoint only the first blocks to `found`.

    A recipe is appended only if it is cheaper than all recipes found before.
    """
    known = search.known
    if (
        search.quick
        or not search.limits.allow(first_blocks=1)
        or known.base.checkpoint != "none"
        or "layers" not in search.values("checkpoint")
    ):
        return
    cheapest = min(map(search.seconds, found))
    for plain in search.families():
        if plain.checkpoint != "none" or plain.offload_activations:
            continue
        if least_seconds(known, plain, search.rates) >= cheapest:
            continue
        one = replace(plain, checkpoint="layers", blocks=known.blocks, first_blocks=1)
        if exceeds(known, plain, search.budget) or search.seconds(one) >= cheapest:
            continue
        fewest = fewest_blocks(search, one, most_blocks(search, one, cheapest))
        if fewest and search.seconds(fewest) < cheapest:
            found.append(fewest)
            cheapest = search.seconds(fewest)


def most_blocks(search: Search, one: Recipe, cheapest: float) -> int:
    """Return how many of the first blocks can be checkpointed at less than the cost `cheapest`.

    If the blocks are equal, recomputing any block needs the same number of FLOPs as recomputing the
    first one. If the blocks are not equal, the result is only an upper bound.

    Args:
        search: The search.
        one: Recipe that checkpoints the first block.
        cheapest: Cost in seconds.
    """
    known = search.known
    found = known.estimate(one)
    equal = known.blocks is None and len(known.composer.blocks) == known.layers
    each = recomputed_flops(known, one) if equal else 0
    return sum(
        search.rates.seconds(replace(found, flops=found.flops + more * each)) < cheapest
        for more in range(known.layers - 1)
    )


def _find_least(search: Search) -> None:
    """Estimate the recipes that may have the lowest peak, so that an error can name this peak.

    Only the recipes that use the most techniques are estimated.
    """
    known = search.known
    attentions = search.least_memory_attention or search.values("attention")
    # For these fields, the last candidate does not always need the least memory. For all other
    # fields, it does.
    either = {"attention", "checkpoint", "offload_activations", "in_backward", "offload_optimizer"}
    most = {field: search.values(field)[-1] for field in BY_FIELD if field not in either}
    families = dict.fromkeys(
        replace(recipe, micro_batches=search.counts_for(recipe)[-1])
        for recipe in search.families()
        if recipe.attention in attentions
        and all(getattr(recipe, field) == value for field, value in most.items())
    )
    lean = [each for each in families if each.offload_activations or each.checkpoint == "optimal"]
    for recipe in sorted(lean or families, key=lambda each: -each.offload_optimizer):
        least = min(
            e.peak_bytes for e in known.estimates.values() if not search.limits.conflict(e.recipe)
        )
        if floor_bytes(known, recipe) >= least:
            continue
        # The step may raise these errors for the same reasons as in `fit_families`.
        with suppress(RuntimeError, InfeasibleBudget):
            known.estimate(least_schedule(search, recipe) if recipe.schedule_bytes == 1 else recipe)
