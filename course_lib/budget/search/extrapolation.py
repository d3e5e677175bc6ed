"""Estimate the step of a model with many equal blocks from runs with only a few of them.

Two runs are needed: one with a few blocks, and one with one more block. At each point of the step,
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

# The shortest run keeps two blocks, because the first and the last block may differ from all other
# blocks.
FEW = 2
# Smallest number of blocks for which runs with FEW and FEW + 1 blocks cost less than one run with
# all of them.
MANY = 2 * FEW + 2
# Largest `prefetch` and `in_flight` for which the extrapolation was tested. With larger values, all
# blocks are run.
TESTED_COPIES = 2
# Values of `checkpoint` that treat all blocks in the same way.
UNIFORM_CHECKPOINTS = ("none", "selective", "layers")


@dataclass
class StepTrace:
    """Trace of a training step in which a placeholder operator replaces each optimizer update.

    `RecordingOptimizer` runs the placeholder. The method `BlockExtrapolator.with_optimizer` later
    adds the memory of the update.

    Attributes:
        trace: Trace of the operators of the step, with the live bytes after each of them.
        due: Parameters that the optimizer must update at each operator of the trace, one sequence
            per operator. The sequence is empty if the operator is not a placeholder.
    """

    trace: Trace
    due: list[Sequence[Tensor]]


class ExtrapolationError(Exception):
    """Error raised when an estimate cannot be computed from steps with few of the model's blocks.

    A step has failed, for example because the model needs all of its blocks, or because the model
    cannot run more than one step. The attribute `__cause__` is the error that the step raised.
    """


def can_extrapolate(recipe: Recipe) -> bool:
    """Return whether the memory of a recipe's step can be computed from steps with few blocks.

    The result is True if all techniques of the recipe are composable: with these techniques, the
    memory of the step grows evenly with the number of equal blocks.
    """
    return all(each.composable for each in TECHNIQUES if each.is_used(recipe))


class BlockExtrapolator:
    """Estimator that runs a training step with a few of the model's blocks, and extrapolates.

    The estimates equal those of `estimate`, but take less time for a model with many equal blocks.
    One object is for one model and one batch.

    Args:
        make_model: Function without arguments that returns the model.
        make_batch: Function without arguments that returns the batch.
        base: Recipe whose field `precision` sets the dtypes of the model.
        loss_sum, tier, max_norm, split, kind, gpu: Arguments of the same names of the function
            `estimate`.

    Attributes:
        trained: Parameters of the model that require gradients.
        blocks: Longest list of equal blocks of the model.
        segments_are_blocks: Whether `blocks` contains every block of the model that can be
            checkpointed. If so, a recipe with as many segments as blocks has one block per
            segment.
        parameters_of: Parameters of each block in `blocks`, as one list per block.
        positions: Mapping from each parameter of a block to the pair (index of the block in
            `blocks`, index of the parameter in the block).

    Raises:
        ExtrapolationError: The step fails with fewer blocks than the model has. Every method that
            runs a step can raise this error.
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
        """Return the estimate of a training step, extrapolated from steps with few blocks.

        Args:
            recipe: Memory-saving techniques of the step, for which `can_extrapolate(recipe)` must
                be True.
        """
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
        """Enable symbolic tensors inside the `with` block, after checking model and recipe.

        Symbolic tensors have shapes but no values, and need no memory.

        Raises:
            TypeError, ValueError: The model or its loss does not support the recipe.
        """
        with symbolic(self.mode), silence_operator_log():
            check_model(self.model, recipe)
            check_loss(self.model, recipe, self.loss_sum)
            yield

    def schedule_cost(self, recipe: Recipe) -> Cost:
        """Return the cost of running one micro-batch by a recipe's schedule.

        A schedule decides which activations are saved, and which are recomputed. In the result,
        `time` is a number of FLOPs, and `peak_bytes` is the peak of the activations. If the
        micro-batches run different operators, the result is for the micro-batch that needs the most
        memory.

        Args:
            recipe: Memory-saving techniques of the step, with checkpoint="optimal".

        Raises:
            InfeasibleBudget: No schedule fits into the recipe's `schedule_bytes`.
        """
        with symbolic(self.mode):
            micro_batches = self.micro_batches(recipe.micro_batches)
            unlike = [micro_batches[group[0]] for group in self.groups(recipe)]
            return highest_cost(self.model, unlike, recipe, self.loss_sum)

    def micro_batches(self, count: int) -> list[Any]:
        """Return the batch, split into a list of `count` micro-batches."""
        return micro_batches_of(self.batch, count, self.split)

    def groups(self, recipe: Recipe) -> list[list[int]]:
        """Group the micro-batches that run the same operators, and return their indices.

        The result is a list with one list of indices per group.
        """
        if (count := recipe.micro_batches) not in self._groups:
            micro_batches = self.micro_batches(count)
            self._groups[count] = groups_of(self.model, micro_batches, self.loss_sum)
        return self._groups[count]

    # ---- Forward and backward

    def forward_and_backward(self, recipe: Recipe) -> StepTrace:
        """Return the trace of forward and backward, extrapolated from runs with few blocks.

        If the recipe or the model does not allow an extrapolation, all blocks are run. Usually two
        runs are enough, one with a small number of blocks and one with one more block. If the
        recipe checkpoints only the first blocks, there are two kinds of blocks, and up to four runs
        are needed. In the following table of these runs, "few" is a small number of blocks:

            blocks without a checkpoint    few with a checkpoint    few + 1 with a checkpoint
            few                            run                      run
            few + 1                        run                      run

        First, each row of this table is extrapolated to the model's number of blocks with a
        checkpoint. Then the two results are extrapolated to the model's number of blocks without a
        checkpoint.
        """
        count = len(self.blocks)
        first = recipe.first_blocks or 0
        # Whether each block is a segment. If so, the last block differs from all other blocks,
        # because the last segment is not recomputed.
        alone = recipe.segments == count and self.segments_are_blocks
        reach = blocks_in_flight(recipe, self.tier, count)
        few = FEW + alone + reach
        if (
            count < MANY + 2 * bool(first)
            or recipe.blocks
            or not (recipe.checkpoint in UNIFORM_CHECKPOINTS or alone)
            # With few blocks, copies of a block's activations would continue after the last one.
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
        """Extrapolate the trace of a step to a model with more blocks.

        Args:
            runs: Traces of two steps, one with a few blocks and one with one more block, in this
                order. A single trace, of a step with all blocks, is returned unchanged.
            blocks: Number of blocks to add to the blocks of `runs[0]`.

        Returns:
            The extrapolated trace. Its attribute `due` also contains the parameters of the added
            blocks.
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
        """Run forward and backward with the first `count` equal blocks, and cache the trace.

        A second call with equal arguments runs nothing and returns the cached trace.

        Args:
            recipe: Memory-saving techniques of the step.
            count: Number of equal blocks to run, as in the method `measure`.

        Raises:
            ExtrapolationError: The step fails with this number of blocks.
        """
        if (recipe, count) not in self._few:
            self._few[recipe, count] = self.measure(recipe, count)
        return self._few[recipe, count]

    def measure(self, recipe: Recipe, count: int, skip_equal_stages: bool = True) -> StepTrace:
        """Run forward and backward with only the first `count` equal blocks, and return the trace.

        Args:
            recipe: Memory-saving techniques of the step.
            count: Number of equal blocks to run.
            skip_equal_stages: Whether equal stages that a schedule runs without gradients
                (checkpoint="segments" or "optimal") are run only once.

        Raises:
            ExtrapolationError: The step fails with this number of blocks.
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
        # A model that cannot run without all of its blocks can raise any exception.
        except Exception as error:
            raise ExtrapolationError(
                "the memory of the step cannot be extrapolated from a model with fewer blocks: the"
                f" step fails with {count} of the model's {len(self.blocks)} blocks"
            ) from error
        due = iter(optimizer.due)
        return StepTrace(
            trace, [next(due) if phase == "optimizer" else () for _, phase in trace.operators]
        )

    def parameter_in_later_block(self, p: Tensor, by: int) -> Tensor:
        """Return the parameter that has the same place in a later block as `p` in its own block.

        If `p` is not in any of the equal blocks, it is returned unchanged.

        Args:
            p: Parameter of the model.
            by: Index of the later block in `blocks` minus the index of the block that contains `p`.
        """
        if p not in self.positions:
            return p
        i, k = self.positions[p]
        return self.parameters_of[i + by][k]

    # ---- The optimizer

    def with_optimizer(self, forward: StepTrace, recipe: Recipe) -> Estimate:
        """Add the optimizer update to a trace of forward and backward, and return the estimate.

        The memory, the FLOPs and the copied bytes of the optimizer update are added.

        Args:
            forward: Trace of forward and backward.
            recipe: Memory-saving techniques of the step, with the settings of the optimizer.
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
                # A meter counts bytes only at operators, so an update without operators counts 0.
                live[row] = (live[row] + own.more) if own.operator else 0
                operators[row] = own.operator, operators[row][1]
        flops, down, up = np.array([trace.flops, trace.bytes_down, trace.bytes_up]) + update.totals
        totals = {"flops": int(flops), "bytes_down": int(down), "bytes_up": int(up)}
        on_host = sum(p.numel() for p in offloaded) if self.tier == "host" else 0
        trace = Trace(operators, live, **totals)
        return Estimate.from_trace(trace, recipe, self.tier, on_host, self.kind)


def _are_all_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return whether `blocks` is the complete, ordered list of blocks that a recipe checkpoints."""
    with suppress(ValueError):  # raised if the model has no list of blocks
        return [model.get_submodule(name) for name in names_of(model, None)] == list(blocks)
    return False


def blocks_in_flight(recipe: Recipe, tier: str, blocks: int) -> int:
    """Return how many blocks can run while offloaded activations of another block are being copied.

    In forward, the activations of block i can still be on their way to the lower tier (host memory
    or a file) while block i + 1 and the blocks after it run. In backward, which runs the last block
    first, the activations of block i can be fetched while block i + 1 runs.

    The step of the whole model is extrapolated from steps with few blocks. These few blocks must
    include the blocks that run during a copy. The result is therefore the number of blocks that
    each short step needs in addition to those that it needs without offloaded activations.

    The numbers were found by experiment for up to two copies in each direction, in decoders and in
    chains that add tensors between their blocks. The returned numbers are the smallest ones with
    which the extrapolated step and the step with all blocks are equal at every operator. If each
    block saves more than its input, a smaller number would be enough.

    Args:
        recipe: Memory-saving techniques of the step. The result is 0 if activations are not
            offloaded.
        tier: Where offloaded tensors are stored: "file" or "host".
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
    """Return the numbers of blocks of the runs from which a step with more blocks is extrapolated.

    Args:
        blocks: Number of blocks of the step that is wanted. If it is at most `few + 1`, the only
            run has this number of blocks, and nothing is extrapolated.
        few: Number of blocks of the shortest run.
    """
    return (blocks,) if blocks <= few + 1 else (few, few + 1)


class RecordingOptimizer(torch.optim.Optimizer):
    """Optimizer that updates nothing, but records which parameters it would have to update.

    Each step runs the operator `torch.empty(0)` as a placeholder, so the trace of the training step
    shows where the update takes place. `BlockExtrapolator.with_optimizer` later adds the memory of
    the update there.

    Attributes:
        due: Parameters that have a gradient, one list per step of the optimizer.
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
    """Return the cost of a recipe's schedule for the micro-batch that needs the most memory.

    A schedule decides which activations are saved, and which are recomputed. In the result, `time`
    is a number of FLOPs, and `peak_bytes` is the peak of the activations.

    Args:
        model: Model to train.
        micro_batches: Micro-batches to compare.
        recipe: Memory-saving techniques of the step, with checkpoint="optimal".
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the number by
            which the sum is divided, such as the number of tokens. None uses the model's own loss.

    Raises:
        InfeasibleBudget: For at least one micro-batch, no schedule fits into
            `recipe.schedule_bytes`. The attribute `least_bytes` of the error is the smallest
            `schedule_bytes` for which every micro-batch has a schedule.
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
