"""The exercises of lesson 06."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.labels import say
from course_lib.memory import MemoryMeter
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, not_answered, right, wrong

# Exercise 1: softmax in one pass
# --------------------------------------------------------------------------------------

#: Operators that only move numbers or allocate memory: these may see all scores at once.
_MOVES = (
    "_to_copy",
    "_unsafe_view",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy_",
    "index",
    "index_select",
)
_MAKES = ("new_", "empty", "full", "ones", "zeros")


class _Watched(TorchDispatchMode):
    """A mode that records which operators compute with more than a block of the scores at once.

    It also records which blocks are read, in order.
    """

    def __init__(self, scores: torch.Tensor, block: int) -> None:
        super().__init__()
        self.scores, self.block = scores, block
        self.too_wide: list[str] = []
        self.blocks_read: list[int] = []  # their offsets in the scores

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in _MOVES or name.startswith(_MAKES)):
            for tensor in tensors_in(args):
                self.look(name, tensor)
        return operator(*args, **(kwargs or {}))

    def look(self, name: str, tensor: Tensor) -> None:
        """Record that an operator of this name reads the tensor."""
        if (
            tensor.numel() > len(self.scores) * self.block
            or max(tensor.shape, default=0) > self.block
        ):
            self.too_wide.append(name)
        elif tensor.untyped_storage().data_ptr() == self.scores.untyped_storage().data_ptr():
            if [tensor.storage_offset()] != self.blocks_read[-1:]:
                self.blocks_read.append(tensor.storage_offset())


class _Lists(TorchFunctionMode):
    """A mode that reports `tolist` to a `_Watched`, since no dispatch mode sees it."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self.watched = watched

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.tolist:
            self.watched.look("tolist", args[0])
        return function(*args, **(kwargs or {}))


Factor = Callable[[Tensor, Tensor], Tensor]


def _carried(
    scores: Tensor,
    block: int,
    *,
    start: float = -math.inf,
    factor: Factor = lambda old, new: (old - new).exp(),
    of_rows: Callable[[Tensor], Tensor] = lambda part: part.amax(1),
) -> Tensor:
    """Return the log-sum-exp of each row in one pass; other arguments introduce a mistake."""
    largest, total = scores.new_full(scores.shape[:1], start), scores.new_zeros(len(scores))
    for part in scores.split(block, 1):
        new = torch.maximum(largest, of_rows(part))
        total = total * factor(largest, new) + (part - new[:, None]).exp().sum(1)
        largest = new
    return largest + total.log()


#: Message -> the arguments of `_carried` that introduce the mistake.
_CARRIED: dict[str, dict[str, Any]] = {
    "Your running maximum starts at 0, so a row whose scores are all far below 0 sums up to"
    " nothing. Start it at −∞.": {"start": 0.0},
    "The old sum is not rescaled when the maximum rises.": {
        "factor": lambda old, new: torch.ones_like(old)
    },
    "nan even for small scores: 0 · ∞, or ∞ − ∞. The factor is exp(old − new).": {
        "factor": lambda old, new: (new - old).exp()
    },
    "Your loop loses the sum of the blocks before. Rescale it, and add to it.": {
        "factor": lambda old, new: torch.zeros_like(old)
    },
    "You keep one maximum for all rows, so a row far below it sums up to nothing. Keep one for"
    " each row.": {"of_rows": lambda part: part.max().expand(len(part))},
}


