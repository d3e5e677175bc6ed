"""The meter, PyTorch's `MemTracker` and its profiler: time of a measured step, and the peak
that each of them reports."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import torch
from scoreboard import COURSE, Row, compare
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from course_lib.memory import MemoryMeter
from course_lib.memory.allocator import allocator_peak

WORK = "measure an Adam step of a transformer with 12 layers"


def rows(rounds: int) -> Iterator[Row]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(4, 32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def under_modes(*modes) -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            step()

    def under(make):
        def call() -> None:
            with make() as tool:
                step()
            tools[make] = tool

        return call

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(model, optimizer)
        return made

    def profiler() -> profile:
        return profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def meter() -> MemoryMeter:
        return MemoryMeter(model, optimizer)

    tools: dict = {}
    arms = {COURSE: under(meter), "MemTracker": under(tracker), "torch.profiler": under(profiler)}
    step()  # makes the optimizer state
    for arm in arms.values():
        arm()
    found = tools[meter]
    peaks = {
        COURSE: found.peak_bytes,
        "MemTracker": max(
            at["Total"] for at in tools[tracker].get_tracker_snapshot("peak").values()
        ),
        "torch.profiler": found.entry_bytes + allocator_peak(under_modes, torch.device("cpu")),
    }
    arms["no tool"] = under(nullcontext)
    notes = {"torch.profiler": "it records in C++ and assigns no category or FLOPs"}
    yield from compare(WORK, arms, rounds, bytes_of=peaks, notes=notes)
