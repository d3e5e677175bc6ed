"""Compute the trace of a model with many equal blocks from the traces of steps with few blocks.

The functions find the equal blocks of a model, and run the model with only some of them. The trace
of the whole step is computed from two traces: of a step with a few blocks, and of a step with one
more block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from course_lib._torch.modules import look_of
from course_lib.memory import Trace


def equal_blocks(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """Return the longest list of blocks with the same modules, tensors and settings.

    If the model has no such list, the result is an empty `nn.ModuleList`.
    """
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    return max(
        (part for part in lists if len(set(map(look_of, part))) == 1),
        key=len,
        default=nn.ModuleList(),
    )


@contextmanager
def shorten_blocks(blocks: nn.ModuleList | nn.Sequential, count: int) -> Iterator[None]:
    """Keep only the first `count` blocks of the list inside the `with` block."""
    rest = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(rest)


class Irregular(Exception):
    """Raised when the trace of a step cannot be composed.

    The reason is that parts of the step that should be equal are not.
    """


class Pass(NamedTuple):
    """A pass through the blocks, forward or backward, in two steps.

    The shorter step has a few blocks, and the longer step has one more block.

    Attributes:
        few: First moment of the pass in the shorter step.
        more: First moment of the pass in the longer step.
        length: Number of moments of the pass in the shorter step.
        cut: Number of moments from the start of the pass to the place where the longer step has one
            more block.
        block: Number of moments of the additional block.
    """

    few: int
    more: int
    length: int
    cut: int
    block: int


class Growth:
    """Growth of a step with the number of equal blocks in its model, computed from two steps.

    The step of the trace `few` has a of these blocks, and the step of the trace `more` has a + 1.

    Each pass through the blocks is cut in two inside the part with equal blocks, and n - a blocks
    are inserted at the cut. With g(t) = live(t; a + 1) - live(t; a) at a moment t of the step with
    a blocks,

        live(t; n) = live(t; a) + (n - a) g(t)

    because each of the inserted blocks adds the same number of live bytes g(t) at moment t. While
    the i-th of the new blocks runs, i = 0 ... n - a - 1, i of the other new blocks are in the state
    after the cut, and the rest of them are in the state before the cut:

        live(t; n) = live(t; a + 1) + (n - a - 1 - i) g(t - block) + i g(t + block)

    where t is a moment of the new block in `more`. FLOPs and bytes moved grow linearly with n.

    Raises:
        Irregular: The passes of the two steps do not differ by one block.
    """

    def __init__(self, few: Trace, more: Trace):
        self.few, self.more = few, more
        shorter, longer = _passes(few.operators), _passes(more.operators)
        if len(shorter) != len(longer):
            raise Irregular
        self.passes = [
            _cut(few.operators, more.operators, *ours, *others)
            for ours, others in zip(shorter, longer, strict=True)
        ]

    def sources(self, blocks: int) -> Iterator[tuple[Trace, int, int, int]]:
        """Yield the parts of the step with `blocks` more blocks than the step of `self.few`.

        Each part is a tuple (trace, start, stop, following). It stands for the moments of `trace`
        from `start` up to, but not including, `stop`. `following` is the number of inserted blocks
        that come after the part in the same pass.
        """
        for at in self.passes:
            new = at.more + at.cut
            yield self.few, at.few, at.few + at.cut, blocks
            for copy in range(blocks if at.block else 0):
                yield self.more, new, new + at.block, blocks - 1 - copy
            yield self.few, at.few + at.cut, at.few + at.length, 0

    def trace(self, blocks: int) -> Trace:
        """Return the trace of the step with `blocks` more blocks than the step of `self.few`.

        Only the operators, the live bytes and the totals of the trace are set.
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
    """Return the bounds (start, stop) of the forward passes and of the parts between them."""
    groups = groupby(operators, key=lambda operator: operator[1] == "forward")
    return list(pairwise(accumulate((len(list(group)) for _, group in groups), initial=0)))


def _cut(few: list, more: list, start: int, stop: int, begin: int, end: int) -> Pass:
    """Return the `Pass` for a pass of the shorter step and the same pass of the longer step.

    The passes are `few[start:stop]` and `more[begin:end]`. The result has the place where the
    longer step has one more block.

    Raises:
        Irregular: The passes do not differ by one block.
    """
    ours, others = few[start:stop], more[begin:end]
    block = len(others) - len(ours)
    # If a block begins with the same operators as the part after the blocks, the equal part is a
    # block or more too long.
    head, tail = (_alike(*pair) - block for pair in ((ours, others), (ours[::-1], others[::-1])))
    if min(block, head, tail) < 0 or head + tail < len(ours):
        raise Irregular
    cut = (head + len(ours) - tail) // 2 if block else 0
    if block and not block <= cut <= len(ours) - block:
        raise Irregular
    return Pass(start, begin, len(ours), cut, block)


def _alike(ours: list, others: list) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, others, strict=False))
    )
