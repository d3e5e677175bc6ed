"""The exercises of lesson 06."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.labels import say
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import exercise, not_answered, right, wrong

# Exercise 1: softmax in one pass
# --------------------------------------------------------------------------------------

#: Operators that only move numbers or make room for them: these may have all scores before them.
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
    """Notes which operators compute with more than a block of the scores at once, and with which
    blocks, in order."""

    def __init__(self, scores: torch.Tensor, block: int) -> None:
        super().__init__()
        self.scores, self.block = scores, block
        self.too_wide: list[str] = []
        self.blocks_read: list[int] = []  # by their places in the scores

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in _MOVES or name.startswith(_MAKES)):
            for tensor in tensors_in(args):
                if (
                    tensor.numel() > len(self.scores) * self.block
                    or max(tensor.shape, default=0) > self.block
                ):
                    self.too_wide.append(name)
                elif (
                    tensor.untyped_storage().data_ptr() == self.scores.untyped_storage().data_ptr()
                ):
                    if [tensor.storage_offset()] != self.blocks_read[-1:]:
                        self.blocks_read.append(tensor.storage_offset())
        return operator(*args, **(kwargs or {}))


def _without_rescaling(row: Tensor, block: int) -> Tensor:
    """The commonest slip: terms of a block stay relative to the maximum of their time."""
    largest, total = row.new_tensor(-math.inf), row.new_tensor(0.0)
    for part in row.split(block):
        largest = torch.maximum(largest, part.max())
        total = total + (part - largest).exp().sum()
    return largest + total.log()


@exercise(
    hint=(
        "Keep a running maximum and a running sum; rescale the sum when the maximum rises.",
        "total * (old - new).exp() + (part - new[:, None]).exp().sum(1)",
    )
)
def check_log_sum_exp(function: Any) -> Verdict:
    """The log-sum-exp of each row over blocks of columns, for large scores too, in one pass."""
    rows, block = 4, 4
    scores = torch.linspace(-3, 3, 60).sin().view(rows, 15) * torch.tensor(
        [[1.0], [10.0], [500.0], [1000.0]]
    )
    given = scores.clone()
    with _Watched(given, block) as watched:
        found = function(given, block)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return wrong("One number a row is wanted.")
    small, *large = found.flatten()  # the first row's scores lie between -1 and 1
    if small.isnan():
        return wrong("nan even for small scores: 0 · ∞, or ∞ − ∞. The factor is exp(old − new).")
    if any(row == math.inf or row.isnan() for row in large):
        return wrong("Large scores overflow.")
    if any(row == -math.inf for row in large):
        return wrong("A sum has become 0: what a block adds must stay when the maximum rises.")
    if not torch.allclose(found.flatten(), torch.logsumexp(scores, 1), atol=1e-4):
        if torch.isclose(small, _without_rescaling(scores[0], block), atol=1e-4):
            return wrong("The old sum is not rescaled when the maximum rises.", exact=True)
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

_SLIPS = {
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
}


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    block: int,
    slip: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of one head, (n, d) each, panel by panel of keys; with a slip by name, as
    learners make it."""
    scale, dots = q.shape[1] ** -0.5, (grad_o * o).sum(1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(k), block):
        panel = slice(start, start + block)
        scores = q @ k[panel].T * scale
        p = scores.softmax(1) if slip == "softmax of the panel" else (scores - lse[:, None]).exp()
        dp = grad_o @ v[panel].T
        row = {"no D": 0.0, "D of the panel": (p * dp).sum(1, keepdim=True)}.get(slip, dots)
        ds = p * (dp - row) * (1 if slip == "scale forgotten" else scale)
        dv[panel], dk[panel] = p.T @ grad_o, ds.T @ q
        dq = ds @ k[panel] if slip == "dQ overwritten" else dq + ds @ k[panel]
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
    """`function(q, k, v, o, lse, grad_o, block)`: right gradients in float64, five products a
    panel, nothing N x N."""
    case = _one_head(40, 56, 16, torch.float64)
    found = function(*(x.clone() for x in case), 16)
    if found is None or (
        isinstance(found, tuple) and all(isinstance(x, Tensor) and not x.any() for x in found)
    ):
        return not_answered()
    expected = reference_backward(*case, 16)
    # a verdict that is wrong is false: None means no problem
    problem = _wrong_gradients(found, expected, case)
    problem = _wrong_walk(function) if problem is None else problem
    if problem is not None:
        return problem
    return right("Right: equal to float64, five products a panel, and nothing N × N.")


