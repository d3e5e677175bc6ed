"""The exercises of lesson 06."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from course_lib._torch.modes import TorchDispatchMode
from course_lib._torch.tensors import tensors_in
from course_lib.labels import in_both_languages, text
from course_lib.labels import say as say_label
from course_lib.lessons.work import WorkLimit
from course_lib.memory import MemoryMeter
from course_lib.memory.measurement import flop_counter
from course_lib.teaching import Verdict
from course_lib.teaching.exercises import (
    Messages,
    cases,
    draw_case,
    exercise,
    not_answered,
    numbers,
)
from course_lib.teaching.exercises.probes import is_close, reject_mistakes

from .tiles import attention, backward_in_tiles, fold, forward_in_tiles, large_and_small, one_head

say = Messages(__file__)

# A table of mistakes maps the name of a message to the arguments of `fold` or `backward_in_tiles`
# that make the mistake. These mistakes are in several tables:
_NO_MAXIMUM: dict[str, Any] = {"start": 0.0, "larger": lambda old, new: old}
_OF_ONE_BLOCK = {"larger": lambda old, new: new}
_OF_ALL_ROWS = {"of_rows": lambda scores: scores.max().expand(len(scores), 1)}
_FACTOR_OF_ONE = {"factor": lambda old, new: torch.ones_like(new)}
_UPSIDE_DOWN = {"factor": lambda old, new: (new - old).exp()}
_OUTPUT_NOT_RESCALED = {"output": lambda old, shrink, added: old + added}
_LAST_OUTPUT = {"output": lambda old, shrink, added: added}


# Softmax in one pass

#: Operators that only move numbers or allocate memory: these may see all scores at once.
_COPYING = {"_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_"}
_INDEXING = {"index", "index_select"}
_ALLOCATING = ("new_", "empty", "full", "ones", "zeros")


class _ReadRecorder(TorchDispatchMode):
    """A dispatch mode that records the operators that read more than one block of scores at once.

    The mode also records which blocks are read, in order.
    """

    def __init__(self, scores: Tensor, block: int) -> None:
        super().__init__()
        self.scores, self.block = scores, block
        self.too_wide: list[str] = []
        self.blocks_read: list[int] = []  # offset of each block in the scores

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in _COPYING | _INDEXING or name.startswith(_ALLOCATING)):
            for tensor in tensors_in(args):
                self.record_read(name, tensor)
        return operator(*args, **(kwargs or {}))

    def record_read(self, name: str, tensor: Tensor) -> None:
        """Record that the operator `name` reads `tensor`."""
        most = len(self.scores) * self.block
        if tensor.numel() > most or max(tensor.shape, default=0) > self.block:
            self.too_wide.append(name)
        elif tensor.untyped_storage().data_ptr() == self.scores.untyped_storage().data_ptr():
            if [tensor.storage_offset()] != self.blocks_read[-1:]:
                self.blocks_read.append(tensor.storage_offset())


#: Methods by which the host reads a tensor without an operator.
_HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class _HostReadRecorder(TorchFunctionMode):
    """A function mode that reports `tolist`, `numpy` and similar methods to a `_ReadRecorder`.

    Dispatch modes do not see these methods.
    """

    def __init__(self, recorder: _ReadRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _HOST_READS:
            self.recorder.record_read(function.__name__, args[0])
        return function(*args, **(kwargs or {}))


LOG_SUM_EXP_MISTAKES = {
    "common.starts_at_zero": {"start": 0.0},
    "common.sum_not_rescaled": _FACTOR_OF_ONE,
    "log_sum_exp.upside_down": _UPSIDE_DOWN,
    "log_sum_exp.earlier_blocks": {"factor": lambda old, new: torch.zeros_like(new)},
    "common.one_maximum": _OF_ALL_ROWS,
    "log_sum_exp.block_alone": _OF_ONE_BLOCK,
    "log_sum_exp.log_alone": {"result": lambda o, total, largest: (o, total.log())},
}


def log_sum_exp(scores: Tensor, block: int, **mistake: Any) -> Tensor:
    """Compute the log-sum-exp of each row block by block, optionally with a mistake.

    Args:
        scores: Tensor of shape (rows, columns).
        block: Number of columns per block.
        mistake: Arguments of `fold` that introduce a mistake. Without them, the result is right.
    """
    blocks = ((part, part.new_ones(part.shape[1], 1)) for part in scores.split(block, 1))
    return fold(blocks, **mistake)[1]


@exercise()
def check_log_sum_exp(function: Any) -> Verdict:
    """Check the learner's function that computes the log-sum-exp of each row block by block.

    Each block may be read only once.

    Args:
        function: Function that is called as `function(scores, block)`, with the number of columns
            per block.
    """
    rows, block, columns = 7, 7, 23
    along = torch.linspace(-1, 1, columns)
    shift = draw_case(0.0, lambda rng: rng.uniform(0, 0.5))
    waves = torch.linspace(-3 + shift, 3 + shift, 4 * columns).sin().view(4, columns)
    # small scores that rise and fall, large ones of both signs, a row far below 0, and one
    # that falls from 500 to -500
    large = 10 * waves[0], 500 * waves[1], 1000 * waves[2]
    scores = torch.stack([along, -along, *large, waves[3] - 1000, -500 * along])
    given = scores.clone()
    with _ReadRecorder(given, block) as recorder, _HostReadRecorder(recorder):
        found = function(given, block)
    if found is None:
        return not_answered()
    proper = isinstance(found, Tensor) and found.numel() == rows
    say.reject_if(not proper, "log_sum_exp.no_tensor")
    found = found.flatten().float()
    if not is_close(found, scores.logsumexp(1), atol=1e-4):
        table = LOG_SUM_EXP_MISTAKES.items()
        mistakes = {name: log_sum_exp(scores, block, **mistake) for name, mistake in table}
        mistakes["log_sum_exp.last_block"] = log_sum_exp(scores[:, :21], block)
        reject_mistakes(say, found, mistakes, atol=1e-4, equal_nan=True)
        say.reject_if((found[:2] == -math.inf).all(), "log_sum_exp.never_set")
        if found[:2].isnan().any():  # the scores of these rows lie between -1 and 1
            say.wrong("log_sum_exp.nan")
        if found.isnan().any() or (found == math.inf).any():
            say.wrong("log_sum_exp.overflow")
        if (found == -math.inf).any():
            say.wrong("log_sum_exp.sum_of_zero")
        say.wrong("log_sum_exp.other_numbers")
    for name in recorder.too_wide:
        say.reject("log_sum_exp.more_than_a_block", name=name)
    again = len(set(recorder.blocks_read)) < len(recorder.blocks_read)
    say.reject_if(again, "log_sum_exp.second_pass")
    return say.right("log_sum_exp.right")


# Forward and backward in tiles

#: Blocks of the small case, which divide neither its 40 queries nor its 56 keys.
_BLOCKS = 16, 24
#: Maximal number of operators in an answer to the case of `_products`, which has 128 tiles.
_OPERATORS = 50_000

_close = partial(is_close, rtol=1e-6, equal_nan=True)


class _TileRecorder(TorchDispatchMode):
    """A dispatch mode that records results of operators that hold more scores than one tile.

    Vectors, and tensors with an axis of length `d`, do not hold scores.
    """

    def __init__(self, block_q: int, block_k: int, d: int) -> None:
        super().__init__()
        self.tile, self.d = block_q * block_k, d
        self.too_large: list[str] = []  # their shapes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            axes = [size for size in tensor.shape if size > 1]
            if len(axes) > 1 and self.d not in axes and math.prod(axes) > self.tile:
                self.too_large.append(f"`{tuple(tensor.shape)}`")
        return result


def _products(function: Callable, case: tuple[Tensor, ...]) -> float:
    """Return the number of a function's matrix products, in units of 2 N² d FLOPs.

    The results of the function must have been checked before.

    Args:
        function: The learner's function.
        case: Arguments of `function` except the block sizes, with 256 queries and keys of 8
            features. The block sizes are 16 and 32.

    Raises:
        WrongAnswer: The function keeps more scores than those of one tile live at once, exchanges
            the two block sizes, uses much smaller tiles, or does not use PyTorch's matrix products.
    """
    (n, d), blocks = case[0].shape, (16, 32)
    slow = say("common.too_many_operators", limit=_OPERATORS)
    with MemoryMeter() as meter, WorkLimit(_OPERATORS, slow):
        function(*case, *blocks)
    with _TileRecorder(*blocks, d) as recorder:
        function(*case, *blocks)
    say.reject_if(meter.peak_bytes >= n * n * 4, "common.all_scores_live")
    for shape in recorder.too_large:
        say.reject("common.larger_than_a_tile", shape=shape)
    say.reject_if(not meter.flops, "common.no_product")
    _check_block_order(function, case, meter.flops / n)
    return round(meter.flops / (2 * n * n * d), 2)


def _check_block_order(
    function: Callable, case: tuple[Tensor, ...], flops_per_query: float
) -> None:
    """Raise `WrongAnswer` if `function` uses `block_q` for keys and `block_k` for queries.

    With 48 queries and blocks of 64 queries and 32 keys, a tile has 48 x 32 scores, or 32 x 64 if
    the blocks are exchanged. A padded answer is not judged, because its tiles have as many scores
    as those of exchanged blocks.

    Args:
        flops_per_query: Maximum for answers without padding; an answer with more FLOPs is padded.
    """
    (q, k, v, *rest), queries, blocks = case, 48, (64, 32)
    few = (q[:queries], k, v, *(x[:queries] for x in rest))
    with MemoryMeter() as meter, _TileRecorder(queries, blocks[1], q.shape[1]) as recorder:
        function(*few, *blocks)
    if meter.flops <= queries * flops_per_query:
        for shape in recorder.too_large:
            say.reject("common.blocks_exchanged", shape=shape)


FORWARD_MISTAKES = {
    "forward.no_maximum": _NO_MAXIMUM,
    "common.starts_at_zero": {"start": 0.0},
    "forward.tile_alone": _OF_ONE_BLOCK,
    "common.one_maximum": _OF_ALL_ROWS,
    "common.sum_not_rescaled": {"total": lambda old, shrink, added: old + added},
    "common.output_not_rescaled": _OUTPUT_NOT_RESCALED,
    "forward.last_tile": _LAST_OUTPUT,
    "forward.not_divided": {"result": lambda o, total, largest: (o, largest + total.log())},
    "forward.softmax_of_a_tile": {
        "weigh": lambda scores, new: scores.softmax(1),
        **_FACTOR_OF_ONE,
        "result": lambda o, total, largest: (o, largest + total.log()),
    },
    "forward.log_alone": {"result": lambda o, total, largest: (o / total, total.log())},
}


@exercise()
def check_forward(function: Any) -> Verdict:
    """Check the learner's forward pass of flash attention for one head.

    A tile is a pair of a query block and a key block. Output and log-sum-exp must be right in
    float64, for large scores and for block sizes that do not divide the sequence lengths. The
    function may run only two matrix products per tile. The scores of at most one tile may be live
    at once.

    Args:
        function: Function that is called as `function(q, k, v, block_q, block_k)`, and returns the
            output and the log-sum-exp of each query.
    """
    q, k, v = large_and_small(40, 56, torch.float64)
    case = 8 * q, k, v  # scores of ±8000, whose differences overflow `exp` in float64 too
    found = function(*(x.clone() for x in case), *_BLOCKS)
    if found is None:
        return not_answered()
    numels = [getattr(x, "numel", int)() for x in found] if isinstance(found, tuple | list) else []
    say.reject_if(numels != [640, 40] or found[0].shape != (40, 16), "forward.two_tensors")
    found = [found[0].double(), found[1].flatten().double()]
    if not _close(found, wanted := attention(*case)):
        _reject_forward(found, wanted, *case)
    products = _products(function, one_head(256, 256, 8, torch.float32)[:3])
    say.reject_if(products != 2, "forward.products", products=products)
    return say.right("forward.right")


def _reject_forward(
    found: list[Tensor], wanted: list[Tensor], q: Tensor, k: Tensor, v: Tensor
) -> NoReturn:
    def in_tiles(q: Tensor, keys: int = len(k), **mistake: Any) -> list[Tensor]:
        return forward_in_tiles(q, k[:keys], v[:keys], *_BLOCKS, **mistake)

    (n, d), (block_q, block_k) = q.shape, _BLOCKS
    whole_q, whole_k = n // block_q * block_q, len(k) // block_k * block_k
    mistakes = {name: in_tiles(q, **mistake) for name, mistake in FORWARD_MISTAKES.items()}
    other_cases = {
        "common.no_scale": in_tiles(q * d**0.5),
        "forward.divided_by_d": in_tiles(q * d**-0.5),
        "forward.divided_by_keys": in_tiles(q * (d / len(k)) ** 0.5),
        "forward.last_keys": (in_tiles(q, n), in_tiles(q, whole_k)),
    }
    reject_mistakes(say, found, mistakes | other_cases, rtol=1e-6, equal_nan=True)
    first_rows = _close([x[:whole_q] for x in found], [x[:whole_q] for x in wanted])
    say.reject_if(first_rows, "forward.last_queries")
    right_output, right_lse = map(_close, found, wanted)
    say.reject_if(right_lse, "common.output")
    if not all(x.isfinite().all() for x in found):
        say.wrong("forward.overflow")
    say.wrong("forward.log_sum_exp" if right_output else "common.log_sum_exp")


# The small case has 16 features, so √d = 4.
BACKWARD_MISTAKES: dict[str, dict[str, Any]] = {
    "backward.no_d": {"gradient": lambda p, dp, d: p * dp},
    "backward.d_of_a_tile": {"gradient": lambda p, dp, d: p * (dp - (p * dp).sum(1, keepdim=True))},
    "backward.softmax_of_a_tile": {"weigh": lambda scores, lse: scores.softmax(1)},
    "backward.s_not_scaled": {"weigh": lambda scores, lse: (4 * scores - lse).exp()},
    "backward.ds_not_scaled": {"gradient": lambda p, dp, d: 4 * p * (dp - d)},
    "backward.dq_overwritten": {"adds": (False, True, True)},
    "backward.dk_and_dv_overwritten": {"adds": (True, False, False)},
    "backward.dv_overwritten": {"adds": (True, True, False)},
    "backward.dk_overwritten": {"adds": (True, False, True)},
    "backward.d_outside": {"gradient": lambda p, dp, d: p * dp - d},
    "backward.d_added": {"gradient": lambda p, dp, d: p * (dp + d)},
    "backward.diagonal": {"gradient": lambda p, dp, d: p * (1 - p) * dp},
    "backward.all_overwritten": {"adds": (False, False, False)},
    "backward.divided": {"weigh": lambda scores, lse: scores.exp() / lse.exp()},
}


@exercise()
def check_backward(function: Any) -> Verdict:
    """Check the learner's backward pass of flash attention for one head.

    A tile is a pair of a query block and a key block. The gradients must be right in float64, and
    the scores of at most one tile may be live at once. The function may run five matrix products
    per tile, in one pass over the tiles, or seven in two passes.

    Args:
        function: Function that is called as `function(q, k, v, o, lse, grad_o, block_q, block_k)`,
            and returns the gradients of q, k and v.
    """
    case = one_head(40, 56, 16, torch.float64)
    found = function(*(x.clone() for x in case), *_BLOCKS)
    if found is None or (
        isinstance(found, tuple) and all(isinstance(x, Tensor) and not x.any() for x in found)
    ):
        return not_answered()
    inputs = [x.clone().requires_grad_() for x in case[:3]]
    wanted = torch.autograd.grad(attention(*inputs)[0], inputs, case[-1])
    three = isinstance(found, tuple | list) and all(isinstance(x, Tensor) for x in found)
    shapes = [x.shape for x in wanted]
    say.reject_if(not three or [x.shape for x in found] != shapes, "backward.three_tensors")
    found = [x.double() for x in found]
    if not _close(found, wanted):
        mistakes = {
            name: backward_in_tiles(*case, *_BLOCKS, **mistake)
            for name, mistake in BACKWARD_MISTAKES.items()
        }
        reject_mistakes(say, found, mistakes, rtol=1e-6, equal_nan=True)
        _reject_gradients(found, wanted)
    products = _products(function, one_head(256, 256, 8, torch.float32))
    say.reject_if(products not in (5, 7), "backward.products", products=products)
    return say.right("backward.right" if products == 5 else "backward.right_in_two_passes")


def _reject_gradients(found: list[Tensor], wanted: Sequence[Tensor]) -> NoReturn:
    elsewhere = all(any(_close(one, other) for other in wanted) for one in found)
    say.reject_if(elsewhere, "backward.order")
    pairs = list(zip(found, wanted, strict=True))
    off = [name for name, pair in zip(("dQ", "dK", "dV"), pairs, strict=True) if not _close(*pair)]
    for name, times in (("backward.too_large", 4), ("backward.too_small", 1 / 4)):
        all_of_them = all(_close(one, other) or _close(one, times * other) for one, other in pairs)
        say.reject_if(all_of_them, name, names=", ".join(off))
    say.wrong("backward.not_yet", names=", ".join(off))


@numbers(
    {
        "one_for_two": {"forward": 2, "backward": 5, "two passes": 7},
        "s_not_again": {"backward": 8},
        "one_pass": {"two passes": 10},
        "dp_once": {"two passes": 12},
        "all_twice": {"two passes": 20},
    }
)
def check_flops() -> dict[str, int]:
    """Check the learner's count of the FLOPs of flash attention, in units of N² d.

    N is the number of tokens, and d the head size. The answer is a dict with three keys. "forward"
    is for the forward pass, "backward" for a backward pass that goes over the tiles once, and "two
    passes" for a backward pass that goes over them twice. The decorated function returns the right
    answer, and the decorator `numbers` turns it into a check.
    """
    return {"forward": 4, "backward": 10, "two passes": 14}


#: Bytes of Q in one head, and of the log-sum-exps of all 32 heads
_ONE, _LSE = 4096 * 128 * 2, 32 * 4096 * 4


@numbers(
    {
        "all_heads": 128 * _ONE + _LSE,
        "no_log_sum_exp": 80 * _ONE,
        "bf16_log_sum_exp": 80 * _ONE + _LSE // 2,
        "two_per_row": 80 * _ONE + 2 * _LSE,
        "of_key_heads": 80 * _ONE + _LSE // 4,
        "no_output": 48 * _ONE + _LSE,
        "numbers": (40 * _ONE, 40 * _ONE + _LSE // 4),
        "two_mistakes": 128 * _ONE,
        "four_bytes": 160 * _ONE + _LSE,
    },
    in_bytes=True,
)
def check_grouped_bytes() -> int:
    """Check the learner's count of the bytes that flash attention saves for backward.

    The layer has 32 query heads, 8 key heads, a head size of 128, and 4096 tokens in bf16. The
    decorated function computes the right answer, and the decorator `numbers` turns it into a check.
    """
    return (32 + 8 + 8 + 32) * _ONE + _LSE


def _draw_tiles(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.randint(40, 200), rng.randint(40, 200), rng.randint(8, 40), rng.randint(8, 40)


def tile_count(
    last: Callable[..., int] = lambda first, block_q, queries: min(first + block_q, queries),
    seen: Callable[..., int] = lambda last, queries, keys: max(0, last + keys - queries),
    rounded: Callable[..., int] = lambda seen, block_k: -(-seen // block_k),
) -> Callable[[int, int, int, int], int]:
    """Return a function that counts the tiles of causal attention, optionally with a mistake.

    A tile is a pair of a query block and a key block. Each query block needs the tiles up to the
    last key to which the block's last query may attend.

    Args:
        last, seen, rounded: Functions for the steps of the computation. The defaults are right, and
            other functions introduce a mistake.

    Returns:
        Function of (queries, keys, block_q, block_k) that returns the number of tiles.
    """

    def count(queries: int, keys: int, block_q: int, block_k: int) -> int:
        lasts = [last(first, block_q, queries) for first in range(0, queries, block_q)]
        return sum(rounded(seen(each, queries, keys), block_k) for each in lasts)

    return count


@numbers(
    {
        "all": tile_count(seen=lambda last, queries, keys: keys),
        "top_left": tile_count(seen=lambda last, queries, keys: min(last, keys)),
        "half": lambda *case: tile_count(seen=lambda last, queries, keys: keys)(*case) / 2,
        "diagonal": tile_count(rounded=lambda seen, block_k: -(-max(0, seen - 1) // block_k)),
        "negative": tile_count(seen=lambda last, queries, keys: last + keys - queries),
        "seen_in_part": tile_count(rounded=lambda seen, block_k: seen // block_k),
        "past_the_last": tile_count(last=lambda first, block_q, queries: first + block_q),
        "first_query": tile_count(last=lambda first, block_q, queries: first + 1),
        "one_too_many": tile_count(rounded=lambda seen, block_k: seen // block_k + 1),
    },
    cases=lambda: cases(
        (
            (512, 512, 64, 64),
            (100, 100, 32, 16),
            (64, 256, 32, 64),
            (64, 16, 16, 16),  # the first three query blocks may not attend to any key
            (128, 64, 32, 32),
            (100, 70, 32, 16),
            (8, 4, 2, 1),
        ),
        _draw_tiles,
    ),
)
def check_causal_tiles(queries: int, keys: int, block_q: int, block_k: int) -> int:
    """Check the learner's count of the tiles that causal attention must compute.

    A tile is a pair of a query block and a key block. It must be computed if the causal mask allows
    at least one of its scores. The mask is aligned at the bottom right, so the last query may
    attend to all keys. The decorated function computes the right answer, and the decorator
    `numbers` turns it into a check.

    Args:
        queries, keys: Number of queries and of keys.
        block_q, block_k: Number of queries and of keys per block.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    parts = [part for rows in mask.split(block_q) for part in rows.split(block_k, 1)]
    return sum(bool(part.any()) for part in parts)


