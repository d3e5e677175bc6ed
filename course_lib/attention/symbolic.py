"""Count the memory and FLOPs of `tiled.py` on symbolic tensors, without running all tiles.

A symbolic tensor has a shape but no memory. One operator, `course_lib::tiles`, replaces all tiles:
it allocates as many bytes as the tiles need at their peak, and it counts their FLOPs. To find the
peak, a few tiles are run once for all calls with the same shapes, without being counted by the
caller's memory meter. One group of heads represents all groups, because they use the same memory
one after another. The last tiles of the group represent its earlier tiles.

In a symbolic mode of kind "cuda", the Triton kernels of `launch` would compute the tiles on the
chip, so the tiles need no bytes. Apart from its results, backward then allocates only two fp32
numbers per row of scores. The number of rows is rounded up to a multiple of `PADDED_ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from course_lib._torch.modes import disable_current_modes
from course_lib._torch.symbolic import tracked_device_kind

from . import tiled
from .tiled import Options

_library = torch.library.Library("course_lib", "FRAGMENT")
_library.define("tiles(Tensor like, int nbytes, int flops, str operator) -> Tensor")
_library.impl(
    "tiles",
    lambda like, nbytes, *_: like.new_empty(nbytes, dtype=torch.uint8),
    "CompositeExplicitAutograd",
)
TILES = torch.ops.course_lib.tiles.default
# The Triton kernels round the number of rows of their buffers up to a multiple of this number,
# `launch.LARGEST_BLOCK`.
PADDED_ROWS = 128
# Cache of (bytes at the peak, operator at the peak), by function, options and the tensors' shapes,
# strides, dtypes and devices.
_peaks: dict[tuple, tuple[int, str]] = {}


@register_flop_formula(torch.ops.course_lib.tiles)
def _flops_of_tiles(like, nbytes, flops, operator, **_) -> int:
    """Return the FLOPs of one call of `course_lib::tiles`, which receives them as an argument."""
    return flops


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return symbolic results of FlashAttention's forward pass, without running all tiles.

    The arguments and the results are the same as those of `tiled.forward`, except that the tensors
    are symbolic: they have shapes but no values. An active `MemoryMeter` or FLOP counter counts the
    peak bytes and the FLOPs that the pass would need with real tensors. Inside
    `Symbolic(kind="cuda")`, the meter counts the bytes that the Triton kernels need.
    """
    o, lse = (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=tiled.work_dtype(q)),
    )
    options = tiled.with_blocks(options, q, k)
    scores = q.shape[0] * q.shape[1] * _forward_score_count(q.shape[2], k.shape[2], options)
    _replace_tiles(
        _run_last_tiles_forward,
        2 * (q.shape[3] + v.shape[3]) * scores,
        (q, o, lse),
        (k, v),
        options,
    )
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return symbolic gradients of FlashAttention, without running all tiles.

    The arguments and the results are the same as those of `tiled.backward`, except that the tensors
    are symbolic: they have shapes but no values. An active `MemoryMeter` or FLOP counter counts the
    peak bytes and the FLOPs that the pass would need with real tensors. Inside
    `Symbolic(kind="cuda")`, the meter counts the bytes that the Triton kernels need.
    """
    row_buffers = []
    if _kernels_would_run(q, v):
        rows = math.ceil(q.shape[2] / PADDED_ROWS) * PADDED_ROWS
        row_buffers.append(lse.new_empty((2, *q.shape[:2], rows)))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    options = tiled.with_blocks(options, q, k)
    scores = q.shape[0] * q.shape[1] * _backward_score_count(q.shape[2], k.shape[2], options)
    flops = 2 * (3 * q.shape[3] + 2 * v.shape[3]) * scores
    _replace_tiles(
        _run_last_tiles_backward, flops, (q, o, lse, grad_o, dq), (k, v, dk, dv), options
    )
    return dq, dk, dv


def _replace_tiles(
    run_last_tiles: Callable, flops: int, queries: tuple, keys: tuple, options: Options
) -> None:
    """Call one operator that has the peak memory and the FLOPs of all tiles.

    Args:
        run_last_tiles: Function that runs a few tiles, whose peak memory is measured.
        flops: FLOPs of all tiles.
        queries, keys: Tensors with queries as rows, and tensors with keys as rows.
        options: Options with block sizes.
    """
    q, lse = queries[0], queries[2]
    if _kernels_would_run(q, keys[1]):
        torch.ops.course_lib.tiles(lse, 0, flops, "")
        return
    key = (
        run_last_tiles,
        options,
        *((x.shape, x.stride(), x.dtype, x.device) for x in (*queries, *keys)),
    )
    if key not in _peaks:
        # Imported here, so that a copy of this package needs the meter only for estimates.
        from course_lib.memory import MemoryMeter

        with disable_current_modes(), q.fake_mode, MemoryMeter(device=q.device) as meter:
            run_last_tiles(queries, keys, options)
        trace = meter.trace(events=False)
        _peaks[key] = trace.peak_bytes, trace.peak_operator if meter.operator_count else ""
    nbytes, operator = _peaks[key]
    # `lse` is an argument, so that a meter sees that this operator uses the saved tensor `lse`.
    torch.ops.course_lib.tiles(lse, nbytes, flops, operator)


def _kernels_would_run(q: Tensor, v: Tensor) -> bool:
    """Return whether the Triton kernels would run on real tensors like these, on a GPU."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    return (
        tracked_device_kind() == "cuda"
        and q.dtype in dtypes
        and 16 <= q.shape[3] == v.shape[3] <= 256
    )


