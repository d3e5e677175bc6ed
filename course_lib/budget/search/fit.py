"""Find the recipes (sets of memory-saving techniques) whose training step fits a memory budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from course_lib._batches import Split, samples_in
from course_lib._check import InfeasibleBudget, one_of, whole
from course_lib._check import kind as of_kind
from course_lib.budget.device_kinds import KINDS
from course_lib.budget.estimate import TIERS, Estimate
from course_lib.budget.loss import LossSum
from course_lib.budget.rates import RATES, Rates
from course_lib.budget.recipe import Recipe
from course_lib.budget.scripts import FRAMEWORKS, Framework, FrameworkLimits
from course_lib.budget.waterfall import TechniqueSteps, steps_to
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import join_labels, say, text
from course_lib.memory.show import Table, bytes_text, decimal
from course_lib.symbolic import Gpu
from course_lib.workload import Workload

from .candidates import ALL_RECIPES, RecipeSearch, addable_techniques, not_tried
from .estimate_cache import EstimateCache
from .families import fit_families, fit_given_recipes, fit_on_ranks

COUNTS = ("tensors", "reserved")


class Estimates(Table, list):
    """Result of `fit`: a list of `Estimate` objects, cheapest first, that prints as a table.

    Attributes:
        rates: Speed of the machine, from which the duration of each step is computed.
        title: Caption of the table.
        whole: Number of recipes whose step was run with all blocks of the model, because the model
            or a technique requires this (see `Technique.composable`). All other estimates were
            computed from steps with only a few blocks.
        estimate: Function that takes a recipe and returns its estimate. It reuses the estimates of
            the search.
        within: Function that takes another memory budget in bytes and returns the `Estimates` of
            the recipes that fit this budget.
        known: Number of recipes that the search has estimated.
        not_tried: Sentences on techniques that could not be tried for this model. Each sentence
            gives the reason and advice.
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

    def steps_from_baseline(self) -> TechniqueSteps:
        """Return a list of estimated steps, each with one more technique than the step before.

        The first step is the baseline, which has the precision and the optimizer of the cheapest
        recipe, but none of its techniques. The last step uses all techniques of this recipe.
        """
        return TechniqueSteps(map(self.estimate, steps_to(self[0].recipe)))

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
    """Search for the recipes whose training step fits a memory budget, and return their estimates.

    A recipe is a set of memory-saving techniques. The estimates are sorted by cost, which is the
    duration of the step in seconds according to `rates`.

    **Recipes that are tried.** If `recipes` is None, `fit` combines the techniques that do not
    change what the model learns:

    - Attention: the model's own, or fused attention if the model supports it.
    - Checkpoints: "none", "layers" (around all blocks or around the first few), "selective",
      "segments" and "optimal".
    - Offloaded activations: alone or with checkpoint="layers". With the tier "host", `prefetch` is
      0, 1 or 2, and `in_flight` is 1 or 2.
    - Loss head: all tokens at once, or in chunks.
    - Optimizer: each parameter is updated during backward, or all parameters after the last
      micro-batch.
    - Micro-batches: every possible number. With offloaded activations, only some numbers are tried:
      1, then numbers that are each at least twice the previous one, and finally the largest number.
    - Optimizer state: 0 to 4 quarters of it offloaded, in pages of 16, 4 or 1 MiB.

    If `base` sets a field to a value other than the default, every recipe has this value. Some
    techniques cannot be tried for some models, such as checkpoints for a model without a list of
    blocks. The attribute `not_tried` of the result gives the reasons.

    **Recipes that are left out.** A recipe is left out if another recipe that fits uses a subset of
    its techniques and is sorted before it. Among recipes of equal cost, those with fewer
    micro-batches come first, then those with larger pages, then those with fewer copies in flight.

    Not every combination is estimated. docs/exact.md says which recipes are skipped, what the
    search assumes, and how an estimate is computed from steps with few blocks of the model.

    Args:
        make_model: Function without arguments that returns the model in fp32.
        make_batch: Function without arguments that returns the batch. If the batch cannot be split,
            only one micro-batch is tried, and `not_tried` of the result gives the reason.
        budget_bytes: Limit in bytes for all tensors of the step except the batch.
        loss_sum: Function (model, batch) -> (sum of losses, weight), as in `estimate`. The weight
            is the number by which the sum is divided, such as the number of tokens. None uses the
            model's own loss. If this loss is a mean without a known weight, only one micro-batch is
            tried.
        max_norm: Norm to which the gradient is clipped, as in `train_step`. If it is given, recipes
            that update parameters during backward are skipped.
        split: Function (batch, parts) -> list of `parts` batches, as in `estimate`. If it is given,
            1, 2, 4, 8 and so on micro-batches are tried, until `split` raises an error, returns a
            part without samples, or no longer makes the largest part smaller. If `split` already
            raises an error for two parts, `fit` raises this error too.
        blocks: Names of the blocks to checkpoint, as in `Recipe`.
        recipes: Recipes to choose from, instead of those listed above.
        base: Recipe whose settings all recipes share, such as precision, optimizer and `min_bytes`.
            If its `ranks` is greater than 1 and its `shard` is None, all values of `shard` are
            tried.
        framework: Key in `course_lib.budget.scripts.FRAMEWORKS`, such as "trainer" for Hugging
            Face's Trainer. Only recipes that this framework can run are tried, and the framework's
            training step is estimated. For example, "trainer" clips gradients even if `max_norm` is
            None. If `framework` is None, all recipes are allowed, and the step is that of
            `train_step`.
        rates: Speed of the machine, as `Rates` or as a name in `RATES`.
        tier: Lower tier, where offloaded tensors are stored: "file" or "host". The default is
            "file" if `rates` is "laptop", and otherwise "host".
        kind: Kind of device, "cpu" or "cuda", as in `estimate`.
        gpu: GPU that decides which attention kernel runs, as in `estimate`. If `rates` are those of
            a GPU, the default is this GPU.
        count: Kind of bytes that is compared with the budget: "tensors" for the bytes of live
            tensors, or "reserved" for the bytes that PyTorch's allocator reserves (see
            `Estimate.reserved_bytes`). "reserved" requires the kind "cuda", and takes longer,
            because the step of each recipe runs again.
        quick: Whether to try fewer recipes. The search then takes less time, but may miss the
            cheapest recipe. Checkpoints are then around all blocks or none, and all of the
            optimizer state is offloaded or none. The number of micro-batches is 1 or the largest
            possible number, and the numbers of copies in flight are the smallest or the default.
            With count="reserved", the result has only the cheapest recipe.
        progress: True to show a progress bar, if tqdm is installed; or a function that is called
            with each recipe before the recipe is estimated.

    Raises:
        InfeasibleBudget: No recipe that fits was found. The message gives the lowest peak that was
            found, the recipe with this peak, and the techniques that could not be tried.
        TypeError, ValueError: An argument has the wrong type or is out of its range; or the
            framework cannot run the model, `base`, or one of `recipes`.
    """
    whole("budget_bytes", budget_bytes, 1, of="bytes")
    if tier is None:
        tier = "file" if rates in ("laptop", RATES["laptop"]) else "host"
    one_of("tier", tier, TIERS)
    one_of("kind", kind, KINDS)
    if one_of("count", count, COUNTS) == "reserved" and kind != "cuda":
        raise ValueError(
            f"kind must be 'cuda' if count is 'reserved', got {kind!r}: PyTorch has no caching"
            " allocator for a CPU. For kind='cpu', pass count='tensors'"
        )
    rates = rates if isinstance(rates, Rates) else RATES[one_of("rates", rates, RATES)]
    gpu = rates.gpu if gpu is None else gpu
    base = of_kind("base", Recipe() if base is None else base, Recipe, "a Recipe")
    if recipes is not None:
        recipes = list(
            of_kind("recipes", recipes, Iterable, "a list of recipes, or another iterable of them")
        )
        if not recipes:
            raise ValueError(
                "recipes must contain at least one Recipe, got none; pass None to search all"
                " recipes"
            )
        for recipe in recipes:
            of_kind("recipes", recipe, Recipe, "Recipe objects")
    code = None
    if framework is not None:
        code = FRAMEWORKS[one_of("framework", framework, FRAMEWORKS)]
        make_model = code.model_maker(make_model)
        max_norm = code.max_norm if max_norm is None else max_norm
    with _progress(progress) as watch, warnings.catch_warnings():
        # The search itself detects recipes that offload nothing, or whose policy keeps nothing.
        # Therefore users need no warning.
        warnings.filterwarnings("ignore", "no activation was moved|policy keeps the outputs")
        options: dict[str, Any] = {"loss_sum": loss_sum, "max_norm": max_norm, "split": split}
        options |= {"tier": tier, "kind": kind, "gpu": gpu}
        cache = EstimateCache(make_model, make_batch, base, blocks=blocks, watch=watch, **options)
        limits = ALL_RECIPES if code is None else _limits_of(code, cache, loss_sum)
        # The argument `blocks` names the blocks of all recipes with a checkpoint, so the framework
        # must be able to checkpoint these blocks.
        named = [] if blocks is None else [replace(base, checkpoint="layers", blocks=cache.blocks)]
        for recipe in (base, *named, *(recipes or ())):
            limits.require(recipe)
        search = RecipeSearch(cache, budget_bytes, rates, quick, limits)
        # The base is estimated first, because this raises the errors of an invalid model or batch.
        cache.estimate(cache.base)
        for name in (blocks,) if isinstance(blocks, str) else blocks or ():
            # A name that matches no module raises an error, even if no recipe has a checkpoint.
            names_of(cache.model, name)

        def within(tensor_budget: int) -> Estimates:
            return search_by_tensors(search.within(tensor_budget), base, recipes)

        def by_reserved(tensor_budget: int) -> Estimates:
            return search_by_reserved(tensor_budget, within, quick)

        def search_tensor_budget(tensor_budget: int) -> Estimates:
            try:
                found = within(tensor_budget) if count == "tensors" else by_reserved(tensor_budget)
            except InfeasibleBudget as error:
                raise (_with_reasons(error, search) if recipes is None else error) from None
            found.within = search_tensor_budget
            found.not_tried = not_tried(search) if recipes is None else ()
            return found

        return search_tensor_budget(budget_bytes)


