"""Answers to the exercises of lesson 06: right ones, and wrong ones with what they are told."""

import math
from functools import partial

import numpy
import torch
from torch.nn.functional import pad

from course_lib._torch.modes import disable_current_modes
from course_lib.lessons.lesson_06.exercises import (
    BACKWARD_MISTAKES,
    FORWARD_MISTAKES,
    KERNEL_MISTAKES,
    LOG_SUM_EXP_MISTAKES,
    log_sum_exp,
    say,
)
from course_lib.lessons.lesson_06.tiles import attention, backward_in_tiles, fold, forward_in_tiles


def made(compute, mistakes):
    """Wrong answers of a table of mistakes, each with its message."""
    return [(partial(compute, **mistake), say(name)) for name, mistake in mistakes.items()]


def last_block_first(scores, block):
    blocks = reversed(scores.split(block, 1))
    return fold((part, torch.ones(part.shape[1], 1)) for part in blocks)[1]


def padded(scores, block):
    return log_sum_exp(pad(scores, (0, -scores.shape[1] % block), value=-math.inf), block)


def shifted(scores, block, largest):
    parts = [(part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)]
    return largest + sum(parts).log()


def row_by_row(scores, block):
    return torch.stack([shifted(row[None], block, row.max()[None])[0] for row in scores])


def in_python(scores, block):
    """Blocks of a row as Python's lists."""
    found = []
    for row in range(len(scores)):
        largest, total = -math.inf, 0.0
        for start in range(0, scores.shape[1], block):
            part = scores[row, start : start + block].tolist()
            new = max(largest, *part)
            total = total * math.exp(largest - new) + sum(math.exp(each - new) for each in part)
            largest = new
        found.append(largest + math.log(total))
    return torch.tensor(found)


def two_passes(scores, block):
    largest = torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0)
    return shifted(scores, block, largest)


def through_numpy(scores, block):
    """Whole rows at once, which no mode for operators sees."""
    return torch.from_numpy(numpy.logaddexp.reduce(scores.numpy(), axis=1))


def keys_outside(q, k, v, block_q, block_k):
    """The other order: one key block at a time, all blocks of queries inside."""
    o, total = torch.zeros_like(q), q.new_zeros(len(q))
    largest = q.new_full((len(q),), -math.inf)
    for key, value in zip(k.split(block_k), v.split(block_k), strict=True):
        for start in range(0, len(q), block_q):
            rows = slice(start, start + block_q)
            scores = q[rows] @ key.T / q.shape[1] ** 0.5
            new = torch.maximum(largest[rows], scores.amax(1))
            shrink, weights = (largest[rows] - new).exp(), (scores - new[:, None]).exp()
            total[rows] = total[rows] * shrink + weights.sum(1)
            o[rows] = o[rows] * shrink[:, None] + weights @ value
            largest[rows] = new
    return o / total[:, None], largest + total.log()


def times(function, place, factor):
    """One of its results is wrong by a factor."""
    return lambda *case: [x * (factor if i == place else 1) for i, x in enumerate(function(*case))]


def unseen(q, k, v, *blocks, **mistake):
    """Right numbers, with products that no mode sees."""
    with disable_current_modes():
        return forward_in_tiles(q, k, v, *blocks, **mistake)


def last_queries_left_out(q, k, v, block_q, block_k):
    """Zeros for the queries of an incomplete block."""
    whole = len(q) // block_q * block_q
    found = forward_in_tiles(q, k, v, block_q, block_k)
    return [torch.cat([x[:whole], 0 * x[whole:]]) for x in found]


def in_two_passes(q, k, v, o, lse, grad_o, block_q, block_k):
    """One pass for dQ and one for dK and dV, as the library's kernels do."""
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)

    def tile(rows, keys):
        p = (q[rows] @ k[keys].T * scale - lse[rows, None]).exp()
        return p, p * (grad_o[rows] @ v[keys].T - dots[rows]) * scale

    def blocks(length, size):
        return [slice(start, start + size) for start in range(0, length, size)]

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in blocks(len(q), block_q):
        for keys in blocks(len(k), block_k):
            dq[rows] += tile(rows, keys)[1] @ k[keys]
    for keys in blocks(len(k), block_k):
        for rows in blocks(len(q), block_q):
            p, ds = tile(rows, keys)
            dv[keys] += p.T @ grad_o[rows]
            dk[keys] += ds.T @ q[rows]
    return dq, dk, dv