def _one_head(queries: int, keys: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, o, lse and an uneven gradient of o: inputs of no pattern, the same on every
    machine."""
    q, k, v, grad_o = (
        torch.linspace(start, start + 40 * n, n * d, dtype=dtype).sin().view(n, d) * 1.5
        for start, n in ((0.0, queries), (1.0, keys), (2.0, keys), (3.0, queries))
    )
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
    for slip, said in _SLIPS.items():
        if all(map(_equal, found, reference_backward(*case, 16, slip))):
            return wrong(said, exact=True)
    off = [
        name
        for name, one, other in zip(("dQ", "dK", "dV"), found, expected, strict=True)
        if not _equal(one, other)
    ]
    return wrong(text("Not right yet: {names}.", names=", ".join(off)))


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other, rtol=1e-6, atol=1e-8)


def _wrong_walk(function: Any) -> Verdict | None:
    """Whether it makes something as large as the scores, or computes more or less than five
    products a panel."""
    n, d, block = 128, 16, 32
    case = _one_head(n, n, d, torch.float32)
    with _Largest() as made, flop_counter() as counter:
        function(*case, block)
    if made.most >= n * n:
        return wrong(
            "Right numbers, but a tensor of N × N numbers was made: walk over the panels.",
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


class _Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operator made."""

    most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.most = max([self.most, *(tensor.numel() for tensor in tensors_in(result))])
        return result


# Exercise 3: FLOPs by hand
# --------------------------------------------------------------------------------------------

_PRODUCTS = {
    "forward": (4, "S = Q Kᵀ and O = P V: two products."),
    "backward": (10, "S again, dV, dP, dQ, dK: five products."),
    "two walks": (14, "Both walks make S and dP: seven products."),
}


@exercise(
    hint=(
        "A product of (N, d) and (d, N) takes 2 N² d. Which products does each do?",
        "Two, five and seven.",
    )
)
def check_flops(answer: Any) -> Verdict:
    """{"forward", "backward", "two walks"}: FLOPs of each in N² d."""
    if not isinstance(answer, Mapping) or set(answer) != set(_PRODUCTS):
        return wrong(
            "A dictionary is wanted, with `forward`, `backward` and `two walks`.", exact=True
        )
    if all(value is None for value in answer.values()):
        return not_answered()
    for name, (expected, why) in _PRODUCTS.items():
        halved = {
            expected / 2: "A multiplication and an addition count as two.",
            8: "P has to be computed again.",
        }
        slips = {number: said for number, said in halved.items() if number != expected}
        verdict = expect_number(answer[name], expected, wrong_answers=slips)
        if not verdict:
            said = text("`{name}`: {why}", name=name, why=say(verdict.message))
            return wrong(said, hint=None if verdict.exact else why, exact=verdict.exact)
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
    """`run(q, k, v)` -> (o, lse) of one head by the reader's kernel; passed over where Triton is
    missing."""
    try:
        import triton  # noqa: F401 - whether it is there
    except ImportError:
        return right("No Triton here (it is for Linux only): this one is passed over.")
    if _is_untouched(run):
        return not_answered()
    q, k, v, o, lse, _ = (x.contiguous() for x in _one_head(32, 32, 16, torch.float32))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = run(*(x.to(device) for x in (q, k, v)))
    if found is None:
        return not_answered()
    found_o, found_lse = (x.float().cpu() for x in found)
    if not torch.allclose(found_lse.flatten(), lse, atol=1e-3):
        return wrong(
            "The log-sum-exp is wrong: look at the new maximum, and at what the old sum is worth."
        )
    if not torch.allclose(found_o, o, atol=1e-3):
        return wrong("The log-sum-exp is right, the output is not: it shrinks as the sum does.")
    return right("Right: equal to `tiled_forward`, instance by instance.")


def _is_untouched(run: Any) -> bool:
    """Whether `fold`, which the kernel calls, does no more than the cell as it came, which has exp
    and sum alone."""
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
    """P of one head, `(n, n)`, from Q, K and the log-sum-exp."""
    q, k = (torch.linspace(-2, 2, 80).view(5, 16) * factor for factor in (1.0, -1.5))
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)
    found = function(q, k, lse)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return wrong("A matrix (n, n) is wanted.", exact=True)
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
    halved = function(q, k, lse + math.log(2))  # as if each row had as much again elsewhere
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        return wrong(
            "Right numbers, but they do not come from `lse`: with `lse` greater by log 2 they"
            " should be halved. Is there a softmax inside, or a sum over the row?"
        )
    return right("Right: softmax without a softmax.")


@exercise(hint="Which tensors does section 6.4 list, and how many heads has each?")
def check_grouped_bytes(answer: Any) -> Verdict:
    """Lesson 06: bytes that flash attention keeps, 32 query heads on 8, d = 128, 4096 tokens,
    bf16."""
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
            right / 10**6: "That is in MB. Give bytes.",
        },
        why="Q and O with 32 heads, K and V with 8, and 4 bytes a row.",
    )


@exercise(
    hint=("Count the tiles that the diagonal touches, and those below it.", "n (n + 1) / 2 of n².")
)
def check_causal_tiles(function: Any) -> Verdict:
    """`function(queries, keys, block_q, block_k)`: tiles that a causal walk computes, aligned at
    the bottom right."""
    for queries, keys, block_q, block_k in (
        (512, 512, 64, 64),
        (100, 100, 32, 16),
        (64, 256, 32, 64),
    ):
        expected = 0
        for first in range(0, queries, block_q):
            # the last key that this block's last query sees
            last = min(first + block_q, queries) - 1 + keys - queries
            expected += last // block_k + 1
        case = f"{queries}, {keys}, {block_q}, {block_k}"
        whole = -(-queries // block_q) * -(-keys // block_k)
        top_left = sum(
            -(-min(first + block_q, queries) // block_k) for first in range(0, queries, block_q)
        )
        slips = {
            top_left: "The last query sees all keys: count from the bottom right.",
            whole: "That is every tile: those above the diagonal are skipped.",
            whole / 2: "The diagonal's tiles are computed too.",
        }
        slips = {number: said for number, said in slips.items() if number != expected}
        answer = function(queries, keys, block_q, block_k)
        if answer is None:
            return not_answered()
        verdict = expect_number(answer, expected, wrong_answers=slips)
        if not verdict:
            return wrong(
                text("For {case}: {said}", case=f"`{case}`", said=say(verdict.message)),
                exact=verdict.exact,
            )
    return right(
        "Right: a tile is skipped where its first key comes after all that its last query sees."
    )
