"""The exercises of lesson 06 in tiles of queries and keys: forward and backward of one head."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib._torch.modes import TorchDispatchMode
from course_lib._torch.tensors import tensors_in
from course_lib.lessons.work import WorkLimit
from course_lib.memory import MemoryMeter
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    draw_case,
    exercise,
    not_answered,
    right,
    wrong,
)

#: Blocks of the checks' small case, which divide neither its 40 queries nor its 56 keys.
_BLOCKS = 16, 24


class _TileRecorder(TorchDispatchMode):
    """A mode that records results that hold more scores than one tile has.

    A result with an axis of length `d` is not made of scores, and neither is a vector.
    """

    def __init__(self, block_q: int, block_k: int, d: int) -> None:
        super().__init__()
        self.tile, self.d = block_q * block_k, d
        self.too_large: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            axes = [size for size in tensor.shape if size > 1]
            if len(axes) > 1 and self.d not in axes and math.prod(axes) > self.tile:
                self.too_large.append(tuple(tensor.shape))
        return result


#: Operators that an answer may run on the 128 tiles of the case of `_products`.
_OPERATORS = 50_000


def _products(function: Callable, case: tuple[Tensor, ...]) -> float:
    """Return how many products of 2 N² d FLOPs a function with right results computes.

    Args:
        function: The reader's function.
        case: Its arguments except the block sizes, with 256 queries and keys of 8 features. They
            are computed in tiles of 16 x 32.

    Raises:
        WrongAnswer: More scores than a tile has are live at once, the block sizes are exchanged,
            the tiles are much smaller than asked, or the products are not PyTorch's.
    """
    (n, d), blocks = case[0].shape, (16, 32)
    slow = text(
        "The numbers are right, but your code runs more than {limit:,} operators for 128 tiles."
        " Compute all scores of a tile with one product.",
        limit=_OPERATORS,
    )
    with MemoryMeter() as meter, WorkLimit(_OPERATORS, slow):
        function(*case, *blocks)
    with _TileRecorder(*blocks, d) as recorder:
        function(*case, *blocks)
    if meter.peak_bytes >= n * n * 4:
        raise WrongAnswer(
            "The numbers are right, but N × N numbers are live at once. Compute the scores of"
            " one tile, use them, and release them before the next tile.",
            exact=True,
        )
    if recorder.too_large:
        raise WrongAnswer(
            text(
                "The numbers are right, but a tensor of shape {shape} has more scores than a tile"
                " of (block_q, block_k). Write two loops, one over blocks of queries and one over"
                " blocks of keys.",
                shape=f"`{recorder.too_large[0]}`",
            ),
            exact=True,
        )
    if not meter.flops:
        raise WrongAnswer(
            "The numbers are right, but no product was computed by PyTorch. Use `@` on tensors, so"
            " that the products can be counted.",
            exact=True,
        )
    _check_block_order(function, case, meter.flops / n)
    return meter.flops / (2 * n * n * d)


def _check_block_order(
    function: Callable, case: tuple[Tensor, ...], flops_per_query: float
) -> None:
    """Raise `WrongAnswer` if a function exchanges its block sizes.

    With 48 queries and blocks of 64 queries and 32 keys, a tile has 48 x 32 scores. If the blocks
    are exchanged, it has 32 x 64. An answer that pads the queries to 64 is not judged, since its
    tiles are as large.
    """
    (q, k, v, *rest), queries, blocks = case, 48, (64, 32)
    few = (q[:queries], k, v, *(x[:queries] for x in rest))
    with MemoryMeter() as meter, _TileRecorder(queries, blocks[1], q.shape[1]) as recorder:
        function(*few, *blocks)
    if recorder.too_large and meter.flops <= queries * flops_per_query:
        raise WrongAnswer(
            text(
                "The numbers are right, but with block_q = 64, block_k = 32 and 48 queries, a"
                " tensor of shape {shape} has more scores than a tile. Did you exchange block_q"
                " and block_k?",
                shape=f"`{recorder.too_large[0]}`",
            ),
            exact=True,
        )


# Exercise 2: forward in tiles
# -----------------------------------------------------------------------------------------------


def _draw_shift(rng: random.Random) -> float:
    return rng.uniform(0, 1)


def large_and_small(
    queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of one head with 16 features, equal on every machine.

    Scores of some rows are all near 1000 or −1000, and those of others rise or fall by hundreds
    from the first key to the last. All numbers are multiples of 1/16, small enough for products
    that are exact in TF32 too.
    """
    d, shift = 16, draw_case(0.0, _draw_shift)
    q, k, v = (
        (torch.linspace(start, start + 40 * n, n * d).sin() * 24).round().view(n, d) / 16
        for start, n in ((shift, queries), (1.0 + shift, keys), (2.0 + shift, keys))
    )
    k[:, 0], k[:, 1] = 4.0, (torch.arange(keys) - keys // 2) / 8
    every = torch.arange(queries) % 6
    q[:, 0] = torch.tensor([0.0, 0.0, 0.0, 1024.0, -1024.0, 1024.0])[every]
    q[:, 1] = torch.tensor([0.0, 512.0, -512.0, 0.0, 0.0, -512.0])[every]
    return q.to(dtype), k.to(dtype), v.to(dtype)


_FORWARD_MISTAKES = {
    "no maximum": (
        "You keep no maximum, so `exp` overflows for scores of 8000, and every weight is 0 for"
        " scores of −8000."
    ),
    "starts at 0": (
        "Your running maximum starts at 0 or at another number, so the sum of a row whose scores"
        " are all far below it becomes 0. Start at −∞."
    ),
    "maximum of the tile": (
        "Your new maximum is the maximum of this tile alone. If an earlier tile has a larger one,"
        " the factor overflows. Take the larger of the two."
    ),
    "one maximum for all rows": (
        "You keep one maximum for all rows, so the sum of a row far below it becomes 0. Keep one"
        " maximum per row."
    ),
    "sum not rescaled": "You do not rescale the old sum when the maximum rises.",
    "output not rescaled": (
        "The log-sum-exp is right, but you do not rescale the old output when the maximum rises."
    ),
    "last tile": (
        "The log-sum-exp is right, but your output has only the last tile. Add each tile's part to"
        " the old output."
    ),
    "not divided": (
        "The log-sum-exp is right, but you did not divide the output by the sum at the end."
    ),
    "softmax of the tile": (
        "You took the softmax of each tile, which sums to 1 in every tile. Weights of one row must"
        " sum to 1 over all tiles."
    ),
    "scale forgotten": "Your scores lack the scale 1 / √d.",
    "scaled twice": "You divided the scores by d. Divide them by √d, and only once.",
    "sum returned": (
        "The output is right, but you returned log ℓ. The log-sum-exp is m + log ℓ, because ℓ is"
        " relative to m."
    ),
}


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


@exercise(
    hint=(
        (
            "The outer loop takes a block of queries and starts m at −∞, and ℓ and O at 0. The"
            " inner loop passes over the key blocks and updates all three, as in exercise 1."
        ),
        (
            "Which of m, ℓ and O were computed relative to the old maximum, and so need a factor"
            " when it rises? What remains to be done with O after the last key block?"
        ),
    )
)
def check_forward(function: Any) -> Verdict:
    """Check `function(q, k, v, block_q, block_k)` -> (o, lse) of one head.

    Both must be right in float64, for large scores and for blocks that do not divide the lengths,
    with two products per tile and no more scores at once than a tile has.
    """
    q, k, v = large_and_small(40, 56, torch.float64)
    case = 8 * q, k, v  # scores of ±8000, whose differences overflow in float64 too
    found = function(*(x.clone() for x in case), *_BLOCKS)
    if found is None:
        return not_answered()
    if (
        not isinstance(found, tuple | list)
        or [getattr(x, "numel", int)() for x in found] != [40 * 16, 40]
        or tuple(found[0].shape) != (40, 16)
    ):
        return wrong(
            "Return the output, (n, d), and the log-sum-exps, (n,), as two tensors.", exact=True
        )
    found = found[0], found[1].flatten()
    expected = reference_forward(*case, *_BLOCKS)
    if not all(map(_equal, found, expected)):
        return _wrong_forward(found, expected, case)
    products = _products(function, _one_head(256, 256, 8, torch.float32)[:3])
    if round(products, 2) != 2:
        return wrong(
            text(
                "The numbers are right, but you compute {products:.1f} products of 2 N² d FLOPs."
                " Two are enough.",
                products=products,
            ),
            exact=True,
        )
    return right("Right: two products per tile, and never more scores at once than a tile has.")


def _wrong_forward(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], case: tuple[Tensor, ...]
) -> Verdict:
    for mistake, message in _FORWARD_MISTAKES.items():
        if all(map(_equal, found, reference_forward(*case, *_BLOCKS, mistake))):
            return wrong(message, exact=True)
    q, k, v = case
    for keys in (len(q), len(k) // _BLOCKS[1] * _BLOCKS[1]):
        if all(map(_equal, found, reference_forward(q, k[:keys], v[:keys], *_BLOCKS))):
            return wrong(
                "You left out the last keys. There may be more keys than queries, and the last key"
                " block may be shorter.",
                exact=True,
            )
    whole = len(q) // _BLOCKS[0] * _BLOCKS[0]
    if all(_equal(x[:whole], y[:whole]) for x, y in zip(found, expected, strict=True)):
        return wrong(
            "All rows are right, except those of the last queries. The last block of queries may be"
            " shorter.",
            exact=True,
        )
    scaled = q * (q.shape[1] / len(k)) ** 0.5
    if all(map(_equal, found, reference_forward(scaled, k, v, *_BLOCKS))):
        return wrong(
            "You divided the scores by the root of the number of keys. Divide them by √d, where d"
            " is the number of features.",
            exact=True,
        )
    if _equal(found[1], expected[1]):
        return wrong(
            "The log-sum-exp is right, but the output is not. Multiply the old output by the same"
            " factor as the old sum, and add the product of the weights and V.",
            exact=True,
        )
    if not all(x.isfinite().all() for x in found):
        return wrong(
            "Your code overflows for scores of 8000 and −8000. Look at how you compute the new"
            " maximum."
        )
    if _equal(found[0], expected[0]):
        return wrong("The output is right, but the log-sum-exp is not. It is m + log ℓ.")
    return wrong(
        "The log-sum-exp is wrong. Look at the new maximum and at the factor for the old sum."
    )


# Exercise 3: dQ, dK, dV
# -----------------------------------------------------------------------------------------------

_GRADIENT_MISTAKES = {
    "no D": (
        "dV is right, but dQ and dK are not. The gradient of softmax subtracts D, the row sums"
        " of dO ∘ O."
    ),
    "D of the tile": (
        "dV is right, but dQ and dK are not. You summed D over one key block, but D is the sum"
        " over the whole row. Compute it from dO and O."
    ),
    "softmax of the tile": (
        "All three are wrong, because you took the softmax of each tile, which sums to 1 in every"
        " tile. P is exp(S − lse)."
    ),
    "S not scaled": "All three are wrong, because your S lacks the scale 1 / √d.",
    "scale forgotten": (
        "dV is right, but dQ and dK are √d times too large. S contains the scale, so dS must"
        " contain it, too."
    ),
    "dQ overwritten": (
        "dK and dV are right, but your dQ has only the last key block. Every key block adds to dQ."
    ),
    "dK and dV overwritten": (
        "dQ is right, but your dK and dV have only the last block of queries. Every block of"
        " queries adds to them."
    ),
    "dV overwritten": (
        "dQ and dK are right, but your dV has only the last block of queries. Every block of"
        " queries adds to it."
    ),
    "dK overwritten": (
        "dQ and dV are right, but your dK has only the last block of queries. Every block of"
        " queries adds to it."
    ),
    "D outside": (
        "dV is right, but dQ and dK are not. You subtract D from P ∘ dP. Subtract it from dP, and"
        " multiply the difference by P."
    ),
    "D added": "dV is right, but dQ and dK are not. You add D to dP. Subtract it.",
    "diagonal": (
        "dV is right, but dQ and dK are not. You used only the diagonal of softmax's Jacobian. A"
        " score changes all probabilities of its row."
    ),
    "all overwritten": (
        "All three have only the last tile of their row or column. Every tile adds to dQ, dK and"
        " dV."
    ),
    "divided": (
        "You divide exp(S) by exp(lse), and both overflow for large scores. Subtract first: P"
        " is exp(S − lse)."
    ),
}


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


@exercise(
    hint=(
        (
            "For each tile, compute P from S and lse, then dP and dS. Which quantity belongs to a"
            " whole row, so that it must be computed before the loops?"
        ),
        (
            "Each tile adds to some rows of dQ, and to some rows of dK and dV. Which rows are"
            " these, and into which of the products does the scale enter?"
        ),
    )
)
def check_backward(function: Any) -> Verdict:
    """Check `function(q, k, v, o, lse, grad_o, block_q, block_k)`.

    The gradients must be right in float64, with no more scores at once than a tile has. Five
    products per tile are enough in one pass; two passes need seven.
    """
    case = _one_head(40, 56, 16, torch.float64)
    found = function(*(x.clone() for x in case), *_BLOCKS)
    if found is None or (
        isinstance(found, tuple) and all(isinstance(x, Tensor) and not x.any() for x in found)
    ):
        return not_answered()
    expected = reference_backward(*case, *_BLOCKS)
    problem = _wrong_gradients(found, expected, case)
    if problem is not None:
        return problem
    products = round(_products(function, _one_head(256, 256, 8, torch.float32)), 2)
    if products == 7:
        return right(
            "Right: equal to the exact gradients in float64, in two passes with seven products per"
            " tile. One pass needs five (section 6.5)."
        )
    if products != 5:
        return wrong(
            text(
                "The numbers are right, but you compute {products:.1f} products of 2 N² d FLOPs."
                " Five are enough.",
                products=products,
            ),
            exact=True,
        )
    return right(
        "Right: equal to the exact gradients in float64, with five products per tile and never"
        " more scores at once than a tile has."
    )


def _one_head(queries: int, keys: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v, o, lse and an uneven gradient of o, equal on every machine.

    Every fifth query has scores of 1000 and more.
    """
    shift = draw_case(0.0, _draw_shift)
    q, k, v, grad_o = (
        torch.linspace(start, start + 40 * n, n * d, dtype=dtype).sin().view(n, d) * 1.5
        for start, n in (
            (shift, queries),
            (1.0 + shift, keys),
            (2.0 + shift, keys),
            (3.0 + shift, queries),
        )
    )
    q[::5] *= 400
    scores = q @ k.T * d**-0.5
    return q, k, v, scores.softmax(1) @ v, torch.logsumexp(scores, 1), grad_o


def _wrong_gradients(
    found: Any, expected: tuple[Tensor, ...], case: tuple[Tensor, ...]
) -> Verdict | None:
    shapes = [tuple(x.shape) for x in expected]
    if (
        not isinstance(found, tuple | list)
        or not all(isinstance(x, Tensor) for x in found)
        or [tuple(x.shape) for x in found] != shapes
    ):
        return wrong(
            "Return three tensors dQ, dK and dV, with the shapes of q, k and v.", exact=True
        )
    if all(map(_equal, found, expected)):
        return None
    for mistake, message in _GRADIENT_MISTAKES.items():
        if all(map(_equal, found, reference_backward(*case, *_BLOCKS, mistake))):
            return wrong(message, exact=True)
    if all(any(_equal(one, other) for other in expected) for one in found):
        return wrong("You returned dQ, dK and dV in the wrong order.", exact=True)
    pairs = list(zip(found, expected, strict=True))
    off = [name for name, pair in zip(("dQ", "dK", "dV"), pairs, strict=True) if not _equal(*pair)]
    names = ", ".join(off)
    for power, message in (
        (0.5, "Not right yet: {names}, by a factor of √d. It is too large."),
        (-0.5, "Not right yet: {names}, by a factor of √d. It is too small."),
    ):
        times = case[0].shape[1] ** power
        if all(_equal(one, other) or _equal(one, times * other) for one, other in pairs):
            return wrong(text(message, names=names), exact=True)
    return wrong(text("Not right yet: {names}.", names=names))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other, rtol=1e-6, atol=1e-8, equal_nan=True
    )
