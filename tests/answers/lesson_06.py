"""Answers to the exercises of lesson 06: right ones, and wrong ones with what they are told."""

import math
from functools import partial

import numpy
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.lessons.lesson_06.exercises import (
    BACKWARD_MISTAKES,
    FORWARD_MISTAKES,
    KERNEL_MISTAKES,
    LOG_SUM_EXP_MISTAKES,
    log_sum_exp,
    say,
    tile_count,
)
from course_lib.lessons.lesson_06.tiles import (
    attention,
    backward_in_tiles,
    fold,
    forward_in_tiles,
)


def made(compute, mistakes):
    """Wrong answers of a table of mistakes, each with its message."""
    return [(partial(compute, **mistake), say(name)) for name, mistake in mistakes.items()]


def last_block_first(scores, block):
    blocks = reversed(scores.split(block, 1))
    return fold((part, torch.ones(part.shape[1], 1)) for part in blocks)[1]


def padded(scores, block):
    return log_sum_exp(pad(scores, (0, -scores.shape[1] % block), value=-math.inf), block)


def of_transposed(scores, block):
    return torch.stack([part.logsumexp(0) for part in scores.T.split(block)]).logsumexp(0)


def shifted(scores, block, largest):
    parts = [(part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)]
    return largest + sum(parts).log()


def clamped(scores, block):
    parts = [part.clamp(-80, 80).exp().sum(1) for part in scores.split(block, dim=1)]
    return sum(parts).log()


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


def twice(function):
    """Right numbers, with the products of the case once more."""

    def answer(*case):
        function(*case)
        return function(*case)

    return answer


def whole_forward(q, k, v, *blocks):
    return attention(q, k, v)


def times(function, place, factor):
    """One of its results is wrong by a factor."""

    def answer(*case):
        found = list(function(*case))
        found[place] = found[place] * factor
        return tuple(found)

    return answer


def padded_queries(q, k, v, block_q, block_k):
    """Computes whole blocks of queries, as a kernel does."""
    whole = pad(q, (0, 0, 0, -len(q) % block_q))
    return tuple(x[: len(q)] for x in forward_in_tiles(whole, k, v, block_q, block_k))


def forward_by_numpy(q, k, v, block_q, block_k):
    """Right numbers, with products that PyTorch does not see."""
    outputs, log_sums = [], []
    for rows in q.numpy():
        scores = k.numpy() @ rows * q.shape[1] ** -0.5
        lse = numpy.logaddexp.reduce(scores)
        outputs.append(numpy.exp(scores - lse) @ v.numpy())
        log_sums.append(lse)
    return torch.tensor(numpy.array(outputs)), torch.tensor(numpy.array(log_sums))


