"""Measured steps of lesson 04: training steps, optimizer steps, and loops over batches."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.offload import DiskStore, OffloadedOptimizer, Prefetcher, offload_activations
from course_lib.teaching import Table, table, text


def _decoder() -> Decoder:
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def metered_step(checkpointed: bool, p: int | None) -> tuple[MemoryMeter, int]:
    """Run the course's training step with offloaded activations; return meter and copied bytes.

    Args:
        checkpointed: Whether each layer has a checkpoint.
        p: Number of storages that are fetched ahead, or None to offload nothing.

    Returns:
        The meter, and the number of bytes that were copied to the file.
    """
    decoder, file = _decoder(), DiskStore()
    adam, tokens = torch.optim.Adam(decoder.parameters()), random_tokens(8, 128, 2048)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()  # creates Adam's state
    decoder.zero_grad()
    if checkpointed:
        checkpoint_blocks(decoder, "layers.*")
    with MemoryMeter(decoder, adam) as meter:
        with nullcontext() if p is None else offload_activations(file, min_bytes=2**17, prefetch=p):
            loss = decoder.loss(tokens)
        loss.backward()
        adam.step()
    return meter, file.stats.bytes_down


def step_peak(mib: int, fraction: float = 1.0) -> int:
    """Return the peak in bytes of `OffloadedOptimizer.step()` for the course's decoder.

    Args:
        mib: Size of a page in MiB.
        fraction: Fraction of the state that is offloaded.
    """
    decoder = _decoder()
    adam = OffloadedOptimizer(decoder.parameters(), fraction=fraction, page_bytes=mib << 20)
    for _ in range(2):  # the first step creates the state
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        with MemoryMeter(decoder, adam) as meter:
            adam.step()
    return meter.peak_bytes


def started_down(device: Any, y: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; return the host tensor and the event at the end of the copy."""
    host = device.pinned(y.shape, y.dtype)
    return host, device.copy(host, y, "down")


def started_up(device: Any, host: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the GPU; return the device tensor and the event at the end of the copy."""
    x = torch.zeros(host.shape)  # created inside the device's block, so it belongs to the device
    return x, device.copy(x, host, "up")


def _compute() -> None:
    sum(range(1_000_000))  # takes 10 to 25 ms, and holds Python's global interpreter lock


def _wait() -> None:
    time.sleep(0.02)


def _batches(make: Callable[[], None]) -> Iterator[Tensor]:
    for _ in range(10):
        make()
        yield torch.zeros(1)


def _seconds(work: Callable[[], None], prefetch: bool) -> float:
    """Return the seconds of a loop in which making a batch takes as long as using it."""
    start = time.perf_counter()
    for _ in Prefetcher(_batches(work)) if prefetch else _batches(work):
        work()
    return round(time.perf_counter() - start, 2)


def loops() -> Table:
    """Show a table of the seconds of loops over ten batches with and without a prefetcher."""
    cases = {"both wait 20 ms": _wait, "both compute in Python": _compute}
    rows = [(name, _seconds(work, False), _seconds(work, True)) for name, work in cases.items()]
    return table(["", "plain (s)", "prefetched (s)"], rows)


def peaks_of_fractions(whole: Mapping[int, int]) -> Table:
    """Return a table of the peaks of `step()` with none, half and all of the state offloaded.

    Args:
        whole: Mapping from a page's size in MiB to the peak in bytes with all of the state
            offloaded.
    """
    sizes, none = (16, 4), step_peak(16, fraction=0)  # without offload no page is used
    peaks = {
        "0": [none, none],
        "0.5": [step_peak(mib, 0.5) for mib in sizes],
        "1.0": [whole[mib] for mib in sizes],
    }
    rows = [(part, *(f"{peak / 1e6:.1f}" for peak in found)) for part, found in peaks.items()]
    return table(["fraction", *(text("pages of {mib} MiB (MB)", mib=mib) for mib in sizes)], rows)
