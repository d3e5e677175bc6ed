"""Measure memory, FLOPs and time of a training step.

`measure` uses the same method for every step, so that variants of a step can be compared.
"""

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

# Largest number of runs under the meter after the warm-up. The runs end early if two consecutive
# ones agree.
_MAX_METERED_RUNS = 4


@dataclass(frozen=True, repr=False)
class Measurement(Table):
    """Memory, FLOPs and time of a training step, as `measure` returns them.

    Attributes:
        peak_bytes: Largest number of bytes of tensors that are live at once, including the tensors
            of the model and the optimizer if `measure` received them.
        allocator_peak_bytes: Peak in bytes that PyTorch's allocator reports. None if the step used
            symbolic or meta tensors, or if `measure` was called with `repeats=0`.
        workspace_bytes: Memory in bytes that operators allocate and free internally:
            `allocator_peak_bytes` minus `peak_bytes`. None if `allocator_peak_bytes` is None. If
            the number is negative, `notes` give the reason.
        flops: Floating-point operations of the step's matrix products, convolutions and fused
            attention.
        seconds: Median duration of the timed runs, in seconds; None if `allocator_peak_bytes` is
            None.
        device: Device whose bytes are counted: "cpu", "cuda:0", ...
        at_peak: Dict from category, such as "activation", to its live bytes at the peak.
        workspace_by_operator: Dict from operator name to the largest workspace of one call in
            bytes, largest first. Empty if `allocator_peak_bytes` is None.
        changed_parameters: Number of parameters that the step changed and that `measure` could not
            restore, because it did not receive their model.
        notes: Sentences that state limits of these numbers, for example that two runs of the step
            differed. They are displayed below the table.
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

    The runs are, in this order:

    1. `warmup` runs, which create the optimizer's state, so that the creation is not part of the
       results.
    2. Up to four runs under a `MemoryMeter`. They end with the first run that has the same
       operators and the same peak as the run before it, which may be a warm-up run. The first runs
       may differ; DDP, for example, arranges its buckets in the second run.
    3. One run without any dispatch mode, for the allocator's peak.
    4. One run for the workspace of each operator.
    5. `repeats` timed runs.

    Every run starts with empty gradients and the same states of the random number generators.
    Garbage collection is off, so that the numbers are reproducible.

    **Restored state.** Afterwards parameters, buffers, gradients, optimizer state and random number
    generators are in their original state, even if the step fails. For this, `measure` makes copies
    of parameters, buffers and optimizer state, which the results do not include. If `model` and
    `optimizer` are not given, `measure` restores only the random number generators and the
    gradients of the parameters that the step uses. In this case, `Measurement.changed_parameters`
    is the number of parameters that the step has changed, except through `.data`.

    **Compiled code.** Functions that `torch.compile` has compiled remain compiled in all runs and
    afterwards. `Measurement.notes` states that compiled code was called. `allocator_peak_bytes` is
    the peak of the compiled step. `peak_bytes` may lack some buffers of compiled code (see
    `MemoryMeter`), which are part of `workspace_bytes` instead. A matrix product inside a kernel
    that the compiler generated counts as 0 FLOPs.

    Args:
        step: Function without arguments that runs one training step: forward, backward and, if
            wanted, the optimizer's step.
        model: The model that is trained. Its bytes are part of the peak.
        optimizer: One optimizer or several that train the model. Their state is part of the peak.
        warmup: Number of warm-up runs. With 0, each run starts from the optimizer's state before
            this call. For a new optimizer, each run is therefore the first step of training, which
            creates the state. If the step uses an optimizer, pass it as `optimizer`, because only
            then is its state reset before each run.
        repeats: Number of timed runs. With 0, items 3 to 5 of the list above are left out, and only
            live bytes and FLOPs are measured.
        needs_gradient: Whether the step must run a backward pass. False allows steps without a
            backward pass, such as inference.
        device: The device whose bytes are counted. The default is the first accelerator that the
            step uses, or else the CPU.

    Raises:
        ValueError: The step runs no backward pass, although `needs_gradient` is True.
        TypeError, ValueError: An argument has a wrong type or value.
    """
    _check.function("step", step, "a function without arguments that runs one training step")
    optimizers = check_model_and_optimizer(model, optimizer)
    warmup, repeats = _check.whole("warmup", warmup, 0), _check.whole("repeats", repeats, 0)
    runs = _RepeatedRuns(step, model, optimizers, first_step=warmup == 0)
    with runs, _without_garbage_collection():
        meter, flops, runs_agree = _meter_run(runs, warmup, needs_gradient, device)
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
            runs_agree,
            0 if allocator is None else meter.peak_bytes - allocator,
            meter.ran_compiled,
        ),
    )


