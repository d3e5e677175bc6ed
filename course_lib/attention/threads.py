"""Run attention heads in Python threads instead of dividing each operator among threads.

If PyTorch divides an operator among threads, the threads wait for one another at its end. If
another process occupies one of the cores, the waiting threads spin for milliseconds at the end of
each operator, and hundreds of short operators take many times as long. Here each thread runs all
operators of its own heads, and the threads wait for one another only once, at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch
from torch import Tensor

from course_lib._torch.modes import dispatch_mode_count

# A pass with fewer scores takes about as long as starting work in another thread.
MIN_SCORES_FOR_THREADS = 2**18


def thread_count(x: Tensor, scores: int, at_once: int) -> int:
    """Return the number of threads that a forward or backward pass of attention uses.

    The result is 1 if the pass does not run on a CPU, or if it has fewer than
    `MIN_SCORES_FOR_THREADS` scores. The result is also 1 while a dispatch mode, the profiler or the
    compiler observes this thread, because these observers would miss operators that run in other
    threads.

    Args:
        x: A tensor on the device of the pass.
        scores: Number of scores that the pass computes.
        at_once: Number of heads that are processed at the same time. The result is at most this
            number.
    """
    if x.device.type != "cpu" or scores < MIN_SCORES_FOR_THREADS or _operators_observed():
        return 1
    return min(torch.get_num_threads(), at_once)


def run_parts(function: Callable, parts: Iterable, count: int) -> None:
    """Call `function(*part)` for each item of `parts`, in one or several threads.

    Args:
        function: Function to call. With more than one thread, it runs under `torch.no_grad()`.
        parts: Iterable of tuples or lists. Each one has the positional arguments of one call.
        count: Number of threads. With 1, all calls run in the caller's thread. With a larger
            number, they run in worker threads.
    """
    if count == 1:
        for part in parts:
            function(*part)
    else:
        pool = _pool(count, torch.get_num_threads())
        list(
            pool.map(partial(_run_without_grad, function, torch.is_inference_mode_enabled()), parts)
        )


def _run_without_grad(function: Callable, inference: bool, part: Iterable) -> None:
    """Call `function(*part)` in a worker thread, without gradients, in the given inference mode."""
    # A thread does not inherit these modes from the thread that started it.
    with torch.inference_mode(inference), torch.no_grad():
        function(*part)


def _operators_observed() -> bool:
    """Return whether a mode, profiler or compiler observes the operators of this thread.

    Such a mode is, for example, a memory meter or the FLOP counter. It would miss operators that
    run in other threads.
    """
    return bool(
        torch.compiler.is_compiling() or dispatch_mode_count() or torch.autograd._profiler_enabled()
    )


@lru_cache(maxsize=1)
def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool of `count` worker threads that share `threads` cores.

    The threads stay alive for later passes.
    """
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(threads // count)
        started.wait()

    pool = ThreadPoolExecutor(count, "attention", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    # `start` has called `torch.set_num_threads`, which also changes the default for threads that
    # start later. This call restores the default.
    torch.set_num_threads(threads)
    return pool


if hasattr(os, "register_at_fork"):
    # A forked child process has none of its parent's threads, so it must make a new pool.
    os.register_at_fork(after_in_child=_pool.cache_clear)
