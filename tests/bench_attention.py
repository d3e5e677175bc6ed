"""Tiled attention beside the framework's math and fused kernels: time, peak bytes, and on a GPU TFLOP/s.

Run as a script: `python tests/bench_attention.py`. Ratios of times taken in one run, in turns, so that they carry over
to other machines: with one thread, with as many as by default, and so beside a process that keeps a core busy. Peaks
are the meter's, exact.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import in_turns

from course_lib.attention import attention_cost, flash_attention
from course_lib.memory import MemoryMeter, symbolic

# Seconds of the course's by those of the math kernel, with the default number of threads: at most
BARS = {"quiet": {1024: 0.90, 2048: 0.75, 4096: 0.65}, "beside a busy process": dict.fromkeys((1024, 2048, 4096), 1.0)}
PEAK_BAR, LONGEST = 0.05, 8192
HEADS, HEAD_DIM = 4, 64
ROUNDS = {1024: 21, 2048: 11, 4096: 5}


def math_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


ARMS = {
    "math": math_attention,
    "fused": F.scaled_dot_product_attention,
    "course": lambda q, k, v: flash_attention(q, k, v, backend="torch"),
}


def tensors(n: int, *, batch: int = 1, heads: int = HEADS, d: int = HEAD_DIM, **options) -> list[torch.Tensor]:
    """q, k, v, and a gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(batch, heads, n, d, requires_grad=i < 3, **options) for i in range(4)]


def step(attention, q, k, v, grad_o):
    return torch.autograd.grad(attention(q, k, v), (q, k, v), grad_o)


def peak_bytes(attention, *case) -> int:
    """Live bytes above the inputs, the output and the gradients, at the most."""
    with MemoryMeter() as meter:
        step(attention, *case)
    return meter.peak_bytes - 4 * case[0].nbytes


@contextmanager
def busy_process(busy: bool):
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def on_cpu() -> None:
    columns = ("seconds", "of math", "least", "of math", "bar")
    print(f"{'fp32, forward + backward':44}{'':>8}" + "".join(f"{column:>9}" for column in columns))
    default = torch.get_num_threads()
    for threads, state in dict.fromkeys(((1, "quiet"), (default, "quiet"), (default, "beside a busy process"))):
        torch.set_num_threads(threads)
        with busy_process(state != "quiet"):
            for n, rounds in ROUNDS.items():
                bar = BARS[state][n] if threads == default else None
                report_times(f"{threads} threads, {state}, N {n}", n, rounds, bar)
    torch.set_num_threads(default)


def report_times(label: str, n: int, rounds: int, bar: float | None) -> None:
    case = tensors(n)
    seconds = in_turns({name: lambda a=arm: step(a, *case) for name, arm in ARMS.items()}, rounds)
    medians, least = ({name: of(taken) for name, taken in seconds.items()} for of in (statistics.median, min))
    for name in ARMS:
        ratio = medians[name] / medians["math"]
        verdict = f"{bar:9.2f} {'met' if ratio <= bar else 'missed'}" if bar and name == "course" else ""
        print(
            f"{label:44}{name:>8}{medians[name]:9.3f}{ratio:9.2f}{least[name]:9.3f}{least[name] / least['math']:9.2f}"
            f"{verdict}",
            flush=True,
        )


def peaks() -> None:
    with symbolic():
        for n in (*ROUNDS, LONGEST):
            course, plain = (peak_bytes(ARMS[name], *tensors(n)) for name in ("course", "math"))
            verdict = f", bar {PEAK_BAR:.2f}: {'met' if course <= PEAK_BAR * plain else 'missed'}" * (n == LONGEST)
            print(f"peak at N {n:5}: {course / 1e6:7.1f} MB, {course / plain:.4f} of math{verdict}")


def milliseconds(function, rounds: int = 20) -> float:
    """The median by CUDA's own clock."""
    taken = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken[3:])


def on_gpu() -> None:
    print(
        f"{torch.cuda.get_device_name()}, bf16, TFLOP/s of the FLOPs that the algorithm needs (half of them if causal)"
    )
    print(f"{'':34}{'forward':>24}{'':10}{'backward':>24}")
    print(f"{'':34}{'course':>12}{'sdpa flash':>12}{'ratio':>10}{'course':>12}{'sdpa flash':>12}{'ratio':>10}")
    for d in (64, 128):
        for causal in (False, True):
            for n in (1024, 2048, 4096, 8192, 16384):
                batch, heads = 16384 // n, 2048 // d
                case = tensors(n, batch=batch, heads=heads, d=d, dtype=torch.bfloat16, device="cuda")
                rates = {name: gpu_rates(name, causal, *case) for name in ("course", "framework")}
                line = f"d {d}, N {n}, batch {batch}{', causal' if causal else ''}"
                print(f"{line:34}", end="")
                for ours, theirs in zip(rates["course"], rates["framework"], strict=True):
                    print(f"{ours:12.1f}{theirs:12.1f}{ours / theirs:10.2f}", end="")
                print(flush=True)


def gpu_rates(name: str, causal: bool, q, k, v, grad_o) -> list[float]:
    """TFLOP/s of the forward and of the backward pass."""

    def forward():
        if name == "course":
            return flash_attention(q, k, v, causal=causal)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    o = forward()
    taken = {
        "forward": milliseconds(forward),
        "backward": milliseconds(lambda: torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True)),
    }
    batch, heads, n, d = q.shape
    rates = []
    for pass_, ms in taken.items():
        cost = attention_cost(sequence=n, head_dim=d, batch=batch, heads=heads, kind="flash", pass_=pass_)
        rates.append(cost.flops / (2 if causal else 1) / ms / 1e9)
    return rates


def main() -> None:
    print(f"course_lib.attention beside F.scaled_dot_product_attention, torch {torch.__version__}, in turns")
    print(f"on a CPU with {torch.get_num_threads()} threads; peaks above inputs, output and gradients")
    on_cpu()
    print()
    peaks()
    print()
    if torch.cuda.is_available():
        on_gpu()
    else:
        print("no CUDA GPU here: TFLOP/s not measured")


if __name__ == "__main__":
    main()
