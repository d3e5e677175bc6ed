"""Launching the Triton kernels: block sizes, grids, and what keeps them from running."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .kernels import (
    INTERPRETED,
    forward_kernel,
    keys_backward_kernel,
    queries_backward_kernel,
    rows_kernel,
    triton,
)
from .tiled import Options

# Settings that the tuner tries: {kernel: {largest BLOCK_D: [(BLOCK_Q, BLOCK_K, warps, stages)]}}. A
# warp is 32 threads of an instance. `stages` is how many tiles the loop has in flight, so that it
# loads the next ones while it computes with the current one. Compiled for an H100, with up to 128
# numbers per row, the first setting of each list keeps everything in registers, and the others
# spill a few bytes.
CANDIDATES = {
    forward_kernel: {
        64: [(128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)],
        128: [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 4, 3)],
        256: [(128, 64, 8, 2), (64, 64, 8, 2)],
    },
    keys_backward_kernel: {
        64: [(64, 128, 8, 2), (64, 64, 4, 3), (32, 64, 4, 3)],
        128: [(64, 128, 8, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3)],
        256: [(16, 64, 8, 3), (32, 64, 8, 2)],
    },
    queries_backward_kernel: {
        64: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)],
        256: [(64, 16, 8, 3), (128, 32, 8, 2)],
    },
}
# From large to small. If none of the candidates is sure to fit, the first of these that is sure to
# fit is tried too.
SMALL = [(64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)]
# Exact fp32 products use no tensor cores. Larger tiles would spill registers and take half a minute
# to compile.
SINGLE = [(32, 32, 4, 2), (16, 16, 4, 1)]
# The fastest settings for 16-bit numbers, once they are measured on a GPU; they are used without
# tuning:
# {(kernel, BLOCK_D, capability, causal): (BLOCK_Q, BLOCK_K, warps, stages)}.
MEASURED: dict[tuple[Any, int, tuple[int, int], bool], tuple[int, int, int, int]] = {}
OutOfResources = triton.runtime.OutOfResources if triton else ()
LARGEST = 128  # rows of the largest block


def _tile_bytes(kernel: Any, block_q: int, block_k: int, tiles: int, row_bytes: int) -> int:
    """Return the shared memory, in bytes, of an instance with `tiles` tiles in flight.

    Shared memory holds the instance's own tiles. It also holds `tiles` tiles of each tensor that
    the instance passes over.
    """
    own, walked = (block_k, block_q) if kernel is keys_backward_kernel else (block_q, block_k)
    return ((1 if kernel is forward_kernel else 2) * own + 2 * tiles * walked) * row_bytes


def _sizes(
    kernel: Any, block_d: int, itemsize: int, shared: int
) -> list[tuple[int, int, int, int]]:
    """Return the settings to try on a GPU with `shared` bytes of shared memory per instance."""
    if itemsize == 4:
        return SINGLE if block_d <= 128 else SINGLE[1:]

    def sure(block_q: int, block_k: int, _: int, stages: int) -> bool:
        return _tile_bytes(kernel, block_q, block_k, stages, block_d * itemsize) + 4096 <= shared

    # GPUs before Hopper hold one tile fewer in flight
    def possible(block_q: int, block_k: int, _: int, stages: int) -> bool:
        return _tile_bytes(kernel, block_q, block_k, stages - 1, block_d * itemsize) <= shared

    tried = [size for size in CANDIDATES[kernel][max(block_d, 64)] if possible(*size)]
    if any(sure(*size) for size in tried):
        return tried
    return tried + ([size for size in SMALL if sure(*size)] or SMALL[-1:])[:1]


def _config(size: tuple[int, int, int, int]) -> Any:
    block_q, block_k, warps, stages = size
    return triton.Config(
        {"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages
    )


def _tuned(kernel: Any) -> Any:
    """Return the kernel with a tuner, which tries some settings for each new key of `_setting`.

    Triton also keeps the best settings on disk.
    """

    def prune(_: list, arguments: dict[str, Any], **constants: Any) -> list:
        shared = arguments["setting"][0]
        itemsize = arguments["q"].element_size()
        return [_config(size) for size in _sizes(kernel, constants["BLOCK_D"], itemsize, shared)]

    key = ["setting", "BLOCK_D", "CAUSAL"]
    configs = [_config(size) for size in SMALL]  # placeholders, which `prune` replaces
    return triton.autotune(
        configs, key, prune_configs_by={"early_config_prune": prune}, cache_results=True
    )(kernel)


if triton and not INTERPRETED:
    TUNED = {kernel: _tuned(kernel) for kernel in CANDIDATES}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory, in bytes, that one instance can use."""
    if INTERPRETED:
        return 0
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def _setting(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return the key of the tuner: shared memory, and sizes rounded up to powers of two.

    The sizes are the number of queries of all heads, and the number of keys. Rounding makes a new
    length seldom need new tuning, and sizes that more than fill a GPU are all treated alike.
    """
    numbers = (q.shape[:3].numel(), 2**15), (k.shape[2], 2**13)
    return _shared_memory(q.device), *(
        min(max(triton.next_power_of_2(n), 512), most) for n, most in numbers
    )


def _launch(kernel: Any, grid: Any, q: Tensor, options: Options, *arguments: Any) -> None:
    """Run a kernel with the given blocks, else with measured settings, else with tuned ones."""
    d = q.shape[-1]
    causal = options.shift is not None
    block_d = triton.next_power_of_2(d)
    for name in ("block_q", "block_k"):
        block = getattr(options, name)
        if block not in (None, 16, 32, 64, LARGEST):
            raise ValueError(
                f"{name} must be 16, 32, 64 or {LARGEST} with the Triton backend, got {block}"
            )
    size = None
    if options.block_q or options.block_k or INTERPRETED:
        block_q, block_k = options.block_q or 32, options.block_k or 32
        size = block_q, block_k, 8 if block_q + block_k > 128 else 4, 2
    elif q.element_size() == 2 and q.is_cuda:
        size = MEASURED.get((kernel, block_d, torch.cuda.get_device_capability(q.device), causal))
    launched, blocks = (kernel, _config(size).all_kwargs()) if size else (TUNED[kernel], {})
    try:
        launched[grid](*arguments, CAUSAL=causal, D=d, BLOCK_D=block_d, **blocks)
    except OutOfResources as error:
        if not (options.block_q or options.block_k):
            raise
        raise _too_large(error, kernel, block_q, block_k, d) from error


def _too_large(error: Any, kernel: Any, block_q: int, block_k: int, d: int) -> ValueError:
    fit_q, fit_k = block_q, block_k
    limit = error.limit / error.required * _tile_bytes(kernel, block_q, block_k, 2, 1)
    while (
        max(fit_q, fit_k) > 16
        and max(_tile_bytes(each, fit_q, fit_k, 2, 1) for each in CANDIDATES) > limit
    ):
        fit_q, fit_k = (fit_q // 2, fit_k) if fit_q >= fit_k else (fit_q, fit_k // 2)
    return ValueError(
        f"block_q and block_k must be smaller, such as {fit_q} and {fit_k}, for rows"
        f" of {d} numbers, got {block_q} and {block_k}; those need {error.required}"
        f" bytes of {error.name}, and this GPU has {error.limit}"
    )


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Return why the kernels cannot run on tensors like `q` and `v`, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        return (
            f"the tensors are on {q.device.type}, and Triton's interpreter is off"
            " (TRITON_INTERPRET=1 turns it on)"
        )
    if (
        q.is_cuda
        and not INTERPRETED
        and not torch.version.hip
        and torch.cuda.get_device_capability(q.device) < (8, 0)
    ):
        return "this GPU is older than compute capability 8.0, the oldest that Triton supports"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return (
            f"the dtype is {str(q.dtype).removeprefix('torch.')}, but the kernels support only"
            " float32, float16 and bfloat16"
        )
    if not 16 <= q.shape[-1] <= 256:
        return f"the head dimension is {q.shape[-1]}, but the kernels support only 16 to 256"
    if v.shape[-1] != q.shape[-1]:
        return f"v's head dimension is {v.shape[-1]}, but the kernels need q's, {q.shape[-1]}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T) v, and the log-sum-exp of each row.

    Args:
        q: (batch, heads, n_q, d), fp32, fp16 or bf16, with any strides.
        k, v: (batch, kv_heads, n_k, d), of q's dtype; kv_heads divides heads.
        options: Its blocks must be 16, 32, 64 or 128, or None. If both are None, a GPU tunes them:
            the first call with lengths of a new power of two tries a few settings, which takes
            seconds and memory. Do not measure that call.

    Returns:
        o (batch, heads, n_q, d), contiguous, of q's dtype, and lse (batch, heads, n_q), fp32,
        natural logarithm.
    """
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale = options.shift, options.scale
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, k, v = (_near(x) for x in (q, k, v))
    # The kernel finds the largest score before it scales, so the scale must be above
    # zero. A scale of 0 becomes the smallest positive float.
    q, scale = (-q, -scale) if scale < 0 else (q, scale)
    scale_log2 = max(scale * math.log2(math.e), torch.finfo(torch.float32).tiny)
    with _device_of(q):
        _launch(
            forward_kernel,
            lambda meta: (triton.cdiv(n_q, meta["BLOCK_Q"]), heads, batch),
            q,
            options,
            q,
            k,
            v,
            o,
            lse,
            q.stride(),
            k.stride(),
            v.stride(),
            o.stride(),
            n_q,
            n_k,
            shift or 0,
            heads // kv_heads,
            scale_log2,
            _setting(q, k),
        )
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous.

    Args:
        q, k, v, options: Arguments of `forward`.
        o, lse: Results of `forward`.
        grad_o: Gradient of o, in its shape.
    """
    (batch, heads, n_q, d), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale = options.shift, options.scale
    q, k, v, grad_o, lse = (*(_near(x) for x in (q, k, v, grad_o)), lse.contiguous())
    # with padded rows the kernels can read `lse_log2` and `row_dots` without a mask
    padded_q = triton.cdiv(n_q, LARGEST) * LARGEST
    lse_log2, row_dots = lse.new_empty((2, batch, heads, padded_q))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    numbers = (
        n_q,
        padded_q,
        n_k,
        shift or 0,
        heads // kv_heads,
        float(scale),
        scale * math.log2(math.e),
    )
    numbers += (_setting(q, k),)
    with _device_of(q):
        rows_kernel[(padded_q // 32, heads, batch)](
            grad_o, o, lse, row_dots, lse_log2, grad_o.stride(), o.stride(), n_q, padded_q,
            D=d, BLOCK_D=triton.next_power_of_2(d), BLOCK_Q=32,
        )  # fmt: skip
        _launch(
            keys_backward_kernel,
            lambda meta: (triton.cdiv(n_k, meta["BLOCK_K"]), kv_heads, batch),
            q,
            options,
            q,
            k,
            v,
            grad_o,
            lse_log2,
            row_dots,
            dk,
            dv,
            q.stride(),
            k.stride(),
            v.stride(),
            grad_o.stride(),
            dk.stride(),
            dv.stride(),
            *numbers,
        )
        _launch(
            queries_backward_kernel,
            lambda meta: (triton.cdiv(n_q, meta["BLOCK_Q"]), heads, batch),
            q,
            options,
            q,
            k,
            v,
            grad_o,
            lse_log2,
            row_dots,
            dq,
            q.stride(),
            k.stride(),
            v.stride(),
            grad_o.stride(),
            dq.stride(),
            *numbers,
        )
    return dq, dk, dv


def _near(x: Tensor) -> Tensor:
    """Return the tensor, copied if two entries of a head lie 2^31 or more elements apart.

    Within a head the kernels compute offsets in 32 bits.
    """
    farthest = (x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3)
    return x if farthest < 2**31 else x.contiguous()


def _device_of(q: Tensor) -> Any:
    """Make the GPU of the tensors current, because Triton launches on the current GPU."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()
