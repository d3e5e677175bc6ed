"""Estimates of a model with many equal blocks, from its step with few of them and with one more.

Moment by moment, what is live grows by as much with each block; so do FLOPs and what is moved. The
optimizer's part of a step is put together from updates of few parameters, so that recipes that
differ in it alone share the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib._check import InfeasibleBudget
from course_lib._origin import explained, unlogged
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import CATEGORIES, Trace, symbolic
from course_lib.memory.growth import Growth, Irregular
from course_lib.offload import SymbolicStore, chosen_below
from course_lib.schedule import Cost, simulate

from .alike import groups_of
from .blocks import equal_blocks, shortened
from .estimate import Estimate, estimate
from .loss import LossSum, check_loss, trained
from .process import check_arguments, process_trace, watched
from .recipe import Recipe
from .stages import fastest
from .step import chain_of, check_model, default_dtype, model_of, pieces_of
from .updates import Updates

FEW = 2  # the first block and the last
MANY = 2 * FEW + 2  # from so many blocks on, FEW and FEW + 1 of them are less work
TRIED_COPIES = 2  # fetched ahead, or going down; with more of them, all blocks are run
# Of the fields of a recipe, those that this module has been tried with, and the checkpoints that
# treat blocks alike.
FIELDS = {
    "precision",
    "optimizer",
    "offload_optimizer",
    "attention",
    "checkpoint",
    "segments",
    "schedule_bytes",
    "first_blocks",
    "offload_activations",
    "min_bytes",
    "prefetch",
    "in_flight",
    "page_bytes",
    "head_chunk",
    "in_backward",
    "micro_batches",
    "update",
    "blocks",
}
ALIKE = ("none", "selective", "layers")


@dataclass
class Moments:
    """The trace of a step without an optimizer, in whose place one operator stands, that of
    `RecordingOptimizer`.

    Attributes:
        trace: of the step.
        due: of each moment, the parameters to be stepped; none for all but those of
            `RecordingOptimizer`.
    """

    trace: Trace
    due: list[Sequence[Tensor]]


class Composer:
    """Makes estimates of one model and batch, equal to those of `estimate`, with less work.

    A model that does not run with fewer blocks may raise anything.
    """

    def __init__(
        self,
        make_model: Callable,
        make_batch: Callable,
        base: Recipe,
        loss_sum: LossSum | None,
        tier: str,
        max_norm: float | None = None,
        kind: str = "cpu",
    ):
        check_arguments(make_model, make_batch, base)
        self.loss_sum, self.tier, self.max_norm, self.kind = loss_sum, tier, max_norm, kind
        with symbolic() as self.mode:
            self.model = model_of(make_model, base)
            with default_dtype(base.dtype):
                self.batch = make_batch()
        self.trained, self.blocks = trained(self.model), equal_blocks(self.model)
        self.runs_them = False  # as the segments of a schedule
        with suppress(ValueError):  # without a list of like modules
            self.runs_them = list(
                map(self.model.get_submodule, names_of(self.model, None))
            ) == list(self.blocks)
        self.parameters_of = [list(block.parameters()) for block in self.blocks]
        self.places = {
            p: (i, k)
            for i, parameters in enumerate(self.parameters_of)
            for k, p in enumerate(parameters)
        }
        self._moments: dict[Recipe, Moments] = {}
        self._few: dict[tuple[Recipe, int], Moments] = {}
        self._groups: dict[int, list[list[int]]] = {}
        self.updates = Updates(self.trained, self.blocks, tier, kind)

    def estimate(self, recipe: Recipe) -> Estimate:
        key = without_optimizer(recipe).on(self.tier)
        with self.checked(recipe):
            if key not in self._moments:
                self._moments[key] = self.moments(key)
            return self.with_optimizer(self._moments[key], recipe)

    def whole(self, recipe: Recipe) -> Estimate:
        """The same with all blocks in their places."""
        with self.checked(recipe):
            return self.with_optimizer(
                self.measured(without_optimizer(recipe), len(self.blocks), repeats=False), recipe
            )

    @contextmanager
    def checked(self, recipe: Recipe) -> Iterator[None]:
        with symbolic(self.mode), unlogged():
            check_model(self.model, recipe)
            check_loss(self.model, recipe, self.loss_sum)
            yield

    @staticmethod
    def takes(recipe: Recipe) -> bool:
        return FIELDS.issuperset(recipe.changed())

    def scheduled(self, recipe: Recipe) -> Cost:
        """Bytes of the chain's activations by a schedule, and the time of one micro-batch.

        Raises:
            InfeasibleBudget: none fits into the recipe's bytes.
        """
        pieces = pieces_of(self.batch, recipe.micro_batches)
        with symbolic(self.mode):
            unlike = [pieces[group[0]] for group in self.groups(recipe)]
            return dearest(self.model, unlike, recipe, self.loss_sum)

    def groups(self, recipe: Recipe) -> list[list[int]]:
        """Groups of the recipe's micro-batches that are alike."""
        if (count := recipe.micro_batches) not in self._groups:
            self._groups[count] = groups_of(self.model, pieces_of(self.batch, count), self.loss_sum)
        return self._groups[count]

    # ---- forward and backward

    def moments(self, recipe: Recipe) -> Moments:
        count = len(self.blocks)
        first = recipe.first_blocks or 0
        # a segment each, of which the last is not recomputed
        alone = recipe.segments == count and self.runs_them
        reach = self.reach(recipe)
        few = FEW + alone + reach
        if (
            count < MANY + 2 * bool(first)
            or recipe.blocks
            or not (recipe.checkpoint in ALIKE or alone)
            or (reach and few > count - first)  # into what comes after the blocks
        ):
            return self.measured(recipe, count)

        def grown(blocks: int, moments: Callable[[int], Moments]) -> Moments:
            if blocks <= few + 1:
                return moments(blocks)
            return self.grown(moments(few), moments(few + 1), blocks - few)

        def with_blocks(ones: int, others: int) -> Moments:
            """Moments of so many blocks with a checkpoint, and then so many without."""
            fields = {"first_blocks": ones} if first else {"segments": others} if alone else {}
            return self.few(replace(recipe, **fields), ones + others)

        try:
            return grown(
                count - first, lambda others: grown(first, lambda ones: with_blocks(ones, others))
            )
        except Irregular:
            return self.measured(recipe, count)

    def reach(self, recipe: Recipe) -> int:
        """Number of other blocks that copies reach into: of what is fetched ahead, or still goes
        down.

        Found for up to 2 of each kind, in decoders and in chains with sums between their blocks:
        the least number from which on each moment equals that of a step with all blocks. It is
        less where a block keeps more storages than its input.
        """
        if not recipe.offload_activations:
            return 0
        prefetch, in_flight = recipe.copies(self.tier)
        if max(prefetch, in_flight) > TRIED_COPIES:
            return len(self.blocks)
        if recipe.checkpoint == "layers":
            return 1 + 2 * in_flight + prefetch + (prefetch > 1)
        return 1 + 2 * (prefetch > 1)

    def few(self, recipe: Recipe, count: int) -> Moments:
        if (recipe, count) not in self._few:
            self._few[recipe, count] = self.measured(recipe, count)
        return self._few[recipe, count]

    def measured(self, recipe: Recipe, count: int, repeats: bool = True) -> Moments:
        store = SymbolicStore()
        optimizer = RecordingOptimizer(self.trained)
        with shortened(self.blocks, count):
            pieces, groups = pieces_of(self.batch, recipe.micro_batches), self.groups(recipe)
            options = self.loss_sum, store, self.max_norm, groups
            trace = watched(
                self.model, optimizer, pieces, recipe.on(self.tier), *options, repeats=repeats
            )[1:]
        due = iter(optimizer.due)
        return Moments(
            trace, [next(due) if phase == "optimizer" else () for _, phase in trace.operators]
        )

    def grown(self, few: Moments, more: Moments, blocks: int) -> Moments:
        """Moments with so many blocks more than `few`; a parameter's place is further on by the
        blocks that follow it."""
        growth = Growth(few.trace, more.trace)
        due = {id(few.trace): few.due, id(more.trace): more.due}
        rows: list[Sequence[Tensor]] = []
        for trace, start, stop, by in growth.sources(blocks):
            rows += [
                [self.further(p, by) for p in row] if row else row
                for row in due[id(trace)][start:stop]
            ]
        return Moments(growth.trace(blocks), rows)

    def further(self, p: Tensor, by: int) -> Tensor:
        """The parameter in the same place, so many blocks further on."""
        if p not in self.places:
            return p
        i, k = self.places[p]
        return self.parameters_of[i + by][k]

    # ---- the optimizer

    def with_optimizer(self, moments: Moments, recipe: Recipe) -> Estimate:
        below = chosen_below(self.trained, recipe.offload_optimizer)
        update = self.updates.of_all(recipe, below)
        trace = moments.trace
        live = moments.trace.live.copy()
        live[:, CATEGORIES.index("optimizer")] += update.held
        operators = list(trace.operators)
        for row, due in enumerate(moments.due):
            if due:
                own = (
                    self.updates.of(due[0], recipe, due[0] in below)
                    if recipe.in_backward
                    else update
                )
                # no operator runs: nothing is seen there
                live[row] = live[row] + own.more if own.operator else 0
                operators[row] = own.operator, operators[row][1]
        flops, down, up = np.array([trace.flops, trace.bytes_down, trace.bytes_up]) + update.totals
        totals = {"flops": int(flops), "bytes_down": int(down), "bytes_up": int(up)}
        on_host = sum(p.numel() for p in below) if self.tier == "host" else 0
        trace = Trace(operators, live, **totals)
        return Estimate.of(trace, recipe, self.tier, on_host, self.kind)


