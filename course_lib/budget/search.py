"""Search for the recipes that fit a memory budget, cheapest first.

This module decides in which order combinations of techniques are tried, and which can be skipped.
Other modules do the rest: `candidates` lists the values that can be tried, `knowledge` makes and
stores the estimates, and `refine` finds the best numbers (of micro-batches, segments, blocks or
schedule bytes) for one combination of techniques, which is called a family.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from course_lib._batches import Split, samples_in
from course_lib._check import InfeasibleBudget, one_of, whole
from course_lib._check import kind as of_kind
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import join_labels, say
from course_lib.memory.show import Table, bytes_text, decimal
from course_lib.symbolic import Gpu, symbolic
from course_lib.workload import Workload

from . import rank
from .bounds import exceeds, floor_bytes, least_seconds, moves_nothing, recomputed_flops
from .candidates import ALL_RECIPES, Search, additions, not_tried
from .estimate import TIERS, Estimate
from .kinds import KINDS
from .knowledge import EstimateCache
from .loss import CHAINED, LossSum
from .rates import RATES, Rates
from .recipe import Recipe
from .refine import fewest_blocks, fewest_micro_batches, least_schedule, refine
from .reservation import COUNTS, check_count, search_by_reserved, title_of
from .scripts import FRAMEWORKS, Framework, Limits
from .show import Way, steps_to
from .step import model_of
from .techniques import BY_FIELD


class Estimates(Table, list):
    """List of `Estimate` values that prints as a table.

    Attributes:
        rates: Rates that convert an estimate into seconds.
        title: Caption of the table.
        whole: Number of recipes for which a step with all blocks was run, because the model does
            not run with few blocks or because the recipe uses a technique that is not composable
            (see `Technique`). All other estimates were composed from steps with few blocks.
        estimate: Function that returns the estimate of a recipe, and reuses those of the search.
        within: Function that returns the `Estimates` that fit another budget in bytes.
        known: Number of recipes that the search has estimated.
        not_tried: Sentences on techniques that could not be tried for this model, with the reason
            and what to do about it.
    """

    columns = ("peak (MB)", "TFLOPs", "GB moved", "seconds", "recipe")
    not_tried: Sequence[str] = ()

    def __init__(
        self,
        found: Iterable[Estimate],
        rates: Rates,
        title: str = "",
        estimate: Callable | None = None,
        within: Callable[[int], Estimates] | None = None,
        whole: int = 0,
        known: int = 0,
    ):
        list.__init__(self, found)
        self.rates, self.title, self.estimate, self.within = rates, title, estimate, within
        self.whole, self.known = whole, known

    def way(self) -> Way:
        """Return estimates from the baseline to the cheapest recipe, one per technique added."""
        return Way(map(self.estimate, steps_to(self[0].recipe)))

    def rows(self) -> list[Sequence]:
        return [
            (
                f"{e.peak_bytes / 1e6:,.1f}",
                decimal(e.flops / 1e12),
                decimal(e.moved_bytes / 1e9),
                decimal(self.rates.seconds(e)),
                str(e.recipe),
            )
            for e in self
        ]

    def caption(self) -> str:
        return join_labels(filter(None, (self.title, *self.not_tried)), "; ")

    __repr__ = Table.__str__


def fit(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    budget_bytes: int,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    blocks: str | Sequence[str] | None = None,
    recipes: Iterable[Recipe] | None = None,
    base: Recipe | None = None,
    framework: str | None = None,
    rates: Rates | str = "laptop",
    tier: str | None = None,
    kind: str = "cpu",
    gpu: Gpu | None = None,
    count: str = "tensors",
    quick: bool = False,
    progress: bool | Callable[[Recipe], None] = True,
) -> Estimates:
    """Return the estimates of the recipes whose step fits the budget, cheapest first.

    The cost of a recipe is the number of seconds that its step takes according to `rates`.

    **Recipes that are tried.** Without `recipes`, `fit` combines the techniques that do not change
    what the model learns. Each recipe also has every field that `base` sets to a value other than
    the default.

    - Attention: the model's own, or fused attention if the model supports it.
    - Checkpoints: "none", "layers" (around all blocks or around the first few), "selective",
      "segments" and "optimal".
    - Offloaded activations: alone or with checkpoint="layers". With the tier "host", 0 to 2
      storages are fetched ahead and 1 or 2 copies are in flight.
    - Loss head: all tokens at once, or in chunks.
    - Optimizer: steps in backward, or any number of micro-batches. With offloaded activations, the
      numbers of micro-batches are 1, numbers at least twice the previous one, and the largest.
    - Optimizer state: 0 to 4 quarters of it offloaded, in pages of 16, 4 or 1 MiB.

    A technique that cannot be tried for this model, such as checkpoints for a model without a list
    of blocks, is named with the reason in `not_tried` of the result.

    A recipe is left out of the result if another recipe that fits uses a subset of its techniques
    and ranks ahead of it. Recipes of equal cost are ranked by fewer micro-batches, then by larger
    pages, then by fewer copies in flight.

    **Recipes that are skipped.** Not every combination is estimated. These are skipped without
    losing the cheapest recipe:

    - A recipe whose optimizer step alone exceeds the budget. The memory of the optimizer step does
      not depend on forward and backward. With steps in backward, the model and the optimizer state
      must fit, because they are live throughout the step.
    - A recipe that adds techniques to one that fits, because an added technique saves neither FLOPs
      nor copies. There are two exceptions. With offloaded activations, a checkpoint, a chunked head
      or more micro-batches leave fewer bytes to be copied. With "segments" and "optimal", any
      memory that is saved lets the schedule recompute less. Recipes that extend these are skipped
      only if a lower bound on their cost is not below the lowest cost found. The bound counts the
      fewest FLOPs that they can have and the copies of their optimizer state.
    - A recipe with the kind of attention that needs more memory, if the same recipe with the other
      kind did not fit. The forward and backward of the base show which kind needs more.
    - A recipe with offloaded activations, if with fewer micro-batches no activation was large
      enough to be offloaded. Smaller micro-batches have smaller activations.
    - A recipe that checkpoints so many of the first blocks that it cannot cost less than the
      cheapest recipe found.

    **Assumptions.** The search assumes that a step does not need more memory with more
    micro-batches (from two on), with more segments (up to the square root of the number of layers),
    with one more checkpoint, with smaller pages, with fewer copies in flight, or with fewer bytes
    for a schedule. Therefore the smallest number that fits is found by bisection, and a schedule in
    a few rounds. `tests/brute_force_fit.py` compares the result with all recipes of a grid.

    **Estimates.** If the model has equal blocks and its step grows evenly with them, an estimate is
    composed from the steps of a model with few blocks and from updates of few parameters
    (`course_lib.budget.extrapolate`). It equals the estimate of the whole step. The estimate of the
    cheapest recipe is compared with a step of all blocks. If they differ, the search is repeated
    with whole steps.

    Args:
        make_model, make_batch, loss_sum: Functions as in `estimate`. More than one micro-batch is
            tried only if the weight of the loss is known and the batch can be split. If the batch
            cannot be split, the caption of the result says why.
        budget_bytes: Limit in bytes for all tensors of the step except the batch.
        max_norm: Norm to which the gradient is clipped, as in `train_step`. Recipes with steps in
            backward are then skipped.
        split: Function (batch, parts) -> list of `parts` batches, as in `estimate`. With it, 1, 2,
            4, 8 and so on micro-batches are tried, up to the last number before `split` raises an
            error, returns a part without samples, or no longer makes the largest part smaller. An
            error for two parts is raised.
        blocks: Names of the blocks to checkpoint, as in `Recipe`.
        recipes: Recipes to choose from, instead of those listed above.
        base: Recipe with the fields that all recipes share, such as precision, optimizer and
            `min_bytes`. With several `ranks`, each `shard` is tried unless the base names one.
        framework: Name of the framework that must be able to run the recipes, a key of
            `course_lib.budget.scripts.FRAMEWORKS`. Its method `script` writes a recipe as a script.
            The estimates are those of its step: "trainer" also clips the gradients, unless
            `max_norm` is given, which needs the same memory. None allows all recipes.
        rates: Rates of the machine, or the name of an entry of `RATES`.
        tier: Lower tier, as in `estimate`. The default is "file" for the rates "laptop", and "host"
            for those of any other machine.
        kind, gpu: Kind of device, and the GPU, as in `estimate`. If `rates` are those of a GPU, the
            default is that GPU.
        count: Quantity that must fit. "tensors" counts the bytes of live tensors. "reserved", which
            requires the kind "cuda", counts what PyTorch's allocator reserves by its rules
            (`course_lib.budget.reservation`), and runs the step of each recipe again for this.
        quick: Whether to search fewer recipes. This takes less time but may miss the cheapest one.
            The recipes have checkpoints around all blocks or none, all of the optimizer state
            offloaded or none, one micro-batch or the largest number, and the fewest or the default
            number of copies in flight. With count="reserved", only the cheapest recipe is listed.
        progress: Whether to show a progress bar, if tqdm is installed; or a function that is called
            with each recipe before it is estimated.

    Raises:
        InfeasibleBudget: No recipe that fits was found. The message names the lowest peak that was
            found and its recipe, and techniques that could not be tried.
        TypeError, ValueError: An argument has the wrong type or is out of its range, or the
            framework cannot run the base, one of the recipes, or the model.
    """
    whole("budget_bytes", budget_bytes, 1, of="bytes")
    if tier is None:
        tier = "file" if rates in ("laptop", RATES["laptop"]) else "host"
    one_of("tier", tier, TIERS)
    one_of("kind", kind, KINDS)
    check_count(one_of("count", count, COUNTS), kind)
    rates = rates if isinstance(rates, Rates) else RATES[one_of("rates", rates, RATES)]
    gpu = rates.gpu if gpu is None else gpu
    base = of_kind("base", Recipe() if base is None else base, Recipe, "a Recipe")
    if recipes is not None:
        recipes = list(of_kind("recipes", recipes, Iterable, "several recipes, as in a list"))
        if not recipes:
            raise ValueError(
                "recipes must contain at least one Recipe, got none; pass None to search all"
                " recipes"
            )
        for recipe in recipes:
            of_kind("recipes", recipe, Recipe, "one Recipe or more")
    code = None
    if framework is not None:
        code = FRAMEWORKS[one_of("framework", framework, FRAMEWORKS)]
        make_model = code.model_maker(make_model)
        max_norm = code.max_norm if max_norm is None else max_norm
    with _progress(progress) as watch, warnings.catch_warnings():
        # The search detects recipes that offload or keep nothing, so users need no warning.
        warnings.filterwarnings("ignore", "no activation was moved|policy keeps the outputs")
        options: dict[str, Any] = {"loss_sum": loss_sum, "max_norm": max_norm, "split": split}
        options |= {"tier": tier, "kind": kind, "gpu": gpu}
        known = EstimateCache(make_model, make_batch, base, blocks=blocks, watch=watch, **options)
        limits = ALL_RECIPES if code is None else _limits_of(code, known, loss_sum)
        # `blocks` are the blocks of all recipes with a checkpoint.
        named = [] if blocks is None else [replace(base, checkpoint="layers", blocks=known.blocks)]
        for recipe in (base, *named, *(recipes or ())):
            limits.check(recipe)
        search = Search(known, budget_bytes, rates, quick, limits)
        # The base is estimated first, because this raises the errors of an invalid model or batch.
        known.estimate(known.base)
        for name in (blocks,) if isinstance(blocks, str) else blocks or ():
            # A name that matches nothing is an error, although only checkpoints need it.
            names_of(known.model, name)

        def within(room: int) -> Estimates:
            return search_by_tensors(search.within(room), base, recipes)

        def by_reserved(room: int) -> Estimates:
            return search_by_reserved(room, within, quick)

        def search_room(room: int) -> Estimates:
            try:
                found = within(room) if count == "tensors" else by_reserved(room)
            except InfeasibleBudget as error:
                raise (_with_reasons(error, search) if recipes is None else error) from None
            found.within = search_room
            found.not_tried = not_tried(search) if recipes is None else ()
            return found

        return search_room(budget_bytes)


def _limits_of(framework: Framework, known: EstimateCache, loss_sum: LossSum | None) -> Limits:
    """Return the recipes that the framework can run for the model and the batch.

    Raises:
        ValueError: It can run none of them.
    """
    samples = samples_in(known.batch)
    problem = framework.refuse(Workload(*known.given, loss_sum, "", "", samples, known.split))
    if problem:
        raise ValueError(problem)
    return Limits(framework.for_model(known.model), samples)


def _with_reasons(error: InfeasibleBudget, search: Search) -> InfeasibleBudget:
    """Return an error that also names what could not be tried, and what could be tried as well."""
    left_out = not_tried(search)
    reason = "; ".join((error.reason, *left_out))
    found = InfeasibleBudget(error.budget_bytes, error.least_bytes, reason, error.least)
    found.not_tried = left_out
    found.additions = additions(search, error.least.recipe) if error.least else ()
    return found


def search_by_tensors(
    search: Search, base: Recipe, recipes: Sequence[Recipe] | None = None
) -> Estimates:
    """Return the result of `fit` for the budget of a `Search`, reusing the search's estimates."""
    known = search.known
    while True:
        if recipes is not None:
            found, tried = _fit_given(search, recipes)
        elif base.ranks > 1:
            found, tried = _on_ranks(search, base)
        else:
            found = _fit_all(search)
            tried = [e for e in known.estimates.values() if not search.limits.conflict(e.recipe)]
        found.sort(key=search.order)
        least = min(tried, key=lambda e: e.peak_bytes, default=None)
        if known.confirms(found[0] if found else least):
            break
    if not found:
        reason = "none was found"
        if least:
            reason = f"the least peak found is {bytes_text(least.peak_bytes)}, of {least.recipe!r}"
        raise InfeasibleBudget(search.budget, least and least.peak_bytes, reason, least)
    count = len(known.estimates)
    title = title_of(len(found), search.budget, count, search.quick)
    return Estimates(
        found, search.rates, title, known.estimate, whole=len(known.whole), known=count
    )


