"""One fair method to measure a training step, the same for every arm of a comparison."""

from __future__ import annotations

import copy
import gc
import os
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .meter import MemoryMeter, _tensors, check_model_and_optimizer
from .show import Table


@dataclass(frozen=True, repr=False)
class Measurement(Table):
    """What `measure` found. Bytes are whole numbers; times are seconds.

    Attributes:
        peak_bytes: the most bytes of tensors live at once, model and optimizer included where given.
        allocator_peak_bytes: the same moment as the allocator saw it; None for a symbolic step.
        workspace_bytes: the difference: what operators allocated and freed inside themselves; None for a symbolic step.
        workspace_by_operator: operator -> the most workspace that one call of it took, largest first.
        flops: floating-point operations of the step's matrix products and convolutions.
        seconds: median over the repeats; None for a symbolic step.
        device: "cpu", "cuda:0", ...
        at_peak: category -> bytes at the peak.
        changed_parameters: how many parameters the step changed that `measure` was not given and could not put back.
    """

    peak_bytes: int
    allocator_peak_bytes: int | None
    workspace_bytes: int | None
    flops: int
    seconds: float | None
    device: str
    at_peak: dict[str, int] = field(default_factory=dict)
    workspace_by_operator: dict[str, int] = field(default_factory=dict)
    changed_parameters: int = 0

    columns = ("quantity", "value")

    def rows(self):
        rows = [("peak of live tensors, bytes", self.peak_bytes)]
        rows += [(f"  {name}", count) for name, count in self.at_peak.items() if count]
        rows += [
            ("peak of the allocator, bytes", self.allocator_peak_bytes),
            ("workspace, bytes", self.workspace_bytes),
        ]
        rows += [(f"  {name}", count) for name, count in list(self.workspace_by_operator.items())[:3]]
        return [*rows, ("FLOPs", self.flops), ("seconds, median", self.seconds)]

    def caption(self) -> str:
        if not self.changed_parameters:
            return f"on {self.device}"
        return (
            f"on {self.device}; the step changed {self.changed_parameters} parameters that measure was not given: "
            "pass model= and optimizer= to have them put back"
        )


def measure(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    warmup: int = 1,
    repeats: int = 3,
    needs_gradient: bool = True,
) -> Measurement:
    """Run a training step several times and say what it takes.

    Every run starts from empty gradients and the same random numbers; the warm-up makes the optimizer's state, so
    that no arm of a comparison pays for it. One run is for the meter, two for the allocator, one for the FLOPs
    and `repeats` for the clock, with garbage collection off so that the figures repeat.

    Parameters, buffers, gradients, optimizer state and random number generators are as they were afterwards, also
    when the step fails. Where `model` and `optimizer` are left out, the gradients of the parameters met are put back,
    and `Measurement.changed_parameters` says how many parameters the step has changed (not through `.data`).

    Args:
        step: one training step, without arguments; forward, backward and, if wanted, the optimizer's step.
        model: what is trained; its bytes are part of the peak.
        optimizer: what trains it; its state is part of the peak.
        warmup: runs before the first measurement; 0 makes every run the first step ever, for which `optimizer` is
            needed where the step has one.
        repeats: timed runs.
        needs_gradient: False to measure something that computes no gradient, such as inference.

    Raises:
        ValueError: the step runs no backward pass, so that it leaves no gradient.
        TypeError, ValueError: an argument is not of its kind.
    """
    if not callable(step):
        raise TypeError(f"step is {step!r}; it takes a function without arguments that runs one training step")
    check_model_and_optimizer(model, optimizer)
    for name, count, least in (("warmup", warmup, 0), ("repeats", repeats, 1)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} is {count!r}; it takes a whole number")
        if count < least:
            raise ValueError(f"{name} is {count}; it takes {least} or more")

    with _everything_put_back(model, optimizer, first_step=warmup == 0) as kept, _without_garbage_collection():
        for _ in range(warmup):
            kept.run(step)
        meter = MemoryMeter(model, optimizer)
        kept.run(step, meter)
        if needs_gradient and "backward" not in meter.phases():
            raise ValueError(
                "step leaves no gradient: no operator ran in a backward pass; it takes a step that calls backward() on "
                "a loss that depends on parameters (needs_gradient=False measures a step that is meant to have none)"
            )
        device = kept.device()
        symbolic = torch._guards.detect_fake_mode() is not None
        allocator_peak, workspace, seconds = None, {}, None
        if not symbolic:
            peak_of, workspace_of = (
                (_cuda_peak, _cuda_workspace) if device.type == "cuda" else (_cpu_peak, _cpu_workspace)
            )
            allocator_peak = meter.entry_bytes + peak_of(kept, step, device)
            workspace = workspace_of(kept, step, device)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()
        kept.run(step, counter)
        if not symbolic:
            clock = _Clock(device)
            for _ in range(repeats):
                kept.run(step, clock)
            seconds = statistics.median(clock.seconds)
    return Measurement(
        peak_bytes=meter.peak_bytes,
        allocator_peak_bytes=allocator_peak,
        workspace_bytes=None if allocator_peak is None else allocator_peak - meter.peak_bytes,
        flops=int(counter.get_total_flops()),
        seconds=seconds,
        device=str(device),
        at_peak=meter.at_peak(),
        workspace_by_operator=workspace,
        changed_parameters=kept.changed,
    )


