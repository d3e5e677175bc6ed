"""Trace of a training step: its operators, storages, FLOPs, and bytes copied or communicated.

A meter makes a trace of a step that runs, on real or on symbolic tensors. An estimate makes one of
a step that runs only in part: as one of several ranks, or with a few of a model's blocks. From a
trace, this module computes the live bytes by category, the peak and its phase, and the allocations
on a device. A point of a trace is the time right after an operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._origin import file_shown
from .timeline import CATEGORIES, PHASES

if TYPE_CHECKING:
    from course_lib.caching_allocator import CachingAllocator

ENTRY = "(model and optimizer on entry)"


class Span(NamedTuple):
    """Period in which a storage is in one category.

    Attributes:
        storage: Number that identifies the storage.
        bytes: Bytes of the storage.
        category: One of `CATEGORIES`.
        start: First point of the period.
        stop: First point after the period.
    """

    storage: int
    bytes: int
    category: str
    start: int
    stop: int


@dataclass(frozen=True)
class Event:
    """Creation or release of a storage.

    A storage that changes its category has two events at the same point: a release from the old
    category and a birth in the new one.

    Attributes:
        point: Number of the point in the trace.
        kind: "birth" if the storage is live from this point on; "release" if it was live up to the
            point before.
        storage: Number that identifies the storage.
        bytes: Bytes of the storage.
        category: One of `CATEGORIES`.
        operator, phase, module: The operator of the point, its phase and its module, as in the
            trace.
    """

    point: int
    kind: str
    storage: int
    bytes: int
    category: str
    operator: str
    phase: str
    module: str


class Trace:
    """Record of a training step: the live bytes on entry and after each operator (the points).

    Attributes:
        operators: Pair (operator, phase) of each point.
        live: Live bytes of each category at each point: an int64 array (points, categories), with
            the categories in the order of `CATEGORIES`.
        flops_at: Dict from point to FLOPs, without points that have none.
        flops: FLOPs of the whole step, by the formulas of `FlopCounterMode`. They include
            micro-batches that did not run because an equal micro-batch represents them.
        modules: Dict from point to the path of the module that ran, if it was recorded.
        lines: Dict from point to (file, line, function) of the user's own code, if it was recorded.
        spans: Periods of all storages in each category; None if they were not recorded.
        bytes_down: Bytes offloaded to host memory or disk.
        bytes_up: Bytes copied from host memory or disk back to the device.
        sent_bytes: Bytes that one rank communicates.
    """

    def __init__(
        self,
        operators: Sequence[tuple[Any, str]],
        live: np.ndarray,
        *,
        flops_at: dict[int, int] | None = None,
        flops: int | None = None,
        modules: dict[int, str] | None = None,
        lines: dict[int, tuple[str, int, str]] | None = None,
        spans: Sequence[Span] | None = None,
        bytes_down: int = 0,
        bytes_up: int = 0,
        sent_bytes: int = 0,
    ):
        self.operators = list(operators)
        self.live = live
        self.flops_at = flops_at or {}
        self.modules = modules or {}
        self.spans = spans
        self.lines = lines or {}
        self.flops = sum(self.flops_at.values()) if flops is None else flops
        self.bytes_down, self.bytes_up, self.sent_bytes = bytes_down, bytes_up, sent_bytes

    def __len__(self) -> int:
        return len(self.operators)

    def __getitem__(self, part: slice) -> Trace:
        """Return the part of the trace between two points. The step of the slice is ignored.

        The attributes `flops`, `bytes_down`, `bytes_up` and `sent_bytes` of the part are the totals
        of the whole trace.
        """
        start, stop, _ = part.indices(len(self))

        def part_of(found: dict[int, Any]) -> dict[int, Any]:
            return {i - start: value for i, value in found.items() if start <= i < stop}

        spans = None
        if self.spans is not None:
            cut = [
                span._replace(
                    start=max(span.start, start) - start, stop=min(span.stop, stop) - start
                )
                for span in self.spans
            ]
            spans = [span for span in cut if span.start < span.stop]
        return Trace(
            self.operators[start:stop],
            self.live[start:stop],
            flops_at=part_of(self.flops_at),
            flops=self.flops,
            modules=part_of(self.modules),
            lines=part_of(self.lines),
            spans=spans,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            sent_bytes=self.sent_bytes,
        )

    # ---- peaks and sums

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Live bytes of all categories together, as an int64 array with one element per point."""
        return self.live.sum(1)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes live at one point."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_index(self) -> int:
        """Number of the first operator at which the peak is reached.

        It is 0, the point of the state on entry, if no operator reaches that many bytes.
        """
        live, begins = self.live_bytes, self._first_operator_index
        found = begins + int(live[begins:].argmax()) if len(live) > begins else 0
        return found if live[found] == live.max() else 0

    @property
    def _first_operator_index(self) -> int:
        """Number of the first operator: 1 if point 0 is the state on entry, else 0."""
        return int(bool(self.operators) and self.operators[0][0] == ENTRY)

    @property
    def peak_operator(self) -> str:
        """Name of the operator at `peak_index`."""
        return str(self.operators[self.peak_index][0])

    def at_peak(self) -> dict[str, int]:
        """Return a dict from category to its live bytes at the peak."""
        return dict(zip(CATEGORIES, self.live[self.peak_index].tolist(), strict=True))

    def phase_peaks(self) -> dict[str, int]:
        """Return a dict from phase to its peak, the most bytes live after one of its operators."""
        peaks = dict.fromkeys(PHASES, 0)
        begins = self._first_operator_index
        for (_, phase), count in zip(
            self.operators[begins:], self.live_bytes[begins:].tolist(), strict=True
        ):
            peaks[phase] = max(peaks[phase], count)
        return peaks

    def series(self) -> dict[str, np.ndarray]:
        """Return a dict from category to its live bytes, as an array with one element per point."""
        return dict(zip(CATEGORIES, self.live.T, strict=True))

    def flops_by_operator(self) -> dict[str, int]:
        """Return a dict from operator to the FLOPs of all its calls, largest first."""
        found: dict[str, int] = {}
        for point, flops in self.flops_at.items():
            name = str(self.operators[point][0])
            found[name] = found.get(name, 0) + flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def events(self) -> Iterator[Event]:
        """Yield the births and releases of storages in order.

        At each point, releases come before births.

        Raises:
            ValueError: The trace was made without events.
        """
        self._check_spans()
        found = [(span.start, "birth", span) for span in self.spans]
        found += [(span.stop, "release", span) for span in self.spans if span.stop < len(self)]
        for point, kind, span in sorted(found, key=lambda each: (each[0], each[1] == "birth")):
            operator, phase = self.operators[point]
            module = self.modules.get(point, "")
            yield Event(point, kind, *span[:3], str(operator), phase, module)

    def replay(self) -> np.ndarray:
        """Compute `live` from the events alone, to check that both agree."""
        change = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        for event in self.events():
            sign = 1 if event.kind == "birth" else -1
            change[event.point, CATEGORIES.index(event.category)] += sign * event.bytes
        return change.cumsum(0)[:-1]

    # ---- allocations on a device

    def allocations(self) -> Iterator[tuple]:
        """Yield the allocations and releases in the form that `CachingAllocator.replay` accepts.

        A change of a storage's category is not an event here.

        Yields:
            ("birth", storage, bytes, frames) and ("release", storage, bytes), in order. The frames
            are those of `frames_at` for the point at which the storage was made.

        Raises:
            ValueError: The trace was made without events.
        """
        self._check_spans()
        # Maps each storage to its bytes, and to the first and the last point of all its spans.
        lifetimes: dict[int, tuple[int, int, int]] = {}
        for storage, nbytes, _, start, stop in self.spans:
            _, first, last = lifetimes.get(storage, (nbytes, start, stop))
            lifetimes[storage] = nbytes, min(first, start), max(last, stop)
        events = [(start, 1, name, nbytes) for name, (nbytes, start, _) in lifetimes.items()]
        events += [(stop, 0, name, nbytes) for name, (nbytes, _, stop) in lifetimes.items()]
        frames: dict[int, list[dict]] = {}
        for point, born, storage, nbytes in sorted(events):
            if born:
                if point not in frames:
                    frames[point] = self.frames_at(point)
                yield "birth", storage, nbytes, frames[point]
            elif point < len(self):  # a later release is not in the trace
                yield "release", storage, nbytes

    def frames_at(self, point: int) -> list[dict]:
        """Return the call stack that a memory viewer shows for the storages made at a point.

        Returns:
            Frames in the form of PyTorch's snapshots, innermost first: the operator with its phase,
            then the module and the line of the user's own code, if they were recorded.
        """
        operator, phase = self.operators[point]
        frames = [{"filename": phase, "line": 0, "name": str(operator)}]
        if path := self.modules.get(point):
            frames.append({"filename": "module", "line": 0, "name": path})
        if point in self.lines:
            file, line, function = self.lines[point]
            frames.append({"filename": file_shown(file), "line": line, "name": function})
        return frames

    def allocator(
        self, expandable_segments: bool = False, *, record_history: bool = False
    ) -> CachingAllocator:
        """Return a simulated GPU allocator that has replayed this trace.

        Its `memory_stats()` contain the peaks of allocated and of reserved bytes. The storages that
        exist on entry are allocated first, one after another.

        Args:
            expandable_segments: As in `CachingAllocator`.
            record_history: Whether to keep each event for a snapshot.

        Raises:
            ValueError: The trace was made without events.
        """
        from course_lib.caching_allocator import CachingAllocator

        allocator = CachingAllocator(
            expandable_segments=expandable_segments, record_history=record_history
        )
        allocator.replay(self)
        return allocator

    def save_snapshot(self, path: str | os.PathLike, expandable_segments: bool = False) -> None:
        """Write the step to a file for PyTorch's memory viewer, pytorch.org/memory_viz.

        The file has the format of `torch.cuda.memory._dump_snapshot`. Bytes are those of the
        tensors. Segments and addresses are those of `CachingAllocator`. Each allocation names its
        operator and, if the meter recorded them, its module and line.

        Tests read the snapshot with `torch.cuda._memory_viz` and compare its numbers with the
        meter's. The fields are those that the source of the web page reads; the page itself was not
        tested.

        Args:
            path: File to write.
            expandable_segments: As in `CachingAllocator`.

        Raises:
            ValueError: The trace was made without events.
        """
        allocator = self.allocator(expandable_segments, record_history=True)
        allocator.save_snapshot(path)

    def _check_spans(self) -> None:
        """Raise `ValueError` if the trace was made without events."""
        if self.spans is None:
            raise ValueError(
                "the trace must have been made with events, got one that holds only sums per"
                " category; call meter.trace() without events=False"
            )
