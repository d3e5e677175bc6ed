"""Trace of a training step: its operators, the storages that are created and released, FLOPs, and
bytes moved.

Each way to run a step returns a trace: under a meter, on symbolic tensors, as one of several ranks,
or with only a few of a model's blocks. This module computes the live bytes by category, the peak
and the phases from it.
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
    """Time that a storage spends in one category: the moments from `start` until `stop`, which is
    exclusive."""

    storage: int
    bytes: int
    category: str
    start: int
    stop: int


@dataclass(frozen=True)
class Event:
    """Creation or release of a storage, or one half of a change of its category, which is a release
    from the old category and a birth in the new one.

    Attributes:
        moment: Number of the operator in the trace.
        kind: "birth" if the operator made the storage; "release" if the storage was live up to the
            operator before.
        storage: Number that identifies the storage.
        bytes: Bytes of the storage.
        category: One of `CATEGORIES`.
        operator, phase, module: The operator of the moment, its phase and its module, as in the
            trace.
    """

    moment: int
    kind: str
    storage: int
    bytes: int
    category: str
    operator: str
    phase: str
    module: str


class Trace:
    """Events of a step, operator by operator.

    Attributes:
        operators: (operator, phase) of each moment.
        live: Bytes at each moment and of each of `CATEGORIES`, an int64 array (moments,
            categories).
        flops_at: Dict from moment to FLOPs, where there are any.
        flops: FLOPs of the whole step, by the formulas of `FlopCounterMode`. They include
            micro-batches that are not in the trace because an equal one represents them.
        modules: Dict from moment to the path of the module that ran, where it is known.
        lines: Dict from moment to (file, line, function) of the user's own code, where it is known.
        spans: Spans of all storages; None if events are not kept.
        bytes_down: Bytes copied to the lower tier.
        bytes_up: Bytes copied back from the lower tier.
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
        """Return the trace of the moments from the slice's start to its stop; its step is ignored.

        FLOPs and bytes moved are the totals of the whole trace.
        """
        start, stop, _ = part.indices(len(self))

        def within(found: dict[int, Any]) -> dict[int, Any]:
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
            flops_at=within(self.flops_at),
            flops=self.flops,
            modules=within(self.modules),
            lines=within(self.lines),
            spans=spans,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            sent_bytes=self.sent_bytes,
        )

    # ---- figures

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Bytes live at each moment, in all categories."""
        return self.live.sum(1)

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_moment(self) -> int:
        """The first operator at which the peak is reached, or 0, the entry, if only the state on
        entry reaches it."""
        live, begins = self.live_bytes, self._begins
        found = begins + int(live[begins:].argmax()) if len(live) > begins else 0
        return found if live[found] == live.max() else 0

    @property
    def _begins(self) -> int:
        """The number of the first moment that belongs to an operator."""
        return int(bool(self.operators) and self.operators[0][0] == ENTRY)

    @property
    def peak_operator(self) -> str:
        return str(self.operators[self.peak_moment][0])

    def at_peak(self) -> dict[str, int]:
        """Return a dict from category to the bytes at the peak."""
        return dict(zip(CATEGORIES, self.live[self.peak_moment].tolist(), strict=True))

    def phase_peaks(self) -> dict[str, int]:
        """Return a dict from phase to the largest number of bytes live after one of its
        operators."""
        peaks = dict.fromkeys(PHASES, 0)
        begins = self._begins
        for (_, phase), count in zip(
            self.operators[begins:], self.live_bytes[begins:].tolist(), strict=True
        ):
            peaks[phase] = max(peaks[phase], count)
        return peaks

    def series(self) -> dict[str, np.ndarray]:
        """Return a dict from category to the bytes at each moment."""
        return dict(zip(CATEGORIES, self.live.T, strict=True))

    def flops_by_operator(self) -> dict[str, int]:
        """Return a dict from operator to the FLOPs of all its calls, largest first."""
        found: dict[str, int] = {}
        for moment, flops in self.flops_at.items():
            name = str(self.operators[moment][0])
            found[name] = found.get(name, 0) + flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def events(self) -> Iterator[Event]:
        """Yield births and releases in order. At each moment, releases come before births.

        Raises:
            ValueError: The spans were not kept.
        """
        self._check_spans()
        found = [(span.start, "birth", span) for span in self.spans]
        found += [(span.stop, "release", span) for span in self.spans if span.stop < len(self)]
        for moment, kind, span in sorted(found, key=lambda each: (each[0], each[1] == "birth")):
            operator, phase = self.operators[moment]
            module = self.modules.get(moment, "")
            yield Event(moment, kind, *span[:3], str(operator), phase, module)

    def replay(self) -> np.ndarray:
        """Return an array that equals `live`, computed from the events alone."""
        change = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        for event in self.events():
            sign = 1 if event.kind == "birth" else -1
            change[event.moment, CATEGORIES.index(event.category)] += sign * event.bytes
        return change.cumsum(0)[:-1]

    # ---- allocations on a device

    def allocations(self) -> Iterator[tuple]:
        """Yield the events in order, in the form that `CachingAllocator.replay` takes: ("birth",
        storage, bytes, frames) and ("release", storage, bytes).

        A storage that only changes its category is neither released nor allocated again. The frames
        are those of `frames_at` for the operator that made the storage.

        Raises:
            ValueError: The spans were not kept.
        """
        self._check_spans()
        # Each entry maps a storage to its bytes, start and stop.
        lives: dict[int, tuple[int, int, int]] = {}
        for storage, nbytes, _, start, stop in self.spans:
            _, first, last = lives.get(storage, (nbytes, start, stop))
            lives[storage] = nbytes, min(first, start), max(last, stop)
        events = [(start, 1, name, nbytes) for name, (nbytes, start, _) in lives.items()]
        events += [(stop, 0, name, nbytes) for name, (nbytes, _, stop) in lives.items()]
        frames: dict[int, list[dict]] = {}
        for moment, born, storage, nbytes in sorted(events):
            if born:
                if moment not in frames:
                    frames[moment] = self.frames_at(moment)
                yield "birth", storage, nbytes, frames[moment]
            elif moment < len(self):  # a later release is not in the trace
                yield "release", storage, nbytes

    def frames_at(self, moment: int) -> list[dict]:
        """Return the call stack of the storages that a moment makes, innermost frame first, in the
        form of PyTorch's snapshots.

        The frames are the operator with its phase, then the module and the line of the user's own
        code, if they are known.
        """
        operator, phase = self.operators[moment]
        frames = [{"filename": phase, "line": 0, "name": str(operator)}]
        if path := self.modules.get(moment):
            frames.append({"filename": "module", "line": 0, "name": path})
        if moment in self.lines:
            file, line, function = self.lines[moment]
            frames.append({"filename": file_shown(file), "line": line, "name": function})
        return frames

    def allocator(
        self, expandable_segments: bool = False, *, record_history: bool = False
    ) -> CachingAllocator:
        """Return a simulated device that has replayed this trace. Its `memory_stats()` contain the
        peaks.

        The storages that exist on entry are allocated first, one after another.

        Args:
            expandable_segments: As in `CachingAllocator`.
            record_history: Whether to keep each event for a snapshot.
        """
        from course_lib.caching_allocator import CachingAllocator

        allocator = CachingAllocator(
            expandable_segments=expandable_segments, record_history=record_history
        )
        allocator.replay(self)
        return allocator

    def save_snapshot(self, path: str | os.PathLike, expandable_segments: bool = False) -> None:
        """Write the step in the format in which `torch.cuda.memory._dump_snapshot` writes a step
        that ran on a GPU. The file can be opened at pytorch.org/memory_viz.

        Bytes are those of the tensors. Segments and addresses are those of `CachingAllocator`. Each
        allocation names its operator and, if the meter kept them, its module and line. Tests
        read the snapshot with `torch.cuda._memory_viz` and compare its figures with the meter's.
        The fields are those that the source of the web page reads; the page itself was not tested.

        Args:
            path: File to write.
            expandable_segments: As in `CachingAllocator`.

        Raises:
            ValueError: The spans were not kept.
        """
        allocator = self.allocator(expandable_segments, record_history=True)
        allocator.save_snapshot(path)

    def _check_spans(self) -> None:
        """Raise `ValueError` if the trace has no spans."""
        if self.spans is None:
            raise ValueError(
                "the trace must have been made with events, got one that holds only sums per"
                " category; call meter.trace() without events=False"
            )
