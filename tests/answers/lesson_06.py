"""Answers to the exercises of lesson 06: right ones, and wrong ones with what they are told."""

import math
from functools import partial

import numpy
import torch

from course_lib.lessons.lesson_06.tiles import reference_backward, reference_forward


def in_blocks(
    scores,
    block,
    *,
    step=1,
    start=-math.inf,
    of_rows=lambda part: part.amax(1),
    larger=torch.maximum,
    keep=True,
    factor=lambda old, new: (old - new).exp(),
    result=lambda largest, logarithm: largest + logarithm,
):
    largest, total = scores.new_full(scores.shape[:1], start), scores.new_zeros(len(scores))
    for part in scores.split(block, dim=1)[::step]:
        new = larger(largest, of_rows(part))
        total = total * factor(largest, new) + (part - new[:, None]).exp().sum(1)
        largest = new if keep else largest
    return result(largest, total.log())


def whole_blocks(scores, block):
    return in_blocks(scores[:, : scores.shape[1] // block * block], block)


def padded(scores, block):
    missing = -scores.shape[1] % block
    return in_blocks(torch.nn.functional.pad(scores, (0, missing), value=-math.inf), block)


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


def one_loop(q, k, v, block_q, block_k):
    """Right numbers, with all queries at once: (n, block_k) scores."""
    return reference_forward(q, k, v, len(q), block_k)


def twice(function):
    """Right numbers, with the products of the case once more."""

    def answer(*case):
        function(*case)
        return function(*case)

    return answer


def whole_forward(q, k, v, *blocks):
    """Right numbers, through N x N and without a kernel."""
    scores = q @ k.T * q.shape[1] ** -0.5
    return scores.softmax(1) @ v, torch.logsumexp(scores, 1)


def times(function, place, factor):
    """One of its results is wrong by a factor."""

    def answer(*case):
        found = list(function(*case))
        found[place] = found[place] * factor
        return tuple(found)

    return answer


def padded_queries(q, k, v, block_q, block_k):
    """Computes whole blocks of queries, as a kernel does."""
    whole = torch.nn.functional.pad(q, (0, 0, 0, -len(q) % block_q))
    return tuple(x[: len(q)] for x in reference_forward(whole, k, v, block_q, block_k))


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
    found = reference_backward(q, k, v, o, lse, grad_o, block_q, block_k)
    del kept
    return found


def queries_outside(q, k, v, o, lse, grad_o, block_q, block_k):
    """The other order: one block of queries at a time, all key blocks inside."""
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    parts, sizes = [], (block_q, block_k)
    for start in range(0, len(q), block_q):
        rows = slice(start, start + block_q)
        dq, more_k, more_v = reference_backward(
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


def kernel(
    new=lambda largest, scores: torch.maximum(largest, scores.amax(1)),
    shrink=lambda old, new: (old - new).exp(),
    output=lambda o, shrink, added: o * shrink + added,
    beyond=-math.inf,
):
    """The lesson's kernel, line by line and without matrix products; one line may be wrong.

    `beyond` is the score of the places after the last key.
    """

    def run(q, k, v):
        n, missing = len(q), -len(q) % 16
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        blocks = [instance(query, k, v, n) for query in q.split(16)]
        return tuple(torch.cat(each)[:n] for each in zip(*blocks, strict=True))

    def instance(query, k, v, n):
        o, total, largest = 0, 0, torch.full((16,), -math.inf)
        for start in range(0, len(k), 16):
            scores = (query[:, None] * k[start : start + 16]).sum(2) * query.shape[1] ** -0.5
            scores[:, max(0, n - start) :] = beyond
            largest, old = new(largest, scores), largest
            factor, weights = shrink(old, largest), (scores - largest[:, None]).exp()
            o = output(o, factor[:, None], (weights[:, :, None] * v[start : start + 16]).sum(1))
            total = total * factor + weights.sum(1)
        return o / total[:, None], largest + total.log()

    return run


def causal_tiles(
    queries,
    keys,
    block_q,
    block_k,
    *,
    last=lambda first, block_q, queries: min(first + block_q, queries),
    seen=lambda last, queries, keys: max(0, last + keys - queries),
    rounded=lambda n, d: -(-n // d),
):
    """Count the tiles up to the keys that the last query of each block sees."""
    lasts = [last(first, block_q, queries) for first in range(0, queries, block_q)]
    return sum(rounded(seen(each, queries, keys), block_k) for each in lasts)


def over_the_row(q, k, lse):
    weights = (q @ k.T / q.shape[1] ** 0.5).exp()
    return weights / weights.sum(1, keepdim=True)


def probabilities(q, k, lse):
    return (q @ k.T / q.shape[1] ** 0.5 - lse[:, None]).exp()


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "log_sum_exp": (
        [
            *(in_blocks, padded, partial(in_blocks, step=-1), of_transposed, in_python),
            lambda scores, block: in_blocks(scores, block).double(),
        ],
        [
            (partial(in_blocks, larger=lambda old, new: new), "this block alone"),
            (partial(in_blocks, keep=False), "still −∞ at the end"),
            (partial(in_blocks, start=-100.0), "or at another number"),
            (partial(in_blocks, result=lambda largest, log: log), "returned log ℓ"),
            (whole_blocks, "left out the last block"),
            (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` read more"),
            (
                lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]),
                "`sort` read more",
            ),
            (row_by_row, "`max` read more than one block"),
            (two_passes, "One pass is enough"),
            (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
            lambda scores, block: torch.logsumexp(scores, 1),
            (partial(in_blocks, factor=lambda old, new: 1), "do not rescale the old sum"),
            (partial(in_blocks, factor=lambda old, new: (new - old).exp()), "exp(old − new)"),
            (partial(in_blocks, factor=lambda old, new: 0), "loses the sum of the earlier blocks"),
            (partial(in_blocks, of_rows=torch.max), "one maximum for all rows"),
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
        [reference_forward, keys_outside, padded_queries],
        [
            (partial(reference_forward, mistake="no maximum"), "You keep no maximum"),
            (partial(reference_forward, mistake="starts at 0"), "starts at 0"),
            (partial(reference_forward, mistake="maximum of the tile"), "of this tile alone"),
            (partial(reference_forward, mistake="one maximum for all rows"), "for all rows"),
            (partial(reference_forward, mistake="sum not rescaled"), "rescale the old sum"),
            (partial(reference_forward, mistake="output not rescaled"), "rescale the old output"),
            (partial(reference_forward, mistake="last tile"), "only the last tile"),
            (partial(reference_forward, mistake="not divided"), "did not divide"),
            (partial(reference_forward, mistake="softmax of the tile"), "1 in every tile"),
            (partial(reference_forward, mistake="scale forgotten"), "lack the scale"),
            (partial(reference_forward, mistake="scaled twice"), "by d. Divide"),
            (partial(reference_forward, mistake="sum returned"), "returned log ℓ"),
            # the first two of three key blocks, and as many keys as queries
            (lambda q, k, v, *blocks: reference_forward(q, k[:48], v[:48], *blocks), "last keys"),
            (lambda q, k, v, *blocks: reference_forward(q, k[:40], v[:40], *blocks), "last keys"),
            (lambda *case: [x.numpy() for x in reference_forward(*case)], "as two tensors"),
            (one_loop, "`(256, 32)` has more scores than a tile"),
            (whole_forward, "N × N"),
            (twice(reference_forward), "4.0 products"),
            (
                lambda q, k, v, block_q, block_k: reference_forward(q, k, v, block_k, block_q),
                "Did you exchange block_q and block_k?",
            ),
            (lambda *case: reference_forward(*case[:3], 1, 1), "operators for 128 tiles"),
            (forward_by_numpy, "Use `@` on tensors"),
            (last_queries_left_out(reference_forward), "those of the last queries"),
            (
                lambda q, k, v, *blocks: reference_forward(q * (16 / len(k)) ** 0.5, k, v, *blocks),
                "root of the number of keys",
            ),
            (times(reference_forward, 0, 1.5), "the output is not"),
            (times(reference_forward, 1, 1.5), "the log-sum-exp is not"),
        ],
    ),
    "backward": (
        [reference_backward, queries_outside, in_two_passes],
        [
            (partial(reference_backward, mistake="no D"), "subtracts D"),
            (partial(reference_backward, mistake="D of the tile"), "over one key block"),
            (partial(reference_backward, mistake="softmax of the tile"), "1 in every tile"),
            (partial(reference_backward, mistake="S not scaled"), "S lacks the scale"),
            (partial(reference_backward, mistake="scale forgotten"), "dS must contain it"),
            (partial(reference_backward, mistake="dQ overwritten"), "only the last key block"),
            (partial(reference_backward, mistake="dK and dV overwritten"), "last block of queries"),
            (partial(reference_backward, mistake="all overwritten"), "only the last tile"),
            (partial(reference_backward, mistake="dV overwritten"), "your dV has only"),
            (partial(reference_backward, mistake="dK overwritten"), "your dK has only"),
            (partial(reference_backward, mistake="D outside"), "Subtract it from dP"),
            (partial(reference_backward, mistake="D added"), "You add D"),
            (partial(reference_backward, mistake="diagonal"), "the diagonal"),
            (
                lambda *case: reference_backward(*case[:6], *case[:5:-1]),
                "Did you exchange block_q and block_k?",
            ),
            (lambda *case: reference_backward(*case[:6], 1, 1), "operators for 128 tiles"),
            (partial(reference_backward, mistake="divided"), "Subtract first"),
            (times(reference_backward, 0, 1.5), "dQ"),
            (times(reference_backward, 2, 1.5), "dV"),
            (times(reference_backward, 1, 4.0), "dK, by a factor of √d. It is too large"),
            (times(reference_backward, 2, 0.25), "dV, by a factor of √d. It is too small"),
            (by_autograd, "N × N"),
            (all_tiles_kept, "N × N"),
            # one loop, over key blocks alone
            (
                lambda q, *case: reference_backward(q, *case[:5], len(q), case[6]),
                "more scores than a tile",
            ),
            (twice(reference_backward), "10.0 products"),
            (lambda *case: tuple(reference_backward(*case)[i] for i in (0, 2, 1)), "wrong order"),
            (lambda *case: tuple(x.numpy() for x in reference_backward(*case)), "three tensors"),
            (lambda *case: reference_backward(*case)[:2], "three tensors"),
            (lambda *case: 3, "three tensors"),
        ],
    ),
    "flops": (
        [{"forward": 4, "backward": 10, "two passes": 14}],
        [
            ({"forward": 2, "backward": 5, "two passes": 7}, "count as two"),
            ({"forward": 4, "backward": 8, "two passes": 14}, "backward computes S again"),
            (
                {"forward": 8, "backward": 10, "two passes": 14},
                "`forward`: Not yet. The number is too large",
            ),
            ({"forward": 4, "backward": 10, "two passes": 10}, "the number for one pass"),
            ({"forward": 4, "backward": 10, "two passes": 12}, "dP only once"),
            ({"forward": 4, "backward": 10, "two passes": 20}, "Only S and dP"),
            (4, "Give a dictionary"),
            ({"forward": 4}, "Give a dictionary"),
        ],
    ),
    "kernel": (
        [kernel()],
        [
            (whole_forward, "products with PyTorch"),
            (wrapped_error, "It raised AttributeError('amax')"),
            (kernel(beyond=0.0), "after the last key"),
            (
                kernel(new=lambda *_: torch.zeros(16), shrink=lambda *_: torch.ones(16)),
                "keeps no maximum",
            ),
            (kernel(new=lambda largest, scores: scores.amax(1)), "the maximum of this key block"),
            (kernel(new=lambda old, scores: torch.maximum(old, scores.max())), "for all rows"),
            (kernel(shrink=lambda *_: torch.ones(16)), "do not rescale the old sum"),
            (kernel(shrink=lambda old, new: (new - old).exp()), "Every number is nan"),
            (kernel(output=lambda o, shrink, added: o * shrink.T + added), "the columns"),
            (kernel(output=lambda o, shrink, added: o + added), "do not rescale the old output"),
            (kernel(output=lambda o, shrink, added: added), "only the last key block"),
            (kernel(output=lambda o, shrink, added: (o + added) * shrink), "only the old output"),
            (kernel(output=lambda o, shrink, added: 2 * (o * shrink + added)), "the output is not"),
            (kernel(shrink=lambda old, new: (old - new).exp() / 2), "log-sum-exp is wrong"),
        ],
    ),
    "causal_tiles": (
        [causal_tiles],
        [
            (lambda q, k, bq, bk: -(-q // bq) * -(-k // bk), "all tiles"),
            (lambda q, k, bq, bk: -(-q // bq) * -(-k // bk) / 2, "tiles on the diagonal"),
            (
                partial(causal_tiles, seen=lambda last, queries, keys: min(last, keys)),
                "bottom right",
            ),
            (
                partial(causal_tiles, seen=lambda last, queries, keys: last + keys - queries),
                "negative number",
            ),
            (partial(causal_tiles, rounded=lambda n, d: n // d), "only in part"),
            (partial(causal_tiles, rounded=lambda n, d: n // d + 1), "one tile too many"),
            (
                partial(causal_tiles, last=lambda first, block_q, _: first + block_q),
                "past the last query",
            ),
            (
                partial(causal_tiles, last=lambda first, *_: first + 1),
                "the first query of each block",
            ),
            (
                partial(causal_tiles, rounded=lambda n, d: -(-max(0, n - 1) // d)),
                "the key on the diagonal",
            ),
            (lambda *case: causal_tiles(*case) if case[0] <= case[1] else None, "returns None for"),
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
    "grouped_bytes": (
        [84_410_368],
        [
            (84_017_152, "own log-sum-exps"),
            (41_943_040, "Give bytes"),
            (83_886_080, "left out the log-sum-exp"),
            (84_148_224, "It is fp32"),
            (134_742_016, "for K and V. They have 8."),
            (134_217_728, "missing, too"),
            (84_934_656, "two numbers per row"),
            (50_855_936, "left out the output"),
            (168_296_448, "In bf16 it is two"),
            (84.410368, "in MB"),
            (80.5, "in MiB"),
        ],
    ),
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
