"""Stores for offloaded tensors: in a file, in pinned host memory, and for symbolic tensors.

A `Store` gives out reservations of bytes. `reservation.put(tensor)` starts copying a tensor to
the lower tier, and `reservation.get()` starts copying it back. Neither of them waits for the copy.
Names of streams and statistics call these directions *down* and *up*.
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
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from course_lib._check import whole
from course_lib._torch.modes import disable_current_modes
from course_lib._torch.symbolic import FakeTensor, detect_fake_mode, is_symbolic

from .device import Device


class StoreFull(OSError):
    """The store is full. The message gives the requested bytes and the store's limit or folder."""


@dataclass
class Traffic:
    """Number of bytes that a store has copied so far.

    Attributes:
        bytes_down: Bytes copied from the device to the store.
        bytes_up: Bytes copied back to the device.
        shared: Number of tensors saved by autograd that use the same storage as an earlier saved
            tensor. The storage is copied only once.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    shared: int = 0


def view_of(
    data: Tensor, dtype: torch.dtype, shape: tuple, stride: tuple, offset: int = 0
) -> Tensor:
    """Return a view of the storage of `data` with any dtype, shape, stride and offset.

    Dispatch modes, such as memory meters, are disabled while the view is made, unless `data` is
    symbolic (without values). The view shares the version counter of `data`. `offload_activations`
    uses this counter to recognize a storage that it has saved before. `Tensor.set_` is not used,
    because it would make a new version counter, and would keep a symbolic storage alive forever.

    Args:
        data: A tensor that uses the storage.
        dtype: Data type of the view.
        shape, stride, offset: Shape, stride and storage offset of the view, in elements of `dtype`.
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
    """Return a view of a tensor's whole storage as a one-dimensional tensor of dtype uint8."""
    return view_of(tensor, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,))