# ---- everything as it was


class _Kept:
    """The state that runs start from, and what puts it back."""

    def __init__(self, model, optimizer, first_step: bool):
        self.model, self.optimizer = model, optimizer
        self.first_step = first_step
        self.slots, self.values = [], []  # (a module's dict of tensors, its content), (tensor, its value)
        parameters = [] if model is None else list(model.parameters())
        if model is not None:
            for module in model.modules():
                self.slots += [(slots, dict(slots)) for slots in (module._parameters, module._buffers)]
            # By value: neither batch norm's kernel nor a change through `.data` counts a version on.
            self.values = [(tensor, tensor.detach().clone()) for tensor in (*parameters, *model.buffers())]
        self.known = {id(tensor) for tensor, _ in self.values}
        self.random = _random_state()
        if optimizer is not None:
            parameters += (parameter for group in optimizer.param_groups for parameter in group["params"])
            self.state = dict(optimizer.state)
            self.groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            self.copy_optimizer_state()
        self.gradients = {}  # id of a parameter -> (it, its gradient, its version)
        for parameter in parameters:
            self.set_aside(parameter)
        self.changed = 0

    def copy_optimizer_state(self) -> None:
        """The runs get a copy of the state; the tensors that the caller may hold are not touched."""
        keep = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        copies = {key: copy.deepcopy(value, dict(keep)) for key, value in self.state.items()}
        self.optimizer.state.clear()
        self.optimizer.state.update(copies)

    def set_aside(self, parameter) -> None:
        if id(parameter) not in self.gradients:
            self.gradients[id(parameter)] = (parameter, parameter.grad, parameter._version)
            parameter.grad = None

    def run(self, step, *contexts) -> None:
        """One step inside the contexts, from empty gradients and the same random numbers."""
        for parameter, _, _ in self.gradients.values():
            parameter.grad = None
        if self.first_step and self.optimizer is not None:
            self.copy_optimizer_state()
        _set_random_state(self.random)
        gc.collect()
        with ExitStack() as stack:
            if self.model is None:
                stack.enter_context(_Leaves(self.set_aside))
            for context in contexts:
                stack.enter_context(context)
            step()

    def device(self) -> torch.device:
        for parameter, _, _ in self.gradients.values():
            return parameter.device
        return torch.device("cpu")

    def put_back(self) -> None:
        for slots, content in self.slots:
            slots.clear()
            slots.update(content)
        for tensor, value in self.values:
            tensor.data.copy_(value)
        for parameter, gradient, version in self.gradients.values():
            parameter.grad = gradient
            self.changed += id(parameter) not in self.known and parameter._version != version
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update(self.state)
            for group, values in zip(self.optimizer.param_groups, self.groups, strict=False):
                group.update(values)
        _set_random_state(self.random)