def _meter_run(
    runs: _RepeatedRuns, warmup: int, needs_gradient: bool, device
) -> tuple[MemoryMeter, int, bool]:
    """Run the step under a meter until two consecutive runs have the same operators and peak.

    Args:
        runs: Context manager, already entered, that runs the step.
        warmup: Number of first runs whose results are not compared.
        needs_gradient: Whether a step without a backward pass is an error.
        device: Device whose bytes are counted; None for the meter's default.

    Returns:
        The meter of the last run, the FLOPs of that run, and whether the last two runs agree.
    """
    before = None
    for number in range(warmup + _MAX_METERED_RUNS):
        meter = MemoryMeter(runs.model, runs.optimizers, device=device)
        counter = flop_counter()
        # The meter is the inner mode, so it sees each operator before the counter decomposes it.
        runs.run(counter, meter, *runs.leaf_observers)
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


def _notes(
    changed: int, runs_agree: bool, excess_bytes: int, ran_compiled: bool
) -> tuple[str, ...]:
    """Return the sentences of `Measurement.notes`.

    Args:
        changed: Number of parameters that could not be restored.
        runs_agree: Whether two consecutive runs had the same operators and peak.
        excess_bytes: The meter's peak minus the allocator's peak, or 0 if the allocator's peak was
            not measured.
        ran_compiled: Whether compiled code was called.
    """
    notes = []
    if changed:
        notes.append(
            text(
                "the step changed {changed} parameters that `measure` was not given: "
                "pass `model=` and `optimizer=`, and they will be restored",
                changed=changed,
            )
        )
    if ran_compiled:
        notes.append(
            text(
                "the step called code compiled by `torch.compile`: the allocator's peak is that of"
                " the compiled step; the peak of live tensors and the FLOPs are those of the"
                " operators that the compiled code calls and of the buffers that it allocates"
            )
        )
    if not runs_agree:
        notes.append(
            text(
                "no two consecutive runs had the same operators and peak, so the numbers come from"
                " runs that differ"
            )
        )
    elif excess_bytes > 0:
        notes.append(
            text(
                "the meter counts {above:,} bytes more than the allocator: while a dispatch mode,"
                " such as the meter, is active, PyTorch computes some gradients out of place"
                " (prod's or cumprod's, for instance)",
                above=excess_bytes,
            )
        )
    return tuple(notes)


class _RepeatedRuns:
    """Context manager that runs a step several times and restores the original state at the end.

    Every run starts with empty gradients and the same states of the random number generators.

    Args:
        step: Function without arguments.
        model: The model, or None.
        optimizers: The optimizers.
        first_step: Whether each run starts with the optimizers' state from before the `with` block,
            as the first step of a training does. With False, a run continues with the optimizer
            state that the previous run left.

    Attributes:
        changed: Number of parameters that changed and could not be restored; set at the end.
        leaf_observers: Dispatch modes that find the parameters of an unknown model. Pass them to
            `run` in the runs under the meter. The list is empty if the model was given.
    """

    def __init__(self, step, model, optimizers, first_step: bool):
        self.step = step
        self.model = model
        self.optimizers = optimizers
        self.first_step = first_step
        self.changed = 0

    def __enter__(self) -> None:
        self.snapshot = Snapshot(self.model, self.optimizers)
        self.leaf_observers = (
            [] if self.model is not None else [_LeafObserver(self.snapshot.stash_gradient)]
        )

    def __exit__(self, *exception) -> None:
        self.changed = self.snapshot.restore()

    def run(self, *contexts) -> None:
        """Run the step once inside the given context managers."""
        self.snapshot.start_over(first_step=self.first_step)
        gc.collect()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            self.step()


