"""A race detector based on happens-before: actors with vector clocks, memory arenas, and a log.

If an actor has not waited for the last write to some memory, it can be shown the values from before
that write: see `AccessLog.early`.
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
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._torch import elements_spanned

ACTORS = 512  # largest number of actors
ROUNDED = 512  # bytes; block sizes are multiples of it, as in PyTorch's allocator
HOST, ALLOCATOR = "the host", "the allocator"
HOST_LANE = "host"  # name of the host as the stream of a span
COPY = "a copy "  # followed by "up" or "down"


@dataclass(frozen=True)
class Event:
    """A point that an actor has reached.

    `clock[i]` is the last position of actor i that it had waited for by then.
    """

    actor: Actor
    position: int
    clock: np.ndarray
    seconds: float


class Actor:
    """A stream or a thread of the host; `todo` has the tasks that it has not run yet."""

    def __init__(self, name: str, index: int):
        self.name, self.index, self.seconds = name, index, 0.0
        self.clock = np.zeros(ACTORS, np.int64)
        self.todo: deque[Callable[[], None]] = deque()
        self.given = self.done = 0

    def event(self) -> Event:
        return Event(self, self.given, self.clock.copy(), self.seconds)

    def follow(self, event: Event) -> None:
        """Wait for an event: everything that this actor does next is ordered after it."""
        np.maximum(self.clock, event.clock, out=self.clock)
        self.seconds = max(self.seconds, event.seconds)
        self.give(partial(event.actor.run, event.position))

    def give(self, task: Callable[[], None]) -> None:
        self.todo.append(task)
        self.given += 1

    def run(self, until: int | None = None) -> None:
        """Run the given tasks, up to a position."""
        while self.done < (self.given if until is None else until):
            self.done += 1
            self.todo.popleft()()


@dataclass
class Block:
    """A part of an arena that is in use.

    `pool` identifies the actor that owns it, and `used_by` are other streams that use it.
    """

    start: int
    nbytes: int
    pool: int
    used_by: set[Actor] = field(default_factory=set)


class Access(NamedTuple):
    """An actor's last access to the bytes from `start` to `end` of an arena.

    `position` is how far the actor had got by then.
    """

    start: int
    end: int
    actor: Actor
    position: int
    name: str

    def unknown_to(self, actor: Actor) -> bool:
        return self.position > actor.clock[self.actor.index]


class Arena:
    """Memory in blocks that are reused after they are freed, with the last accesses to each byte.

    A freed block returns to its own pool, once the streams in `used_by` have finished the tasks
    that they had been given. A later block at the same start also has the same end, so accesses are
    stored by the start of their block.

    Args:
        remembers: Whether to keep the value of each byte from before the last write.
    """

    def __init__(self, name: str, nbytes: int, remembers: bool = False):
        self.name, self.memory = name, np.zeros(nbytes, np.uint8)
        self.origin = self.memory.ctypes.data  # stored, because reading it is slow
        self.before = np.zeros(nbytes, np.uint8) if remembers else None
        self.top = self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}  # start -> block
        self.freed: deque[tuple[Block, list[Event]]] = deque()
        # (pool, size) -> (start, events to wait for) of free blocks
        self.free: dict[tuple[int, int], list[tuple[int, list[Event]]]] = {}
        self.writes: dict[int, list[Access]] = {}  # block -> last writes, at most one per byte
        self.reads: dict[int, list[Access]] = {}  # block -> last reads, one per byte and actor

    def block(self, nbytes: int, actor: Actor, pool: int) -> Tensor:
        """Return a block of a pool, as bytes, which `actor` may use after its tasks so far.

        Raises:
            torch.OutOfMemoryError: No free block is large enough.
        """
        self.collect()
        size = -(-nbytes // ROUNDED) * ROUNDED
        if free := self.free.get((pool, size)):
            start, events = free.pop()
            for event in events:
                actor.follow(event)
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
        weakref.finalize(view, self._drop, block).atexit = False
        return torch.from_numpy(view)

    def _drop(self, block: Block) -> None:
        # this may run in any thread, so it only notes the block for `collect`
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
        with _disable_current_modes():
            bytes_ = torch.from_numpy(self.memory[block.start : block.start + block.nbytes])
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), *place)

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the range of a tensor's bytes, or None if it has none in this arena."""
        if not tensor.numel() or self.block_of(tensor) is None:
            return None
        first = tensor.data_ptr() - self.origin
        return first, first + elements_spanned(tensor) * tensor.itemsize

    def unknown_writes(self, tensor: Tensor, actor: Actor) -> list[Access]:
        """Return the last writes to a tensor's bytes that the actor has not waited for."""
        if (extent := self.extent(tensor)) is None:
            return []
        written = _inside(self.writes.get(self.block_of(tensor).start, ()), *extent)
        return [access for access in written if access.unknown_to(actor)]

    def touch(
        self, tensor: Tensor, actor: Actor, name: str, writes: bool
    ) -> list[tuple[Access, str]]:
        """Record an access, and return the accesses that it is not ordered after.

        There is one of each kind and actor, with "written" or "read".
        """
        if (extent := self.extent(tensor)) is None:
            return []
        place = self.block_of(tensor).start
        found = [(access, "written") for access in self.unknown_writes(tensor, actor)[:1]]
        reads, noted = self.reads.get(place, []), self.writes if writes else self.reads
        if writes:
            missed = [access for access in _inside(reads, *extent) if access.unknown_to(actor)]
            found += [
                (access, "read")
                for access in {access.actor: access for access in reversed(missed)}.values()
            ]
            self.reads[place] = _outside(reads, *extent)
            kept = _outside(self.writes.get(place, []), *extent)
        else:
            mine = [access for access in reads if access.actor is actor]
            others = [access for access in reads if access.actor is not actor]
            kept = others + _outside(mine, *extent)
        noted[place] = [*kept, Access(*extent, actor, int(actor.clock[actor.index]), name)]
        return found


