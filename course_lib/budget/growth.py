"""Trace of a step with many equal blocks, computed from the traces of the step with a few of them
and with one more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from course_lib.memory import Trace
from course_lib.memory.trace import Span


class Irregular(Exception):
    """Raised when the trace of a step cannot be composed, because parts of it that should be equal
    are not."""


class Pass(NamedTuple):
    """A pass through the blocks, forward or backward, in a step with a few of them and in a step
    with one more.

    Attributes:
        few: The pass's first moment in the shorter step.
        more: The pass's first moment in the longer step.
        length: Number of moments of the pass in the shorter step.
        cut: Number of moments from the start of the pass after which the longer step has one more
            block.
        block: Number of moments of that block.
    """

    few: int
    more: int
    length: int
    cut: int
    block: int


class Growth:
    """Growth of a step with the number of its model's equal blocks, from the step with `a` of them,
    `few`, and the step with a + 1, `more`.

    Each pass through the blocks is cut in two inside the part with equal blocks, and n - a blocks
    are inserted at the cut. With g(t) = live(t; a + 1) - live(t; a) at a moment t of the step with
    a blocks,

        live(t; n) = live(t; a) + (n - a) g(t)

    because a block before the cut has made room for each block that follows, and a block after the
    cut finds what all of the blocks have left. In the i-th of the new blocks, i = 0 ... n - a - 1,
    i of the other new blocks are in the state after the cut, and the rest are in the state before
    it:

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
        """Yield the parts of the step that has `blocks` blocks more than `few`.

        Each part is (trace, start, stop, following): the moments of `trace` from `start` until
        `stop`, and the number of inserted blocks that follow in the same pass.
        """
        for at in self.passes:
            new = at.more + at.cut
            yield self.few, at.few, at.few + at.cut, blocks
            for copy in range(blocks if at.block else 0):
                yield self.more, new, new + at.block, blocks - 1 - copy
            yield self.few, at.few + at.cut, at.few + at.length, 0

    def trace(self, blocks: int) -> Trace:
        """Return the trace of the step that has `blocks` blocks more than `few`."""
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
        return Trace(
            operators,
            np.concatenate(live),
            **totals,
            **({} if more.spans is None else self._events(blocks, len(operators))),
        )

    def _events(self, blocks: int, moments: int) -> dict[str, Any]:
        return {
            "flops_at": self._live_at(blocks, "flops_at"),
            "modules": self._live_at(blocks, "modules"),
            "lines": self._live_at(blocks, "lines"),
            "spans": _GrownSpans(self, blocks, moments).found(),
        }

    def _live_at(self, blocks: int, name: str) -> dict[int, Any]:
        found = {}
        moment = 0
        for trace, start, stop, _ in self.sources(blocks):
            known = getattr(trace, name)
            found |= {moment + i - start: known[i] for i in range(start, stop) if i in known}
            moment += stop - start
        return found


