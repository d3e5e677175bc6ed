"""What offload costs: beside the plain step, `save_on_cpu`, and a file written and read while
nothing else happens.

    python tests/bench_offload.py --output figures.json   # also as JSON, after each row

Times are taken in one run, in turns; ratios carry over, bytes are exact. The bars are for a GPU,
where copies take half as long as the compute, at most 5 % over the plain step, and where they take
as long, twice as fast as `save_on_cpu(pin_memory=True)`. The simulated device says what is to be
expected there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from turns import Results, in_turns

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp
from course_lib.offload import (
    DiskStore,
    HostStore,
    OffloadedOptimizer,
    offload_activations,
)
from course_lib.simulated import SimulatedDevice

ROUNDS, OVERHEAD_BAR, PEER_BAR = 15, 1.05, 2.0
#: Networks on a GPU: (width, rows). Forward, a layer does 2 * rows * width^2 FLOPs and sends 8 *
#: rows * width bytes down, in fp32. At 50 TFLOP/s and 50 GB/s, about those of an H200, both take
#: as long where the width is 4,000.
WIDE, NARROW = (8192, 16384), (4096, 16384)


def synchronous_file(module: nn.Module):
    """Saved tensors to a file and back, one after the other: what one writes first."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the graph
    stay = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in stay:
            return tensor.detach()
        place = file.seek(0, 2)
        file.write(tensor.contiguous().numpy())
        return place, tensor.shape, tensor.dtype

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        place, shape, dtype = packed
        file.seek(place)
        return torch.frombuffer(
            bytearray(file.read(shape.numel() * dtype.itemsize)), dtype=dtype
        ).view(shape)

    return saved_tensors_hooks(pack, unpack)


def medians(arms: dict) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in in_turns(arms, ROUNDS).items()}


def activations(
    results: Results, device: str, depth: int, width: int, rows: int, arms: dict
) -> dict[str, float]:
    """Seconds of a step under each context, printed beside the plain one's, and the peak of its
    tensors."""
    net, x = deep_mlp(depth, width).to(device), torch.randn(rows, width, device=device)

    def step(context) -> None:
        net.zero_grad()
        with context(net):
            output = net(x).sum()
        output.backward()

    seconds = medians({name: partial(step, context) for name, context in arms.items()})
    print(f"{depth} x (Linear({width}) + GELU), {rows} rows, {device}")
    for name, context in arms.items():
        with MemoryMeter() as meter:
            step(context)
        ratio = seconds[name] / seconds["plain"]
        print(
            f"{name:>24} {seconds[name]:8.3f} s {ratio:6.2f} of plain"
            f" {meter.peak_bytes / 1e6:8.1f} MB",
            flush=True,
        )
        results.add(
            case=f"{width} wide",
            device=device,
            arm=name,
            seconds=seconds[name],
            ratio=ratio,
            peak=meter.peak_bytes,
        )
    return seconds


PLAIN = {"plain": lambda net: nullcontext()}


def activations_on_cpu(results: Results) -> None:
    store = DiskStore()
    arms = {
        "offload_activations": lambda net: offload_activations(store),
        "save_on_cpu": lambda net: save_on_cpu(),
    }
    seconds = activations(
        results, "cpu", 16, 512, 2048, PLAIN | arms | {"synchronous file": synchronous_file}
    )
    sync = seconds["synchronous file"] - seconds["plain"]
    hidden = (
        1 - (seconds["offload_activations"] - seconds["plain"]) / sync if sync > 0 else float("nan")
    )
    print(f"{'':>24} of the synchronous file's extra time, {100 * hidden:.0f} % is hidden")


