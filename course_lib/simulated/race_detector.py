"""A happens-before race detector: actors that know how far others have got, memory that is
handed out again, races.

Memory of which the last write is not known to an actor can be shown to it as it was before: see
`AccessLog.early`.
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

ACTORS = 512  # at most
ROUNDED = 512  # bytes; blocks are multiples of it, as those of PyTorch's allocator
HOST, ALLOCATOR = "the host", "the allocator"
HOST_LANE = "host"  # as the stream of a span
COPY = "a copy "  # goes before "up" and "down"


@dataclass(frozen=True)
class Event:
    """Point that an actor had reached, and what it had seen of the others: `clock[i]` is the last
    that it saw of actor i."""

    actor: Actor
    position: int
    clock: np.ndarray
    seconds: float


class Actor:
    """A stream, or a thread of the host. What it was given and has not done yet is `todo`, in
    order."""

    def __init__(self, name: str, index: int):
        self.name, self.index, self.seconds = name, index, 0.0
        self.clock = np.zeros(ACTORS, np.int64)
        self.todo: deque[Callable[[], None]] = deque()
        self.given = self.done = 0

    def event(self) -> Event:
        return Event(self, self.given, self.clock.copy(), self.seconds)

    def follow(self, event: Event) -> None:
        """Do what comes next after the event."""
        np.maximum(self.clock, event.clock, out=self.clock)
        self.seconds = max(self.seconds, event.seconds)
        self.give(partial(event.actor.run, event.position))

    def give(self, task: Callable[[], None]) -> None:
        self.todo.append(task)
        self.given += 1

    def run(self, until: int | None = None) -> None:
        """Do what was given, up to a position."""
        while self.done < (self.given if until is None else until):
            self.done += 1
            self.todo.popleft()()


@dataclass
class Block:
    """A piece of an arena that is in use. `pool` is whose it is; `used_by` are other streams that
    use it."""

    start: int
    nbytes: int
    pool: int
    used_by: set[Actor] = field(default_factory=set)


class Access(NamedTuple):
    """A actor's last access to the bytes from `start` to `end` of an arena, and how far it had got
    by then."""

    start: int
    end: int
    actor: Actor
    position: int
    name: str

    def unknown_to(self, actor: Actor) -> bool:
        return self.position > actor.clock[self.actor.index]


class Arena:
    """Memory in blocks, of which freed ones are handed out again, and the last accesses to each
    byte of it.

    A block that was freed goes to its own pool, once what `used_by` had been given at that time is
    done. Wherever a block begins, later ones begin and end too: so accesses are kept by the start
    of their block.

    Args:
        remembers: keep for each byte what it was before the last write.
    """

    def __init__(self, name: str, nbytes: int, remembers: bool = False):
        self.name, self.memory = name, np.zeros(nbytes, np.uint8)
        self.origin = self.memory.ctypes.data  # asked for often, and slow to find
        self.before = np.zeros(nbytes, np.uint8) if remembers else None
        self.top = self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}  # by start
        self.freed: deque[tuple[Block, list[Event]]] = deque()
        # (pool, size) -> (start, to wait for)
        self.free: dict[tuple[int, int], list[tuple[int, list[Event]]]] = {}
        self.writes: dict[int, list[Access]] = {}  # of a block's bytes each is in one at most
        self.reads: dict[int, list[Access]] = {}  # in one of each actor

    def block(self, nbytes: int, actor: Actor, pool: int) -> Tensor:
        """A block of a pool, as bytes, which `actor` gets in its order.

        Raises:
            torch.OutOfMemoryError: there is none.
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
        # from whichever thread lets go
        self.freed.append((block, [actor.event() for actor in block.used_by]))

    def collect(self) -> None:
        """Take back what has been let go."""
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
        """A tensor on the same bytes that does not keep them from being handed out again."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with _disable_current_modes():
            bytes_ = torch.from_numpy(self.memory[block.start : block.start + block.nbytes])
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), *place)

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """Addresses of a tensor's first byte and of its last one's end; None if it has none
        here."""
        if not tensor.numel() or self.block_of(tensor) is None:
            return None
        first = tensor.data_ptr() - self.origin
        return first, first + elements_spanned(tensor) * tensor.itemsize

    def unknown_writes(self, tensor: Tensor, actor: Actor) -> list[Access]:
        """The last writes to a tensor's bytes that nothing orders before what the actor does
        next."""
        if (extent := self.extent(tensor)) is None:
            return []
        written = _inside(self.writes.get(self.block_of(tensor).start, ()), *extent)
        return [access for access in written if access.unknown_to(actor)]

    def touch(
        self, tensor: Tensor, actor: Actor, name: str, writes: bool
    ) -> list[tuple[Access, str]]:
        """Note an access; what it is not ordered after, one of a kind and actor, each "written" or
        "read"."""
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
    """Accesses to bytes from `start` to `end`, and only their part there."""
    cut = (
        access._replace(start=max(access.start, start), end=min(access.end, end))
        for access in accesses
    )
    return [access for access in cut if access.start < access.end]


def _outside(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
    """Rest of the accesses without the bytes from `start` to `end`."""
    cut = []
    for access in accesses:
        before, after = min(access.end, start), max(access.start, end)
        cut += [access._replace(end=before), access._replace(start=after)]
    return [access for access in cut if access.start < access.end]


@dataclass(frozen=True)
class Span:
    """Work that a stream, or the host, was busy with, from `start` to `end` in simulated seconds.

    Attributes:
        stream: its name; "host" for every thread of the host.
        name: an operator, "a copy up" or "a copy down".
    """

    stream: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """ "up" or "down" for a copy, else "host" or "compute", whatever the stream's name is."""
        if self.name.startswith(COPY):
            return self.name.removeprefix(COPY)
        return HOST_LANE if self.stream == HOST_LANE else "compute"


