"""A race detector: actors with vector clocks, memory arenas, and a log of accesses.

An access happens before another one if the second actor has waited for it. Two accesses to the same
bytes, at least one of them a write, are a race if neither happens before the other.
`AccessLog.run_early` makes the consequence visible: an actor that has not waited for a write reads
the values from before that write.
"""

from __future__ import annotations

import math
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from course_lib._torch.modes import disable_current_modes
from course_lib._torch.tensors import elements_spanned

ACTORS = 512  # largest number of actors
ROUNDED = 512  # block sizes are multiples of it (bytes), as in PyTorch's allocator
HOST, ALLOCATOR = "the host", "the allocator"
HOST_LANE = "host"  # value of `Span.stream` for work of the host
COPIES = {"up": "a host-to-device copy (H2D)", "down": "a device-to-host copy (D2H)"}


@dataclass(frozen=True)
class Event:
    """A point in the tasks of an actor, for which other actors can wait.

    Attributes:
        actor: The actor that recorded the event.
        position: Number of tasks that the actor had been given before the event.
        clock: The actor's clock at that time. An actor that waits for the event takes it over.
        seconds: Simulated time at which the actor finishes these tasks.
    """

    actor: Actor
    position: int
    clock: np.ndarray
    seconds: float


class Actor:
    """A stream or a thread of the host.

    Attributes:
        seconds: Simulated time at which it finishes the tasks that it has been given.
        clock: `clock[i]` is the number of recorded tasks of actor i that this actor has waited for.
        pending: Tasks that it has not run yet.
        submitted, finished: Number of tasks that it has been given, and that it has run.
    """

    def __init__(self, name: str, index: int):
        self.name, self.index, self.seconds = name, index, 0.0
        self.label = HOST if name == HOST else f"stream {name!r}"  # for messages
        self.clock = np.zeros(ACTORS, np.int64)
        self.pending: deque[Callable[[], None]] = deque()
        self.submitted = self.finished = 0

    def event(self) -> Event:
        return Event(self, self.submitted, self.clock.copy(), self.seconds)

    def wait_for(self, event: Event) -> None:
        """Wait for an event: everything that this actor does next is ordered after it."""
        np.maximum(self.clock, event.clock, out=self.clock)
        self.seconds = max(self.seconds, event.seconds)
        self.submit(partial(event.actor.run, event.position))

    def submit(self, task: Callable[[], None]) -> None:
        self.pending.append(task)
        self.submitted += 1

    def run(self, until: int | None = None) -> None:
        """Run the tasks in order, up to a position; by default all of them."""
        while self.finished < (self.submitted if until is None else until):
            self.finished += 1
            self.pending.popleft()()


@dataclass
class Block:
    """A part of an arena that is in use.

    Attributes:
        start, nbytes: Position and size in the arena.
        pool: Number of the pool to which the block returns: 0 for the host, else the index of the
            stream that allocated it.
        used_by: Other streams that use the block. It is reused only after these streams have
            finished the tasks that they had been given before the block was freed.
    """

    start: int
    nbytes: int
    pool: int
    used_by: set[Actor] = field(default_factory=set)


class Access(NamedTuple):
    """An actor's last access to the bytes from `start` to `end` of an arena.

    `position` is the number of the actor's task that made the access. `name` is the name of the
    operator or copy.
    """

    start: int
    end: int
    actor: Actor
    position: int
    name: str

    def is_concurrent_with(self, actor: Actor) -> bool:
        return self.position > actor.clock[self.actor.index]


