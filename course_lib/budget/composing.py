"""Estimates of a model with many equal blocks, from its step with three of them and with four.

Moment by moment, what is live grows by as much with each block; so do FLOPs and what is moved. The optimizer's part of
a step is put together from updates of single parameters, so that recipes that differ in it alone share the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib._check import InfeasibleBudget
from course_lib.memory import CATEGORIES, PHASES, symbolic
from course_lib.offload import OffloadedOptimizer, SymbolicStore, Traffic, chosen_below
from course_lib.schedule import Cost, simulate

from .attention import attention_of
from .estimating import Estimate, Watch, check_arguments, estimate, explained, peaks_in, symbolic_optimizer, watched
from .loss import LossSum, check_loss, schedule_of, trained
from .recipe import Recipe
from .step import check_model, default_dtype, make_state, model_of, pieces_of

FEW = 2  # the first block and the last
MANY = 2 * FEW + 2  # from so many blocks on, FEW and FEW + 1 of them are less work
# Of the fields of a recipe, those that this module has been tried with, and the checkpoints that treat blocks alike.
FIELDS = {"precision", "optimizer", "offload_optimizer", "attention", "checkpoint", "segments", "schedule_bytes"}
FIELDS |= {"offload_activations", "min_bytes", "head_chunk", "in_backward", "micro_batches"}
OPTIMIZERS, ALIKE = ("adam", "sgd"), ("none", "selective", "layers")


class Irregular(Exception):
    """The step does not grow by as much with each block."""


@dataclass
class Moments:
    """What is live after each operator of a step without an optimizer, in each category, and the step's totals.

    Attributes:
        operators: (operator, phase); of an optimizer's step there is one, that of `_Noting`.
        live: (operators, categories).
        due: of each operator, the parameters to be stepped; none for all but those of `_Noting`.
        totals: FLOPs, bytes moved down, bytes moved up.
    """

    operators: list[tuple[Any, str]]
    live: np.ndarray
    due: list[Sequence[Tensor]]
    totals: np.ndarray


@dataclass
class Update:
    """What it takes to step some parameters: the state they hold, and, at the peak, how much more in each category."""

    held: int
    more: np.ndarray
    operator: str = ""
    moved: np.ndarray | None = None


class Composer:
    """Makes estimates of one model and batch, equal to those of `estimate`, with less work.

    A model that does not run with fewer blocks may raise anything.
    """

    def __init__(self, make_model: Callable, make_batch: Callable, base: Recipe, loss_sum: LossSum | None, tier: str):
        check_arguments(make_model, make_batch, base)
        self.loss_sum, self.tier = loss_sum, tier
        with symbolic() as self.mode:
            self.model = model_of(make_model, base)
            with default_dtype(base.dtype):
                self.batch = make_batch()
        self.trained, self.blocks = trained(self.model), equal_blocks(self.model)
        self.places = {p: (i, k) for i, block in enumerate(self.blocks) for k, p in enumerate(block.parameters())}
        self._moments: dict[Recipe, Moments] = {}
        self._updates: dict[Any, Update] = {}

    def estimate(self, recipe: Recipe) -> Estimate:
        with symbolic(self.mode):
            check_model(self.model, recipe)
            check_loss(self.model, recipe, self.loss_sum)
            # A file's pages take more than an update without them, and the last block that has some may be any.
            each = recipe.in_backward and self.tier == "file" and 0 < recipe.offload_optimizer < 1
            key = replace(recipe, offload_optimizer=0.0), each
            if key not in self._moments:
                self._moments[key] = self.moments(*key)
            return self.with_optimizer(self._moments[key], recipe)

    @staticmethod
    def takes(recipe: Recipe) -> bool:
        return FIELDS.issuperset(recipe.changed()) and recipe.optimizer in OPTIMIZERS

    def scheduled(self, recipe: Recipe) -> Cost:
        """What the chain's activations take by a schedule, and the time of one micro-batch.

        Raises:
            InfeasibleBudget: none fits into the recipe's bytes.
        """
        with symbolic(self.mode), attention_of(self.model, recipe.attention):
            return simulate(*schedule_of(self.model, pieces_of(self.batch, recipe.micro_batches)[0], recipe))

    # ---- forward and backward

    def moments(self, recipe: Recipe, each: bool) -> Moments:
        count = len(self.blocks)
        alone = recipe.segments == count  # each block is a segment, and the last one is not recomputed
        if count >= MANY and not each and (recipe.checkpoint in ALIKE or alone):
            # Copies reach into the next block, or into the one after it where only its input is kept.
            few = FEW + alone + recipe.offload_activations * (1 + (recipe.checkpoint == "layers"))
            try:
                pair = (self.measured(replace(recipe, segments=n if alone else None), n) for n in (few, few + 1))
                return composed(*pair, count - few, partial(self.at_the_end, few))
            except Irregular:
                pass
        return self.measured(recipe, count)

    def measured(self, recipe: Recipe, count: int) -> Moments:
        store, optimizer = SymbolicStore(), _Noting(self.trained)
        with shortened(self.blocks, count):
            pieces = pieces_of(self.batch, recipe.micro_batches)
            meter, totals = watched(self.model, optimizer, pieces, recipe, self.loss_sum, store)
        series, due = meter.series(), iter(optimizer.due)
        operators = meter.timeline.operators
        return Moments(
            operators,
            np.stack([series[name] for name in CATEGORIES], axis=1),
            [next(due) if phase == "optimizer" else () for _, phase in operators],
            np.array(totals),
        )

    def at_the_end(self, few: int, p: Tensor) -> Tensor:
        """The parameter that is as far from the end of the blocks as this one is where there are few."""
        if p not in self.places:
            return p
        i, k = self.places[p]
        return list(self.blocks[len(self.blocks) - few + i].parameters())[k]

    # ---- the optimizer

    def with_optimizer(self, moments: Moments, recipe: Recipe) -> Estimate:
        below = chosen_below(self.trained, recipe.offload_optimizer)
        update = self.update_of_all(recipe, below)
        live = moments.live.copy()
        live[:, CATEGORIES.index("optimizer")] += update.held
        names = [func for func, _ in moments.operators]
        counted = np.ones(len(live), dtype=bool)
        for row, due in enumerate(moments.due):
            if due:
                own = self.update_of(due[:1], recipe, due[0] in below) if recipe.in_backward else update
                live[row], names[row], counted[row] = live[row] + own.more, own.operator, bool(own.operator)
        sums = live.sum(1) * counted
        phases = dict.fromkeys(PHASES, 0)
        for (_, phase), count in zip(moments.operators, sums.tolist(), strict=True):
            phases[phase] = max(phases[phase], count)
        peak = int(sums.argmax())
        at_peak = dict(zip(CATEGORIES, live[peak].tolist(), strict=True))
        flops, down, up = moments.totals + np.array([0, *update.moved])
        totals, on_host = (int(flops), int(down), int(up)), sum(p.numel() for p in below) if self.tier == "host" else 0
        return Estimate(recipe, int(sums[peak]), at_peak, phases, str(names[peak]), *totals, self.tier, on_host)

    def update_of_all(self, recipe: Recipe, below: set[Tensor]) -> Update:
        """All are stepped one after the other; a file's pages, and chunks of what is small, lie side by side."""
        key = recipe.offload_optimizer, recipe.optimizer
        if key in self._updates:
            return self._updates[key]
        above = [p for p in self.trained if p not in below]
        chunked = recipe.precision != "fp32" or recipe.offload_optimizer
        largest = max((4 * p.numel() for p in above), default=math.inf)
        if (below and self.tier == "file") or (chunked and largest < OffloadedOptimizer.CHUNK_BYTES):
            found = self.stepped(self.trained, recipe)
        else:
            # In a loop over all of them, what was made last for one goes only as the same is made for the next.
            runs = [(p,) for p in above] if chunked else [*pairwise(above), *zip(above[:1])]
            each = [self.update_of(run, recipe, False) for run in runs]
            first = max(each, key=lambda update: update.more.sum(), default=Update(0, np.zeros(len(CATEGORIES), int)))
            held = sum(self.update_of((p,), recipe, False).held for p in above)
            moved = sum(p.nbytes for p in below)
            found = Update(held, first.more, first.operator, np.array([moved, moved]))
        self._updates[key] = found
        return found

    def update_of(self, parameters: Sequence[Tensor], recipe: Recipe, below: bool) -> Update:
        key = *((p.shape, p.dtype) for p in parameters), below, recipe.optimizer
        if key not in self._updates:
            self._updates[key] = self.stepped(parameters, replace(recipe, offload_optimizer=float(below)))
        return self._updates[key]

    def stepped(self, parameters: Sequence[Tensor], recipe: Recipe) -> Update:
        """By a step of them alone."""
        part, store = nn.ParameterList(parameters), SymbolicStore()
        optimizer = symbolic_optimizer(part, recipe, store, self.tier)
        make_state(part, optimizer)
        store.stats = Traffic()
        try:
            for p in parameters:
                p.grad = torch.empty_like(p)
            with Watch(part, optimizer) as meter:
                optimizer.step()
        finally:
            for p in parameters:
                p.grad = None
        given = sum(p.nbytes for p in parameters)
        entry = {"parameter": given, "gradient": given, "optimizer": meter.entry_bytes - 2 * given}
        more = np.array([count - entry.get(name, 0) for name, count in meter.at_peak().items()])
        moved = np.array([store.stats.bytes_down, store.stats.bytes_up])
        return Update(entry["optimizer"], more, peaks_in(meter)[1] if meter.phases() else "", moved)