class Composing:
    """Estimates of one model and batch: composed, or of whole steps where the model does not allow
    it."""

    def __init__(self, make_model: Callable, make_batch: Callable, base: Recipe, **options: Any):
        self.given = (make_model, make_batch)
        self.base = base
        self.options = options
        self.composing, self.composers = True, {}  # by precision
        with explained():
            self.composer_of(base)

    def composer_of(self, recipe: Recipe) -> Composer:
        if recipe.precision not in self.composers:
            base = replace(self.base, precision=recipe.precision)
            self.composers[recipe.precision] = Composer(*self.given, base, **self.options)
        return self.composers[recipe.precision]

    def __call__(self, recipe: Recipe) -> Estimate:
        composable = self.composing and Composer.takes(recipe)
        if composable:
            try:
                found = self.composer_of(recipe).estimate(recipe)
                run = partial(process_trace, *self.given, recipe, events=True, **self.options)
                return found.traced_by(lambda: run()[0])
            except InfeasibleBudget:
                raise
            # any: the model may need all its blocks. If not that, the whole step says what is wrong
            except Exception:
                pass
        whole = estimate(*self.given, recipe, **self.options)
        self.composing &= not composable
        return whole

    def confirms(self, found: Estimate) -> bool:
        """Whether an estimate is that of the step with all blocks; if not, none will be composed
        any more."""
        if Composer.takes(found.recipe):
            self.composing = self.composer_of(found.recipe).whole(found.recipe) == found
        return self.composing


