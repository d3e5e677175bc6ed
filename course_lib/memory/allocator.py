"""Measure the memory of a training step as PyTorch's allocator counts it.

Unlike the meter, the allocator also counts memory that operators allocate and free internally. On a
CPU the numbers come from PyTorch's profiler, and on CUDA from the allocator's statistics.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.autograd.profiler import record_function

from .._torch.devices import EventType
from .._torch.modes import ObserverMode

# Prefix of the names of the records that `_NamingMode` adds to the profile.
_RECORD_PREFIX = "course_lib.memory: "


def allocator_peak(run: Callable, device: torch.device) -> int:
    """Run a step and return its peak memory in bytes, as PyTorch's allocator counts it.

    The bytes that were allocated when the step began are subtracted from the peak. The step runs
    without a dispatch mode, because a mode would change which tensors autograd creates.

    Args:
        run: Function that takes context managers as positional arguments, enters them, and runs the
            step inside them.
        device: Device whose allocator is measured. Any device other than a CUDA device means the
            CPU.
    """
    if device.type == "cuda":
        found: list[tuple[int, int]] = []
        run(_record_cuda_bytes(device, found))
        return found[0][0]
    changes, _ = _profile_allocations(run)
    return max(accumulate(change for _, change in changes), default=0)


def workspace_by_operator(run: Callable, device: torch.device) -> dict[str, int]:
    """Run a step and return the largest workspace of each operator, in bytes.

    The workspace is memory that an operator allocates and frees internally. For one call it is the
    allocator's peak during the call, minus the larger of two numbers: the bytes allocated before
    the call, and the bytes allocated after it.

    Args:
        run: Function that takes context managers as positional arguments, enters them, and runs the
            step inside them.
        device: Device whose allocator is measured. Any device other than a CUDA device means the
            CPU.

    Returns:
        A dict from operator name, such as "aten.mm.default", to the largest workspace of all its
        calls. The operator with the largest workspace comes first. Operators without a workspace
        are left out.
    """
    if device.type == "cuda":
        mode = _CudaWorkspace(device)
        run(mode)
        workspace = mode.workspace
    else:
        workspace = _cpu_workspace(run)
    return dict(sorted(workspace.items(), key=lambda item: -item[1]))


# ---- on a CPU


def _profile_allocations(
    run: Callable, *modes
) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """Run a step under PyTorch's profiler and return its allocations and its operators.

    Returns:
        Two lists. The first has a pair (time, change in bytes) for each allocation, and for each
        release of memory that the step has allocated. The second has a tuple (operator, start,
        stop) for each operator that ran under `_NamingMode`. Times are in nanoseconds.
    """
    # This setting stops the profiler from reporting its start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    run(profile, *modes)
    events = []
    calls = []
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0] == EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
        elif event.name.startswith(_RECORD_PREFIX):
            name = event.name.removeprefix(_RECORD_PREFIX)
            calls.append((name, event.start_time_ns, event.end_time_ns))
    changes = []
    addresses_of_run = set()
    for time, address, change in sorted(events, key=lambda event: event[0]):
        if change > 0:
            addresses_of_run.add(address)
        elif address in addresses_of_run:
            addresses_of_run.remove(address)
        else:
            # The block was allocated before this run. Subtracting its release would cancel an equal
            # number of bytes that the run allocates.
            continue
        changes.append((time, change))
    return changes, calls


def _cpu_workspace(run: Callable) -> dict[str, int]:
    """Run a step on the CPU and return a dict from operator name to its workspace in bytes."""
    changes, calls = _profile_allocations(run, _NamingMode())
    times = [time for time, _ in changes]
    live = [0, *accumulate(change for _, change in changes)]
    workspace: dict[str, int] = {}
    for name, start, stop in calls:
        first, last = bisect_left(times, start), bisect_left(times, stop)
        extra = max(live[first : last + 1]) - max(live[first], live[last])
        if extra > 0:
            workspace[name] = max(extra, workspace.get(name, 0))
    return workspace


class _NamingMode(ObserverMode):
    """Mode that adds a record with the operator's name to the profile for each operator call."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"{_RECORD_PREFIX}{func}"):
            return func(*args, **(kwargs or {}))


# ---- on CUDA


@contextmanager
def _record_cuda_bytes(device: torch.device, found: list[tuple[int, int]]) -> Iterator[None]:
    """Append the pair (peak, bytes allocated at the end) to `found` when a `with` block ends.

    Both numbers are relative to the bytes that were allocated when the block began.
    """
    before = _allocated_bytes_statistics(device)["current"]
    torch.cuda.reset_peak_memory_stats(device)
    yield
    after = _allocated_bytes_statistics(device)
    found.append((after["peak"] - before, after["current"] - before))


def _allocated_bytes_statistics(device: torch.device) -> dict[str, int]:
    """Return a dict with the bytes allocated now ("current") and their peak ("peak") on CUDA."""
    # `torch.cuda.memory_allocated` sorts all statistics by name to return one of them. This is too
    # slow for a call per operator.
    return torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]


class _CudaWorkspace(ObserverMode):
    """Mode that finds the workspace of each operator from the CUDA allocator's statistics.

    Reading the statistics does not synchronize with the GPU.

    Attributes:
        workspace: Dict from operator name to the largest workspace of one call in bytes.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.workspace: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found: list[tuple[int, int]] = []
        with _record_cuda_bytes(self.device, found):
            result = func(*args, **(kwargs or {}))
        [(peak, at_end)] = found
        if peak > max(0, at_end):
            extra = peak - max(0, at_end)
            self.workspace[str(func)] = max(extra, self.workspace.get(str(func), 0))
        return result
