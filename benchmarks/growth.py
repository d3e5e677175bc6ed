"""Measure how the CPU time of each tool grows with the size of its input, for five sizes.

The exponent of the growth is the slope of a line through log time against log size; a row has the
measured and the expected exponent."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from scoreboard import Row

from course_lib.attention import flash_attention
from course_lib.budget import Recipe, estimate, fit
from course_lib.memory import CachingAllocator, MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import DiskStore, offload_activations
from course_lib.schedule import Chain, Stage, optimal


def meter(layers: int) -> Callable:
    net, x = deep_mlp(layers, 16), torch.randn(4, 16)

    def call() -> None:
        with MemoryMeter():
            net(x).sum().backward()

    return call


def solver(stages: int) -> Callable:
    chain = Chain(tuple(Stage(i % 5 + 1, 2, 2, i % 3 + 3) for i in range(stages)), 2)
    return lambda: optimal(chain, 4 * stages // 2)


def offload(rows: int) -> Callable:
    net, x, store = deep_mlp(4, 512), torch.randn(rows, 512), DiskStore()

    def call() -> None:
        with offload_activations(store):
            loss = net(x).sum()
        loss.backward()

    return call


def flash(n: int) -> Callable:
    q, k, v = (torch.randn(1, 2, n, 64) for _ in range(3))
    return lambda: flash_attention(q, k, v, backend="torch")


def decoder(layers: int) -> tuple[Callable, Callable]:
    sizes = {"vocabulary": 64, "hidden": 32, "heads": 2, "sequence": 16}
    return partial(Decoder, **sizes, layers=layers), partial(random_tokens, 2, 16, 64)


def prediction(layers: int) -> Callable:
    return partial(estimate, *decoder(layers), Recipe())


def search(layers: int) -> Callable:
    model = decoder(layers)
    budget = estimate(*model, Recipe()).peak_bytes // 2
    return partial(fit, *model, budget, quick=True, progress=False)


def allocator(events: int) -> Callable:
    sizes = [4096 * (i % 7 + 1) for i in range(events // 2)]
    births = [("birth", i, size) for i, size in enumerate(sizes)]
    releases = [("release", i, size) for i, size in enumerate(sizes)]
    return lambda: CachingAllocator().replay(births[::2] + releases[::2] + births[1::2])


CASES = {
    "meter, in operators": (meter, (25, 50, 100, 200, 400), "1"),
    "optimal, in stages": (solver, (25, 50, 100, 150, 200), "between 2 and 3"),
    "offload, in bytes": (offload, (512, 1024, 2048, 4096, 8192), "1"),
    "flash attention, in tokens": (flash, (512, 1024, 2048, 4096, 8192), "2"),
    "estimate, in layers": (prediction, (3, 6, 12, 24, 48), "1"),
    "quick search, in layers": (search, (4, 8, 12, 16, 24), "at most 1"),
    "allocator, in events": (allocator, (2000, 4000, 8000, 16_000, 32_000), "1"),
}


def seconds(call: Callable, rounds: int) -> float:
    """Return the median seconds of `rounds` calls, or of fewer if they take over five seconds."""
    taken: list[float] = []
    call()
    while len(taken) < rounds and sum(taken) < 5:
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def rows(rounds: int) -> Iterator[Row]:
    for what, (make, sizes, expected) in CASES.items():
        times = [seconds(make(size), min(rounds, 3)) for size in sizes]
        x, y = [math.log(size) for size in sizes], [math.log(taken) for taken in times]
        slope = statistics.linear_regression(x, y).slope
        each = ", ".join(f"{n:,}: {1e3 * t:.1f} ms" for n, t in zip(sizes, times, strict=True))
        note = f"exponent {slope:.2f}, expected {expected} ({each})"
        yield Row(what, "", note=note, points=tuple(zip(sizes, times, strict=True)))