def last_queries_left_out(function):
    """Zeros for the queries of an incomplete block."""

    def answer(q, *case):
        found = [x.clone() for x in function(q, *case)]
        for each in found:
            each[len(q) // case[2] * case[2] :] = 0
        return tuple(found)

    return answer


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
    found = (inputs[0] @ inputs[1].T * q.shape[1] ** -0.5).softmax(1) @ inputs[2]
    return torch.autograd.grad(found, inputs, grad_o)


def all_tiles_kept(q, k, v, o, lse, grad_o, block_q, block_k):
    """Right numbers, while the scores of all tiles are live."""
    kept = [rows @ keys.T for rows in q.split(block_q) for keys in k.split(block_k)]
    found = backward_in_tiles(q, k, v, o, lse, grad_o, block_q, block_k)
    del kept
    return found


def queries_outside(q, k, v, o, lse, grad_o, block_q, block_k):
    """The other order: one block of queries at a time, all key blocks inside."""
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    parts, sizes = [], (block_q, block_k)
    for start in range(0, len(q), block_q):
        rows = slice(start, start + block_q)
        dq, more_k, more_v = backward_in_tiles(
            q[rows], k, v, o[rows], lse[rows], grad_o[rows], *sizes
        )
        parts.append(dq)
        dk, dv = dk + more_k, dv + more_v
    return torch.cat(parts), dk, dv


def wrapped_error(q, k, v):
    """Fails as Triton's interpreter does, with an error inside an error."""
    try:
        raise AttributeError("amax")
    except AttributeError as error:
        raise RuntimeError(repr(error)) from error


def kernel(q, k, v, **mistake):
    """What the lesson's kernel computes, without PyTorch's products as far as a mode sees."""
    with _disable_current_modes():
        found = forward_in_tiles(pad(q, (0, 0, 0, -len(q) % 16)), k, v, 16, 16, **mistake)
    return [x[: len(q)] for x in found]


def sees_padding(q, k, v):
    return kernel(q, *(pad(x, (0, 0, 0, -len(x) % 16)) for x in (k, v)))


def over_the_row(q, k, lse):
    weights = (q @ k.T / q.shape[1] ** 0.5).exp()
    return weights / weights.sum(1, keepdim=True)


def probabilities(q, k, lse):
    return (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp()


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "log_sum_exp": (
        [
            *(log_sum_exp, padded, last_block_first, of_transposed, in_python),
            lambda scores, block: log_sum_exp(scores, block).double(),
        ],
        [
            *made(log_sum_exp, LOG_SUM_EXP_MISTAKES),
            (lambda scores, block: log_sum_exp(scores[:, :21], block), "left out the last block"),
            (lambda scores, block: torch.full((7,), -math.inf), "still −∞ at the end"),
            (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` read more"),
            (
                lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]),
                "`sort` read more",
            ),
            (row_by_row, "`max` read more than one block"),
            (two_passes, "One pass is enough"),
            (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
            lambda scores, block: torch.logsumexp(scores, 1),
            (lambda scores, block: in_python(scores, 23), "`tolist` read more than one block"),
            (through_numpy, "`numpy` read more than one block"),
            (
                lambda scores, block: through_numpy(torch.tensor(numpy.asarray(scores)), block),
                "`__array__` read more than one block",
            ),
            (clamped, "Your numbers are not"),
            (lambda scores, block: 3, "one number per row"),
        ],
    ),
    "forward": (
        [forward_in_tiles, keys_outside, padded_queries],
        [
            *made(forward_in_tiles, FORWARD_MISTAKES),
            (lambda q, *case: forward_in_tiles(4 * q, *case), "lack the scale"),
            (lambda q, *case: forward_in_tiles(q / 4, *case), "by d. Divide"),
            # the first two of three key blocks, and as many keys as queries
            (lambda q, k, v, *blocks: forward_in_tiles(q, k[:48], v[:48], *blocks), "last keys"),
            (lambda q, k, v, *blocks: forward_in_tiles(q, k[:40], v[:40], *blocks), "last keys"),
            (lambda *case: [x.numpy() for x in forward_in_tiles(*case)], "as two tensors"),
            (
                lambda q, k, v, block_q, block_k: forward_in_tiles(q, k, v, len(q), block_k),
                "`(256, 32)` has more scores than a tile",
            ),
            (whole_forward, "N × N"),
            (twice(forward_in_tiles), "4.0 products"),
            (
                lambda q, k, v, block_q, block_k: forward_in_tiles(q, k, v, block_k, block_q),
                "Did you exchange block_q and block_k?",
            ),
            (lambda *case: forward_in_tiles(*case[:3], 1, 1), "operators for 128 tiles"),
            (forward_by_numpy, "Use `@` on tensors"),
            (last_queries_left_out(forward_in_tiles), "those of the last queries"),
            (
                lambda q, k, v, *blocks: forward_in_tiles(q * (16 / len(k)) ** 0.5, k, v, *blocks),
                "root of the number of keys",
            ),
            (times(forward_in_tiles, 0, 1.5), "the output is not"),
            (times(forward_in_tiles, 1, 1.5), "the log-sum-exp is not"),
        ],
    ),
    "backward": (
        [backward_in_tiles, queries_outside, in_two_passes],
        [
            *made(backward_in_tiles, BACKWARD_MISTAKES),
            (
                lambda *case: backward_in_tiles(*case[:6], *case[:5:-1]),
                "Did you exchange block_q and block_k?",
            ),
            (lambda *case: backward_in_tiles(*case[:6], 1, 1), "operators for 128 tiles"),
            (times(backward_in_tiles, 0, 1.5), "dQ"),
            (times(backward_in_tiles, 2, 1.5), "dV"),
            (times(backward_in_tiles, 1, 4.0), "dK, by a factor of √d. It is too large"),
            (times(backward_in_tiles, 2, 0.25), "dV, by a factor of √d. It is too small"),
            (by_autograd, "N × N"),
            (all_tiles_kept, "N × N"),
            # one loop, over key blocks alone
            (
                lambda q, *case: backward_in_tiles(q, *case[:5], len(q), case[6]),
                "more scores than a tile",
            ),
            (twice(backward_in_tiles), "10.0 products"),
            (lambda *case: tuple(backward_in_tiles(*case)[i] for i in (0, 2, 1)), "wrong order"),
            (lambda *case: tuple(x.numpy() for x in backward_in_tiles(*case)), "three tensors"),
            (lambda *case: backward_in_tiles(*case)[:2], "three tensors"),
            (lambda *case: 3, "three tensors"),
        ],
    ),
    "flops": (
        [],
        [
            (
                {"forward": 8, "backward": 10, "two passes": 14},
                "`forward`: Not yet. The number is too large",
            ),
            (4, "Give a dictionary"),
            ({"forward": 4}, "Give a dictionary"),
        ],
    ),
    "kernel": (
        [kernel],
        [
            (whole_forward, "products with PyTorch"),
            (wrapped_error, "It raised AttributeError('amax')"),
            (sees_padding, "after the last key"),
            *made(kernel, KERNEL_MISTAKES),
            (times(kernel, 0, 2), "the output is not"),
            (
                partial(kernel, factor=lambda old, new: (old - new).exp() / 2),
                "log-sum-exp is wrong",
            ),
        ],
    ),
    "causal_tiles": (
        [tile_count()],
        [
            (lambda *case: tile_count()(*case) if case[0] <= case[1] else None, "returns None for"),
            lambda q, k, bq, bk: 36,
        ],
    ),
    "probabilities": (
        [
            probabilities,
            lambda q, k, lse: probabilities(q.double(), k.double(), lse.double()),
            lambda q, k, lse: (q.mul_(0.25) @ k.T - lse[:, None]).exp(),
        ],
        [
            (lambda q, k, lse: probabilities(k, q, lse), "do not sum to 1"),
            (lambda q, k, lse: (q @ k.T).softmax(1), "are wrong"),
            (lambda q, k, lse: lse, "matrix"),
            (lambda q, k, lse: (q @ k.T - lse[:, None]).exp(), "lack the scale"),
            (lambda q, k, lse: (q @ k.T / 4 - lse).exp(), "wrong axis"),
            (lambda q, k, lse: q @ k.T / 4 - lse[:, None], "logarithms"),
            (lambda q, k, lse: (q @ k.T / 4).softmax(1), "did not compute them from `lse`"),
            (lambda q, k, lse: (q @ k.T / 4).exp() / lse[:, None].exp(), "∞ / ∞ is nan"),
            (over_the_row, "∞ / ∞ is nan"),
        ],
    ),
    "grouped_bytes": ([], [(84.410368, "in MB"), (80.5, "in MiB")]),
}

ONE_NUMBER = "one number in place of one a row: the first block broadcasts it"

#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "forward": {
        "True → False in `for key, value in zip(k.split(block_k), v.split(block_k), strict=True):`": (
            "keys and values have the same number of blocks"
        ),
        "0 → -1 in `log_sums.append((largest + total.log())[:, 0])`": "there is one column",
    },
    "log_sum_exp": {
        "1 → 0 in `largest = scores.new_full(scores.shape[:1], float('-inf'))`": ONE_NUMBER,
        "1 → 0 in `total = scores.new_zeros(scores.shape[:1])`": ONE_NUMBER,
    },
}
