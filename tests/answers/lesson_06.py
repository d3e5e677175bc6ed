"""Answers to the exercises of lesson 06: right ones, and wrong ones with what they are told."""

import functools

import torch

from course_lib.lessons.lesson_06.checks import reference_backward


def in_blocks(scores, block, rescale=True, step=1):
    largest, total = (
        scores.new_full(scores.shape[:1], float("-inf")),
        scores.new_zeros(scores.shape[:1]),
    )
    for part in scores.split(block, dim=1)[::step]:
        new = torch.maximum(largest, part.amax(1))
        factor = {True: (largest - new).exp(), False: 1, -1: (new - largest).exp(), None: 0}
        total = total * factor[rescale] + (part - new[:, None]).exp().sum(1)
        largest = new
    return largest + total.log()


def padded(scores, block):
    return in_blocks(
        torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=float("-inf")), block
    )


def of_transposed(scores, block):
    return torch.stack([part.logsumexp(0) for part in scores.T.split(block)]).logsumexp(0)


def shifted(scores, block, largest):
    return (
        largest
        + sum((part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)).log()
    )


def row_by_row(scores, block):
    return torch.stack([shifted(row[None], block, row.max()[None])[0] for row in scores])


def two_passes(scores, block):
    return shifted(
        scores, block, torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0)
    )


def gradients(q, k, v, o, lse, grad_o, block, slip=""):
    return reference_backward(q, k, v, o, lse, grad_o, block, slip)


def by_autograd(q, k, v, o, lse, grad_o, block):
    """Right numbers, through N x N."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = (inputs[0] @ inputs[1].T * q.shape[1] ** -0.5).softmax(1) @ inputs[2]
    return torch.autograd.grad(found, inputs, grad_o)


def scores_twice(q, k, v, o, lse, grad_o, block):
    """Seven products a panel: S once for dS, and once more for dV."""
    dq, dk, dv = gradients(q, k, v, o, lse, grad_o, block)
    for start in range(0, len(k), block):
        panel = slice(start, start + block)
        dv[panel] = (q @ k[panel].T * q.shape[1] ** -0.5 - lse[:, None]).exp().T @ grad_o
    return dq, dk, dv


def queries_outside(q, k, v, o, lse, grad_o, block):
    """The other order: a block of queries at a time, all of the keys in panels inside."""
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    parts = []
    for start in range(0, len(q), block):
        rows = slice(start, start + block)
        dq, more_k, more_v = gradients(q[rows], k, v, o[rows], lse[rows], grad_o[rows], block)
        parts.append(dq)
        dk, dv = dk + more_k, dv + more_v
    return torch.cat(parts), dk, dv


def off_by(place):
    def answer(*case):
        found = list(gradients(*case))
        found[place] = found[place] * 1.5
        return tuple(found)

    return answer


def by_hand(q, k, v):
    """What a right kernel returns, in torch."""
    scores = q @ k.T * q.shape[1] ** -0.5
    return scores.softmax(1) @ v, torch.logsumexp(scores, 1)


def causal_tiles(queries, keys, block_q, block_k, aligned="bottom right"):
    count, more = 0, keys - queries if aligned == "bottom right" else 0
    for first in range(0, queries, block_q):
        count += -(-(min(first + block_q, queries) + more) // block_k)
    return count


def seen_by_some(queries, keys, block_q, block_k):
    """The mask itself, tile by tile."""
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return sum(bool(part.any()) for rows in mask.split(block_q) for part in rows.split(block_k, 1))


def probabilities(q, k, lse):
    return (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp()


def normalised(q, k, lse):
    weights = probabilities(q, k, lse)
    return weights / weights.sum(1, keepdim=True)


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "log_sum_exp": (
        [in_blocks, padded, functools.partial(in_blocks, step=-1), of_transposed],
        [
            (
                lambda scores, block: shifted(scores, block, scores.amax(1)),
                "`amax` took more than a block",
            ),
            (
                lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]),
                "`sort` took more",
            ),
            *((row_by_row, "`max` took more than a block"), (two_passes, "second pass")),
            (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
            lambda scores, block: torch.logsumexp(scores, 1),
            (functools.partial(in_blocks, rescale=False), "not rescaled"),
            (functools.partial(in_blocks, rescale=-1), "exp(old − new)"),
            (functools.partial(in_blocks, rescale=None), "become 0"),
            (lambda scores, block: 3, "One number a row"),
        ],
    ),
    "backward": (
        [gradients, queries_outside],
        [
            (functools.partial(gradients, slip="no D"), "subtracts D"),
            (functools.partial(gradients, slip="D of the panel"), "not the panel"),
            (functools.partial(gradients, slip="softmax of the panel"), "sums to 1 in every panel"),
            (functools.partial(gradients, slip="scale forgotten"), "dS has it too"),
            (functools.partial(gradients, slip="dQ overwritten"), "the last panel only"),
            (by_autograd, "N × N"),
            (scores_twice, "7.0 products"),
            *((off_by(0), "dQ"), (off_by(2), "dV")),
            (lambda *case: gradients(*case)[:2], "Three tensors"),
            (lambda *case: 3, "Three tensors"),
        ],
    ),
    "flops": (
        [{"forward": 4, "backward": 10, "two walks": 14}],
        [
            ({"forward": 2, "backward": 5, "two walks": 7}, "count as two"),
            ({"forward": 4, "backward": 8, "two walks": 14}, "P has to be computed again"),
            {"forward": 4, "backward": 10, "two walks": 12},
            (4, "A dictionary is wanted"),
            ({"forward": 4}, "A dictionary is wanted"),
        ],
    ),
    "kernel": (
        [by_hand],
        [
            (
                lambda q, k, v: (by_hand(q, k, v)[0], by_hand(q, k, v)[1] + 1),
                "log-sum-exp is wrong",
            ),
            (lambda q, k, v: (by_hand(q, k, v)[0] * 2, by_hand(q, k, v)[1]), "the output is not"),
        ],
    ),
    "causal_tiles": (
        [causal_tiles, seen_by_some],
        [
            (lambda q, k, bq, bk: -(-q // bq) * -(-k // bk), "every tile"),
            (lambda q, k, bq, bk: -(-q // bq) * -(-k // bk) / 2, "diagonal's tiles"),
            (functools.partial(causal_tiles, aligned="top left"), "bottom right"),
            lambda q, k, bq, bk: 36,
        ],
    ),
    "probabilities": (
        [probabilities],
        [
            (lambda q, k, lse: q @ k.T, "not sum to 1"),
            (lambda q, k, lse: (q @ k.T).softmax(1), "differ"),
            (lambda q, k, lse: lse, "matrix"),
            (lambda q, k, lse: (q @ k.T - lse[:, None]).exp(), "lack their scale"),
            (lambda q, k, lse: (q @ k.T / 4 - lse).exp(), "a column"),
            (lambda q, k, lse: q @ k.T / 4 - lse[:, None], "logarithms"),
            (lambda q, k, lse: (q @ k.T / 4).softmax(1), "do not come from `lse`"),
            (normalised, "do not come from `lse`"),
        ],
    ),
    "grouped_bytes": (
        [84_410_368],
        [(83_886_080, "missing"), (84_148_224, "fp32"), (84.410368, "in MB")],
    ),
}

ONE_NUMBER = "one number in place of one a row: the first block broadcasts it"

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "log_sum_exp": {
        "1 → 0 in `largest = scores.new_full(scores.shape[:1], float('-inf'))`": ONE_NUMBER,
        "1 → 0 in `total = scores.new_zeros(scores.shape[:1])`": ONE_NUMBER,
    },
}
