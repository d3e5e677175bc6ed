"""The cost of the meter beside that of PyTorch's own `MemTracker`, its peaks beside the
allocator's, and what the CUDA allocator's rules make of a step.

Run as a script: `python tests/bench_memory.py`. Ratios of times taken in one run, in turns, so that
they carry over to other machines; the peaks are exact.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import CachingAllocator, MemoryMeter, measure, symbolic
from course_lib.models import Decoder, DecoderLayer, deep_mlp, random_tokens

BAR = 0.20
ROUNDS, QUICK_A_ROUND = 5, 4  # MemTracker is slow: one step of its for several of the others


# ---- overhead


def overhead() -> None:
    """The time that a meter adds to a step, over the time that MemTracker adds to it."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(model, optimizer, x)
        return made

    arms = {
        "plain": (nullcontext, QUICK_A_ROUND),
        "meter": (lambda: MemoryMeter(model, optimizer), QUICK_A_ROUND),
        "tracker": (tracker, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for make, _ in arms.values():
        _seconds(step, make())  # warm up
    for _ in range(ROUNDS):
        for name, (make, count) in arms.items():
            seconds[name] += [_seconds(step, make()) for _ in range(count)]

    print(
        f"One step of a 12-layer transformer with Adam, {ROUNDS} rounds in turns, torch"
        f" {torch.__version__}, CPU"
    )
    print(f"{'':16}{'median ms':>12}{'least ms':>12}{'of plain':>12}")
    labels = {"plain": "plain", "meter": "MemoryMeter", "tracker": "MemTracker"}
    for name, label in labels.items():
        middle, least = statistics.median(seconds[name]) * 1e3, min(seconds[name]) * 1e3
        print(f"{label:16}{middle:12.1f}{least:12.1f}{least / min(seconds['plain']) / 1e3:11.1f}x")
    ratios = {}
    for label, of in (("medians", statistics.median), ("least", min)):
        plain, meter, tracked = (of(seconds[name]) for name in ("plain", "meter", "tracker"))
        ratios[label] = (meter - plain) / (tracked - plain)
    found = ratios["medians"]
    print(
        f"overhead of MemoryMeter over MemTracker's: {found:.3f} of medians, {ratios['least']:.3f}"
        " of least times"
    )
    print(f"bar {BAR:.2f}: {'met' if found <= BAR else 'missed'}")


def _seconds(step: Callable[[], None], context) -> float:
    gc.collect()
    with context:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start


# ---- peaks


def workloads() -> dict[str, Callable]:
    """name -> a function that makes (model, optimizer, step)."""

    def step_of(model, forward, kind=torch.optim.Adam, **options):
        optimizer = kind(model.parameters(), **options)

        def step():
            with sdpa_kernel(SDPBackend.MATH):
                forward().backward()
            optimizer.step()

        return model, optimizer, step

    def mlp(**options):
        model, x = deep_mlp(8, 256), torch.randn(512, 256)
        return step_of(model, lambda: model(x).square().mean(), **options)

    def layers(norm_first, how):
        parts = [
            DecoderLayer(128, 4, dropout=0.1, norm_first=norm_first, seed=2 * i) for i in range(4)
        ]
        model, x = nn.Sequential(*parts), torch.randn(8, 64, 128, requires_grad=True)

        def forward():
            x.grad, y = None, x
            for part in model:
                y = part(y) if how is None else checkpoint(part, y, use_reentrant=how)
            return y.square().mean()

        return step_of(model, forward)

    def batch_norm():
        model = nn.Sequential(
            nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(16), nn.AvgPool2d(2)
        )
        x = torch.randn(8, 16, 64, 64)
        return step_of(
            model, lambda: model(x).square().mean(), torch.optim.SGD, lr=0.1, momentum=0.9
        )

    def gpt():
        model = Decoder(vocabulary=2000, hidden=128, heads=4, layers=2, sequence=64, dropout=0.1)
        tokens = random_tokens(4, 64, 2000)
        return step_of(model, lambda: model.loss(tokens), torch.optim.AdamW)

    def double_backward():
        model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1))
        x = torch.randn(512, 128, requires_grad=True)

        def forward():
            x.grad = None
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return ((slope.norm(dim=1) - 1) ** 2).mean()

        return step_of(model, forward)

    def convolutions():
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.LazyLinear(10)
        )
        x, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
        model(x)
        return step_of(model, lambda: cross_entropy(model(x), labels))

    def lstm():
        model, x = nn.LSTM(64, 64, 2), torch.randn(32, 8, 64)
        return step_of(model, lambda: model(x)[0].square().mean())

    return {
        "MLP, Adam foreach": lambda: mlp(foreach=True),
        "MLP, Adam one by one": lambda: mlp(foreach=False),
        "MLP, NAdam": lambda: mlp(kind=torch.optim.NAdam),
        "MLP, SGD with momentum": lambda: mlp(kind=torch.optim.SGD, lr=0.1, momentum=0.9),
        "post-norm layers": lambda: layers(False, None),
        "post-norm, checkpoint": lambda: layers(False, False),
        "post-norm, reentrant": lambda: layers(False, True),
        "pre-norm layers": lambda: layers(True, None),
        "pre-norm, checkpoint": lambda: layers(True, False),
        "pre-norm, reentrant": lambda: layers(True, True),
        "batch norm and pooling": batch_norm,
        "GPT, tied head": gpt,
        "double backward": double_backward,
        "convolutions *": convolutions,
        "LSTM *": lstm,
    }


