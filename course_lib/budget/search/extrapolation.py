"""Estimate the step of a model with many equal blocks from runs with only a few of them.

Two runs are needed, the second one with one more block than the first. At each point of the step,
that is, at each operator, each block adds the same number of live bytes. Each block also adds the
same FLOPs and bytes moved (`traces.equal_blocks` has the formula). This module runs forward and
backward without an optimizer, and takes the memory of the optimizer from `optimizer_updates`.
Therefore recipes that differ only in their optimizer settings share a run. The result equals that
of `estimate`, which runs the whole step.
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
from course_lib.budget.traces.equal_blocks import (
    Growth,
    IrregularSteps,
    equal_blocks,
    shorten_blocks,
)
from course_lib.budget.traces.equal_micro_batches import groups_of
from course_lib.budget.traces.process_trace import check_arguments, trace_step
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import CATEGORIES, Trace
from course_lib.offload import SymbolicStore, chosen_below
from course_lib.schedule import Cost, simulate
from course_lib.symbolic import Gpu, Symbolic, symbolic

from .optimizer_updates import UpdateCache

# The shortest run keeps two blocks, because the first and the last block may differ from the rest.
FEW = 2
# Smallest number of blocks for which runs with FEW and FEW + 1 blocks cost less than one run with
# all of them.
MANY = 2 * FEW + 2
# Largest `prefetch` and `in_flight` for which the result was tested. With larger values, all blocks
# are run.
TESTED_COPIES = 2
# Values of `checkpoint` that treat all blocks in the same way.
UNIFORM_CHECKPOINTS = ("none", "selective", "layers")


@dataclass
class StepTrace:
    """Trace of a step in which `RecordingOptimizer` replaces the optimizer by one operator.

    Attributes:
        trace: Trace of the step.
        due: Parameters to be updated at each point (operator) of the trace. The entry of a point is
            empty unless `RecordingOptimizer` runs at this point.
    """

    trace: Trace
    due: list[Sequence[Tensor]]


class ExtrapolationError(Exception):
    """Error: an estimate cannot be computed from steps with few blocks.

    The step raises an error if the model has fewer blocks, or if it has already run a step. That
    error is the `__cause__` of this one.
    """


def can_extrapolate(recipe: Recipe) -> bool:
    """Return whether the estimate of a recipe can be composed from steps with few blocks."""
    return all(each.composable for each in TECHNIQUES if each.is_used(recipe))


class BlockExtrapolator:
    """Estimator for one model and batch, whose results equal those of `estimate` in less time.

    Args:
        make_model, make_batch: Functions without arguments that return the model and the batch.
        base: Base recipe of the search, whose precision the model has.
        loss_sum, tier, max_norm, split, kind, gpu: Options as in `estimate`.

    Attributes:
        trained: Parameters that require gradients.
        blocks: Longest list of equal blocks of the model.
        segments_are_blocks: Whether the model's checkpoint segments are exactly these blocks.
        parameters_of: Parameters of each equal block, as lists.
        positions: Mapping from each parameter of an equal block to a pair (index of the block,
            index of the parameter in the block).

    Raises:
        ExtrapolationError: The step fails if the model has fewer blocks. Any method that runs a
            step may raise this error.
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
        self.segments_are_blocks = _are_all_blocks(self.model, self.blocks)
        self.parameters_of = [list(block.parameters()) for block in self.blocks]
        self.positions = {
            p: (i, k)
            for i, parameters in enumerate(self.parameters_of)
            for k, p in enumerate(parameters)
        }
        self._step_traces: dict[Recipe, StepTrace] = {}
        self._few: dict[tuple[Recipe, int], StepTrace] = {}
        self._groups: dict[int, list[list[int]]] = {}
        self.updates = UpdateCache(self.model, self.blocks, tier, kind)

    def estimate(self, recipe: Recipe) -> Estimate:
        """Return the estimate of a recipe; `can_extrapolate(recipe)` must be true."""
        # Forward and backward do not depend on where the optimizer state is kept.
        key = replace(
            recipe, offload_optimizer=Recipe.offload_optimizer, page_bytes=Recipe.page_bytes
        ).for_tier(self.tier)
        with self.symbolic_step(recipe):
            if key not in self._step_traces:
                self._step_traces[key] = self.forward_and_backward(key)
            return self.with_optimizer(self._step_traces[key], recipe)

    @contextmanager
    def symbolic_step(self, recipe: Recipe) -> Iterator[None]:
        """Check the recipe and enable the symbolic mode inside the `with` block."""
        with symbolic(self.mode), silence_operator_log():
            check_model(self.model, recipe)
            check_loss(self.model, recipe, self.loss_sum)
            yield

    def schedule_cost(self, recipe: Recipe) -> Cost:
        """Return the bytes of activations and the time of the recipe's schedule for a micro-batch.

        If micro-batches run different operators, the one that needs the most memory counts.

        Raises:
            InfeasibleBudget: No schedule fits into the recipe's `schedule_bytes`.
        """
        with symbolic(self.mode):
            micro_batches = self.micro_batches(recipe.micro_batches)
            unlike = [micro_batches[group[0]] for group in self.groups(recipe)]
            return highest_cost(self.model, unlike, recipe, self.loss_sum)

    def micro_batches(self, count: int) -> list[Any]:
        """Return the batch, split into `count` micro-batches."""
        return micro_batches_of(self.batch, count, self.split)

    def groups(self, recipe: Recipe) -> list[list[int]]:
        """Return groups of micro-batches that run the same operators, as lists of indices."""
        if (count := recipe.micro_batches) not in self._groups:
            micro_batches = self.micro_batches(count)
            self._groups[count] = groups_of(self.model, micro_batches, self.loss_sum)
        return self._groups[count]

    # ---- Forward and backward

    def forward_and_backward(self, recipe: Recipe) -> StepTrace:
        """Return the trace of forward and backward, composed from runs with few blocks if possible.

        Otherwise all blocks are run. If only the first blocks have a checkpoint, the blocks with a
        checkpoint and the blocks without one are extrapolated separately. This needs up to four
        runs:

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
        alone = recipe.segments == count and self.segments_are_blocks
        reach = blocks_in_flight(recipe, self.tier, count)
        few = FEW + alone + reach
        if (
            count < MANY + 2 * bool(first)
            or recipe.blocks
            or not (recipe.checkpoint in UNIFORM_CHECKPOINTS or alone)
            # There are too few blocks: copies of one would be in flight after the last block.
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
                    row.append(self.measure_few_blocks(replace(recipe, **fields), ones + others))
                rows.append(self.extend(row, first - few))
            return self.extend(rows, count - first - few)
        except IrregularSteps:
            return self.measure(recipe, count)

    def extend(self, runs: Sequence[StepTrace], blocks: int) -> StepTrace:
        """Return the trace of the step with `blocks` more blocks than the first run has.

        Args:
            runs: Traces of two steps, of which the second has one more block than the first; or
                the trace of a step with all blocks, which is returned unchanged.
            blocks: Number of additional blocks.

        Returns:
            The trace. Where a block that was run represents a later block, the parameters in `due`
            are replaced by the corresponding parameters of that later block.
        """
        if len(runs) == 1:
            return runs[0]
        few, more = runs
        growth = Growth(few.trace, more.trace)
        due = {id(few.trace): few.due, id(more.trace): more.due}
        rows: list[Sequence[Tensor]] = []
        for trace, start, stop, by in growth.sources(blocks):
            rows += [
                [self.parameter_in_later_block(p, by) for p in row] if row else row
                for row in due[id(trace)][start:stop]
            ]
        return StepTrace(growth.trace(blocks), rows)

    def measure_few_blocks(self, recipe: Recipe, count: int) -> StepTrace:
        """Return the result of `measure` with the first `count` blocks; the result is cached."""
        if (recipe, count) not in self._few:
            self._few[recipe, count] = self.measure(recipe, count)
        return self._few[recipe, count]

    def measure(self, recipe: Recipe, count: int, skip_equal_stages: bool = True) -> StepTrace:
        """Run forward and backward with the first `count` equal blocks, and return their trace.

        Args:
            recipe: Recipe of the step.
            count: Number of equal blocks to run.
            skip_equal_stages: Whether to run only one of several equal stages of a schedule.
        """
        optimizer = RecordingOptimizer(self.trained)
        micro_batches = self.micro_batches(recipe.micro_batches)
        try:
            with shorten_blocks(self.blocks, count):
                options = self.loss_sum, SymbolicStore(), self.max_norm, self.groups(recipe)
                trace = trace_step(
                    self.model,
                    optimizer,
                    micro_batches,
                    recipe.for_tier(self.tier),
                    *options,
                    skip_equal_stages=skip_equal_stages,
                )[1:]
        except InfeasibleBudget:
            raise
        # A model that needs all its blocks may raise any exception.
        except Exception as error:
            raise ExtrapolationError(
                f"the step does not run with {count} of {len(self.blocks)} blocks"
            ) from error
        due = iter(optimizer.due)
        return StepTrace(
            trace, [next(due) if phase == "optimizer" else () for _, phase in trace.operators]
        )

    def parameter_in_later_block(self, p: Tensor, by: int) -> Tensor:
        """Return the parameter in the block `by` blocks later that corresponds to `p`.

        A parameter outside the blocks is returned unchanged.
        """
        if p not in self.positions:
            return p
        i, k = self.positions[p]
        return self.parameters_of[i + by][k]

    # ---- The optimizer

    def with_optimizer(self, forward: StepTrace, recipe: Recipe) -> Estimate:
        """Add the memory, FLOPs and copies of the recipe's optimizer, and return the estimate.

        Args:
            forward: Trace of forward and backward.
            recipe: Recipe of the step.
        """
        offloaded = chosen_below(self.trained, recipe.offload_optimizer)
        stepping = on_kind(recipe, self.kind)
        update = self.updates.update_of_all(stepping, offloaded)
        trace = forward.trace
        live = forward.trace.live.copy()
        live[:, CATEGORIES.index("optimizer")] += update.held
        operators = list(trace.operators)
        for row, due in enumerate(forward.due):
            if due:
                own = (
                    self.updates.update_of(due[0], stepping, due[0] in offloaded)
                    if recipe.in_backward
                    else update
                )
                # If the update runs no operator, a meter would count nothing at this point.
                live[row] = (live[row] + own.more) if own.operator else 0
                operators[row] = own.operator, operators[row][1]
        flops, down, up = np.array([trace.flops, trace.bytes_down, trace.bytes_up]) + update.totals
        totals = {"flops": int(flops), "bytes_down": int(down), "bytes_up": int(up)}
        on_host = sum(p.numel() for p in offloaded) if self.tier == "host" else 0
        trace = Trace(operators, live, **totals)
        return Estimate.from_trace(trace, recipe, self.tier, on_host, self.kind)


def _are_all_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return whether `blocks` is the complete, ordered list of blocks that a recipe checkpoints."""
    with suppress(ValueError):  # the model has no list of blocks
        return [model.get_submodule(name) for name in names_of(model, None)] == list(blocks)
    return False


