"""Start the Triton kernels: check whether they can run, and choose block sizes and grids.

The kernels themselves are in `kernels.py`.
"""

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
# warp is 32 threads of an instance. `stages` is the number of tiles that the loop has in flight: it
# loads the next tiles while it computes with the current one. Compiled for an H100 with BLOCK_D up
# to 128, the first setting of each list keeps everything in registers, and the others spill a few
# bytes to memory.
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
# Smaller settings, ordered from large to small. If none of the `CANDIDATES` certainly fits into
# shared memory, the tuner also tries the first smaller setting that certainly fits.
SMALL_SETTINGS = [(64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)]
# Settings for fp32, whose exact matrix products use no tensor cores. Larger tiles would spill
# registers and take half a minute to compile.
FP32_SETTINGS = [(32, 32, 4, 2), (16, 16, 4, 1)]
# Settings that are used for 16-bit dtypes without tuning: {(kernel, BLOCK_D, capability, causal):
# (BLOCK_Q, BLOCK_K, warps, stages)}. On an H200 (bf16, torch 2.11, Triton 3.6) the tuner chose them
# at all lengths that were measured: 4096, 8192 and 16384. `keys_backward_kernel` with BLOCK_D 128
# and a causal mask has no setting here, because the tuner chose a different setting at each length.
MEASURED_SETTINGS: dict[tuple[Any, int, tuple[int, int], bool], tuple[int, int, int, int]] = {
    (forward_kernel, 64, (9, 0), False): (128, 64, 4, 3),
    (forward_kernel, 64, (9, 0), True): (64, 64, 4, 3),
    (forward_kernel, 128, (9, 0), False): (128, 128, 8, 3),
    (forward_kernel, 128, (9, 0), True): (128, 128, 8, 3),
    (keys_backward_kernel, 64, (9, 0), False): (64, 64, 4, 3),
    (keys_backward_kernel, 64, (9, 0), True): (64, 64, 4, 3),
    (keys_backward_kernel, 128, (9, 0), False): (64, 128, 8, 3),
    (queries_backward_kernel, 64, (9, 0), False): (128, 64, 8, 3),
    (queries_backward_kernel, 64, (9, 0), True): (128, 64, 8, 3),
    (queries_backward_kernel, 128, (9, 0), False): (128, 64, 8, 3),
    (queries_backward_kernel, 128, (9, 0), True): (128, 64, 8, 3),
}
OutOfResources = triton.runtime.OutOfResources if triton else ()
LARGEST_BLOCK = 128  # largest allowed value of block_q and block_k


def _tile_bytes(kernel: Any, block_q: int, block_k: int, tiles: int, row_bytes: int) -> int:
    """Return how many bytes of shared memory a program instance of a kernel needs.

    Shared memory holds the blocks that the program instance keeps: one block in the forward kernel,
    and two in the backward kernels. It also holds `tiles` tiles of each of the two tensors over
    which the instance iterates.

    Args:
        kernel: The kernel.
        block_q, block_k: Rows of a block of queries and of keys.
        tiles: Number of tiles of one tensor that are in shared memory at the same time.
        row_bytes: Bytes per row of a block.
    """
    own, streamed = (block_k, block_q) if kernel is keys_backward_kernel else (block_q, block_k)
    return ((1 if kernel is forward_kernel else 2) * own + 2 * tiles * streamed) * row_bytes


def _settings_to_try(
    kernel: Any, block_d: int, itemsize: int, shared: int
) -> list[tuple[int, int, int, int]]:
    """Return the settings that the tuner tries for a kernel.

    Args:
        kernel: The kernel.
        block_d: The kernel's BLOCK_D, the head dimension rounded up to a power of two.
        itemsize: Bytes per element of q.
        shared: Bytes of shared memory that an instance can use on this GPU.
    """
    if itemsize == 4:
        return FP32_SETTINGS if block_d <= 128 else FP32_SETTINGS[1:]

    def certainly_fits(block_q: int, block_k: int, _: int, stages: int) -> bool:
        return _tile_bytes(kernel, block_q, block_k, stages, block_d * itemsize) + 4096 <= shared

    # A setting may fit although `certainly_fits` is False, because GPUs before Hopper keep one tile
    # fewer in shared memory.
    def may_fit(block_q: int, block_k: int, _: int, stages: int) -> bool:
        return _tile_bytes(kernel, block_q, block_k, stages - 1, block_d * itemsize) <= shared

    settings = [size for size in CANDIDATES[kernel][max(block_d, 64)] if may_fit(*size)]
    if any(certainly_fits(*size) for size in settings):
        return settings
    return (
        settings
        + ([size for size in SMALL_SETTINGS if certainly_fits(*size)] or SMALL_SETTINGS[-1:])[:1]
    )


