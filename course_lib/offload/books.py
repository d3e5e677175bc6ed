"""A simulated device's books: parties that know how far others have got, memory that is handed out again, races."""

from __future__ import annotations

import math
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

PARTIES = 512  # at most
GRAIN = 64  # bytes; accesses are told apart as finely as that
ROUNDED = 512  # bytes; blocks are multiples of it, as those of PyTorch's allocator
HOST, ALLOCATOR = "the host", "the allocator"


@dataclass(frozen=True)
class Event:
    """How far a party had got, and what it had seen of the others: `clock[i]` is the last that it saw of party i."""

    party: Party
    position: int
    clock: np.ndarray
    seconds: float


class Party:
    """A stream, or a thread of the host. What it was given and has not done yet is `todo`, in order."""

    def __init__(self, name: str, index: int):
        self.name, self.index, self.seconds = name, index, 0.0
        self.clock = np.zeros(PARTIES, np.int64)
        self.todo: deque[Callable[[], None]] = deque()
        self.given = self.done = 0

    def event(self) -> Event:
        return Event(self, self.given, self.clock.copy(), self.seconds)

    def follow(self, event: Event) -> None:
        """Do what comes next after the event."""
        np.maximum(self.clock, event.clock, out=self.clock)
        self.seconds = max(self.seconds, event.seconds)
        self.give(partial(event.party.run, event.position))

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
    """A piece of an arena that is in use. `pool` is whose it is; `used_by` are other streams that use it."""

    start: int
    nbytes: int
    pool: int
    used_by: set[Party] = field(default_factory=set)


