"""Detect races: accesses to the same memory by several actors that do not wait for one another.

An `Actor` is a stream or a thread of the host. An `Arena` is memory in which tensors are allocated.
The `AccessLog` records the actors' accesses to the arenas.

An access happens before another one if the actor of the second access has waited for the first.
Two accesses to the same bytes, at least one of them a write, are a race if neither happens before
the other. `AccessLog.run_early` makes the consequence visible: an actor that has not waited for a
write reads the values from before that write.
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

MAX_ACTORS = 512  # largest number of actors
# Block sizes in bytes are multiples of this number, as in PyTorch's allocator.
BLOCK_MULTIPLE = 512
HOST, ALLOCATOR = "the host", "the allocator"  # names in messages
HOST_LANE = "host"  # value of `Span.stream` for work of the host
# Names of the copies in both directions.
COPIES = {"up": "a host-to-device copy (H2D)", "down": "a device-to-host copy (D2H)"}


@dataclass(frozen=True)
class Event:
    """Marker in the tasks of a stream or host thread; other streams and threads can wait for it.

    The class corresponds to a CUDA event.

    Attributes:
        actor: `Actor` (a stream or a host thread) that recorded the event.
        position: Number of tasks that were submitted to the actor before the event.
        clock: Vector clock of the actor when the event was recorded (see `Actor`).
        seconds: Simulated time in seconds at which the actor finishes all tasks before the event.
    """

    actor: Actor
    position: int
    clock: np.ndarray
    seconds: float


class Actor:
    """A simulated stream or a thread of the host, which runs its tasks in order.

    Args:
        name: Name of the stream, or `HOST` for a thread.
        index: Index of the actor in `AccessLog.actors`.

    Attributes:
        seconds: Simulated time in seconds at which the actor finishes its tasks so far.
        clock: Vector clock, an int64 array with one element per actor. `clock[i]` is the number of
            tasks of actor i for which this actor has waited. The element at this actor's own index
            is the number of its own tasks. Only tasks that `AccessLog.record_access` has recorded
            are counted.
        pending: Queue of the tasks that were submitted and have not run yet.
        submitted: Number of tasks that were submitted.
        finished: Number of tasks that have run.
    """

    def __init__(self, name: str, index: int):
        self.name, self.index, self.seconds = name, index, 0.0
        self.label = HOST if name == HOST else f"stream {name!r}"  # for messages
        self.clock = np.zeros(MAX_ACTORS, np.int64)
        self.pending: deque[Callable[[], None]] = deque()
        self.submitted = self.finished = 0

    def event(self) -> Event:
        """Return an `Event` that marks the point after all tasks that were submitted so far."""
        return Event(self, self.submitted, self.clock.copy(), self.seconds)

    def wait_for(self, event: Event) -> None:
        """Make this actor wait for an event of another actor before it runs further tasks.

        An actor is a simulated stream or a host thread.
        """
        np.maximum(self.clock, event.clock, out=self.clock)
        self.seconds = max(self.seconds, event.seconds)
        self.submit(partial(event.actor.run, event.position))

    def submit(self, task: Callable[[], None]) -> None:
        """Append a task to the queue. A later call of `run` runs the task.

        Args:
            task: Function without arguments.
        """
        self.pending.append(task)
        self.submitted += 1

    def run(self, until: int | None = None) -> None:
        """Run pending tasks in the order in which they were submitted.

        Args:
            until: Number of tasks after which to stop. Tasks that ran in earlier calls count too.
                None runs all pending tasks.
        """
        while self.finished < (self.submitted if until is None else until):
            self.finished += 1
            self.pending.popleft()()


@dataclass
class Block:
    """Part of an arena (a simulated memory) that holds a tensor.

    Attributes:
        start: Position of the block's first byte in the arena.
        nbytes: Size of the block in bytes.
        pool: Number of the pool to which the block returns when it is freed: 0 for the host,
            otherwise the index of the stream that allocated the block.
        used_by: Streams that use the block, in addition to the stream or host that allocated it.
            The block is reused only after these streams have finished all tasks that were submitted
            to them before the block was freed.
    """

    start: int
    nbytes: int
    pool: int
    used_by: set[Actor] = field(default_factory=set)


class Access(NamedTuple):
    """Most recent access by one stream or host thread to a range of bytes in a simulated memory.

    Attributes:
        start: Position of the first accessed byte in the memory, an `Arena`.
        end: Position after the last accessed byte.
        actor: `Actor` (a stream or a host thread) that made the access.
        position: Number of the task that made the access, among the tasks of this actor.
        name: Name of the operator or copy.
    """

    start: int
    end: int
    actor: Actor
    position: int
    name: str

    def is_concurrent_with(self, actor: Actor) -> bool:
        """Return whether an actor (a stream or a host thread) has not waited for this access."""
        return self.position > actor.clock[self.actor.index]


def _rounded_size(nbytes: int) -> int:
    """Return the size in bytes of the block for a tensor; even an empty tensor gets a block."""
    return max(1, -(-nbytes // BLOCK_MULTIPLE)) * BLOCK_MULTIPLE


class Arena:
    """Simulated memory that allocates and reuses blocks, and records the last accesses per byte.

    There is one pool of free blocks for each stream and one for the host. A freed block returns to
    its pool. Before an actor (a stream or a host thread) reuses the block, it waits for the streams
    in `Block.used_by`.

    For each byte, the arena stores the last write and, for each actor, the last read since that
    write, as ranges of bytes (see `Access`). Each block has one list of writes and one list of
    reads, which remain when the block is freed and reused. Blocks are never split or merged. The
    size of a block is rounded up to a multiple of `BLOCK_MULTIPLE`. A freed block is reused only
    as a whole, for a tensor with the same rounded size.

    Args:
        name: Name of the memory in messages.
        nbytes: Size of the memory in bytes.
        keeps_old_values: Whether to store the value that each byte had before its last write.
            `AccessLog.run_early` needs these values.
    """

    def __init__(self, name: str, nbytes: int, keeps_old_values: bool = False):
        self.name, self.memory = name, np.zeros(nbytes, np.uint8)
        # Address of the first byte. It is stored because reading `ctypes.data` is slow.
        self.origin = self.memory.ctypes.data
        self.old_values = np.zeros(nbytes, np.uint8) if keeps_old_values else None
        self.top = self.live_bytes = self.peak_bytes = 0
        # Maps the start of each block that is in use to the block.
        self.blocks: dict[int, Block] = {}
        # Dropped blocks that `collect` has not yet made available, each with the events to wait for
        # before the block is reused.
        self.freed: deque[tuple[Block, list[Event]]] = deque()
        # Maps (pool, rounded size) to the free blocks, as pairs (start, events to wait for).
        self.free: dict[tuple[int, int], list[tuple[int, list[Event]]]] = {}
        # These dicts map the start of a block to its last writes (at most one per byte) and to its
        # last reads (at most one per byte and actor).
        self.writes: dict[int, list[Access]] = {}
        self.reads: dict[int, list[Access]] = {}

    def block(self, nbytes: int, actor: Actor, pool: int) -> Tensor:
        """Allocate a block of memory and return it as a tensor of bytes.

        Args:
            nbytes: Size of the tensor in bytes.
            actor: `Actor` (a stream or a host thread) that will use the block. If the block was
                used before, the actor first waits for the streams in `Block.used_by`.
            pool: Number of the pool of free blocks from which the block is taken.

        Raises:
            torch.OutOfMemoryError: The memory is full, and the pool has no free block of this size.
        """
        self.collect()
        size = _rounded_size(nbytes)
        if free := self.free.get((pool, size)):
            start, events = free.pop()
            for event in events:
                actor.wait_for(event)
            actor.run()
        else:
            start = self.top
            if start + size > len(self.memory):
                raise torch.OutOfMemoryError(
                    f"{self.name} memory of the SimulatedDevice has {len(self.memory)} bytes, of"
                    f" which {self.live_bytes} are in use, and no free block of {size} bytes is"
                    " left; create the SimulatedDevice with a larger memory_bytes"
                )
            self.top += size
        view = self.memory[start : start + nbytes]
        self.blocks[start] = block = Block(start, nbytes, pool)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(view, self._note_dropped_block, block).atexit = False
        return torch.from_numpy(view)

    def _note_dropped_block(self, block: Block) -> None:
        """Record that the tensor of a block is no longer referenced.

        Garbage collection may call this method in any thread, so `collect` frees the block later.
        """
        self.freed.append((block, [actor.event() for actor in block.used_by]))

    def collect(self) -> None:
        """Free all blocks whose tensors are no longer referenced, for use by other tensors."""
        while self.freed:
            block, events = self.freed.popleft()
            del self.blocks[block.start]
            self.live_bytes -= block.nbytes
            key = block.pool, _rounded_size(block.nbytes)
            self.free.setdefault(key, []).append((block.start, events))

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the `Block` that holds a tensor, or None for a tensor outside this arena."""
        storage = tensor.untyped_storage()
        return self.blocks.get(storage.data_ptr() - self.origin) if storage.nbytes() else None

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor that shares the memory of another tensor without keeping it allocated.

        The block of the original tensor can be freed while the result exists. A tensor that is not
        in this arena is returned unchanged.
        """
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with disable_current_modes():
            bytes_ = torch.from_numpy(self.memory[block.start : block.start + block.nbytes])
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), *place)

    def extent(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the range (start, end) of a tensor's bytes in this arena.

        `end` is exclusive. The range goes from the tensor's first to its last byte, including bytes
        that its strides skip. The result is None if the tensor is empty or not in this arena.
        """
        if not tensor.numel() or self.block_of(tensor) is None:
            return None
        first = tensor.data_ptr() - self.origin
        return first, first + elements_spanned(tensor) * tensor.itemsize

    def concurrent_writes(self, tensor: Tensor, actor: Actor) -> list[Access]:
        """Return the last writes to a tensor's bytes for which an actor has not waited.

        Args:
            tensor: Tensor; if it is not in this arena, the list is empty.
            actor: `Actor` (a stream or a host thread) that wants to access the tensor.
        """
        if (extent := self.extent(tensor)) is None:
            return []
        written = _clip_accesses(self.writes.get(self.block_of(tensor).start, ()), *extent)
        return [access for access in written if access.is_concurrent_with(actor)]

    def record(
        self, tensor: Tensor, actor: Actor, name: str, writes: bool
    ) -> list[tuple[Access, str]]:
        """Record an access to a tensor, and return the earlier accesses that form a race with it.

        Args:
            tensor: Tensor that is accessed. If it is not in this arena, nothing is recorded.
            actor: `Actor` (a stream or a host thread) that accesses the tensor.
            name: Name of the operator or copy.
            writes: Whether the access is a write.

        Returns:
            Pairs (earlier `Access`, "written" or "read"). At most one pair is a write, and at most
            one pair per actor is a read.
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
            self.reads[place] = _remove_range(reads, *extent)
            kept = _remove_range(self.writes.get(place, []), *extent)
        else:
            own = [access for access in reads if access.actor is actor]
            others = [access for access in reads if access.actor is not actor]
            kept = others + _remove_range(own, *extent)
        log[place] = [*kept, Access(*extent, actor, int(actor.clock[actor.index]), name)]
        return found


def _clip_accesses(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
    """Return the parts of accesses that are inside the range of bytes from `start` to `end`."""
    cut = (
        access._replace(start=max(access.start, start), end=min(access.end, end))
        for access in accesses
    )
    return [access for access in cut if access.start < access.end]


def _remove_range(accesses: Iterable[Access], start: int, end: int) -> list[Access]:
    """Return the parts of accesses that are outside the range of bytes from `start` to `end`."""
    cut = []
    for access in accesses:
        before, after = min(access.end, start), max(access.start, end)
        cut += [access._replace(end=before), access._replace(start=after)]
    return [access for access in cut if access.start < access.end]


@dataclass(frozen=True)
class Span:
    """Period of simulated time in which a stream or the host runs an operator or a copy.

    Attributes:
        stream: Name of the stream; "host" for every thread of the host.
        name: Name of the operator, or one of the values of `COPIES`.
        start: Simulated time in seconds at which the period begins.
        end: Simulated time in seconds at which the period ends.
    """

    stream: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """Kind of work: "up" (H2D copy), "down" (D2H copy), "host" or "compute".

        "host" is an operator on the host, and "compute" an operator on the device.
        """
        kind = HOST_LANE if self.stream == HOST_LANE else "compute"
        return {name: direction for direction, name in COPIES.items()}.get(self.name, kind)


class AccessLog:
    """Record of all streams and host threads, their accesses to memory, and their simulated times.

    Each stream and each host thread is an `Actor`.

    Args:
        arenas: Simulated memories in which accesses are recorded.

    Attributes:
        lock: Lock that a caller must acquire before it changes the log or an arena.
        actors: List of all actors, in the order of their indices.
        races: List with one sentence per race that was found.
        spans: List with one `Span` per task that took simulated time.
    """

    def __init__(self, arenas: list[Arena]):
        self.keeps_old_values = all(arena.old_values is not None for arena in arenas)
        self.arenas, self.lock, self._local = arenas, threading.RLock(), threading.local()
        self.actors: list[Actor] = []
        self.races: list[str] = []
        self.spans: list[Span] = []

    @property
    def host(self) -> Actor:
        """The `Actor` that represents the current host thread. It is created at the first use."""
        if not hasattr(self._local, "host"):
            self._local.host = self.actor(HOST)
        return self._local.host

    def actor(self, name: str) -> Actor:
        """Create and return an `Actor`, which represents a stream or a host thread.

        The first task of the new actor runs after everything that the host's threads have done so
        far.

        Args:
            name: Name of the stream, or `HOST` for a thread.

        Raises:
            RuntimeError: `MAX_ACTORS` actors exist already.
        """
        with self.lock:
            if len(self.actors) == MAX_ACTORS:
                raise RuntimeError(
                    f"a SimulatedDevice can have at most {MAX_ACTORS} streams and threads in"
                    " total; create a new SimulatedDevice"
                )
            actor = Actor(name, len(self.actors))
            for other in self.actors:
                if other.name == HOST:
                    actor.wait_for(other.event())
            self.actors.append(actor)
            return actor

    def new(self, arena: Arena, actor: Actor, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return a new tensor with undefined values in an arena (a simulated memory).

        The allocation counts as a write by `actor`, so other actors must wait for it before they
        use the tensor.

        Args:
            arena: Memory in which the tensor is allocated.
            actor: `Actor` (a stream or a host thread) that allocates the tensor.
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
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
        """Simulate that an actor runs a `with` block as early as its waits allow.

        An actor is a stream or a host thread. If the actor has not waited for a write to a tensor,
        the block could run before this write. Inside the block, the tensor therefore has the values
        from before the write. At the end of the block, the result of the write is put back, even
        where the block wrote to the same bytes. If an arena was made without `keeps_old_values`,
        this method does nothing.

        Args:
            actor: `Actor` that runs the block.
            tensors: All tensors that the block reads or writes.
            written: The tensors that the block writes, all of which are also in `tensors`.
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
        """Record the memory accesses of a task and its races, and advance the simulated time.

        For each race, a sentence is added to `races`.

        Args:
            actor: `Actor` (a stream or a host thread) that runs the task, and whose simulated time
                is advanced.
            name: Name of the operator or copy.
            reads: Tensors that the task reads.
            writes: Tensors that the task writes.
            seconds: Simulated duration of the task in seconds.
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
        """Add a sentence about a race to `races`, unless the list contains it already.

        Args:
            access: Description of the later access.
            actor: Label of the actor of the later access.
            past: "written" or "read": the kind of the earlier access.
            task: Name of the operator or copy of the earlier access.
            other: Label of the actor of the earlier access.
        """
        race = (
            f"{access} that {task} on {other} has {past}, without waiting for {other}"
            f" ({_calling_line()}). Let {actor} wait for an event that {other} records after"
            f" {task}. If the tensor of {task} was freed in between, call the device's method"
            f" used(tensor) with that tensor before it is freed, while {other} is the current"
            " stream"
        )
        if race not in self.races:
            self.races.append(race)


def _calling_line() -> str:
    """Return the file and line of the code that called PyTorch or this package, for a message.

    An example is "train.py, line 12".
    """
    here = Path(__file__)
    own = [str(here.with_name(f"{name}.py")) for name in ("race_detector", "operators", "device")]
    inside = (*own, str(Path(torch.__file__).parent))
    frame = next(
        frame
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(inside)
    )
    return f"{Path(frame.filename).name}, line {frame.lineno}"
