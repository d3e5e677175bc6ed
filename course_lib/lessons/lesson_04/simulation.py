"""Steps of lesson 04 on the simulated device: the clock of its first check, and the decoder."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore, offload_activations
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import Table, table, text
from course_lib.teaching.tables import NumberText


@cache
def clock(layers: int, copy: float, p: int) -> float:
    """Return the simulated time of forward and backward of a chain of Linear and GELU.

    The unit is the time of one layer's forward.

    Args:
        layers: L.
        copy: Time of a copy, in the same unit.
        p: Number of storages that are fetched ahead. Two copies to the host may be in flight.
    """
    rows, width = 32, 16
    forward = 2 * rows * width**2 / 1e12
    links = dict.fromkeys(
        ("up_bytes_per_second", "down_bytes_per_second"), 4 * rows * width / (copy * forward)
    )
    with SimulatedDevice(flops_per_second=1e12, **links) as device:
        network, x = device.move(deep_mlp(layers, width)), device.move(torch.ones(rows, width))
        began = device.seconds
        with offload_activations(HostStore(), min_bytes=1, prefetch=p, in_flight=2):
            loss = network(x).sum()
        loss.backward()
    return (device.seconds - began) / forward


class Lanes(NamedTuple):
    """Forward and backward on the simulated device.

    Attributes:
        seconds: Simulated seconds.
        above_bytes: Peak without the bytes that were live before: weights, gradients and the batch.
    """

    seconds: float
    above_bytes: int


def simulated_decoder(link: float | None, p: int = 0, checkpointed: bool = False) -> Lanes:
    """Run the course's decoder at 1e12 FLOP/s, with two copies in flight.

    Its gradients exist from the start.

    Args:
        link: Bytes per second each way, or None to offload nothing.
        p: Number of storages that are fetched ahead.
        checkpointed: Whether each layer has a checkpoint.
    """
    links = dict.fromkeys(("up_bytes_per_second", "down_bytes_per_second"), link)
    with SimulatedDevice(flops_per_second=1e12, memory_bytes=1 << 29, **links) as device:
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        decoder, tokens = device.move(decoder), device.move(random_tokens(8, 128, 2048))
        for parameter in decoder.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if checkpointed:
            checkpoint_blocks(decoder, "layers.*", preserve_rng_state=False)
        began, held = device.seconds, device.live_bytes
        options = {"min_bytes": 1 << 17, "prefetch": p, "in_flight": 2}
        with nullcontext() if link is None else offload_activations(HostStore(), **options):
            loss = decoder.loss(tokens)
        loss.backward()
    return Lanes(device.seconds - began, device.peak_bytes - held)


#: Arguments of `simulated_decoder` -> its result; a test runs some of them again.
RECORDED = {
    (None, 0, False): Lanes(0.045097, 195_174_408),
    (None, 0, True): Lanes(0.054761, 36_716_552),
    (20e9, 0, False): Lanes(0.054851, 25_305_096),
    (20e9, 2, False): Lanes(0.046672, 28_459_008),
    (2e9, 0, False): Lanes(0.199934, 25_305_096),
    (2e9, 2, False): Lanes(0.168707, 28_459_008),
    (20e9, 0, True): Lanes(0.055338, 29_376_520),
    (20e9, 2, True): Lanes(0.054813, 31_473_672),
    (2e9, 0, True): Lanes(0.060528, 29_376_520),
    (2e9, 2, True): Lanes(0.055285, 31_473_672),
}


def decoder_lanes(live: Mapping[tuple, Lanes]) -> Table:
    """Show times relative to the step without copies and checkpoints, and bytes above the start.

    Args:
        live: Arguments of `simulated_decoder` -> its result now; the other rows are recorded ones.
    """
    known, rows = {**RECORDED, **live}, []
    variants = [("plain", None, 0, False), ("checkpoint", None, 0, True)]
    for name, checkpointed in (("offload, p = {p}", False), ("both, p = {p}", True)):
        variants += [
            (text(name, p=p), link, p, checkpointed) for p in (0, 2) for link in (20e9, 2e9)
        ]
    for name, *key in variants:
        found = known[tuple(key)]
        times = f"{found.seconds / known[None, 0, False].seconds:.3f}"
        link = "–" if key[0] is None else f"{key[0] / 1e9:.0f} GB/s"
        run = "now" if tuple(key) in live else "recorded"
        above = f"{found.above_bytes / 1e6:.1f}"
        rows.append((name, link, NumberText(times), NumberText(above), run))
    return table(["step", "link", "time (× baseline)", "peak above the start (MB)", "run"], rows)


def without_waits(hasty: type[HostStore], unordered: type[SimulatedDevice]) -> Table:
    """Show what happens to a small offloaded chain if one wait is removed.

    The table has the races, and whether the gradient of the first weight is right.

    Args:
        hasty: A store that leaves out the wait for copies of the name `missing`, "down" or "up".
        unordered: A device whose copies do not wait until their source is computed.
    """
    mistakes = {"nothing": (SimulatedDevice, None), "made → copied to the host": (unordered, None)}
    mistakes |= {
        "copied to the host → release": (SimulatedDevice, "down"),
        "copied to the GPU → use": (SimulatedDevice, "up"),
    }
    right, rows = _first_gradient(SimulatedDevice, HostStore())[0], []
    for name, (kind, missing) in mistakes.items():
        marks = []
        for mode in ({}, {"late": True}, {"early": True}):
            store = hasty()
            store.missing = missing
            gradient, races = _first_gradient(kind, store, **mode)
            marks.append("✓" if torch.equal(gradient, right) else "✗")
        rows.append((name, races, *marks))
    return table(["missing wait", "races", "gradient (normal mode)", "late", "early"], rows)


def _first_gradient(
    kind: type[SimulatedDevice], store: HostStore, **mode: bool
) -> tuple[Tensor, int]:
    """Return the first weight's gradient of a chain of five layers, and the number of races."""
    with kind(**mode) as device:
        network = device.move(deep_mlp(depth=5, width=32))
        x = device.move(torch.linspace(-1, 1, 32 * 32).view(32, 32))
        with offload_activations(store, min_bytes=1, prefetch=1):
            loss = network(x).square().sum()
        loss.backward()
        races = len(device.races)
        device.races.clear()  # otherwise leaving the block would raise an error
    return network[0].weight.grad, races


def read_late(waits: bool) -> list[float]:
    """Return what the host reads of 0, 2, 4, 6 if copies run as late as possible.

    Args:
        waits: Whether the host first waits for the copy.
    """
    with SimulatedDevice(late=True) as device:
        y = device.move(torch.arange(4.0)) * 2
        host = device.pinned(y.shape, y.dtype)
        copied = device.copy(host, y, "down")
        if waits:
            device.finish(copied)
        numbers = host.tolist()
        device.races.clear()
    return numbers
