"""The storages of tensors, and the checks of the reader's memory meters."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import exercise, not_answered, right, wrong


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested values, by address."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


# A case runs code under the reader's meter and returns the right (bytes live at the end, bytes at
# the peak). Tensors in `held` stay alive until the meter has been read.
Case = Callable[[list], tuple[int, int]]


def _a_new_tensor(held: list) -> tuple[int, int]:
    held.append(torch.empty(100))
    return 400, 400


def _a_view(held: list) -> tuple[int, int]:
    held.append(torch.empty(100).view(10, 10).t()[1:].detach())  # only the storage stays alive
    return 400, 400


def _in_place(held: list) -> tuple[int, int]:
    held.append(torch.empty(100))
    for _ in range(5):
        held[0].add_(1)
    return 400, 400


def _into_out(held: list) -> tuple[int, int]:
    held += [torch.empty(100), torch.empty(100)]
    for _ in range(5):
        torch.neg(held[0], out=held[1])
    return 800, 800


def _released(held: list) -> tuple[int, int]:
    x = torch.empty(100)
    for _ in range(5):
        x = x * 2  # the old tensor is released after the new one was created
    held.append(x)
    return 400, 800


def _several_results(held: list) -> tuple[int, int]:
    held += torch.empty(100).max(0)  # a value and its index, two storages; the input is released
    return 12, 412


def _one_number_of_many(held: list) -> tuple[int, int]:
    held.append(torch.empty_strided((10,), (4,)))  # every fourth of 37 numbers
    return 148, 148


def _three_results_in_one_storage(held: list) -> tuple[int, int]:
    product, bias = torch.empty(1, 5, 12), torch.empty(12)
    held += torch._transform_bias_rescale_qkv(product, bias, 2)  # Q, K and V of two heads
    return 240, 528


_VIEW = (
    "You counted the storage of a view as new. A view shares the storage of its base, which stays"
    " in memory as long as one of them exists."
)
_IN_PLACE = (
    "You counted a tensor that an operator changed in place. It was an argument, so its storage is"
    " not new."
)
_OUT = (
    "You counted the tensor that was given as `out=`. It was an argument by name, so its storage is"
    " in `kwargs` and not new."
)
_RELEASED = (
    "You kept counting tensors that were released. When a storage is released, subtract its bytes."
)
_SEVERAL = (
    "You counted one result of an operator that returns several tensors. Count the storage of each."
)
_OWN = (
    "You counted the bytes of the tensor's own numbers. Its storage can be larger, so count"
    " `storage.nbytes()`."
)
_SHARED = (
    "You counted one new storage for each of three results that share it. Count each storage once."
)
_METER: tuple[tuple[Case, str], ...] = (
    (_a_view, _VIEW),
    (_in_place, _IN_PLACE),
    (_into_out, _OUT),
    (_released, _RELEASED),
    (_several_results, _SEVERAL),
    (_one_number_of_many, _OWN),
    (_three_results_in_one_storage, _SHARED),
)
# The first case that differs is shown. In a meter with a wrong condition, a storage that is left
# out or counted twice is the only possible mistake.
_CONDITION: tuple[tuple[Case, str], ...] = (
    (_a_view, _VIEW),
    (_in_place, _IN_PLACE),
    (_into_out, _OUT),
    (
        _released,
        "You left out the result of `x * 2`. Its storage is new, although the operator also has an"
        " argument.",
    ),
    (_several_results, "You left out a result of an operator that returns several tensors."),
)


def _counts(meter: Any, case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """Run a case under a meter; return its (live, peak) and the right ones."""
    held: list = []
    with meter:
        expected = case(held)
        found = meter.live, meter.peak
    return found, expected


def _verdict(answer: Any, cases: tuple[tuple[Case, str], ...], praise: str) -> Verdict:
    """Return the verdict on the first case in which the meter is wrong, or the praise."""
    for case, reason in cases:
        (live, peak), (right_live, right_peak) = _counts(answer(), case)
        if (live, peak) != (right_live, right_peak):
            message = text(
                "Not yet. Your meter counts {live:,} live bytes and a peak of {peak:,}, but"
                " {right:,}"
                " and {most:,} are right. {reason}",
                live=live,
                peak=peak,
                right=right_live,
                most=right_peak,
                reason=reason,
            )
            return wrong(message, exact=True)
    return right(praise)


@exercise(
    hint=(
        "`given` has the storages of the arguments, by address. Which addresses are new?",
        "A storage is new if its `address` is not in `given`.",
    )
)
def check_new_storages(answer: Any) -> Verdict:
    """Check a meter whose condition for a new storage is the reader's."""
    new, _ = _counts(answer(), _a_new_tensor)
    view, _ = _counts(answer(), _a_view)
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
        "Collect the `_cdata` of the storages in `args` and `kwargs`. For each other storage of the"
        " result, once, call `self.count(storage.nbytes())` and"
        " `weakref.finalize(storage, self.count, -storage.nbytes())`, where `count` adds to `live`"
        " and raises `peak`.",
    )
)
def check_meter(answer: Any) -> Verdict:
    """Check a dispatch mode with `live` and `peak` in bytes, on cases that are easy to miss."""
    if _counts(answer(), _a_view)[0] == (0, 0):
        return not_answered()
    return _verdict(
        answer,
        _METER,
        "Right: views, operators in place, `out=`, several results, shared storages and released"
        " tensors are all counted correctly.",
    )