class Composing:
    """Estimates of one model and batch: composed, or of whole steps where the model does not allow it."""

    def __init__(self, make_model: Callable, make_batch: Callable, base: Recipe, loss_sum: LossSum | None, tier: str):
        self.given, self.base, self.options = (make_model, make_batch), base, {"loss_sum": loss_sum, "tier": tier}
        self.composing, self.composers = True, {}  # by precision
        with explained():
            self.composer_of(base)

    def composer_of(self, recipe: Recipe) -> Composer:
        if recipe.precision not in self.composers:
            base = replace(self.base, precision=recipe.precision)
            self.composers[recipe.precision] = Composer(*self.given, base, **self.options)
        return self.composers[recipe.precision]

    def __call__(self, recipe: Recipe) -> Estimate:
        if self.composing and Composer.takes(recipe):
            try:
                return self.composer_of(recipe).estimate(recipe)
            except InfeasibleBudget:
                raise
            except Exception:  # any: the model may need all its blocks. If not that, the whole step says what is wrong
                whole = estimate(*self.given, recipe, **self.options)
                self.composing = False
                return whole
        return estimate(*self.given, recipe, **self.options)

    def confirms(self, found: Estimate) -> bool:
        """Whether an estimate is that of the whole step; if not, none will be composed any more."""
        whole = estimate(*self.given, found.recipe, **self.options)
        self.composing = all(
            getattr(whole, name) == getattr(found, name) for name in ("peak_bytes", "flops", "moved_bytes")
        )
        return self.composing


