"""Steps of lesson 04 on the simulated device: a chain of Linear and GELU, and decoders."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.offload import HostStore, offload_activations
from course_lib.offload.stores import SymbolicStore
from course_lib.simulated import SimulatedDevice
from course_lib.symbolic import symbolic
from course_lib.teaching import Table, table
from course_lib.teaching.tables import NumberText

from .gpu import offloaded_activations


@cache
def clock(layers: int, copy: float, p: int, in_flight: int = 2) -> float:
    """Return the simulated time of forward and backward with offload, for equal layers.

    Each layer is a Linear followed by a GELU. The unit is the time of one layer's forward pass
    without copies.

    Args:
        layers: Number of layers.
        copy: Time of copying one storage, in the same unit.
        p: Number of storages that are fetched ahead in backward.
        in_flight: Number of copies to the host that may run at the same time as computation.
    """
    rows, width = 32, 16
    forward = 2 * rows * width**2 / 1e12
    links = dict.fromkeys(
        ("up_bytes_per_second", "down_bytes_per_second"), 4 * rows * width / (copy * forward)
    )
    with SimulatedDevice(flops_per_second=1e12, **links) as device:
        network, x = device.move(deep_mlp(layers, width)), device.move(torch.ones(rows, width))
        began = device.seconds
        with offload_activations(HostStore(), min_bytes=1, prefetch=p, in_flight=in_flight):
            loss = network(x).sum()
        loss.backward()
    return (device.seconds - began) / forward


#: (copies in flight, p) -> time of 8 layers of 8,192 units on 16,384 rows on an H200, relative to
#: the step without offload. `make gpu-bench` measured them; a test compares them with docs/gpus.md.
ON_H200 = {
    (1, 1): 1.133, (1, 2): 1.068, (1, 3): 1.056,
    (2, 1): 1.078, (2, 2): 1.010, (2, 3): 1.011,
    (3, 1): 1.078, (3, 2): 1.011, (3, 3): 1.011,
}  # fmt: skip


def settings_table(typed: Callable[..., Any]) -> Table:
    """Return a table of the time of a step with offload, for nine settings of the copies.

    The settings are the number of copies in flight, and the number of storages that are fetched
    ahead. The columns compare the learner's formula, a simulation and a measurement on an H200, all
    relative to the step without offload. Formula and simulation assume 50 TFLOP/s and 50 GB/s. The
    formula assumes at least two copies in flight. For one copy in flight, the time of one copy per
    layer is added to its result.

    Args:
        typed: The learner's `step_time(L, f, g, c, p)`. It returns None if the learner has not
            written it yet.
    """
    rows, copy, plain = [], 4 * 50e12 / (2 * 8192 * 50e9), 8 * 3 - 1
    for (in_flight, p), measured in ON_H200.items():
        formula, shown = typed(8, 1, 2, copy, min(p, 2)), NumberText("–")
        if formula is not None:
            shown = NumberText(f"{(formula + 8 * copy * (in_flight == 1)) / plain:.3f}")
        simulated = NumberText(f"{clock(8, copy, p, in_flight) / plain:.3f}")
        rows.append((in_flight, p, shown, simulated, NumberText(f"{measured:.3f}")))
    names = "your formula", "simulated", "H200"
    return table(["copies in flight", "fetched ahead, p", *names], rows)


def count_forward() -> tuple[int, int, int]:
    """Count the FLOPs and the offloaded bytes of a decoder's forward pass, on symbolic tensors.

    The decoder is that of the experiment `offloaded_activations`.

    Returns:
        Three numbers: the FLOPs of matrix products outside of attention, the bytes that
        `offload_activations` copies to the host, and the bytes that PyTorch's `save_on_cpu` copies
        to the host. `save_on_cpu` copies all saved tensors.
    """
    saved, store, sizes = [], SymbolicStore(), dict(offloaded_activations.sizes)
    batch = sizes.pop("batch"), sizes["sequence"], sizes["vocabulary"]
    with symbolic(), FlopCounterMode(display=False) as counter:
        decoder, tokens = Decoder(**sizes, fused=True), random_tokens(*batch)
        with saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes), lambda packed: packed):
            decoder.loss(tokens)
        flops = counter.get_total_flops()
        with offload_activations(store, min_bytes=1 << 10, prefetch=2):
            decoder.loss(tokens)
    return flops, store.stats.bytes_down, sum(saved)


def _run_decoder(
    rate: float,
    link: float | None,
    checkpointed: bool = False,
    batch: int = 8,
    fused: bool = False,
    sizes: Sequence[int] = (2048, 256, 8, 8, 128),
    **options: int,
) -> tuple[SimulatedDevice, float, int]:
    """Run a decoder's forward and backward.

    Args:
        rate: FLOP/s of the device.
        link: Bytes per second in each direction, or None to offload nothing.
        checkpointed: Whether each layer has a checkpoint.
        batch, fused, sizes: Arguments of the decoder and of its batch.
        options: Arguments of `offload_activations`.

    Returns:
        The device after the step, the time at which the step began, and the live bytes at that
        time.
    """
    links = dict.fromkeys(("up_bytes_per_second", "down_bytes_per_second"), link)
    with SimulatedDevice(flops_per_second=rate, memory_bytes=1 << 29, **links) as device:
        names = ("vocabulary", "hidden", "heads", "layers", "sequence")
        decoder = device.move(Decoder(**dict(zip(names, sizes, strict=True)), fused=fused))
        tokens = device.move(random_tokens(batch, sizes[-1], sizes[0]))
        if checkpointed:
            checkpoint_blocks(decoder, "layers.*", preserve_rng_state=False)
        began, held = device.seconds, device.live_bytes
        with nullcontext() if link is None else offload_activations(HostStore(), **options):
            loss = decoder.loss(tokens)
        loss.backward()
    return device, began, held


def decoder_seconds(link: float | None, p: int = 0, checkpointed: bool = False) -> float:
    """Return the simulated seconds of the course's decoder's forward and backward pass.

    The simulated device computes 1e12 FLOP/s.

    Args:
        link: Bytes per second of copies in each direction, or None to offload nothing.
        p: Number of storages that are fetched ahead in backward.
        checkpointed: Whether each layer has a checkpoint.
    """
    options = {"min_bytes": 1 << 17, "prefetch": p, "in_flight": 2}
    device, began, _ = _run_decoder(1e12, link, checkpointed, **options)
    return device.seconds - began


def small_decoder(rate: float, link: float, ahead: int) -> tuple[SimulatedDevice, float, int]:
    """Simulate a small decoder that stands for a large decoder with offloaded activations on a GPU.

    The small decoder has a sixteenth of the large decoder's hidden size, vocabulary and sequence
    length. Its copies therefore have 1/256 of the bytes, and its matrix products 1/4096 of the
    FLOPs. The simulated device computes at a sixteenth of `rate`, so that both copies and matrix
    products take 1/256 of their time on the GPU.

    Args:
        rate: FLOP/s of the GPU.
        link: Bytes per second of copies in each direction.
        ahead: Number of storages that are fetched ahead in backward. It is also the number of
            copies to the host that may be in flight.

    Returns:
        The simulated device after the step, the time at which the step began, and the live bytes at
        that time.
    """
    options = {"min_bytes": 1024, "prefetch": ahead, "in_flight": ahead}
    sizes = (512, 128, 16, 8, 128)
    return _run_decoder(rate / 16, link, batch=4, fused=True, sizes=sizes, **options)


#: Arguments of `decoder_seconds` -> its result; a test runs some of them again.
RECORDED = {
    (None, 0, False): 0.045097,
    (None, 0, True): 0.054761,
    (20e9, 2, False): 0.046672,
    (17e9, 2, False): 0.047353,
    (11.16e9, 2, False): 0.051472,
    (2e9, 2, False): 0.168707,
    (2e9, 2, True): 0.055285,
    (0.85e9, 2, True): 0.057388,
    (0.558e9, 2, True): 0.059995,
}
_FORWARD_FLOPS = 15_032_385_536  # of the course's decoder
#: Whether layers are checkpointed -> label, bytes moved with two storages fetched ahead, and the
#: two bandwidths in `link_table`, in bytes per second.
_VARIANTS = {
    False: ("all activations", 167_772_160, 11.16e9, 17e9),
    True: ("inputs of checkpoints", 8_388_608, 0.558e9, 0.85e9),
}


def link_table() -> Table:
    """Return a table of the bandwidth that a decoder's step with offloaded activations needs.

    One column is for offloading all activations, the other for offloading only the inputs of
    checkpoints. The times are stored results of simulations. Each time is relative to the same step
    without copies. Only the last row is relative to the baseline.
    """
    plain = RECORDED[None, 0, False]
    rows: dict[str, list[str]] = {}
    for checkpointed, (_, moved, average, enough) in _VARIANTS.items():
        slower = RECORDED[average, 2, checkpointed] / RECORDED[None, 0, checkpointed]
        for name, value in {
            "copied to the host (MB)": f"{moved / 1e6:.1f}",
            "FLOPs of forward per byte": f"{_FORWARD_FLOPS / moved:,.0f}",
            "threshold link (GB/s)": f"{average / 1e9:.2g}",
            "time on this link (× no copies)": f"{slower:.2f}",
            "link for at most × 1.05 (GB/s)": f"{enough / 1e9:.2g}",
            "time at 2 GB/s (× baseline)": f"{RECORDED[2e9, 2, checkpointed] / plain:.2f}",
        }.items():
            rows.setdefault(name, []).append(NumberText(value))
    variants = [name for name, *_ in _VARIANTS.values()]
    return table(["what is moved", *variants], [(name, *row) for name, row in rows.items()])


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
    """Return a table of the effects of missing waits in a small network with offloaded activations.

    In each row a different wait is missing. The columns are the number of races, and for each mode
    of the simulated device, whether the gradient of the first weight is right.
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


def copies_without_waits() -> dict[str, tuple[float, float]]:
    """Copy the number 2 to the host without any wait, and reuse its GPU memory for the number 100.

    Returns:
        Dict from the mode of the simulated device ("normal", "late" or "early") to two numbers. The
        host reads the first number at once, and the second number when the copy is complete.
    """
    found = {}
    for mode, options in {"normal": {}, "late": {"late": True}, "early": {"early": True}}.items():
        with _UnorderedDevice(**options) as device:
            host = device.pinned((1,), torch.float32)
            x = device.move(torch.ones(1))
            y = x * 2
            device.copy(host, y, "down")
            del y
            z = x * 100  # noqa: F841  # uses the memory of y
            read = host.tolist()[0]
            device.finish(device.side("down").event())
            found[mode] = read, host.tolist()[0]
            device.races.clear()
    return found
