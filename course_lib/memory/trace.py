"""A training step as a trace: its operators, the storages that are born and released, FLOPs, and
bytes moved.

Whatever runs a step gives one: a meter in this process, a symbolic step, one rank of several, the
step with few of a model's blocks. Live bytes by category, the peak and the phases are read off it
here; `growth` makes of two of them that of the step with more of the model's equal blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .._origin import file_shown
from .allocator_settings import AllocatorSettings
from .caching_allocator import CachingAllocator
from .timeline import CATEGORIES, PHASES

ENTRY = "what model and optimizer hold on entry"


class Span(NamedTuple):
    """A storage's stay in one category: at the moments from `start` on, until `stop`, which is
    exclusive."""

    storage: int
    bytes: int
    category: str
    start: int
    stop: int


@dataclass(frozen=True)
class Event:
    """A storage is born, or released; or it changes its category: released from one, and born in
    the other.

    Attributes:
        moment: the number of the operator in the trace.
        kind: "birth", by the operator; or "release": it was there up to the operator before.
        storage: a number of its own.
        bytes: of the storage.
        category: one of `CATEGORIES`.
        operator, phase, module: of the operator, as in the trace.
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
        live: bytes at each moment and of each of `CATEGORIES`, an int64 array (moments,
            categories).
        flops_at: moment -> FLOPs, where there are any.
        flops: of the whole step, by the formulas of `FlopCounterMode`; also of micro-batches for
            which others stand.
        modules: moment -> path of the module that ran, where it is known.
        lines: moment -> (file, line, function) of the user's own code, where it is known.
        spans: of all storages; None where events are not kept.
        bytes_down: moved to the tier below.
        bytes_up: moved back from it.
        sent_bytes: communicated by a rank.
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
        """Part of its moments, which follow one another; totals are those of the whole."""
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

    # ---- what is read off it

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Bytes live at each moment, of all categories."""
        return self.live.sum(1)

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_moment(self) -> int:
        """The first operator that reaches the peak; what was there on entry, where none does."""
        live, begins = self.live_bytes, self._begins
        found = begins + int(live[begins:].argmax()) if len(live) > begins else 0
        return found if live[found] == live.max() else 0

    @property
    def _begins(self) -> int:
        """The first moment of an operator."""
        return int(bool(self.operators) and self.operators[0][0] == ENTRY)

    @property
    def peak_operator(self) -> str:
        return str(self.operators[self.peak_moment][0])

    def at_peak(self) -> dict[str, int]:
        """category -> bytes at the peak."""
        return dict(zip(CATEGORIES, self.live[self.peak_moment].tolist(), strict=True))

    def phase_peaks(self) -> dict[str, int]:
        """phase -> the most bytes live after one of its operators."""
        peaks = dict.fromkeys(PHASES, 0)
        begins = self._begins
        for (_, phase), count in zip(
            self.operators[begins:], self.live_bytes[begins:].tolist(), strict=True
        ):
            peaks[phase] = max(peaks[phase], count)
        return peaks

    def series(self) -> dict[str, np.ndarray]:
        """category -> bytes at each moment."""
        return dict(zip(CATEGORIES, self.live.T, strict=True))

    def flops_by_operator(self) -> dict[str, int]:
        """operator -> FLOPs of all its calls, the most first."""
        found: dict[str, int] = {}
        for moment, flops in self.flops_at.items():
            name = str(self.operators[moment][0])
            found[name] = found.get(name, 0) + flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def events(self) -> Iterator[Event]:
        """Births and releases in order, what is released at a moment before what is born at it.

        Raises:
            ValueError: they were not kept.
        """
        self._check_spans()
        found = [(span.start, "birth", span) for span in self.spans]
        found += [(span.stop, "release", span) for span in self.spans if span.stop < len(self)]
        for moment, kind, span in sorted(found, key=lambda each: (each[0], each[1] == "birth")):
            operator, phase = self.operators[moment]
            module = self.modules.get(moment, "")
            yield Event(moment, kind, *span[:3], str(operator), phase, module)

    def replayed(self) -> np.ndarray:
        """`live`, found by its events alone."""
        change = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        for event in self.events():
            sign = 1 if event.kind == "birth" else -1
            change[event.moment, CATEGORIES.index(event.category)] += sign * event.bytes
        return change.cumsum(0)[:-1]

    # ---- as a device's allocator sees it

    def allocations(self) -> Iterator[tuple]:
        """("birth", storage, bytes, frames) and ("release", storage, bytes) in order, as
        `CachingAllocator.replay` takes them; what only changes its category stays where it is.

        Frames are those of `frames_at`, for the operator that has made the storage.

        Raises:
            ValueError: events were not kept.
        """
        self._check_spans()
        lives: dict[int, tuple[int, int, int]] = {}  # storage -> bytes, start, stop
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
            elif moment < len(self):  # else it lives on
                yield "release", storage, nbytes

    def frames_at(self, moment: int) -> list[dict]:
        """Call stacks where a moment's storages are from, innermost first, in the form of PyTorch's
        snapshots: the operator and its phase, the module, the line of the user's own code."""
        operator, phase = self.operators[moment]
        frames = [{"filename": phase, "line": 0, "name": str(operator)}]
        if path := self.modules.get(moment):
            frames.append({"filename": "module", "line": 0, "name": path})
        if moment in self.lines:
            file, line, function = self.lines[moment]
            frames.append({"filename": file_shown(file), "line": line, "name": function})
        return frames

    def allocated(
        self, settings: AllocatorSettings | str | None = None, *, record_history: bool = False
    ) -> CachingAllocator:
        """A simulated device after this trace: its `memory_stats()` have the peaks.

        What is there on entry is laid out first, storage after storage.

        Args:
            settings: as for `CachingAllocator`, such as "expandable_segments:True".
        """
        allocator = CachingAllocator(settings=settings, record_history=record_history)
        allocator.replay(self)
        return allocator

    def save_snapshot(
        self, path: str | os.PathLike, settings: AllocatorSettings | str | None = None
    ) -> None:
        """Write the step as `torch.cuda.memory._dump_snapshot` writes one that ran on a GPU, to be
        opened at pytorch.org/memory_viz.

        Bytes are those of the tensors; segments and addresses are those of `CachingAllocator`. Each
        allocation names its operator and, where the meter kept them, module and line. PyTorch's own
        reader, `torch.cuda._memory_viz`, gives the meter's figures, and the fields are those that
        the page's source asks for; the page itself was not opened.

        Args:
            settings: of the allocator, as in `allocated`.

        Raises:
            ValueError: events were not kept.
        """
        self.allocated(settings, record_history=True).save_snapshot(path)

    def _check_spans(self) -> None:
        if self.spans is None:
            raise ValueError(
                "spans must be those of a trace from meter.trace(), got None; this trace"
                " holds only sums"
            )