@exercise(
    hint=(
        "Keep a running maximum and a running sum; rescale the sum when the maximum rises.",
        "total * (old - new).exp() + (part - new[:, None]).exp().sum(1)",
    )
)
def check_log_sum_exp(function: Any) -> Verdict:
    """Check the log-sum-exp of each row, in one pass over blocks, for large scores too."""
    rows, block, columns = 6, 7, 23
    along = torch.linspace(-1, 1, columns)
    waves = torch.linspace(-3, 3, 4 * columns).sin().view(4, columns)
    # small scores that rise and fall, large ones of both signs, and a row far below 0
    scores = torch.stack(
        [along, -along, 10 * waves[0], 500 * waves[1], 1000 * waves[2], waves[3] - 1000]
    )
    given = scores.clone()
    with _Watched(given, block) as watched, _Lists(watched):
        found = function(given, block)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return wrong("One number a row is wanted.")
    found = found.flatten()
    if not torch.allclose(found, torch.logsumexp(scores, 1), atol=1e-4):
        for message, mistake in _CARRIED.items():
            if torch.allclose(found, _carried(scores, block, **mistake), atol=1e-4, equal_nan=True):
                return wrong(message, exact=True)
        if found[:2].isnan().any():  # the scores of these rows lie between -1 and 1
            return wrong("nan even for small scores: 0 · ∞, or ∞ − ∞.")
        if (found == math.inf).any() or found.isnan().any():
            return wrong("Large scores overflow.")
        if (found == -math.inf).any():
            return wrong(
                "A sum has become 0. Subtract the row's largest score so far before `exp`."
            )
        return wrong("The numbers are not the log-sum-exps.")
    if watched.too_wide:
        name = watched.too_wide[0]
        return wrong(text("Right numbers, but `{name}` took more than a block at once.", name=name))
    if len(set(watched.blocks_read)) < len(watched.blocks_read):
        return wrong(
            "Right numbers, but in a second pass: the code comes back to a block that it had left."
        )
    return right("Right, in blocks, and without overflow.")


# Exercise 2: dQ, dK, dV
# -----------------------------------------------------------------------------------------------

_MISTAKES = {
    "no D": (
        "dV is right, dQ and dK are not: softmax's gradient subtracts D, the row sums of dO ∘ O."
    ),
    "D of the panel": (
        "dV is right, dQ and dK are not: D sums over the whole row, not the panel; dO and O"
        " give it."
    ),
    "softmax of the panel": (
        "All three are off: a softmax of the panel sums to 1 in every panel. P is exp(S − lse)."
    ),
    "scale forgotten": (
        "dV is right, dQ and dK are too large by √d: S has the scale, so dS has it too."
    ),
    "dQ overwritten": "dK and dV are right, dQ has the last panel only: every panel adds to it.",
    "divided": "Large scores overflow in exp(S) / exp(lse). Subtract first: P is exp(S − lse).",
}


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    block: int,
    mistake: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of one head, (n, d) each, computed key block by key block.

    `mistake` names a mistake that learners make, which is then included.
    """
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(k), block):
        panel = slice(start, start + block)
        scores = q @ k[panel].T * scale
        p = (scores - lse[:, None]).exp()
        if mistake == "softmax of the panel":
            p = scores.softmax(1)
        if mistake == "divided":
            p = scores.exp() / lse[:, None].exp()
        dp = grad_o @ v[panel].T
        row = {"no D": 0.0, "D of the panel": (p * dp).sum(1, keepdim=True)}.get(mistake, dots)
        ds = p * (dp - row) * (1 if mistake == "scale forgotten" else scale)
        dv[panel], dk[panel] = p.T @ grad_o, ds.T @ q
        dq = ds @ k[panel] if mistake == "dQ overwritten" else dq + ds @ k[panel]
    return dq, dk, dv


@exercise(
    hint=(
        (
            "For each panel of keys: P from S and lse; dV += Pᵀ dO; dS = P ∘ (dO Vᵀ − D) · scale;"
            " dQ and dK from dS."
        ),
        (
            "`dq += ds @ k[panel]`, `dk[panel] = ds.T @ q`, `dv[panel] = p.T @ grad_o`, and D = "
            "`(grad_o * o).sum(1, keepdim=True)` before the walk."
        ),
    )
)
def check_backward(function: Any) -> Verdict:
    """Check `function(q, k, v, o, lse, grad_o, block)`.

    The gradients must be right in float64, with five products per key block and nothing N x N.
    """
    case = _one_head(40, 56, 16, torch.float64)
    found = function(*(x.clone() for x in case), 16)
    if found is None or (
        isinstance(found, tuple) and all(isinstance(x, Tensor) and not x.any() for x in found)
    ):
        return not_answered()
    expected = reference_backward(*case, 16)
    # a verdict on a problem is false, so None stands for no problem
    problem = _wrong_gradients(found, expected, case)
    problem = _wrong_walk(function) if problem is None else problem
    if problem is not None:
        return problem
    return right("Right: equal to float64, five products a panel, and nothing N × N.")


def _one_head(queries: int, keys: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v, o, lse and an uneven gradient of o, equal on every machine.

    Every fifth query has scores of 1000 and more.
    """
    q, k, v, grad_o = (
        torch.linspace(start, start + 40 * n, n * d, dtype=dtype).sin().view(n, d) * 1.5
        for start, n in ((0.0, queries), (1.0, keys), (2.0, keys), (3.0, queries))
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
        or [tuple(getattr(x, "shape", ())) for x in found] != shapes
    ):
        return wrong(
            "Three tensors are wanted: dQ, dK, dV, in the shapes of q, k and v.", exact=True
        )
    if all(map(_equal, found, expected)):
        return None
    for mistake, message in _MISTAKES.items():
        if all(map(_equal, found, reference_backward(*case, 16, mistake))):
            return wrong(message, exact=True)
    if all(any(_equal(one, other) for other in expected) for one in found):
        return wrong("These are dQ, dK and dV in another order.", exact=True)
    off = [
        name
        for name, one, other in zip(("dQ", "dK", "dV"), found, expected, strict=True)
        if not _equal(one, other)
    ]
    return wrong(text("Not right yet: {names}.", names=", ".join(off)))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other, rtol=1e-6, atol=1e-8, equal_nan=True
    )


