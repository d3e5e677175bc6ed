"""Estimate the memory and FLOPs of a training step, and run the same step on real tensors.

A recipe (a set of memory-saving techniques) describes the step. `estimate` runs the whole step on
symbolic tensors, which need no memory, and reads the result from the trace of the step. For a
search, the module `search.extrapolation` computes the same results in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from course_lib._batches import Split
from course_lib._check import kind as of_kind
from course_lib._check import one_of
from course_lib._origin import add_user_line, explain_symbolic_errors
from course_lib.accumulation import StepResult
from course_lib.labels import text, verbatim
from course_lib.memory import MemoryMeter, Trace
from course_lib.memory.show import Table, decimal
from course_lib.offload import DiskStore, Traffic
from course_lib.symbolic import Gpu

from .device_kinds import KINDS
from .device_memory import kept_bytes
from .loss import LossSum, check_loss
from .rates import Rates, rates_of
from .recipe import Recipe
from .step import build, default_dtype, make_state, micro_batches_of, run_micro_batches
from .symbolic_copies import functions_of, optimizer_name
from .traces.process_trace import check_arguments, process_trace
from .traces.rank_trace import rank_trace

TIERS = ("file", "host")
BASELINE = Recipe()


@dataclass(frozen=True, repr=False)
class Estimate(Table):
    """Memory, FLOPs and data transfers of one training step, as computed by `estimate` or `fit`.

    A training step consists of forward, backward and the optimizer update. The estimated step is
    not the first one, so the optimizer state exists already. The bytes of the batch are not
    counted.

    Attributes:
        recipe: Memory-saving techniques that the step uses.
        peak_bytes: Largest number of tensor bytes that are live at once: the model, gradients,
            optimizer state, and all tensors that the step creates.
        at_peak: Live bytes at the peak, as a mapping from a category of
            `course_lib.memory.CATEGORIES`, such as "activation", to bytes.
        phase_peaks: Largest number of live bytes in each phase, as a mapping from "forward",
            "backward" and "optimizer" to bytes.
        operator: Name of the operator that runs when the peak is reached.
        flops: FLOPs of all matrix products, including those of fused attention, of recomputation
            and of Muon's update.
        bytes_down: Bytes copied from the device to the lower tier by offloading.
        bytes_up: Bytes copied back from the lower tier to the device.
        tier: Lower tier, where offloaded tensors are stored: "file" (as on a CPU), or "host" for
            host memory (as on a GPU). With "host", the host updates the parameters whose optimizer
            state is offloaded. Their gradients are then copied to the host, and the updated
            parameters are copied back.
        host_parameters: Number of parameter elements that the host updates; 0 if `tier` is "file".
        sent_bytes: Bytes that one rank passes to collectives, counted as in
            `course_lib.distributed.CommunicationCounter`.
        kind: Kind of device, "cpu" or "cuda".
        optimizer: Name of the optimizer's class, or of the function that created the optimizer;
            None if `recipe` determined the optimizer.
    """

    recipe: Recipe
    peak_bytes: int
    at_peak: dict[str, int] = field(hash=False)
    phase_peaks: dict[str, int] = field(hash=False)
    operator: str
    flops: int
    bytes_down: int
    bytes_up: int
    tier: str = "file"
    host_parameters: int = 0
    sent_bytes: int = 0
    kind: str = "cpu"
    optimizer: str | None = None

    columns = ("category", "MB at the peak")

    @classmethod
    def from_trace(
        cls, trace: Trace, recipe: Recipe, tier: str, host_parameters: int = 0, kind: str = "cpu"
    ) -> Estimate:
        """Return the estimate of a training step, computed from the trace of its operators.

        Args:
            trace: Trace of the step, with the live bytes after each operator.
            recipe: Memory-saving techniques that the step uses.
            tier: Where offloaded tensors are stored: "file" or "host".
            host_parameters: Number of parameter elements that the host updates.
            kind: Kind of device, "cpu" or "cuda".
        """
        return cls(
            recipe,
            trace.peak_bytes,
            trace.at_peak(),
            trace.phase_peaks(),
            trace.peak_operator,
            trace.flops,
            trace.bytes_down,
            trace.bytes_up,
            tier,
            host_parameters,
            trace.sent_bytes,
            kind,
        )

    def with_trace_function(self, run: Callable[[bool], Trace]) -> Estimate:
        """Store a function that runs the estimated step again, and return `self`.

        The method `trace` calls this function.

        Args:
            run: Function that runs the step and returns its trace. Its argument is `places`, as in
                the method `trace`.
        """
        # `_run` is not a field, so it does not affect whether two estimates are equal.
        object.__setattr__(self, "_run", run)
        return self

    def with_gpu_estimator(self, again: Callable[[Gpu | None], Estimate]) -> Estimate:
        """Store a function that estimates the same step for a GPU, and return `self`.

        The method `fits(device)` calls the stored function with the GPU of `device`.

        Args:
            again: Function that takes a `Gpu`, or None for the default GPU, and returns the
                estimate for this GPU.
        """
        object.__setattr__(self, "_again", again)
        return self

    def trace(self, places: bool = True) -> Trace:
        """Run the step on symbolic tensors again, and return its trace.

        Symbolic tensors have shapes but need no memory. The trace includes the creation and the
        release of each storage.

        Args:
            places: Whether to record the module and the source line of each operator.

        Raises:
            ValueError: The estimate was not made by `estimate` or `fit`, or it was copied or
                unpickled.
        """
        run = getattr(self, "_run", None)
        if run is None:
            raise ValueError(
                "this estimate cannot run its step again, because it was copied, unpickled, or not"
                " returned by `estimate` or `fit`. Use the object that `estimate` or `fit` returned"
            )
        return run(places)

    def reserved_bytes(self, expandable_segments: bool = False) -> int:
        """Return the peak of the bytes that PyTorch's CUDA allocator reserves during the step.

        The class `CachingAllocator` simulates the allocator on the step's allocations. To record
        the allocations, the first call runs the step again on symbolic tensors, which need no
        memory.

        Args:
            expandable_segments: Whether the allocator uses expandable segments, an option of
                PyTorch's environment variable PYTORCH_CUDA_ALLOC_CONF.
        """
        # `_reserved` is not a field, so it does not affect whether two estimates are equal.
        cached = vars(self).setdefault("_reserved", {})
        if expandable_segments not in cached:
            allocator = self.events().allocator(expandable_segments)
            cached[expandable_segments] = allocator.memory_stats()["reserved_bytes.all.peak"]
        return cached[expandable_segments]

    def fits(self, device: str | Rates, memory_bytes: int | None = None) -> bool:
        """Return whether the step fits into the memory of a device.

        **Usual case.** The step fits if the memory is at least the sum of two numbers: the bytes
        that PyTorch's allocator reserves for the step (see `reserved_bytes`), and the bytes that
        CUDA and cuBLAS occupy. Workspaces that operators allocate while they run are not included.
        The module docstring of `course_lib.budget.device_kinds` lists some of them.

        The reserved bytes depend on the device. An estimate that the function `estimate` made is
        therefore made again for this device: with the kernels that its GPU uses, and with offloaded
        tensors in host memory. The estimate cannot be made again if `fit` computed it from steps
        with only a few of the model's blocks. Such an estimate is used unchanged, and its kind must
        be "cuda".

        **Exception.** If this estimate is of kind "cpu" and `device` is a `Rates` object whose
        `capability` is None, the step fits if `peak_bytes` is at most the memory.

        Args:
            device: Name in `RATES`, such as "RTX 4090", or the rates of another device.
            memory_bytes: Memory in bytes that the step may use; by default all memory of the
                device.

        Raises:
            ValueError: There is no device of this name; the memory of the device is not known; or
                the estimate is of kind "cpu" and cannot be made again for a GPU; or the estimate
                was copied or unpickled, so its step cannot be run again.
        """
        rates = rates_of(device)
        memory = rates.memory_bytes if memory_bytes is None else memory_bytes
        if memory is None:
            raise ValueError(f"memory_bytes must be given for {device}, whose memory is not known")
        if rates.gpu is None and self.kind == "cpu" and isinstance(device, Rates):
            return self.peak_bytes <= memory
        return self._for_device(rates).reserved_bytes() + kept_bytes(rates) <= memory

    def _for_device(self, rates: Rates) -> Estimate:
        """Return the estimate of the same step for the GPU of a device.

        An estimate that was not made by the function `estimate` cannot be made again. It is
        returned unchanged, and must be of kind "cuda".

        Raises:
            ValueError: The estimate was not made by `estimate`, and its kind is "cpu".
        """
        again = getattr(self, "_again", None)
        if again is not None:
            return again(rates.gpu)
        if self.kind != "cuda":
            raise ValueError(
                "`fits` needs an estimate of kind 'cuda', got one of kind 'cpu'. This CPU estimate"
                " cannot be computed again for a GPU, because it was copied, unpickled, or not"
                " returned by `estimate`. Call `estimate` with kind='cuda'"
            )
        return self

    def events(self) -> Trace:
        """Return the trace of the step, without the module and the source line of each operator.

        The trace includes the creation and the release of each storage. The first call runs the
        step again on symbolic tensors, which need no memory. Later calls return the same trace.
        """
        cached = vars(self)
        if "_events" not in cached:
            cached["_events"] = self.trace(places=False)
        return cached["_events"]

    def __getstate__(self) -> dict[str, Any]:
        # `_run` and `_again` are functions that may not be picklable. The trace `_events` is large.
        left_out = "_run", "_events", "_again"
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def moved_bytes(self) -> int:
        """Bytes that offloading copies in both directions, plus bytes sent to other ranks."""
        return self.bytes_down + self.bytes_up + self.sent_bytes

    def rows(self) -> list[Sequence]:
        named = {
            name: text("optimizer state" if name == "optimizer" else name) for name in self.at_peak
        }
        return [
            (named[name], f"{count / 1e6:,.1f}") for name, count in self.at_peak.items() if count
        ]

    def caption(self) -> str:
        given = text("the unchanged model, {optimizer}", optimizer=verbatim(self.optimizer or ""))
        values = {
            "recipe": given if self.optimizer else str(self.recipe),
            "peak": self.peak_bytes,
            "megabytes": self.peak_bytes / 1e6,
        }
        values |= {
            "operator": verbatim(self.operator),
            "tera": decimal(self.flops / 1e12),
            "giga": decimal(self.moved_bytes / 1e9),
        }
        return text(
            "{recipe}: peak {peak:,} bytes ({megabytes:,.1f} MB) in {operator}, {tera} TFLOPs,"
            " {giga} GB moved",
            **values,
        )


@dataclass(frozen=True)
class Run:
    """Result of one training step on real tensors, as returned by `run`.

    Attributes:
        result: Numbers of the step, such as its mean loss and its gradient norm.
        meter: Memory meter under which the step ran. Its `peak_bytes` is the measured peak.
        traffic: Bytes that offloading copied to the lower tier (host memory or disk) and back
            during the step.
    """

    result: StepResult
    meter: MemoryMeter
    traffic: Traffic


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    recipe: Recipe | torch.optim.Optimizer | Callable[[list], torch.optim.Optimizer] = BASELINE,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    tier: str = "file",
    kind: str = "cpu",
    gpu: Gpu | None = None,
) -> Estimate:
    """Estimate the memory and FLOPs of a training step by running it on symbolic tensors.

    Symbolic tensors have shapes but no values, and need no memory. The step is the one that
    `train_step` runs, with two shortcuts. If several micro-batches after the first one run the same
    operators, only the last of them is run, because they all start with the same live bytes. The
    course's flash attention runs only one group of heads, because every group needs the same
    memory.

    **Existing objects.** An existing model, batch or optimizer is copied to symbolic tensors. The
    estimate changes no weight, gradient, optimizer state or random generator. Hooks of modules run,
    but hooks of the optimizer do not. If `recipe` is an optimizer or a function that creates one,
    the estimate is for the second step. The first step creates the optimizer state, but only for
    parameters that get a gradient. If the model stores tensors in a cache or a closure during the
    estimate, remove these tensors afterwards, because they are symbolic.

    **Accuracy on a CPU.** A real step on a CPU uses the same number of tensor bytes, with one
    exception: in a model with dropout, checkpoint="optimal" also keeps states of random generators,
    of 5,056 bytes each. Two kinds of memory are not counted on any device: memory that operators
    allocate internally (`course_lib.memory.measure` reports it), and the rounding of the allocator.

    **Accuracy on a GPU.** With the kind "cuda", the estimated peak of tensor bytes equals the peak
    that was measured on an H200. This holds for every measured model and recipe, except for models
    that create tensors on the CPU themselves. `course_lib.budget.device_kinds` has the details.

    **Models without an estimate.** A model with `nn.LSTM` cannot be estimated, because its fused
    operator on a CPU allocates a workspace. If oneDNN is disabled, the operator is not fused, and
    the model can be estimated. Models with sparse gradients cannot be estimated (see
    `course_lib.symbolic.cpu_kernels.INEXACT`).

    **Quantized weights.** With the kind "cpu", layers of bitsandbytes are estimated as they run on
    a CPU. The estimate includes the state of the quantization. It also includes the dequantized
    weights in 8-bit layers, and those in the backward pass of 4-bit layers. In forward, a 4-bit
    layer dequantizes its weight inside one operator, so the bytes of the dequantized weight are not
    counted. An 8-bit layer stores its input, but not as a saved tensor of autograd, so a
    non-reentrant checkpoint does not release this input. With the kind "cuda", the tensors are
    those that the source code of bitsandbytes 0.50 allocates on CUDA. This has not been measured on
    a GPU.

    **Compiled models.** If the model or any of its modules is compiled, the uncompiled model is
    estimated. `train_step` runs the compiled model, which can need less or more memory than the
    estimate. Use `course_lib.memory.measure` to measure the compiled step.

    **Several ranks.** For a recipe with several `ranks`, the estimate is for the rank that needs
    the most memory, with its share of the batch. From the second step on, the estimate equals what
    `course_lib.distributed` measures on that rank, except for a few bytes: the losses of all
    micro-batches after the second one are missing from the estimate.

    Args:
        model: Existing model; or function without arguments that returns the model in fp32 and is
            called in symbolic mode.
        batch: Existing batch; or function without arguments that returns the batch and is called in
            symbolic mode. With several ranks, this is the whole batch, which is divided among the
            ranks.
        recipe: Memory-saving techniques of the step. Instead of a `Recipe`, it can be an optimizer
            of the model, or a function such as `torch.optim.AdamW` that creates an optimizer for a
            list of parameters. The step then uses no technique, and the model keeps its dtypes.
        loss_sum: Function (model, batch) -> (sum of losses, weight), as in `train_step`. The weight
            is the number by which the sum is divided, such as the number of tokens. If the weight
            is computed from the batch, it must be returned as a tensor, because symbolic tensors
            have no values.
        max_norm: Norm to which the gradient is clipped, as in `train_step`. The estimate includes
            the memory that clipping needs.
        split: Function (batch, parts) -> list of `parts` batches, as in `train_step`. It must take
            the sizes of the parts from shapes or Python numbers, because symbolic tensors have no
            values. With several ranks, it also divides the batch among the ranks, and the estimated
            step is that of the rank whose share has the most bytes.
        tier: Lower tier, where offloaded tensors are stored: "file", as on a CPU, or "host" for
            host memory, as on a GPU.
        kind: Kind of device, "cpu" or "cuda", as described in `course_lib.budget.device_kinds`.
        gpu: GPU and version of PyTorch, which decide which attention kernel runs with the kind
            "cuda". The default is an H100 or H200 with the installed version.

    Raises:
        ValueError: The step reads values of tensors, which symbolic tensors do not have; the step
            uses a tensor that was created before the estimate and was not copied, such as a global
            variable; recipe, model and batch cannot be combined; or the batch cannot be split
            evenly among the ranks.
        TypeError: An argument has the wrong type.
    """
    one_of("tier", tier, TIERS)
    one_of("kind", kind, KINDS)
    of_kind("gpu", gpu, (Gpu, type(None)), "a Gpu or None")
    *functions, make_optimizer = made = functions_of(model, batch, recipe)
    options: dict[str, Any] = {"loss_sum": loss_sum, "max_norm": max_norm, "split": split}
    on_host = 0

    def trace_again(places: bool = False, events: bool = True) -> Trace:
        nonlocal on_host
        if made.recipe.ranks > 1:
            return rank_trace(*functions, **options, events=events)
        shown = {"events": events, "places": places}
        trace, on_host = process_trace(
            *functions,
            **options,
            **shown,
            tier=tier,
            kind=kind,
            gpu=gpu,
            make_optimizer=make_optimizer,
        )
        return trace

    with explain_symbolic_errors():
        trace = trace_again(events=False)
    found = Estimate.from_trace(trace, made.recipe, tier, on_host, kind)
    if make_optimizer is not None:
        found = replace(found, optimizer=optimizer_name(recipe))
    again = partial(estimate, model, batch, recipe, **options, tier="host", kind="cuda")
    return found.with_trace_function(trace_again).with_gpu_estimator(lambda gpu: again(gpu=gpu))


@add_user_line()
def run(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    budget_bytes: int | None = None,
    store: DiskStore | None = None,
) -> Run:
    """Run one training step of a recipe on real tensors, and measure its memory.

    The optimizer state is created before the measurement, so the measured step is like any step
    after the first one.

    Args:
        make_model: Function without arguments that returns the model in fp32.
        make_batch: Function without arguments that returns the batch.
        recipe: Memory-saving techniques of the step.
        loss_sum: Function (model, batch) -> (sum of losses, weight), as in `train_step`. The weight
            is the number by which the sum is divided, such as the number of tokens. None uses the
            model's own loss.
        max_norm: Norm to which the gradient is clipped; None for no clipping.
        split: Function (batch, parts) -> list of `parts` batches, as in `train_step`.
        budget_bytes: Limit in bytes for all live tensors of the step; None for no limit.
        store: Store for offloaded tensors. The default is a temporary file.

    Raises:
        course_lib.memory.MemoryBudgetExceeded: An operator exceeded `budget_bytes`. The message
            gives the name of the operator.
    """
    check_arguments(make_model, make_batch, recipe)
    own = store is None
    of_kind("store", store, (DiskStore, type(None)), "a DiskStore, or None")
    store = DiskStore() if own else store
    try:
        model, optimizer = build(make_model, recipe, store=store)
        check_loss(model, recipe, loss_sum)
        with default_dtype(recipe.dtype):
            batch = make_batch()
        micro_batches = micro_batches_of(batch, recipe.micro_batches, split)
        make_state(model, optimizer)
        before = Traffic(**vars(store.stats))
        with MemoryMeter(model, optimizer, budget_bytes=budget_bytes) as meter:
            result = run_micro_batches(
                model, optimizer, micro_batches, recipe, loss_sum, store, max_norm
            )
        moved = Traffic(
            *(a - b for a, b in zip(vars(store.stats).values(), vars(before).values(), strict=True))
        )
        return Run(result, meter, moved)
    finally:
        if own:
            store.close()