def _limits_of(
    framework: Framework, cache: EstimateCache, loss_sum: LossSum | None
) -> FrameworkLimits:
    """Return the limits on recipes that a framework sets for the model and the batch.

    Raises:
        ValueError: The framework cannot train this model on this batch with any recipe.
    """
    samples = samples_in(cache.batch)
    problem = framework.unsupported_reason(
        Workload(*cache.given, loss_sum, "", "", samples, cache.split)
    )
    if problem:
        raise ValueError(problem)
    return FrameworkLimits(framework.for_model(cache.model), samples)


def _with_reasons(error: InfeasibleBudget, search: RecipeSearch) -> InfeasibleBudget:
    """Return a copy of the error that also says which techniques may help.

    The reason and the attribute `not_tried` of the copy list the techniques that could not be
    tried. The attribute `additions` has the fields of the techniques that can be added to the
    recipe with the lowest peak.
    """
    left_out = not_tried(search)
    reason = "; ".join((error.reason, *left_out))
    found = InfeasibleBudget(error.budget_bytes, error.least_bytes, reason, error.least)
    found.not_tried = left_out
    found.additions = addable_techniques(search, error.least.recipe) if error.least else ()
    return found


def search_by_tensors(
    search: RecipeSearch, base: Recipe, recipes: Sequence[Recipe] | None = None
) -> Estimates:
    """Find the recipes whose live tensors fit the budget of a search, cheapest first.

    Args:
        search: Model, batch and memory budget for which recipes are searched, with a cache of
            estimates.
        base: Recipe whose settings all recipes share. It may have several ranks.
        recipes: Recipes to choose from; None to search all recipes.

    Raises:
        InfeasibleBudget: No recipe fits.
    """
    cache = search.cache
    while True:
        if recipes is not None:
            found, tried = fit_given_recipes(search, recipes)
        elif base.ranks > 1:
            found, tried = fit_on_ranks(search, base)
        else:
            found = fit_families(search)
            tried = [e for e in cache.estimates.values() if not search.limits.conflict(e.recipe)]
        found.sort(key=search.sort_key)
        least = min(tried, key=lambda e: e.peak_bytes, default=None)
        if cache.confirm(found[0] if found else least):
            break
    if not found:
        reason = (
            "none of the recipes can run this step; call estimate with one of them to see its error"
        )
        if least:
            reason = (
                f"the lowest peak found is {bytes_text(least.peak_bytes)}, with {least.recipe!r}"
            )
        raise InfeasibleBudget(search.budget, least and least.peak_bytes, reason, least)
    count = len(cache.estimates)
    title = _title_of(len(found), search.budget, count, search.quick)
    return Estimates(
        found, search.rates, title, cache.estimate, whole=len(cache.whole), known=count
    )