def _wrong_walk(function: Any) -> Verdict | None:
    """Refuse a function that holds something as large as the scores.

    It must also compute exactly five products per key block.
    """
    n, d, block = 256, 16, 16
    case = _one_head(n, n, d, torch.float32)
    with flop_counter() as counter, MemoryMeter() as meter:
        function(*case, block)
    if meter.peak_bytes >= n * n * 4:
        return wrong(
            "Right numbers, but N × N numbers are live at once. Make P and dS of one panel, use"
            " them, and keep neither.",
            exact=True,
        )
    products = counter.get_total_flops() / (2 * n * n * d)
    if round(products, 2) != 5:
        return wrong(
            text(
                "Right numbers, but {products:.1f} products of 2 N² d, where 5 do.",
                products=products,
            )
        )
    return None


# Exercise 3: FLOPs by hand
# --------------------------------------------------------------------------------------------

_TWO = "A multiplication and an addition count as two."
#: Name -> FLOPs in N² d, the reason, and the mistakes that lead to other numbers.
_PRODUCTS: dict[str, tuple[int, str, dict[float, str]]] = {
    "forward": (4, "S = Q Kᵀ and O = P V: two products.", {2: _TWO}),
    "backward": (
        10,
        "S again, dV, dP, dQ, dK: five products.",
        {5: _TWO, 8: "P has to be computed again."},
    ),
    "two walks": (
        14,
        "Both walks make S and dP: seven products.",
        {
            7: _TWO,
            10: "That is one walk. In two, each makes S and dP for itself.",
            12: "Each walk needs dS, and so dP as well as S.",
            20: "Only S and dP are made twice. dQ is made in one walk, dK and dV in the other.",
        },
    ),
}


@exercise(
    hint=(
        "A product of (N, d) and (d, N) takes 2 N² d. Which products does each do?",
        "Two, five and seven.",
    )
)
def check_flops(answer: Any) -> Verdict:
    """Check {"forward", "backward", "two walks"}: FLOPs of each in N² d."""
    if not isinstance(answer, Mapping) or set(answer) != set(_PRODUCTS):
        return wrong(
            "A dictionary is wanted, with `forward`, `backward` and `two walks`.", exact=True
        )
    if all(value is None for value in answer.values()):
        return not_answered()
    for name, (expected, why, mistakes) in _PRODUCTS.items():
        verdict = expect_number(answer[name], expected, wrong_answers=mistakes)
        if not verdict:
            message = text("{name}: {why}", name=f"`{name}`", why=say(verdict.message))
            return wrong(message, hint=None if verdict.exact else why, exact=verdict.exact)
    return right("Right: 4, 10 and 14 N² d.")


