"""Trace the training step of a single process on symbolic tensors, which need no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib._batches import Split
from course_lib._origin import MEASURE
from course_lib._torch.modules import module_signature
from course_lib._torch.steps import not_collecting
from course_lib._torch.symbolic import tracked_device_kind
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
from course_lib.schedule.executor import use_forward_runner
from course_lib.symbolic import Gpu, Symbolic, symbolic
from course_lib.symbolic.cpu_kernels import INEXACT

from .equal_micro_batches import groups_of
from .equal_stages import ForwardPassCache


def check_arguments(make_model, make_batch, recipe) -> None:
    """Raise TypeError unless the arguments are two functions without arguments and a `Recipe`."""
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
    """Trace the training step of a recipe in a single process, on symbolic tensors.

    The step runs all blocks of the model. Symbolic tensors have shapes but need no memory.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm, split, tier: Model, batch and options,
            as in `course_lib.budget.estimate`.
        kind: Kind of device, "cpu" or "cuda".
        gpu: GPU that determines which attention kernels run, as in `course_lib.budget.estimate`.
        make_optimizer: Function (model, kind) that returns the user's own optimizer; None for the
            optimizer of the recipe.
        events: Whether to record when each storage is allocated and released.
        places: Whether to record the module and the source line of each operator. The step then
            takes about 1.5 times as long.

    Returns:
        A pair. The first item is the trace of the step, with its operators and the live bytes after
        each operator. The second item is the number of parameter elements that the host (CPU)
        updates. This number is 0 unless `tier` is "host".
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
            # The first step, which is not traced, creates the state. Unlike `make_state`, it
            # creates no state for parameters that get no gradient.
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
        return trace, sum(p.numel() for p in getattr(optimizer, "on_host", ()))