class Arena:
    """Memory in blocks, of which freed ones are handed out again, and the last accesses to each grain of it.

    A block that was freed goes to its own pool, once what `used_by` had been given at that time is done.
    """

    def __init__(self, name: str, nbytes: int):
        self.name, self.memory = name, np.zeros(nbytes, np.uint8)
        self.top = self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}  # by start
        self.freed: deque[tuple[Block, list[Event]]] = deque()
        self.free: dict[tuple[int, int], list[tuple[int, list[Event]]]] = {}  # (pool, size) -> (start, to wait for)
        self.names: list[str] = []
        self.writes = self._accesses()
        self.writers = np.zeros(len(self.writes[0]), np.int16)
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by party: when, and the index of what

    def _accesses(self) -> tuple[np.ndarray, np.ndarray]:
        grains = -(-len(self.memory) // GRAIN)
        return np.zeros(grains, np.int64), np.zeros(grains, np.int32)

    def block(self, nbytes: int, party: Party, pool: int) -> Tensor:
        """A block of a pool, as bytes, which `party` gets in its order.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self.collect()
        size = -(-nbytes // ROUNDED) * ROUNDED
        if free := self.free.get((pool, size)):
            start, events = free.pop()
            for event in events:
                party.follow(event)
            party.run()
        else:
            start = self.top
            if start + size > len(self.memory):
                raise torch.OutOfMemoryError(
                    f"{self.name} memory has {len(self.memory)} bytes, of which {self.live_bytes} are in use, and no "
                    f"block of {size} is left; it takes a larger memory_bytes"
                )
            self.top += size
        view = self.memory[start : start + nbytes]
        self.blocks[start] = block = Block(start, nbytes, pool)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(view, self._drop, block).atexit = False
        return torch.from_numpy(view)

    def _drop(self, block: Block) -> None:
        self.freed.append((block, [party.event() for party in block.used_by]))  # from whichever thread lets go

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
        return self.blocks.get(storage.data_ptr() - self.memory.ctypes.data) if storage.nbytes() else None

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor on the same bytes that does not keep them from being handed out again."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with _disable_current_modes():
            bytes_ = torch.from_numpy(self.memory[block.start : block.start + block.nbytes])
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), *place)

    def touch(self, tensor: Tensor, party: Party, name: str, writes: bool) -> Iterator[tuple[int, str, str]]:
        """Note an access; what it is not ordered after, as (party, "written" or "read", what that did)."""
        if self.block_of(tensor) is None or not tensor.numel():
            return
        first = tensor.data_ptr() - self.memory.ctypes.data
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        where = slice(first // GRAIN, (first + extent * tensor.itemsize - 1) // GRAIN + 1)
        when, what = self.writes
        missed = np.flatnonzero(when[where] > party.clock[self.writers[where]])
        if missed.size:
            place = where.start + missed[0]
            yield int(self.writers[place]), "written", self.names[what[place]]
        for index, (read, reading) in self.reads.items() if writes else ():
            missed = np.flatnonzero(read[where] > party.clock[index])
            if missed.size:
                yield index, "read", self.names[reading[where.start + missed[0]]]
            read[where] = 0
        if writes:
            self.writers[where] = party.index
        elif party.index not in self.reads:
            self.reads[party.index] = self._accesses()
        when, what = self.writes if writes else self.reads[party.index]
        when[where] = party.clock[party.index]
        if not self.names or self.names[-1] != name:
            self.names.append(name)
        what[where] = len(self.names) - 1


@dataclass(frozen=True)
class Span:
    """What a stream was busy with, an operator or a copy, from `start` to `end` in simulated seconds."""

    stream: str
    name: str
    start: float
    end: float


class Books:
    """Who has done what: parties, their accesses to some arenas, and their times."""

    def __init__(self, arenas: list[Arena]):
        self.arenas, self.lock, self._local = arenas, threading.RLock(), threading.local()
        self.parties: list[Party] = []
        self.races: list[str] = []
        self.spans: list[Span] = []

    @property
    def host(self) -> Party:
        """The thread that this is."""
        if not hasattr(self._local, "host"):
            self._local.host = self.party(HOST)
        return self._local.host

    def party(self, name: str) -> Party:
        """A new party, after all that the host has done."""
        with self.lock:
            if len(self.parties) == PARTIES:
                raise RuntimeError(
                    f"the device has met {PARTIES} streams and threads, and takes no more; make a new one"
                )
            party = Party(name, len(self.parties))
            for other in self.parties:
                if other.name == HOST:
                    party.follow(other.event())
            self.parties.append(party)
            return party

    def new(self, arena: Arena, party: Party, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory of an arena for a party. It counts as written: whoever else uses it has to come after that."""
        with self.lock, _disable_current_modes():
            pool = 0 if party.name == HOST else party.index
            tensor = arena.block(math.prod(shape) * dtype.itemsize, party, pool).view(dtype).view(*shape)
            self.did(party, ALLOCATOR, [], [tensor])
            return tensor

    def did(self, party: Party, name: str, reads: list[Tensor], writes: list[Tensor], seconds: float = 0.0) -> None:
        """Check what a party reads and writes next, and count its time."""
        party.clock[party.index] += 1
        for arena in self.arenas:
            for tensor in (*reads, *writes):
                writing = any(tensor is written for written in writes)
                for other, did, what in arena.touch(tensor, party, name, writing):
                    doing = "hands out" if name is ALLOCATOR else "writes" if writing else "reads"
                    access = f"{name} on {party.name} {doing} {arena.name} memory"
                    self._report(access, party.name, did, what, self.parties[other].name)
        if seconds:
            self.spans.append(Span(party.name, name, party.seconds, party.seconds + seconds))
            party.seconds += seconds

    def _report(self, access: str, party: str, did: str, what: str, other: str) -> None:
        found = (
            f"{access} that {what} on {other} has {did}, and nothing orders the two: {party} takes a wait for an event "
            f"of {other} after that (or `used` on {other}, if the memory was freed in between); {_line()}"
        )
        if found not in self.races:
            self.races.append(found)


def _line() -> str:
    """Where in the program this happens: the nearest line outside PyTorch and the simulated device."""
    inside = (__file__, str(Path(__file__).with_name("simulated.py")), str(Path(torch.__file__).parent))
    frame = next(frame for frame in reversed(traceback.extract_stack()) if not frame.filename.startswith(inside))
    return f"{Path(frame.filename).name}, line {frame.lineno}"
