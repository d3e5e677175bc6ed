"""Trace the step of a single process on symbolic tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib._batches import Split
from course_lib._origin import MEASURE
from course_lib._torch.modules import look_of
from course_lib._torch.steps import not_collecting
from course_lib._torch.symbolic import counted_kind
from course_lib._torch.tensors import tensors_in
from course_lib.attention.symbolic import TILES
from course_lib.budget.device_kinds import on_kind
from course_lib.budget.loss import LossSum, check_loss, loss_of, trainable_parameters
from course_lib.budget.optimizers import LR, class_and_settings
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import (
    check_function,
    check_recipe,
    default_dtype,
    make_state,
    micro_batches_of,
    model_of,
    optimizer_of,
    run_micro_batches,
)
from course_lib.memory import Trace
from course_lib.memory.meter import UnguardedMeter
from course_lib.offload import OffloadedOptimizer, SymbolicStore, Traffic, chosen_below
from course_lib.schedule.executor import forwards_run_by
from course_lib.symbolic import Gpu, Symbolic, symbolic
from course_lib.symbolic.cpu_kernels import INEXACT

from .equal_micro_batches import groups_of
from .equal_stages import Repeats


def check_arguments(make_model, make_batch, recipe) -> None:
    """Raise an error unless the arguments are two functions without arguments and a recipe."""
    check_function("make_model", make_model)
    check_function("make_batch", make_batch)
    check_recipe(recipe)


def process_trace(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    tier: str = "file",
    kind: str = "cpu",
    gpu: Gpu | None = None,
    make_optimizer: Callable[[nn.Module, str], torch.optim.Optimizer] | None = None,
    events: bool = False,
    places: bool = False,
) -> tuple[Trace, int]:
    """Return the trace of the recipe's step, and the number of parameters that the host updates.

    The step runs all blocks of the model.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm, split, tier: Model, batch and options,
            as in `course_lib.budget.estimate`.
        kind: Kind of device, one of `KINDS`.
        gpu: GPU, which determines the attention kernels that run, as in
            `course_lib.budget.estimate`.
        make_optimizer: Function of (model, kind) that returns the optimizer. If it is None, the
            optimizer of the recipe is used.
        events: Whether to record when each storage is allocated and released.
        places: Whether to also record the module and the source line of each operator. With these
            records, the step takes about 1.5 times as long.
    """
    recipe = on_kind(recipe, kind)
    with symbolic(Symbolic(kind, gpu)):
        store = SymbolicStore()
        model = model_of(make_model, recipe)
        check_loss(model, recipe, loss_sum)
        if make_optimizer is None:
            optimizer = symbolic_optimizer(model, recipe, store, tier)
        else:
            optimizer = make_optimizer(model, kind)
        with default_dtype(recipe.dtype):
            batch = make_batch()
        micro_batches = micro_batches_of(batch, recipe.micro_batches, split)
        options = loss_sum, store, max_norm
        if make_optimizer is None:
            make_state(model, optimizer)
        else:
            # The traced step is the second one. Some of the user's parameters may get no gradient,
            # and then they have no state.
            run_micro_batches(model, optimizer, micro_batches, recipe, *options)
        trace = trace_step(
            model,
            optimizer,
            micro_batches,
            recipe.for_tier(tier),
            *options,
            events=events,
            places=places,
        )
        return trace, sum(p.numel() for p in getattr(optimizer, "below", ()))


def symbolic_optimizer(
    model: nn.Module, recipe: Recipe, store: SymbolicStore, tier: str, of: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer for a symbolic step. Offloaded state is kept in `tier`.

    If `model` is only a part of a model, `of` is the whole model.
    """
    if tier == "host" and recipe.offload_optimizer:
        return _PartlyOnHost(model, recipe, store)
    return optimizer_of(model, recipe, store=store, of=of)