# Exercise 4: three lines of a kernel
# ----------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "The three lines are those of `tiled_forward`: the new maximum, what the old sums are"
            " worth, the output."
        ),
        (
            "`new = tl.maximum(largest, tl.max(scores, 1))`; `shrink = tl.exp(largest - new)`; "
            "`o = o * shrink[:, None] + tl.dot(weights, value)`."
        ),
    )
)
def check_kernel(run: Any) -> Verdict:
    """Check `run(q, k, v)` -> (o, lse) of one head by the reader's kernel, with Triton."""
    try:
        import triton  # noqa: F401 - whether it is installed
    except ImportError:
        return right("No Triton here (it is for Linux only): this one is passed over.")
    if _is_untouched(run):
        return not_answered()
    q, k, v = _large_and_small()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with flop_counter() as counter, numpy.errstate(all="ignore"):  # Triton's interpreter is NumPy
        found = run(*(x.to(device) for x in (q, k, v)))
    if found is None:
        return not_answered()
    if counter.get_total_flops():
        return wrong("PyTorch has computed the products. Leave them to your kernel.", exact=True)
    found = tuple(
        x.float().cpu().reshape(y.shape) for x, y in zip(found, (q, q[:, 0]), strict=True)
    )

    def equal(other: tuple[Tensor, ...]) -> list[bool]:
        return [
            torch.allclose(one, two, atol=2e-3, equal_nan=True)
            for one, two in zip(found, other, strict=True)
        ]

    right_o, right_lse = equal(_folded(q, k, v))
    if right_o and right_lse:
        return right("Right: equal to `tiled_forward`, instance by instance, for large scores too.")
    for message, mistake in _FOLDS.items():
        if all(equal(_folded(q, k, v, **mistake))):
            return wrong(message, exact=True)
    if right_lse:
        return wrong("The log-sum-exp is right, the output is not: it shrinks as the sum does.")
    if not all(x.isfinite().all() for x in found):
        return wrong("Scores of 1000 and of −1000 overflow: look at the new maximum.")
    return wrong(
        "The log-sum-exp is wrong: look at the new maximum, and at what the old sum is worth."
    )


