"""Measurement of a training step by one method, which is the same for every variant in a
comparison."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from course_lib.labels import join_labels, text, verbatim

from .. import _check
from .._torch.autograd import AccumulateGrad, current_node
from .._torch.devices import wait_for
from .._torch.modes import ObserverMode
from .._torch.operators import DispatchKey
from .._torch.symbolic import is_symbolic
from .._torch.tensors import tensors_among
from .allocator import allocator_peak, workspace_by_operator
from .flops import own_formulas
from .meter import MemoryMeter
from .show import Table
from .snapshot import Snapshot
from .storages import check_model_and_optimizer

_MOST_METERED = 4  # largest number of runs after the warm-up until two agree


@dataclass(frozen=True, repr=False)
class Measurement(Table):
    """Result of `measure`. Bytes are whole numbers, and times are in seconds.

    Attributes:
        peak_bytes: The largest number of bytes of tensors live at once, including model and
            optimizer if they are given.
        allocator_peak_bytes: The same peak as the allocator reports it; None for a symbolic step or
            without repeats.
        workspace_bytes: The difference of the two peaks, which is memory that operators allocate
            and free internally; None if `allocator_peak_bytes` is None. It is below zero only if
            `notes` give the reason.
        flops: Floating-point operations of the step's matrix products and convolutions.
        seconds: Median time over the repeats; None if `allocator_peak_bytes` is None.
        device: Device whose bytes are counted: "cpu", "cuda:0", ...
        at_peak: Dict from category to bytes at the peak.
        workspace_by_operator: Dict from operator to the largest workspace of one call in bytes,
            largest first.
        changed_parameters: Number of parameters that the step changed and that `measure` could not
            restore, because they were not given.
        notes: Facts to consider when these figures are compared. They are shown below the table.
    """

    peak_bytes: int
    allocator_peak_bytes: int | None
    workspace_bytes: int | None
    flops: int
    seconds: float | None
    device: str
    at_peak: dict[str, int] = field(default_factory=dict, hash=False)
    workspace_by_operator: dict[str, int] = field(default_factory=dict, hash=False)
    changed_parameters: int = 0
    notes: tuple[str, ...] = ()

    columns = ("quantity", "value")

    def rows(self):
        rows = [(text("peak of live tensors (bytes)"), self.peak_bytes)]
        rows += [
            (text("  {name}", name=name), count) for name, count in self.at_peak.items() if count
        ]
        rows += [(text("peak of the allocator (bytes)"), self.allocator_peak_bytes)]
        rows += [(text("workspace (bytes)"), self.workspace_bytes)]
        rows += [
            (f"  {name}", count) for name, count in list(self.workspace_by_operator.items())[:3]
        ]
        return [*rows, ("FLOPs", self.flops), (text("time (s, median)"), self.seconds)]

    def caption(self) -> str:
        return join_labels([text("on {device}", device=verbatim(self.device)), *self.notes], "; ")


def measure(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    warmup: int = 1,
    repeats: int = 3,
    needs_gradient: bool = True,
    device: torch.device | str | None = None,
) -> Measurement:
    """Run a training step several times and return its memory, FLOPs and time.

    Every run starts with empty gradients and the same random numbers. The warm-up creates the
    optimizer's state, so that no variant in a comparison includes this cost. After the warm-up the
    step runs up to four times, until two consecutive runs have the same operators and the same peak
    (DDP arranges its buckets in the second run). One more run measures the allocator's peak,
    without any dispatch mode, another run measures the workspace of each operator, and `repeats`
    runs are timed. Garbage collection is off, so that the figures are reproducible.

    Functions that `torch.compile` has compiled run compiled in each of these runs, and afterwards
    too. `Measurement.notes` then states that compiled code was called. The allocator's peak is that
    of the compiled step. The peak of live tensors may not include all buffers of compiled code
    (see `MemoryMeter`); the others are part of `workspace_bytes`. A matrix product inside a kernel
    that the compiler generated counts as 0 FLOPs.

    Afterwards parameters, buffers, gradients, optimizer state and random number generators are in
    their original state, even if the step fails. For this, `measure` holds copies of parameters,
    buffers and optimizer state, which the figures do not include. If `model` and `optimizer` are
    not given, `measure` restores the gradients of the parameters that the step uses.
    `Measurement.changed_parameters` is then the number of parameters that the step has changed
    (except through `.data`).

    Args:
        step: Function without arguments that runs one training step: forward, backward and, if
            wanted, the optimizer's step.
        model: The model that is trained. Its bytes are part of the peak.
        optimizer: One optimizer or several that train the model. Their state is part of the peak.
        warmup: The least number of runs before the one that counts. With 0, every run is the very
            first step, for which `optimizer` is needed if the step uses one.
        repeats: Number of timed runs. With 0, only bytes and FLOPs are measured.
        needs_gradient: Whether the step must run a backward pass. False allows steps without one,
            such as inference.
        device: The device whose bytes are counted. The default is the first accelerator that the
            step uses, or else the CPU.

    Raises:
        ValueError: The step runs no backward pass, so that it leaves no gradient.
        TypeError, ValueError: An argument has a wrong type or value.
    """
    _check.function("step", step, "a function without arguments that runs one training step")
    optimizers = check_model_and_optimizer(model, optimizer)
    warmup, repeats = _check.whole("warmup", warmup, 0), _check.whole("repeats", repeats, 0)
    runs = _Runs(step, model, optimizers, first_step=warmup == 0)
    with runs, _without_garbage_collection():
        meter, flops, steady = _meter_run(runs, warmup, needs_gradient, device)
        device = meter.device
        allocator = None
        workspace = {}
        seconds = None
        if repeats and not is_symbolic() and device.type != "meta":
            allocator = meter.entry_bytes + allocator_peak(runs.run, device)
            workspace = workspace_by_operator(runs.run, device)
            times: list[float] = []
            for _ in range(repeats):
                runs.run(_time_block(device, times))
            seconds = statistics.median(times)
    return Measurement(
        peak_bytes=meter.peak_bytes,
        allocator_peak_bytes=allocator,
        workspace_bytes=None if allocator is None else allocator - meter.peak_bytes,
        flops=flops,
        seconds=seconds,
        device=str(device),
        at_peak=meter.at_peak(),
        workspace_by_operator=workspace,
        changed_parameters=runs.changed,
        notes=_notes(
            runs.changed,
            steady,
            0 if allocator is None else meter.peak_bytes - allocator,
            meter.ran_compiled,
        ),
    )


def _meter_run(
    runs: _Runs, warmup: int, needs_gradient: bool, device
) -> tuple[MemoryMeter, int, bool]:
    """Return the meter of the run that counts, its FLOPs, and whether it gave the same result as
    the run before it."""
    before = None
    for number in range(warmup + _MOST_METERED):
        meter = MemoryMeter(runs.model, runs.optimizers, device=device)
        counter = flop_counter()
        # The meter is the inner mode, so it sees each operator before the counter decomposes it.
        runs.run(counter, meter, *runs.leaves)
        if needs_gradient and number >= warmup and "backward" not in meter.phases():
            raise ValueError(
                "step must call backward() on a loss that depends on parameters, got a"
                " step without a backward pass; pass needs_gradient=False to measure such a step"
            )
        found = (meter.timeline.operators, meter.peak_bytes)
        flops = int(counter.get_total_flops())
        if number >= warmup and found == before:
            return meter, flops, True
        before = found
    return meter, flops, False


def _notes(changed: int, steady: bool, above: int, compiled: bool) -> tuple[str, ...]:
    notes = []
    if changed:
        notes.append(
            text(
                "the step changed {changed} parameters that `measure` was not given: "
                "pass `model=` and `optimizer=`, and they will be restored",
                changed=changed,
            )
        )
    if compiled:
        notes.append(
            text(
                "the step called code compiled by `torch.compile`: the allocator's peak is that of"
                " the compiled step; the peak of live tensors and the FLOPs are those of the"
                " operators that the compiled code calls and of the buffers that it allocates"
            )
        )
    if not steady:
        notes.append(
            text(
                "no two consecutive runs had the same operators and peak, so the figures come from"
                " runs that differ"
            )
        )
    elif above > 0:
        notes.append(
            text(
                "the meter counts {above:,} bytes more than the allocator: while a dispatch mode,"
                " such as the meter, is active, PyTorch computes some gradients out of place"
                " (prod's or cumprod's, for instance)",
                above=above,
            )
        )
    return tuple(notes)


class _Runs:
    """Context manager that runs a step repeatedly from the same start, and restores everything at
    the end."""

    def __init__(self, step, model, optimizers, first_step: bool):
        self.step = step
        self.model = model
        self.optimizers = optimizers
        self.first_step = first_step
        self.changed = 0

    def __enter__(self) -> None:
        self.snapshot = Snapshot(self.model, self.optimizers)
        self.leaves = [] if self.model is not None else [_Leaves(self.snapshot.set_aside)]

    def __exit__(self, *exception) -> None:
        self.changed = self.snapshot.restore()

    def run(self, *contexts) -> None:
        self.snapshot.start_over(first_step=self.first_step)
        gc.collect()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            self.step()


class _Leaves(ObserverMode):
    """Mode that reports the leaves that require gradients, when an operator reads them or before
    they receive their gradient."""

    def __init__(self, meet: Callable[[torch.Tensor], None]):
        super().__init__()
        self.meet = meet

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = current_node()
        if node is None and _returns_tensors(func):
            met = [
                tensor
                for tensor in tensors_among(args, kwargs)
                if tensor.requires_grad and tensor.is_leaf
            ]
        elif node is None:
            met = []
        # An input of an `autograd.Function` may not have been read by any operator. Its gradient is
        # accumulated next.
        else:
            met = [
                above.variable
                for above, _ in node.next_functions
                if isinstance(above, AccumulateGrad)
            ]
        for leaf in met:
            self.meet(leaf)
        return func(*args, **(kwargs or {}))


@cache
def _returns_tensors(func: Any) -> bool:
    """Return False only if the operator merely returns information, such as a shape.

    `is_leaf` must not be read for such an operator. Autograd reads the shape of a jagged tensor
    while it holds the lock that `is_leaf` needs.
    """
    returned = func._schema.returns if hasattr(func, "_schema") else None
    return not returned or any("Tensor" in str(value.type) for value in returned)


def flop_counter() -> FlopCounterMode:
    """Return a counter of FLOPs that holds no tensors, so that a meter can run inside it, and that
    lets compiled functions run compiled."""
    counter = _FlopCounter(display=False, custom_mapping=own_formulas())
    counter.mod_tracker = _NoModules()  # pyrefly: ignore[bad-assignment]
    return counter


class _FlopCounter(FlopCounterMode):
    def __enter__(self):
        counter = super().__enter__()
        self.mode.__exit__(None, None, None)  # compiled functions run uncompiled under this mode
        self.mode = _FlopMode(self)
        self.mode.__enter__()
        return counter


class _FlopMode(ObserverMode, _FlopCounterMode):
    """Mode of the counter, under which compiled functions run compiled."""

    def _handle_higher_order_ops(self, func, types, args, kwargs):
        result = super()._handle_higher_order_ops(func, types, args, kwargs)
        # PyTorch's counter refuses the operators by which compiled code repeats random numbers.
        kernel = func.py_kernels.get(DispatchKey.BackendSelect)
        if result is not NotImplemented or kernel is None:
            return result
        with self:
            return kernel(*args, **kwargs)


class _NoModules(nullcontext):
    """Replacement for the counter's module tracker, whose hooks hold tensors and make
    `torch.autograd.grad` fail."""

    parents = ("Global",)


@contextmanager
def _time_block(device: torch.device, seconds: list[float]) -> Iterator[None]:
    wait_for(device)
    start = time.perf_counter()
    yield
    wait_for(device)
    seconds.append(time.perf_counter() - start)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    # Objects that already exist need not be searched before every run.
    if not frozen:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
