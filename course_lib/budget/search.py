"""A search for the recipes that fit a budget, the cheapest first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from course_lib._check import InfeasibleBudget, one_of, whole
from course_lib._check import kind as of_kind
from course_lib.labels import say, text
from course_lib.memory import symbolic
from course_lib.memory.show import Table, bytes_text

from . import rank
from .estimate import TIERS, Estimate
from .kinds import KINDS
from .knowledge import Known, Search
from .loss import CHAINED, LossSum, samples_in
from .rates import RATES, Rates
from .recipe import Recipe
from .refine import fewest_blocks, fewest_pieces, least_schedule, refine
from .reservation import COUNTS, check_count, that_reserve
from .show import Way, steps_to
from .step import model_of
from .techniques import BY_FIELD


class Estimates(Table, list):
    """A list of `Estimate` values that shows itself as a table."""

    columns = ("peak, MB", "TFLOPs", "GB moved", "seconds", "recipe")

    def __init__(
        self,
        found: Iterable[Estimate],
        rates: Rates,
        title: str = "",
        estimate: Callable | None = None,
        within: Callable[[int], Estimates] | None = None,
    ):
        list.__init__(self, found)
        self.rates, self.title, self.estimate, self.within = rates, title, estimate, within

    def way(self) -> Way:
        """Way from the plain step to the cheapest, one technique at a time, by the search's own
        estimates."""
        return Way(map(self.estimate, steps_to(self[0].recipe)))

    def rows(self) -> list[Sequence]:
        return [
            (
                f"{e.peak_bytes / 1e6:,.1f}",
                f"{e.flops / 1e12:,.3f}",
                f"{e.moved_bytes / 1e9:,.3f}",
                f"{self.rates.seconds(e):,.3f}",
                str(e.recipe),
            )
            for e in self
        ]

    def caption(self) -> str:
        return self.title

    __repr__ = Table.__str__


def fit(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    budget_bytes: int,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    blocks: str | Sequence[str] | None = None,
    recipes: Iterable[Recipe] | None = None,
    base: Recipe | None = None,
    rates: Rates | str = "laptop",
    tier: str | None = None,
    kind: str = "cpu",
    count: str = "tensors",
    quick: bool = False,
    progress: bool | Callable[[Recipe], None] = True,
) -> Estimates:
    """The recipes whose step fits the budget, cheapest first by `Rates.seconds`, then by fewer
    micro-batches.

    Without `recipes`, combinations of the techniques that leave the training as it is: attention
    standard or flash; checkpoints "layers" (around all blocks, or the first few), "selective",
    "segments" and "optimal"; offloaded activations, alone or with "layers", with the host below
    fetched 0 to 2 ahead and 1 or 2 in flight; the loss head at once or in chunks; steps in
    backward, or any number of micro-batches (with offloaded activations the numbers double); none
    of the optimizer's state offloaded, or 1 to 4 quarters, in pages of 16, 4 or 1 MiB. What `base`
    sets other than the default is in every recipe. What comes out needs all that it uses: what
    could do with less, and would come first, is left out; of equal price fewer micro-batches,
    larger pages and fewer copies under way come first.

    Not all are run. What is passed over, and why that loses nothing:

    - A recipe whose optimizer's step alone exceeds the budget. It takes the same whatever forward
      and backward did; of steps in backward, model and state are always there.
    - One that adds to a recipe that fits, since to add takes no FLOPs and no copies away. It may
      where activations are offloaded (with a checkpoint, a head in chunks or more micro-batches
      less goes down), and where "segments" and "optimal" get more room: what adds to these is
      passed over if the least FLOPs that it can take and the copies of its state cost as much as
      the cheapest that was found.
    - Standard attention where flash attention was too large, if the base's forward and backward
      take no more with flash.
    - Offloaded activations where fewer micro-batches had none that was large enough: a smaller
      piece has none either.
    - Checkpoints around more of the first blocks than cost less than the cheapest found.

    And what is taken for granted: a step takes no more memory with more micro-batches (from two
    on), more segments (up to the square root of the layers), a checkpoint more, smaller pages,
    fewer copies under way, or less for a schedule. So the least that fits is found by bisection,
    and a schedule in some rounds. `tests/brute_force_fit.py` compares what is found with all
    recipes of a grid.

    An estimate is put together from the step with few of the model's equal blocks, where it has
    such and grows evenly with them, and from updates of few parameters
    (`course_lib.budget.extrapolate`); it equals that of the whole step. The cheapest is confirmed
    by the step with all blocks; where that takes something else, all are searched again by whole
    steps.

    Args:
        make_model, make_batch, loss_sum: as for `estimate`; micro-batches are tried where the
            loss's weight is known.
        budget_bytes: for all tensors of the step, the batch aside.
        max_norm: clip the gradient to this norm, as `train_step` does; steps in backward are then
            passed over.
        blocks: what is checkpointed, as for a `Recipe`.
        recipes: to look among these alone.
        base: what all recipes have, such as precision, optimizer and `min_bytes`; and `ranks`, for
            which each `shard` is tried unless it names one.
        rates: of the machine, or the name of one in `RATES`.
        kind: as for `estimate`.
        count: what must fit: "tensors"; or "reserved", with "cuda" alone, by the rules of PyTorch's
            allocator (`course_lib.budget.reservation`), for which each recipe's step is run again.
        tier: as for `estimate`; if left out, "file" for "laptop" and "host" for all other machines.
        quick: an answer sooner, which may not be the cheapest: checkpoints around all blocks or
            none, flash attention where the model takes it, all of the optimizer's state offloaded
            or none, one micro-batch or the most.
        progress: show a bar, where tqdm is installed; or a function that is called with each
            recipe before it is estimated.

    Raises:
        InfeasibleBudget: nothing was found that fits; the least peak met in the search is named,
            with its recipe.
        TypeError, ValueError: an argument is not of its kind, or out of its range.
    """
    whole("budget_bytes", budget_bytes, 1, of="bytes")
    if tier is None:
        tier = "file" if rates in ("laptop", RATES["laptop"]) else "host"
    one_of("tier", tier, TIERS)
    one_of("kind", kind, KINDS)
    check_count(one_of("count", count, COUNTS), kind)
    rates = rates if isinstance(rates, Rates) else RATES[one_of("rates", rates, RATES)]
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
    with _progress(progress) as watch, warnings.catch_warnings():
        # nothing was large enough: the search finds out
        warnings.filterwarnings("ignore", "no activation was moved")
        options = {"loss_sum": loss_sum, "tier": tier, "max_norm": max_norm, "kind": kind}
        known = Known(
            make_model, make_batch, base, blocks=blocks, quick=quick, watch=watch, **options
        )

        def within(room: int) -> Estimates:
            return that_fit(Search(known, room, rates), base, recipes)

        def fitting(room: int) -> Estimates:
            found = within(room) if count == "tensors" else that_reserve(room, within)
            found.within = fitting
            return found

        return fitting(budget_bytes)


def that_fit(search: Search, base: Recipe, recipes: Sequence[Recipe] | None = None) -> Estimates:
    """`fit`, by what is known already."""
    known = search.known
    while True:
        if recipes is not None:
            found, tried = _among(search, recipes)
        elif base.ranks > 1:
            found, tried = _on_ranks(search, base)
        else:
            found = _all(search)
            tried = known.estimates.values()
        found.sort(key=search.order)
        least = min(tried, key=lambda e: e.peak_bytes, default=None)
        if known.confirms(found[0] if found else least):
            break
    if not found:
        told = "none was found"
        if least:
            told = f"the least peak found is {bytes_text(least.peak_bytes)}, of {least.recipe!r}"
        raise InfeasibleBudget(search.budget, least and least.peak_bytes, told, least)
    title = text(
        (
            "{count} recipe fits into {budget}; {known} were estimated"
            if len(found) == 1
            else "{count} recipes fit into {budget}; {known} were estimated"
        ),
        **{"count": len(found), "budget": bytes_text(search.budget), "known": len(known.estimates)},
    )
    if known.quick:
        title = text("{found}, by a quick search, which may miss cheaper ones", found=title)
    return Estimates(found, search.rates, title, known.estimate)


# ---- where to look


def _among(search: Search, recipes: Iterable[Recipe]) -> tuple[list[Estimate], list[Estimate]]:
    """Recipes of these that fit, and all of them."""
    tried = []
    for recipe in dict.fromkeys(recipes):
        with suppress(InfeasibleBudget):  # of the recipe's own schedule_bytes
            tried.append(search.known.estimate(recipe))
    return [e for e in tried if e.peak_bytes <= search.budget], tried


def _on_ranks(search: Search, base: Recipe) -> tuple[list[Estimate], list[Estimate]]:
    """Estimates that fit on several ranks: each sharding, with the fewest micro-batches, and with
    checkpoints where it does not fit without.

    The second list has all that were estimated.
    """
    known = search.known
    make_model, make_batch = known.composing.given
    with symbolic():
        shapes = rank.shapes_of(model_of(make_model, rank.single(replace(base, shard="zero3"))))
        samples = samples_in(make_batch())
    pieces = known.options("micro_batches", *rank.pieces(replace(base, micro_batches=1), samples))
    keeps = known.options("checkpoint", "none", "selective", "layers")
    found = []
    for shard, keep, attention in product(rank.MODES, keeps, known.values("attention")):
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
            continue  # it fits without checkpoints
        optional = keep != keeps[0] or (base.shard is None and shard not in rank.REPLICATED)
        # a model without blocks, or a loss not by its call
        with suppress(ValueError) if optional else nullcontext():
            best = fewest_pieces(search, family, pieces)
            found += [known.estimate(best)] if best else []
    tried = [e for recipe, e in known.estimates.items() if recipe.ranks > 1]
    if not tried:  # even weights, gradients and state do not fit
        shard = base.shard or "zero3"
        blocks = None if keeps[-1] == "none" else known.blocks
        more = {
            "attention": known.values("attention")[-1],
            "micro_batches": pieces[-1],
            "blocks": blocks,
        }
        tried = [known.estimate(replace(base, shard=shard, checkpoint=keeps[-1], **more))]
    return found, tried


def _all(search: Search) -> list[Estimate]:
    """Combinations of techniques, those of few techniques first."""
    known = search.known
    found: list[Recipe] = []
    too_large: set[Recipe] = set()
    for family in sorted(known.families(), key=lambda recipe: _size(known, recipe)):
        if known.floor_bytes(family) > search.budget or known.leaner(family) in too_large:
            too_large.add(family)
            continue
        if _needless(search, family, found) or _idle(known, family):
            continue
        try:
            best = refine(search, family)
        # it changes in place what "selective" has kept, say
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
    """The recipe with the largest pages that fit; they cost what small ones do."""
    pages = (replace(recipe, page_bytes=size) for size in search.known.pages_for(recipe))
    return next(filter(search.fits, pages))


def _size(known: Known, recipe: Recipe) -> tuple[float, int]:
    """Amount that a recipe adds to the plain step, for the order of the search."""
    return known.amounts(recipe), recipe.micro_batches


def _needless(search: Search, family: Recipe, found: list[Recipe]) -> bool:
    """Whether the family adds to what fits, and can be no cheaper.

    To add costs, but to two kinds: with offloaded activations, a checkpoint, a head in chunks and
    micro-batches leave less to be moved; with a schedule or segments, any room that is won makes
    them cheaper. What adds to these is tried where it may be the cheapest of all.
    """
    smaller = [recipe for recipe in found if search.known.adds_to(family, recipe)]
    if any(
        recipe.checkpoint not in CHAINED and _moves_as_much(family, recipe) for recipe in smaller
    ):
        return True
    return bool(smaller) and search.known.least_seconds(family, search.rates) >= min(
        map(search.seconds, found)
    )


def _moves_as_much(recipe: Recipe, smaller: Recipe) -> bool:
    names = [field for field, technique in BY_FIELD.items() if technique.in_forward]
    return not smaller.offload_activations or all(
        getattr(recipe, name) == getattr(smaller, name) for name in ("micro_batches", *names)
    )


def _idle(known: Known, family: Recipe) -> bool:
    """Whether nothing is large enough to go down: it was not with fewer micro-batches, whose
    tensors are larger."""
    fewer = (
        replace(family, micro_batches=count)
        for count in known.pieces_for(family)
        if count < family.micro_batches
    )
    tried = (recipe for recipe in fewer if recipe in known.estimates)
    return family.offload_activations and any(map(known.moves_nothing, tried))


def _can_do_with_less(search: Search, recipe: Recipe, found: list[Recipe]) -> bool:
    """Whether another one uses part of it and comes first."""
    order = search.order(search.known.estimate(recipe))
    others = (other for other in found if other != recipe and search.known.adds_to(recipe, other))
    return any(search.order(search.known.estimate(other)) < order for other in others)


def _add_first_blocks(search: Search, found: list[Recipe]) -> None:
    """Checkpoints around the first blocks only, where that is the cheapest of all."""
    known = search.known
    if known.quick or known.base.checkpoint != "none" or "layers" not in known.values("checkpoint"):
        return
    cheapest = min(map(search.seconds, found))
    for plain in known.families():
        if plain.checkpoint != "none" or plain.offload_activations:
            continue
        if known.least_seconds(plain, search.rates) >= cheapest:
            continue
        one = replace(plain, checkpoint="layers", blocks=known.blocks, first_blocks=1)
        if known.floor_bytes(plain) > search.budget or search.seconds(one) >= cheapest:
            continue
        fewest = fewest_blocks(search, one, search.most_blocks(one, cheapest))
        if fewest and search.seconds(fewest) < cheapest:
            found.append(fewest)
            cheapest = search.seconds(fewest)


def _find_least(search: Search) -> None:
    """Estimate, for the message, what takes the least, among the recipes that use the most."""
    known = search.known
    attentions = known.leanest or known.values("attention")
    # of which more is not always less; of all others, the most
    either = {"attention", "checkpoint", "offload_activations", "in_backward", "offload_optimizer"}
    most = {field: known.values(field)[-1] for field in BY_FIELD if field not in either}
    families = dict.fromkeys(
        replace(recipe, micro_batches=known.pieces_for(recipe)[-1])
        for recipe in known.families()
        if recipe.attention in attentions
        and all(getattr(recipe, field) == value for field, value in most.items())
    )
    lean = [each for each in families if each.offload_activations or each.checkpoint == "optimal"]
    for recipe in sorted(lean or families, key=lambda each: -each.offload_optimizer):
        least = min(e.peak_bytes for e in known.estimates.values())
        if known.floor_bytes(recipe) >= least:
            continue
        with suppress(RuntimeError, InfeasibleBudget):  # as in a search
            known.estimate(least_schedule(search, recipe) if recipe.schedule_bytes == 1 else recipe)


@contextmanager
def _progress(
    wanted: bool | Callable[[Recipe], None],
) -> Iterator[Callable[[Recipe], None]]:
    """Yield the function that is called before each estimate: the caller's own, or one that moves a
    bar where a bar is wanted and tqdm is installed."""
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