def by_autograd(q, k, v, o, lse, grad_o, block_q, block_k):
    """Right numbers, through N x N."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*inputs)[0], inputs, grad_o)


def all_tiles_kept(q, k, v, o, lse, grad_o, block_q, block_k):
    """Right numbers, while the scores of all tiles are live."""
    kept = [rows @ keys.T for rows in q.split(block_q) for keys in k.split(block_k)]
    found = backward_in_tiles(q, k, v, o, lse, grad_o, block_q, block_k)
    del kept
    return found


def wrapped_error(q, k, v):
    """Fails as Triton's interpreter does, with an error inside an error."""
    try:
        raise AttributeError("amax")
    except AttributeError as error:
        raise RuntimeError(repr(error)) from error


def kernel(q, k, v, **mistake):
    """What the lesson's kernel computes, with whole blocks of queries."""
    found = unseen(pad(q, (0, 0, 0, -len(q) % 16)), k, v, 16, 16, **mistake)
    return [x[: len(q)] for x in found]


def probabilities(q, k, lse):
    return (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp()


#: check -> right answers
RIGHT = {
    "log_sum_exp": [
        *(log_sum_exp, padded, last_block_first, in_python),
        lambda scores, block: log_sum_exp(scores, block).double(),
    ],
    "forward": [forward_in_tiles, keys_outside],
    "backward": [backward_in_tiles, in_two_passes],
    "kernel": [kernel],
    "probabilities": [
        probabilities,
        lambda q, k, lse: probabilities(q.double(), k.double(), lse.double()),
        lambda q, k, lse: (q.mul_(0.25) @ k.T - lse[:, None]).exp(),
    ],
}

#: check -> wrong answers, each alone or with a part of what it is told
WRONG = {
    "log_sum_exp": [
        *made(log_sum_exp, LOG_SUM_EXP_MISTAKES),
        (lambda scores, block: log_sum_exp(scores[:, :21], block), "left out the last block"),
        (lambda scores, block: torch.full((7,), -math.inf), "still −∞ at the end"),
        (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` read more"),
        (lambda x, block: shifted(x, block, x.sort().values[:, -1]), "`sort` read more"),
        (row_by_row, "`max` read more than one block"),
        (two_passes, "One pass is enough"),
        (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
        lambda scores, block: torch.logsumexp(scores, 1),
        (lambda scores, block: in_python(scores, 23), "`tolist` read more than one block"),
        (through_numpy, "`numpy` read more than one block"),
        (lambda x, block: through_numpy(torch.tensor(numpy.asarray(x)), block), "`__array__` read"),
        (lambda scores, block: padded(scores.clamp(-80, 80), block), "Your numbers are not"),
        (lambda scores, block: 3, "one number per row"),
    ],
    "forward": [
        *made(forward_in_tiles, FORWARD_MISTAKES),
        (lambda q, *case: forward_in_tiles(4 * q, *case), "lack the scale"),
        (lambda q, *case: forward_in_tiles(q / 4, *case), "by d. Divide"),
        # the first two of three key blocks, and as many keys as queries
        (lambda q, k, v, *blocks: forward_in_tiles(q, k[:48], v[:48], *blocks), "last keys"),
        (lambda q, k, v, *blocks: forward_in_tiles(q, k[:40], v[:40], *blocks), "last keys"),
        (lambda *case: [x.numpy() for x in forward_in_tiles(*case)], "as two tensors"),
        (lambda q, k, v, bq, bk: forward_in_tiles(q, k, v, len(q), bk), "`(256, 32)` has more"),
        (lambda *case: attention(*case[:3]), "N × N"),
        (lambda *case: (forward_in_tiles(*case), forward_in_tiles(*case))[1], "4.0 products"),
        (lambda q, k, v, bq, bk: forward_in_tiles(q, k, v, bk, bq), "Did you exchange block_q and"),
        (lambda *case: forward_in_tiles(*case[:3], 1, 1), "operators for 128 tiles"),
        (unseen, "Use `@` on tensors"),
        (last_queries_left_out, "those of the last queries"),
        (
            lambda q, k, *more: forward_in_tiles(q * (16 / len(k)) ** 0.5, k, *more),
            "number of keys",
        ),
        (times(forward_in_tiles, 0, 1.5), "the output is not"),
        (times(forward_in_tiles, 1, 1.5), "the log-sum-exp is not"),
    ],
    "backward": [
        *made(backward_in_tiles, BACKWARD_MISTAKES),
        (lambda *case: backward_in_tiles(*case[:6], *case[:5:-1]), "Did you exchange block_q and"),
        (lambda *case: backward_in_tiles(*case[:6], 1, 1), "operators for 128 tiles"),
        (times(backward_in_tiles, 0, 1.5), "dQ"),
        (times(backward_in_tiles, 2, 1.5), "dV"),
        (times(backward_in_tiles, 1, 4.0), "dK, by a factor of √d. It is too large"),
        (times(backward_in_tiles, 2, 0.25), "dV, by a factor of √d. It is too small"),
        (by_autograd, "N × N"),
        (all_tiles_kept, "N × N"),
        # one loop, over key blocks alone
        (lambda q, *case: backward_in_tiles(q, *case[:5], len(q), case[6]), "more scores than a"),
        (lambda *case: (backward_in_tiles(*case), backward_in_tiles(*case))[1], "10.0 products"),
        (lambda *case: tuple(backward_in_tiles(*case)[i] for i in (0, 2, 1)), "wrong order"),
        (lambda *case: tuple(x.numpy() for x in backward_in_tiles(*case)), "three tensors"),
        (lambda *case: backward_in_tiles(*case)[:2], "three tensors"),
        (lambda *case: 3, "three tensors"),
    ],
    "flops": [({"forward": 8, "backward": 10, "two passes": 14}, "number is too large")],
    "kernel": [
        (attention, "products with PyTorch"),
        (wrapped_error, "It raised AttributeError('amax')"),
        (
            lambda q, *kv: kernel(q, *(pad(x, (0, 0, 0, -len(x) % 16)) for x in kv)),
            "after the last key",
        ),
        *made(kernel, KERNEL_MISTAKES),
        (times(kernel, 0, 2), "the output is not"),
        (partial(kernel, factor=lambda old, new: (old - new).exp() / 2), "log-sum-exp is wrong"),
    ],
    "causal_tiles": [lambda *case: 36],
    "probabilities": [
        (lambda q, k, lse: probabilities(k, q, lse), "do not sum to 1"),
        (lambda q, k, lse: (q @ k.T).softmax(1), "are wrong"),
        (lambda q, k, lse: lse, "matrix"),
        (lambda q, k, lse: (q @ k.T - lse[:, None]).exp(), "lack the scale"),
        (lambda q, k, lse: (q @ k.T / 4 - lse).exp(), "wrong axis"),
        (lambda q, k, lse: q @ k.T / 4 - lse[:, None], "logarithms"),
        (lambda q, k, lse: (q @ k.T / 4).softmax(1), "did not compute them from `lse`"),
        (lambda q, k, lse: (q @ k.T / 4).exp() / lse[:, None].exp(), "∞ / ∞ is nan"),
        (lambda q, k, lse: (p := (q @ k.T / 4).exp()) / p.sum(1, keepdim=True), "∞ / ∞ is nan"),
    ],
}

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "forward": {
        "keys and values have the same number of blocks": [
            "True → False in `for key, value in zip(k.split(block_k), v.split(block_k), strict=True):`"
        ],
        "there is one column": ["0 → -1 in `log_sums.append((largest + total.log())[:, 0])`"],
    },
    "log_sum_exp": {
        "one number in place of one a row: the first block broadcasts it": [
            "1 → 0 in `largest = scores.new_full(scores.shape[:1], float('-inf'))`",
            "1 → 0 in `total = scores.new_zeros(scores.shape[:1])`",
        ]
    },
}