class Arena:
    """Memory in blocks that are reused after they are freed, with the last accesses to each byte.

    A freed block returns to its own pool. Before an actor reuses the block, it waits for the
    streams in `used_by`. A later block at the same start has the same rounded size, so accesses are
    stored by the start of their block.

    Args:
        name: Name of the memory in messages.
        nbytes: Size of the memory.
        keeps_old_values: Whether to keep the value of each byte from before the last write.
    """

    def __init__(self, name: str, nbytes: int, keeps_old_values: bool = False):
        self.name, self.memory = name, np.zeros(nbytes, np.uint8)
        self.origin = self.memory.ctypes.data  # stored, because reading the attribute is slow
        self.old_values = np.zeros(nbytes, np.uint8) if keeps_old_values else None
        self.top = self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}  # start -> block
        self.freed: deque[tuple[Block, list[Event]]] = deque()
        # (pool, size) -> (start, events to wait for) of free blocks
        self.free: dict[tuple[int, int], list[tuple[int, list[Event]]]] = {}
        self.writes: dict[int, list[Access]] = {}  # block -> last writes, at most one per byte
        self.reads: dict[int, list[Access]] = {}  # block -> last reads, one per byte and actor

    def block(self, nbytes: int, actor: Actor, pool: int) -> Tensor:
        """Allocate a block from a pool, as a tensor of bytes.

        `actor` first waits until the block's previous users have finished.

        Raises:
            torch.OutOfMemoryError: No free block is large enough.
        """
        self.collect()
        size = -(-nbytes // ROUNDED) * ROUNDED
        if free := self.free.get((pool, size)):
            start, events = free.pop()
            for event in events:
                actor.wait_for(event)
            actor.run()
        else:
            start = self.top
            if start + size > len(self.memory):
                raise torch.OutOfMemoryError(
                    f"{self.name} memory has {len(self.memory)} bytes, of which {self.live_bytes}"
                    f" are in use, and no free block of {size} bytes is left; pass a larger"
                    " memory_bytes"
                )
            self.top += size
        view = self.memory[start : start + nbytes]
        self.blocks[start] = block = Block(start, nbytes, pool)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(view, self._on_drop, block).atexit = False
        return torch.from_numpy(view)

    def _on_drop(self, block: Block) -> None:
        # Garbage collection may call this in any thread, so it leaves the work to `collect`.
        self.freed.append((block, [actor.event() for actor in block.used_by]))

    def collect(self) -> None:
        """Make dropped blocks available again."""
        while self.freed:
            block, events = self.freed.popleft()
            del self.blocks[block.start]
            self.live_bytes -= block.nbytes
            size = -(-block.nbytes // ROUNDED) * ROUNDED
            self.free.setdefault((block.pool, size), []).append((block.start, events))

    def block_of(self, tensor: Tensor) -> Block | None:
        storage = tensor.untyped_storage()
        return self.blocks.get(storage.data_ptr() - self.origin) if storage.nbytes() else None

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same bytes that does not keep them from being reused."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with disable_current_modes():
            bytes_ = torch.from_numpy(self.memory[block.start : block.start + block.nbytes])
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), *place)

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (start, end) of a tensor's bytes, or None if it has none in this arena."""
        if not tensor.numel() or self.block_of(tensor) is None:
            return None
        first = tensor.data_ptr() - self.origin
        return first, first + elements_spanned(tensor) * tensor.itemsize

    def concurrent_writes(self, tensor: Tensor, actor: Actor) -> list[Access]:
        """Return the last writes to a tensor's bytes that the actor has not waited for."""
        if (extent := self.extent(tensor)) is None:
            return []
        written = _clip_accesses(self.writes.get(self.block_of(tensor).start, ()), *extent)
        return [access for access in written if access.is_concurrent_with(actor)]

    def record(
        self, tensor: Tensor, actor: Actor, name: str, writes: bool
    ) -> list[tuple[Access, str]]:
        """Record an access, and return the earlier accesses with which it forms a race.

        Returns:
            Pairs (access, "written" or "read"): at most one write, and at most one read per actor.
        """
        if (extent := self.extent(tensor)) is None:
            return []
        place = self.block_of(tensor).start
        found = [(access, "written") for access in self.concurrent_writes(tensor, actor)[:1]]
        reads, log = self.reads.get(place, []), self.writes if writes else self.reads
        if writes:
            concurrent = [
                access
                for access in _clip_accesses(reads, *extent)
                if access.is_concurrent_with(actor)
            ]
            found += [
                (access, "read")
                for access in {access.actor: access for access in reversed(concurrent)}.values()
            ]
            self.reads[place] = _outside(reads, *extent)
            kept = _outside(self.writes.get(place, []), *extent)
        else:
            own = [access for access in reads if access.actor is actor]
            others = [access for access in reads if access.actor is not actor]
            kept = others + _outside(own, *extent)
        log[place] = [*kept, Access(*extent, actor, int(actor.clock[actor.index]), name)]
        return found


