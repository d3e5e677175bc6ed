"""Which recipes fit a budget, the cheapest first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from course_lib._check import InfeasibleBudget, kind, one_of, whole
from course_lib.memory import symbolic
from course_lib.memory.show import Table, bytes_text
from course_lib.models import Attention
from course_lib.offload import chosen_below

from .estimating import RATES, Estimate, Rates, estimate
from .loss import LossSum, drop_probability, has_loss_sum, is_decoder, samples_in, trained
from .recipe import ATTENTIONS, Recipe, pieces_allowed
from .step import default_dtype, model_of

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
HEAD_CHUNK = 512


class Estimates(Table, list):
    """A list of `Estimate` values that shows itself as a table."""

    columns = ("peak, MB", "TFLOPs", "GB moved", "seconds", "recipe")

    def __init__(self, found: Iterable[Estimate], rates: Rates, title: str = ""):
        list.__init__(self, found)
        self.rates, self.title = rates, title

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
    least number of micro-batches, and of segments, is found by bisection, since each more takes less memory (from two
    micro-batches on, and up to the square root of the layers; if those are too few, a segment a layer is tried).

    Args:
        make_model, make_batch, loss_sum: as for `estimate`; micro-batches are tried where the loss's weight is known.
        budget_bytes: for all tensors of the step, the batch aside.
        recipes: to look among these alone.
        base: precision and optimizer; fp32 and adam if left out.
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
    rates = rates if isinstance(rates, Rates) else RATES[one_of("rates", rates, RATES)]
    base = kind("base", Recipe() if base is None else base, Recipe, "a Recipe")
    if recipes is not None:
        recipes = list(kind("recipes", recipes, Iterable, "several recipes, as in a list"))
        for recipe in recipes or [None]:
            kind("recipes", recipe, Recipe, "one Recipe or more")
    with _progress(progress) as watch:
        search = _Search(make_model, make_batch, loss_sum, budget_bytes, base, tier, watch)
        found = _all(search) if recipes is None else _among(search, recipes)
    if not found:
        least, told = search.least, "none was found"
        if least:
            told = f"the least peak found is {bytes_text(least.peak_bytes)}, of {least.recipe!r}"
        raise InfeasibleBudget(budget_bytes, least and least.peak_bytes, told, least)
    found.sort(key=lambda e: (rates.seconds(e), e.recipe.micro_batches, e.peak_bytes))
    fits = "recipe fits" if len(found) == 1 else "recipes fit"
    title = f"{len(found)} {fits} into {bytes_text(budget_bytes)}; {len(search.known)} were estimated"
    return Estimates(found, rates, title)


class _Search:
    """One search: what is known of the model, and the estimates made so far."""

    def __init__(self, make_model, make_batch, loss_sum, budget_bytes: int, base: Recipe, tier: str, watch=None):
        self.make_model, self.make_batch, self.loss_sum, self.tier = make_model, make_batch, loss_sum, tier
        self.budget, self.watch = budget_bytes, watch or (lambda recipe: None)
        self.known: dict[Recipe, Estimate] = {}
        self.least: Estimate | None = None
        self.base = Recipe(precision=base.precision, optimizer=base.optimizer)
        self.estimate(self.base)  # first of all, since it says what is wrong with model or batch
        with symbolic(), default_dtype(base.dtype):
            model, batch = model_of(make_model, self.base), make_batch()
            self.decoder = is_decoder(model) and loss_sum is None
            weighed = loss_sum is not None or has_loss_sum(model)
            self.pieces = pieces_allowed(samples_in(batch)) if weighed else [1]
            self.layers = len(model.layers) if self.decoder else 0
            attentions = [module for module in model.modules() if isinstance(module, Attention)]
            self.trained = trained(model)
            self.parameter_bytes = sum(p.nbytes for p in model.parameters())
        stateless = self.base.optimizer == "sgd" and self.base.precision == "fp32"
        self.fractions = FRACTIONS[:1] if stateless else FRACTIONS
        self.attentions, self.flash_is_less = ATTENTIONS[:1], False
        if attentions and not drop_probability(attentions):
            self.attentions = ATTENTIONS
            self.compare_attentions()

    def compare_attentions(self) -> None:
        """Flash is the smaller one where it is so at both ends: the whole batch, and as little as can be."""
        keep = {"checkpoint": "layers"} if self.decoder else {}
        ends = (self.base, replace(self.base, micro_batches=self.pieces[-1], **keep))
        pairs = [[self.estimate(replace(end, attention=name)) for name in ATTENTIONS] for end in ends]
        self.flash_is_less = all(new.peak_bytes <= old.peak_bytes for old, new in pairs)
        if self.flash_is_less and all(new.flops <= old.flops for old, new in pairs):
            self.attentions = ATTENTIONS[1:]  # better in all respects

    def estimate(self, recipe: Recipe) -> Estimate:
        if recipe not in self.known:
            self.watch(recipe)
            options = {"loss_sum": self.loss_sum, "tier": self.tier}
            with warnings.catch_warnings():  # that nothing was large enough to go down is what the search is to find
                warnings.filterwarnings("ignore", "no activation was moved")
                self.known[recipe] = estimate(self.make_model, self.make_batch, recipe, **options)
            if self.least is None or self.known[recipe].peak_bytes < self.least.peak_bytes:
                self.least = self.known[recipe]
        return self.known[recipe]

    def fits(self, recipe: Recipe) -> bool:
        return self.at_least_bytes(recipe) <= self.budget and self.estimate(recipe).peak_bytes <= self.budget

    # ---- what is known without an estimate

    def at_least_bytes(self, recipe: Recipe) -> int:
        """Forward and backward are the same wherever the state is, but for what of it is on the device."""
        twins = (replace(recipe, offload_optimizer=fraction) for fraction in FRACTIONS)
        held = self.held_bytes(recipe) - 4 * len(self.trained)  # Adam's step counters, which may be below
        return max(
            (
                max(e.phase_peaks["forward"], e.phase_peaks["backward"]) + held - self.held_bytes(e.recipe)
                for e in (self.known[twin] for twin in twins if twin in self.known)
            ),
            default=0,
        )

    def floor_bytes(self, recipe: Recipe) -> int:
        """What is there at some moment of every step: parameters and the state above; gradients too, or the largest."""
        gradients = [p.nbytes for p in self.trained]
        return self.held_bytes(recipe) + (max(gradients) if recipe.in_backward else sum(gradients))

    def held_bytes(self, recipe: Recipe) -> int:
        below = chosen_below(self.trained, recipe.offload_optimizer)
        count = sum(p.numel() for p in self.trained if p not in below)
        masters = 4 if recipe.precision == "bf16" else 0
        return self.parameter_bytes + count * (masters + (8 if recipe.optimizer == "adam" else 0))

    # ---- the cheapest of one combination

    def best_of(self, family: Recipe) -> Recipe | None:
        """The cheapest of the family that fits."""
        if family.checkpoint == "optimal":
            return self.best_schedule(family)
        if family.checkpoint != "segments":
            return self.fewest_pieces(family)
        counts = sorted({2, *range(2, math.isqrt(self.layers) + 1), self.layers})
        family = _first([replace(family, segments=count) for count in counts], self.fewest_pieces)
        return family and self.fewest_pieces(family)

    def fewest_pieces(self, family: Recipe) -> Recipe | None:
        """With as few micro-batches as fit. One has no full set of gradients beside its activations, so it is tried."""
        one, *more = [replace(family, micro_batches=count) for count in ([1] if family.in_backward else self.pieces)]
        return one if self.fits(one) else _first(more, self.fits)

    def best_schedule(self, family: Recipe) -> Recipe | None:
        """Smaller micro-batches leave the schedule room for more layers: half as many, as long as it costs no more."""
        best: Recipe | None = None
        count = 1 if family.in_backward else self.pieces[-1]
        while count:
            pieces = max(number for number in self.pieces if number <= count)
            trial = self.with_schedule(replace(family, micro_batches=pieces))
            if not self.fits(trial) or (best and self.estimate(trial).flops > self.estimate(best).flops):
                break
            best, count = trial, pieces // 2
        return best

    def with_schedule(self, recipe: Recipe) -> Recipe:
        """What parameters, state and gradients leave is for the schedule; then what the estimate shows to be left."""
        room = self.budget - self.held_bytes(recipe)
        room -= 0 if recipe.in_backward else sum(p.nbytes for p in self.trained)
        best: Recipe | None = None
        for _ in range(3):
            trial = replace(recipe, schedule_bytes=max(1, room))
            try:
                peak = self.estimate(trial).peak_bytes
            except InfeasibleBudget:
                break
            if peak <= self.budget:
                best = trial
            spare = self.budget - peak
            if 0 <= spare < self.budget // 200:
                break
            room += spare
        if best is None:
            try:
                self.estimate(replace(recipe, schedule_bytes=1))
            except InfeasibleBudget as error:  # which says what the least schedule takes
                best = replace(recipe, schedule_bytes=error.least_bytes)
                self.estimate(best)
        return best


def _first(recipes: Sequence[Recipe], fits: Callable[[Recipe], Any]) -> Recipe | None:
    """The first one that fits, by bisection: where one fits, all after it do."""
    if not recipes or not fits(recipes[-1]):
        return None
    low, high = -1, len(recipes) - 1  # the one at low does not fit, the one at high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(recipes[middle]) else (middle, high)
    return recipes[high]


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
        best = search.best_of(family)
        if best is not None:
            found.append(best)
        else:
            too_large.add(family)
    if not found:
        _find_least(search)
    return [search.estimate(recipe) for recipe in found]


def _families(search: _Search) -> Iterator[Recipe]:
    """One recipe for each combination; how many micro-batches, segments and schedule bytes is found later."""
    keeps: list[dict[str, Any]] = [{}, {"offload_activations": True}]
    if search.decoder:
        keeps += [{"checkpoint": "selective"}, {"checkpoint": "layers"}]
        keeps += [{"checkpoint": "layers", "offload_activations": True}]
        keeps += [{"checkpoint": "optimal", "schedule_bytes": 1}]
        keeps += [{"checkpoint": "segments", "segments": 2}] if search.layers > 1 else []
    chunks = (None, HEAD_CHUNK) if search.decoder else (None,)
    for attention, keep, chunk, inside, fraction in product(
        search.attentions, keeps, chunks, (False, True), search.fractions
    ):
        techniques = {"attention": attention, "head_chunk": chunk, "in_backward": inside, **keep}
        yield replace(search.base, offload_optimizer=fraction, **techniques)


def _find_least(search: _Search) -> None:
    """For the message: what takes the least, among those that use the most."""
    chunk = HEAD_CHUNK if search.decoder else None
    keeps: list[dict[str, Any]] = [{"offload_activations": True}]
    if search.decoder:
        keeps += [{"offload_activations": True, "checkpoint": "layers"}, {"checkpoint": "optimal", "schedule_bytes": 1}]
    kinds = search.attentions[-1:] if search.flash_is_less else search.attentions
    for attention, fraction, inside, keep in product(kinds, search.fractions[::-1], (False, True), keeps):
        pieces = 1 if inside else search.pieces[-1]
        techniques = {"attention": attention, "head_chunk": chunk, "in_backward": inside, "micro_batches": pieces}
        recipe = replace(search.base, offload_optimizer=fraction, **techniques, **keep)
        if max(search.floor_bytes(recipe), search.at_least_bytes(recipe)) < search.least.peak_bytes:
            search.estimate(search.with_schedule(recipe) if recipe.checkpoint == "optimal" else recipe)


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
    with tqdm(unit=" recipes", leave=False) as bar:

        def show(recipe: Recipe) -> None:
            bar.set_postfix_str(str(recipe), refresh=False)
            bar.update()

        yield show
