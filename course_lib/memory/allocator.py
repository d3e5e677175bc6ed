"""Allocations and releases of a step, as the allocator sees them. On a CPU they come from the
profiler, and on CUDA from the allocator's statistics."""

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

_MARK = "course_lib.memory: "


def allocator_peak(run: Callable, device: torch.device) -> int:
    """Return the largest number of bytes allocated at once while the step runs, above the bytes
    allocated before it. No dispatch mode is active.

    Args:
        run: Function that takes context managers and runs the step inside them.
        device: Device of the allocator.
    """
    if device.type == "cuda":
        found: list[tuple[int, int]] = []
        run(_cuda_watch(device, found))
        return found[0][0]
    changes, _ = _profile(run)
    return max(accumulate(change for _, change in changes), default=0)


def workspace_by_operator(run: Callable, device: torch.device) -> dict[str, int]:
    """Return a dict from operator to its workspace in bytes, largest first.

    The workspace is the largest number of bytes that one call of the operator allocated at once,
    above both the bytes before the call and the bytes after it.
    """
    if device.type == "cuda":
        mode = _CudaWorkspace(device)
        run(mode)
        taken = mode.taken
    else:
        taken = _cpu_workspace(run)
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


# ---- on a CPU


def _profile(run: Callable, *modes) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """Return two lists: (time, change in bytes) of each allocation and each release, and
    (operator, start, stop) of each operator that ran under `_NamingMode`."""
    # Otherwise the profiler reports its start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    run(profile, *modes)
    moves = []
    calls = []
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0] == EventType.Allocation and event.extra_fields.device.type == "cpu":
            moves.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
        elif event.name.startswith(_MARK):
            calls.append((event.name.removeprefix(_MARK), event.start_time_ns, event.end_time_ns))
    changes = []
    mine = set()
    for moment, address, change in sorted(moves, key=lambda move: move[0]):
        if change > 0:
            mine.add(address)
        elif address in mine:
            mine.remove(address)
        else:
            # The block was allocated before this run. Its release would hide an equal amount that
            # the run allocates.
            continue
        changes.append((moment, change))
    return changes, calls


def _cpu_workspace(run: Callable) -> dict[str, int]:
    changes, calls = _profile(run, _NamingMode())
    times = [moment for moment, _ in changes]
    live = [0, *accumulate(change for _, change in changes)]
    taken: dict[str, int] = {}
    for name, start, stop in calls:
        first, last = bisect_left(times, start), bisect_left(times, stop)
        extra = max(live[first : last + 1]) - max(live[first], live[last])
        if extra > 0:
            taken[name] = max(extra, taken.get(name, 0))
    return taken


class _NamingMode(ObserverMode):
    """Mode that records each operator's name in the profile, around all work of the operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"{_MARK}{func}"):
            return func(*args, **(kwargs or {}))


# ---- on CUDA


@contextmanager
def _cuda_watch(device: torch.device, found: list[tuple[int, int]]) -> Iterator[None]:
    """Append one pair to `found` when the block ends: its peak, and the bytes allocated at its end.
    Both are relative to the bytes that were allocated when the block began."""
    before = _allocated_bytes(device)["current"]
    torch.cuda.reset_peak_memory_stats(device)
    yield
    after = _allocated_bytes(device)
    found.append((after["peak"] - before, after["current"] - before))


def _allocated_bytes(device: torch.device) -> dict[str, int]:
    # `torch.cuda.memory_allocated` sorts all statistics by name to return one. That is too slow to
    # call for each operator.
    return torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]


class _CudaWorkspace(ObserverMode):
    """Mode that reads the CUDA allocator's counts before and after each operator, which needs no
    synchronization."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.taken: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found: list[tuple[int, int]] = []
        with _cuda_watch(self.device, found):
            result = func(*args, **(kwargs or {}))
        [(most, left)] = found
        if most > max(0, left):
            self.taken[str(func)] = max(most - max(0, left), self.taken.get(str(func), 0))
        return result
