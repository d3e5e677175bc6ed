"""Lower tiers: a file for CPU tensors, pinned host memory for CUDA tensors, and a symbolic one.

A `Store` gives out reservations of bytes. `reservation.put(tensor)` starts copying a tensor to
the lower tier (*down* in names), and `reservation.get()` starts copying it back (*up*). Neither of
them waits for the copy.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib._check import whole
from course_lib._torch.modes import disable_current_modes
from course_lib._torch.symbolic import FakeTensor, detect_fake_mode, is_symbolic

from .device import Device


class StoreFull(OSError):
    """The lower tier is full; the message gives the bytes that were requested and the place."""


@dataclass
class Traffic:
    """Bytes that have been copied.

    Attributes:
        bytes_down: Bytes copied to the lower tier.
        bytes_up: Bytes copied back.
        shared: How often a saved tensor needed no copy because its storage was already offloaded or
            about to be.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    shared: int = 0


def view_of(
    data: Tensor, dtype: torch.dtype, shape: tuple, stride: tuple, offset: int = 0
) -> Tensor:
    """Return a tensor on the storage of `data`, with its version counter, invisible to a meter.

    `Tensor.set_` is not used. It would keep a symbolic storage alive forever. It also starts a new
    version counter, so a tensor that is saved again, as in a backward pass that builds a graph,
    would not be recognized.
    """
    with nullcontext() if is_symbolic(data) else disable_current_modes():
        data = data.detach().conj() if data.is_conj() else data.detach()
        data = torch._neg_view(data) if data.is_neg() else data
        if data.dtype != dtype:
            nbytes = data.untyped_storage().nbytes()
            item = max(data.itemsize, dtype.itemsize)
            flat = data.as_strided((nbytes // item * item // data.itemsize,), (1,), 0)
            data = flat.view(dtype)
        return data.as_strided(shape, stride, offset)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as uint8, without a copy."""
    return view_of(tensor, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,))


class Guard:
    """A lock, with a queue of calls that run as soon as the lock is free.

    Handles of saved tensors, and reservations, can be dropped at any moment, because the garbage
    collector runs in any thread. That thread may hold the lock already, or the lock's holder may be
    waiting for that thread. Dropping must therefore never wait for the lock: if the lock is taken,
    `later` leaves the call to the thread that holds it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._queued = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_) -> None:
        self._lock.release()
        self._run_queued()

    def later(self, call: Callable[[], Any]) -> None:
        self._queued.append(call)
        self._run_queued()

    def _run_queued(self) -> None:
        while self._queued and self._lock.acquire(blocking=False):
            try:
                while self._queued:
                    self._queued.popleft()()
            finally:
                self._lock.release()


class Reservation:
    """Reserved bytes in a store, until `free` is called or this object is garbage-collected.

    Attributes:
        nbytes: Number of bytes.
        place: Where the store keeps them; only the store uses it.
        last: The store's record of the last copy, to order the next one after it.
        wait: After `put`, a function that waits for the copy.
    """

    def __init__(self, store: Store, nbytes: int, place: Any = None):
        self.store = store
        self.nbytes = nbytes
        self.place = place
        self.last = None
        self.freed = False

    def put(self, tensor: Tensor) -> Reservation:
        """Start copying a tensor that fills its storage to the tier, and return this reservation.

        After that, `wait()` waits for the copy and raises its error, if there is one.
        """
        self._like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.wait = self.store.write(self, self.store.bytes_of(tensor))
        self.store.stats.bytes_down += self.nbytes
        return self

    def get(
        self, spare: Mapping[int, list[torch.UntypedStorage]] | None = None
    ) -> Callable[[], Tensor]:
        """Start copying the tensor back.

        Args:
            spare: Bytes -> storages of that size that no tensor uses. If there is one of `nbytes`
                bytes, it is removed from its list and copied into. Otherwise new memory is
                allocated.

        Returns:
            A function that waits and returns the tensor.
        """
        storages = (spare or {}).get(self.nbytes)
        if storages:
            shape, stride, dtype, device = self._like
            with disable_current_modes():  # a meter has counted this memory already
                empty = torch.empty(0, dtype=dtype, device=device)
                tensor = empty.set_(storages.pop(), 0, shape, stride)
        else:  # allocated in this thread, so that a meter sees it
            tensor = self.store.memory_for(self, *self._like)
        ready = self.store.read(self, self.store.bytes_of(tensor))
        self.store.stats.bytes_up += self.nbytes

        def finish() -> Tensor:
            ready()
            return tensor

        return finish

    def free(self, *until: Any) -> None:
        """Release the bytes without waiting.

        Args:
            until: Tensors that are still being copied and stay alive until the release.
        """
        if not self.freed:
            self.freed = True
            self.store.guard.later(lambda: (self.store.release(self), until))

    __del__ = free


class Store:
    """A lower tier, which gives out reservations of bytes.

    A subclass defines `write` and `read`, and also `claim` and `release` if it manages space.

    Attributes:
        stats: Bytes copied so far, as a `Traffic`.
    """

    def __init__(self):
        self.stats = Traffic()
        self.guard = Guard()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        # Taking and leaving the lock runs the releases that other threads have queued.
        with self.guard:
            pass
        return self._used_bytes

    def reserve(self, nbytes: int) -> Reservation:
        """Reserve bytes.

        Raises:
            StoreFull: There is not enough space.
            ValueError: The store can no longer be used (see `check_open`).
        """
        self.check_open()
        with self.guard:
            reservation = Reservation(self, nbytes, self.claim(nbytes))
            self._used_bytes += nbytes
        return reservation

    def put(self, tensor: Tensor) -> Reservation:
        """Reserve bytes for a tensor that fills its storage, and start copying it to the tier."""
        return self.reserve(tensor.untyped_storage().nbytes()).put(tensor)

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        """Start copying `data`, a one-dimensional tensor of bytes, to the lower tier.

        Returns:
            A function that waits for the copy.
        """
        raise NotImplementedError

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        """Start copying the bytes that the last `write` stored back into `data`.

        Returns:
            A function that waits for the copy.
        """
        raise NotImplementedError

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a tensor's storage, which `write` and `read` are called with."""
        return bytes_of(tensor)

    def memory_for(
        self,
        reservation: Reservation,
        shape: torch.Size,
        stride: tuple,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Allocate the tensor into which a reservation is read."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def claim(self, nbytes: int) -> Any:
        """Find space for a new reservation and return its place.

        `claim` and `release` are called under a lock, so they run in one thread at a time.
        """

    def release(self, reservation: Reservation) -> None:
        """Release a reservation.

        This must not wait for copies, because garbage collection may call it.
        """
        self._used_bytes -= reservation.nbytes
        reservation.place = None

    def check_open(self) -> None:
        """Raise a ValueError if the store can no longer be used."""


class SymbolicStore(Store):
    """The lower tier of symbolic tensors (`course_lib.symbolic`).

    It counts the bytes of all tensors, but copies only those that have values, such as indices.
    """

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        # Only the modes of `course_lib.symbolic` know the values of some tensors.
        knows = getattr(detect_fake_mode(), "knows", None)
        reservation.place = None
        if knows is not None and knows(data):
            with disable_current_modes():
                reservation.place = data.clone()
        return lambda: None

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        return lambda: None

    def bytes_of(self, tensor: Tensor) -> Tensor:
        # A tensor without values is not copied, and viewing its bytes would take four operators.
        return tensor if isinstance(tensor, FakeTensor) else bytes_of(tensor)

    def memory_for(self, reservation, shape, stride, dtype, device) -> Tensor:
        if reservation.place is None:
            return super().memory_for(reservation, shape, stride, dtype, device)
        return view_of(reservation.place, dtype, shape, stride).clone()


class HostStore(Store):
    """Host memory as the lower tier, pinned for CUDA, with one side stream for each direction.

    Copies overlap computation. The CPU never waits for a copy. Instead, the stream of an operator
    that uses a copy waits for it.
    """

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        reservation.place = Device.of_tensor(data).pinned(data.shape, data.dtype)
        reservation.last = {}
        return self._start_copy(
            reservation, reservation.place, data, Device.of_tensor(data), "down"
        )

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        device = Device.of_tensor(data)
        # Wait explicitly, because the copy to the host may have started from another stream.
        device.wait(reservation.last["down"][2])
        return self._start_copy(reservation, data, reservation.place, device, "up")

    def _start_copy(
        self, reservation: Reservation, target: Tensor, source: Tensor, device: Device, name: str
    ) -> Callable[[], None]:
        event = device.copy(target, source, name)
        reservation.last[name] = device, device.current(), event
        return lambda: device.wait(event)

    def release(self, reservation: Reservation) -> None:
        super().release(reservation)
        # The streams wait, so that memory is not reused while a copy still reads or writes it.
        for device, stream, event in (reservation.last or {}).values():
            with device.on(stream):
                device.wait(event)


class DiskStore(Store):
    """A file as the lower tier.

    If the operating system supports it, the file has no name, so it is deleted however the process
    ends.

    Args:
        directory: Folder of the file. The default is the folder that the environment variable
            TMPDIR names. Without that variable it is /var/tmp, which is on a disk even if /tmp is
            in memory, or else the system's temporary folder.
        limit_bytes: Largest size of the file; None for no limit.
        threads: Number of threads that copy at the same time.

    Attributes:
        file_bytes: Bytes of the file. It grows to the most bytes that reservations need at one
            time, and keeps its size for the next step until the store is closed. Freed space
            between reservations is reused for reservations of the same size.

    Raises:
        TypeError: An argument has the wrong type.
        OSError: The file cannot be created in the directory.
        StoreFull: Raised by `reserve` if there is not enough space.
        ValueError: An argument has a value that is not allowed, or the store is used after `close`
            or in a forked process.
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
        if not self.directory:  # Python would take "" for the current folder
            raise ValueError("directory must be a folder that can be written to, or None, got ''")
        self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - closed by close()
        # If the store is dropped without `close`, as default stores are, the file is closed without
        # a warning.
        weakref.finalize(self, self._file.close)
        self.file_bytes = 0
        self._end = 0  # where the last reservation in the file ends
        self._free: dict[int, int] = {}  # end -> start of each free range before `_end`
        self._pool = ThreadPoolExecutor(threads, "disk-store")
        self._process = os.getpid()

    def claim(self, nbytes: int) -> int:
        for end, start in self._free.items():
            if end - start == nbytes:
                return self._free.pop(end)
        start, end = self._end, self._end + nbytes
        if self.limit_bytes is not None and end > self.limit_bytes:
            raise StoreFull(
                errno.ENOSPC,
                f"the store uses {start} bytes of its file and needs {nbytes} more bytes, but"
                f" limit_bytes is {self.limit_bytes}",
            )
        if end > self.file_bytes:
            self._allocate(end)
        self._end = end
        return start

    def _allocate(self, end: int) -> None:
        """Allocate disk space now, so that no later write fails because the disk is full."""
        missing = end - self.file_bytes
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self.file_bytes, missing)
        except OSError as error:
            raise StoreFull(
                error.errno,
                f"{self.directory!r} has no space for {missing} more bytes ({error.strerror})",
            ) from error
        self.file_bytes = end

    def release(self, reservation: Reservation) -> None:
        start = reservation.place
        super().release(reservation)
        if reservation.last is None:
            self._free_range(start, reservation.nbytes)
        else:  # free the range when the last copy has finished
            reservation.last.add_done_callback(
                lambda _: self.guard.later(partial(self._free_range, start, reservation.nbytes))
            )

    def _free_range(self, start: int, nbytes: int) -> None:
        if nbytes:
            self._free[start + nbytes] = start
        # Free ranges are merged only behind the last reservation. An optimizer's reservations keep
        # their sizes, so a list of free ranges for each size would be enough. Those of activations
        # change with each new batch size. In a measurement, a file held optimizer state and the
        # activations of twelve batches of different sizes. With one list for each size and no
        # merging, it grew to 7.7 times the size that it has with merging, and it kept growing.
        while self._end in self._free:
            self._end = self._free.pop(self._end)
        # The file is not truncated. Allocating the same space at every step took a fifth of the
        # time of a step that offloads 126 MB of activations, measured on two cores.

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        return self._submit(reservation, self._write, data.cpu())

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        if data.device.type == "cpu":
            return self._submit(reservation, self._read, data)
        host_copy = torch.empty(data.shape, dtype=data.dtype)
        ready = self._submit(reservation, self._read, host_copy)
        return lambda: (ready(), data.copy_(host_copy))

    def _submit(self, reservation: Reservation, copy: Callable, data: Tensor) -> Callable[[], None]:
        self.check_open()
        # The data are passed in a list, which the copy empties, so that the pool's thread does not
        # keep them alive afterwards.
        reservation.last = self._pool.submit(
            copy, reservation.place, reservation.nbytes, [data], reservation.last
        )
        copied = reservation.last

        def finish() -> None:
            self._check_process()  # a forked process has no thread that would finish the copy
            copied.result()

        return finish

    def _write(self, start: int, nbytes: int, data: list[Tensor], previous: Future | None) -> None:
        if previous is not None:
            previous.exception()  # keep the order; a function that waits for it raises its error
        view = memoryview(data.pop().numpy())
        done = 0
        while done < nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], start + done)

    def _read(self, start: int, nbytes: int, data: list[Tensor], previous: Future | None) -> None:
        previous.result()
        view = memoryview(data.pop().numpy())
        done = 0
        while done < nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the store's file ends {nbytes - done} bytes too early")
            done += count

    def check_open(self) -> None:
        if self._file.closed:
            raise ValueError("this DiskStore is closed; make a new one")
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ValueError(
                "a DiskStore must be used in the process that made it, but this process was forked"
                " from that one; make a new one"
            )

    def close(self) -> None:
        """Finish running copies and delete the file with everything in it."""
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
    """Return the default store for tensors like this one: one store per type and process."""
    make = (
        SymbolicStore
        if is_symbolic(tensor)
        else HostStore
        if Device.of_tensor(tensor).has_own_memory
        else DiskStore
    )
    # A forked process has none of the threads and must not share the file.
    key = (make, os.getpid())
    if key not in _default_stores:
        _default_stores[key] = make()
    return _default_stores[key]