class AccessLog:
    """A log of who has done what: actors, their accesses to some arenas, and their times."""

    def __init__(self, arenas: list[Arena]):
        self.remembers = all(arena.before is not None for arena in arenas)
        self.arenas, self.lock, self._local = arenas, threading.RLock(), threading.local()
        self.actors: list[Actor] = []
        self.races: list[str] = []
        self.spans: list[Span] = []

    @property
    def host(self) -> Actor:
        """The thread that this is."""
        if not hasattr(self._local, "host"):
            self._local.host = self.actor(HOST)
        return self._local.host

    def actor(self, name: str) -> Actor:
        """A new actor, after all that the host has done."""
        with self.lock:
            if len(self.actors) == ACTORS:
                raise RuntimeError(
                    f"the device has met {ACTORS} streams and threads, and takes no more; make a"
                    " new one"
                )
            actor = Actor(name, len(self.actors))
            for other in self.actors:
                if other.name == HOST:
                    actor.follow(other.event())
            self.actors.append(actor)
            return actor

    def new(self, arena: Arena, actor: Actor, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory of an arena for an actor. It counts as written: whoever else uses it has to come
        after that."""
        with self.lock, _disable_current_modes():
            pool = 0 if actor.name == HOST else actor.index
            tensor = (
                arena.block(math.prod(shape) * dtype.itemsize, actor, pool).view(dtype).view(*shape)
            )
            self.record_access(actor, ALLOCATOR, [], [tensor])
            return tensor

    @contextmanager
    def early(self, actor: Actor, tensors: list[Tensor], written: list[Tensor]) -> Iterator[None]:
        """Let an actor do something, inside the block, as early as its order allows, if the arenas
        remember.

        It finds its tensors as they were before the last writes that nothing orders before it. What
        it writes over those bytes is gone in the end, for they are written later.

        Args:
            tensors: all that it reads or writes.
            written: those that it writes; what they were before is remembered.
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
        """Check what an actor reads and writes next, and count its time."""
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
            f"{access} that {what} on {other} has {did}, and nothing orders the two: {actor} takes"
            f" a wait for an event of {other} after that (or `used` on {other}, if the memory was"
            f" freed in between); {_line()}"
        )
        if found not in self.races:
            self.races.append(found)


def _line() -> str:
    """Place in the program where this happens: the nearest line outside PyTorch and the simulated
    device."""
    here = Path(__file__)
    own = [str(here.with_name(f"{name}.py")) for name in ("race_detector", "operators", "device")]
    inside = (*own, str(Path(torch.__file__).parent))
    frame = next(
        frame
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(inside)
    )
    return f"{Path(frame.filename).name}, line {frame.lineno}"