def search_by_reserved(budget_bytes: int, within: Callable[[int], Any], quick: bool = False) -> Any:
    """Find the recipes whose step makes the allocator reserve at most `budget_bytes`.

    The allocator is PyTorch's CUDA allocator. The result has the estimates of the recipes, cheapest
    first.

    The function `within` finds recipes by the bytes of their live tensors, which are fewer than the
    reserved bytes. `within` is called repeatedly, each time with a lower limit, until the cheapest
    recipe in its result reserves at most `budget_bytes`. Each new limit is the peak of the cheapest
    recipe's tensors, minus the bytes by which its reserved bytes exceed `budget_bytes`. Recipes
    whose peak is between two of these limits may be missed.

    Args:
        budget_bytes: Limit in bytes for the memory that the allocator reserves.
        within: Function that takes a limit on the bytes of live tensors and returns the `Estimates`
            of the recipes that fit it.
        quick: Whether to count the reserved bytes of only the cheapest recipe for each limit. All
            other recipes are then left out of the result.

    Raises:
        InfeasibleBudget: No recipe fits. The message gives the fewest bytes that a recipe reserves.
            If the live tensors alone exceed the budget in every recipe, the message gives their
            lowest peak instead.
    """
    taken: dict[Recipe, tuple[int, Estimate]] = {}
    tensor_budget = budget_bytes
    found = None
    while tensor_budget > 0:
        try:
            found = within(tensor_budget)
        except InfeasibleBudget:
            if found is None:
                # For every recipe, the tensors alone exceed the budget.
                raise
            break
        for each in found[:1] if quick else found:
            if each.recipe not in taken:
                taken[each.recipe] = each.reserved_bytes(), each
        reserved, first = taken[found[0].recipe]
        if reserved <= budget_bytes:
            break
        tensor_budget = first.peak_bytes - (reserved - budget_bytes)
    kept = [each for reserved, each in taken.values() if reserved <= budget_bytes]
    if not kept:
        least, each = min(taken.values(), key=lambda pair: pair[0])
        reason = (
            f"the least memory that a recipe reserves is {bytes_text(least)}, with {each.recipe!r}"
        )
        raise InfeasibleBudget(budget_bytes, least, reason, each)
    found.title = _title_of(len(kept), budget_bytes, found.known, quick)
    found[:] = sorted(kept, key=found.rates.seconds)
    return found


def _title_of(count: int, budget_bytes: int, known: int, quick: bool) -> str:
    """Return a caption for the result of a search, such as "3 recipes fit into 24 GB".

    Args:
        count: Number of recipes that fit.
        known: Number of recipes that were estimated.
    """
    title = text(
        (
            "{count} recipe fits into {budget}; {known} were estimated"
            if count == 1
            else "{count} recipes fit into {budget}; {known} were estimated"
        ),
        count=count,
        budget=bytes_text(budget_bytes),
        known=known,
    )
    if quick:
        title = text("{found}, by a quick search, which may miss cheaper ones", found=title)
    return title


@contextmanager
def _progress(
    wanted: bool | Callable[[Recipe], None],
) -> Iterator[Callable[[Recipe], None]]:
    """Yield a function that shows progress, to be called with each recipe before its estimate.

    If `wanted` is a function, it is yielded itself. Otherwise the yielded function advances a
    progress bar if `wanted` is true and tqdm is installed, and does nothing if not.
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