# ---- Which recipes are tried


def _fit_given(search: Search, recipes: Iterable[Recipe]) -> tuple[list[Estimate], list[Estimate]]:
    """Return the estimates that fit, and all estimates, of the given recipes with a schedule."""
    tried = []
    for recipe in dict.fromkeys(recipes):
        # InfeasibleBudget means that no schedule fits the recipe's own schedule_bytes.
        with suppress(InfeasibleBudget):
            tried.append(search.known.estimate(recipe))
    return [e for e in tried if e.peak_bytes <= search.budget], tried


def _on_ranks(search: Search, base: Recipe) -> tuple[list[Estimate], list[Estimate]]:
    """Return the estimates that fit on several ranks, and all estimates that were made.

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


def _fit_all(search: Search) -> list[Estimate]:
    """Return the estimates that fit, trying combinations with few techniques first."""
    known = search.known
    found: list[Recipe] = []
    too_large: set[Recipe] = set()
    for family in sorted(search.families(), key=lambda recipe: _size(search, recipe)):
        if (
            exceeds(known, family, search.budget)
            or search.with_least_memory_attention(family) in too_large
        ):
            too_large.add(family)
            continue
        if _cannot_be_cheaper(search, family, found) or _moves_nothing(search, family):
            continue
        try:
            best = refine(search, family)
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
    """Return the recipe with the largest pages that fit, because smaller ones are not cheaper."""
    pages = (replace(recipe, page_bytes=size) for size in search.pages_for(recipe))
    return next(filter(search.fits, pages))


def _size(search: Search, recipe: Recipe) -> tuple[float, int]:
    """Return the sort key of a recipe in the search: how many techniques and micro-batches."""
    return search.amounts(recipe), recipe.micro_batches


def _cannot_be_cheaper(search: Search, family: Recipe, found: list[Recipe]) -> bool:
    """Return whether a family extends a recipe that fits and cannot be cheaper.

    Added techniques raise the cost, with two exceptions. With offloaded activations, a checkpoint,
    a chunked head or more micro-batches leave fewer bytes to be copied. With a schedule or
    segments, any memory that is saved makes the step cheaper. Families that extend recipes of these
    two kinds are tried if a lower bound on their cost is below the lowest cost found.
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
    """Return whether a recipe offloads at least as many bytes as the one that it extends."""
    names = [field for field, technique in BY_FIELD.items() if technique.in_forward]
    return not smaller.offload_activations or all(
        getattr(recipe, name) == getattr(smaller, name) for name in ("micro_batches", *names)
    )