# Three lines of a kernel

KERNEL_MISTAKES = {
    "kernel.no_maximum": _NO_MAXIMUM,
    "kernel.block_alone": _OF_ONE_BLOCK,
    "kernel.one_maximum": _OF_ALL_ROWS,
    "common.sum_not_rescaled": _FACTOR_OF_ONE,
    "kernel.upside_down": _UPSIDE_DOWN,
    "common.output_not_rescaled": _OUTPUT_NOT_RESCALED,
    "kernel.columns": {"output": lambda old, shrink, added: old * shrink.T + added},
    "kernel.last_block": _LAST_OUTPUT,
    "kernel.all_rescaled": {"output": lambda old, shrink, added: (old + added) * shrink},
}


@exercise()
def check_kernel(run: Any) -> Verdict:
    """Check the learner's Triton kernel for the forward pass of flash attention.

    Args:
        run: Function that is called as `run(q, k, v)` for one head, and returns the output and the
            log-sum-exp of each query.
    """
    if _is_untouched(run):
        return not_answered()
    try:
        import triton  # noqa: F401 - whether it is installed
    except ImportError:
        return Verdict(None, say("kernel.no_triton"))
    q, k, v = large_and_small(45, 45)  # the last block of 16 has 13 rows
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with flop_counter() as counter, numpy.errstate(all="ignore"):  # Triton's interpreter is NumPy
        try:
            found = run(*(x.to(device) for x in (q, k, v)))
        except Exception as error:  # Triton's interpreter wraps errors in errors
            raise _root_cause(error) from None
    if found is None:
        return not_answered()
    say.reject_if(counter.get_total_flops(), "kernel.by_pytorch")
    wanted = attention(q, k, v)
    found = [x.float().cpu().reshape(y.shape) for x, y in zip(found, wanted, strict=True)]
    right_output, right_lse = map(partial(is_close, atol=2e-3, equal_nan=True), found, wanted)
    if not (right_output and right_lse):
        # the kernel computes whole blocks, in which the padding queries are zero
        queries, keys, values = (pad(x, (0, 0, 0, 3)) for x in (q, k, v))

        def of_kernel(k: Tensor, v: Tensor, **mistake: Any) -> list[Tensor]:
            return [x[:45] for x in forward_in_tiles(queries, k, v, 16, 16, **mistake)]

        mistakes = {name: of_kernel(k, v, **mistake) for name, mistake in KERNEL_MISTAKES.items()}
        mistakes["kernel.beyond"] = of_kernel(keys, values)
        reject_mistakes(say, found, mistakes, atol=2e-3, equal_nan=True)
        say.reject_if(right_lse, "common.output")
        finite = all(x.isfinite().all() for x in found)
        say.wrong("common.log_sum_exp" if finite else "kernel.overflow")
    return say.right("kernel.right")


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_untouched(run: Any) -> bool:
    """Return whether `fold`, which the learner's kernel calls, is unchanged.

    The original `fold` only calls `exp` and `sum`.
    """
    function = getattr(run, "__globals__", {}).get("fold")
    code = getattr(getattr(function, "fn", function), "__code__", None)
    return code is not None and set(code.co_names) <= {"tl", "exp", "sum"}