def _triton_config(size: tuple[int, int, int, int]) -> Any:
    """Return a setting in the form that Triton's tuner needs."""
    block_q, block_k, warps, stages = size
    return triton.Config(
        {"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages
    )


def _add_tuner(kernel: Any) -> Any:
    """Return the kernel with a tuner, which chooses the fastest setting by measurement.

    The tuner measures once for each new combination of `_tuning_key`, BLOCK_D, CAUSAL and dtypes.
    Triton also stores the fastest settings on disk.
    """

    def prune(_: list, arguments: dict[str, Any], **constants: Any) -> list:
        shared = arguments["tuning_key"][0]
        itemsize = arguments["q"].element_size()
        return [
            _triton_config(size)
            for size in _settings_to_try(kernel, constants["BLOCK_D"], itemsize, shared)
        ]

    key = ["tuning_key", "BLOCK_D", "CAUSAL"]
    configs = [
        _triton_config(size) for size in SMALL_SETTINGS
    ]  # `prune` replaces these placeholders
    return triton.autotune(
        configs, key, prune_configs_by={"early_config_prune": prune}, cache_results=True
    )(kernel)


if triton and not INTERPRETED:
    TUNED = {kernel: _add_tuner(kernel) for kernel in CANDIDATES}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory one program instance can use on a GPU."""
    if INTERPRETED:
        return 0
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def _tuning_key(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return the numbers in the tuner's key; the tuner measures once for each new key.

    The numbers are the bytes of shared memory, the number of queries of all samples and heads
    together, and the number of keys. The last two are rounded up to powers of two, so that a new
    length seldom needs new tuning. They are also capped, because all larger numbers fill a GPU and
    can use the same settings.
    """
    sizes = (q.shape[:3].numel(), 2**15), (k.shape[2], 2**13)
    return _shared_memory(q.device), *(
        min(max(triton.next_power_of_2(size), 512), limit) for size, limit in sizes
    )


def _launch(kernel: Any, grid: Any, q: Tensor, options: Options, *arguments: Any) -> None:
    """Start a kernel with the caller's block sizes, or with measured or tuned settings by default.

    Args:
        kernel: The kernel.
        grid: Number of program instances per dimension, as a function of the block sizes.
        q: The queries, which determine the settings.
        options: The caller's options.
        arguments: Arguments of the kernel, except its compile-time constants.

    Raises:
        ValueError: A block size in `options` is not supported, or blocks of these sizes need more
            shared memory than this GPU has.
    """
    d = q.shape[-1]
    causal = options.shift is not None
    block_d = triton.next_power_of_2(d)
    for name in ("block_q", "block_k"):
        block = getattr(options, name)
        if block not in (None, 16, 32, 64, LARGEST_BLOCK):
            raise ValueError(
                f"{name} must be 16, 32, 64 or {LARGEST_BLOCK} with the Triton backend, got {block}"
            )
    size = None
    if options.block_q or options.block_k or INTERPRETED:
        block_q, block_k = options.block_q or 32, options.block_k or 32
        size = block_q, block_k, 8 if block_q + block_k > 128 else 4, 2
    elif q.element_size() == 2 and q.is_cuda:
        size = MEASURED_SETTINGS.get(
            (kernel, block_d, torch.cuda.get_device_capability(q.device), causal)
        )
    launched, blocks = (kernel, _triton_config(size).all_kwargs()) if size else (TUNED[kernel], {})
    try:
        launched[grid](*arguments, CAUSAL=causal, D=d, BLOCK_D=block_d, **blocks)
    except OutOfResources as error:
        if not (options.block_q or options.block_k):
            raise
        raise _block_size_error(error, kernel, block_q, block_k, d) from error


def _block_size_error(error: Any, kernel: Any, block_q: int, block_k: int, d: int) -> ValueError:
    """Return an error that suggests smaller blocks, given Triton's error about shared memory."""
    fit_q, fit_k = block_q, block_k
    limit = error.limit / error.required * _tile_bytes(kernel, block_q, block_k, 2, 1)
    while (
        max(fit_q, fit_k) > 16
        and max(_tile_bytes(other, fit_q, fit_k, 2, 1) for other in CANDIDATES) > limit
    ):
        fit_q, fit_k = (fit_q // 2, fit_k) if fit_q >= fit_k else (fit_q, fit_k // 2)
    return ValueError(
        f"for head dimension {d}, block_q and block_k must be smaller, such as {fit_q}"
        f" and {fit_k}, got {block_q} and {block_k}, which need {error.required} bytes of"
        f" {error.name}; this GPU has {error.limit} bytes"
    )


def unsupported_reason(q: Tensor, v: Tensor) -> str | None:
    """Return why the Triton kernels cannot run on tensors like `q` and `v`, or None if they can.

    The function does not check the block sizes. It also does not check what `flash_attention`
    requires regardless of the backend, such as equal dtypes. Sequences may have any length.

    Args:
        q: Queries, of shape (batch, heads, n_q, d).
        v: Values, of shape (batch, kv_heads, n_k, d_v).
    """
    if triton is None:
        return "Triton is not installed"
    if q.device.type != "cuda" and not (INTERPRETED and q.device.type == "cpu"):
        return (
            f"they are on {q.device.type}, and Triton's interpreter is off (TRITON_INTERPRET=1 in"
            " the environment turns it on)"
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
            f"the kernels support only float32, float16 and bfloat16, and q is"
            f" {str(q.dtype).removeprefix('torch.')}"
        )
    if not 16 <= q.shape[-1] <= 256:
        return f"the kernels support only head dimensions 16 to 256, and q has {q.shape[-1]}"
    if v.shape[-1] != q.shape[-1]:
        return f"v must have the head dimension of q, {q.shape[-1]}, but has {v.shape[-1]}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output of attention and the log-sum-exp of each row of scores, with Triton.

    Args:
        q: Queries, of shape (batch, heads, n_q, d), in fp32, fp16 or bf16, with any strides.
        k, v: Keys and values, of shape (batch, kv_heads, n_k, d), in the dtype of q. kv_heads
            divides heads.
        options: Mask, scale and block sizes. Each block size must be 16, 32, 64, 128 or None. If
            only one is None, it is 32. If both are None on a GPU, the table `MEASURED_SETTINGS`
            gives the block sizes. If the table has no entry for these tensors, Triton's tuner
            measures several block sizes in the first call with these sequence lengths. The tuning
            takes seconds and memory, so exclude the first call from measurements.

    Returns:
        A tuple (o, lse). The output o is softmax(scale * q k^T) v, of shape (batch, heads, n_q, d),
        contiguous and in the dtype of q. The log-sum-exp lse (natural logarithm) has the shape
        (batch, heads, n_q), in fp32.
    """
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale = options.shift, options.scale
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, k, v = (_with_32_bit_offsets(x) for x in (q, k, v))
    # The kernel finds the largest score before it scales the scores, so the scale must be positive.
    # A negative scale is made positive, and q is negated instead. A scale of 0 is replaced by the
    # smallest positive normal float.
    q, scale = (-q, -scale) if scale < 0 else (q, scale)
    scale_log2 = max(scale * math.log2(math.e), torch.finfo(torch.float32).tiny)
    with _current_gpu(q):
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
            _tuning_key(q, k),
        )
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of attention, computed with Triton.

    The gradients are contiguous, and have the shapes and dtypes of q, k and v.

    Args:
        q, k, v, options: Arguments with which `forward` was called.
        o, lse: Output and log-sum-exp that `forward` returned.
        grad_o: Gradient of o, in the shape of o.
    """
    (batch, heads, n_q, d), (_, kv_heads, n_k, _) = q.shape, k.shape
    shift, scale = options.shift, options.scale
    q, k, v, grad_o, lse = (*(_with_32_bit_offsets(x) for x in (q, k, v, grad_o)), lse.contiguous())
    # Rows are padded, so that the kernels can read `lse_log2` and `row_dots` without a mask.
    padded_q = triton.cdiv(n_q, LARGEST_BLOCK) * LARGEST_BLOCK
    lse_log2, row_dots = lse.new_empty((2, batch, heads, padded_q))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sizes = (
        n_q,
        padded_q,
        n_k,
        shift or 0,
        heads // kv_heads,
        float(scale),
        scale * math.log2(math.e),
    )
    sizes += (_tuning_key(q, k),)
    with _current_gpu(q):
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
            *sizes,
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
            *sizes,
        )
    return dq, dk, dv


def _with_32_bit_offsets(x: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if an offset within a head needs more than 32 bits.

    Within a head the kernels compute offsets as signed 32-bit integers.
    """
    farthest = (x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3)
    return x if farthest < 2**31 else x.contiguous()


def _current_gpu(q: Tensor) -> Any:
    """Return a context in which the tensors' GPU is the current one.

    Triton starts kernels on the current GPU.
    """
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()
