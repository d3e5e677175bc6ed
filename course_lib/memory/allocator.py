"""Allocations and frees of a step, as the allocator saw them: on a CPU through the profiler, on
CUDA through its own statistics."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import record_function

from .._torch import ObserverMode

_MARK = "course_lib.memory: "


def allocator_peak(run: Callable, device: torch.device) -> int:
    """The most bytes allocated at once while `run` runs the step, above what was there before;
    under no mode.

    Args:
        run: takes context managers and runs the step inside them.
        device: whose allocator.
    """
    if device.type == "cuda":
        found: list[tuple[int, int]] = []
        run(_cuda_watch(device, found))
        return found[0][0]
    changes, _ = _profiled(run)
    return max(accumulate(change for _, change in changes), default=0)


def workspace_by_operator(run: Callable, device: torch.device) -> dict[str, int]:
    """operator -> the most bytes that one call of it held beyond what it found and what it left,
    largest first."""
    if device.type == "cuda":
        mode = _CudaWorkspace(device)
        run(mode)
        taken = mode.taken
    else:
        taken = _cpu_workspace(run)
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


# ---- on a CPU


def _profiled(run: Callable, *modes) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """(time, change of bytes) of each allocation and its release, and (operator, start, stop) of
    each `_Named` call."""
    # else the profiler's start and stop are announced on stderr
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
        if event.typed[0] == _EventType.Allocation and event.extra_fields.device.type == "cpu":
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
            continue  # made before this run: its release would hide as much of what the run makes
        changes.append((moment, change))
    return changes, calls


def _cpu_workspace(run: Callable) -> dict[str, int]:
    changes, calls = _profiled(run, _Named())
    times = [moment for moment, _ in changes]
    live = [0, *accumulate(change for _, change in changes)]
    taken: dict[str, int] = {}
    for name, start, stop in calls:
        first, last = bisect_left(times, start), bisect_left(times, stop)
        extra = max(live[first : last + 1]) - max(live[first], live[last])
        if extra > 0:
            taken[name] = max(extra, taken.get(name, 0))
    return taken


class _Named(ObserverMode):
    """Puts each operator's name into the profile, around all that it does inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"{_MARK}{func}"):
            return func(*args, **(kwargs or {}))


# ---- on CUDA


@contextmanager
def _cuda_watch(device: torch.device, found: list[tuple[int, int]]) -> Iterator[None]:
    """Appends the bytes allocated in the block, at most and in the end, above what was there before
    it."""
    before = _allocated(device)["current"]
    torch.cuda.reset_peak_memory_stats(device)
    yield
    after = _allocated(device)
    found.append((after["peak"] - before, after["current"] - before))


def _allocated(device: torch.device) -> dict[str, int]:
    # `torch.cuda.memory_allocated` sorts all statistics by name to give one: too slow to ask at
    # each operator.
    return torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]


class _CudaWorkspace(ObserverMode):
    """Asks the CUDA allocator before and after each operator; its counts need no
    synchronisation."""

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
