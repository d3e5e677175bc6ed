"""The storages of tensors, and the checks of the reader's memory meters."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from course_lib._torch.tensors import tree_leaves
from course_lib.labels import join_labels, verbatim
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import draw_case, exercise, not_answered, right, wrong


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested values, by address."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


@dataclass(frozen=True)
class _Case:
    """Code that runs under the reader's meter; what it creates stays alive until the meter is read.

    Attributes:
        code: Statements in one line, because messages show them.
        live, peak: Right bytes at the end, and at the peak.
        before: Code that runs before the meter starts.
    """

    code: str
    live: int
    peak: int
    before: str = ""


_NEW = _Case("x = torch.empty(100)", 400, 400)
# Only the storage stays alive, not the tensor that was created first.
_A_VIEW = _Case("x = torch.empty(100).view(10, 10).t()[1:].detach()", 400, 400)
_A_VIEW_OF_OLD = _Case("y = x.view(10, 10)", 0, 0, before="x = torch.empty(100)")
_CHANGED = _Case("x = torch.empty(100); x.add_(1); x.add_(1)", 400, 400)
_INTO_OUT = _Case("x, y = torch.empty(100), torch.empty(100); torch.neg(x, out=y)", 800, 800)
# The old tensor is released after the new one was created.
_REPLACED = _Case("x = torch.empty(100); x = x * 2; x = x * 2", 400, 800)
# A value and its index have two storages. The input is released.
_TWO_RESULTS = _Case("value, index = torch.empty(100).max(0)", 12, 412)
_EVERY_FOURTH = _Case("x = torch.empty_strided((10,), (4,))", 148, 148)
_QKV = _Case(
    "q, k, v = torch._transform_bias_rescale_qkv(torch.empty(1, 5, 12), torch.empty(12), 2)",
    240,
    528,
)
# So many storages are released that some of the new ones certainly get an old address.
_USED_AGAIN = _Case(
    "x = [torch.empty(100) for _ in range(300)]; del x; x = [torch.empty(100) for _ in range(300)]",
    120_000,
    120_000,
)

_VIEW = (
    "You counted the storage of a view as new. A view shares the storage of its base, which stays"
    " in memory as long as one of them exists."
)
_KEYS = join_labels([_VIEW, "The keys of `given` are addresses, so compare `address`."], " ")
_OLD = (
    "You counted a view of a tensor that existed before the meter started. Its storage was passed"
    " as an argument, so it is not new."
)
_IN_PLACE = (
    "You counted a tensor that an operator changed in place. It was an argument, so its storage is"
    " not new."
)
_OUT = (
    "You counted the tensor that was given as `out=`. It was passed as a keyword argument, so"
    " its storage is in `kwargs` and not new."
)
_RELEASED = (
    "You kept counting tensors that were released. When a storage is released, subtract its bytes."
)
_SEVERAL = (
    "You counted one result of an operator that returns several tensors. Count the storage of each."
)
_TENSOR_GONE = (
    "You stopped counting a storage that is still alive. A tensor can be released before its"
    " storage, which a view still uses, so attach the finalizer to the storage."
)
_OWN = (
    "You counted the bytes of the tensor's own numbers. Its storage can be larger, so count"
    " `storage.nbytes()`."
)
_SHARED = (
    "You counted one new storage for each of three results that share it. Count each storage once."
)
_METER: tuple[tuple[_Case, str], ...] = (
    (_A_VIEW, _VIEW),
    (_CHANGED, _IN_PLACE),
    (_INTO_OUT, _OUT),
    (_A_VIEW_OF_OLD, _OLD),
    (_REPLACED, _RELEASED),
    (_TWO_RESULTS, _SEVERAL),
    (_EVERY_FOURTH, _OWN),
    (_QKV, _SHARED),
)
# The first case that differs is shown. In a meter with a wrong condition, a storage that is left
# out or counted twice is the only possible mistake.
_CONDITION: tuple[tuple[_Case, str], ...] = (
    (_A_VIEW, _KEYS),
    (_CHANGED, _IN_PLACE),
    (_INTO_OUT, _OUT),
    (_A_VIEW_OF_OLD, _OLD),
    (
        _REPLACED,
        "You left out the result of `x * 2`. Its storage is new, although the operator also has an"
        " argument.",
    ),
    (_TWO_RESULTS, "You left out a result of an operator that returns several tensors."),
)


def _draw_cases(rng: random.Random) -> tuple[tuple[_Case, str], ...]:
    """Return new, viewed and released storages of a drawn size."""
    n = rng.randint(200, 900)
    code = f"x = torch.empty({n}); y = x.view(-1, 1); z = x * 2; w = x + z; del w"
    return ((_Case(code, 8 * n, 12 * n), _RELEASED),)


def _counts(meter: Any, case: _Case) -> tuple[int, int]:
    """Run a case under a meter; return its live bytes and its peak."""
    names: dict[str, Any] = {"torch": torch}
    exec(case.before, names)
    with meter:
        exec(case.code, names)
        return meter.live, meter.peak


def _verdict(answer: Any, cases: tuple[tuple[_Case, str], ...], praise: str) -> Verdict:
    """Return the verdict on the first case in which the meter is wrong, or the praise."""
    # This case comes first. A meter that remembers all addresses would fail any other one by
    # chance. Such a meter misses some new storages, and the other mistakes don't.
    live, peak = _counts(answer(), _USED_AGAIN)
    if peak > 0 and 0 <= live < _USED_AGAIN.live:
        reason = "An address can be used again after its storage is released."
        return _differs(_USED_AGAIN, live, peak, reason)
    for case, reason in (*cases, *draw_case((), _draw_cases)):
        live, peak = _counts(answer(), case)
        if (live, peak) != (case.live, case.peak):
            if case is _A_VIEW and live < case.live:
                reason = _TENSOR_GONE
            return _differs(case, live, peak, reason)
    return right(praise)


def _differs(case: _Case, live: int, peak: int, reason: str) -> Verdict:
    message = text(
        "Not yet. With `{code}`, your meter counts {live:,} live bytes and a peak of {peak:,}, but"
        " {right:,} and {most:,} are right. {reason}",
        code=verbatim(case.code),
        live=live,
        peak=peak,
        right=case.live,
        most=case.peak,
        reason=reason,
    )
    return wrong(message, exact=True)


@exercise(
    hint=(
        "`given` has the storages of the arguments, by address. Which addresses are new?",
        "A view and a result in place use a storage of an argument. Look up the `address` of the"
        " result.",
    )
)
def check_new_storages(answer: Any) -> Verdict:
    """Check a meter whose condition for a new storage is the reader's."""
    new, view = _counts(answer(), _NEW), _counts(answer(), _A_VIEW)
    if new == view == (0, 0):
        return not_answered()
    if new == (0, 0):
        return wrong(
            "You counted the storages of the arguments. Count the others, which are new.",
            exact=True,
        )
    return _verdict(
        answer, _CONDITION, "Right. A storage is new if it is not among those of the arguments."
    )


@exercise(
    hint=(
        "A storage of the result is new if it is not among those of the arguments. What must"
        " happen to each new one?",
        "Look at every result, and at each of its storages once. Which change of `live` belongs to"
        " the moment when a storage is released, and who calls you then?",
    )
)
def check_meter(answer: Any) -> Verdict:
    """Check a dispatch mode with `live` and `peak` in bytes, on cases that are easy to miss."""
    if _counts(answer(), _A_VIEW) == (0, 0):
        return not_answered()
    return _verdict(
        answer,
        _METER,
        "Right: views, operators in place, `out=`, several results, shared storages and released"
        " tensors are all counted correctly.",
    )
