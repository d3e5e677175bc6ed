"""A step with many equal blocks, from the traces of the step with few of them and with one more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import numpy as np

from .trace import Span, Trace


class Irregular(Exception):
    """The step does not grow by as much with each block."""


class Pass(NamedTuple):
    """A pass through the blocks, forward or backward, in a step with few of them and in one with
    one more.

    `few` and `more` are its first moments there, `length` is that of the shorter one. At `cut`
    moments from its start the longer one has a block more, of `block` moments.
    """

    few: int
    more: int
    length: int
    cut: int
    block: int


class Growth:
    """Growth of a step with its model's equal blocks: from one with `a` of them, `few`, and one
    with a + 1, `more`.

    Each pass through the blocks is cut in two where they are alike, and n - a blocks are put in at
    the cut. With g(t) = live(t; a + 1) - live(t; a) at a moment t of the step with a blocks,

        live(t; n) = live(t; a) + (n - a) g(t)

    as a block before the cut has made room for each that follows, and one after it finds what all
    have left. In the i-th of the new blocks, i = 0 ... n - a - 1, i blocks before it are as after
    the cut, and the others as before it:

        live(t; n) = live(t; a + 1) + (n - a - 1 - i) g(t - block) + i g(t + block)

    where t is a moment of the new block in `more`. So do FLOPs and bytes moved grow.

    Raises:
        Irregular: the passes of the two do not differ by one block.
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
        """Parts that the step with so many blocks more than `few` is put together from: a trace,
        from which moment of it until which, and how many blocks follow in its pass of those that
        were put in.
        """
        for at in self.passes:
            new = at.more + at.cut
            yield self.few, at.few, at.few + at.cut, blocks
            for copy in range(blocks if at.block else 0):
                yield self.more, new, new + at.block, blocks - 1 - copy
            yield self.few, at.few + at.cut, at.few + at.length, 0

    def trace(self, blocks: int) -> Trace:
        """The step with so many blocks more than `few`."""
        few, more, operators, live = self.few, self.more, [], []
        for at in self.passes:
            ours = few.operators[at.few : at.few + at.length]
            new = more.operators[at.more + at.cut : at.more + at.cut + at.block]
            operators += ours[: at.cut] + blocks * new + ours[at.cut :]
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
            "flops_at": self._at(blocks, "flops_at"),
            "modules": self._at(blocks, "modules"),
            "lines": self._at(blocks, "lines"),
            "spans": _GrownSpans(self, blocks, moments).found(),
        }

    def _at(self, blocks: int, name: str) -> dict[int, Any]:
        found = {}
        moment = 0
        for trace, start, stop, _ in self.sources(blocks):
            known = getattr(trace, name)
            found |= {moment + i - start: known[i] for i in range(start, stop) if i in known}
            moment += stop - start
        return found


class _GrownSpans:
    """Storages of a grown step: those of `more`, and once for each block that is put in those of
    the new block.

    A storage of the new block that lives on ends where that of the block before it has its end, a
    block later or sooner, or at the same moment. What changed its category has a span for each,
    which are put together again.
    """

    def __init__(self, growth: Growth, blocks: int, end: int):
        self.few, self.more, self.passes = growth.few, growth.more, growth.passes
        self.blocks, self.end = blocks, end

    def found(self) -> list[Span]:
        blocks, end = self.blocks, self.end
        more = self.more
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
                start = self._stretched(span.start)
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
        return _numbered(found)

    def _held_from_the_start(self) -> list[Span]:
        """Bytes that `more` holds through all of the step for the new block, and `few` does not,
        such as its parameters."""
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
            return self._stretched(span.stop)
        # what is near the start of one pass is near the end of the other
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
        # a block later, or sooner, than that of the block before
        steps = {-block: copy, block: self.blocks - 1 - copy}
        if before - span.stop in steps and block:
            return offset + steps[before - span.stop] * block
        if before != span.stop or there == "new":
            raise Irregular
        return self._stretched(span.stop)

    def _locate(self, moment: int) -> tuple[int, str]:
        """The pass of a moment of `more`, and whether it is before the new block, in it or after
        it."""
        p = max(i for i, at in enumerate(self.passes) if at.more <= moment)
        at = self.passes[p]
        within = moment - at.more
        return p, "head" if within < at.cut else "new" if within < at.cut + at.block else "tail"

    def _offset(self, p: int) -> int:
        """Delay of the start of pass `p` against `more`."""
        return sum((self.blocks - 1) * at.block for at in self.passes[:p])

    def _stretched(self, moment: int) -> int:
        p, region = self._locate(moment)
        return (
            self._offset(p) + moment + (region == "tail") * (self.blocks - 1) * self.passes[p].block
        )

    def _phase(self, p: int) -> bool:
        return self.more.operators[self.passes[p].more][1] == "forward"


def _numbered(found: list[tuple[int, int, Span, bool]]) -> list[Span]:
    """Spans of storages with numbers of their own; one that goes on has that of the span which ends
    there."""
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
    """Bounds of the forward passes, and what is between them."""
    found = []
    start = 0
    for _, group in groupby(operators, key=lambda operator: operator[1] == "forward"):
        stop = start + len(list(group))
        found.append((start, stop))
        start = stop
    return found


def _cut(few: list, more: list, start: int, stop: int, begin: int, end: int) -> Pass:
    """Place in a pass where it has one block more."""
    ours, others = few[start:stop], more[begin:end]
    block = len(others) - len(ours)
    # What looks alike goes a block too far, or more, where a block begins as what comes after it.
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
