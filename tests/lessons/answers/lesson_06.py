"""Right and wrong answers to the exercises of lesson 06, with the expected messages."""

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
    MERGE_MISTAKES,
    MERGED_LSE_MISTAKES,
    log_sum_exp,
    merge_parts,
    say,
)
from course_lib.lessons.lesson_06.tiles import attention, backward_in_tiles, forward_in_tiles


def answers_with(compute, mistakes):
    """Wrong answers of a table of mistakes, each with its message."""
    return [(partial(compute, **mistake), say(name)) for name, mistake in mistakes.items()]


def padded(scores, block):
    return log_sum_exp(pad(scores, (0, -scores.shape[1] % block), value=-math.inf), block)


def shifted(scores, block, largest):
    parts = [(part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)]
    return largest + sum(parts).log()


def through_lists(scores, block, size=None):
    """Read the scores as Python's lists, `size` or `block` columns at once."""
    parts = [torch.tensor(part.tolist()) for part in scores.split(size or block, 1)]
    return log_sum_exp(torch.cat(parts, 1), block)


def two_passes(scores, block):
    largest = torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0)
    return shifted(scores, block, largest)


def through_numpy(scores, block):
    """Whole rows at once, in NumPy, which no dispatch mode counts."""
    return torch.from_numpy(numpy.logaddexp.reduce(scores.numpy(), axis=1))


def scaled_result(function, place, factor):
    """One of its results is wrong by a factor."""
    return lambda *case: [x * (factor if i == place else 1) for i, x in enumerate(function(*case))]


def hidden_products(q, k, v, *blocks, **mistake):
    """Right numbers, with matrix products that no dispatch mode counts."""
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


def wrapped_error(q, k, v):
    """Fails as Triton's interpreter does, with an error inside an error."""
    try:
        raise AttributeError("amax")
    except AttributeError as error:
        raise RuntimeError(repr(error)) from error


def kernel(q, k, v, **mistake):
    """What the lesson's kernel computes, with whole blocks of queries."""
    found = hidden_products(pad(q, (0, 0, 0, -len(q) % 16)), k, v, 16, 16, **mistake)
    return [x[: len(q)] for x in found]


def with_the_first(o1, lse1, o2, lse2):
    """As many implementations of ring attention do; wrong where the first part has no key."""
    share = (lse2 - lse1).sigmoid()[:, None]
    return o1 - share * (o1 - o2), lse1 - torch.nn.functional.logsigmoid(lse1 - lse2)


def by_exponentials(o1, lse1, o2, lse2):
    one, two = lse1.exp(), lse2.exp()
    return (o1 * one[:, None] + o2 * two[:, None]) / (one + two)[:, None], (one + two).log()


def relative_to_the_first(o1, lse1, o2, lse2):
    """Right where both log-sum-exps are near each other, or one of them is −∞."""
    ratio = (lse2 - lse1).exp()
    lse = lse1 + ratio.log1p()
    o = (o1 + ratio[:, None] * o2) / (1 + ratio)[:, None]
    alone = lse1 == -torch.inf
    return torch.where(alone[:, None], o2, o), torch.where(alone, lse2, lse)