def _clip_accesses(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
    """Return the parts of accesses that lie between the bytes `start` and `end`."""
    cut = (
        access._replace(start=max(access.start, start), end=min(access.end, end))
        for access in accesses
    )
    return [access for access in cut if access.start < access.end]


def _outside(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
    """Return the parts of accesses that lie outside the bytes from `start` to `end`."""
    cut = []
    for access in accesses:
        before, after = min(access.end, start), max(access.start, end)
        cut += [access._replace(end=before), access._replace(start=after)]
    return [access for access in cut if access.start < access.end]


@dataclass(frozen=True)
class Span:
    """Work of a stream, or of the host, from `start` to `end` in simulated seconds.

    Attributes:
        stream: Name of the stream; "host" for every thread of the host.
        name: Name of the operator, or one of the values of `COPIES`.
    """

    stream: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """Kind of work: "up" (H2D copy), "down" (D2H copy), "host" or "compute"."""
        kind = HOST_LANE if self.stream == HOST_LANE else "compute"
        return {name: direction for direction, name in COPIES.items()}.get(self.name, kind)


class AccessLog:
    """A log of the actors, their accesses to arenas, and their times."""

    def __init__(self, arenas: list[Arena]):
        self.keeps_old_values = all(arena.old_values is not None for arena in arenas)
        self.arenas, self.lock, self._local = arenas, threading.RLock(), threading.local()
        self.actors: list[Actor] = []
        self.races: list[str] = []
        self.spans: list[Span] = []

    @property
    def host(self) -> Actor:
        """The actor of the current thread."""
        if not hasattr(self._local, "host"):
            self._local.host = self.actor(HOST)
        return self._local.host

    def actor(self, name: str) -> Actor:
        """Create an actor that has waited for everything that the host's threads have done."""
        with self.lock:
            if len(self.actors) == ACTORS:
                raise RuntimeError(
                    f"a SimulatedDevice can have at most {ACTORS} streams and threads; create a"
                    " new one"
                )
            actor = Actor(name, len(self.actors))
            for other in self.actors:
                if other.name == HOST:
                    actor.wait_for(other.event())
            self.actors.append(actor)
            return actor

    def new(self, arena: Arena, actor: Actor, shape: Any, dtype: torch.dtype) -> Tensor:
        """Allocate memory of an arena for an actor.

        The allocation counts as a write, so other actors must be ordered after it.
        """
        with self.lock, disable_current_modes():
            pool = 0 if actor.name == HOST else actor.index
            tensor = (
                arena.block(math.prod(shape) * dtype.itemsize, actor, pool).view(dtype).view(*shape)
            )
            self.record_access(actor, ALLOCATOR, [], [tensor])
            return tensor

    @contextmanager
    def run_early(
        self, actor: Actor, tensors: list[Tensor], written: list[Tensor]
    ) -> Iterator[None]:
        """Run the code inside the block as if the actor ran as early as its waits allow.

        This has an effect only if the arenas keep old values. The block reads the values that its
        tensors had before the writes that the actor has not waited for. At the end of the block
        these writes are restored, because they count as later. They replace values that the block
        wrote to the same bytes.

        Args:
            actor: The stream or thread that runs the block.
            tensors: All tensors that it reads or writes.
            written: The tensors that it writes, whose old values are kept.
        """
        later_writes = []
        for arena in self.arenas if self.keeps_old_values else ():
            for write in (
                write for tensor in tensors for write in arena.concurrent_writes(tensor, actor)
            ):
                place = slice(write.start, write.end)
                later_writes.append((arena.memory[place], arena.memory[place].copy()))
                arena.memory[place] = arena.old_values[place]
            for extent in filter(None, map(arena.extent, written)):
                arena.old_values[slice(*extent)] = arena.memory[slice(*extent)]
        try:
            yield
        finally:
            for memory, values in reversed(later_writes):
                memory[:] = values

    def record_access(
        self,
        actor: Actor,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        seconds: float = 0.0,
    ) -> None:
        """Record a task of an actor, report its races, and advance the actor's time.

        Args:
            actor: The stream or thread that runs the task.
            name: Name of the operator or copy.
            reads, writes: Tensors that the task reads and writes.
            seconds: Simulated duration of the task.
        """
        actor.clock[actor.index] += 1
        for arena in self.arenas:
            for tensor in (*reads, *writes):
                writing = any(tensor is written for written in writes)
                for other, past in arena.record(tensor, actor, name, writing):
                    verb = "hands out" if name is ALLOCATOR else "writes" if writing else "reads"
                    access = f"{name} on {actor.label} {verb} {arena.name} memory"
                    self._report(access, actor.label, past, other.name, other.actor.label)
        if seconds:
            lane = HOST_LANE if actor.name == HOST else actor.name
            self.spans.append(Span(lane, name, actor.seconds, actor.seconds + seconds))
            actor.seconds += seconds

    def _report(self, access: str, actor: str, past: str, task: str, other: str) -> None:
        race = (
            f"{access} that {task} on {other} has {past}, without waiting for it: {actor} must wait"
            f" for an event that {other} records afterwards, or, if the memory was freed in"
            f" between, the program must call `used` while {other} is current; {_line()}"
        )
        if race not in self.races:
            self.races.append(race)


def _line() -> str:
    """Return the file and line that called PyTorch or this package, for a message."""
    here = Path(__file__)
    own = [str(here.with_name(f"{name}.py")) for name in ("race_detector", "operators", "device")]
    inside = (*own, str(Path(torch.__file__).parent))
    frame = next(
        frame
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(inside)
    )
    return f"{Path(frame.filename).name}, line {frame.lineno}"
