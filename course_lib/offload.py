"""Bytes moved one tier down: activations, optimizer state, and the next batch on its way up.

The tier below is real on every machine. For CUDA it is pinned host memory, filled over side streams; for a CPU it is a
file, written and read by a small pool of threads while the main thread computes. Lesson 04 explains.
"""

from __future__ import annotations

import errno
import os
import queue
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DiskStore",
    "HostStore",
    "OffloadedOptimizer",
    "Prefetcher",
    "StoreFull",
    "SymbolicStore",
    "Traffic",
    "offload_activations",
]


class StoreFull(OSError):
    """The tier below has no room; the message says how much was wanted and where."""


@dataclass
class Traffic:
    """What has moved.

    Attributes:
        bytes_down: copied to the tier below.
        bytes_up: copied back.
        shared: how often a storage was saved again that is below already, or on its way.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    shared: int = 0


# ---- the tiers: reserve room, write into it, read from it, free it


@dataclass(eq=False)
class _Slot:
    """Room below: a region of a file, or a pinned buffer. `last` is the latest copy into or out of it."""

    nbytes: int
    place: Any
    last: Any = None


class _Reading:
    """Bytes on their way up: `data` (uint8, one dimension) may be used after `wait`."""

    def __init__(self, data: Tensor, wait: Callable[[], None]):
        self.data, self.wait = data, wait


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8, sharing it; out of sight of a meter, for which it would be new memory."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor):
        return tensor  # for a `SymbolicStore`, which looks at nothing
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view_of(data: Tensor, dtype: torch.dtype, shape: tuple, stride: tuple, offset: int = 0) -> Tensor:
    """A tensor on the storage of `data`."""
    if isinstance(data, FakeTensor):  # `set_` would keep a symbolic storage for ever
        flat = data.detach().as_strided((data.untyped_storage().nbytes() // data.itemsize,), (1,), 0)
        return flat.view(dtype).as_strided(shape, stride, offset)
    return torch.empty(0, dtype=dtype, device=data.device).set_(data.untyped_storage(), offset, shape, stride)


class DiskStore:
    """A file as the tier below. It has no name where the system allows, so it vanishes however the process ends.

    Args:
        directory: where the file is made; the system's folder for temporary files if left out (or /var/tmp, if that
            folder is itself in memory).
        limit_bytes: refuse to grow beyond this.
        threads: that copy at the same time.

    Attributes:
        stats: a `Traffic`.
        file_bytes: how large the file has grown; room is used again.

    Raises:
        OSError: no file can be made in the directory.
        StoreFull: from `reserve`, if there is no room left.
        ValueError: used after `close`.
    """

    def __init__(self, directory: str | os.PathLike | None = None, *, limit_bytes: int | None = None, threads: int = 2):
        for name, value, least in (("limit_bytes", limit_bytes, 0), ("threads", threads, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is {value!r}; it takes a whole number")
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it takes {least} or more")
        self.directory = os.fspath(directory) if directory is not None else _temporary_directory()
        if not self.directory:
            raise ValueError("directory is ''; it takes a folder that can be written to, or None")
        try:
            self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"directory is {self.directory!r}; it takes a folder that can be written to ({error.strerror})",
            ) from error
        weakref.finalize(self, self._file.close)  # a store that is dropped, as a default one is, goes without a warning
        self.limit_bytes, self.file_bytes, self.stats = limit_bytes, 0, Traffic()
        self._free: list[tuple[int, int]] = []  # (offset, nbytes)
        self._pool, self._lock = ThreadPoolExecutor(threads, "disk-store"), threading.RLock()
        self._process = os.getpid()

    def reserve(self, nbytes: int) -> _Slot:
        """Room for so many bytes: the tightest hole that is large enough, or new room at the end of the file."""
        with self._lock:
            self._check_open()
            holes = [hole for hole in self._free if hole[1] >= nbytes]
            if holes:
                offset, size = min(holes, key=lambda hole: hole[1])
                self._free.remove((offset, size))
                if size > nbytes:
                    self._free.append((offset + nbytes, size - nbytes))
                return _Slot(nbytes, offset)
            offset = self.file_bytes
            if self.limit_bytes is not None and offset + nbytes > self.limit_bytes:
                raise StoreFull(errno.ENOSPC, f"the file below holds {offset} bytes and {nbytes} more are wanted, "
                                              f"but limit_bytes is {self.limit_bytes}")  # fmt: skip
            try:
                if hasattr(os, "posix_fallocate"):  # real room, so that no later write finds the disk full
                    os.posix_fallocate(self._file.fileno(), offset, nbytes)
                else:
                    self._file.truncate(offset + nbytes)
            except OSError as error:
                raise StoreFull(error.errno, f"{self.directory!r} has no room for {nbytes} more bytes below "
                                             f"({error.strerror})") from error  # fmt: skip
            self.file_bytes += nbytes
            return _Slot(nbytes, offset)

    def write(self, slot: _Slot, data: Tensor) -> Callable[[], None]:
        """Start copying `data` (uint8) down; the function returned waits for the end, and raises what went wrong."""
        data = data.cpu()
        with self._lock:
            self._check_open()
            self.stats.bytes_down += data.nbytes
            slot.last = self._pool.submit(self._write, slot, [data], slot.last)
        return slot.last.result

    def read(self, slot: _Slot, device: torch.device | str = "cpu") -> _Reading:
        """Start copying a slot up, into new memory."""
        with self._lock:
            self._check_open()
            data = torch.empty(slot.nbytes, dtype=torch.uint8)  # in this thread, so that a meter sees it
            self.stats.bytes_up += slot.nbytes
            slot.last = self._pool.submit(self._read, slot, [data], slot.last)
        reading = _Reading(data, slot.last.result)
        if torch.device(device).type != "cpu":
            reading.wait()
            reading = _Reading(data.to(device), lambda: None)
        return reading

    def free(self, slot: _Slot) -> None:
        """Give the room back, once nothing is copied any more."""
        if slot.last is not None:
            with suppress(Exception):
                slot.last.result()
        with self._lock:
            offset, nbytes = slot.place, slot.nbytes
            for hole in [hole for hole in self._free if hole[0] + hole[1] == offset or offset + nbytes == hole[0]]:
                self._free.remove(hole)
                offset, nbytes = min(offset, hole[0]), nbytes + hole[1]
            self._free.append((offset, nbytes))

    @property
    def used_bytes(self) -> int:
        """What is reserved now."""
        return self.file_bytes - sum(nbytes for _, nbytes in self._free)

    def close(self) -> None:
        """Finish what is being copied and drop the file. What was below is gone."""
        self._pool.shutdown(wait=True)
        self._file.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._file.closed:
            raise ValueError("this DiskStore is closed; make a new one")
        if self._process != os.getpid():
            raise ValueError("this DiskStore belongs to the process that this one was forked from; make a new one")

    # Bytes come in a list and are taken out of it, so that no thread holds them any more when its copy is reported.

    def _write(self, slot: _Slot, data: list[Tensor], before: Future | None) -> None:
        if before is not None:
            before.exception()  # in order; what it raised was its own caller's
        view, done = memoryview(data.pop().numpy()), 0
        while done < slot.nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], slot.place + done)

    def _read(self, slot: _Slot, data: list[Tensor], before: Future | None) -> None:
        if before is not None:
            before.result()
        view, done = memoryview(data.pop().numpy()), 0
        while done < slot.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], slot.place + done)
            if not count:
                raise OSError(errno.EIO, f"the file below ends {slot.nbytes - done} bytes too early")
            done += count


def _temporary_directory() -> str:
    """Where temporary files go, but not to memory if a disk is at hand."""
    chosen = tempfile.gettempdir()
    if _in_memory(chosen) and os.access("/var/tmp", os.W_OK) and not _in_memory("/var/tmp"):
        return "/var/tmp"
    return chosen


def _in_memory(path: str) -> bool:
    try:
        with open("/proc/mounts", encoding="utf-8") as mounts:
            kinds = {line.split()[1]: line.split()[2] for line in mounts}
    except OSError:
        return False
    parts = [p for p in kinds if os.path.commonpath([p, os.path.realpath(path)]) == p]
    return bool(parts) and kinds[max(parts, key=len)] in ("tmpfs", "ramfs")


class SymbolicStore(DiskStore):
    """The tier below of symbolic tensors (`course_lib.memory.symbolic`): nothing is copied, every byte is counted."""

    def __init__(self):
        self.limit_bytes, self.file_bytes, self.stats = None, 0, Traffic()
        self._free: list[tuple[int, int]] = []

    def reserve(self, nbytes: int) -> _Slot:
        self.file_bytes += nbytes
        return _Slot(nbytes, None)

    def write(self, slot: _Slot, data: Tensor) -> Callable[[], None]:
        self.stats.bytes_down += slot.nbytes
        return lambda: None

    def read(self, slot: _Slot, device: torch.device | str = "cpu") -> _Reading:
        self.stats.bytes_up += slot.nbytes
        return _Reading(torch.empty(slot.nbytes, dtype=torch.uint8, device=device), lambda: None)

    def free(self, slot: _Slot) -> None:
        self.file_bytes -= slot.nbytes

    def close(self) -> None:
        """Nothing to do: there is no file."""

    def _check_open(self) -> None:
        pass


class HostStore:
    """Host memory as the tier below: pinned, and kept for use again, since pinning is slow.

    CUDA tensors are copied over two side streams, one for each direction, which are made once per device. The CPU
    waits for nothing: what uses a copy is ordered after it on the device.

    Attributes:
        stats: a `Traffic`.
        used_bytes: what is reserved now.
        pooled_bytes: pinned and free.
    """

    def __init__(self):
        self.stats, self.used_bytes, self._most_used = Traffic(), 0, 0
        self._buffers: dict[int, list[_Slot]] = defaultdict(list)
        self._lock = threading.RLock()

    @property
    def pooled_bytes(self) -> int:
        return sum(nbytes * len(slots) for nbytes, slots in self._buffers.items())

    def reserve(self, nbytes: int) -> _Slot:
        with self._lock:
            self.used_bytes += nbytes
            self._most_used = max(self._most_used, self.used_bytes)
            if self._buffers[nbytes]:
                return self._buffers[nbytes].pop()
        try:
            return _Slot(nbytes, torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        except RuntimeError as error:
            self.used_bytes -= nbytes
            raise StoreFull(errno.ENOMEM, f"host memory has no room for {nbytes} more bytes") from error

    def write(self, slot: _Slot, data: Tensor) -> Callable[[], None]:
        self.stats.bytes_down += data.nbytes
        if not data.is_cuda:
            if slot.last is not None:
                slot.last.synchronize()  # a CUDA tensor that had this buffer before may still be on its way
            slot.place.copy_(data)
            return lambda: None
        return self._copy(slot, slot.place, data, "down")

    def read(self, slot: _Slot, device: torch.device | str = "cpu") -> _Reading:
        self.stats.bytes_up += slot.nbytes
        data = torch.empty(slot.nbytes, dtype=torch.uint8, device=device)
        if not data.is_cuda:
            if slot.last is not None:
                slot.last.synchronize()
            data.copy_(slot.place)
            return _Reading(data, lambda: None)
        return _Reading(data, self._copy(slot, data, slot.place, "up"))

    def free(self, slot: _Slot) -> None:
        with self._lock:
            self.used_bytes -= slot.nbytes
            self._buffers[slot.nbytes].append(slot)  # `last` goes along: whoever writes next waits for it
            for nbytes, slots in self._buffers.items():  # no more is kept than was ever in use at once
                while slots and nbytes != slot.nbytes and self.pooled_bytes + self.used_bytes > self._most_used:
                    slots.pop()

    def _copy(self, slot: _Slot, target: Tensor, source: Tensor, direction: str) -> Callable[[], None]:
        device = target.device if target.is_cuda else source.device
        side = _side_stream(device, direction)
        side.wait_stream(torch.cuda.current_stream(device))  # the source is computed, and the target's memory is ours
        if slot.last is not None:
            side.wait_event(slot.last)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        slot.last = event
        return lambda: torch.cuda.current_stream(device).wait_event(event)


_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def _side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """One stream for each device and purpose: fresh ones each step would each get an allocator pool of their own."""
    key = (device.index, name)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


_default_stores: dict[tuple[type, int], Any] = {}


def _default_store(tensor: Tensor):
    """One store for each kind of tensor, shared by all that name none, so that its room is used again."""
    kind = SymbolicStore if isinstance(tensor, FakeTensor) else HostStore if tensor.is_cuda else DiskStore
    key = (kind, os.getpid())  # a forked process has neither the threads nor a file of its own
    if key not in _default_stores:
        _default_stores[key] = kind()
    return _default_stores[key]


# ---- activations


class offload_activations:
    """What autograd saves inside the block goes one tier down, and comes back when backward needs it.

    Stay where they are: parameters and buffers of modules that run inside the block, and views of them; what is in
    `keep`; storages below `min_bytes`; and the last storages saved, since backward needs them first. A storage goes
    down once, however many saved tensors are views of it, and each of them comes back as the view it was.

    Args:
        store: a `HostStore` or `DiskStore`; if left out, host memory for CUDA tensors and a file for CPU tensors.
        min_bytes: the smallest storage that is worth a copy.
        keep: tensors, or modules with their parameters and buffers, whose storages stay.
        prefetch: how many storages are fetched ahead in backward; `prefetch + 1` stay at the end of the block.

    Raises:
        TypeError, ValueError: an argument is not of its kind.
        StoreFull: from the operator whose tensor found no room below. What was saved before is intact.
        RuntimeError: in backward, if a saved tensor was changed in place before its copy was complete.
    """

    def __init__(self, store=None, *, min_bytes: int = 1 << 20, keep: Iterable[Any] = (), prefetch: int = 1):
        for name, value in (("min_bytes", min_bytes), ("prefetch", prefetch)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it takes a whole number")
            if value < 0:
                raise ValueError(f"{name} is {value}; it takes 0 or more")
        if store is not None and not isinstance(store, (DiskStore, HostStore)):
            raise TypeError(f"store is {type(store).__name__}; it takes a HostStore or a DiskStore")
        keep = [keep] if isinstance(keep, (Tensor, nn.Module)) else list(keep)
        for thing in keep:
            if not isinstance(thing, (Tensor, nn.Module)):
                raise TypeError(f"keep holds {type(thing).__name__}; it takes tensors and modules")
        self.store, self.min_bytes, self.keep, self.prefetch = store, min_bytes, keep, prefetch
        self._entered: list[tuple[_Region, Any, Any]] = []

    def __enter__(self) -> offload_activations:
        region = _Region(self)
        seen = register_module_forward_pre_hook(lambda module, args: region.stay(module))
        hooks = saved_tensors_hooks(region.pack, region.unpack)
        hooks.__enter__()
        self._entered.append((region, seen, hooks))
        return self

    def __exit__(self, kind, value, trace) -> None:
        region, seen, hooks = self._entered.pop()
        hooks.__exit__(kind, value, trace)
        seen.remove()
        try:
            region.settle(0)
        except Exception:
            if kind is None:
                raise


class _Region:
    """One forward pass inside the block: its storages in the order in which they were saved."""

    def __init__(self, options: offload_activations):
        self.options, self.lock = options, threading.RLock()
        self.entries: list[_Entry] = []
        self.known = _OfStorages()  # the latest entry of a storage
        self.staying = _OfStorages()
        self.modules: set[int] = set()
        self.recent: deque[_Entry] = deque()  # on the device, and not going down yet
        self.going: deque[_Entry] = deque()  # on the device until their copy is complete
        for thing in options.keep:
            self.stay(thing)

    def stay(self, thing: Tensor | nn.Module) -> None:
        if isinstance(thing, Tensor):
            tensors = [thing]
        elif id(thing) in self.modules:
            return
        else:
            self.modules.update(map(id, thing.modules()))
            tensors = [*thing.parameters(), *thing.buffers()]
        for tensor in tensors:
            if _has_storage(tensor):
                self.staying.put(tensor.untyped_storage(), True)

    def pack(self, tensor: Tensor) -> _Kept | _Handle:
        if not _has_storage(tensor) or tensor.untyped_storage().nbytes() < max(1, self.options.min_bytes):
            return _Kept(tensor)
        base, storage = tensor._base if tensor._is_view() else tensor, tensor.untyped_storage()
        if self.staying.get(storage) or isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
            return _Kept(tensor)
        with self.lock:
            entry = self.known.get(storage)
            if entry is None or entry.gone or entry.version != tensor._version:
                store = self.options.store or _default_store(tensor)
                entry = _Entry(self, len(self.entries), tensor, store)
                self.entries.append(entry)
                self.known.put(storage, entry)
                self.recent.append(entry)
            else:
                entry.store.stats.shared += 1
            handle = _Handle(entry, tensor)
            while len(self.recent) > self.options.prefetch + 1:
                entry = self.recent.popleft()
                if not entry.gone:
                    entry.go_down()
                    self.going.append(entry)
            self.settle(1)
            return handle

    def unpack(self, packed: _Kept | _Handle) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.tensor_again()
        with self.lock:
            index = packed.entry.index
            packed.entry.start_up()
            for entry in reversed(self.entries[max(0, index - self.options.prefetch) : index]):
                entry.start_up()
            return packed.tensor_again()

    def settle(self, most: int) -> None:
        """Let go of the device's memory behind all but the latest copies down."""
        with self.lock:
            while len(self.going) > most:
                self.going.popleft().arrive()


