"""The exercises of lesson 06, except those in `tiles.py`."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.labels import say
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    cases,
    draw_case,
    exercise,
    not_answered,
    returns_none,
    right,
    wrong,
)

from .tiles import large_and_small

# Exercise 1: softmax in one pass
# --------------------------------------------------------------------------------------

#: Operators that only move numbers or allocate memory: these may see all scores at once.
_COPYING = (
    "_to_copy",
    "_unsafe_view",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy_",
    "index",
    "index_select",
)
_ALLOCATING = ("new_", "empty", "full", "ones", "zeros")


class _ReadRecorder(TorchDispatchMode):
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
        if not (operator.is_view or name in _COPYING or name.startswith(_ALLOCATING)):
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


#: Methods by which the host reads a tensor without an operator.
_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class _HostReadRecorder(TorchFunctionMode):
    """A mode that reports `tolist`, `numpy` and the like to a `_ReadRecorder`.

    No dispatch mode sees them.
    """

    def __init__(self, recorder: _ReadRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _HOST_READS:
            self.recorder.look(function.__name__, args[0])
        return function(*args, **(kwargs or {}))


Factor = Callable[[Tensor, Tensor], Tensor]


def _log_sum_exp_by_blocks(
    scores: Tensor,
    block: int,
    *,
    start: float = -math.inf,
    factor: Factor = lambda old, new: (old - new).exp(),
    of_rows: Callable[[Tensor], Tensor] = lambda part: part.amax(1),
    larger: Factor = torch.maximum,
    whole_blocks: bool = False,
    result: Factor = lambda largest, logarithm: largest + logarithm,
) -> Tensor:
    """Return the log-sum-exp of each row in one pass; other arguments introduce a mistake."""
    largest, total = scores.new_full(scores.shape[:1], start), scores.new_zeros(len(scores))
    columns = scores.shape[1] // block * block if whole_blocks else scores.shape[1]
    for part in scores[:, :columns].split(block, 1):
        new = larger(largest, of_rows(part))
        total = total * factor(largest, new) + (part - new[:, None]).exp().sum(1)
        largest = new
    return result(largest, total.log())


#: Message -> the arguments of `_log_sum_exp_by_blocks` that introduce the mistake.
_LOG_SUM_EXP_MISTAKES: dict[str, dict[str, Any]] = {
    (
        "Your running maximum starts at 0 or at another number, so the sum of a row whose scores"
        " are all far below it becomes 0. Start at −∞."
    ): {"start": 0.0},
    "You do not rescale the old sum when the maximum rises.": {
        "factor": lambda old, new: torch.ones_like(old)
    },
    (
        "Your result is nan even for small scores, because your code computes 0 · ∞ or ∞ − ∞. The"
        " factor must be exp(old − new)."
    ): {"factor": lambda old, new: (new - old).exp()},
    (
        "Your loop loses the sum of the earlier blocks. Rescale the old sum and add the new block's"
        " part to it."
    ): {"factor": lambda old, new: torch.zeros_like(old)},
    (
        "You keep one maximum for all rows, so the sum of a row far below it becomes 0. Keep one"
        " maximum per row."
    ): {"of_rows": lambda part: part.max().expand(len(part))},
    (
        "Your new maximum is the maximum of this block alone. If an earlier block has a larger one,"
        " the factor overflows. Take the larger of the two."
    ): {"larger": lambda old, new: new},
    "You left out the last block, which is shorter than `block`.": {"whole_blocks": True},
    "You returned log ℓ. The log-sum-exp is m + log ℓ, because ℓ is relative to m.": {
        "result": lambda largest, logarithm: logarithm
    },
}


@exercise(
    hint=(
        "Keep a running maximum and a running sum. Rescale the sum when the maximum rises.",
        "The old sum is relative to the old maximum. Which factor makes it relative to the new"
        " one?",
    )
)
def check_log_sum_exp(function: Any) -> Verdict:
    """Check the log-sum-exp of each row, in one pass over blocks, for large scores too."""
    rows, block, columns = 7, 7, 23
    along = torch.linspace(-1, 1, columns)
    shift = draw_case(0.0, lambda rng: rng.uniform(0, 0.5))
    waves = torch.linspace(-3 + shift, 3 + shift, 4 * columns).sin().view(4, columns)
    # small scores that rise and fall, large ones of both signs, a row far below 0, and one that
    # falls by more than `exp` can hold
    scores = torch.stack(
        [
            *(along, -along, 10 * waves[0], 500 * waves[1], 1000 * waves[2], waves[3] - 1000),
            -500 * along,
        ]
    )
    given = scores.clone()
    with _ReadRecorder(given, block) as recorder, _HostReadRecorder(recorder):
        found = function(given, block)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.numel() != rows:
        return wrong("Return a tensor with one number per row.", exact=True)
    found = found.flatten().float()
    if not torch.allclose(found, torch.logsumexp(scores, 1), atol=1e-4):
        for message, mistake in _LOG_SUM_EXP_MISTAKES.items():
            if torch.allclose(
                found, _log_sum_exp_by_blocks(scores, block, **mistake), atol=1e-4, equal_nan=True
            ):
                return wrong(message, exact=True)
        if (found[:2] == -math.inf).all():
            return wrong(
                "Your running maximum is still −∞ at the end. Set it to the new maximum after each"
                " block.",
                exact=True,
            )
        if found[:2].isnan().any():  # the scores of these rows lie between -1 and 1
            return wrong(
                "Your result is nan even for small scores, because your code computes 0 · ∞ or"
                " ∞ − ∞."
            )
        if (found == math.inf).any() or found.isnan().any():
            return wrong("Your code overflows for large scores.")
        if (found == -math.inf).any():
            return wrong(
                "The sum of a row has become 0. Before `exp`, subtract the largest score of"
                " this row so far."
            )
        return wrong("Your numbers are not the log-sum-exps of the rows.")
    if recorder.too_wide:
        name = recorder.too_wide[0]
        return wrong(
            text(
                "The numbers are right, but `{name}` read more than one block at once.", name=name
            ),
            exact=True,
        )
    if len(set(recorder.blocks_read)) < len(recorder.blocks_read):
        return wrong(
            "The numbers are right, but your code reads a block again after it has left it. One"
            " pass is enough.",
            exact=True,
        )
    return right("Right: computed in blocks, and without overflow.")


# Exercise 5: FLOPs by hand
# --------------------------------------------------------------------------------------------

_TWO = "You counted a multiplication and an addition as one FLOP. They count as two."
#: Name -> FLOPs in N² d, the reason, and the mistakes that lead to other numbers.
_PRODUCTS: dict[str, tuple[int, str, dict[float, str]]] = {
    "forward": (4, "Forward computes S = Q Kᵀ and O = P V, which are two products.", {2: _TWO}),
    "backward": (
        10,
        "Backward computes S again, then dV, dP, dQ and dK, which are five products.",
        {5: _TWO, 8: "You left out that backward computes S again, for P."},
    ),
    "two passes": (
        14,
        "Both passes compute S and dP, so there are seven products.",
        {
            7: _TWO,
            10: (
                "That is the number for one pass. With two passes, each computes S and dP for"
                " itself."
            ),
            12: (
                "You counted S twice but dP only once. Each pass needs dS, so each pass"
                " computes dP, too."
            ),
            20: (
                "You counted five products twice. Only S and dP are computed twice; dQ belongs"
                " to one pass, dK and dV to the other."
            ),
        },
    ),
}


@exercise(
    hint=(
        "A product of (N, d) and (d, N) takes 2 N² d FLOPs. Which products does each of the"
        " three compute?",
        "Backward computes S again before anything else. In two passes, which products occur in"
        " both?",
    )
)
def check_flops(answer: Any) -> Verdict:
    """Check {"forward", "backward", "two passes"}: FLOPs of each in N² d."""
    if not isinstance(answer, Mapping) or set(answer) != set(_PRODUCTS):
        return wrong(
            "Give a dictionary with the keys `forward`, `backward` and `two passes`.", exact=True
        )
    if all(value is None for value in answer.values()):
        return not_answered()
    for name, (expected, why, mistakes) in _PRODUCTS.items():
        verdict = expect_number(answer[name], expected, wrong_answers=mistakes)
        if not verdict:
            message = text("{name}: {why}", name=f"`{name}`", why=say(verdict.message))
            return wrong(message, hint=None if verdict.exact else why, exact=verdict.exact)
    return right("Right: 4, 10 and 14 N² d FLOPs.")


# Exercise 6: three lines of a kernel
# ----------------------------------------------------------------------------------


@exercise(
    hint=(
        (
            "The three lines are those of your `forward`: the new maximum, the factor for the old"
            " sum, and the output."
        ),
        (
            "`scores` has one row per query, so `new` and `shrink` have one number per row. What"
            " must `shrink` be multiplied with, and what is added to it?"
        ),
    )
)
def check_kernel(run: Any) -> Verdict:
    """Check `run(q, k, v)` -> (o, lse) of one head by the reader's kernel, with Triton."""
    if _is_untouched(run):
        return not_answered()
    try:
        import triton  # noqa: F401 - whether it is installed
    except ImportError:
        return Verdict(
            None,
            "Triton is not installed here (on Linux: pip install triton), so this answer is not"
            " checked.",
        )
    q, k, v = large_and_small(45, 45)  # the last block of 16 has 13 rows
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with flop_counter() as counter, numpy.errstate(all="ignore"):  # Triton's interpreter is NumPy
        try:
            found = run(*(x.to(device) for x in (q, k, v)))
        except Exception as error:  # Triton's interpreter wraps errors in errors
            raise _root_cause(error) from None
    if found is None:
        return not_answered()
    if counter.get_total_flops():
        return wrong(
            "You computed the products with PyTorch. Compute them in your kernel.", exact=True
        )
    found = tuple(
        x.float().cpu().reshape(y.shape) for x, y in zip(found, (q, q[:, 0]), strict=True)
    )

    def equal(other: tuple[Tensor, ...]) -> list[bool]:
        return [
            torch.allclose(one, two, atol=2e-3, equal_nan=True)
            for one, two in zip(found, other, strict=True)
        ]

    right_o, right_lse = equal(_kernel_result(q, k, v))
    if right_o and right_lse:
        return right(
            "Right: each instance gives what your `forward` gives, for large scores and for edges,"
            " too."
        )
    for message, mistake in _KERNEL_MISTAKES.items():
        if all(equal(_kernel_result(q, k, v, **mistake))):
            return wrong(message, exact=True)
    if right_lse:
        return wrong(
            "The log-sum-exp is right, but the output is not. Multiply the old output by the same"
            " factor as the old sum, and add the product of the weights and V.",
            exact=True,
        )
    if not all(x.isfinite().all() for x in found):
        return wrong(
            "Your kernel overflows for scores of 1000 and −1000. Look at how you compute the"
            " new maximum."
        )
    return wrong(
        "The log-sum-exp is wrong. Look at the new maximum and at the factor for the old sum."
    )


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _kernel_result(
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
    beyond: float = -math.inf,
) -> tuple[Tensor, Tensor]:
    """Compute the kernel's output and log-sum-exp in PyTorch, one block of queries at a time.

    `beyond` is the score of the places after the last key in the last block. Other arguments
    introduce a mistake in one of the kernel's three lines.
    """
    missing = -len(k) % block
    columns = torch.arange(len(k) + missing)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    n = len(q) - missing
    outputs, log_sums = [], []
    for query in q.split(block):
        o, total = torch.zeros_like(query), query.new_zeros(len(query))
        largest = query.new_full((len(query),), -math.inf)
        for key, value, places in zip(*(x.split(block) for x in (k, v, columns)), strict=True):
            scores = query @ key.T * q.shape[1] ** -0.5
            scores[:, places >= n] = beyond
            new = new_maximum(largest, scores)
            shrink, weights = factor(largest, new), (scores - new[:, None]).exp()
            o = output(o, shrink[:, None], weights @ value)
            total, largest = total * shrink + weights.sum(1), new
        outputs.append(o / total[:, None])
        log_sums.append(largest + total.log())
    return torch.cat(outputs)[:n], torch.cat(log_sums)[:n]


