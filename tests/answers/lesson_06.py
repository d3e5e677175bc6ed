"""Answers to the exercises of lesson 06: right ones, and wrong ones with what they are told."""

import functools

import torch


def in_blocks(scores, block, rescale=True, step=1):
    largest, total = scores.new_full(scores.shape[:1], float("-inf")), scores.new_zeros(scores.shape[:1])
    for part in scores.split(block, dim=1)[::step]:
        new = torch.maximum(largest, part.amax(1))
        total = total * ((largest - new).exp() if rescale else 1) + (part - new[:, None]).exp().sum(1)
        largest = new
    return largest + total.log()


def padded(scores, block):
    return in_blocks(torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=float("-inf")), block)


def of_transposed(scores, block):
    return torch.stack([part.logsumexp(0) for part in scores.T.split(block)]).logsumexp(0)


def shifted(scores, block, largest):
    return largest + sum((part - largest[:, None]).exp().sum(1) for part in scores.split(block, dim=1)).log()


def row_by_row(scores, block):
    return torch.stack([shifted(row[None], block, row.max()[None])[0] for row in scores])


def two_passes(scores, block):
    return shifted(scores, block, torch.stack([part.amax(1) for part in scores.split(block, dim=1)]).amax(0))


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
            (lambda scores, block: shifted(scores, block, scores.amax(1)), "`amax` took more than a block"),
            (lambda scores, block: shifted(scores, block, scores.sort(1).values[:, -1]), "`sort` took more"),
            *((row_by_row, "`max` took more than a block"), (two_passes, "second pass")),
            (lambda scores, block: scores.exp().sum(1).log(), "overflow"),
            lambda scores, block: torch.logsumexp(scores, 1),
            functools.partial(in_blocks, rescale=False),
            (lambda scores, block: 3, "One number a row"),
        ],
    ),
    "probabilities": (
        [probabilities],
        [
            *((lambda q, k, lse: q @ k.T, "not sum to 1"), (lambda q, k, lse: (q @ k.T).softmax(1), "differ")),
            *(
                (lambda q, k, lse: lse, "matrix"),
                (lambda q, k, lse: (q @ k.T / 4).softmax(1), "do not come from `lse`"),
            ),
            (normalised, "do not come from `lse`"),
        ],
    ),
    "grouped_bytes": ([84_410_368], [(83_886_080, "missing"), (84_148_224, "fp32"), (84.410368, "in MB")]),
}

_SHAPE = "largest, total = (scores.new_full(scores.shape[:1], float('-inf')), scores.new_zeros(scores.shape[:1]))"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "log_sum_exp": {
        f"1 → 0 in `{_SHAPE}`": "one number in place of one a row: the first block broadcasts it",
        f"1 → 0 in `{_SHAPE}` (2)": "one number in place of one a row: the first block broadcasts it",
    },
}