def one_dtype_only(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return torch.diag((lse1 - lse).exp()) @ o1 + torch.diag((lse2 - lse).exp()) @ o2, lse


def as_a_column(o1, lse1, o2, lse2):
    o, lse = merge_parts(o1, lse1, o2, lse2)
    return o, lse[:, None]


def with_lse(wrong):
    return lambda o1, lse1, o2, lse2: (merge_parts(o1, lse1, o2, lse2)[0], wrong(lse1, lse2))


def in_dtype_of_output(o1, lse1, o2, lse2):
    return merge_parts(o1, lse1.to(o1.dtype), o2, lse2.to(o2.dtype))


#: check -> right answers
RIGHT = {
    "log_sum_exp": [log_sum_exp, padded, lambda *case: through_lists(*case).double()],
    "forward": [forward_in_tiles],
    "backward": [backward_in_tiles, in_two_passes],
    "kernel": [kernel],
    "merge": [merge_parts, lambda *parts: list(merge_parts(*parts))],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "log_sum_exp": [
        *answers_with(log_sum_exp, LOG_SUM_EXP_MISTAKES),
        (lambda scores, block: log_sum_exp(scores[:, :21], block), "left out the last block"),
        (lambda scores, block: torch.full((7,), -math.inf), "still −∞ at the end"),
        (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` read more"),
        (two_passes, "One pass is enough"),
        (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
        (
            lambda scores, block: through_lists(scores, block, 23),
            "`tolist` read more than one block",
        ),
        (through_numpy, "`numpy` read more than one block"),
        (lambda x, block: through_numpy(torch.tensor(numpy.asarray(x)), block), "`__array__` read"),
        (lambda scores, block: log_sum_exp(scores.clamp(-80, 80), block), "Your numbers are not"),
        (lambda scores, block: 3, "one number per row"),
    ],
    "forward": [
        *answers_with(forward_in_tiles, FORWARD_MISTAKES),
        (lambda q, *case: forward_in_tiles(4 * q, *case), "lack the scale"),
        (lambda q, *case: forward_in_tiles(q / 4, *case), "by d. Divide"),
        # the first two of three key blocks
        (lambda q, k, v, *blocks: forward_in_tiles(q, k[:48], v[:48], *blocks), "last keys"),
        (lambda *case: [x.numpy() for x in forward_in_tiles(*case)], "as two tensors"),
        (lambda q, k, v, bq, bk: forward_in_tiles(q, k, v, len(q), bk), "`(256, 32)` has more"),
        (lambda *case: attention(*case[:3]), "N × N"),
        (
            lambda *case: (forward_in_tiles(*case), forward_in_tiles(*case))[1],
            "4.0 matrix products",
        ),
        (lambda q, k, v, bq, bk: forward_in_tiles(q, k, v, bk, bq), "Did you exchange block_q and"),
        (lambda *case: forward_in_tiles(*case[:3], 1, 1), "operators for 128 tiles"),
        (hidden_products, "Use `@` on tensors"),
        (last_queries_left_out, "those of the last queries"),
        (
            lambda q, k, *more: forward_in_tiles(q * (16 / len(k)) ** 0.5, k, *more),
            "number of keys",
        ),
        (scaled_result(forward_in_tiles, 0, 1.5), "the output is not"),
        (scaled_result(forward_in_tiles, 1, 1.5), "the log-sum-exp is not"),
    ],
    "backward": [
        *answers_with(backward_in_tiles, BACKWARD_MISTAKES),
        (lambda *case: backward_in_tiles(*case[:6], *case[:5:-1]), "Did you exchange block_q and"),
        (scaled_result(backward_in_tiles, 0, 1.5), "dQ"),
        (scaled_result(backward_in_tiles, 1, 4.0), "dK, by a factor of √d. It is too large"),
        (scaled_result(backward_in_tiles, 2, 0.25), "dV, by a factor of √d. It is too small"),
        (by_autograd, "N × N"),
        # one loop, over key blocks alone
        (lambda q, *case: backward_in_tiles(q, *case[:5], len(q), case[6]), "more scores than a"),
        (
            lambda *case: (backward_in_tiles(*case), backward_in_tiles(*case))[1],
            "10.0 matrix products",
        ),
        (lambda *case: tuple(backward_in_tiles(*case)[i] for i in (0, 2, 1)), "wrong order"),
        (lambda *case: tuple(x.numpy() for x in backward_in_tiles(*case)), "three tensors"),
        (lambda *case: 3, "three tensors"),
    ],
    "kernel": [
        (attention, "products with PyTorch"),
        (wrapped_error, "It raised AttributeError('amax')"),
        (
            lambda q, *kv: kernel(q, *(pad(x, (0, 0, 0, -len(x) % 16)) for x in kv)),
            "after the last key",
        ),
        *answers_with(kernel, KERNEL_MISTAKES),
        (scaled_result(kernel, 0, 2), "the output is not"),
        (partial(kernel, factor=lambda old, new: (old - new).exp() / 2), "log-sum-exp is wrong"),
    ],
    "merge": [
        *((partial(merge_parts, weigh=weigh), say(name)) for name, weigh in MERGE_MISTAKES.items()),
        *((with_lse(wrong), say(name)) for name, wrong in MERGED_LSE_MISTAKES.items()),
        (by_exponentials, "scores of 1000 and −1000"),
        (with_the_first, "no key of one part"),
        (relative_to_the_first, "larger than those of the other by 2000"),
        (one_dtype_only, "Convert the outputs"),
        (as_a_column, "with the shape of lse1"),
        (in_dtype_of_output, "Do not convert"),
        (with_lse(lambda one, two: torch.logaddexp(one, two) + 1), "is wrong. The sum"),
        (scaled_result(merge_parts, 0, 1.5), "Which share of the sum"),
        (lambda *parts: 3, "with the shape of o1"),
    ],
}

#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "merge": {
        "a sum in the other order": ["torch.logaddexp(lse1, lse2) → torch.logaddexp(lse2, lse1)"]
    },
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
