"""FlashAttention's forward and backward in plain torch, in tiles, without an N x N tensor.

The functions run on any device and for any sequence length. `kernels.py` has the same algorithm in
Triton. The arithmetic is in float32, or in float64 for float64 inputs.

Source: Dao 2023 (FlashAttention-2), arXiv:2307.08691, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib import _check

from . import threads

BLOCK = 512  # default number of rows and columns of a tile
# Number of scores that are computed at a time, for all heads together. If sequences are short, many
# heads are therefore processed at once. On a CPU these scores are 1 MiB in float32, which fits into
# a core's cache. A GPU needs more scores to be busy.
TILE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# At least this many heads are processed at once, so that each of two threads has a head.
MIN_HEADS_AT_ONCE = 2
LOG2_E = math.log2(math.e)


class Options(NamedTuple):
    """Options of FlashAttention that all backends share.

    Attributes:
        shift: Offset of the causal mask: query i attends to keys up to i + shift. None for no mask.
        scale: Number by which the scores are multiplied.
        block_q: Number of queries per tile of scores; None for the backend's default.
        block_k: Number of keys per tile of scores; None for the backend's default.
    """

    shift: int | None
    scale: float
    block_q: int | None = None
    block_k: int | None = None


def online_softmax(scores: Tensor, block: int) -> Tensor:
    """Compute a softmax over the last dimension, with one loop for the maximum and the sum.

    The loop goes over blocks of columns. For each row, m is the maximum so far, and total is the
    sum of exp(score - m) so far. If a block raises m, the old total is multiplied by exp(old m
    - new m). A row in which all scores are -inf gives zeros, whereas `torch.softmax` gives NaN.

    Args:
        scores: A floating-point tensor of shape (..., n).
        block: Number of columns per block, at least 1. It need not divide n.

    Returns:
        The softmax, in the shape and dtype of `scores`, computed in at least float32. It is
        differentiable.

    Raises:
        TypeError: `scores` is not a floating-point tensor, or `block` is not a whole number.
        ValueError: `block` is less than 1.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0])
        >>> torch.allclose(online_softmax(scores, block=2), scores.softmax(-1))
        True
    """
    if not scores.is_floating_point():
        raise TypeError(f"scores must be a floating-point tensor, got {_check.describe(scores)}")
    _check.whole("block", block, 1)
    x = scores.to(work_dtype(scores))
    # m starts at a finite value, because -inf - (-inf) would be NaN.
    m = x.new_full((*x.shape[:-1], 1), torch.finfo(x.dtype).min)
    total = torch.zeros_like(m)
    for columns in x.split(block, dim=-1) if x.numel() else ():
        # Subtracting m does not change the result, so no gradient has to flow through m.
        new_m = torch.maximum(m, columns.detach().amax(-1, keepdim=True))
        total = total * (m - new_m).exp() + (columns - new_m).exp().sum(-1, keepdim=True)
        m = new_m
    # The clamp affects only rows in which all scores are -inf. In all other rows, total is at least
    # 1.
    return ((x - m).exp() / total.clamp(min=1)).to(scores.dtype)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output of attention and the log-sum-exp of each row of scores.

    Args:
        q: Queries, of shape (batch, heads, n_q, d).
        k: Keys, of shape (batch, kv_heads, n_k, d).
        v: Values, of shape (batch, kv_heads, n_k, d_v).
        options: Mask, scale and block sizes.

    Returns:
        A tuple (o, lse). The output o has the shape (batch, heads, n_q, d_v) and the dtype of q.
        The log-sum-exp lse (natural logarithm) has the shape (batch, heads, n_q), in float32, or in
        float64 for float64 inputs. A query that attends to no key has output zero and lse -inf.
    """
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=work_dtype(q))
    _run_tiles(forward_tiles, (q, o, lse), (k, v), options)
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of attention, in the shapes and dtypes of q, k and v.

    Args:
        q, k, v, options: Arguments with which `forward` was called.
        o, lse: Output and log-sum-exp that `forward` returned.
        grad_o: Gradient of o, in the shape of o.
    """
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    _run_tiles(backward_tiles, (q, o, lse, grad_o, dq), (k, v, dk, dv), options)
    return dq, dk, dv


def forward_tiles(q, o, lse, k, v, options) -> None:
    """Compute attention tile by tile, and write the results to `o` and `lse`.

    Below, h is the number of key heads, and g is the number of query heads per key head.

    Args:
        q: Queries, of shape (h, g, n_q, d).
        o: Output of shape (h, g, n_q, d_v), which is overwritten.
        lse: Log-sum-exp of shape (h, g, n_q), which is overwritten.
        k: Keys, of shape (h, n_k, d).
        v: Values, of shape (h, n_k, d_v).
        options: `Options` in which both block sizes are given.
    """
    shift, scale, block_q, block_k = options
    work = lse.dtype
    n_k = k.shape[1]
    for i in range(0, q.shape[2], block_q):
        rows = slice(i, i + block_q)
        group_and_rows = q[:, :, rows].shape[1:3]
        q_i = q[:, :, rows].to(work).flatten(1, 2)  # (h, g * rows, d)
        # Keys from `last` on are masked for all queries of the block. If all keys are masked,
        # `last` is below 1.
        last = n_k if shift is None else min(n_k, i + group_and_rows[1] + shift)
        acc = q_i.new_zeros(*q_i.shape[:2], v.shape[2])  # sum of p v so far
        m = acc.new_full((*acc.shape[:2], 1), torch.finfo(work).min)  # maximum so far
        total = torch.zeros_like(m)  # sum of p so far
        for j in range(0, last, block_k):
            k_j, v_j = (x[:, j : min(j + block_k, last)].to(work) for x in (k, v))
            s = torch.baddbmm(m, q_i, k_j.mT, beta=0, alpha=scale)  # (h, g * rows, columns)
            if shift is not None and j + k_j.shape[1] > i + shift + 1:
                hidden = s.new_ones(group_and_rows[1], k_j.shape[1], dtype=torch.bool).triu(
                    i + shift - j + 1
                )
                s.unflatten(1, group_and_rows).masked_fill_(hidden, -math.inf)
            new_m = torch.maximum(m, s.amax(-1, keepdim=True))
            p, rescale = _exp_(s.sub_(new_m)), _exp_(m.sub_(new_m))
            total.mul_(rescale).add_(p.sum(-1, keepdim=True))
            # baddbmm is not in place, because FlopCounterMode does not count baddbmm_.
            acc = torch.baddbmm(acc.mul_(rescale), p, v_j)
            m = new_m
        lse[:, :, rows] = m.add_(total.log()).view_as(lse[:, :, rows])
        # The clamp affects only rows without keys, because total is at least 1 in all other rows.
        o[:, :, rows] = acc.div_(total.clamp_(min=1)).view_as(o[:, :, rows])


def backward_tiles(q, o, lse, grad_o, dq, k, v, dk, dv, options) -> None:
    """Compute the gradients of attention tile by tile, and write them to `dq`, `dk` and `dv`.

    Below, h is the number of key heads, and g is the number of query heads per key head. A tile has
    keys as rows and queries as columns. With this layout, the matrix products that compute dK and
    dV need no transposed tile.

    Args:
        q, dq: Queries and their gradient, of shape (h, g, n_q, d). `dq` is overwritten.
        o, grad_o: Output and its gradient, of shape (h, g, n_q, d_v).
        lse: Log-sum-exp of each row of scores, of shape (h, g, n_q).
        k, dk: Keys and their gradient, of shape (h, n_k, d). `dk` is overwritten.
        v, dv: Values and their gradient, of shape (h, n_k, d_v). `dv` is overwritten.
        options: `Options` in which both block sizes are given.
    """
    shift, scale, block_q, block_k = options
    work = lse.dtype
    delta = (grad_o.to(work) * o).sum(-1)  # D = rowsum(dO * O) = rowsum(dP * P), (h, g, n_q)
    dq_sum = torch.zeros_like(q, dtype=work, memory_format=torch.contiguous_format)
    for j in range(0, k.shape[1], block_k):
        k_j, v_j = (x[:, j : j + block_k].to(work) for x in (k, v))
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        # Start at the first query that attends to key j.
        for i in range(0 if shift is None else max(0, j - shift), q.shape[2], block_q):
            rows = slice(i, i + block_q)
            # (h, g * rows, ...)
            q_i, do_i = (x[:, :, rows].to(work).flatten(1, 2) for x in (q, grad_o))
            # (h, 1, g * rows)
            lse_i, delta_i = (x[:, :, rows].flatten(1, 2).unsqueeze(1) for x in (lse, delta))
            # (h, columns, g * rows)
            p = _exp_(torch.baddbmm(lse_i, k_j, q_i.mT, beta=-1, alpha=scale))
            if shift is not None and j + k_j.shape[1] > i + shift + 1:
                group, n = q[:, :, rows].shape[1:3]
                hidden = p.new_ones(k_j.shape[1], n, dtype=torch.bool).tril(j - i - shift - 1)
                p.unflatten(2, (group, n)).masked_fill_(hidden.unsqueeze(1), 0)
                del hidden
            dv_j = torch.baddbmm(dv_j, p, do_i)
            ds = torch.baddbmm(delta_i, v_j, do_i.mT, beta=-1).mul_(p)  # dS = P * (dP - D)
            dk_j = torch.baddbmm(dk_j, ds, q_i, alpha=scale)
            dq_i = dq_sum[:, :, rows]
            dq_i.add_(torch.bmm(ds.mT, k_j).view_as(dq_i), alpha=scale)
        dk[:, j : j + block_k], dv[:, j : j + block_k] = dk_j, dv_j
    dq.copy_(dq_sum)


def with_blocks(options: Options, q: Tensor, k: Tensor) -> Options:
    """Return a copy of the options in which default block sizes replace None.

    A tile contains `block_q` queries of each of the query heads that share a key head. Therefore,
    the more query heads share a key head, the smaller is the default of `block_q`.

    Args:
        options: Options whose block sizes may be None.
        q: Queries, of shape (batch, heads, n_q, d).
        k: Keys, of shape (batch, kv_heads, n_k, d).
    """
    block_q = options.block_q or max(1, BLOCK * k.shape[1] // max(1, q.shape[1]))
    return options._replace(block_q=block_q, block_k=options.block_k or BLOCK)


def heads_at_once(q: Tensor, k: Tensor, options: Options) -> int:
    """Return the number of key heads, counted over the whole batch, that are processed at a time.

    The number depends only on the shapes, the block sizes and the type of device, so that attention
    in a single thread needs the same bytes on every machine. If attention runs in several threads,
    the threads divide these heads among themselves.

    Args:
        q: Queries, of shape (batch, heads, n_q, d).
        k: Keys, of shape (batch, kv_heads, n_k, d).
        options: `Options` in which both block sizes are given.
    """
    (batch, heads, n_q), (kv_heads, n_k) = q.shape[:3], k.shape[1:3]
    tile = heads // max(1, kv_heads) * min(options.block_q, n_q) * min(options.block_k, n_k)
    at_once = max(MIN_HEADS_AT_ONCE, TILE_ELEMENTS.get(q.device.type, 2**24) // max(1, tile))
    return max(1, min(batch * kv_heads, at_once))


def split_heads(queries: tuple, keys: tuple, size: int) -> Iterator[list[Tensor]]:
    """Split all tensors by heads, and yield one list of tensors per group of heads.

    A group consists of up to `size` key heads, counted over the whole batch, and the query heads
    that share them. The list of a group has the part of each tensor in `queries` that belongs to
    the group, and then the part of each tensor in `keys`. Below, h is the number of key heads in
    the group, and g is the number of query heads per key head. The parts are views, but a tensor is
    copied first if its batch and its heads cannot be merged into one dimension.

    Args:
        queries: Tensors of shape (batch, heads, n_q, ...). In a group they have the shape (h, g,
            n_q, ...).
        keys: Tensors of shape (batch, kv_heads, n_k, ...). In a group they have the shape (h, n_k,
            ...).
        size: Number of key heads per group. The last group may have fewer.
    """
    (batch, heads), kv_heads = queries[0].shape[:2], keys[0].shape[1]
    flat = [x.reshape(batch * kv_heads, heads // max(1, kv_heads), *x.shape[2:]) for x in queries]
    flat += [x.reshape(batch * kv_heads, *x.shape[2:]) for x in keys]
    for start in range(0, batch * kv_heads, size):
        yield [x[start : start + size] for x in flat]


def _run_tiles(tiles: Callable, queries: tuple, keys: tuple, options: Options) -> None:
    """Run `forward_tiles` or `backward_tiles` on all heads, in several threads if that is faster.

    The threads divide the heads that a single thread would process at a time, so several threads
    use no more memory than one.
    """
    q, k = queries[0], keys[0]
    options = with_blocks(options, q, k)
    at_once = heads_at_once(q, k, options)
    count = threads.thread_count(q, q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2], at_once)
    threads.run_parts(
        lambda *part: tiles(*part, options), split_heads(queries, keys, at_once // count), count
    )


def _exp_(x: Tensor) -> Tensor:
    """Compute exp in place as 2^(x * log2(e)), because on a CPU exp2 needs a quarter of exp's time.

    x is the difference from the maximum or the log-sum-exp. It is near zero wherever the
    exponential is not negligible, so multiplying it by log2(e) loses little precision. In contrast,
    FlashAttention's kernels multiply log2(e) into the scale of the scores, which rounds large
    scores.
    """
    return x.mul_(LOG2_E).exp2_()


def work_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to compute for an input x: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
