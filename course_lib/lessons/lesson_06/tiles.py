"""Attention of one head in tiles of queries and keys, forward and backward."""

import math

import torch
from torch import Tensor


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, block_q: int, block_k: int, mistake: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one head, (n, d) and (n,), tile by tile.

    `mistake` names a mistake that learners make, which is then included.
    """
    power = {"scale forgotten": 0.0, "scaled twice": -1.0}.get(mistake, -0.5)
    scale = q.shape[1] ** power
    outputs, log_sums = [], []
    for query in q.split(block_q):
        o, total = torch.zeros_like(query), query.new_zeros(len(query), 1)
        start = 0.0 if mistake in ("starts at 0", "no maximum") else -math.inf
        largest = query.new_full((len(query), 1), start)
        for key, value in zip(k.split(block_k), v.split(block_k), strict=True):
            scores = query @ key.T * scale
            highest = scores.amax(1, keepdim=True)
            if mistake == "one maximum for all rows":
                highest = scores.max().expand_as(highest)
            new = highest if mistake == "maximum of the tile" else torch.maximum(largest, highest)
            new = largest if mistake == "no maximum" else new
            weights, shrink = (scores - new).exp(), (largest - new).exp()
            if mistake == "softmax of the tile":
                weights, shrink = scores.softmax(1), torch.ones_like(shrink)
            added = weights @ value
            kept = {"output not rescaled": o, "last tile": torch.zeros_like(o)}
            o = kept.get(mistake, o * shrink) + added
            old = total if mistake == "sum not rescaled" else total * shrink
            total, largest = old + weights.sum(1, keepdim=True), new
        whole = mistake in ("not divided", "softmax of the tile")
        outputs.append(o if whole else o / total)
        log_sums.append((total.log() if mistake == "sum returned" else largest + total.log())[:, 0])
    return torch.cat(outputs), torch.cat(log_sums)


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    block_q: int,
    block_k: int,
    mistake: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of one head, (n, d) each, computed tile by tile.

    `mistake` names a mistake that learners make, which is then included.
    """
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keep_q = mistake not in ("dQ overwritten", "all overwritten")
    keep_k, keep_v = (
        mistake not in ("dK and dV overwritten", "all overwritten", f"{name} overwritten")
        for name in ("dK", "dV")
    )
    for start in range(0, len(k), block_k):
        keys = slice(start, start + block_k)
        for first in range(0, len(q), block_q):
            rows = slice(first, first + block_q)
            scores = q[rows] @ k[keys].T * (1 if mistake == "S not scaled" else scale)
            p = (scores - lse[rows, None]).exp()
            if mistake == "softmax of the tile":
                p = scores.softmax(1)
            if mistake == "divided":
                p = scores.exp() / lse[rows, None].exp()
            dp = grad_o[rows] @ v[keys].T
            ds = _gradient_of_softmax(p, dp, dots[rows], mistake)
            ds = ds * (1 if mistake == "scale forgotten" else scale)
            dv[keys] = dv[keys] * keep_v + p.T @ grad_o[rows]
            dk[keys] = dk[keys] * keep_k + ds.T @ q[rows]
            dq[rows] = dq[rows] * keep_q + ds @ k[keys]
    return dq, dk, dv


def _gradient_of_softmax(p: Tensor, dp: Tensor, dots: Tensor, mistake: str) -> Tensor:
    if mistake == "D outside":
        return p * dp - dots
    if mistake == "diagonal":
        return p * (1 - p) * dp
    if mistake == "D of the tile":
        dots = (p * dp).sum(1, keepdim=True)
    return p * (dp - dots * {"no D": 0, "D added": -1}.get(mistake, 1))
