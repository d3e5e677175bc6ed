"""Compute the trace of a step with many equal blocks from the traces of steps with few blocks.

Two traces are enough: one of a step with a few of the equal blocks, and one of a step with one more
block. The difference between the traces shows what each block adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from course_lib._torch.modules import module_signature
from course_lib.memory import Trace


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """Return the longest list of equal blocks in a model.

    Such a list is an `nn.ModuleList` or `nn.Sequential`. Its blocks are equal if they consist of
    modules of the same classes with the same attributes, such as the stride of a convolution, and
    if their tensors have the same shapes and dtypes. If the model has no such list, the result is
    an empty `nn.ModuleList`.
    """
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max(
        (part for part in lists if len(set(map(module_signature, part))) == 1),
        key=len,
        default=nn.ModuleList(),
    )


@contextmanager
def shorten_blocks(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Shorten a list of blocks, in place, to its first `count` blocks, and restore it afterwards.

    The list is short while the body of the `with` statement runs.
    """
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)


class IrregularSteps(Exception):
    """Error raised if the trace of a step cannot be computed from two steps with fewer blocks.

    One of the two steps has one more block than the other step. The error is raised if the two
    steps differ in more than the operators of this additional block.
    """


class Pass(NamedTuple):
    """Position of one pass through the blocks in the traces of a smaller and a larger model.

    A point of a trace is one operator of a training step. The larger model has one block more than
    the smaller model. A pass is either a forward pass, or everything that runs between one forward
    pass and the next, such as backward.

    Attributes:
        few: Index of the pass's first point in the smaller model's trace.
        more: Index of the pass's first point in the larger model's trace.
        length: Number of points of the pass in the smaller model's trace.
        cut: Number of points from the start of the pass to the position of the additional block.
        block: Number of points of the additional block in the larger model's trace; 0 if the pass
            has the same points in both traces.
    """

    few: int
    more: int
    length: int
    cut: int
    block: int


class Growth:
    """Growth of a training step with the number of equal blocks in its model.

    The growth is computed from two traces: `few`, of a step with m equal blocks, and `more`, of a
    step with m + 1 equal blocks. A point t of a trace is one operator of the step. Below,
    live(t; n) is the number of live bytes at point t of a step with n blocks.

    A step consists of passes through the blocks, forward and backward. Each pass is cut in two
    inside the part with equal blocks, and n - m blocks are inserted at the cut. At a point t of the
    step with m blocks, one additional block adds g(t) = live(t; m + 1) - live(t; m) live bytes,
    where t is the same operator in both steps. Each inserted block adds the same number, so

        live(t; n) = live(t; m) + (n - m) g(t)

    The inserted blocks themselves are numbered i = 0 ... n - m - 1 in the order in which they run.
    Let u be a point of the additional block in `more`. Let a and b be the same operator as u in the
    block before the cut and in the block after the cut. While block i runs, the other inserted
    blocks add live bytes:

    - Each of the i blocks that have already run adds g(b), because the additional block has already
      run at b.
    - Each of the n - m - 1 - i blocks that have not run yet adds g(a), because the additional block
      has not run yet at a.

    Therefore

        live(u; n) = live(u; m + 1) + (n - m - 1 - i) g(a) + i g(b)

    FLOPs and bytes moved grow linearly with n.

    Args:
        few: Trace of the step with m equal blocks.
        more: Trace of the step with m + 1 equal blocks.

    Raises:
        IrregularSteps: The passes of the two steps do not differ by exactly one block.
    """

    def __init__(self, few: Trace, more: Trace):
        self.few, self.more = few, more
        shorter, longer = _passes(few.operators), _passes(more.operators)
        if len(shorter) != len(longer):
            raise IrregularSteps
        self.passes = [
            _cut(few.operators, more.operators, *ours, *others)
            for ours, others in zip(shorter, longer, strict=True)
        ]

    def sources(self, blocks: int) -> Iterator[tuple[Trace, int, int, int]]:
        """Yield the parts of the two traces from which the trace of a larger model is assembled.

        The parts are yielded in the order in which the larger model runs them. Each part is a tuple
        (trace, start, stop, following). `trace` is `self.few` or `self.more`. The part consists of
        the points (operators) of `trace` from `start` up to, but not including, `stop`. `following`
        is the number of added blocks that come after the part in the same pass through the blocks.

        Args:
            blocks: Number of blocks to add to the model of the trace `self.few`.
        """
        for at in self.passes:
            new = at.more + at.cut
            yield self.few, at.few, at.few + at.cut, blocks
            for copy in range(blocks if at.block else 0):
                yield self.more, new, new + at.block, blocks - 1 - copy
            yield self.few, at.few + at.cut, at.few + at.length, 0

    def trace(self, blocks: int) -> Trace:
        """Return the trace of the step with `blocks` more blocks than the step of `self.few`.

        Only the operators, the live bytes and the totals (FLOPs and bytes moved or communicated) of
        the trace are set.
        """
        few, more, operators, live = self.few, self.more, [], []
        for trace, start, stop, _ in self.sources(blocks):
            operators += trace.operators[start:stop]
        for at in self.passes:
            a = few.live[at.few : at.few + at.length]
            b = more.live[at.more : at.more + at.length + at.block]
            before = b[: at.cut] - a[: at.cut]
            after = b[at.cut + at.block :] - a[at.cut :]
            live.append(a[: at.cut] + blocks * before)
            for i in range(blocks if at.block else 0):
                others = (blocks - 1 - i) * before[at.cut - at.block :] + i * after[: at.block]
                live.append(b[at.cut : at.cut + at.block] + others)
            live.append(a[at.cut :] + blocks * after)
        totals = {
            name: getattr(few, name) + blocks * (getattr(more, name) - getattr(few, name))
            for name in ("flops", "bytes_down", "bytes_up", "sent_bytes")
        }
        return Trace(operators, np.concatenate(live), **totals)


def _passes(operators: Sequence[tuple[Any, str]]) -> list[tuple[int, int]]:
    """Divide the operators of a step into forward passes and the parts between forward passes.

    Returns:
        The bounds of each part, in order, as pairs of indices (start, stop) into `operators`.
    """
    groups = groupby(operators, key=lambda operator: operator[1] == "forward")
    return list(pairwise(accumulate((len(list(group)) for _, group in groups), initial=0)))


def _cut(few: list, more: list, start: int, stop: int, begin: int, end: int) -> Pass:
    """Return the `Pass` for a pass of the shorter step and the same pass of the longer step.

    The passes are `few[start:stop]` and `more[begin:end]`. The returned `Pass` contains the
    position at which the longer step has one more block.

    Raises:
        IrregularSteps: The passes do not differ by exactly one block.
    """
    ours, others = few[start:stop], more[begin:end]
    block = len(others) - len(ours)
    # If the part after the blocks begins like a block, the common prefix of the two passes also
    # covers operators of that part. The same can happen to the common suffix. Therefore the length
    # of a block is subtracted from both.
    head, tail = (
        _common_prefix_length(*pair) - block
        for pair in ((ours, others), (ours[::-1], others[::-1]))
    )
    if min(block, head, tail) < 0 or head + tail < len(ours):
        raise IrregularSteps
    cut = (head + len(ours) - tail) // 2 if block else 0
    if block and not block <= cut <= len(ours) - block:
        raise IrregularSteps
    return Pass(start, begin, len(ours), cut, block)


def _common_prefix_length(ours: list, others: list) -> int:
    """Return the number of leading elements that two lists have in common."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, others, strict=False))
    )