def _large_and_small() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of one head, (48, 16) each.

    Scores of some rows are all near 1000 or −1000, and those of others rise or fall by hundreds
    from the first block of 16 keys to the last. All numbers are multiples of 1/16, small enough for
    products that are exact in TF32 too.
    """
    n, d = 48, 16
    q, k, v = (
        (torch.linspace(start, start + 40 * n, n * d).sin() * 24).round().view(n, d) / 16
        for start in (0.0, 1.0, 2.0)
    )
    k[:, 0], k[:, 1] = 4.0, (torch.arange(n) - n // 2) / 8
    every = torch.arange(n) % 6
    q[:, 0] = torch.tensor([0.0, 0.0, 0.0, 1024.0, -1024.0, 1024.0])[every]
    q[:, 1] = torch.tensor([0.0, 512.0, -512.0, 0.0, 0.0, -512.0])[every]
    return q, k, v


def _folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int = 16,
    new_maximum: Callable[[Tensor, Tensor], Tensor] = lambda largest, scores: torch.maximum(
        largest, scores.amax(1)
    ),
    factor: Factor = lambda old, new: (old - new).exp(),
    output: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda o, shrink, added: (
        o * shrink + added
    ),
) -> tuple[Tensor, Tensor]:
    """Compute the kernel's output and log-sum-exp in PyTorch, one block of queries at a time.

    Other arguments introduce a mistake in one of the kernel's three lines.
    """
    outputs, log_sums = [], []
    for query in q.split(block):
        o, total = torch.zeros_like(query), query.new_zeros(len(query))
        largest = query.new_full((len(query),), -math.inf)
        for key, value in zip(k.split(block), v.split(block), strict=True):
            scores = query @ key.T * q.shape[1] ** -0.5
            new = new_maximum(largest, scores)
            shrink, weights = factor(largest, new), (scores - new[:, None]).exp()
            o = output(o, shrink[:, None], weights @ value)
            total, largest = total * shrink + weights.sum(1), new
        outputs.append(o / total[:, None])
        log_sums.append(largest + total.log())
    return torch.cat(outputs), torch.cat(log_sums)


#: Message -> the arguments of `_folded` that introduce the mistake.
_FOLDS: dict[str, dict[str, Any]] = {
    "Your kernel keeps no maximum, so `exp` overflows for scores of 1000, and every weight is 0 for"
    " scores of −1000. `new` is the largest score so far.": {
        "new_maximum": lambda largest, scores: torch.zeros(len(scores)),
        "factor": lambda old, new: torch.ones_like(old),
    },
    "`new` is the panel's own maximum. Where an earlier panel has a larger one, the factor"
    " overflows: take the larger of `largest` and it.": {
        "new_maximum": lambda largest, scores: scores.amax(1)
    },
    "`new` is one number for all rows of the block, so rows far below it sum up to nothing. Take"
    " the maximum of each row.": {
        "new_maximum": lambda largest, scores: torch.maximum(largest, scores.max())
    },
    "The old sum is not rescaled when the maximum rises.": {
        "factor": lambda old, new: torch.ones_like(old)
    },
    "Every number is nan: 0 · ∞, or ∞ − ∞. The factor is exp(largest − new), and `new` is at least"
    " the panel's maximum.": {"factor": lambda old, new: (new - old).exp()},
    "The log-sum-exp is right, but the old output is not rescaled when the maximum rises.": {
        "output": lambda o, shrink, added: o + added
    },
    "The log-sum-exp is right, but `shrink` has one number for each row, and you multiplied the"
    " columns: `shrink[:, None]`.": {"output": lambda o, shrink, added: o * shrink.T + added},
    "The log-sum-exp is right, but the output has the last panel only: every panel adds to it.": {
        "output": lambda o, shrink, added: added
    },
    "The log-sum-exp is right, but the factor is for the old output alone. The panel's part is"
    " relative to `new` already.": {"output": lambda o, shrink, added: (o + added) * shrink},
}


def _is_untouched(run: Any) -> bool:
    """Return whether `fold`, which the kernel calls, is still the cell's original.

    That contains only exp and sum.
    """
    fold = getattr(run, "__globals__", {}).get("fold")
    code = getattr(getattr(fold, "fn", fold), "__code__", None)
    return code is not None and set(code.co_names) <= {"tl", "exp", "sum"}


# In depth
# --------------------------------------------------------------------------------------------------


@exercise(
    hint=(
        "softmax divides by the sum of exponentials, and the log-sum-exp is that sum's logarithm.",
        "p = exp(s - lse), with s = q·k / √d.",
    )
)
def check_probabilities(function: Any) -> Verdict:
    """Check P of one head, `(n, n)`, computed from Q, K and the log-sum-exp."""
    q, k = (torch.linspace(-2, 2, 80).view(5, 16) * factor for factor in (1.0, -1.5))
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)
    found = function(q, k, lse)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return wrong("A matrix (n, n) is wanted.", exact=True)
    large = function(50 * q, 50 * k, torch.logsumexp(2500 * scores, 1))
    if isinstance(large, torch.Tensor) and large.isnan().any() and not found.isnan().any():
        return wrong(
            "Large scores overflow in exp(s) / exp(lse). Subtract first: p = exp(s − lse).",
            exact=True,
        )
    if torch.allclose(found, (q @ k.T - lse[:, None]).exp(), atol=1e-5):
        return wrong("The scores lack their scale, 1 / √d.", exact=True)
    if torch.allclose(found, (scores - lse).exp(), atol=1e-5):
        return wrong("`lse` has one number a row: give it a column, lse[:, None].", exact=True)
    if torch.allclose(found, scores - lse[:, None], atol=1e-5):
        return wrong("These are the logarithms of P.", exact=True)
    if not torch.allclose(found, scores.softmax(1), atol=1e-5):
        sums = found.sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            return wrong("Rows sum to 1, but the probabilities differ.")
        return wrong("Rows do not sum to 1.")
    halved = function(q, k, lse + math.log(2))  # as if other keys had the same weight again
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        return wrong(
            "Right numbers, but they do not come from `lse`: with `lse` greater by log 2 they"
            " should be halved. Is there a softmax inside, or a sum over the row?"
        )
    return right("Right: softmax without a softmax.")


@exercise(hint="Which tensors does section 6.4 list, and how many heads has each?")
def check_grouped_bytes(answer: Any) -> Verdict:
    """Check the bytes that flash attention keeps with 32 query heads and 8 key heads.

    The other sizes are d = 128, 4096 tokens, and bf16.
    """
    one = 4096 * 128 * 2
    right = 80 * one + 32 * 4096 * 4
    return expect_number(
        answer,
        right,
        wrong_answers={
            128 * one + 32 * 4096 * 4: "K and V have 8 heads, not 32.",
            80 * one: "The log-sum-exp is missing.",
            80 * one + 32 * 4096 * 2: "The log-sum-exp is fp32.",
            80 * one + 2 * 32 * 4096 * 4: "One number a row, not two.",
            48 * one + 32 * 4096 * 4: "The output is kept as well.",
            128 * one: "K and V have 8 heads, not 32, and the log-sum-exp is missing.",
            2 * right - 32 * 4096 * 4: "bf16 takes two bytes.",
        },
        in_bytes=True,
        why="Q and O with 32 heads, K and V with 8, and 4 bytes a row.",
    )


@exercise(
    hint=("Count the tiles that the diagonal touches, and those below it.", "n (n + 1) / 2 of n².")
)
def check_causal_tiles(function: Any) -> Verdict:
    """Check `function(queries, keys, block_q, block_k)`: the tiles of a causal pass.

    The mask is aligned at the bottom right.
    """
    for queries, keys, block_q, block_k in (
        (512, 512, 64, 64),
        (100, 100, 32, 16),
        (64, 256, 32, 64),
        (64, 16, 16, 16),  # the first three blocks of queries see no key
        (128, 64, 32, 32),
        (100, 70, 32, 16),
        (8, 4, 2, 1),
    ):
        # the mask itself, tile by tile
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        parts = [part for rows in mask.split(block_q) for part in rows.split(block_k, 1)]
        expected = sum(bool(part.any()) for part in parts)
        case = f"{queries}, {keys}, {block_q}, {block_k}"
        last = [min(first + block_q, queries) for first in range(0, queries, block_q)]
        seen = [each + keys - queries for each in last]  # keys seen by the last query of each block
        mistakes = {
            sum(-(-min(each, keys) // block_k) for each in last): (
                "The last query sees all keys: count from the bottom right."
            ),
            len(parts): "That is every tile: those above the diagonal are skipped.",
            len(parts) / 2: "The diagonal's tiles are computed too.",
            sum(-(-each // block_k) for each in seen): (
                "A block whose queries see no key has no tile, and never fewer than none."
            ),
            sum(max(0, each) // block_k for each in seen): (
                "A tile that the block sees only in part is computed too."
            ),
            sum(max(0, each) // block_k + 1 for each in seen): (
                "Where a block sees a whole number of tiles, no more is needed."
            ),
        }
        mistakes = {number: message for number, message in mistakes.items() if number != expected}
        answer = function(queries, keys, block_q, block_k)
        if answer is None:
            return not_answered()
        verdict = expect_number(answer, expected, wrong_answers=mistakes)
        if not verdict:
            return wrong(
                text("For {case}: {said}", case=f"`{case}`", said=say(verdict.message)),
                exact=verdict.exact,
            )
    return right(
        "Right: a tile is skipped where its first key comes after all that its last query sees."
    )