def trace_step(
    model,
    optimizer,
    micro_batches: list[Any],
    recipe: Recipe,
    loss_sum,
    store: SymbolicStore,
    max_norm: float | None,
    groups: list[list[int]] | None = None,
    events: bool = False,
    repeats: bool = False,
    places: bool = False,
) -> Trace:
    """Run the step under a meter and return its trace.

    The first micro-batch of the step is always run. Among the later micro-batches of a group, which
    run the same operators, only the last one is run. When it starts, the tensors that the skipped
    ones would have left are in memory. FLOPs and bytes moved are the totals of all micro-batches.

    Args:
        groups: Groups of micro-batches that run the same operators, as lists of indices. The
            default is the result of `groups_of`.
        events: Whether to record events, as in `process_trace`.
        repeats: Whether to run only one of several equal stages of a schedule.
        places: Whether to record places, as in `process_trace`.
    """
    groups = groups_of(model, micro_batches, loss_sum) if groups is None else groups
    # Maps the index of each micro-batch that is run to the number of micro-batches it represents.
    stands_for = {0: 1}
    for group in groups:
        later = [i for i in group if i > 0]
        if later:
            stands_for[later[-1]] = len(later)
    store.stats = Traffic()
    # FLOPs and bytes moved up to the start of each micro-batch that is run, and up to the start of
    # the optimizer step.
    before: list[tuple[int, int, int]] = []
    # Bytes that a micro-batch keeps live until the optimizer step: its loss, and its weight if this
    # is a tensor.
    kept_bytes = 0

    def so_far() -> tuple[int, int, int]:
        return meter.flops, store.stats.bytes_down, store.stats.bytes_up

    def kept_loss(model, micro_batch):
        nonlocal kept_bytes
        pair = loss_of(model, micro_batch, recipe, loss_sum)
        kept_bytes = sum(tensor.nbytes for tensor in tensors_in(pair))
        return pair

    def sampled_micro_batches() -> Iterator[Any]:
        # These tensors replace the losses of the micro-batches that are not run.
        losses = []
        previous = -1
        for i in sorted(stands_for):
            before.append(so_far())
            skipped = i - previous - 1
            if skipped:
                like = next(model.parameters())
                losses.append(like.new_empty(skipped * kept_bytes, dtype=torch.uint8))
            yield micro_batches[i]
            previous = i
        del losses
        before.append(so_far())

    with (
        not_collecting(),
        StepMeter(model, optimizer, recipe, module_paths=places, source_lines=places) as meter,
        meter.skip_repeats() if repeats else nullcontext(),
    ):
        run_micro_batches(
            model, optimizer, sampled_micro_batches(), recipe, kept_loss, store, max_norm
        )
    # The work of each micro-batch counts once for each one that it represents, and the work of the
    # optimizer counts once. dtype=object keeps Python integers, because FLOPs may exceed 64 bits.
    counts = [*(stands_for[i] for i in sorted(stands_for)), 1]
    added = np.diff(np.array([*before, so_far()], dtype=object), axis=0)
    totals = np.array(counts, dtype=object) @ added
    trace = meter.trace(events=events)
    trace.flops, trace.bytes_down, trace.bytes_up = map(int, totals)
    return trace


class StepMeter(UnguardedMeter):
    """Meter that raises ValueError for operators that cannot be measured symbolically.

    On CUDA, optimizers without a fused update keep the numbers of steps on the host, so these
    numbers are not counted.
    """

    def __init__(self, model, optimizer, recipe: Recipe, **options: Any):
        super().__init__(model, optimizer, **options)
        self.recipe = recipe

    def _belongings(self) -> Iterator[tuple[Tensor, str]]:
        steps_on_host = counted_kind() == "cuda" and self.recipe.update != "fused"
        for tensor, category in super()._belongings():
            if not (steps_on_host and category == "optimizer" and tensor.dim() == 0):
                yield tensor, category

    def skip_repeats(self) -> AbstractContextManager[None]:
        """Return a context in which only one of several equal stages of a schedule is run."""
        return forwards_run_by(Repeats(self._ledger, self._usage, look_of).forward)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if found := INEXACT.get(func):
            raise ValueError(
                f"the step runs {func}, which {found.reason}; {found.remedy}, or {MEASURE}"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if getattr(result, "layout", None) is torch.sparse_coo:
            raise ValueError(
                "the step makes a sparse gradient, whose bytes depend on its values, but an"
                " estimate runs on symbolic tensors, which have shapes only; pass"
                f" sparse=False to the embedding, or {MEASURE}"
            )
        if func is TILES:
            # This operator represents many others, and its argument names the largest of them.
            self._ledger.operators[-1] = args[3], self._ledger.operators[-1][1]
        return result


class _PartlyOnHost(torch.optim.Optimizer):
    """Optimizer for symbolic steps with the memory and copies of `OffloadedOptimizer` on a GPU.

    The host keeps the state of some parameters and updates these parameters. Their gradients are
    copied to the host, and the updated parameters are copied back.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, store: SymbolicStore):
        parameters = trainable_parameters(model)
        super().__init__(parameters, {"lr": LR})
        self.below = chosen_below(parameters, recipe.offload_optimizer)
        self.traffic = store
        above = [p for p in parameters if p not in self.below]
        base, settings = class_and_settings(recipe.optimizer, recipe.update)
        options = {"fraction": 0.0, "page_bytes": recipe.page_bytes, "lr": LR}
        self.rest = OffloadedOptimizer(above, base, **options, **settings) if above else None

    def held_tensors(self) -> Iterator[Tensor]:
        return self.rest.held_tensors() if self.rest is not None else iter(())

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.below:
            if p.grad is not None:
                self.traffic.stats.bytes_down += p.grad.nbytes
                self.traffic.stats.bytes_up += p.nbytes
        if self.rest is not None:
            self.rest.step()