def symbolic_optimizer(
    model: nn.Module,
    recipe: Recipe,
    store: SymbolicStore,
    tier: str,
    whole_model: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe for a step on symbolic tensors.

    Symbolic tensors have shapes but need no memory.

    Args:
        model: Model whose parameters are updated, or a part of a model.
        recipe: Memory-saving techniques of the step.
        store: Store for offloaded optimizer state, which counts the bytes that are copied.
        tier: Place of the offloaded state, "file" for disk or "host" for host memory.
        whole_model: The whole model, if `model` is a part of it; otherwise None.
    """
    if tier == "host" and recipe.offload_optimizer:
        return _PartlyOnHost(model, recipe, store)
    return optimizer_of(model, recipe, store=store, whole_model=whole_model)


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
    skip_equal_stages: bool = False,
    places: bool = False,
) -> Trace:
    """Run a training step on symbolic tensors under a memory meter, and return its trace.

    Symbolic tensors have shapes but need no memory. To save time, only some of the micro-batches
    run. Micro-batches that run the same operators form a group, and only the last micro-batch of
    each group runs. The first micro-batch of the step also runs, because only this micro-batch
    starts without gradients.

    A real step keeps the loss of every micro-batch until the optimizer step. In place of the losses
    of the skipped micro-batches, this function therefore allocates a tensor of the same total size.
    The FLOPs and the bytes moved are totals of all micro-batches, including the skipped ones.

    Args:
        model, optimizer, micro_batches, recipe, loss_sum, store, max_norm: Model, optimizer, batch
            and options, as in `run_micro_batches`.
        groups: Groups of micro-batches, as lists of indices; by default the result of `groups_of`.
        events: Whether to record when each storage is allocated and released.
        skip_equal_stages: Whether equal stages that a schedule runs without gradients
            (checkpoint="segments" or "optimal") are run only once.
        places: Whether to record the module and the source line of each operator.
    """
    groups = groups_of(model, micro_batches, loss_sum) if groups is None else groups
    # Maps the index of each micro-batch that is run to the number of micro-batches it represents.
    stands_for = {0: 1}
    for group in groups:
        later = [i for i in group if i > 0]
        if later:
            stands_for[later[-1]] = len(later)
    store.stats = Traffic()
    # Totals (FLOPs, bytes moved down, bytes moved up) at the start of each micro-batch that is run,
    # and at the start of the optimizer step. Down is to the lower tier (host memory or disk).
    before: list[tuple[int, int, int]] = []
    # Bytes that a micro-batch keeps live until the optimizer step: its loss, and the weight of the
    # loss if the weight is a tensor.
    kept_bytes = 0

    def totals() -> tuple[int, int, int]:
        return meter.flops, store.stats.bytes_down, store.stats.bytes_up

    def kept_loss(model, micro_batch):
        nonlocal kept_bytes
        loss_and_weight = loss_of(model, micro_batch, recipe, loss_sum)
        # Whole storages are counted, because the storage of a loss may be larger than the loss, as
        # with `F.mse_loss`. Storages of the batch are not counted, even if the weight is a view of
        # one.
        storages = {
            x.untyped_storage()._cdata: x.untyped_storage() for x in tensors_in(loss_and_weight)
        }
        for tensor in tensors_in(micro_batch):
            storages.pop(tensor.untyped_storage()._cdata, None)
        kept_bytes = sum(storage.nbytes() for storage in storages.values())
        return loss_and_weight

    def sampled_micro_batches() -> Iterator[Any]:
        # These tensors replace the losses of the micro-batches that are not run.
        losses = []
        previous = -1
        for i in sorted(stands_for):
            before.append(totals())
            skipped = i - previous - 1
            if skipped:
                like = next(model.parameters())
                losses.append(like.new_empty(skipped * kept_bytes, dtype=torch.uint8))
            yield micro_batches[i]
            previous = i
        del losses
        before.append(totals())

    with (
        not_collecting(),
        StepMeter(model, optimizer, recipe, module_paths=places, source_lines=places) as meter,
        meter.run_equal_stages_once() if skip_equal_stages else nullcontext(),
    ):
        run_micro_batches(
            model, optimizer, sampled_micro_batches(), recipe, kept_loss, store, max_norm
        )
    # FLOPs and bytes of a micro-batch are multiplied by the number of micro-batches that it
    # represents. FLOPs and bytes of the optimizer are multiplied by 1. dtype=object keeps Python
    # integers, because FLOPs may exceed 64 bits.
    counts = [*(stands_for[i] for i in sorted(stands_for)), 1]
    added = np.diff(np.array([*before, totals()], dtype=object), axis=0)
    totals = np.array(counts, dtype=object) @ added
    trace = meter.trace(events=events)
    trace.flops, trace.bytes_down, trace.bytes_up = map(int, totals)
    return trace


class StepMeter(UnguardedMeter):
    """Memory meter for symbolic steps, which rejects operators that it cannot measure.

    The meter raises ValueError for an operator whose memory cannot be computed from shapes alone,
    such as an operator that creates a sparse tensor. On CUDA, optimizers without a fused update
    keep their step counters in host memory, so the meter does not count these step counters.
    """

    def __init__(self, model, optimizer, recipe: Recipe, **options: Any):
        super().__init__(model, optimizer, **options)
        self.recipe = recipe

    def _belongings(self) -> Iterator[tuple[Tensor, str]]:
        steps_on_host = tracked_device_kind() == "cuda" and self.recipe.update != "fused"
        for tensor, category in super()._belongings():
            if not (steps_on_host and category == "optimizer" and tensor.dim() == 0):
                yield tensor, category

    def run_equal_stages_once(self) -> AbstractContextManager[None]:
        """Return a context manager inside which only one of several equal stages runs.

        The stages are those that a schedule (checkpoint="segments" or "optimal") runs without
        gradients. For each stage that does not run, the meter counts the operators and bytes of the
        equal stage that has run.
        """
        return use_forward_runner(
            ForwardPassCache(self._tracker, self._usage, module_signature).forward
        )

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
            self._tracker.operators[-1] = args[3], self._tracker.operators[-1][1]
        return result


class _PartlyOnHost(torch.optim.Optimizer):
    """Optimizer for steps on symbolic tensors, with the memory of `OffloadedOptimizer` on a GPU.

    The host keeps the state of some parameters and updates these parameters. Their gradients are
    copied to the host, and the updated parameters are copied back.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, store: SymbolicStore):
        parameters = trainable_parameters(model)
        super().__init__(parameters, {"lr": LR})
        self.on_host = chosen_below(parameters, recipe.offload_optimizer)
        self.traffic = store
        on_device = [p for p in parameters if p not in self.on_host]
        base, settings = class_and_settings(recipe.optimizer, recipe.update)
        options = {"fraction": 0.0, "page_bytes": recipe.page_bytes, "lr": LR}
        self.rest = (
            OffloadedOptimizer(on_device, base, **options, **settings) if on_device else None
        )

    def held_tensors(self) -> Iterator[Tensor]:
        return self.rest.held_tensors() if self.rest is not None else iter(())

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.on_host:
            if p.grad is not None:
                self.traffic.stats.bytes_down += p.grad.nbytes
                self.traffic.stats.bytes_up += p.nbytes
        if self.rest is not None:
            self.rest.step()
