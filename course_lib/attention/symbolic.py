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

_library = torch.library.Library("course_lib", "FRAGMENT")
_library.define("skipped_tiles(Tensor like, int flops) -> ()")
_library.impl("skipped_tiles", lambda like, flops: None, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.course_lib.skipped_tiles)
def _flops_of_skipped_tiles(like, flops, **_) -> int:
    return flops


def forward(
    q: Tensor, k: Tensor, v: Tensor, shift: int | None, scale: float, block_q: int | None, block_k: int | None
) -> tuple[Tensor, Tensor]:
    """Arguments and result as for `tiled.forward`."""
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=tiled.work_dtype(q))
    blocks = tiled.block_sizes(q, k, block_q, block_k)
    last, _ = _last_tiles((q, o, lse), (k, v), blocks)
    tiled.forward_tiles(*last, shift, scale, *blocks)
    _count_skipped(q.shape[3] + v.shape[3], q, k, last[0], last[3], _area_by_rows, shift, blocks)
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    shift: int | None,
    scale: float,
    block_q: int | None,
    block_k: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and result as for `tiled.backward`."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    blocks = tiled.block_sizes(q, k, block_q, block_k)
    last, first = _last_tiles((q, o, lse, grad_o, dq), (k, v, dk, dv), blocks)
    delta = (first[3].to(lse.dtype) * first[1]).sum(-1)  # as `tiled` begins, for all of the rows
    cut = first[0].shape[2] - last[0].shape[2]
    before = delta.new_empty(*delta.shape[:2], cut), delta.new_empty(*delta.shape[:2], cut, q.shape[3])  # and dq's sum
    del delta
    tiled.backward_tiles(*last, shift, scale, *blocks)
    del before
    _count_skipped(3 * q.shape[3] + 2 * v.shape[3], q, k, last[0], last[5], _area_by_columns, shift, blocks)
    return dq, dk, dv


def _last_tiles(queries: tuple, keys: tuple, blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """The first group of heads, from where two tiles each way are left, and all of it."""
    q, k = queries[0], keys[0]
    group = next(tiled.split_heads(queries, keys, tiled.heads_at_once(q, k, *blocks)))
    cut = max(0, min(q.shape[2], k.shape[2]) - 2 * max(blocks)) // math.lcm(*blocks) * math.lcm(*blocks)
    last = [x[:, :, cut:] for x in group[: len(queries)]] + [x[:, cut:] for x in group[len(queries) :]]
    return last, group


def _count_skipped(features: int, q: Tensor, k: Tensor, q_done: Tensor, k_done: Tensor, area, shift, blocks) -> None:
    """The FLOPs of the tiles that were left out: each score takes products over `features` in all."""
    wanted = q.shape[0] * q.shape[1] * area(q.shape[2], k.shape[2], shift, *blocks)
    done = q_done.shape[0] * q_done.shape[1] * area(q_done.shape[2], k_done.shape[1], shift, *blocks)
    torch.ops.course_lib.skipped_tiles(q, 2 * features * (wanted - done))


def _area_by_rows(n_q: int, n_k: int, shift: int | None, block_q: int, block_k: int) -> int:
    """Scores that the forward pass of one head works on: a tile ends at the last key that one of its rows sees."""
    if shift is None:
        return n_q * n_k
    tiles = [(i, min(i + block_q, n_q)) for i in range(0, n_q, block_q)]
    return sum((end - i) * max(0, min(n_k, end + shift)) for i, end in tiles)


def _area_by_columns(n_q: int, n_k: int, shift: int | None, block_q: int, block_k: int) -> int:
    """Scores that the backward pass works on: a block of keys begins at the first row that sees one of them."""
    if shift is None:
        return n_q * n_k
    return sum(min(block_k, n_k - j) * max(0, n_q - max(0, j - shift)) for j in range(0, n_k, block_k))
