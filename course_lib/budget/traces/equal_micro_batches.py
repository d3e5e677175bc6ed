"""Group micro-batches that run the same operators, so that a trace runs only one per group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_not
from typing import Any

from torch import Tensor, nn

from course_lib._torch.generators import RandomState
from course_lib._torch.modes import TorchDispatchMode
from course_lib._torch.symbolic import detect_fake_mode
from course_lib._torch.tensors import items_in, tensors_in
from course_lib.budget.hugging_face import without_cache
from course_lib.budget.loss import LossSum, loss_of
from course_lib.budget.recipe import Recipe


class OpSignature(TorchDispatchMode):
    """Dispatch mode that computes a hash of all operators that run in it.

    The hash includes the shapes of the operators' outputs and the order of the operators.

    Attributes:
        seen: Hash of the operators that have run so far; 0 before the first one.
    """

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen = hash((self.seen, func, *[tensor.shape for tensor in tensors_in(result)]))
        return result


def groups_of(
    model: nn.Module, micro_batches: Sequence[Any], loss_sum: LossSum | None = None
) -> list[list[int]]:
    """Return groups of micro-batches that run the same operators, as lists of indices.

    A trace needs to run only one micro-batch per group. If there are only one or two micro-batches,
    each of them is a group of its own. For three or more micro-batches, this function runs the
    forward pass of the first one. Usually, micro-batches are in one group if their tensors have the
    same shapes. Equal shapes are not enough in two cases:

    - The forward pass of the first micro-batch reads values of a real tensor, for example of an
      attention mask.
    - The micro-batches contain different objects that are not tensors.

    In these cases, the forward passes of all micro-batches run, and the micro-batches of a group
    must also run the same operators.

    Call this function in symbolic mode (`course_lib.symbolic.symbolic`). In this mode, most tensors
    are symbolic: they have shapes but no values. Small tensors of integers or booleans on the CPU
    are real, such as token ids and masks in a batch (see `course_lib.symbolic.mode.Symbolic`).

    Args:
        model: Model that was created in symbolic mode.
        micro_batches: Micro-batches of one batch that was created in symbolic mode.
        loss_sum: Function (model, micro-batch) that returns (sum of losses, weight). The weight is
            the number by which the sum is divided, such as the number of tokens. None uses the
            model's own loss.
    """
    if len(micro_batches) < 3:
        return [[i] for i in range(len(micro_batches))]
    mode = detect_fake_mode()
    random = RandomState(counted=False)
    groups = {}

    def signature_of(micro_batch: Any) -> int:
        with without_cache(model), OpSignature() as signature:
            loss_of(
                model,
                micro_batch,
                Recipe(precision=None, micro_batches=len(micro_batches)),
                loss_sum,
            )
        return signature.seen

    try:
        looks = mode.looks
        signatures = [signature_of(micro_batches[0])]
        looked = mode.looks > looks or _differ_in_values(micro_batches)
        signatures += [
            signature_of(micro_batch) if looked else signatures[0]
            for micro_batch in micro_batches[1:]
        ]
        for i, micro_batch in enumerate(micro_batches):
            groups.setdefault((_shapes(micro_batch), signatures[i]), []).append(i)
        return list(groups.values())
    finally:
        random.restore()


def _shapes(micro_batch: Any) -> tuple:
    """Return the shapes of all tensors in a micro-batch."""
    return tuple(tensor.shape for tensor in tensors_in(micro_batch))


def _differ_in_values(micro_batches: Sequence[Any]) -> bool:
    """Return whether micro-batches differ in objects that are not tensors, such as arrays.

    Only the same object counts as equal.
    """
    first, *others = (list(_other_objects(each)) for each in micro_batches)
    return any(len(each) != len(first) or any(map(is_not, first, each)) for each in others)


def _other_objects(value: Any) -> Iterator[Any]:
    """Yield the objects in a batch that are neither tensors nor containers."""
    if not isinstance(value, Tensor):
        items = items_in(value)
        yield from chain.from_iterable(map(_other_objects, items)) if items else (value,)
