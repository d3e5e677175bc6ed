"""Compare the time of steps with offload on a GPU with that of a plain step, of `save_on_cpu`, and
of the simulated device.

    python benchmarks/gpu_offload.py --output figures.json   # also as JSON, after each row

`make gpu-bench` runs this script. The calls alternate in one run. The goal is a step that takes at
most 5% longer than the plain step, both where copies take half as long as the compute and where
they take equally long. (On an H200, `save_on_cpu(pin_memory=True)` takes 72% longer in the second
case.)
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.autograd.graph import save_on_cpu
from turns import Results, in_turns

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp
from course_lib.offload import HostStore, OffloadedOptimizer, offload_activations
from course_lib.simulated import SimulatedDevice

ROUNDS, OVERHEAD_BAR = 15, 1.05
#: Networks on a GPU: (width, rows). In forward, a layer does 2 * rows * width^2 FLOPs and copies
#: 8 * rows * width bytes to the host, in fp32. At 50 TFLOP/s and 50 GB/s, about the rates of an
#: H200, both take equally long at a width of 4,000.
WIDE, NARROW = (8192, 16384), (4096, 16384)


def medians(arms: dict) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in in_turns(arms, ROUNDS).items()}


def activations(
    results: Results, depth: int, width: int, rows: int, arms: dict
) -> dict[str, float]:
    """Measure a step under each context; print its seconds and peak, and return the seconds."""
    net, x = deep_mlp(depth, width).to("cuda"), torch.randn(rows, width, device="cuda")

    def step(context) -> None:
        net.zero_grad()
        with context(net):
            output = net(x).sum()
        output.backward()

    seconds = medians({name: partial(step, context) for name, context in arms.items()})
    print(f"{depth} x (Linear({width}) + GELU), {rows} rows")
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
            arm=name,
            seconds=seconds[name],
            ratio=ratio,
            peak=meter.peak_bytes,
        )
    return seconds


PLAIN = {"plain": lambda net: nullcontext()}


def activations_on_gpu(results: Results) -> None:
    store = HostStore()
    # A GPU of 12 GB gets a quarter of the rows, which divides FLOPs and moved bytes by four.
    fewer = 1 if torch.cuda.mem_get_info()[0] > 20e9 else 4
    (wide, rows), (narrow, _) = WIDE, NARROW
    arms = {
        f"{n} in flight, prefetch {m}": lambda net, n=n, m=m: offload_activations(
            store, in_flight=n, prefetch=m
        )
        for n, m in product((1, 2, 3), repeat=2)
    }
    seconds = activations(results, 8, wide, rows // fewer, PLAIN | arms)
    compare_with_goal(seconds["2 in flight, prefetch 2"] / seconds["plain"])
    arms = {
        "offload_activations": lambda net: offload_activations(store),
        "save_on_cpu": lambda net: save_on_cpu(pin_memory=True),
    }
    seconds = activations(results, 8, narrow, rows // fewer, PLAIN | arms)
    compare_with_goal(seconds["offload_activations"] / seconds["plain"])


def compare_with_goal(ratio: float) -> None:
    """Print a step's seconds relative to the plain step's, and whether they meet the goal."""
    met = "met" if ratio <= OVERHEAD_BAR else "MISSED"
    print(f"{ratio:.3f} of plain, at most {OVERHEAD_BAR} wanted: {met}")


def simulated_step(link: float, options: dict | None) -> tuple[float, int]:
    """Return seconds and peak bytes of the wide network's step on a simulated device; width, rows
    and rates are divided such that operators and copies take as long as on the GPU."""
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
    """Simulate the steps of the wide network at 50 TFLOP/s and 4 TB/s."""
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


def optimizers(results: Results) -> None:
    """Measure AdamW's step with its state on the GPU and on the host."""
    makers = {
        "plain": torch.optim.AdamW,
        "one by one": lambda p: OffloadedOptimizer(p, overlap=False),
        "overlapped": OffloadedOptimizer,
    }
    models = {name: deep_mlp(12, 1024).to("cuda") for name in makers}
    optimizers = {name: makers[name](model.parameters()) for name, model in models.items()}

    def step(name) -> None:
        for parameter in models[name].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[name].step()

    seconds = medians({name: partial(step, name) for name in models})
    count = sum(parameter.numel() for parameter in models["plain"].parameters())
    print(
        f"AdamW's step on {count / 1e6:.1f} M parameters: 8 bytes a parameter down and up each step"
    )
    for name, taken in seconds.items():
        print(f"{name:>24} {taken:8.3f} s {taken / seconds['plain']:6.2f} of plain", flush=True)
        results.add(case="AdamW", arm=name, seconds=taken, ratio=taken / seconds["plain"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="times that each arm runs, the median counts"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU; `make bench` is for a CPU")
    ROUNDS, written = given.rounds, Results(given.output)
    simulated(written)
    activations_on_gpu(written)
    optimizers(written)