class _Noting(torch.optim.Optimizer):
    """Does one operator, which takes nothing, in place of a step, and notes what was to be stepped."""

    def __init__(self, parameters: list[Tensor]):
        super().__init__(parameters, {})
        self.due: list[Sequence[Tensor]] = []

    def held_tensors(self) -> Iterator[Tensor]:
        return iter(())

    @torch.no_grad()
    def step(self, closure=None):
        self.due.append([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        torch.empty(0)


# ---- blocks


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The longest list of blocks with the same modules and tensors; an empty one if there is none."""
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max((part for part in lists if len(set(map(_look, part))) == 1), key=len, default=nn.ModuleList())


def _look(block: nn.Module) -> tuple:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return (
        *((name, type(part), part.training) for name, part in block.named_modules()),
        *((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
    )


@contextmanager
def shortened(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Inside, the list has its first `count` blocks only."""
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)


# ---- from few blocks to many


def composed(few: Moments, more: Moments, blocks: int, at_the_end: Callable[[Tensor], Tensor]) -> Moments:
    """The moments of a step with so many blocks more than `few`, which has one less than `more`.

    Each pass through the blocks is seen from its start and from its end: in the first blocks and in the last. There the
    peak is, since what is live rises, or falls, evenly from block to block.
    """
    passes, longer = _passes(few.operators), _passes(more.operators)
    if len(passes) != len(longer):
        raise Irregular
    rows, theirs, due = [], [], []
    for (start, stop), (begin, end) in zip(passes, longer, strict=True):
        ours, others = few.operators[start:stop], more.operators[begin:end]
        block = len(others) - len(ours)
        # What looks alike goes a block too far, or more, where a block begins as what comes after it.
        head, tail = (_alike(*pair) - block for pair in ((ours, others), (ours[::-1], others[::-1])))
        if min(block, head, tail) < 0 or head + tail < len(ours):
            raise Irregular
        head = head if block else 0  # without a block in between, all is seen from the end
        rows += [*range(start, start + head), *range(stop - tail, stop)]
        theirs += [*range(begin, begin + head), *range(end - tail, end)]
        # Backward comes from the end of the blocks.
        due += [[at_the_end(p) for p in few.due[row]] for row in range(start, start + head)]
        due += few.due[stop - tail : stop]
    live = few.live[rows] + blocks * (more.live[theirs] - few.live[rows])
    operators = [few.operators[row] for row in rows]
    return Moments(operators, live, due, few.totals + blocks * (more.totals - few.totals))


def _passes(operators: list[tuple[Any, str]]) -> list[tuple[int, int]]:
    """From where to where the forward passes go, and what is between them."""
    found, start = [], 0
    for _, group in groupby(operators, key=lambda operator: operator[1] == "forward"):
        stop = start + len(list(group))
        found.append((start, stop))
        start = stop
    return found


def _alike(ours: list, others: list) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, others, strict=False)))
