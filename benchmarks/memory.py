"""Time of a step that is measured by the meter, by PyTorch's `MemTracker` or by its profiler, and
the peak that each of them reports."""

from collections.abc import Iterator
from contextlib import ExitStack

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

    def metered() -> MemoryMeter:
        with MemoryMeter(model, optimizer) as meter:
            step()
        return meter

    def tracked() -> MemTracker:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
        return tracker

    def profiled() -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            step()

    def under_modes(*modes) -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            step()

    arms = {COURSE: metered, "MemTracker": tracked, "torch.profiler": profiled, "no tool": step}
    step()  # creates the optimizer state
    meter, snapshot = metered(), tracked().get_tracker_snapshot("peak")
    peaks = {
        COURSE: meter.peak_bytes,
        "MemTracker": max(at["Total"] for at in snapshot.values()),
        "torch.profiler": meter.entry_bytes + allocator_peak(under_modes, torch.device("cpu")),
    }
    notes = {"torch.profiler": "it records in C++ and assigns no category or FLOPs"}
    yield from compare(WORK, arms, rounds, bytes_of=peaks, notes=notes)