def peaks() -> None:
    """The meter's peak and the allocator's, workload by workload."""
    print(
        f"{'workload':26}{'meter, bytes':>16}{'allocator, bytes':>18}{'error':>11}  largest"
        " workspace"
    )
    for name, make in workloads().items():
        torch.manual_seed(0)
        model, optimizer, step = make()
        found = measure(step, model=model, optimizer=optimizer, repeats=1)
        error = found.peak_bytes / found.allocator_peak_bytes - 1
        largest = (
            next((f"{k} {v:,}" for k, v in found.workspace_by_operator.items()), "")
            if "*" in name
            else ""
        )
        print(
            f"{name:26}{found.peak_bytes:16,}{found.allocator_peak_bytes:18,}{error:+11.4%} "
            f" {largest}".rstrip()
        )
    print("* operators take workspace, which the allocator sees and the meter does not count")


# ---- by the rules of the CUDA allocator


def decoder_events(checkpointed: bool) -> list[tuple]:
    """Two steps of a decoder of 110 million parameters, symbolically: its model, its state, its
    activations."""
    with symbolic(), MemoryMeter() as meter:
        model = Decoder(vocabulary=32000, hidden=768, heads=12, layers=12, sequence=512)
        tokens = random_tokens(4, 512, 32000)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        with checkpoint_blocks(model, "layers.*") if checkpointed else nullcontext():
            for _ in range(2):
                optimizer.zero_grad()
                model.loss(tokens).backward()
                optimizer.step()
    return [event[:3] for event in meter.trace().allocations()]


def reserved() -> dict[str, list[tuple]]:
    """Peaks of what is asked for, handed out and reserved; returns the events."""
    print(
        f"{'decoder, 2 steps, Adam':38}{'requested':>16}{'allocated':>16}{'reserved':>16}"
        f"{'of requested':>14}"
    )
    found = {"plain": decoder_events(False), "checkpointed": decoder_events(True)}
    for name, events in found.items():
        for expandable in (False, True):
            allocator = CachingAllocator(expandable_segments=expandable)
            allocator.replay(events)
            figures = allocator.memory_stats()
            peaks = [
                figures[f"{of}_bytes.all.peak"] for of in ("requested", "allocated", "reserved")
            ]
            label = f"{name}, expandable segments" if expandable else name
            print(
                f"{label:38}{peaks[0]:16,}{peaks[1]:16,}{peaks[2]:16,}{peaks[2] / peaks[0]:13.3f}x"
            )
    return found


def replays(events: list[tuple]) -> None:
    """The time that replaying takes: the checkpointed decoder's two steps, again and again."""
    for count in (10_000, 100_000):
        rounds = -(-count // len(events))
        again = [
            (what, (i, name), size) for i in range(rounds) for what, name, size in closed(events)
        ][:count]
        for expandable in (False, True):
            start = time.process_time()
            CachingAllocator(expandable_segments=expandable).replay(again)
            taken = time.process_time() - start
            label = "expandable segments" if expandable else "segments"
            print(
                f"replay of {count:,} events, {label}: {taken:.3f} s of CPU,"
                f" {taken / count * 1e6:.1f} us an event"
            )


def closed(events: list[tuple]) -> list[tuple]:
    """The events, and in the end the release of what lives on."""
    live = {}
    for what, name, size in events:
        live.pop(name) if what == "release" else live.update({name: size})
    return [*events, *(("release", name, size) for name, size in live.items())]


def main() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    # the step is small, and idle threads that wait for work disturb the clock
    torch.set_num_threads(1)
    try:
        overhead()
        print()
        peaks()
        print()
        replays(reserved()["checkpointed"])
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