#: Message -> the arguments of `_kernel_result` that introduce the mistake.
_KERNEL_MISTAKES: dict[str, dict[str, Any]] = {
    (
        "Places after the last key count as keys with score 0. Their scores must be −∞, so that"
        " their weights are 0."
    ): {"beyond": 0.0},
    (
        "Your kernel keeps no maximum, so `exp` overflows for scores of 1000, and every weight is 0"
        " for scores of −1000. `new` must be the largest score so far."
    ): {
        "new_maximum": lambda largest, scores: torch.zeros(len(scores)),
        "factor": lambda old, new: torch.ones_like(old),
    },
    (
        "Your `new` is the maximum of this key block alone. If an earlier key block has a larger"
        " one, the factor overflows. Compare it with `largest` row by row, which Python's `max`"
        " does not do."
    ): {"new_maximum": lambda largest, scores: scores.amax(1)},
    (
        "Your `new` is one number for all rows, so the sum of a row far below it becomes 0. Take"
        " the maximum of each row."
    ): {"new_maximum": lambda largest, scores: torch.maximum(largest, scores.max())},
    "You do not rescale the old sum when the maximum rises.": {
        "factor": lambda old, new: torch.ones_like(old)
    },
    (
        "Every number is nan, because your code computes 0 · ∞ or ∞ − ∞. The factor must be"
        " exp(largest − new), and `new` must be at least the key block's maximum."
    ): {"factor": lambda old, new: (new - old).exp()},
    "The log-sum-exp is right, but you do not rescale the old output when the maximum rises.": {
        "output": lambda o, shrink, added: o + added
    },
    (
        "The log-sum-exp is right, but you multiplied the columns of the output by `shrink`, which"
        " has one number per row. Write `shrink[:, None]`."
    ): {"output": lambda o, shrink, added: o * shrink.T + added},
    (
        "The log-sum-exp is right, but your output has only the last key block. Add each key"
        " block's part to the old output."
    ): {"output": lambda o, shrink, added: added},
    (
        "The log-sum-exp is right, but you multiplied the whole output by `shrink`. Multiply only"
        " the old output, because the new key block's part is already relative to `new`."
    ): {"output": lambda o, shrink, added: (o + added) * shrink},
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
        "softmax divides by the sum of the exponentials, and the log-sum-exp is the logarithm"
        " of this sum.",
        "A division by exp(lse) is a subtraction in the exponent. To which axis of the scores does"
        " `lse` belong?",
    )
)
def check_probabilities(function: Any) -> Verdict:
    """Check P of one head, `(n, n)`, computed from Q, K and the log-sum-exp."""
    # q @ k.T is not symmetric, so that q and k cannot be exchanged
    end = draw_case(2.0, lambda rng: rng.uniform(1.8, 2.2))
    q, k = torch.linspace(-2, end, 80).view(5, 16), torch.linspace(1, 41, 80).sin().view(5, 16)
    scores = q @ k.T / 4
    lse = torch.logsumexp(scores, 1)

    def result(*given: Tensor) -> Any:
        found = function(*(x.clone() for x in given))
        return found.float() if isinstance(found, Tensor) else found

    found = result(q, k, lse)
    if found is None:
        return not_answered()
    if not isinstance(found, torch.Tensor) or found.shape != (5, 5):
        return wrong("Return a matrix of shape (n, n), as a tensor.", exact=True)
    large = result(50 * q, 50 * k, torch.logsumexp(2500 * scores, 1))
    if isinstance(large, torch.Tensor) and large.isnan().any() and not found.isnan().any():
        return wrong(
            "For large scores your `exp` overflows, and ∞ / ∞ is nan. Subtract first:"
            " p = exp(s − lse).",
            exact=True,
        )
    if torch.allclose(found, (q @ k.T - lse[:, None]).exp(), atol=1e-5):
        return wrong("Your scores lack the scale 1 / √d.", exact=True)
    if torch.allclose(found, (scores - lse).exp(), atol=1e-5):
        return wrong(
            "You subtracted `lse` along the wrong axis. It has one number per row, so write"
            " lse[:, None].",
            exact=True,
        )
    if torch.allclose(found, scores - lse[:, None], atol=1e-5):
        return wrong("You returned the logarithms of P.", exact=True)
    if not torch.allclose(found, scores.softmax(1), atol=1e-5):
        sums = found.sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            return wrong("The rows of your result sum to 1, but the probabilities are wrong.")
        return wrong("The rows of your result do not sum to 1.")
    halved = result(q, k, lse + math.log(2))  # the lse if every key occurred twice
    if not isinstance(halved, torch.Tensor) or not torch.allclose(2 * halved, found, atol=1e-5):
        return wrong(
            "The numbers are right, but you did not compute them from `lse`. If `lse` grows by"
            " log 2, they should be halved. Does your code contain a softmax, or a sum over the"
            " row?"
        )
    return right("Right: this is softmax, computed without a sum over the row.")


