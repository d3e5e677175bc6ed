"""Compare the TFLOP/s of the course's Triton kernels and of PyTorch's attention kernels on a GPU.

    python benchmarks/gpu_attention.py --output figures.json   # also as JSON, after each row
    python benchmarks/gpu_attention.py --compile               # without a GPU: registers and shared
                                                               # memory of the kernels on an H100

`make gpu-bench` runs this script. The calls alternate in one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import Results

from course_lib.attention import attention_cost, flash_attention

HEADS, HEAD_DIM = 4, 64
FUSED = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")  # PyTorch's kernels on a GPU
GPU_SECONDS = 480  # after this time no new row is started
H100 = 232_448  # bytes of shared memory that an instance can have


def tensors(
    n: int, *, batch: int = 1, heads: int = HEADS, d: int = HEAD_DIM, **options
) -> list[torch.Tensor]:
    """Return random q, k and v, and a gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(batch, heads, n, d, requires_grad=i < 3, **options) for i in range(4)]


def on_gpu(results: Results, limit: float) -> None:
    from course_lib.attention import launch

    name, began = torch.cuda.get_device_name(), time.monotonic()
    results.facts |= {
        "gpu": name,
        "cuda": torch.version.cuda,
        "triton": getattr(launch.triton, "__version__", None),
    }
    print(f"{name}, CUDA {torch.version.cuda}, Triton {results.facts['triton']}, bf16, in turns")
    print(
        "TFLOP/s of the FLOPs that the algorithm needs (half of them if causal): 2 products"
        " forward, 5 backward."
    )
    print(
        "The course's backward pass computes 7, so as to add nothing up in memory: the same bits in"
        " every run."
    )
    for d in (64, 128):
        for causal in (False, True):
            for n in (1024, 2048, 4096, 8192, 16384):
                if time.monotonic() - began > limit:
                    print(f"{limit} s are over; what is left is left out")
                    return
                gpu_rows(results, launch, n, d, causal)


def gpu_rows(results: Results, launch, n: int, d: int, causal: bool) -> None:
    batch, heads = 16384 // n, 2048 // d
    q, k, v, grad_o = tensors(n, batch=batch, heads=heads, d=d, dtype=torch.bfloat16, device="cuda")
    own_choice = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=causal)).name
    arms = {"course": lambda: flash_attention(q, k, v, causal=causal, backend="triton")}
    arms |= {backend: lambda b=backend: fused_attention(b, q, k, v, causal) for backend in FUSED}
    passes, missing = {"forward": {}, "backward": {}}, {}
    for arm, forward in arms.items():
        try:
            o = forward()
            torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True)
        except (
            Exception
            # this GPU or these tensors have no such kernel, and the others are still measured
        ) as error:
            missing[arm] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            passes["forward"][arm] = forward
            passes["backward"][arm] = lambda o=o: torch.autograd.grad(
                o, (q, k, v), grad_o, retain_graph=True
            )
    print(
        f"d {d}, N {n}, batch {batch}, heads {heads}{', causal' if causal else ''}; SDPA's own"
        f" choice: {own_choice}"
    )
    for pass_, functions in passes.items():
        taken = gpu_milliseconds(functions)
        cost = attention_cost(
            sequence=n, head_dim=d, batch=batch, heads=heads, kind="flash", pass_=pass_
        )
        rates = {arm: cost.flops / (2 if causal else 1) / ms / 1e9 for arm, ms in taken.items()}
        others = (
            f"{arm} {r:7.1f} ({rates.get('course', 0) / r:.2f})"
            for arm, r in rates.items()
            if arm != "course"
        )
        print(
            f"    {pass_:8} course {rates.get('course', 0):7.1f}, of", ", ".join(others), flush=True
        )
        results.add(
            pass_=pass_,
            d=d,
            n=n,
            batch=batch,
            heads=heads,
            causal=causal,
            own_choice=own_choice,
            milliseconds=taken,
            tflops=rates,
            missing=missing,
            blocks=blocks_in_use(launch),
        )
    for arm, why in missing.items():
        print(f"    {arm} is not available: {why}", flush=True)