# Merging the attention outputs of two parts of the keys


def merge_parts(
    *parts: Tensor, weigh: Callable = lambda part, lse, other: (part - lse).exp()
) -> list[Tensor]:
    """Merge the attention outputs of two parts of the keys, optionally with a mistake.

    Args:
        parts: Four tensors o1, lse1, o2 and lse2. They are the output and the log-sum-exp of
            attention to the first part of the keys, and the same for the second part.
        weigh: Function that returns the weight of a part. Its arguments are three log-sum-exps: of
            this part, of all keys, and of the other part. The default is right.

    Returns:
        The output and the log-sum-exp for all keys.
    """
    o1, lse1, o2, lse2 = parts
    lse = torch.logaddexp(lse1, lse2)
    one, two = weigh(lse1, lse, lse2), weigh(lse2, lse, lse1)
    return [o1 * one[:, None] + o2 * two[:, None], lse]


MERGE_MISTAKES: dict[str, Callable] = {
    "merge.mean": lambda part, lse, other: torch.full_like(lse, 0.5),
    "merge.sum": lambda part, lse, other: torch.ones_like(lse),
    "merge.swapped": lambda part, lse, other: (other - lse).exp(),
    "merge.linear": lambda part, lse, other: part / (part + other),
    "merge.one_part": lambda part, lse, other: (part > other).to(lse.dtype),
    "merge.not_divided": lambda part, lse, other: (part - torch.maximum(part, other)).exp(),
}
#: Name of a message -> wrong log-sum-exps from those of both parts.
MERGED_LSE_MISTAKES: dict[str, Callable] = {
    "merge.lse_sum": torch.add,
    "merge.lse_maximum": torch.maximum,
    "merge.lse_mean": lambda one, two: (one + two) / 2,
    "merge.lse_not_logarithm": lambda one, two: one.exp() + two.exp(),
    "merge.lse_of_shares": lambda one, two: torch.zeros_like(one),
}