def _inside(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
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
        name: An operator, "a copy up" or "a copy down".
    """

    stream: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """Either "up" or "down" for a copy, else "host" or "compute", on any stream."""
        if self.name.startswith(COPY):
            return self.name.removeprefix(COPY)
        return HOST_LANE if self.stream == HOST_LANE else "compute"


class AccessLog:
    """A log of the actors, their accesses to arenas, and their times."""

    def __init__(self, arenas: list[Arena]):
        self.remembers = all(arena.before is not None for arena in arenas)
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
        """Create an actor, ordered after everything that the host has done."""
        with self.lock:
            if len(self.actors) == ACTORS:
                raise RuntimeError(
                    f"a SimulatedDevice can have at most {ACTORS} streams and threads; make a"
                    " new one"
                )
            actor = Actor(name, len(self.actors))
            for other in self.actors:
                if other.name == HOST:
                    actor.follow(other.event())
            self.actors.append(actor)
            return actor

    def new(self, arena: Arena, actor: Actor, shape: Any, dtype: torch.dtype) -> Tensor:
        """Allocate memory of an arena for an actor.

        The allocation counts as a write, so other actors must be ordered after it.
        """
        with self.lock, _disable_current_modes():
            pool = 0 if actor.name == HOST else actor.index
            tensor = (
                arena.block(math.prod(shape) * dtype.itemsize, actor, pool).view(dtype).view(*shape)
            )
            self.record_access(actor, ALLOCATOR, [], [tensor])
            return tensor

    @contextmanager
    def early(self, actor: Actor, tensors: list[Tensor], written: list[Tensor]) -> Iterator[None]:
        """Let an actor do something, inside the block, as early as its order allows.

        This has an effect only if the arenas remember old values. The actor sees the
        values of its tensors from before the last writes that it has not waited for. Values that it
        writes over the same bytes are lost, because those other writes come later.

        Args:
            tensors: All tensors that it reads or writes.
            written: The tensors that it writes; their old values are remembered.
        """
        later = []
        for arena in self.arenas if self.remembers else ():
            for write in (
                write for tensor in tensors for write in arena.unknown_writes(tensor, actor)
            ):
                place = slice(write.start, write.end)
                later.append((arena.memory[place], arena.memory[place].copy()))
                arena.memory[place] = arena.before[place]
            for extent in filter(None, map(arena.extent, written)):
                arena.before[slice(*extent)] = arena.memory[slice(*extent)]
        try:
            yield
        finally:
            for memory, values in reversed(later):
                memory[:] = values

    def record_access(
        self,
        actor: Actor,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        seconds: float = 0.0,
    ) -> None:
        """Check what an actor reads and writes next, and add its time."""
        actor.clock[actor.index] += 1
        for arena in self.arenas:
            for tensor in (*reads, *writes):
                writing = any(tensor is written for written in writes)
                for access, was in arena.touch(tensor, actor, name, writing):
                    doing = "hands out" if name is ALLOCATOR else "writes" if writing else "reads"
                    what = f"{name} on {actor.name} {doing} {arena.name} memory"
                    self._report(what, actor.name, was, access.name, access.actor.name)
        if seconds:
            lane = HOST_LANE if actor.name == HOST else actor.name
            self.spans.append(Span(lane, name, actor.seconds, actor.seconds + seconds))
            actor.seconds += seconds

    def _report(self, access: str, actor: str, did: str, what: str, other: str) -> None:
        found = (
            f"{access} that {what} on {other} has {did}, and nothing orders the two: {actor} must"
            f" wait for an event of {other} after that (or `used` is needed on {other}, if the"
            f" memory was freed in between); {_line()}"
        )
        if found not in self.races:
            self.races.append(found)


def _line() -> str:
    """Return the current line of the program: the nearest one outside PyTorch and this package."""
    here = Path(__file__)
    own = [str(here.with_name(f"{name}.py")) for name in ("race_detector", "operators", "device")]
    inside = (*own, str(Path(torch.__file__).parent))
    frame = next(
        frame
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(inside)
    )
    return f"{Path(frame.filename).name}, line {frame.lineno}"
