"""Run attention heads in Python threads that share no work.

An operator that shares its work among threads ends in a barrier. If another process occupies one of
the cores, the waiting threads spin for milliseconds, and hundreds of short operators take many
times as long. Here each thread has its own heads, and its operators share nothing. The threads wait
for one another only once, at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch
from torch import Tensor

WORTH_IT = 2**18  # scores: a pass with fewer takes about as long as waking a thread


def workers(x: Tensor, scores: int, at_once: int) -> int:
    """Return the number of threads for a pass with `scores` scores, `at_once` heads at a time."""
    if x.device.type != "cpu" or scores < WORTH_IT or _watched():
        return 1
    return min(torch.get_num_threads(), at_once)


def run(function: Callable, parts: Iterable, count: int) -> None:
    """Call `function(*part)` for each part, in `count` threads and without gradients."""
    if count == 1:
        for part in parts:
            function(*part)
    else:
        pool = _pool(count, torch.get_num_threads())
        list(pool.map(partial(_alone, function, torch.is_inference_mode_enabled()), parts))


def _alone(function: Callable, inference: bool, part: Iterable) -> None:
    # a thread does not inherit these modes from the thread that started it
    with torch.inference_mode(inference), torch.no_grad():
        function(*part)


def _watched() -> bool:
    """Return whether something watches or changes operators in this thread only.

    That can be a mode (the meter, the FLOP counter), the profiler or a compiler.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.autograd._profiler_enabled()
    )


@lru_cache(maxsize=1)
def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads that stay alive; together their operators use `threads` cores."""
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(threads // count)
        started.wait()

    pool = ThreadPoolExecutor(count, "attention", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    # `start` has also changed the number for threads that start later
    torch.set_num_threads(threads)
    return pool


if hasattr(os, "register_at_fork"):
    # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