def _two_parts(
    q: Tensor, k: Tensor, v: Tensor, first: int, *, causal: bool = False, apart: float = 0.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists: attention to two parts of the keys, and attention to all keys.

    The first list is [o1, lse1, o2, lse2], the outputs and log-sum-exps of both parts. The second
    list is [o, lse].

    Args:
        q, k, v: Queries, keys and values of one head.
        first: Number of keys in the first part.
        causal: Whether attention is causal.
        apart: Number that is added to the scores of the first keys.
    """
    scores = q @ k.T * q.shape[1] ** -0.5
    scores[:, :first] += apart
    if causal:
        scores += torch.full_like(scores, -math.inf).triu(len(k) - len(q) + 1)
    found = []
    for keys in (slice(first), slice(first, None), slice(None)):
        # the probabilities of a row without a key are nan, and its output is 0
        o = scores[:, keys].softmax(1).nan_to_num() @ v[keys]
        found += o, scores[:, keys].logsumexp(1)
    return found[:4], found[4:]


@exercise()
def check_merge(function: Any) -> Verdict:
    """Check the learner's function that merges the attention outputs of two parts of the keys.

    Args:
        function: Function that is called as `function(o1, lse1, o2, lse2)`, with the output and the
            log-sum-exp for each part. It returns the output and the log-sum-exp for all keys.
    """
    q, k, v, *_ = one_head(40, 56, 16, torch.float64)
    q[::5] /= 400
    parts, wanted = _two_parts(q, k, v, 17)
    # four queries see no key of the second part
    causal, seen = _two_parts(q, k, v, 20, causal=True)
    rounded = [x.bfloat16() if x.dim() == 2 else x.float() for x in parts]
    for message, given, right, atol in (
        (None, parts, wanted, 1e-8),
        ("merge.overflow", *_two_parts(*large_and_small(40, 56, torch.float64), 17), 1e-8),
        ("merge.apart", *_two_parts(q, k, v, 17, apart=2000.0), 1e-8),
        ("merge.apart", *_two_parts(q, k, v, 17, apart=-2000.0), 1e-8),
        ("merge.no_key", causal, seen, 1e-8),
        ("merge.no_key", causal[2:] + causal[:2], seen, 1e-8),
        ("merge.digits", rounded, wanted, 0.02),
    ):
        try:
            found = function(*(x.clone() for x in given))
        except RuntimeError:
            if message != "merge.digits":
                raise
            say.reject("merge.dtypes")
        if found is None:
            return not_answered()
        two = isinstance(found, tuple | list) and all(isinstance(x, Tensor) for x in found)
        two = two and [x.shape for x in found] == [x.shape for x in right]
        say.reject_if(not two, "merge.two_tensors")
        o, lse = (x.double() for x in found)
        right_lse = is_close(lse, right[1], rtol=1e-6)
        if not (right_lse and is_close(o, right[0], rtol=1e-6, atol=atol)):
            if message:
                say.reject(message)
            made = {name: each(*given[1::2]) for name, each in MERGED_LSE_MISTAKES.items()}
            reject_mistakes(say, lse, made, rtol=1e-6)
            say.reject_if(not right_lse, "merge.log_sum_exp")
            made = {name: merge_parts(*given, weigh=w)[0] for name, w in MERGE_MISTAKES.items()}
            reject_mistakes(say, o, made, rtol=1e-6)
            say.wrong("merge.output")
    return say.right("merge.right")


def triton_here() -> tuple[ModuleType | None, ModuleType | SimpleNamespace, Callable]:
    """Return the modules `triton` and `triton.language`, and the decorator `triton.jit`.

    If Triton is not installed, the function prints a line. It then returns None, a stand-in for
    `triton.language`, and a decorator that does nothing, so that cells which define kernels still
    run.

    Raises:
        RuntimeError: There is no GPU, and Triton was imported before the lesson could turn on
            Triton's interpreter.
    """
    try:
        import triton
        import triton.language as tl
    except ImportError:
        missing = text(
            "Triton is not installed here (on Linux: pip install triton), so you can read this"
            " section's kernels but not run them."
        )
        print(say_label(missing))
        return None, SimpleNamespace(constexpr=int), lambda function: function
    from course_lib.attention.kernels import INTERPRETED

    if not (INTERPRETED or torch.cuda.is_available()):
        too_early = text(
            "Triton was imported before this lesson's first cell and so cannot run on this CPU:"
            " restart the kernel, and run this lesson from its first cell."
        )
        # The text is in both languages, because the page's switch cannot change an error message.
        raise RuntimeError("\n".join(in_both_languages(too_early)))
    return triton, tl, triton.jit