@exercise(hint="Which tensors does section 6.4 list, and how many heads does each have?")
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
            128 * one + 32 * 4096 * 4: "You counted 32 heads for K and V. They have 8.",
            80 * one: "You left out the log-sum-exp.",
            80 * one + 32 * 4096 * 2: "You counted two bytes for each log-sum-exp. It is fp32.",
            80 * one + 2 * 32 * 4096 * 4: (
                "You counted two numbers per row. Flash attention keeps only one, the log-sum-exp."
            ),
            80 * one + 8 * 4096 * 4: "Each of the 32 query heads has its own log-sum-exps.",
            48 * one + 32 * 4096 * 4: "You left out the output. It is kept, too.",
            **dict.fromkeys(
                (40 * one, 40 * one + 32 * 4096), "You counted numbers. Give bytes: bf16 has two."
            ),
            128 * one: (
                "You counted 32 heads for K and V, but they have 8. The log-sum-exp is missing,"
                " too."
            ),
            2 * right - 32 * 4096 * 4: (
                "You counted four bytes per number for Q, K, V and O. In bf16 it is two."
            ),
        },
        in_bytes=True,
        why=(
            "Q and O have 32 heads, K and V have 8, and each row has 4 bytes for its log-sum-exp."
        ),
    )


def _draw_tiles(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.randint(40, 200), rng.randint(40, 200), rng.randint(8, 40), rng.randint(8, 40)


@exercise(
    hint=(
        "Count the tiles that the diagonal crosses and the tiles below them.",
        (
            "How many keys does the last query of a block see? How many key blocks begin before"
            " the last of them?"
        ),
    )
)
def check_causal_tiles(function: Any) -> Verdict:
    """Check `function(queries, keys, block_q, block_k)`: the tiles of a causal pass.

    The mask is aligned at the bottom right.
    """
    sizes = (
        (512, 512, 64, 64),
        (100, 100, 32, 16),
        (64, 256, 32, 64),
        (64, 16, 16, 16),  # the first three blocks of queries see no key
        (128, 64, 32, 32),
        (100, 70, 32, 16),
        (8, 4, 2, 1),
    )
    for queries, keys, block_q, block_k in cases(sizes, _draw_tiles):
        # the mask itself, tile by tile
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        parts = [part for rows in mask.split(block_q) for part in rows.split(block_k, 1)]
        expected = sum(bool(part.any()) for part in parts)
        case = f"{queries}, {keys}, {block_q}, {block_k}"
        firsts = range(0, queries, block_q)
        last = [min(first + block_q, queries) for first in firsts]
        seen = [each + keys - queries for each in last]  # keys seen by the last query of each block
        mistakes = {
            sum(-(-min(each, keys) // block_k) for each in last): (
                "You aligned the mask at the top left. The last query sees all keys, so count"
                " from the bottom right."
            ),
            len(parts): "You counted all tiles. Those above the diagonal are skipped.",
            len(parts) / 2: (
                "You counted half of the tiles. All tiles on the diagonal are computed, too."
            ),
            sum(-(-each // block_k) for each in seen): (
                "A block of queries that sees no key has 0 tiles. You count a negative number"
                " for it."
            ),
            sum(max(0, each) // block_k for each in seen): (
                "You left out the tiles that a block of queries sees only in part. They are"
                " computed, too."
            ),
            sum(-(-max(0, first + block_q + keys - queries) // block_k) for first in firsts): (
                "You counted past the last query. The last block of queries may be shorter."
            ),
            sum(-(-max(0, first + 1 + keys - queries) // block_k) for first in firsts): (
                "You counted the tiles that the first query of each block sees. Its last query may"
                " see more."
            ),
            sum(-(-max(0, each - 1) // block_k) for each in seen): (
                "You left out the key on the diagonal. A query sees this key, too."
            ),
            sum(max(0, each) // block_k + 1 for each in seen): (
                "You count one tile too many for a block of queries that sees a whole number of"
                " tiles."
            ),
        }
        mistakes = {number: message for number, message in mistakes.items() if number != expected}
        answer = function(queries, keys, block_q, block_k)
        if answer is None:
            return not_answered() if queries == 512 else returns_none(f"`{case}`")
        verdict = expect_number(answer, expected, wrong_answers=mistakes)
        if not verdict:
            return wrong(
                text("For {case}: {said}", case=f"`{case}`", said=say(verdict.message)),
                exact=verdict.exact,
            )
    return right(
        "Right: a tile is skipped if its first key comes after the last key that its last query"
        " sees."
    )
