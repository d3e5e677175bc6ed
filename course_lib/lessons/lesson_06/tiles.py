"""Attention of one head, from all scores at once and in tiles of queries and keys.

The default arguments of `fold` and `backward_in_tiles` are right. Other arguments introduce a
mistake.
"""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from course_lib.teaching.exercises import draw_case


def attention(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Compute standard attention of one head, with all scores in memory at once.

    Returns:
        The output, of shape (n, d), and the log-sum-exp of the scores, of shape (n,), for n queries
        of d features.
    """
    scores = q @ k.T * q.shape[1] ** -0.5
    return [scores.softmax(1) @ v, scores.logsumexp(1)]


Step = Callable[..., Tensor]  # the computation in one line of a loop


def fold(
    tiles: Iterable[tuple[Tensor, Tensor]],
    *,
    start: float = -math.inf,
    of_rows: Step = lambda scores: scores.amax(1, keepdim=True),
    larger: Step = torch.maximum,
    factor: Step = lambda old, new: (old - new).exp(),
    weigh: Step = lambda scores, new: (scores - new).exp(),
    total: Step = lambda old, shrink, added: old * shrink + added,
    output: Step = lambda old, shrink, added: old * shrink + added,
    result: Callable = lambda o, total, largest: (o / total, largest + total.log()),
) -> list[Tensor]:
    """Compute attention of a block of n queries with an online softmax, tile by tile.

    Args:
        tiles: One pair per key block: the scores, of shape (n, keys), and the values, of shape
            (keys, d).
        start, of_rows, larger, factor, weigh, total, output, result: Steps of the online softmax: a
            number to start from, and functions. The defaults are right, and other values introduce
            a mistake.

    Returns:
        The output, of shape (n, d), and the log-sum-exp, of shape (n,).
    """
    largest, sums, o = torch.tensor(start), torch.tensor(0.0), torch.tensor(0.0)
    for scores, value in tiles:
        new = larger(largest, of_rows(scores))
        shrink, weights = factor(largest, new), weigh(scores, new)
        o = output(o, shrink, weights @ value)
        sums, largest = total(sums, shrink, weights.sum(1, keepdim=True)), new
    found, lse = result(o, sums, largest)
    return [found, lse.flatten()]


def forward_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, block_q: int, block_k: int, **mistake: Any
) -> list[Tensor]:
    """Compute attention of one head in tiles of queries and keys, optionally with a mistake.

    Args:
        q, k, v: Queries, keys and values, each of shape (length, d).
        block_q, block_k: Number of queries and of keys per tile.
        mistake: Arguments of `fold` that introduce a mistake. Without them, the result is right.

    Returns:
        The output, of shape (n, d), and the log-sum-exp, of shape (n,), for n queries.
    """
    blocks = list(zip(k.split(block_k), v.split(block_k), strict=True))
    parts = [
        fold(((rows @ key.T * q.shape[1] ** -0.5, value) for key, value in blocks), **mistake)
        for rows in q.split(block_q)
    ]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def backward_in_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    block_q: int,
    block_k: int,
    *,
    weigh: Step = lambda scores, lse: (scores - lse).exp(),
    gradient: Step = lambda p, dp, d: p * (dp - d),
    adds: tuple[bool, bool, bool] = (True, True, True),
) -> list[Tensor]:
    """Compute the gradients of attention in tiles of queries and keys, optionally with a mistake.

    Args:
        q, k, v: Queries, keys and values, each of shape (length, d). k and v may have another
            length than q.
        o, grad_o: Output of attention and its gradient, with the shape of q.
        lse: Log-sum-exp of each query's scores, of shape (n,).
        block_q, block_k: Number of queries and of keys per tile.
        weigh: Function that returns the probabilities P from the scores and `lse`.
        gradient: Function that returns dS from P, dP and D, the row sums of dO ∘ O.
        adds: For each of dQ, dK and dV, whether a tile adds its part of the gradient. False is a
            mistake, because the tile then overwrites the parts of earlier tiles.

    Returns:
        dQ, dK and dV, with the shapes of q, k and v.
    """
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for keys in torch.arange(len(k)).split(block_k):
        for rows in torch.arange(len(q)).split(block_q):
            p = weigh(q[rows] @ k[keys].T * scale, lse[rows, None])
            ds = gradient(p, grad_o[rows] @ v[keys].T, dots[rows]) * scale
            parts = (rows, ds @ k[keys]), (keys, ds.T @ q[rows]), (keys, p.T @ grad_o[rows])
            for whole, (places, part), add in zip(found, parts, adds, strict=True):
                whole[places] = whole[places] * add + part
    return found


def _draw_shift(rng: random.Random) -> float:
    return rng.uniform(0, 1)


def _waves(*lengths: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of these lengths with d features between -1 and 1, equal on every machine."""
    shift = draw_case(0.0, _draw_shift)
    return [
        torch.linspace(place + shift, place + shift + 40 * n, n * d, dtype=dtype).sin().view(n, d)
        for place, n in enumerate(lengths)
    ]


def large_and_small(
    queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one head with very large and very small scores.

    For some queries, all scores are near 1000 or −1000. For other queries, the scores rise or fall
    by hundreds from the first key to the last. The tensors have 16 features and are equal on every
    machine. All numbers are small multiples of 1/16, so that matrix products are exact in TF32,
    too.
    """
    waves = _waves(queries, keys, keys, d=16, dtype=torch.float32)
    q, k, v = ((x * 24).round() / 16 for x in waves)
    k[:, 0], k[:, 1] = 4.0, (torch.arange(keys) - keys // 2) / 8
    every = torch.arange(queries) % 6
    q[:, 0] = torch.tensor([0.0, 0.0, 0.0, 1024.0, -1024.0, 1024.0])[every]
    q[:, 1] = torch.tensor([0.0, 512.0, -512.0, 0.0, 0.0, -512.0])[every]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def one_head(queries: int, keys: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v, o, lse and a gradient of o for the attention of one head.

    The tensors are equal on every machine. Every fifth query has scores of 1000 and more.

    Args:
        queries, keys: Number of queries and of keys.
        d: Head size.
        dtype: dtype of all tensors.
    """
    waves = _waves(queries, keys, keys, queries, d=d, dtype=dtype)
    q, k, v, grad_o = (x * 1.5 for x in waves)
    q[::5] *= 400
    return q, k, v, *attention(q, k, v), grad_o