def _run_last_tiles_forward(queries: tuple, keys: tuple, options: Options) -> None:
    """Run the last tiles of `tiled.forward_tiles`."""
    last, _ = _last_tiles(queries, keys, options)
    tiled.forward_tiles(*last, options)


def _run_last_tiles_backward(queries: tuple, keys: tuple, options: Options) -> None:
    """Run the last tiles of `tiled.backward_tiles`, with the live bytes of the whole pass."""
    last, whole = _last_tiles(queries, keys, options)
    lse = whole[2]
    # `tiled.backward_tiles` computes delta for all rows before its loops.
    delta = (whole[3].to(lse.dtype) * whole[1]).sum(-1)
    skipped = whole[0].shape[2] - last[0].shape[2]
    # These tensors have as many bytes as the rows of delta and dq that are not in the last tiles.
    skipped_rows = (
        delta.new_empty(*delta.shape[:2], skipped),
        delta.new_empty(*delta.shape[:2], skipped, whole[0].shape[3]),
    )
    del delta
    tiled.backward_tiles(*last, options)
    del skipped_rows


def _last_tiles(queries: tuple, keys: tuple, options: Options) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists for the first group of heads: the last rows of all tensors, and all rows.

    If the sequence is long enough, the last rows contain at least two blocks of queries and two
    blocks of keys.
    """
    q, k = queries[0], keys[0]
    group = next(tiled.split_heads(queries, keys, tiled.heads_at_once(q, k, options)))
    blocks = options[2:]
    skipped = (
        max(0, min(q.shape[2], k.shape[2]) - 2 * max(blocks))
        // math.lcm(*blocks)
        * math.lcm(*blocks)
    )
    last = [x[:, :, skipped:] for x in group[: len(queries)]] + [
        x[:, skipped:] for x in group[len(queries) :]
    ]
    return last, group


def _forward_score_count(n_q: int, n_k: int, options: Options) -> int:
    """Count the scores that the forward pass of one head computes.

    With a mask, the loop of `tiled.forward_tiles` over keys ends at the last key to which any query
    of a block attends.
    """
    shift, _, block_q, _ = options
    if shift is None:
        return n_q * n_k
    tiles = [(i, min(i + block_q, n_q)) for i in range(0, n_q, block_q)]
    return sum((end - i) * max(0, min(n_k, end + shift)) for i, end in tiles)


def _backward_score_count(n_q: int, n_k: int, options: Options) -> int:
    """Count the scores that the backward pass of one head computes.

    With a mask, the loop of `tiled.backward_tiles` over queries starts at the first query that
    attends to a key of the block.
    """
    shift, _, _, block_k = options
    if shift is None:
        return n_q * n_k
    return sum(
        min(block_k, n_k - j) * max(0, n_q - max(0, j - shift)) for j in range(0, n_k, block_k)
    )
