"""What `tiled` takes, without its long loops: for symbolic tensors, which have shapes but no memory.

One group of heads stands for the others, which would take the same after it, and its last tiles for those before
them: the bytes are the same. The FLOPs of what is left out are counted by an operator that does nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import tiled
from .tiled import Options

_library = torch.library.Library("course_lib", "FRAGMENT")
_library.define("skipped_tiles(Tensor like, int flops) -> ()")
_library.impl("skipped_tiles", lambda like, flops: None, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.course_lib.skipped_tiles)
def _flops_of_skipped_tiles(like, flops, **_) -> int:
    return flops


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Arguments and result as for `tiled.forward`."""
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=tiled.work_dtype(q))
    options = tiled.with_blocks(options, q, k)
    last, _ = _last_tiles((q, o, lse), (k, v), options)
    tiled.forward_tiles(*last, options)
    _count_skipped(q.shape[3] + v.shape[3], q, k, last[0], last[3], _area_by_rows, options)
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and result as for `tiled.backward`."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    options = tiled.with_blocks(options, q, k)
    last, first = _last_tiles((q, o, lse, grad_o, dq), (k, v, dk, dv), options)
    delta = (first[3].to(lse.dtype) * first[1]).sum(-1)  # as `tiled` begins, for all of the rows
    cut = first[0].shape[2] - last[0].shape[2]
    before = delta.new_empty(*delta.shape[:2], cut), delta.new_empty(*delta.shape[:2], cut, q.shape[3])  # and dq's sum
    del delta
    tiled.backward_tiles(*last, options)
    del before
    _count_skipped(3 * q.shape[3] + 2 * v.shape[3], q, k, last[0], last[5], _area_by_columns, options)
    return dq, dk, dv


def _last_tiles(queries: tuple, keys: tuple, options: Options) -> tuple[list[Tensor], list[Tensor]]:
    """The first group of heads, from where two tiles each way are left, and all of it."""
    q, k = queries[0], keys[0]
    group = next(tiled.split_heads(queries, keys, tiled.heads_at_once(q, k, options)))
    blocks = options[2:]
    cut = max(0, min(q.shape[2], k.shape[2]) - 2 * max(blocks)) // math.lcm(*blocks) * math.lcm(*blocks)
    last = [x[:, :, cut:] for x in group[: len(queries)]] + [x[:, cut:] for x in group[len(queries) :]]
    return last, group


def _count_skipped(features: int, q: Tensor, k: Tensor, q_done: Tensor, k_done: Tensor, area, options) -> None:
    """The FLOPs of the tiles that were left out: each score takes products over `features` in all."""
    wanted = q.shape[0] * q.shape[1] * area(q.shape[2], k.shape[2], options)
    done = q_done.shape[0] * q_done.shape[1] * area(q_done.shape[2], k_done.shape[1], options)
    torch.ops.course_lib.skipped_tiles(q, 2 * features * (wanted - done))


def _area_by_rows(n_q: int, n_k: int, options: Options) -> int:
    """Scores that the forward pass of one head works on: a tile ends at the last key that one of its rows sees."""
    shift, _, block_q, _ = options
    if shift is None:
        return n_q * n_k
    tiles = [(i, min(i + block_q, n_q)) for i in range(0, n_q, block_q)]
    return sum((end - i) * max(0, min(n_k, end + shift)) for i, end in tiles)


def _area_by_columns(n_q: int, n_k: int, options: Options) -> int:
    """Scores that the backward pass works on: a block of keys begins at the first row that sees one of them."""
    shift, _, _, block_k = options
    if shift is None:
        return n_q * n_k
    return sum(min(block_k, n_k - j) * max(0, n_q - max(0, j - shift)) for j in range(0, n_k, block_k))
