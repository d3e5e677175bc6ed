"""Trace of a training step: its operators, storages, FLOPs, and bytes copied or communicated.

A meter makes a trace of a step that runs, on real or on symbolic tensors. An estimate makes a trace
of a whole step, but runs only a part of the step, such as one of several ranks or a few of a
model's blocks. From a trace, this module computes the live bytes by category, the peak and its
phase, and the allocations on a device. A point of a trace is the time right after an operator.
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
    """Period in which a storage has one category.

    A point is the time right after an operator. It is given by its index in the trace.

    Attributes:
        storage: Number that identifies the storage.
        bytes: Bytes of the storage.
        category: One of `CATEGORIES`, such as "activation".
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
    """Creation or release of a storage in a trace.

    A storage that changes its category has two events at the same point: a release from the old
    category and a birth in the new one.

    Attributes:
        point: Time of the event, as the index of a point of the trace. A point is the time right
            after an operator.
        kind: "birth" or "release". A birth is at the first point at which the storage has the
            category. A release is at the first point at which it no longer has the category.
        storage: Number that identifies the storage.
        bytes: Bytes of the storage.
        category: One of `CATEGORIES`, such as "activation".
        operator: Name of the operator at this point, such as "aten.mm.default".
        phase: "forward", "backward" or "optimizer".
        module: Path of the module that ran the operator; "" if it was not recorded.
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
    """Record of a training step: the live bytes on entry and right after each operator.

    Each of these times is a point of the trace. In a trace from `MemoryMeter.trace`, point 0 is the
    state on entry, and point n is the time right after operator n. `bytes_down`, `bytes_up` and
    `sent_bytes` are 0 in a trace from a meter, because only estimates count these bytes.

    Attributes:
        operators: List of pairs (operator, phase), one per point.
        live: Live bytes of each category at each point. An int64 array of shape (points,
            categories), with the categories in the order of `CATEGORIES`.
        flops_at: Dict from point to the FLOPs of its operator. Operators without FLOPs have no
            entry.
        flops: FLOPs of the whole step, as `MemoryMeter.flops` counts them. An estimate runs only
            one of several equal micro-batches, but this number includes all of them.
        modules: Dict from point to the path of the module that ran the operator. Empty if modules
            were not recorded.
        lines: Dict from point to (file, line, function) of the user's code that ran the operator.
            Empty if lines were not recorded.
        spans: List of `Span` objects, one for each period in which a storage has one category. None
            if the trace was made without events, as by `MemoryMeter.trace(events=False)`.
        bytes_down: Bytes offloaded to host memory or disk.
        bytes_up: Bytes copied from host memory or disk back to the device.
        sent_bytes: Bytes that one rank communicates, as `course_lib.distributed.sent_bytes` counts
            them.
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
        """The largest number of bytes that are live at once."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_index(self) -> int:
        """Index of the first point at which the peak is reached.

        The state on entry is the peak only if more bytes are live on entry than after any operator.
        """
        live, begins = self.live_bytes, self._first_operator_index
        found = begins + int(live[begins:].argmax()) if len(live) > begins else 0
        return found if live[found] == live.max() else 0

    @property
    def _first_operator_index(self) -> int:
        """Index of the first operator's point: 1 if point 0 is the state on entry, else 0."""
        return int(bool(self.operators) and self.operators[0][0] == ENTRY)

    @property
    def peak_operator(self) -> str:
        """Name of the operator at which the peak is first reached."""
        return str(self.operators[self.peak_index][0])

    def at_peak(self) -> dict[str, int]:
        """Return a dict from category to its live bytes at the peak."""
        return dict(zip(CATEGORIES, self.live[self.peak_index].tolist(), strict=True))

    def phase_peaks(self) -> dict[str, int]:
        """For each phase, return the largest number of live bytes after one of its operators.

        Returns:
            A dict from "forward", "backward" and "optimizer" to bytes; 0 for a phase without
            operators.
        """
        peaks = dict.fromkeys(PHASES, 0)
        begins = self._first_operator_index
        for (_, phase), count in zip(
            self.operators[begins:], self.live_bytes[begins:].tolist(), strict=True
        ):
            peaks[phase] = max(peaks[phase], count)
        return peaks

    def series(self) -> dict[str, np.ndarray]:
        """Return a dict from category to an array of its live bytes, with one element per point."""
        return dict(zip(CATEGORIES, self.live.T, strict=True))

    def flops_by_operator(self) -> dict[str, int]:
        """Return a dict from operator name to the FLOPs of all its calls, largest first."""
        found: dict[str, int] = {}
        for point, flops in self.flops_at.items():
            name = str(self.operators[point][0])
            found[name] = found.get(name, 0) + flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def events(self) -> Iterator[Event]:
        """Yield the births and releases of storages as `Event` objects, in order of time.

        At each point, releases come before births. A storage that changes its category has a
        release and a birth.

        Raises:
            ValueError: The trace was made without events, as by `MemoryMeter.trace(events=False)`.
        """
        self._check_spans()
        found = [(span.start, "birth", span) for span in self.spans]
        found += [(span.stop, "release", span) for span in self.spans if span.stop < len(self)]
        for point, kind, span in sorted(found, key=lambda each: (each[0], each[1] == "birth")):
            operator, phase = self.operators[point]
            module = self.modules.get(point, "")
            yield Event(point, kind, *span[:3], str(operator), phase, module)

    def replay(self) -> np.ndarray:
        """Return the live bytes of each category at each point, computed from `events()`.

        The array has the shape of `live`, so that a test can compare it with `live`.

        Raises:
            ValueError: The trace was made without events, as by `MemoryMeter.trace(events=False)`.
        """
        change = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        for event in self.events():
            sign = 1 if event.kind == "birth" else -1
            change[event.point, CATEGORIES.index(event.category)] += sign * event.bytes
        return change.cumsum(0)[:-1]

    # ---- allocations on a device

    def allocations(self) -> Iterator[tuple]:
        """Yield the allocations and releases in the form that `CachingAllocator.replay` accepts.

        Unlike in `events`, a storage that changes its category appears only when it is made and
        when it is released.

        Yields:
            ("birth", storage, bytes, frames) and ("release", storage, bytes), in order of time.
            `storage` is a number that identifies the storage. `frames` is the result of `frames_at`
            for the point at which the storage was made.

        Raises:
            ValueError: The trace was made without events, as by `MemoryMeter.trace(events=False)`.
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

        Args:
            point: Index of the operator in `operators`.

        Returns:
            Frames in the format of PyTorch's memory snapshots, innermost first. The first frame is
            the operator with its phase. Frames for the module and for the line of the user's own
            code follow, if the meter recorded these.
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
        """Return a simulated GPU allocator that has allocated and freed the storages of this trace.

        The storages that exist before the first operator are allocated first, one after another.
        The allocator's method `memory_stats` returns statistics, such as the peaks of allocated and
        of reserved bytes.

        Args:
            expandable_segments: Whether the allocator simulates PyTorch's option
                `expandable_segments`.
            record_history: Whether the allocator stores each of its events, so that its method
                `snapshot` can return them.

        Raises:
            ValueError: The trace was made without events, as by `MemoryMeter.trace(events=False)`.
        """
        from course_lib.caching_allocator import CachingAllocator

        allocator = CachingAllocator(
            expandable_segments=expandable_segments, record_history=record_history
        )
        allocator.replay(self)
        return allocator

    def save_snapshot(self, path: str | os.PathLike, expandable_segments: bool = False) -> None:
        """Write the step to a file for PyTorch's memory viewer, pytorch.org/memory_viz.

        The file has the format of `torch.cuda.memory._dump_snapshot`. The file contains the sizes
        of the tensors' storages. Segments and addresses come from a simulated allocator
        (`CachingAllocator`). Each allocation names its operator and, if the meter recorded them,
        its module and its line of code.

        Tests read the file with `torch.cuda._memory_viz` and compare its numbers with the meter's.
        The file has the fields that the source code of the web page reads, but the page itself was
        not tested.

        Args:
            path: File to write.
            expandable_segments: Whether the allocator simulates PyTorch's option
                `expandable_segments`.

        Raises:
            ValueError: The trace was made without events, as by `MemoryMeter.trace(events=False)`.
        """
        allocator = self.allocator(expandable_segments, record_history=True)
        allocator.save_snapshot(path)

    def _check_spans(self) -> None:
        """Raise `ValueError` if the trace was made without events."""
        if self.spans is None:
            raise ValueError(
                "the trace must contain events, got a trace that contains only sums per category;"
                " call meter.trace() without events=False"
            )