def _moves_nothing(search: Search, family: Recipe) -> bool:
    """Return whether the family offloads activations, but none is large enough to be offloaded.

    This is known if an estimate with fewer micro-batches, whose activations are larger, offloads
    none.
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
    """Return whether a found recipe uses a subset of a recipe's techniques and ranks ahead."""
    order = search.order(search.known.estimate(recipe))
    others = (other for other in found if other != recipe and search.adds_to(recipe, other))
    return any(search.order(search.known.estimate(other)) < order for other in others)


def _add_first_blocks(search: Search, found: list[Recipe]) -> None:
    """Append recipes that checkpoint only the first blocks, if they are cheaper than all found."""
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
    """Return how many of the first blocks can be checkpointed at less than a given cost.

    If the blocks are equal, recomputing each of them needs as many FLOPs as the first. If they are
    not, the result is only an upper bound.

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
    """Estimate the recipes that may have the lowest peak, so that an error can name it.

    Only the recipes that use the most techniques are estimated.
    """
    known = search.known
    attentions = search.least_memory_attention or search.values("attention")
    # For these fields the last candidate does not always need the least memory, whereas for all
    # other fields it does.
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
        # The step may raise these errors for the same reasons as in `_fit_all`.
        with suppress(RuntimeError, InfeasibleBudget):
            known.estimate(least_schedule(search, recipe) if recipe.schedule_bytes == 1 else recipe)


@contextmanager
def _progress(
    wanted: bool | Callable[[Recipe], None],
) -> Iterator[Callable[[Recipe], None]]:
    """Yield the function that is called before each estimate.

    It is the caller's own function, or one that advances a progress bar if one is wanted and tqdm
    is installed.
    """
    if callable(wanted):
        yield wanted
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda recipe: None
        return
    with tqdm(unit=f" {say('recipes')}", leave=False) as bar:

        def show(recipe: Recipe) -> None:
            bar.set_postfix_str(say(str(recipe))[:40], refresh=False)
            bar.update()

        yield show
