"""Launching the Triton kernels: block sizes, grids, and what keeps them from running."""

from __future__ import annotations

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
    row_dots_kernel,
    triton,
)
from .tiled import Options


def _fitting(configs: list, arguments: dict[str, Any], **options: Any) -> list:
    """Those configurations whose tiles a GPU can be expected to hold, and the smallest in any case."""
    itemsize = arguments["q"].element_size()

    def fits(config: Any) -> bool:
        rows = max(config.kwargs["BLOCK_Q"], config.kwargs["BLOCK_K"])
        tile_bytes = rows * options["BLOCK_D"] * itemsize
        # Exact fp32 products use no tensor cores: larger tiles spill registers and take half a minute to compile.
        return tile_bytes <= 32 * 1024 if itemsize == 2 else tile_bytes <= 16 * 1024 and rows <= 32

    return [config for config in configs if fits(config)] or configs[-1:]


def _tuned(kernel: Any) -> Any:
    """The kernel, with block sizes chosen by trying each configuration for each new size of problem.

    A configuration is BLOCK_Q, BLOCK_K, warps (of 32 threads) an instance, and stages: how many tiles the loop has in
    flight, so that it loads the next one while it computes with this one. Those that a GPU has no room for lose.
    """
    sizes = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 3),
             (32, 32, 4, 2), (16, 16, 4, 1)]  # fmt: skip
    configs = [
        triton.Config({"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
        for block_q, block_k, warps, stages in sizes
    ]
    key = ["n_q", "n_k", "D", "CAUSAL"]
    return triton.autotune(configs, key, prune_configs_by={"early_config_prune": _fitting})(kernel)


if triton and not INTERPRETED:
    TUNED = {kernel: _tuned(kernel) for kernel in (forward_kernel, keys_backward_kernel, queries_backward_kernel)}


def _with_blocks(kernel: Any, block_q: int | None, block_k: int | None) -> tuple[Any, dict[str, int]]:
    """The kernel to launch and the options that say its block sizes; none for a kernel that tunes itself."""
    if block_q is None and block_k is None and not INTERPRETED:
        return TUNED[kernel], {}
    block_q, block_k = block_q or 32, block_k or 32
    warps = 8 if block_q + block_k > 128 else 4  # of 32 threads, which share the instance's tiles
    return kernel, {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": warps, "num_stages": 2}


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Half a sentence on why the kernels can't run here on tensors like `q` and `v`, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        return f"the tensors are on {q.device.type}, and Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)"
    if q.is_cuda and not INTERPRETED and not torch.version.hip and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "this GPU is older than compute capability 8.0, the oldest that Triton supports"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the dtype is {str(q.dtype).removeprefix('torch.')}, and the kernels take float32, float16 and bfloat16"
    if not 16 <= q.shape[-1] <= 256:
        return f"the head dimension is {q.shape[-1]}, and the kernels take 16 to 256"
    if v.shape[-1] != q.shape[-1]:
        return f"v's head dimension is {v.shape[-1]}, and the kernels take q's, {q.shape[-1]}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, and each row's log-sum-exp.

    Args:
        q: (batch, heads, n_q, d), fp32, fp16 or bf16, with any strides.
        k, v: (batch, kv_heads, n_k, d), of q's dtype; kv_heads divides heads.
        options: blocks are powers of two from 16 on. If neither is given they are tuned on a GPU: the first call for
            new lengths tries a few, which takes seconds and memory; don't measure that call.

    Returns:
        o (batch, heads, n_q, d), contiguous, of q's dtype, and lse (batch, heads, n_q), fp32, natural logarithm.
    """
    (batch, heads, n_q, d), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale, *blocks = options
    kernel, launch = _with_blocks(forward_kernel, *blocks)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    with _device_of(q):
        kernel[lambda meta: (triton.cdiv(n_q, meta["BLOCK_Q"]), heads, batch)](
            q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(),
            n_q, n_k, shift or 0, heads // kv_heads, scale * math.log2(math.e),
            CAUSAL=shift is not None, D=d, BLOCK_D=triton.next_power_of_2(d), **launch,
        )  # fmt: skip
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, contiguous, from that of o and from what `forward` took and returned."""
    (batch, heads, n_q, d), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale, *blocks = options
    over_keys, launch = _with_blocks(keys_backward_kernel, *blocks)
    over_queries, _ = _with_blocks(queries_backward_kernel, *blocks)
    lse = lse.contiguous()
    row_dots = torch.empty_like(lse)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shape = {"D": d, "BLOCK_D": triton.next_power_of_2(d)}
    numbers = (n_q, n_k, shift or 0, heads // kv_heads, float(scale), scale * math.log2(math.e))
    with _device_of(q):
        row_dots_kernel[(triton.cdiv(n_q, 32), heads, batch)](
            grad_o, o, row_dots, grad_o.stride(), o.stride(), n_q, **shape, BLOCK_Q=32
        )
        over_keys[lambda meta: (triton.cdiv(n_k, meta["BLOCK_K"]), kv_heads, batch)](
            q, k, v, grad_o, lse, row_dots, dk, dv,
            q.stride(), k.stride(), v.stride(), grad_o.stride(), dk.stride(), dv.stride(),
            *numbers, CAUSAL=shift is not None, **shape, **launch,
        )  # fmt: skip
        over_queries[lambda meta: (triton.cdiv(n_q, meta["BLOCK_Q"]), heads, batch)](
            q, k, v, grad_o, lse, row_dots, dq,
            q.stride(), k.stride(), v.stride(), grad_o.stride(), dq.stride(),
            *numbers, CAUSAL=shift is not None, **shape, **launch,
        )  # fmt: skip
    return dq, dk, dv


def _device_of(q: Tensor) -> Any:
    """Triton launches on the current GPU, which need not be the tensors'."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()