def blocks_in_flight(recipe: Recipe, tier: str, blocks: int) -> int:
    """Return the number of other blocks that can run while copies of one block are in flight.

    In forward, a storage of a block may still be copied to the lower tier while later blocks run.
    In backward, which runs the last block first, it may be fetched while a later block runs. Steps
    that are extrapolated must contain this number of additional blocks.

    The numbers were found by experiment for up to two copies in each direction, in decoders and in
    chains that add tensors between their blocks. They are the smallest numbers with which the
    extrapolated step equals the step with all blocks at each point. A smaller number would be
    enough for blocks that keep more storages than their input.

    Args:
        recipe: Recipe of the step.
        tier: Lower tier, "file" or "host".
        blocks: Number of equal blocks of the model. This number is returned if `prefetch` or
            `in_flight` exceeds `TESTED_COPIES`.
    """
    if not recipe.offload_activations:
        return 0
    prefetch, in_flight = recipe.copies(tier)
    if max(prefetch, in_flight) > TESTED_COPIES:
        return blocks
    if recipe.checkpoint == "layers":
        return 1 + 2 * in_flight + prefetch + (prefetch > 1)
    return 1 + 2 * (prefetch > 1)


def _run_counts(blocks: int, few: int) -> tuple[int, ...]:
    """Return the numbers of blocks in the runs from which `blocks` blocks are extrapolated."""
    return (blocks,) if blocks <= few + 1 else (few, few + 1)


class RecordingOptimizer(torch.optim.Optimizer):
    """Optimizer that updates no parameters, but records which of them have a gradient.

    Each step calls `torch.empty(0)`, which the meter records as one point of the optimizer phase.
    `with_optimizer` later adds the memory of the update to this point.

    Attributes:
        due: Parameters to be updated, one list per step.
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
    """Return the cost of the recipe's schedule for the micro-batch that needs the most memory.

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