class _OfStorages:
    """Something for each storage, as long as the storage lives: addresses are given out again, references are not."""

    def __init__(self):
        self._found: dict[int, tuple[weakref.ref, Any]] = {}

    def put(self, storage: torch.UntypedStorage, value: Any) -> None:
        key = storage._cdata
        self._found[key] = (weakref.ref(storage, lambda _: self._found.pop(key, None)), value)

    def get(self, storage: torch.UntypedStorage) -> Any:
        reference, value = self._found.get(storage._cdata, (None, None))
        return value if reference is not None and reference() is storage else None


class _Kept:
    """A saved tensor that stays. Not the tensor itself: an operator that saves its own result would never be freed."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def tensor_again(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(_CHANGED.format(shape=tuple(self.tensor.shape), when=""))
        return self.tensor


_CHANGED = "a tensor of shape {shape} that backward needs was changed in place{when}; make that operation out of place"


class _Handle:
    """One saved tensor: a view of an entry's storage."""

    def __init__(self, entry: _Entry, tensor: Tensor):
        self.entry = entry
        self.dtype, self.shape, self.stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.offset, self.conjugated, self.negated = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        self.key = object()  # not the id, which may be given out again before a late `drop`
        entry.handles.add(self.key)
        entry.wanted.add(self.key)

    def tensor_again(self) -> Tensor:
        data = self.entry.data_again(self)
        view = _view_of(data, self.dtype, self.shape, self.stride, self.offset)
        if self.conjugated:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negated else view

    def __del__(self):
        # The collector calls this in any thread: also in a worker of the store, for which the lock's holder may wait.
        region = self.entry.region
        if region.lock._is_owned() or threading.current_thread().name.startswith("disk-store"):
            with suppress(RuntimeError):  # the interpreter is going down
                threading.Thread(target=self.entry.drop, args=(self.key,), daemon=True).start()
        else:
            self.entry.drop(self.key)


