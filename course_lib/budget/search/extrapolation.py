"""Estimate the step of a model with many equal blocks from runs with only a few of them.

Two runs are needed, the second one with one more block than the first. At each moment of the step,
each block adds the same number of live bytes. Each block also adds the same FLOPs and bytes moved
(`traces.equal_blocks` has the formula). This module runs forward and backward without an optimizer,
and takes the memory of the optimizer from `optimizer_updates`. Therefore recipes that differ only
in their optimizer settings share a run. The result equals that of `estimate`, which runs the whole
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib._batches import Split
from course_lib._check import InfeasibleBudget
from course_lib._origin import silence_operator_log
from course_lib.budget.device_kinds import on_kind
from course_lib.budget.estimate import Estimate
from course_lib.budget.loss import LossSum, check_loss, trainable_parameters
from course_lib.budget.recipe import Recipe
from course_lib.budget.stages import fastest
from course_lib.budget.step import chain_of, check_model, default_dtype, micro_batches_of, model_of
from course_lib.budget.techniques import TECHNIQUES
from course_lib.budget.traces.equal_blocks import Growth, Irregular, equal_blocks, shorten_blocks
from course_lib.budget.traces.equal_micro_batches import groups_of
from course_lib.budget.traces.process_trace import check_arguments, trace_step
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import CATEGORIES, Trace
from course_lib.offload import SymbolicStore, chosen_below
from course_lib.schedule import Cost, simulate
from course_lib.symbolic import Gpu, Symbolic, symbolic

from .optimizer_updates import Updates

# The shortest run keeps two blocks, because the first and the last block may differ from the rest.
FEW = 2
# Smallest number of blocks for which runs with FEW and FEW + 1 blocks cost less than one run with
# all of them.
MANY = 2 * FEW + 2
# Largest `prefetch` and `in_flight` for which the result was tested. With larger values, all blocks
# are run.
TRIED_COPIES = 2
# Values of `checkpoint` that treat all blocks in the same way.
ALIKE = ("none", "selective", "layers")


@dataclass
class StepTrace:
    """Trace of a step in which `RecordingOptimizer` replaces the optimizer by one operator.

    Attributes:
        trace: Trace of the step.
        due: Parameters to be updated at each moment of the trace. The entry of a moment is empty
            unless `RecordingOptimizer` runs at this moment.
    """

    trace: Trace
    due: list[Sequence[Tensor]]


class NotComposable(Exception):
    """The step cannot run with some of the blocks, or on a model that has already run a step.

    The exception's `__cause__` is the error that the step raised.
    """


class BlockExtrapolator:
    """Estimator for one model and batch. Its results equal those of `estimate` with less work.

    Raises:
        NotComposable: The step cannot run with some of the blocks. Any method that runs a step may
            raise it.
    """

    def __init__(
        self,
        make_model: Callable,
        make_batch: Callable,
        base: Recipe,
        loss_sum: LossSum | None,
        tier: str,
        max_norm: float | None = None,
        split: Split | None = None,
        kind: str = "cpu",
        gpu: Gpu | None = None,
    ):
        check_arguments(make_model, make_batch, base)
        self.loss_sum, self.tier, self.max_norm, self.kind = loss_sum, tier, max_norm, kind
        self.split = split
        with symbolic(Symbolic(kind, gpu)) as self.mode:
            self.model = model_of(make_model, base)
            with default_dtype(base.dtype):
                self.batch = make_batch()
        self.trained, self.blocks = trainable_parameters(self.model), equal_blocks(self.model)
        # Whether the equal blocks are also the blocks that make up segments.
        self.runs_them = False
        # ValueError means that the model has no list of blocks.
        with suppress(ValueError):
            self.runs_them = list(
                map(self.model.get_submodule, names_of(self.model, None))
            ) == list(self.blocks)
        self.parameters_of = [list(block.parameters()) for block in self.blocks]
        self.places = {
            p: (i, k)
            for i, parameters in enumerate(self.parameters_of)
            for k, p in enumerate(parameters)
        }
        self._moments: dict[Recipe, StepTrace] = {}
        self._few: dict[tuple[Recipe, int], StepTrace] = {}
        self._groups: dict[int, list[list[int]]] = {}
        self.updates = Updates(self.model, self.blocks, tier, kind)

    def estimate(self, recipe: Recipe) -> Estimate:
        # Forward and backward do not depend on where the optimizer state is kept.
        key = replace(
            recipe, offload_optimizer=Recipe.offload_optimizer, page_bytes=Recipe.page_bytes
        ).for_tier(self.tier)
        with self.check_equal_blocks(recipe):
            if key not in self._moments:
                self._moments[key] = self.moments(key)
            return self.with_optimizer(self._moments[key], recipe)

    @contextmanager
    def check_equal_blocks(self, recipe: Recipe) -> Iterator[None]:
        with symbolic(self.mode), silence_operator_log():
            check_model(self.model, recipe)
            check_loss(self.model, recipe, self.loss_sum)
            yield

    @staticmethod
    def takes(recipe: Recipe) -> bool:
        return all(each.composable for each in TECHNIQUES if each.is_used(recipe))

    def schedule_cost(self, recipe: Recipe) -> Cost:
        """Return the cost of the recipe's schedule: its bytes of activations and its time.

        The cost is that of the micro-batch that needs the most memory.

        Raises:
            InfeasibleBudget: No schedule fits into the recipe's `schedule_bytes`.
        """
        with symbolic(self.mode):
            micro_batches = self.micro_batches(recipe.micro_batches)
            unlike = [micro_batches[group[0]] for group in self.groups(recipe)]
            return highest_cost(self.model, unlike, recipe, self.loss_sum)

    def micro_batches(self, count: int) -> list[Any]:
        return micro_batches_of(self.batch, count, self.split)

    def groups(self, recipe: Recipe) -> list[list[int]]:
        """Return groups of micro-batches that run the same operators, as lists of indices."""
        if (count := recipe.micro_batches) not in self._groups:
            micro_batches = self.micro_batches(count)
            self._groups[count] = groups_of(self.model, micro_batches, self.loss_sum)
        return self._groups[count]

    # ---- Forward and backward

    def moments(self, recipe: Recipe) -> StepTrace:
        """Return the moments of forward and backward, from runs with few blocks if possible.

        Otherwise all blocks are run. If only the first blocks have a checkpoint, the number of
        blocks with a checkpoint and the number of blocks without one are reduced separately. This
        takes up to four runs:

            blocks without a checkpoint    few with a checkpoint    few + 1 with a checkpoint
            few                            run                      run
            few + 1                        run                      run

        Each row is extended to the model's number of blocks with a checkpoint. Then the two
        extended rows are extended to the model's number of blocks without a checkpoint. Other
        recipes have blocks of one kind only, and need a single row or column.
        """
        count = len(self.blocks)
        first = recipe.first_blocks or 0
        # Whether each block is a segment. If so, the last block differs from the rest, because the
        # last segment is not recomputed.
        alone = recipe.segments == count and self.runs_them
        reach = reach_of(recipe, self.tier, count)
        few = FEW + alone + reach
        if (
            count < MANY + 2 * bool(first)
            or recipe.blocks
            or not (recipe.checkpoint in ALIKE or alone)
            # Copies of a block would still be in flight after the last block.
            or (reach and few > count - first)
        ):
            return self.measure(recipe, count)

        try:
            rows = []
            for others in _run_counts(count - first, few):
                row = []
                for ones in _run_counts(first, few):
                    fields = {"first_blocks": ones} if first else {}
                    if alone:
                        fields = {"segments": others}
                    row.append(self.measure_few(replace(recipe, **fields), ones + others))
                rows.append(self.extend(row, first - few))
            return self.extend(rows, count - first - few)
        except Irregular:
            return self.measure(recipe, count)

    def extend(self, runs: Sequence[StepTrace], blocks: int) -> StepTrace:
        """Return the moments of the step with `blocks` more blocks than in the first of two runs.

        The second run has one more block than the first. A single run already has all blocks of its
        kind, so its moments are returned unchanged. In `due` of the result, each parameter of a
        block is replaced by the same parameter of the block that runs at that moment in the longer
        step.
        """
        if len(runs) == 1:
            return runs[0]
        few, more = runs
        growth = Growth(few.trace, more.trace)
        due = {id(few.trace): few.due, id(more.trace): more.due}
        rows: list[Sequence[Tensor]] = []
        for trace, start, stop, by in growth.sources(blocks):
            rows += [
                [self.further(p, by) for p in row] if row else row
                for row in due[id(trace)][start:stop]
            ]
        return StepTrace(growth.trace(blocks), rows)

    def measure_few(self, recipe: Recipe, count: int) -> StepTrace:
        if (recipe, count) not in self._few:
            self._few[recipe, count] = self.measure(recipe, count)
        return self._few[recipe, count]

    def measure(self, recipe: Recipe, count: int, repeats: bool = True) -> StepTrace:
        """Run forward and backward with the first `count` blocks, and return the moments.

        Args:
            recipe: Recipe of the step.
            count: Number of equal blocks to run.
            repeats: Whether to run only one of several equal stages of a schedule.
        """
        store = SymbolicStore()
        optimizer = RecordingOptimizer(self.trained)
        micro_batches = self.micro_batches(recipe.micro_batches)
        try:
            with shorten_blocks(self.blocks, count):
                options = self.loss_sum, store, self.max_norm, self.groups(recipe)
                trace = trace_step(
                    self.model,
                    optimizer,
                    micro_batches,
                    recipe.for_tier(self.tier),
                    *options,
                    repeats=repeats,
                )[1:]
        except InfeasibleBudget:
            raise
        # A model that needs all its blocks may raise any exception.
        except Exception as error:
            raise NotComposable(
                f"the step does not run with {count} of {len(self.blocks)} blocks"
            ) from error
        due = iter(optimizer.due)
        return StepTrace(
            trace, [next(due) if phase == "optimizer" else () for _, phase in trace.operators]
        )

    def further(self, p: Tensor, by: int) -> Tensor:
        """Return the parameter that corresponds to `p` in the block that is `by` blocks later.

        A parameter outside the blocks is returned unchanged.
        """
        if p not in self.places:
            return p
        i, k = self.places[p]
        return self.parameters_of[i + by][k]

    # ---- The optimizer

    def with_optimizer(self, moments: StepTrace, recipe: Recipe) -> Estimate:
        below = chosen_below(self.trained, recipe.offload_optimizer)
        stepping = on_kind(recipe, self.kind)
        update = self.updates.of_all(stepping, below)
        trace = moments.trace
        live = moments.trace.live.copy()
        live[:, CATEGORIES.index("optimizer")] += update.held
        operators = list(trace.operators)
        for row, due in enumerate(moments.due):
            if due:
                own = (
                    self.updates.update_of(due[0], stepping, due[0] in below)
                    if recipe.in_backward
                    else update
                )
                # If the update runs no operator, a meter would count nothing at this moment.
                live[row] = (live[row] + own.more) if own.operator else 0
                operators[row] = own.operator, operators[row][1]
        flops, down, up = np.array([trace.flops, trace.bytes_down, trace.bytes_up]) + update.totals
        totals = {"flops": int(flops), "bytes_down": int(down), "bytes_up": int(up)}
        on_host = sum(p.numel() for p in below) if self.tier == "host" else 0
        trace = Trace(operators, live, **totals)
        return Estimate.from_trace(trace, recipe, self.tier, on_host, self.kind)


def reach_of(recipe: Recipe, tier: str, blocks: int) -> int:
    """Return the number of other blocks during which copies of one block can be in flight.

    In backward, which runs the last block first, a storage of one block may be fetched while a
    later block runs. In forward, a storage may be copied while later blocks run. The numbers were
    found by experiment for up to two copies in each direction, in decoders and in chains with sums
    between their blocks. They are the smallest numbers with which the extrapolated step equals, at
    each moment, the step with all blocks. A smaller number would be enough for a block that keeps
    more storages than its input.

    Args:
        recipe: Recipe of the step.
        tier: Lower tier, "file" or "host".
        blocks: Number of equal blocks of the model. This number is returned if `prefetch` or
            `in_flight` exceeds `TRIED_COPIES`.
    """
    if not recipe.offload_activations:
        return 0
    prefetch, in_flight = recipe.copies(tier)
    if max(prefetch, in_flight) > TRIED_COPIES:
        return blocks
    if recipe.checkpoint == "layers":
        return 1 + 2 * in_flight + prefetch + (prefetch > 1)
    return 1 + 2 * (prefetch > 1)


def _run_counts(blocks: int, few: int) -> tuple[int, ...]:
    """Return the numbers of blocks to run, from which the step with `blocks` blocks is computed."""
    return (blocks,) if blocks <= few + 1 else (few, few + 1)


class RecordingOptimizer(torch.optim.Optimizer):
    """Optimizer that updates no parameters, but records which of them are due for an update.

    Each step calls `torch.empty(0)`. The meter records this operator as a moment of the optimizer
    phase. `with_optimizer` adds the memory of the update to this moment.
    """

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


def highest_cost(
    model: nn.Module, micro_batches: Sequence[Any], recipe: Recipe, loss_sum: LossSum | None
) -> Cost:
    """Return the cost of the schedule for the micro-batch that needs the most memory.

    Raises:
        InfeasibleBudget: At least one micro-batch has no schedule that fits. If there are several,
            the error with the largest `least_bytes` is raised.
    """
    costs = []
    errors = []
    for micro_batch in micro_batches:
        chain = chain_of(model, micro_batch, recipe, loss_sum)
        try:
            costs.append(simulate(fastest(chain, recipe.schedule_bytes), chain))
        except InfeasibleBudget as error:
            errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.least_bytes)
    return max(costs, key=lambda cost: cost.peak_bytes)