def activations_on_gpu(results: Results) -> None:
    store = HostStore()
    # A card of 12 GB holds a quarter of the rows; FLOPs and bytes moved shrink alike.
    fewer = 1 if torch.cuda.mem_get_info()[0] > 20e9 else 4
    (wide, rows), (narrow, _) = WIDE, NARROW
    arms = {
        f"{n} in flight, prefetch {m}": lambda net, n=n, m=m: offload_activations(
            store, in_flight=n, prefetch=m
        )
        for n, m in product((1, 2, 3), repeat=2)
    }
    seconds = activations(results, "cuda", 8, wide, rows // fewer, PLAIN | arms)
    over = seconds["2 in flight, prefetch 2"] / seconds["plain"]
    print(
        f"over plain {over:.3f}, bar {OVERHEAD_BAR}: {'met' if over <= OVERHEAD_BAR else 'MISSED'}"
    )
    arms = {
        "offload_activations": lambda net: offload_activations(store),
        "save_on_cpu": lambda net: save_on_cpu(pin_memory=True),
    }
    seconds = activations(results, "cuda", 8, narrow, rows // fewer, PLAIN | arms)
    peer = seconds["save_on_cpu"] / seconds["offload_activations"]
    print(
        f"save_on_cpu / ours {peer:.2f}, bar {PEER_BAR}: {'met' if peer >= PEER_BAR else 'MISSED'}"
    )


def simulated_step(link: float, options: dict | None) -> tuple[float, int]:
    """Seconds and peak bytes of the wide network's step, 256 times as narrow on a device as much
    slower."""
    k = WIDE[0] // 32
    rates = {"flops_per_second": 50e12 / k**3, "bytes_per_second": 4e12 / k**2}
    with SimulatedDevice(
        **rates, up_bytes_per_second=link / k**2, down_bytes_per_second=link / k**2
    ) as device:
        net, x = deep_mlp(8, 32), torch.randn(WIDE[1] // k, 32)
        begun, before = device.seconds, device.live_bytes
        with (
            nullcontext()
            if options is None
            else offload_activations(HostStore(), min_bytes=1, **options)
        ):
            loss = net(x).sum()
        loss.backward()
    return device.seconds - begun, (device.peak_bytes - before) * k**2


def simulated(results: Results) -> None:
    """The same network by the books, where operators do 50 TFLOP/s and 4 TB/s."""
    for link in (50e9, 25e9):
        plain, peak = simulated_step(link, None)
        print(
            f"simulated, link {link / 1e9:.0f} GB/s each way: plain {plain:.2f} s,"
            f" {peak / 1e9:.2f} GB"
        )
        for in_flight in (1, 2, 3):
            cells = []
            for prefetch in (1, 2, 3):
                seconds, peak = simulated_step(link, {"prefetch": prefetch, "in_flight": in_flight})
                cells.append(
                    f"prefetch {prefetch}: {seconds / plain:.3f} of plain, {peak / 1e9:.2f} GB"
                )
                results.add(case="simulated", link=link, in_flight=in_flight, prefetch=prefetch,
                            ratio=seconds / plain, peak=peak)  # fmt: skip
            print(f"{in_flight:>5} in flight   {'   '.join(cells)}", flush=True)


def optimizers(results: Results, device: str) -> None:
    """AdamW's step: plain, with its state below, and on a CPU fused beside a loop, as it runs for a
    GPU's state."""
    makers = {
        "plain": torch.optim.AdamW,
        "one by one": lambda p: OffloadedOptimizer(p, overlap=False),
        "overlapped": OffloadedOptimizer,
    }
    if device == "cpu":
        makers |= {"plain, fused": partial(torch.optim.AdamW, fused=True)}
        makers |= {"overlapped, fused": partial(OffloadedOptimizer, fused=True)}
    models = {name: deep_mlp(12, 1024).to(device) for name in makers}
    optimizers = {name: makers[name](model.parameters()) for name, model in models.items()}

    def step(name) -> None:
        for parameter in models[name].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[name].step()

    seconds = medians({name: partial(step, name) for name in models})
    count = sum(parameter.numel() for parameter in models["plain"].parameters())
    print(
        f"AdamW's step on {count / 1e6:.1f} M parameters, {device}: 8 bytes a parameter down and up"
        " each step"
    )
    for name, taken in seconds.items():
        print(f"{name:>24} {taken:8.3f} s {taken / seconds['plain']:6.2f} of plain", flush=True)
        results.add(
            case="AdamW", device=device, arm=name, seconds=taken, ratio=taken / seconds["plain"]
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="times that each arm runs, the median counts"
    )
    given = parser.parse_args()
    ROUNDS, written = given.rounds, Results(given.output)
    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    simulated(written)
    activations_on_gpu(written) if chosen == "cuda" else activations_on_cpu(written)
    optimizers(written, chosen)