def without_optimizer(recipe: Recipe) -> Recipe:
    """The recipe with all of the optimizer's state above: what forward and backward take does not
    depend on where it is."""
    return replace(recipe, offload_optimizer=0.0, page_bytes=Recipe.page_bytes)


class RecordingOptimizer(torch.optim.Optimizer):
    """Does one operator, which takes nothing, in place of a step, and notes what was to be
    stepped."""

    def __init__(self, parameters: list[Tensor]):
        super().__init__(parameters, {})
        self.due: list[Sequence[Tensor]] = []

    def held_tensors(self) -> Iterator[Tensor]:
        return iter(())

    @torch.no_grad()
    def step(self, closure=None):
        self.due.append(
            [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        )
        torch.empty(0)


def dearest(
    model: nn.Module, pieces: Sequence[Any], recipe: Recipe, loss_sum: LossSum | None
) -> Cost:
    """Cost of a schedule for that one of unlike micro-batches which takes the most."""
    costs = []
    errors = []
    for piece in pieces:
        chain = chain_of(model, piece, recipe, loss_sum)
        try:
            costs.append(simulate(fastest(chain, recipe.schedule_bytes), chain))
        except InfeasibleBudget as error:
            errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.least_bytes)
    return max(costs, key=lambda cost: cost.peak_bytes)