class _Entry:
    """One storage: on the device, on its way down, below, on its way up, or gone with its last handle."""

    def __init__(self, region: _Region, index: int, tensor: Tensor, store):
        self.region, self.index, self.store = region, index, store
        self.held: Tensor | None = tensor.detach()  # shares the version counter
        self.version, self.changed, self.device = tensor._version, False, tensor.device
        self.saved_on = self.fetched_on = _current_stream(self.device)
        self.slot: _Slot | None = None
        self.wait_down: Callable[[], None] | None = None
        self.coming: _Reading | None = None
        self.handles: set[object] = set()
        self.wanted: set[object] = set()  # handles that have not been unpacked since the storage came up

    @property
    def gone(self) -> bool:
        return not self.handles

    def go_down(self) -> None:
        self.slot = self.store.reserve(self.held.untyped_storage().nbytes())
        with torch.cuda.stream(self.saved_on):  # not whichever stream saves the tensor that pushed this one out
            self.wait_down = self.store.write(self.slot, _bytes_of(self.held))

    def arrive(self) -> None:
        """The copy down is complete: let go of the device's memory. If it failed, what is held stays."""
        wait, self.wait_down = self.wait_down, None
        if wait is None:
            return
        try:
            with torch.cuda.stream(self.saved_on):
                wait()
        except BaseException:
            self.store.free(self.slot)
            self.slot = None
            raise
        self.changed |= self.held is not None and self.held._version != self.version
        self.held = None

    def start_up(self) -> None:
        if self.held is None and self.coming is None and self.slot is not None:
            self.fetched_on = _current_stream(self.device)
            self.coming = self.store.read(self.slot, self.device)

    def data_again(self, handle: _Handle) -> Tensor:
        if self.changed or (self.held is not None and self.held._version != self.version):
            raise RuntimeError(_CHANGED.format(shape=handle.shape, when=" before it was copied down"))
        if self.held is not None:
            return self.held
        self.start_up()
        self.coming.wait()
        data = self.coming.data
        if data.is_cuda:  # made on the stream of whoever fetched it ahead
            data.record_stream(torch.cuda.current_stream(data.device))
        self.wanted.discard(handle.key)
        if not self.wanted:
            self.coming, self.wanted = None, set(self.handles)
        return data

    def drop(self, handle: object) -> None:
        with self.region.lock:
            self.handles.discard(handle)
            self.wanted.discard(handle)
            if self.handles:
                if not self.wanted:
                    self._let_go()
                    self.wanted = set(self.handles)
                return
            with suppress(Exception):
                self.arrive()
            self._let_go()
            self.held = None
            if self.slot is not None:
                self.store.free(self.slot)
                self.slot = None

    def _let_go(self) -> None:
        if self.coming is not None:
            with suppress(Exception), torch.cuda.stream(self.fetched_on):  # to whose pool it returns
                self.coming.wait()  # memory that is still being written to must not be given away
            self.coming = None


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory: no wrapper, no sparse or quantised layout."""
    return (
        (type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, FakeTensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
    )


# ---- optimizer state


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives one tier down, with fp32 master weights for parameters of lower precision.

    Each step equals that of `base`: to the bit for fp32 parameters on a CPU; for bf16 and fp16 ones it is the step of
    `base` on fp32 copies, rounded afterwards. Parameters may be given new values from outside at any time; they win.

    A CPU keeps the state in a file and pages it through memory in chunks, the next one read and the last one written
    while one is updated. For CUDA parameters the state lives in host memory and the update runs on the CPU; gradients
    go down during backward, and parameters come back while the next ones are updated.

    Args:
        params: as for any optimizer.
        base: the class that does the steps; it updates each parameter by itself, with state of its own.
        fraction: of the elements whose state is below, as in Megatron-LM's hybrid optimizer, but the largest parameters
            first; the rest is updated where it is.
        overlap: copy during backward and while other parameters are updated; False: one thing after the other.
        store: for CPU parameters, a `DiskStore`.
        base_kwargs: for `base`: lr and so on.

    Raises:
        TypeError, ValueError: an argument is not of its kind; `base` has no per-parameter state; a parameter is
            complex, quantised or sparse; a gradient is sparse (from `step`, before anything has changed).
        StoreFull: the state found no room; the parameters are as before.
    """

    CHUNK_BYTES = 16 << 20

    def __init__(
        self, params, base=torch.optim.AdamW, *, fraction: float = 1.0, overlap: bool = True, store=None, **base_kwargs
    ):
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"fraction is {fraction!r}; it takes a number from 0 to 1")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction}; it takes a number from 0 to 1")
        if store is not None and not isinstance(store, DiskStore):
            raise TypeError(f"store is {type(store).__name__}; it takes a DiskStore")
        defaults = _per_parameter_defaults(base, base_kwargs)
        self._fraction, self._overlap, self._store = fraction, overlap, store
        self._base_class, self._base_kwargs = base, base_kwargs
        self._items: dict[nn.Parameter, _Item] = {}
        self._base: torch.optim.Optimizer | None = None
        self._adding = False
        self._rooms: list[tuple[DiskStore, _Slot]] = []
        weakref.finalize(self, _free_all, self._rooms).atexit = False
        super().__init__(params, defaults)
        self._adopt(self.param_groups)
        self._adding = True

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if self._adding:  # not from the constructor, which chooses among all groups at once
            try:
                self._adopt(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _adopt(self, groups: list[dict]) -> None:
        parameters = [p for group in groups for p in group["params"]]
        for p in parameters:
            if p.is_complex() or p.is_quantized or p.layout is not torch.strided:
                kind = "complex" if p.is_complex() else "quantised" if p.is_quantized else "sparse"
                raise TypeError(f"a parameter of shape {tuple(p.shape)} is {kind}; it takes real, dense ones")
        chosen = chosen_below(parameters, self._fraction)
        items = [_Item(p, p in chosen) for p in parameters]
        for item in items:
            self._items[item.p] = item
            if item.below and item.p.is_cuda and item.p.requires_grad and self._overlap:
                item.p.register_post_accumulate_grad_hook(item.gradient_down)
        for group in groups:
            masters = {**group, "params": [self._items[p].master for p in group["params"]]}
            if self._base is None:
                self._base = self._base_class([masters], **self._base_kwargs)
            else:
                self._base.add_param_group(masters)
        for item in items:
            if item.below and not item.p.is_cuda and item.master is not item.p:
                item.master.data = torch.empty(0, dtype=item.master_dtype)  # below, from the first step on

    @torch.no_grad()
    def step(self, closure=None):
        """One step. The closure, if there is one, computes the loss anew; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [item for item in self._items.values() if item.p.grad is not None]
        for item in due:
            if item.p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {tuple(item.p.shape)} is sparse; "
                    "it takes dense gradients (for an embedding: sparse=False)"
                )
        marks = [(item, _mark(item.p.grad)) for item in due if item.gradient is not None and item.is_copied()]
        fresh = {item for item, mark in marks if mark.item() == item.gradient[4].item()}  # here, not while others go up
        for item in due:
            if item.gradient is not None and item not in fresh:
                item.gradient = (None, 0, *item.gradient[2:4], None)
        for item in due:
            if item.mark is not None and _mark(item.p).item() != item.mark.item():
                item.seen = None  # set from outside in a way that autograd does not see
        below = [item for item in due if item.below and not item.p.is_cuda]
        self._reserve(below)
        above = [item for item in due if not item.below]
        self._update([item for item in above if item.master is item.p])
        # In chunks, since the gradients of masters are fp32 copies, which would take as much as the masters do.
        for chunk in self._chunks([item for item in above if item.master is not item.p], _Item.master_bytes):
            self._update(chunk)
        for item in due:
            if item.below and item.p.is_cuda:  # one at a time, so that one comes back while the next is updated
                self._update([item])
        self._update_from_file(below)
        return loss

    def _update(self, items: list[_Item]) -> None:
        """Let `base` do its step for these parameters alone."""
        if not items:
            return
        of = {item.master: item for item in items}
        groups = self._base.param_groups
        mine = []
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            members = [master for master in theirs["params"] if master in of]
            if members:
                mine.append({**theirs, **{k: v for k, v in ours.items() if k != "params"}, "params": members})
        for item in items:
            item.take_gradient()
        self._base.param_groups = mine
        try:
            self._base.step()
        finally:
            self._base.param_groups = groups
            for item in items:
                item.drop_gradient()
        for item in items:
            item.give_back(self._overlap)

    def held_tensors(self) -> Iterator[Tensor]:
        """Master weights and state that are where their parameters are, and not below: what a meter should count."""
        for item in self._items.values():
            if not item.on_host:
                if item.master is not item.p:
                    yield item.master
                yield from (x for x in self._base.state.get(item.master, {}).values() if isinstance(x, Tensor))

    # ---- on a CPU: chunks of state, paged through memory

    @property
    def store(self) -> DiskStore:
        """The file with the state of CPU parameters."""
        if self._store is None:
            symbolic = any(isinstance(p, FakeTensor) for p in self._items)
            self._store = SymbolicStore() if symbolic else DiskStore()
        return self._store

    def _reserve(self, items: list[_Item]) -> None:
        """Room for everything that will go below, before anything changes."""
        if items:
            self.store._check_open()
        made = [item for item in items if item.room is None]
        tensors = _state_tensors(self._base_class, self._base_kwargs) if made else 0
        try:
            for item in made:
                item.room = []
                each = item.master_dtype.itemsize * item.p.numel()
                for _ in range(tensors + (item.master is not item.p) if each else 0):
                    item.room.append(self.store.reserve(each))
        except StoreFull:
            for item in made:
                for slot in item.room or ():
                    self.store.free(slot)
                item.room = None
            raise
        self._rooms += [(self.store, slot) for item in made for slot in item.room]

    def _chunks(self, items: list[_Item], bytes_of: Callable[[_Item], int]) -> list[list[_Item]]:
        """Items in their order, in lists of CHUNK_BYTES at most, or of one item that is larger."""
        chunks: list[list[_Item]] = []
        room = 0
        for item in items:
            if not chunks or room + bytes_of(item) > self.CHUNK_BYTES:
                chunks.append([])
                room = 0
            chunks[-1].append(item)
            room += bytes_of(item)
        return chunks

    def _update_from_file(self, items: list[_Item]) -> None:
        chunks = self._chunks(items, _Item.state_bytes)
        failed, ready, writing = [], None, None
        for chunk, following in zip(chunks, [*chunks[1:], None][: len(chunks)], strict=True):
            (ready or self._page_in(chunk))()
            ready = self._page_in(following) if following and self._overlap else None
            self._update(chunk)
            if writing is not None:
                failed += writing()
            writing = self._page_out(chunk)
            if not self._overlap:
                failed, writing = failed + writing(), None
        failed += writing() if writing is not None else []
        if failed:
            raise failed[0]  # at the end: every parameter has had its step, and no state is lost

    def _page_in(self, chunk: list[_Item]) -> Callable[[], None]:
        """Start reading; the function returned puts the state where `base` looks for it."""
        readings = [(item, name, self.store.read(slot)) for item in chunk for name, slot in item.slots.items()]

        def finish() -> None:
            for item, name, reading in readings:
                tensor = item.state_tensor(name, reading)
                if name == _MASTER:
                    item.master.data = tensor
                else:
                    self._base.state[item.master][name] = tensor

        return finish

    def _page_out(self, chunk: list[_Item]) -> Callable[[], list[OSError]]:
        """Start writing; the function returned waits for the end, lets go of the memory, and says what went wrong."""
        waits = []
        for item in chunk:
            state = self._base.state[item.master]
            tensors = {name: value for name, value in state.items() if _is_large(value)}
            if item.master is not item.p:
                tensors[_MASTER] = item.master.data
            for name, tensor in tensors.items():
                if name not in item.slots:
                    tensor = tensor.clone(memory_format=torch.contiguous_format) if _is_part(tensor) else tensor
                    item.slots[name] = item.room_for(tensor.untyped_storage().nbytes(), self.store, self._rooms)
                item.kinds[name] = (tuple(tensor.shape), tensor.dtype, tensor.stride())
                waits.append((item, name, tensor, self.store.write(item.slots[name], _bytes_of(tensor))))

        def finish() -> list[OSError]:
            failed = []
            for item, name, _, wait in waits:
                try:
                    wait()
                except OSError as error:  # what was not written stays in memory, and goes down another time
                    item.slots.pop(name).last = None
                    failed.append(error)
                    continue
                if name == _MASTER:
                    item.master.data = torch.empty(0, dtype=item.master_dtype)
                else:
                    del self._base.state[item.master][name]
            waits.clear()
            return failed

        return finish

    # ---- saving and loading, in the format of `base`

    def state_dict(self) -> dict[str, Any]:
        """As `base` would write it, on the CPU where it is below; "master" is added for parameters of low precision."""
        self.state = defaultdict(dict)
        try:
            for p, item in self._items.items():
                found = dict(self._base.state.get(item.master, {}))
                found = {k: v.clone() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in found.items()}
                master = item.master.data
                self._page_in_copy(item, found)
                master = found.pop(_MASTER, master)
                rounded = p.dtype != item.master_dtype and master.shape == p.shape
                if rounded and (found or not torch.equal(master, p.to(master))):
                    found["master"] = master.clone()
                if found:
                    self.state[p] = found
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def _page_in_copy(self, item: _Item, into: dict[str, Any]) -> None:
        for name, slot in item.slots.items():
            into[name] = item.state_tensor(name, self.store.read(slot))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `base`, or an `OffloadedOptimizer` of it, has written. The next steps are then the same."""
        self._reserve([item for item in self._items.values() if item.below and not item.p.is_cuda])
        super().load_state_dict({**state_dict, "state": {}})  # the groups; it checks that they fit
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters, failed = [p for group in self.param_groups for p in group["params"]], []
        for number, p in zip(order, parameters, strict=True):
            item = self._items[p]
            loaded = dict(state_dict["state"].get(number, {}))
            master = loaded.pop("master", None)
            item.forget()
            if item.master is not p:
                item.master.data = (p if master is None else master).to(item.device, item.master_dtype, copy=True)
                item.stamp()
            state = self._base.state[item.master] = {}
            for name, value in loaded.items():
                if isinstance(value, Tensor):
                    large = _is_large(value) and value.is_floating_point()
                    value = value.to(item.device, item.master_dtype if large else value.dtype, copy=True)
                state[name] = value
            if not state:
                del self._base.state[item.master]
            if item.below and not p.is_cuda and (state or master is not None):
                failed += self._page_out([item])()
        if failed:
            raise failed[0]

    def __getstate__(self):
        raise TypeError("an OffloadedOptimizer cannot be copied or pickled; use its state_dict()")


def chosen_below(parameters: Sequence[Tensor], fraction: float) -> set[Tensor]:
    """The parameters whose state goes below: the largest first, until the fraction is reached."""
    wanted, chosen = fraction * sum(p.numel() for p in parameters), set()
    for p in sorted(parameters, key=lambda p: -p.numel()):
        if wanted <= 0:
            break
        wanted -= p.numel()
        chosen.add(p)
    return chosen


def _free_all(rooms: list[tuple[DiskStore, _Slot]]) -> None:
    for store, slot in rooms:
        store.free(slot)


_MASTER = "the master weights"  # among the names of the state, where no optimizer uses it


class _Item:
    """One parameter: its master weights, which may be the parameter itself, and where its state is."""

    def __init__(self, p: nn.Parameter, below: bool):
        self.p, self.below = p, below
        self.master_dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
        self.device = torch.device("cpu") if below else p.device
        self.on_host = below and p.is_cuda
        if p.dtype == self.master_dtype and not self.on_host:
            self.master = p
        elif below and not self.on_host:
            self.master = nn.Parameter(torch.empty(p.shape, dtype=self.master_dtype))  # its shape, for `base` to see
        else:
            copy = p.detach().to(self.device, self.master_dtype, copy=True)
            self.master = nn.Parameter(copy.pin_memory() if self.on_host else copy)
        self.slots: dict[str, _Slot] = {}
        self.kinds: dict[str, tuple] = {}
        self.room: list[_Slot] | None = None
        self.gradient: tuple | None = None  # (gradient on the device, its version, copy on the host, event)
        self.host: Tensor | None = None  # pinned, in the parameter's dtype, on its way back
        self.copied = None  # when it has arrived
        self.stamp()

    def stamp(self) -> None:
        """Remember what the parameter is now, to notice values from outside."""
        self.seen = (_address(self.p), self.p._version)
        self.mark = _mark(self.p) if self.on_host else None

    def state_tensor(self, name: str, reading: _Reading) -> Tensor:
        """What was written under this name, once it has come up."""
        reading.wait()
        shape, dtype, stride = self.kinds[name]
        return _view_of(reading.data, dtype, shape, stride)

    def state_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.room or ())

    def master_bytes(self) -> int:
        return self.master_dtype.itemsize * self.p.numel()

    def room_for(self, nbytes: int, store: DiskStore, rooms: list) -> _Slot:
        fitting = [slot for slot in self.room if slot.nbytes == nbytes and slot not in self.slots.values()]
        if fitting:
            return fitting[0]
        self.room.append(store.reserve(nbytes))  # a state of another shape than the parameter
        rooms.append((store, self.room[-1]))
        return self.room[-1]

    def forget(self) -> None:
        self.slots.clear()  # the room stays reserved for what comes instead
        self.kinds.clear()
        self.gradient = None

    def gradient_down(self, p: nn.Parameter) -> None:
        """After backward has accumulated: start copying the gradient to the host."""
        if p.grad is None or p.grad.layout is not torch.strided:
            return  # `step` says what is wrong
        host = self.gradient[2] if self.gradient else torch.empty(p.shape, dtype=p.grad.dtype, pin_memory=True)
        mark = _mark(p.grad)
        side = _side_stream(p.device, "gradients")
        side.wait_stream(torch.cuda.current_stream(p.device))
        with torch.cuda.stream(side):
            host.copy_(p.grad.detach(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        p.grad.record_stream(side)
        self.gradient = (weakref.ref(p.grad), p.grad._version, host, event, mark)

    def is_copied(self) -> bool:
        """Whether the gradient is the tensor whose copy went down, as far as autograd knows."""
        reference, version, *_, mark = self.gradient
        return mark is not None and reference() is self.p.grad and version == self.p.grad._version

    def take_gradient(self) -> None:
        """Give the master its gradient, and the parameter's value where that was set from outside."""
        if self.master is self.p:
            return
        p, master = self.p, self.master
        if self.copied is not None:
            self.copied.synchronize()  # what is on its way back must not change under it
        if master.shape != p.shape:
            master.data = p.detach().to(master.dtype, copy=True)
        elif not p.is_cuda or self.seen != (_address(p), p._version):
            rounded, now = master.to(p.dtype), p.detach().to(master.device)
            if not isinstance(p, FakeTensor) and not torch.equal(rounded, now):
                master.copy_(torch.where(rounded == now, master, now.to(master.dtype)))
        gradient = p.grad
        if self.on_host and self.gradient is not None:
            _, _, host, event, mark = self.gradient
            if mark is not None:  # `step` found that the gradient is what was copied
                event.synchronize()
                gradient = host
        master.grad = gradient.to(self.device, master.dtype)
        if self.gradient is not None:
            self.gradient = (None, 0, *self.gradient[2:4], None)  # the buffer stays

    def drop_gradient(self) -> None:
        if self.master is not self.p:
            self.master.grad = None

    def give_back(self, overlap: bool) -> None:
        if self.master is self.p:
            return
        if self.on_host and overlap:
            side = _side_stream(self.p.device, "parameters")
            compute = torch.cuda.current_stream(self.p.device)
            side.wait_stream(compute)
            source = self.master
            if self.p.dtype != self.master.dtype:  # rounded here, so that fewer bytes go up
                if self.host is None:
                    self.host = torch.empty(self.p.shape, dtype=self.p.dtype, pin_memory=True)
                source = self.host.copy_(self.master)
            with torch.cuda.stream(side):
                self.p.copy_(source, non_blocking=True)
                self.copied = torch.cuda.Event()
                self.copied.record(side)
            compute.wait_event(self.copied)
        else:
            self.p.copy_(self.master)
        self.stamp()


def _address(p: Tensor) -> int:
    return 0 if isinstance(p, FakeTensor) else p.data_ptr()


def _mark(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bit patterns, on its device. Collectives, GradScaler and `.data` bump no version."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(kind).sum(dtype=torch.int64)


def _is_large(value: Any) -> bool:
    """Whether a piece of state goes below: a tensor with more than the single number that a step count is."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def _per_parameter_defaults(base: Any, base_kwargs: dict) -> dict:
    """The default settings of `base`; an error if it is no optimizer that updates each parameter by itself."""
    if not (isinstance(base, type) and issubclass(base, torch.optim.Optimizer)):
        raise TypeError(f"base is {base!r}; it takes a class of optimizers such as torch.optim.AdamW")
    if issubclass(base, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(f"base is {base.__name__}, which has no state of its own for each dense parameter; "
                        "it takes one that has, such as torch.optim.AdamW")  # fmt: skip
    return base([nn.Parameter(torch.zeros(2, 2))], **base_kwargs).defaults


def _state_tensors(base: type, base_kwargs: dict) -> int:
    """How many tensors as large as the parameter `base` keeps for it: found by one step on a small one."""
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.zeros(2, 2)
    optimizer = base([p], **base_kwargs)
    with torch.enable_grad():
        optimizer.step()
    return sum(isinstance(value, Tensor) and value.shape == p.shape for value in optimizer.state[p].values())


# ---- the next batch


class Prefetcher:
    """Iterate over a loader with the next batch on its way: copied from pinned memory on a side stream for CUDA,
    made by a background thread for a CPU.

    Args:
        loader: any iterable of batches: tensors, or tuples, lists and dicts of them, nested.
        device: where the batches go.
        depth: how many batches are made ahead on a CPU.

    Each `iter` starts the loader anew. What the loader raises is raised where its batch would have come. Leaving the
    loop early stops the thread.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str = "cpu", *, depth: int = 1):
        self.loader, self.device, self.depth = loader, torch.device(device), depth
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth is {depth!r}; it takes a whole number, 1 or more")
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"loader is {type(loader).__name__}; it takes an iterable of batches")

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._over_stream() if self.device.type == "cuda" else self._over_thread()

    def _over_thread(self) -> Iterator[Any]:
        made: queue.Queue = queue.Queue(self.depth)
        stop = threading.Event()

        def put(item: tuple) -> None:
            while not stop.is_set():
                with suppress(queue.Full):
                    made.put(item, timeout=0.05)
                    return

        def make() -> None:
            try:
                for batch in self.loader:
                    put(("batch", tree_map(self._moved, batch)))
                    if stop.is_set():
                        return
                put(("end", None))
            except BaseException as error:
                put(("error", error))

        thread = threading.Thread(target=make, name="prefetcher", daemon=True)
        thread.start()
        try:
            while True:
                kind, value = made.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield value
        finally:
            stop.set()
            thread.join()

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _over_stream(self) -> Iterator[Any]:
        device = self.device
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        side = _side_stream(device, "batches")
        batches = iter(self.loader)

        def fetch() -> tuple[Any, Any] | None:
            try:
                batch = next(batches)
            except StopIteration:
                return None
            with torch.cuda.stream(side):
                moved = tree_map(self._copied, batch)
                event = torch.cuda.Event()
                event.record(side)
            return moved, (event, batch)

        coming = fetch()
        while coming is not None:
            moved, (event, _) = coming
            compute = torch.cuda.current_stream(device)
            compute.wait_event(event)
            for value in tree_leaves(moved):
                if isinstance(value, Tensor):
                    value.record_stream(compute)
            failed = None
            try:
                coming = fetch()  # its copy runs while the caller computes with this one
            except Exception as error:
                failed = error
            yield moved
            if failed is not None:
                raise failed

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu" and not value.is_pinned():
            value = value.pin_memory()
        return value.to(self.device, non_blocking=True)