@contextmanager
def _everything_put_back(model, optimizer, first_step: bool) -> Iterator[_Kept]:
    kept = _Kept(model, optimizer, first_step)
    try:
        yield kept
    finally:
        kept.put_back()


class _Leaves(TorchDispatchMode):
    """Tells of the leaves that require gradients, when an operator first meets them."""

    def __init__(self, meet: Callable[[torch.Tensor], None]):
        super().__init__()
        self.meet = meet

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._current_autograd_node() is None:
            for tensor in _tensors(args, kwargs):
                if tensor.requires_grad and tensor.is_leaf:
                    self.meet(tensor)
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not frozen:  # what is there already need not be looked through before every run
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _random_state() -> tuple:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _set_random_state(state: tuple) -> None:
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


class _Clock:
    """Times its block, again and again; waits for the device on both ends."""

    def __init__(self, device: torch.device):
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.wait()
        self.start = time.perf_counter()

    def __exit__(self, *exception) -> None:
        self.wait()
        self.seconds.append(time.perf_counter() - self.start)


# ---- the allocator: on a CPU seen through the profiler, on CUDA through its own statistics


def _cpu_peak(kept: _Kept, step, device) -> int:
    """The most bytes allocated at once during a run, above what was there before it."""
    changes, _ = _profiled(kept, step)
    return max(accumulate(change for _, change in changes), default=0)


def _cpu_workspace(kept: _Kept, step, device) -> dict[str, int]:
    """operator -> the most bytes that one call of it held beyond what it found and what it left."""
    changes, calls = _profiled(kept, step, _Named())
    times = [moment for moment, _ in changes]
    live = [0, *accumulate(change for _, change in changes)]
    taken: dict[str, int] = {}
    for name, start, stop in calls:
        first, last = bisect_left(times, start), bisect_left(times, stop)
        extra = max(live[first : last + 1]) - max(live[first], live[last])
        if extra > 0:
            taken[name] = max(extra, taken.get(name, 0))
    return _largest_first(taken)


class _NoModules(nullcontext):
    """Instead of the counter's module tracker, whose hooks make `torch.autograd.grad` fail."""

    parents = ("Global",)


def _largest_first(taken: dict[str, int]) -> dict[str, int]:
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


class _Named(TorchDispatchMode):
    """Puts each operator's name into the profile, around all that it does inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"{_MARK}{func}"):
            return func(*args, **(kwargs or {}))


_MARK = "course_lib.memory: "


def _profiled(kept: _Kept, step, *modes) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """(time, change of bytes) of each allocation and its release, and (operator, start, stop) of each `_Named` call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's start and stop are announced on stderr
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    kept.run(step, profile, *modes)
    moves, calls = [], []
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0] == _EventType.Allocation:
            moves.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(_MARK):
            calls.append((event.name.removeprefix(_MARK), event.start_time_ns, event.end_time_ns))
    changes, mine = [], set()
    for moment, address, change in sorted(moves, key=lambda move: move[0]):
        if change > 0:
            mine.add(address)
        elif address in mine:
            mine.remove(address)
        else:
            continue  # made before this run: its release would hide as much of what the run makes
        changes.append((moment, change))
    return changes, calls


class _CudaPeak:
    """The CUDA allocator's own peak inside the block, above what was there before it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.peak_bytes = 0

    def __enter__(self) -> _CudaPeak:
        self.before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *exception) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.before


def _cuda_peak(kept: _Kept, step, device) -> int:
    watch = _CudaPeak(device)
    kept.run(step, watch)
    return watch.peak_bytes


def _cuda_workspace(kept: _Kept, step, device) -> dict[str, int]:
    mode = _CudaWorkspace(device)
    kept.run(step, mode)
    return _largest_first(mode.taken)


class _CudaWorkspace(TorchDispatchMode):
    """Asks the CUDA allocator before and after each operator; its counts need no synchronisation."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.taken: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _CudaPeak(self.device) as watch:
            result = func(*args, **(kwargs or {}))
        left = max(0, torch.cuda.memory_allocated(self.device) - watch.before)
        if watch.peak_bytes > left:
            self.taken[str(func)] = max(watch.peak_bytes - left, self.taken.get(str(func), 0))
        return result
