"""Steps of lesson 04 on the simulated device: a chain of Linear and GELU, and the decoder."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore, offload_activations
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import Table, table
from course_lib.teaching.tables import NumberText


@cache
def clock(layers: int, copy: float, p: int) -> float:
    """Return the simulated time of forward and backward of a chain of Linear and GELU.

    The unit is the time of one layer's forward.

    Args:
        layers: Number of layers.
        copy: Time of a copy, in units of the time of one layer's forward.
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
    """Time and peak of forward and backward on the simulated device.

    Attributes:
        seconds: Simulated seconds.
        above_bytes: Peak minus the bytes that were live before the step: weights, gradients and the
            batch.
    """

    seconds: float
    above_bytes: int


def simulated_decoder(link: float | None, p: int = 0, checkpointed: bool = False) -> Lanes:
    """Return the result of the course's decoder at 1e12 FLOP/s, with two copies in flight.

    The decoder's gradients exist from the start.

    Args:
        link: Bytes per second in each direction, or None to offload nothing.
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
    (20e9, 2, False): Lanes(0.046672, 28_459_008),
    (17e9, 2, False): Lanes(0.047353, 28_459_008),
    (11.16e9, 2, False): Lanes(0.051472, 28_459_008),
    (2e9, 2, False): Lanes(0.168707, 28_459_008),
    (2e9, 2, True): Lanes(0.055285, 31_473_672),
    (0.85e9, 2, True): Lanes(0.057388, 31_473_672),
    (0.558e9, 2, True): Lanes(0.059995, 31_473_672),
}
_FORWARD_FLOPS = 15_032_385_536  # of the course's decoder
#: Whether layers are checkpointed -> label, bytes moved with two storages fetched ahead, and the
#: two bandwidths in `link_table`, in bytes per second.
_VARIANTS = {
    False: ("all activations", 167_772_160, 11.16e9, 17e9),
    True: ("inputs of checkpoints", 8_388_608, 0.558e9, 0.85e9),
}


def decoder_table(live: Mapping[tuple, Lanes]) -> Table:
    """Show a table of steps: relative time and `Lanes.above_bytes`.

    Times are relative to the step without copies and checkpoints.

    Args:
        live: Dict from arguments of `simulated_decoder` to a result that was computed in the
            notebook. All other rows are stored results.
    """
    known, rows = {**RECORDED, **live}, []
    plain = known[None, 0, False].seconds
    variants = [("plain", None, 0, False), ("checkpoint", None, 0, True)]
    variants += [("offload", link, 2, False) for link in (20e9, 2e9)]
    variants += [("checkpoints and offload", 2e9, 2, True)]
    for name, *key in variants:
        found = known[tuple(key)]
        link = "–" if key[0] is None else f"{key[0] / 1e9:.0f} GB/s"
        times, above = f"{found.seconds / plain:.3f}", f"{found.above_bytes / 1e6:.1f}"
        run = "now" if tuple(key) in live else "recorded"
        rows.append((name, link, NumberText(times), NumberText(above), run))
    return table(["step", "link", "time (× baseline)", "peak above the start (MB)", "run"], rows)


def link_table() -> Table:
    """Show a table of the bandwidth that each variant of the decoder's step needs.

    The threshold is computed. Simulated times are stored results, relative to the same step without
    copies.
    """
    names = [
        "copied to the host (MB)",
        "FLOPs of forward per byte",
        "threshold link (GB/s)",
        "time on this link (× no copies)",
        "link for at most × 1.05 (GB/s)",
    ]
    columns = []
    for checkpointed, (_, moved, average, enough) in _VARIANTS.items():
        alone = RECORDED[None, 0, checkpointed].seconds
        slower = RECORDED[average, 2, checkpointed].seconds / alone
        columns.append(
            (
                NumberText(f"{moved / 1e6:.1f}"),
                NumberText(f"{_FORWARD_FLOPS / moved:,.0f}"),
                NumberText(f"{average / 1e9:.2g}"),
                NumberText(f"{slower:.2f}"),
                NumberText(f"{enough / 1e9:.2g}"),
            )
        )
    variants = [name for name, *_ in _VARIANTS.values()]
    return table(["what is moved", *variants], zip(names, *columns, strict=True))


class _Hasty(HostStore):
    """A store that uses data too early, because it does not wait for the copies named `missing`."""

    def __init__(self, missing: str | None):
        super().__init__()
        self.missing = missing

    def _start_copy(self, reservation: Any, target: Tensor, source: Tensor, device: Any, name: str):
        wait = super()._start_copy(reservation, target, source, device, name)
        return (lambda: None) if name == self.missing else wait


class _UnorderedDevice(SimulatedDevice):
    """A simulated device that starts copies before their source has been computed."""

    def copy(self, target: Tensor, source: Tensor, name: str) -> Any:
        with self.on(self.side(name)):
            self.transfer(target, source)
            return self.event()


def without_waits() -> Table:
    """Show a table of the results of a small offloaded chain if one wait is removed.

    The columns are the number of races, and whether the first weight's gradient is right.
    """
    mistakes = {
        "nothing": (SimulatedDevice, None),
        "made → copied to the host": (_UnorderedDevice, None),
        "copied to the host → release": (SimulatedDevice, "down"),
        "copied to the GPU → use": (SimulatedDevice, "up"),
    }
    right, rows = _first_gradient(SimulatedDevice, HostStore())[0], []
    for name, (kind, missing) in mistakes.items():
        marks = []
        for mode in ({}, {"late": True}, {"early": True}):
            gradient, races = _first_gradient(kind, _Hasty(missing), **mode)
            marks.append("✓" if torch.equal(gradient, right) else "✗")
        rows.append((name, races, *marks))
    return table(["missing wait", "races", "gradient (normal mode)", "late", "early"], rows)


def _first_gradient(
    kind: type[SimulatedDevice], store: HostStore, **mode: bool
) -> tuple[Tensor, int]:
    """Return the first gradient of a chain of five layers, and the number of races."""
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
    """Return the values that the host reads if copies run as late as possible.

    The right values are 0, 2, 4, 6.

    Args:
        waits: Whether the host waits for the copy before reading.
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