class _LeafObserver(ObserverMode):
    """Mode that reports each leaf tensor that requires a gradient, such as a parameter.

    A leaf is reported when an operator of the forward pass reads it, or, in the backward pass,
    before its gradient is accumulated.

    Args:
        on_leaf: Function that is called with each leaf, possibly several times.
    """

    def __init__(self, on_leaf: Callable[[torch.Tensor], None]):
        super().__init__()
        self.on_leaf = on_leaf

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = current_node()
        if node is None and _returns_tensors(func):
            leaves = [
                tensor
                for tensor in tensors_among(args, kwargs)
                if tensor.requires_grad and tensor.is_leaf
            ]
        elif node is None:
            leaves = []
        # An input of an `autograd.Function` can be a leaf that no operator has read. Such a leaf is
        # found here, before its gradient is accumulated.
        else:
            leaves = [
                next_node.variable
                for next_node, _ in node.next_functions
                if isinstance(next_node, AccumulateGrad)
            ]
        for leaf in leaves:
            self.on_leaf(leaf)
        return func(*args, **(kwargs or {}))


@cache
def _returns_tensors(func: Any) -> bool:
    """Return whether an operator returns tensors, and not only information such as a shape.

    `_LeafObserver` must not read `is_leaf` inside an operator that returns no tensors: autograd
    reads the shape of a jagged tensor while it holds the lock that `is_leaf` needs.
    """
    returned = func._schema.returns if hasattr(func, "_schema") else None
    return not returned or any("Tensor" in str(value.type) for value in returned)


def flop_counter() -> FlopCounterMode:
    """Return a `FlopCounterMode` that can be active together with a `MemoryMeter`.

    PyTorch's own `FlopCounterMode` keeps tensors alive and makes compiled functions run uncompiled.
    The returned counter does neither, and has the same FLOP formulas as the meter.
    """
    counter = _FlopCounter(display=False, custom_mapping=own_formulas())
    counter.mod_tracker = _NoModuleTracker()  # pyrefly: ignore[bad-assignment]
    return counter


class _FlopCounter(FlopCounterMode):
    """FLOP counter under which compiled functions run compiled."""

    def __enter__(self):
        counter = super().__enter__()
        self.mode.__exit__(None, None, None)  # compiled functions run uncompiled under this mode
        self.mode = _FlopMode(self)
        self.mode.__enter__()
        return counter


class _FlopMode(ObserverMode, _FlopCounterMode):
    """Dispatch mode of `_FlopCounter`. It also counts operators inside higher-order operators."""

    def _handle_higher_order_ops(self, func, types, args, kwargs):
        result = super()._handle_higher_order_ops(func, types, args, kwargs)
        # PyTorch's counter rejects the higher-order operators with which compiled code repeats
        # random numbers. Their kernels call the inner operator, which is then counted.
        kernel = func.py_kernels.get(DispatchKey.BackendSelect)
        if result is not NotImplemented or kernel is None:
            return result
        with self:
            return kernel(*args, **kwargs)


class _NoModuleTracker(nullcontext):
    """Module tracker for `FlopCounterMode` that tracks no modules.

    The hooks of PyTorch's own tracker keep tensors alive and make `torch.autograd.grad` fail.
    """

    parents = ("Global",)


@contextmanager
def _time_block(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Measure the time of a `with` block in seconds, and append it to `seconds`.

    The time includes the work that the block starts on the device.
    """
    wait_for(device)
    start = time.perf_counter()
    yield
    wait_for(device)
    seconds.append(time.perf_counter() - start)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable automatic garbage collection inside a `with` block."""
    enabled, frozen = gc.isenabled(), _objects_are_frozen()
    gc.disable()
    # `_RepeatedRuns.run` collects garbage before every run. Freezing the objects that already exist
    # keeps the collector from searching them each time.
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


def _objects_are_frozen() -> bool:
    """Return whether other code has frozen objects with `gc.freeze`, which must not be undone.

    `gc.get_freeze_count` visits every frozen object, which can take longer than a small step. So it
    is not called again after it has found frozen objects. If they are unfrozen later, the result
    remains True, and `measure` only takes longer.
    """
    global _found_frozen_objects
    _found_frozen_objects = _found_frozen_objects or gc.get_freeze_count() > 0
    return _found_frozen_objects


_found_frozen_objects = False