def fused_attention(backend: str, q, k, v, causal: bool):
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def gpu_milliseconds(functions: dict, rounds: int = 15) -> dict[str, float]:
    """Return the median milliseconds of each function, measured with CUDA events.

    Every round calls each function once; the first three rounds are not counted. The GPU sleeps
    until the launches of a call are queued, because Python's time would be measured otherwise.
    """
    taken = {name: [] for name in functions}
    cycles = 2_000_000  # a millisecond
    for i in range(rounds + 3):
        for name in list(functions) if i % 2 else list(functions)[::-1]:
            while True:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(cycles)
                start.record()
                functions[name]()
                end.record()
                awake = start.query()  # the GPU awoke before all launches were queued
                torch.cuda.synchronize()
                if not awake or cycles > 100_000_000:
                    break
                cycles *= 2
            taken[name].append(start.elapsed_time(end))
    return {name: statistics.median(ms[3:]) for name, ms in taken.items()}


def blocks_in_use(launch) -> dict[str, str]:
    """Return the options of the last launch of the kernels."""
    tuned = getattr(launch, "TUNED", {})
    return {
        kernel.__name__: str(getattr(each, "best_config", None)) for kernel, each in tuned.items()
    }


def on_absent_gpu() -> None:
    """Compile all configurations that the tuner may try on an H100; print registers and memory."""
    sys.path.append(str(Path(__file__).parents[1] / "tests/tools"))
    from absent_gpu import compile_only

    from course_lib.attention import launch
    from course_lib.attention.tiled import Options

    compiled = compile_only(90, H100)
    for tuned in launch.TUNED.values():
        tuned._do_bench = lambda call, quantiles: call() or [1.0, 1.0, 1.0]
    print(f"{'bf16':48}{'registers':>10}{'stack':>8}{'shared':>8}")
    lists = {kernel: dict(sizes) for kernel, sizes in launch.CANDIDATES.items()}
    for d in (64, 128, 256):
        q, k, v, grad_o = (torch.empty(1, 4, 1000, d, dtype=torch.bfloat16) for _ in range(4))
        for shift in (None, 0):
            for i in range(max(len(sizes[d]) for sizes in lists.values())):
                sizes = {
                    kernel: lists[kernel][d][min(i, len(lists[kernel][d]) - 1)] for kernel in lists
                }
                for kernel, tuned in launch.TUNED.items():
                    launch.CANDIDATES[kernel][d] = [sizes[kernel]]
                    tuned.cache.clear()
                o, lse = launch.forward(q, k, v, Options(shift, 0.125))
                launch.backward(q, k, v, o, lse, grad_o, Options(shift, 0.125))
                rows = {row["kernel"]: row for row in compiled}
                for kernel, size in sizes.items():
                    row, label = (
                        rows[kernel.__name__],
                        f"d {d}{', causal' if shift == 0 else ''}, {kernel.__name__}",
                    )
                    if i < len(lists[kernel][d]):
                        print(
                            f"{label:40}{size!s:>20}{row['registers']:5}{row['stack']:8}{row['shared']:8}",
                            flush=True,
                        )
                compiled.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times of the course's attention and the framework's."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="what is measured, as JSON, written after each row",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="registers of the Triton kernels on an H100, no times",
    )
    parser.add_argument(
        "--seconds",
        type=int,
        default=GPU_SECONDS,
        help="on a GPU, begin no further row after this number of seconds",
    )
    options = parser.parse_args()
    if options.compile:
        on_absent_gpu()
        return
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU; --compile does not, and `make bench` is for a CPU")
    print(
        f"course_lib.attention and F.scaled_dot_product_attention, torch {torch.__version__}, in"
        " turns"
    )
    on_gpu(Results(options.output), options.seconds)


if __name__ == "__main__":
    main()
