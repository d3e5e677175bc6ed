"""Which recipes fit a budget, the cheapest first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor, nn

from course_lib._check import InfeasibleBudget, kind, one_of, whole
from course_lib._torch import tensors_in
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import say, text
from course_lib.memory.show import Table, bytes_text
from course_lib.offload import chosen_below

from . import sharding
from .attention import attentions_of, drop_probability
from .cheapest import best_of, fewest_blocks, least_schedule
from .composing import Composing
from .estimating import TIERS, Estimate
from .loss import LossSum, has_loss_sum, is_decoder, mixes_samples, samples_in
from .rates import RATES, Rates
from .recipe import ALL_ABOVE, ATTENTIONS, Recipe, pieces_allowed
from .show import Way, steps_to

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
HEAD_CHUNK = 512  # tokens, or a sixteenth of the batch's where that is more: smaller ones save little
STATE = {"adam": 2, "momentum": 1}  # numbers for each parameter


class Estimates(Table, list):
    """A list of `Estimate` values that shows itself as a table."""

    columns = ("peak, MB", "TFLOPs", "GB moved", "seconds", "recipe")

    def __init__(self, found: Iterable[Estimate], rates: Rates, title: str = "", estimate: Callable | None = None):
        list.__init__(self, found)
        self.rates, self.title, self.estimate = rates, title, estimate

    def way(self) -> Way:
        """From the plain step to the cheapest, one technique at a time, by the search's own estimates."""
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
    recipes: Iterable[Recipe] | None = None,
    base: Recipe | None = None,
    rates: Rates | str = "laptop",
    tier: str | None = None,
    progress: bool = True,
) -> Estimates:
    """The recipes whose step fits the budget, cheapest first by `Rates.seconds`, then by fewer micro-batches.

    Without `recipes`, combinations of the techniques that leave the training as it is: attention, checkpoints,
    offload, chunks of the loss head, steps in backward, micro-batches. Precision and optimizer are those of `base`.
    What comes out needs all that it uses: a technique that could be left out, with the rest as it is, is left out; and
    micro-batches are as few as fit.

    Not every combination is run. Passed over are: one whose parameters, state and gradients alone exceed the budget;
    one that adds to a combination that fits; standard attention where flash, if it is the smaller, does not fit. The
    least number of micro-batches is found by bisection, since from two on each more takes less memory; of blocks with
    checkpoints all are tried, and as few of the first as fit where that may be the cheapest; segments where they may be
    faster than the schedule that was found.

    An estimate is put together from the step with few of the model's equal blocks, where it has such and grows evenly
    with them, and from updates of few parameters (`course_lib.budget.composing`); it equals that of the whole step.
    The cheapest is confirmed by the step with all blocks; where that takes something else, all are searched again by
    whole steps.

    Args:
        make_model, make_batch, loss_sum: as for `estimate`; micro-batches are tried where the loss's weight is known.
        budget_bytes: for all tensors of the step, the batch aside.
        max_norm: clip the gradient to this norm, as `train_step` does; steps in backward are then passed over.
        recipes: to look among these alone.
        base: precision and optimizer; fp32 and adam if left out; and `ranks`, for which each `shard` is tried unless
            it names one.
        rates: of the machine, or the name of one in `RATES`.
        tier: as for `estimate`; if left out, "file" for "laptop" and "host" for all other machines.
        progress: show a bar, where tqdm is installed.

    Raises:
        InfeasibleBudget: nothing was found that fits; the least peak met in the search is named, with its recipe.
        TypeError, ValueError: an argument is not of its kind, or out of its range.
    """
    whole("budget_bytes", budget_bytes, 1, of="bytes")
    if tier is None:
        tier = "file" if rates in ("laptop", RATES["laptop"]) else "host"
    one_of("tier", tier, TIERS)
    rates = rates if isinstance(rates, Rates) else RATES[one_of("rates", rates, RATES)]
    base = kind("base", Recipe() if base is None else base, Recipe, "a Recipe")
    if recipes is not None:
        recipes = list(kind("recipes", recipes, Iterable, "several recipes, as in a list"))
        if not recipes:
            raise ValueError("recipes is empty; it takes one Recipe or more, or None for all that the search knows")
        for recipe in recipes:
            kind("recipes", recipe, Recipe, "one Recipe or more")
    with _progress(progress) as watch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no activation was moved")  # nothing was large enough: the search finds out
        alone = replace(base, ranks=1, shard=None, update="loop") if base.ranks > 1 else base
        search = _Search(make_model, make_batch, loss_sum, budget_bytes, alone, tier, watch, max_norm)
        found = _found(search, recipes, rates, base)
    if not found:
        least, told = search.least, "none was found"
        if least:
            told = f"the least peak found is {bytes_text(least.peak_bytes)}, of {least.recipe!r}"
        raise InfeasibleBudget(budget_bytes, least and least.peak_bytes, told, least)
    title = text(
        "{count} recipe fits into {budget}; {known} were estimated"
        if len(found) == 1
        else "{count} recipes fit into {budget}; {known} were estimated",
        **{"count": len(found), "budget": bytes_text(budget_bytes), "known": len(search.known)},
    )
    return Estimates(found, rates, title, lambda recipe: search.known.get(recipe) or search.estimated(recipe))


