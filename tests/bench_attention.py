"""Tiled attention beside the framework's math and fused kernels: time, peak bytes, and on a GPU TFLOP/s.

Run as a script: `python tests/bench_attention.py`. Ratios of times taken in one run, in turns, so that they carry over
to other machines; peaks are the meter's, exact.
"""

from __future__ import annotations

import statistics

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import in_turns

from course_lib.attention import attention_cost, flash_attention
from course_lib.memory import MemoryMeter

TIME_BARS, PEAK_BAR = {2048: 0.80, 4096: 0.65}, 0.05
HEADS, HEAD_DIM = 4, 64
ROUNDS = {1024: 11, 2048: 9, 4096: 7, 8192: 3}


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


def on_cpu() -> None:
    print(
        f"{'fp32, forward + backward':28}{'':>10}{'seconds':>10}{'of math':>9}{'of least':>9}"
        f"{'peak, MB':>11}{'of math':>9}"
    )
    for n, rounds in ROUNDS.items():
        case = tensors(n)
        seconds = in_turns({name: lambda a=arm: step(a, *case) for name, arm in ARMS.items()}, rounds)  # noqa: B023
        medians, least = ({name: of(taken) for name, taken in seconds.items()} for of in (statistics.median, min))
        peaks = {name: peak_bytes(arm, *case) for name, arm in ARMS.items()}
        for name in ARMS:
            ratio, share = medians[name] / medians["math"], peaks[name] / peaks["math"]
            bars = []
            if name == "course" and n in TIME_BARS:
                bars.append(f"time, bar {TIME_BARS[n]:.2f}: {'met' if ratio <= TIME_BARS[n] else 'missed'}")
            if name == "course" and n == max(ROUNDS):
                bars.append(f"peak, bar {PEAK_BAR:.2f}: {'met' if share <= PEAK_BAR else 'missed'}")
            label = f"N {n}, {HEADS} heads of {HEAD_DIM}"
            print(
                f"{label:28}{name:>10}{medians[name]:10.3f}{ratio:9.3f}{least[name] / least['math']:9.3f}"
                f"{peaks[name] / 1e6:11.1f}{share:9.4f}   {'; '.join(bars)}".rstrip()
            )


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
    print(f"on a CPU with {torch.get_num_threads()} threads; peak above inputs, output and gradients")
    on_cpu()
    print()
    if torch.cuda.is_available():
        on_gpu()
    else:
        print("no CUDA GPU here: TFLOP/s not measured")


if __name__ == "__main__":
    main()
