"""Heads in Python's threads, each of which computes alone.

An operator that shares its work among threads ends in a barrier, and where another process has one
of the cores, those who wait there spin for milliseconds: hundreds of short operators then take many
times their time. Here each thread has heads of its own and operators that share nothing; they wait
for one another once, at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch
from torch import Tensor

WORTH_IT = 2**18  # scores: below, a pass takes about as long as waking a thread


def workers(x: Tensor, scores: int, at_once: int) -> int:
    """Number of threads to take for a pass with so many scores that works on `at_once` heads at a
    time."""
    if x.device.type != "cpu" or scores < WORTH_IT or _watched():
        return 1
    return min(torch.get_num_threads(), at_once)


def run(function: Callable, parts: Iterable, count: int) -> None:
    """`function(*part)` for each part, in `count` threads; without gradients."""
    if count == 1:
        for part in parts:
            function(*part)
    else:
        pool = _pool(count, torch.get_num_threads())
        list(pool.map(partial(_alone, function, torch.is_inference_mode_enabled()), parts))


def _alone(function: Callable, inference: bool, part: Iterable) -> None:
    # which a thread does not have from the one that started it
    with torch.inference_mode(inference), torch.no_grad():
        function(*part)


def _watched() -> bool:
    """Whether somebody listens to operators or alters them, which reaches no other thread: a mode
    (the meter, the FLOP counter), the profiler, a compiler."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.autograd._profiler_enabled()
    )


@lru_cache(maxsize=1)
def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay; together, their operators use as many as one operator would."""
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(threads // count)
        started.wait()

    pool = ThreadPoolExecutor(count, "attention", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    # for this thread nothing has changed; for those that start later it had
    torch.set_num_threads(threads)
    return pool


if hasattr(os, "register_at_fork"):
    # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