class DeferringLock:
    """A lock with a queue of calls, which run as soon as the lock is free.

    It is made for calls in `__del__`, which Python may run at any time and in any thread. If such a
    call waited for the lock, it could wait forever, for example because its own thread has the
    lock. `call_when_free` therefore never waits. While a thread has the lock, the call is queued.
    This thread runs the call when it releases the lock.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._queued = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_) -> None:
        self._lock.release()
        self._run_queued()

    def call_when_free(self, call: Callable[[], Any]) -> None:
        """Run a function under the lock: now if the lock is free, otherwise when it is released."""
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
    """Space in a store for the bytes of one tensor, reserved until `free` is called.

    Garbage collection of this object also frees the space.

    Attributes:
        nbytes: Number of reserved bytes.
        place: Location of the bytes, such as an offset in the store's file. Only the store uses it.
        last_copy: Data about the last copy, with which the store makes later operations wait for
            this copy. None before the first copy.
        wait: Function that waits for the copy that `put` started. If the copy failed, it raises the
            copy's error. Set by `put`.
    """

    def __init__(self, store: Store, nbytes: int, place: Any = None):
        self.store = store
        self.nbytes = nbytes
        self.place = place
        self.last_copy = None
        self.freed = False

    def put(self, tensor: Tensor) -> Reservation:
        """Start copying a tensor into the reserved space.

        Args:
            tensor: A tensor that uses its whole storage. The storage must have `nbytes` bytes.

        Returns:
            This reservation. Its `wait()` waits for the copy.
        """
        self._tensor_properties = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.wait = self.store.write(self, self.store.bytes_of(tensor))
        self.store.stats.bytes_down += self.nbytes
        return self

    def get(
        self, spare: Mapping[int, list[torch.UntypedStorage]] | None = None
    ) -> Callable[[], Tensor]:
        """Start copying the tensor of the last `put` back to its device.

        Args:
            spare: Map from a number of bytes to unused storages of that size. If it has a storage
                of `nbytes` bytes, the storage is removed from its list and receives the copy.
                Otherwise, new memory is allocated.

        Returns:
            A function that waits for the copy and returns the tensor.
        """
        storages = (spare or {}).get(self.nbytes)
        if storages:
            shape, stride, dtype, device = self._tensor_properties
            with disable_current_modes():  # a meter has counted this memory already
                empty = torch.empty(0, dtype=dtype, device=device)
                tensor = empty.set_(storages.pop(), 0, shape, stride)
        else:  # allocate in this thread, so that a meter counts the memory
            tensor = self.store.memory_for(self, *self._tensor_properties)
        ready = self.store.read(self, self.store.bytes_of(tensor))
        self.store.stats.bytes_up += self.nbytes

        def finish() -> Tensor:
            ready()
            return tensor

        return finish

    def free(self, *until: Any) -> None:
        """Give the reserved space back to the store, without waiting for copies.

        Args:
            until: Objects that are kept alive until the store has released the space, such as
                tensors that are still being copied.
        """
        if not self.freed:
            self.freed = True
            self.store.lock.call_when_free(lambda: (self.store.release(self), until))

    __del__ = free


class Store:
    """Base class of stores, which keep offloaded tensors in a lower tier, such as host memory.

    `reserve` returns a `Reservation`, whose methods copy a tensor to the store and back. A subclass
    implements `write` and `read`. If its space is limited, it also overrides `claim` and `release`.

    Attributes:
        stats: Bytes copied so far, as a `Traffic`.
        lock: Lock under which reservations are made and released.
    """

    def __init__(self):
        self.stats = Traffic()
        self.lock = DeferringLock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Number of bytes that are reserved at present."""
        # Acquiring and releasing the lock runs the calls that other threads have queued.
        with self.lock:
            pass
        return self._used_bytes

    def reserve(self, nbytes: int) -> Reservation:
        """Reserve space in the store for one tensor.

        Args:
            nbytes: Number of bytes.

        Returns:
            The reservation, whose `put` and `get` copy the tensor.

        Raises:
            StoreFull: There is not enough space.
            ValueError: The store can no longer be used (see `check_open`).
        """
        self.check_open()
        with self.lock:
            reservation = Reservation(self, nbytes, self.claim(nbytes))
            self._used_bytes += nbytes
        return reservation

    def put(self, tensor: Tensor) -> Reservation:
        """Reserve space for a tensor, and start copying it to the store.

        Args:
            tensor: A tensor that uses its whole storage.

        Returns:
            The reservation. Its `wait()` waits for the copy.
        """
        return self.reserve(tensor.untyped_storage().nbytes()).put(tensor)

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        """Start copying a tensor's bytes to the store.

        Args:
            reservation: Reserved space for the bytes.
            data: The bytes, a one-dimensional tensor of dtype uint8.

        Returns:
            A function that waits for the copy.
        """
        raise NotImplementedError

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        """Start copying back the bytes that the last `write` stored.

        Args:
            reservation: Reserved space that contains the bytes.
            data: One-dimensional tensor of dtype uint8 that receives the bytes.

        Returns:
            A function that waits for the copy.
        """
        raise NotImplementedError

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Return a uint8 view of a tensor's whole storage, to pass to `write` or `read`."""
        return bytes_of(tensor)

    def memory_for(
        self,
        reservation: Reservation,
        shape: torch.Size,
        stride: tuple,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Allocate a tensor into which `read` will copy the bytes of a reservation.

        Args:
            reservation: The reservation.
            shape, stride, dtype, device: Properties of the tensor that was copied to the store.
        """
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def claim(self, nbytes: int) -> Any:
        """Find space for a new reservation and return its location, such as an offset in a file.

        The location becomes the attribute `place` of the `Reservation`. The base class, whose space
        is not limited, returns None. The store calls `claim` and `release` under its lock, so
        only one thread runs them at a time.

        Args:
            nbytes: Number of bytes to reserve.
        """

    def release(self, reservation: Reservation) -> None:
        """Release the space of a reservation.

        This method must not wait for copies, because garbage collection may call it.
        """
        self._used_bytes -= reservation.nbytes
        reservation.place = None

    def check_open(self) -> None:
        """Raise a ValueError if the store can no longer be used."""


class SymbolicStore(Store):
    """Store for steps on symbolic tensors (see `course_lib.symbolic`), which have no values.

    It counts the bytes of all offloaded tensors, as if they were copied. A symbolic tensor is not
    copied, and `get` returns a new symbolic tensor of the same shape. Inside `symbolic`, the values
    of a few tensors are known, such as small tensors of indices. The store copies known values.
    """

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        # The modes of `course_lib.symbolic` store the values of some tensors. PyTorch's own modes
        # store none and have no method `has_known_values`.
        has_known_values = getattr(detect_fake_mode(), "has_known_values", None)
        reservation.place = None
        if has_known_values is not None and has_known_values(data):
            with disable_current_modes():
                reservation.place = data.clone()
        return lambda: None

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        return lambda: None

    def bytes_of(self, tensor: Tensor) -> Tensor:
        # A tensor without values is not copied, so no view of its bytes is needed. Making the view
        # would run four operators.
        return tensor if isinstance(tensor, FakeTensor) else bytes_of(tensor)

    def memory_for(self, reservation, shape, stride, dtype, device) -> Tensor:
        if reservation.place is None:
            return super().memory_for(reservation, shape, stride, dtype, device)
        return view_of(reservation.place, dtype, shape, stride).clone()


class HostStore(Store):
    """Store that keeps offloaded tensors in host memory, which is pinned if they come from a GPU.

    One stream copies to the host and another one back, so copies overlap computation. The CPU never
    waits for a copy. Instead, the stream on which an operator uses the copied tensor waits.
    """

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        reservation.place = Device.of_tensor(data).pinned(data.shape, data.dtype)
        reservation.last_copy = {}
        return self._start_copy(
            reservation, reservation.place, data, Device.of_tensor(data), "down"
        )

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        device = Device.of_tensor(data)
        # Wait explicitly for the copy to the host, because it may have started from another stream.
        device.wait(reservation.last_copy["down"][2])
        return self._start_copy(reservation, data, reservation.place, device, "up")

    def _start_copy(
        self, reservation: Reservation, target: Tensor, source: Tensor, device: Device, name: str
    ) -> Callable[[], None]:
        """Start a copy on the side stream `name`; return a function that waits for it."""
        event = device.copy(target, source, name)
        reservation.last_copy[name] = device, device.current(), event
        return lambda: device.wait(event)

    def release(self, reservation: Reservation) -> None:
        super().release(reservation)
        # Each stream from which a copy was started waits for the end of this copy. Otherwise,
        # memory could be reused while the copy still reads or writes it.
        for device, stream, event in (reservation.last_copy or {}).values():
            with device.on(stream):
                device.wait(event)


class DiskStore(Store):
    """Store that keeps offloaded tensors in a file, which a few threads write and read.

    The file is deleted when the store is closed or garbage-collected. If the operating system
    supports files without a name, the file is deleted even if the process is killed.

    Args:
        directory: Folder in which the file is created. By default this is the folder in the
            environment variable TMPDIR. If the variable is not set, it is /var/tmp, which is on a
            disk even if /tmp is in memory. If /var/tmp cannot be written to, it is the system's
            temporary folder.
        limit_bytes: Largest size of the file in bytes; None for no limit.
        threads: Number of threads that copy at the same time.

    Attributes:
        file_bytes: Size of the file in bytes. The file grows when a reservation needs more space,
            and does not shrink. Freed space between two reservations is reused only for a
            reservation of the same size.

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
        self.directory = os.fspath(_default_folder() if directory is None else directory)
        if not self.directory:  # Python would take "" for the current folder
            raise ValueError("directory must be a folder that can be written to, or None, got ''")
        self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - closed by close()
        # If the store is dropped without `close`, as default stores are, the file is closed without
        # a warning.
        weakref.finalize(self, self._file.close)
        self.file_bytes = 0
        self._end = 0  # offset at which the last reservation in the file ends
        # Maps the end of each free range before `_end` to the start of the range.
        self._free: dict[int, int] = {}
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
        """Extend the file to `end` bytes and reserve disk space, so that later writes do not fail.

        On a system without `posix_fallocate`, no disk space is reserved.
        """
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
        if reservation.last_copy is None:
            self._free_range(start, reservation.nbytes)
        else:  # free the range when the last copy has finished
            reservation.last_copy.add_done_callback(
                lambda _: self.lock.call_when_free(
                    partial(self._free_range, start, reservation.nbytes)
                )
            )

    def _free_range(self, start: int, nbytes: int) -> None:
        """Mark a range of the file as free."""
        if nbytes:
            self._free[start + nbytes] = start
        # Free ranges are merged only at the end of the file, behind the last reservation. Without
        # any merging, a file with optimizer state and the activations of twelve batches of
        # different sizes grew to 7.7 times the size that it has with this merging. It kept growing,
        # because the sizes of activations change with each new batch size.
        while self._end in self._free:
            self._end = self._free.pop(self._end)
        # The file is not truncated, because allocating the same space again in every step took a
        # fifth of the time of a step that offloads 126 MB of activations, measured on two cores.

    def write(self, reservation: Reservation, data: Tensor) -> Callable[[], None]:
        return self._submit(reservation, self._write, data.cpu())

    def read(self, reservation: Reservation, data: Tensor) -> Callable[[], Any]:
        if data.device.type == "cpu":
            return self._submit(reservation, self._read, data)
        host_copy = torch.empty(data.shape, dtype=data.dtype)
        ready = self._submit(reservation, self._read, host_copy)
        return lambda: (ready(), data.copy_(host_copy))

    def _submit(self, reservation: Reservation, copy: Callable, data: Tensor) -> Callable[[], None]:
        """Let a thread run `_write` or `_read`; return a function that waits for it."""
        self.check_open()
        # The tensor is passed inside a list. `_write` and `_read` remove it from this list, so that
        # the thread does not keep the tensor alive after the copy.
        reservation.last_copy = self._pool.submit(
            copy, reservation.place, reservation.nbytes, [data], reservation.last_copy
        )
        copied = reservation.last_copy

        def finish() -> None:
            self._check_process()  # a forked process has no thread that would finish the copy
            copied.result()

        return finish

    def _write(self, start: int, nbytes: int, data: list[Tensor], previous: Future | None) -> None:
        if previous is not None:
            # Wait for the previous copy, and ignore its error. The function that `_submit` returned
            # for the previous copy raises this error.
            previous.exception()
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
                raise OSError(
                    errno.EIO,
                    f"the file of a DiskStore must keep all bytes written to it, but it ends"
                    f" {nbytes - done} bytes before the end of a tensor; another program may have"
                    " shortened it",
                )
            done += count

    def check_open(self) -> None:
        if self._file.closed:
            raise ValueError(
                "this DiskStore is closed; close a store only after its last use, or make a new"
                " store, and a new optimizer if one used this store"
            )
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ValueError(
                "a DiskStore must be used in the process that made it, got a forked process; make a"
                " new DiskStore in this process"
            )

    def close(self) -> None:
        """Wait for running copies, and delete the file."""
        self._pool.shutdown(wait=True)
        self._file.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _default_folder() -> str:
    """Return the folder of a `DiskStore` that is created without `directory`."""
    on_disk = "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK)
    return "/var/tmp" if on_disk else tempfile.gettempdir()


@cache
def _default_store(kind: type[Store]) -> Store:
    return kind()


def default_store(tensor: Tensor) -> Store:
    """Return the store that is used for a tensor if the user has passed none.

    There is one `HostStore` for GPU tensors, one `DiskStore` for CPU tensors and one
    `SymbolicStore` for symbolic tensors.
    """
    if is_symbolic(tensor):
        return _default_store(SymbolicStore)
    return _default_store(HostStore if Device.of_tensor(tensor).has_own_memory else DiskStore)