class _GrownSpans:
    """Storages of a grown step: those of `more`, and the new block's storages once for each
    inserted block.

    A storage of the new block may outlive the block. The corresponding storage of the block before
    is then released one block earlier, one block later, or at the same moment, and the copies
    follow the same pattern. A storage that changed its category has one span per category, and
    these are joined at the end.
    """

    def __init__(self, growth: Growth, blocks: int, end: int):
        self.few, self.more, self.passes = growth.few, growth.more, growth.passes
        self.blocks, self.end = blocks, end

    def found(self) -> list[Span]:
        more, blocks, end = self.more, self.blocks, self.end
        earlier = {}
        for span in more.spans or ():
            earlier.setdefault((span.start, span.bytes, span.category), []).append(span.stop)
        seen: dict[tuple, int] = {}
        continued = {(span.storage, span.start) for span in more.spans or ()}
        found: list[tuple[int, int, Span, bool]] = [
            (0, end, span, False) for span in self._held_from_the_start() for _ in range(blocks - 1)
        ]
        for span in more.spans or ():
            goes_on = (span.storage, span.stop) in continued
            p, region = self._locate(span.start)
            at = self.passes[p]
            if region != "new":
                start = self._stretch(span.start)
                found.append((start, self._stop_of_one(span, p, region), span, goes_on))
                continue
            key = span.start, span.bytes, span.category
            number = seen[key] = seen.get(key, -1) + 1
            before = earlier.get((span.start - at.block, span.bytes, span.category), ())
            if number >= len(before):
                raise Irregular
            for copy in range(blocks):
                start = self._offset(p) + span.start + copy * at.block
                stop = self._stop_of_copy(span, p, before[number], copy)
                found.append((start, stop, span, goes_on))
        return _number_storages(found)

    def _held_from_the_start(self) -> list[Span]:
        """Return the spans that `more` holds through the whole step for the new block and `few`
        does not hold, such as its parameters.

        Raises:
            Irregular: The spans of the two steps differ in another way.
        """
        ours, others = (
            [span for span in trace.spans or () if span.start == 0]
            for trace in (self.few, self.more)
        )
        kinds, longer = ([span[1:3] for span in spans] for spans in (ours, others))
        head = _alike(kinds, longer)
        extra = len(others) - len(ours)
        new = others[head : head + extra]
        if kinds[head:] != longer[head + extra :] or any(
            span.stop < len(self.more) for span in new
        ):
            raise Irregular
        return new

    def _stop_of_one(self, span: Span, p: int, region: str) -> int:
        if span.stop >= len(self.more):
            return self.end
        q, there = self._locate(span.stop)
        if there != "new":
            return self._stretch(span.stop)
        # A storage that is made near the start of one pass is released near the end of the opposite
        # pass.
        mirrored = self._phase(p) != self._phase(q)
        last = q != p and (region == "head") == mirrored
        return self._offset(q) + span.stop + last * (self.blocks - 1) * self.passes[q].block

    def _stop_of_copy(self, span: Span, p: int, before: int, copy: int) -> int:
        if span.stop >= len(self.more):
            return self.end
        q, there = self._locate(span.stop)
        block = self.passes[q].block
        offset = self._offset(q) + span.stop
        if q == p and there == "new":
            return offset + copy * block
        if before == span.stop and there != "new":
            return self._stretch(span.stop)
        if before == span.stop - block:  # each copy is released one block after the previous copy
            return offset + copy * block
        if before == span.stop + block:  # each copy is released one block before the previous copy
            return offset + (self.blocks - 1 - copy) * block
        raise Irregular

    def _locate(self, moment: int) -> tuple[int, str]:
        """Return the pass that contains a moment of `more`, and the part of it: "head" is before
        the new block, "new" is in it, and "tail" is after it."""
        p = max(i for i, at in enumerate(self.passes) if at.more <= moment)
        at = self.passes[p]
        within = moment - at.more
        return p, "head" if within < at.cut else "new" if within < at.cut + at.block else "tail"

    def _offset(self, p: int) -> int:
        """Return the number of moments by which pass `p` of the grown step starts later than in
        `more`."""
        return sum((self.blocks - 1) * at.block for at in self.passes[:p])

    def _stretch(self, moment: int) -> int:
        p, region = self._locate(moment)
        return (
            self._offset(p) + moment + (region == "tail") * (self.blocks - 1) * self.passes[p].block
        )

    def _phase(self, p: int) -> bool:
        return self.more.operators[self.passes[p].more][1] == "forward"


def _number_storages(found: list[tuple[int, int, Span, bool]]) -> list[Span]:
    """Return the spans with a number for each storage.

    A span that continues in another category has the number of the span that it continues.
    """
    found.sort(key=lambda each: each[:2])
    waiting: dict[tuple[int, int], list[int]] = {}
    spans = []
    last = -1
    for start, stop, span, goes_on in found:
        if begun := waiting.get((start, span.bytes)):
            number = begun.pop()
        else:
            number = last = last + 1
        if goes_on:
            waiting.setdefault((stop, span.bytes), []).append(number)
        spans.append(Span(number, span.bytes, span.category, start, stop))
    return spans


def _passes(operators: Sequence[tuple[Any, str]]) -> list[tuple[int, int]]:
    """Return the bounds of the forward passes and of the parts between them."""
    groups = groupby(operators, key=lambda operator: operator[1] == "forward")
    return list(pairwise(accumulate((len(list(group)) for _, group in groups), initial=0)))


def _cut(few: list, more: list, start: int, stop: int, begin: int, end: int) -> Pass:
    """Return the pass, with the place where the longer step has one more block.

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
