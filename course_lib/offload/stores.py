"""The tiers below: a file for a CPU, pinned host memory for CUDA, nothing at all for symbolic
tensors.

A `Store` gives out rooms. `room.put(tensor)` starts to copy a tensor down, `room.get()` to copy it
up again; neither waits.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import whole
from course_lib._torch import is_symbolic
from course_lib.memory.concrete_ints import Symbolic

from .device import Device


class StoreFull(OSError):
    """The tier below has no room; the message says how much was wanted and where."""


@dataclass
class Traffic:
    """Bytes that have moved.

    Attributes:
        bytes_down: copied to the tier below.
        bytes_up: copied back.
        shared: how often a storage was saved again that is below already, or on its way.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    shared: int = 0


def view_of(
    data: Tensor, dtype: torch.dtype, shape: tuple, stride: tuple, offset: int = 0
) -> Tensor:
    """A tensor on the storage of `data`, with its version counter, out of sight of a meter.

    Not by `set_`: that would keep a symbolic storage for ever, and has versions of its own, so that
    what is saved once more, as in a backward pass that makes a graph, would not be known for what
    it is.
    """
    with nullcontext() if is_symbolic(data) else _disable_current_modes():
        data = data.detach().conj() if data.is_conj() else data.detach()
        data = torch._neg_view(data) if data.is_neg() else data
        if data.dtype != dtype:
            nbytes = data.untyped_storage().nbytes()
            item = max(data.itemsize, dtype.itemsize)
            flat = data.as_strided((nbytes // item * item // data.itemsize,), (1,), 0)
            data = flat.view(dtype)
        return data.as_strided(shape, stride, offset)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8, sharing it."""
    return view_of(tensor, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,))


class Guard:
    """A lock, and a list of what its holder does before others get it.

    Handles are dropped at any moment: the garbage collector runs in any thread, also in one that
    holds the lock, or that its holder waits for. So what is dropped waits for nobody: `later`
    leaves the call to whoever has the lock.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_) -> None:
        self._lock.release()
        self._sweep()

    def later(self, call: Callable[[], Any]) -> None:
        self._waiting.append(call)
        self._sweep()

    def _sweep(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._lock.release()


class Room:
    """Reserved bytes below, until `free`, or until the room is dropped. `place` and `last` are the
    store's own."""

    def __init__(self, store: Store, nbytes: int, place: Any = None):
        self.store = store
        self.nbytes = nbytes
        self.place = place
        self.last = None
        self.freed = False

    def put(self, tensor: Tensor) -> Room:
        """Start copying down a tensor that fills its storage. `wait` waits for the end, and raises
        what went wrong."""
        self._like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.wait = self.store.write(self, bytes_of(tensor))
        self.store.stats.bytes_down += self.nbytes
        return self

    def get(self) -> Callable[[], Tensor]:
        """Start copying up, into new memory; the function returned gives the tensor, once it may be
        used."""
        tensor = self.store.memory_for(self, *self._like)  # here, so that a meter sees it
        ready = self.store.read(self, bytes_of(tensor))
        self.store.stats.bytes_up += self.nbytes

        def arrived() -> Tensor:
            ready()
            return tensor

        return arrived

    def free(self, *until: Any) -> None:
        """Give the room back, without waiting. Tensors that are still being copied are held `until`
        it is safe."""
        if not self.freed:
            self.freed = True
            self.store.guard.later(lambda: (self.store.release(self), until))

    __del__ = free


class Store:
    """A tier below. One of your own defines `write` and `read`, and `claim` and `release` where
    room is scarce.

    Attributes:
        stats: a `Traffic`.
    """

    def __init__(self):
        self.stats = Traffic()
        self.guard = Guard()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        # which another thread may just hold: what was dropped meanwhile is released on the way out
        with self.guard:
            pass
        return self._used_bytes

    def reserve(self, nbytes: int) -> Room:
        """Room for so many bytes.

        Raises:
            StoreFull: there is none.
        """
        self.check_open()
        with self.guard:
            room = Room(self, nbytes, self.claim(nbytes))
            self._used_bytes += nbytes
        return room

    def put(self, tensor: Tensor) -> Room:
        """Start copying down a tensor that fills its storage, into a room of its own."""
        return self.reserve(tensor.untyped_storage().nbytes()).put(tensor)

    def write(self, room: Room, data: Tensor) -> Callable[[], None]:
        """Start copying `data`, bytes in one dimension, down; the function returned waits for the
        end."""
        raise NotImplementedError

    def read(self, room: Room, data: Tensor) -> Callable[[], Any]:
        """Start copying what was written last up into `data`; the function returned waits for the
        end."""
        raise NotImplementedError

    def memory_for(
        self, room: Room, shape: torch.Size, stride: tuple, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the tensor into which a room is read."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def claim(self, nbytes: int) -> Any:
        """A place for a room; called by one thread at a time, as is `release`."""

    def release(self, room: Room) -> None:
        """A room is given up. This must not wait for copies: it runs where rooms are dropped."""
        self._used_bytes -= room.nbytes
        room.place = None

    def check_open(self) -> None:
        """Raise an error if nothing can be stored here any more."""


class SymbolicStore(Store):
    """The lower tier of symbolic tensors (`course_lib.memory.symbolic`). It counts all bytes, and
    copies only tensors that have values, such as indices."""

    def write(self, room: Room, data: Tensor) -> Callable[[], None]:
        mode = detect_fake_mode()
        room.place = None
        if isinstance(mode, Symbolic) and mode.knows(data):
            with _disable_current_modes():
                room.place = data.clone()
        return lambda: None

    def read(self, room: Room, data: Tensor) -> Callable[[], None]:
        return lambda: None

    def memory_for(self, room, shape, stride, dtype, device) -> Tensor:
        if room.place is None:
            return super().memory_for(room, shape, stride, dtype, device)
        return view_of(room.place, dtype, shape, stride).clone()


class HostStore(Store):
    """Host memory as the tier below, pinned for CUDA, so that copies run beside the compute, a
    stream each way.

    The CPU waits for nothing: what uses a copy is ordered after it on the device.
    """

    def write(self, room: Room, data: Tensor) -> Callable[[], None]:
        room.place = Device.of(data).pinned(data.shape, data.dtype)
        room.last = {}
        return self._copied(room, room.place, data, Device.of(data), "down")

    def read(self, room: Room, data: Tensor) -> Callable[[], Any]:
        device = Device.of(data)
        device.wait(room.last["down"][2])  # which may have been started on another stream
        return self._copied(room, data, room.place, device, "up")

    def _copied(
        self, room: Room, target: Tensor, source: Tensor, device: Device, name: str
    ) -> Callable[[], None]:
        event = device.copy(target, source, name)
        room.last[name] = device, device.current(), event
        return lambda: device.wait(event)

    def release(self, room: Room) -> None:
        super().release(room)
        # memory is not given away under a copy
        for device, stream, event in (room.last or {}).values():
            with device.on(stream):
                device.wait(event)


class DiskStore(Store):
    """A file as the tier below. It has no name where the system allows, so it vanishes however the
    process ends.

    Args:
        directory: where the file is made; if left out, the folder that TMPDIR names, or /var/tmp,
            which is on a disk also where /tmp is in memory, or else the system's folder for
            temporary files.
        limit_bytes: refuse to grow beyond this.
        threads: that copy at the same time.

    Attributes:
        file_bytes: how large the file is. Room is used again for the same size; once the half at
            the end is free, it is given back to the disk.

    Raises:
        OSError: no file can be made in the directory.
        StoreFull: from `reserve`, if there is no room left.
        ValueError: used after `close`, or in a process that was forked.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None = None,
        *,
        limit_bytes: int | None = None,
        threads: int = 2,
    ):
        super().__init__()
        whole("threads", threads, 1)
        self.limit_bytes = (
            None if limit_bytes is None else whole("limit_bytes", limit_bytes, 0, of="bytes")
        )
        self.directory = os.fspath(_folder() if directory is None else directory)
        if not self.directory:  # Python would take the current folder
            raise ValueError("directory must be a folder that can be written to, or None, got ''")
        self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - closed by close()
        # a store that is dropped, as a default one is, goes without a warning
        weakref.finalize(self, self._file.close)
        self.file_bytes = 0
        self._free: dict[int, int] = {}  # end -> start, of rooms that are free
        self._pool = ThreadPoolExecutor(threads, "disk-store")
        self._process = os.getpid()

    def claim(self, nbytes: int) -> int:
        for end, start in self._free.items():
            if end - start == nbytes:
                return self._free.pop(end)
        start, end = self.file_bytes, self.file_bytes + nbytes
        if self.limit_bytes is not None and end > self.limit_bytes:
            raise StoreFull(
                errno.ENOSPC,
                f"the file below holds {start} bytes and {nbytes} more are wanted, "
                f"but limit_bytes is {self.limit_bytes}",
            )
        try:
            # real room, so that no later write finds the disk full
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), start, nbytes)
        except OSError as error:
            raise StoreFull(
                error.errno,
                f"{self.directory!r} has no room for {nbytes} more bytes below ({error.strerror})",
            ) from error
        self.file_bytes = end
        return start

    def release(self, room: Room) -> None:
        start = room.place
        super().release(room)
        if room.last is None:
            self._give_back(start, room.nbytes)
        else:  # once nothing is copied any more
            room.last.add_done_callback(
                lambda _: self.guard.later(partial(self._give_back, start, room.nbytes))
            )

    def _give_back(self, start: int, nbytes: int) -> None:
        if not nbytes or self._file.closed:
            return
        # An optimizer's rooms keep their sizes, and would need no more than a list for each size.
        # Those of activations change with each batch of another size: with such lists alone, a file
        # that also holds a state grew to 7.7 times this one's in twelve batches of other sizes, and
        # went on. So neighbours that are free are one at the end, and nowhere else.
        self._free[start + nbytes] = start
        end = self.file_bytes
        while end in self._free:
            end = self._free[end]
        # not a little at each call: that is slow, and so is to get it again
        if 2 * end <= self.file_bytes:
            while self.file_bytes > end:
                self.file_bytes = self._free.pop(self.file_bytes)
            self._file.truncate(end)

    def write(self, room: Room, data: Tensor) -> Callable[[], None]:
        return self._started(room, self._write, data.cpu())

    def read(self, room: Room, data: Tensor) -> Callable[[], Any]:
        if data.device.type == "cpu":
            return self._started(room, self._read, data)
        above = torch.empty(data.shape, dtype=data.dtype)
        ready = self._started(room, self._read, above)
        return lambda: (ready(), data.copy_(above))

    def _started(self, room: Room, copy: Callable, data: Tensor) -> Callable[[], None]:
        self.check_open()
        # In a list, so that no thread holds the bytes any more when their copy is reported.
        room.last = self._pool.submit(copy, room.place, room.nbytes, [data], room.last)
        return room.last.result

    def _write(self, start: int, nbytes: int, data: list[Tensor], before: Future | None) -> None:
        if before is not None:
            before.exception()  # in order; what it raised was its own caller's
        view = memoryview(data.pop().numpy())
        done = 0
        while done < nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], start + done)

    def _read(self, start: int, nbytes: int, data: list[Tensor], before: Future | None) -> None:
        before.result()
        view = memoryview(data.pop().numpy())
        done = 0
        while done < nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the file below ends {nbytes - done} bytes too early")
            done += count

    def check_open(self) -> None:
        if self._file.closed:
            raise ValueError("this DiskStore is closed; make a new one")
        if self._process != os.getpid():
            raise ValueError(
                "this DiskStore belongs to the process that this one was forked from; make a"
                " new one"
            )

    def close(self) -> None:
        """Finish what is being copied and drop the file. What was below is gone."""
        self._pool.shutdown(wait=True)
        self._file.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _folder() -> str:
    on_disk = "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK)
    return "/var/tmp" if on_disk else tempfile.gettempdir()


_default_stores: dict[tuple[type, int], Store] = {}


def default_store(tensor: Tensor) -> Store:
    """One store for each kind of tensor, shared by all that name none, so that its room is used
    again."""
    make = (
        SymbolicStore
        if is_symbolic(tensor)
        else HostStore
        if Device.of(tensor).apart
        else DiskStore
    )
    key = (make, os.getpid())  # a forked process has neither the threads nor a file of its own
    if key not in _default_stores:
        _default_stores[key] = make()
    return _default_stores[key]