class _Search:
    """One search: what is known of the model, and the estimates made so far."""

    def __init__(self, make_model, make_batch, loss_sum, budget_bytes, base: Recipe, tier, watch=None, max_norm=None):
        self.budget, self.watch = budget_bytes, watch or (lambda recipe: None)
        self.base = Recipe(precision=base.precision, optimizer=base.optimizer, update=base.update)
        self.known: dict[Recipe, Estimate] = {}
        self.least: Estimate | None = None
        self.estimates = Composing(make_model, make_batch, self.base, loss_sum=loss_sum, tier=tier, max_norm=max_norm)
        self.insides = (False, True) if max_norm is None else (False,)
        self.estimate(self.base)  # first of all, since it says what is wrong with model or batch
        composer = self.estimates.composer_of(self.base)
        model, tokens = composer.model, next(tensors_in(composer.batch))
        self.chunk = HEAD_CHUNK if tokens.is_floating_point() else max(HEAD_CHUNK, tokens.numel() // 16)
        self.decoder = is_decoder(model) and loss_sum is None
        weighed = (loss_sum is not None or has_loss_sum(model)) and not mixes_samples(model)
        self.pieces = pieces_allowed(samples_in(composer.batch)) if weighed else [1]
        self.layers = 0
        with suppress(ValueError):  # without a list of like modules
            self.layers = len(names_of(model, None))
        self.trained = composer.trained
        self.parameter_bytes = sum(p.nbytes for p in model.parameters())
        stateless = self.base.optimizer in ALL_ABOVE or (self.base.optimizer, self.base.precision) == ("sgd", "fp32")
        self.fractions = FRACTIONS[:1] if stateless else FRACTIONS
        self.attentions, self.flash_is_less = ATTENTIONS[:1], False
        if drop_probability(attentions_of(model)) == 0 and _goes_with(self, attention="flash"):
            self.compare_attentions()

    def compare_attentions(self) -> None:
        """Flash is the smaller one where it is so at both ends: the whole batch, and as little as can be."""
        keep = {"checkpoint": "layers"} if _goes_with(self, checkpoint="layers") else {}
        self.attentions = ATTENTIONS
        ends = (self.base, replace(self.base, micro_batches=self.pieces[-1], **keep))
        pairs = [[self.estimate(replace(end, attention=name)) for name in ATTENTIONS] for end in ends]
        self.flash_is_less = all(new.peak_bytes <= old.peak_bytes for old, new in pairs)
        if self.flash_is_less and all(new.flops <= old.flops for old, new in pairs):
            self.attentions = ATTENTIONS[1:]  # better in all respects

    def estimate(self, recipe: Recipe) -> Estimate:
        if recipe not in self.known:
            self.watch(recipe)
            self.known[recipe] = self.estimated(recipe)
            if self.least is None or self.known[recipe].peak_bytes < self.least.peak_bytes:
                self.least = self.known[recipe]
        return self.known[recipe]

    def flops(self, recipe: Recipe) -> int:
        return self.estimate(recipe).flops

    def estimated(self, recipe: Recipe) -> Estimate:
        if recipe.ranks > 1:
            return sharding.estimate(*self.estimates.given, recipe, **self.estimates.options)
        return self.estimates(recipe)

    def confirms(self, best: Estimate | None) -> bool:
        """Whether the best estimate is what the whole step takes; if not, the search begins again, with whole steps."""
        if best is None or best.recipe.ranks > 1 or not self.estimates.composing:
            return True
        self.watch(best.recipe)
        if not self.estimates.confirms(best):
            self.known, self.least = {}, None
        return bool(self.known)

    def fits(self, recipe: Recipe) -> bool:
        possible = recipe.ranks > 1 or self.at_least_bytes(recipe) <= self.budget
        return possible and self.estimate(recipe).peak_bytes <= self.budget

    # ---- what is known without an estimate

    def at_least_bytes(self, recipe: Recipe) -> int:
        """Forward and backward are the same wherever the state is, but for what of it is on the device.

        Steps in backward leave out gradients, and nothing else.
        """
        held = self.held_bytes(recipe) - 4 * len(self.trained)  # Adam's step counters, which may be below
        least = 0
        for inside in {recipe.in_backward, False}:
            gradients = (recipe.in_backward - inside) * sum(p.nbytes for p in self.trained)
            twins = (replace(recipe, in_backward=inside, offload_optimizer=fraction) for fraction in FRACTIONS)
            for e in (self.known[twin] for twin in twins if twin in self.known):
                peak = max(e.phase_peaks["forward"], e.phase_peaks["backward"])
                least = max(least, peak + held - self.held_bytes(e.recipe) - gradients)
        return least

    def floor_bytes(self, recipe: Recipe) -> int:
        """What is there at some moment of every step: parameters and the state above; gradients too, or the largest."""
        gradients = [p.nbytes for p in self.trained]
        return self.held_bytes(recipe) + (max(gradients) if recipe.in_backward else sum(gradients))

    def held_bytes(self, recipe: Recipe) -> int:
        return self.parameter_bytes + _state_above(self.trained, recipe)


def _state_above(parameters: Sequence[Tensor], recipe: Recipe) -> int:
    """Bytes of state and master weights that are where the parameters are."""
    below = chosen_below(parameters, recipe.offload_optimizer)
    masters = recipe.precision == "bf16" or recipe.offload_optimizer > 0  # of parameters in 16 bits
    size = 4 * STATE.get(recipe.optimizer, 0)
    each = {p: size + 4 if masters and p.itemsize < 4 else size * p.itemsize // 4 for p in parameters if p not in below}
    return sum(p.numel() * nbytes for p, nbytes in each.items())


def _found(search: _Search, recipes: Iterable[Recipe] | None, rates: Rates, base: Recipe) -> list[Estimate]:
    """What fits, the cheapest first, which is confirmed."""
    while True:
        if recipes is not None:
            found = _among(search, recipes)
        elif base.ranks > 1:
            found = sharding.that_fit(search, base)
        else:
            found = _with_few_checkpoints(search, _all(search), rates)
        found.sort(key=lambda e: (rates.seconds(e), e.recipe.micro_batches, e.sent_bytes, e.peak_bytes))
        if search.confirms(found[0] if found else search.least):
            return found


def _among(search: _Search, recipes: Iterable[Recipe]) -> list[Estimate]:
    found, possible = [], []
    for recipe in dict.fromkeys(recipes):
        with suppress(InfeasibleBudget):  # of the recipe's own schedule_bytes
            if search.fits(recipe):
                found.append(search.estimate(recipe))
            possible.append(recipe)
    if not found:  # for the message
        search.least = min(map(search.estimate, possible), key=lambda e: e.peak_bytes, default=None)
    return found


def _all(search: _Search) -> list[Estimate]:
    found: list[Recipe] = []
    too_large: set[Recipe] = set()
    for family in sorted(_families(search), key=lambda recipe: (_techniques(recipe), recipe.attention)):
        flash = replace(family, attention="flash")
        if (
            any(_adds_to(family, smaller) for smaller in found)
            or search.floor_bytes(family) > search.budget
            or (search.flash_is_less and flash in too_large)
        ):
            continue
        try:
            best = best_of(search, family, min(map(search.flops, _schedules(family, found)), default=math.inf))
        except RuntimeError:  # the step does not run: it changes in place what "selective" has kept, say
            continue
        if best is not None:
            found.append(best)
        else:
            too_large.add(family)
    if not found:
        _find_least(search)
    return [search.estimate(recipe) for recipe in found]


def _schedules(family: Recipe, found: list[Recipe]) -> list[Recipe]:
    """Those found that would do in place of the family's checkpoints, and need no more besides."""
    scheduled = replace(family, checkpoint="optimal", segments=None, schedule_bytes=1, offload_activations=False)
    return [recipe for recipe in found if recipe.checkpoint == "optimal" and _adds_to(scheduled, recipe)]


def _with_few_checkpoints(search: _Search, found: list[Estimate], rates: Rates) -> list[Estimate]:
    """What was found, and checkpoints around the first blocks only, where that may be the cheapest of all.

    It costs no less than the step without checkpoints.
    """
    cheapest = min(map(rates.seconds, found), default=0)
    for e in [e for e in found if e.recipe.checkpoint == "layers"]:
        most = replace(e.recipe, micro_batches=1 if e.recipe.in_backward else search.pieces[-1])
        bound = search.estimate(replace(most, checkpoint="none"))
        if rates.seconds(bound) < cheapest and (fewest := fewest_blocks(search, most, bound.peak_bytes)):
            found.append(search.estimate(fewest))
            cheapest = min(cheapest, rates.seconds(found[-1]))
    return found


def _families(search: _Search) -> Iterator[Recipe]:
    """One recipe for each combination; how many micro-batches, segments and schedule bytes is found later."""
    keeps: list[dict[str, Any]] = [{}, {"offload_activations": True}]
    if _goes_with(search, checkpoint="layers"):
        keeps += [{"checkpoint": "selective"}, {"checkpoint": "layers"}]
        keeps += [{"checkpoint": "layers", "offload_activations": True}]
    if _goes_with(search, checkpoint="optimal", schedule_bytes=1 << 60):
        keeps += [{"checkpoint": "optimal", "schedule_bytes": 1}]
        keeps += [{"checkpoint": "segments", "segments": 2}] if search.layers > 1 else []
    chunks = (None, search.chunk) if _goes_with(search, head_chunk=search.chunk) else (None,)
    for attention, keep, chunk, inside, fraction in product(
        search.attentions, keeps, chunks, search.insides, search.fractions
    ):
        techniques = {"attention": attention, "head_chunk": chunk, "in_backward": inside, **keep}
        yield replace(search.base, offload_optimizer=fraction, **techniques)


def _goes_with(search: _Search, **technique: Any) -> bool:
    """Whether the model has blocks to be checkpointed, a head that runs in chunks, attention that can be flash."""
    try:
        return search.decoder or bool(search.estimate(replace(search.base, **technique)))
    except (TypeError, ValueError, RuntimeError):
        return False


def _find_least(search: _Search) -> None:
    """For the message: what takes the least, among those that use the most."""
    chunk = search.chunk if _goes_with(search, head_chunk=search.chunk) else None
    keeps: list[dict[str, Any]] = [{"offload_activations": True}]
    if _goes_with(search, checkpoint="layers"):
        keeps += [{"offload_activations": True, "checkpoint": "layers"}]
    if _goes_with(search, checkpoint="optimal", schedule_bytes=1 << 60):
        keeps += [{"checkpoint": "optimal", "schedule_bytes": 1}]
    kinds = search.attentions[-1:] if search.flash_is_less else search.attentions
    for attention, fraction, inside, keep in product(kinds, search.fractions[::-1], search.insides, keeps):
        pieces = 1 if inside else search.pieces[-1]
        techniques = {"attention": attention, "head_chunk": chunk, "in_backward": inside, "micro_batches": pieces}
        recipe = replace(search.base, offload_optimizer=fraction, **techniques, **keep)
        if max(search.floor_bytes(recipe), search.at_least_bytes(recipe)) < search.least.peak_bytes:
            search.estimate(least_schedule(search, recipe) if recipe.checkpoint == "optimal" else recipe)


def _techniques(recipe: Recipe) -> float:
    """How much a recipe adds to the plain step, for the order of the search."""
    parts = (recipe.checkpoint != "none", recipe.offload_activations, recipe.head_chunk, recipe.in_backward)
    return sum(map(bool, parts)) + recipe.offload_optimizer


def _adds_to(recipe: Recipe, smaller: Recipe) -> bool:
    """Whether a recipe uses all that the smaller one uses, micro-batches aside: more than is needed."""
    return (
        recipe.attention == smaller.attention
        and smaller.checkpoint in ("none", recipe.checkpoint)
        and recipe.offload_activations >= smaller.offload_activations
        and bool(recipe.head_chunk) >= bool(smaller.head_chunk)
        and recipe.in_backward >= smaller.in_backward
        and recipe.offload_optimizer >= smaller.offload_optimizer
    )


@contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[Recipe], None]]:
    """What is to be called before each estimate: it moves a bar, where one is wanted and tqdm is installed."""
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
