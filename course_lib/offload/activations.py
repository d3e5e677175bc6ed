"""What autograd saves for backward, moved one tier down and fetched again when backward comes
near."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook

from course_lib._check import kind, whole
from course_lib._torch import is_symbolic

from .device import Device
from .stores import Guard, Room, Store, bytes_of, default_store, view_of


class offload_activations:
    """What autograd saves inside the block goes one tier down, and comes back when backward needs
    it.

    Stay where they are: parameters and buffers of modules that run inside the block, and views of
    them; what is in `keep`; storages below `min_bytes`; the last storages saved, since backward
    needs them first; and storages of which the saved tensors are only a part. The rest of those is
    somebody else's: of a data set, say, of which the batch is a slice. Its owner holds it anyway,
    so that moving it frees nothing. So do sparse, quantised and nested tensors. A storage goes down
    once, however many saved tensors are views of it, and each of them comes back as the view it
    was.

    Args:
        store: a `HostStore`, a `DiskStore` or a `Store` of your own; if left out, host memory for
            CUDA tensors and a file for CPU tensors.
        min_bytes: the smallest storage that is worth a copy.
        keep: tensors, or modules with their parameters and buffers, whose storages stay.
        prefetch: how many storages are fetched ahead in backward; `prefetch + 1` stay at the end of
            the block. If left out, 2 on CUDA and 1 on a CPU.
        in_flight: how many copies down may be under way; more hide longer copies and hold more
            memory. If left out, 2 on CUDA and 1 on a CPU.

    Warns:
        UserWarning: at the end of the block, once, if tensors were saved but all of them are below
            `min_bytes`.

    Raises:
        TypeError, ValueError: an argument is not of its kind.
        StoreFull: from the operator whose tensor found no room below. What was saved before is
            intact.
        RuntimeError: in backward, if a saved tensor was changed in place before its copy was
            complete.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        min_bytes: int = 1 << 20,
        keep: Iterable[Any] = (),
        prefetch: int | None = None,
        in_flight: int | None = None,
    ):
        self.store = kind(
            "store", store, (Store, type(None)), "a HostStore, a DiskStore or another Store"
        )
        self.min_bytes = whole("min_bytes", min_bytes, 0, of="bytes")
        self.prefetch = None if prefetch is None else whole("prefetch", prefetch, 0)
        self.in_flight = None if in_flight is None else whole("in_flight", in_flight, 0)
        self.keep = [keep] if isinstance(keep, (Tensor, nn.Module)) else list(keep)
        for thing in self.keep:
            kind("keep", thing, (Tensor, nn.Module), "tensors and modules")
        self._entered: list[tuple[_Region, Any, Any]] = []
        self._warned = False

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
            with region.guard:
                region.settle(0)
        except Exception:
            if kind is None:
                raise
        if kind is None and region.too_small and not region.large_enough and not self._warned:
            self._warned = True
            warnings.warn(
                "no activation was moved: the largest storage that was saved has"
                f" {region.too_small} bytes, and min_bytes is {self.min_bytes}",
                stacklevel=2,
            )


