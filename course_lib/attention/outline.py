"""What `tiled` takes, without its long loops: for symbolic tensors, which have shapes but no memory.

One group of heads stands for the others, which would take the same after it, and its last tiles for those before
them: the bytes are the same. One product makes up for the FLOPs of what is left out.
"""

from __future__ import annotations

import math

from torch import Tensor

from . import tiled


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, block_q: int | None, block_k: int | None
) -> tuple[Tensor, Tensor]:
    """Arguments and result as for `tiled.forward`."""
    o = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=tiled._work_dtype(q))
    blocks = tiled._blocks(q, k, block_q, block_k)
    rows, columns = next(_groups(q, k, blocks, (q, o, lse), (k, v)))
    cut = _cut(rows[0], columns[0], *blocks)
    last = [x[:, :, cut:] for x in rows] + [x[:, cut:] for x in columns]
    tiled._forward(*last, causal, scale, *blocks)
    _make_up(2, q, k, _area_by_rows, last[0], last[3], causal, blocks)
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    causal: bool,
    scale: float,
    block_q: int | None,
    block_k: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and result as for `tiled.backward`."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    blocks = tiled._blocks(q, k, block_q, block_k)
    rows, columns = next(_groups(q, k, blocks, (q, o, lse, grad_o, dq), (k, v, dk, dv)))
    cut = _cut(rows[0], columns[0], *blocks)
    delta = (rows[3].to(lse.dtype) * rows[1]).sum(-1, keepdim=True)  # as `tiled` begins, for all of the rows
    before = [delta.new_empty(*x.shape[:2], cut, x.shape[3]) for x in (delta, rows[0])]  # of delta and of dq's sum
    del delta
    last = [x[:, :, cut:] for x in rows] + [x[:, cut:] for x in columns]
    tiled._backward(*last, causal, scale, *blocks)
    del before
    _make_up(5, q, k, _area_by_columns, last[0], last[5], causal, blocks)
    return dq, dk, dv


def _groups(q: Tensor, k: Tensor, blocks: tuple[int, int], rows: tuple, columns: tuple):
    for part in tiled._heads(*blocks, rows, columns):
        yield part[: len(rows)], part[len(rows) :]


def _cut(q: Tensor, k: Tensor, block_q: int, block_k: int) -> int:
    """How many rows and columns to leave out at the front: whole tiles, so that two each way are left."""
    step = math.lcm(block_q, block_k)
    return max(0, min(q.shape[2], k.shape[1]) - 2 * max(block_q, block_k)) // step * step


def _make_up(products: int, q: Tensor, k: Tensor, area, q_done: Tensor, k_done: Tensor, causal: bool, blocks) -> None:
    """The FLOPs of the tiles that were left out, in one product of two expanded numbers."""
    wanted = q.shape[0] * q.shape[1] * area(q.shape[2], k.shape[2], causal, *blocks)
    done = q_done.shape[0] * q_done.shape[1] * area(q_done.shape[2], k_done.shape[1], causal, *blocks)
    multiplications = products * q.shape[3] * (wanted - done)
    if multiplications:
        one = q.new_empty(1, 1, 1)
        one.expand(1, 1, multiplications).bmm(one.expand(1, multiplications, 1))


def _area_by_rows(n_q: int, n_k: int, causal: bool, block_q: int, block_k: int) -> int:
    """Scores that the forward pass of one head works on: a tile ends at the last key that one of its rows sees."""
    if not causal:
        return n_q * n_k
    tiles = [(i, min(i + block_q, n_q)) for i in range(0, n_q, block_q)]
    return sum((end - i) * max(0, min(n_k, end + n_k - n_q)) for i, end in tiles)


def _area_by_columns(n_q: int, n_k: int, causal: bool, block_q: int, block_k: int) -> int:
    """Scores that the backward pass works on: a block of keys begins at the first row that sees one of them."""
    if not causal:
        return n_q * n_k
    return sum(min(block_k, n_k - j) * max(0, n_q - max(0, j - (n_k - n_q))) for j in range(0, n_k, block_k))