class _Region:
    """One forward pass inside the block: its storages in the order in which they were saved."""

    def __init__(self, options: offload_activations):
        self.options, self.guard = options, Guard()
        self.known = WeakKeyDictionary()  # the latest entry of a storage
        self.staying = WeakKeyDictionary()
        self.modules: set[int] = set()
        self.too_small, self.large_enough = 0, False
        self.entries: list[_Entry] = []  # in backward's order, from the end
        self.recent: deque[_Entry] = deque()  # on the device, and not going down yet
        self.going: deque[_Entry] = deque()  # on the device until their copy is complete
        # backward's node that unpacks now, and what it has unpacked
        self.node, self.read = None, []
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
        for tensor in filter(_has_storage, tensors):
            self.staying[tensor.untyped_storage()] = True

    def pack(self, tensor: Tensor) -> _Kept | _Handle:
        if not _has_storage(tensor) or self._stays(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.options.min_bytes):
            self.too_small = max(self.too_small, storage.nbytes())
            return _Kept(tensor)
        self.large_enough = True
        with self.guard:
            entry = self.known.get(storage)
            if entry is None or not entry.handles or entry.version != tensor._version:
                entry = self.known[storage] = _Entry(self, tensor)
            else:
                entry.store.stats.shared += 1
            handle = _Handle(entry, tensor)
            if entry.index is None and entry.is_covered():
                entry.index = len(self.entries)
                self.entries.append(entry)
                self.recent.append(entry)
            while len(self.recent) > self._ahead(self.options.prefetch, entry) + 1:
                if (oldest := self.recent.popleft()).handles:
                    oldest.go_down()
                    self.going.append(oldest)
            self.settle(self._ahead(self.options.in_flight, entry))
            return handle

    def _stays(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        leaf = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        return leaf or tensor.untyped_storage() in self.staying

    def _ahead(self, wanted: int | None, entry: _Entry) -> int:
        return entry.device.ahead if wanted is None else wanted

    def unpack(self, packed: _Kept | _Handle) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.again()
        with self.guard:
            node = _running_node()
            # a node may unpack twice what it saved: what it got stays until it is done
            if node != self.node:
                for entry in self.read:
                    entry.let_go()
                self.node, self.read = node, []
            entry = packed.entry
            self.read.append(entry)
            if entry.index is not None:
                prefetch = self._ahead(self.options.prefetch, entry)
                for near in reversed(
                    self.entries[max(0, entry.index - prefetch) : entry.index + 1]
                ):
                    near.start_up()
            return packed.again()

    def settle(self, most: int) -> None:
        """Let go of the device's memory behind all but the latest copies down."""
        while len(self.going) > most:
            self.going.popleft().arrive()


class _Kept:
    """A saved tensor that stays. Not the tensor itself: an operator that saves its own result would
    never be freed."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def again(self) -> Tensor:
        if self.tensor._version != self.version:
            shape = "(nested)" if self.tensor.is_nested else tuple(self.tensor.shape)
            raise RuntimeError(_CHANGED.format(shape=shape, when=""))
        return self.tensor


_CHANGED = (
    "a tensor of shape {shape} that backward needs was changed in place{when}; make that operation"
    " out of place"
)


class _Handle:
    """One saved tensor: a view of an entry's storage. The graph holds it until its node is done."""

    # until all of it is known: what fails before that has nothing to drop
    entry: _Entry | None = None

    def __init__(self, entry: _Entry, tensor: Tensor):
        self.key = object()  # not the id, which may be given out again before a late `drop`
        self.view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # views may skip elements, or repeat them
        size = min(tensor.numel(), extent) * tensor.itemsize
        entry.handles[self.key] = tensor.storage_offset() * tensor.itemsize, size
        entry.wanted.add(self.key)
        self.entry = entry

    def again(self) -> Tensor:
        view = view_of(self.entry.data_for(self), *self.view)
        if self.conjugated:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negated else view

    def __del__(self):
        if self.entry is not None:
            self.entry.region.guard.later(partial(self.entry.drop, self.key))


class _Entry:
    """One storage: on the device, on its way down, below, on its way up, or gone with its last
    handle."""

    def __init__(self, region: _Region, tensor: Tensor):
        self.region, self.store = region, region.options.store or default_store(tensor)
        self.held: Tensor | None = tensor.detach()  # shares the version counter
        self.version, self.changed, self.device = tensor._version, False, Device.of(tensor)
        self.stream = self.device.current()
        # among the region's entries, once the saved tensors cover the storage
        self.index: int | None = None
        self.room: Room | None = None
        self.coming: Callable[[], Tensor] | None = None
        self.handles: dict[object, tuple[int, int]] = {}  # key -> (offset, bytes)
        # handles that have not been unpacked since the storage came up
        self.wanted: set[object] = set()

    def is_covered(self) -> bool:
        """Whether the saved tensors are all that the storage holds."""
        return (
            sum(nbytes for _, nbytes in set(self.handles.values()))
            >= self.held.untyped_storage().nbytes()
        )

    def go_down(self) -> None:
        with self.device.on(self.stream):  # not whichever saves the tensor that pushed this one out
            self.room = self.store.put(bytes_of(self.held))

    def arrive(self) -> None:
        """The copy down is complete: let go of the device's memory. If it failed, what is held
        stays."""
        if self.room is None:
            return
        try:
            with self.device.on(self.stream):
                self.room.wait()
        except BaseException:
            self.room = None
            raise
        self.changed |= self.held._version != self.version
        self.held = None

    def start_up(self) -> None:
        if self.held is None and self.coming is None and self.room is not None:
            self.coming = self.room.get()

    def data_for(self, handle: _Handle) -> Tensor:
        if self.changed or (self.held is not None and self.held._version != self.version):
            raise RuntimeError(
                _CHANGED.format(shape=handle.view[1], when=" before it was copied down")
            )
        self.wanted.discard(handle.key)
        return self.device.used(self.coming()) if self.held is None else self.held

    def let_go(self) -> None:
        """What came up is through with, unless another node wants it too. A graph that is retained
        fetches it again."""
        if not self.wanted:
            self.coming, self.wanted = None, set(self.handles)

    def drop(self, key: object) -> None:
        del self.handles[key]
        self.wanted.discard(key)
        if not self.handles:
            if self.room is not None:
                self.room.free(self.held, self.coming)
            self.held = self.room = self.coming = None


def _running_node() -> Any:
    """Which of backward's nodes is running; not the node itself, which would keep its graph
    alive."""
    node = torch._C._current_autograd_node()
    return None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory: no wrapper, no sparse, quantised or nested layout."""
    return (
        (type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or is_symbolic(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
    )
