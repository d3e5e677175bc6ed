"""Offload saved tensors when autograd saves them, and fetch them before backward needs them.

A whole storage is moved, once, however many saved tensors are views of it. Its states (`_State`):

    PARTIAL
       |      pack: the saved tensors cover the storage
    ON_DEVICE <-------.
       |  go_down     |  arrive: the copy failed
    GOING_DOWN -------'
       |      arrive: the copy is complete
    OFFLOADED <-------.
       |  start_up    |  release: every node that needs it has read it
    COMING_UP --------'

    and from each of them, when the last handle is dropped, to FREED

`pack` creates a storage as PARTIAL. If the first saved tensor covers the whole storage, it becomes
ON_DEVICE in the same call. Device memory is referenced by `held` until the copy down is complete,
and in COMING_UP by `coming`. The `reservation` in the store is held from GOING_DOWN on. Only an
OFFLOADED storage uses no device memory, which is the purpose of this module. A retained graph can
go back and forth between OFFLOADED and COMING_UP.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook

from course_lib._check import kind, whole
from course_lib._torch import (
    check_torch_func,
    elements_spanned,
    is_symbolic,
    torch_func_refused,
    writes_after_saving,
)

from .device import Device
from .stores import Guard, Reservation, Store, bytes_of, default_store, view_of


class offload_activations:
    """Offload the tensors that autograd saves inside the block; backward fetches them.

    These stay on the device:

    - parameters and buffers of modules that run inside the block, views of them, and tensors in
      `keep`
    - storages smaller than `min_bytes`
    - the last storages saved, since backward needs them first
    - storages that the saved tensors cover only in part, such as a data set with the batch as a
      slice: its owner keeps all of it anyway, so offloading would free nothing
    - sparse, quantized and nested tensors

    A storage is copied down once, however many saved tensors are views of it. Each of them comes
    back as the same view.

    Args:
        store: A `HostStore`, a `DiskStore` or another `Store`. By default host memory for CUDA
            tensors and a file for CPU tensors.
        min_bytes: Size of the smallest storage that is worth a copy.
        keep: Tensors, or modules with their parameters and buffers, whose storages stay on the
            device.
        prefetch: Number of storages that backward fetches ahead; `prefetch + 1` storages stay on
            the device at the end of the block. By default 2 on CUDA and 1 on a CPU.
        in_flight: Number of copies down that may be in flight. A larger number hides longer copies
            and holds more memory. By default 2 on CUDA and 1 on a CPU.

    Warns:
        UserWarning: Once, at the end of the block, if tensors were saved but all of them are
            smaller than `min_bytes`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
        StoreFull: Raised by the operator whose saved tensor does not fit into the store. Everything
            saved before is intact.
        RuntimeError: In backward, if a saved tensor was changed in place before its copy was
            complete, or if an operator (rrelu in training) wrote it only after it was copied, which
            `prefetch=0` makes possible.

    Example:
        >>> store, x = HostStore(), torch.randn(512, 512, requires_grad=True)
        >>> with offload_activations(store, min_bytes=1024):
        ...     loss = x.exp().exp().exp().sum()
        >>> loss.backward()
        >>> store.stats.bytes_down
        1048576
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
        for i, thing in enumerate(self.keep):
            kind(f"keep[{i}]", thing, (Tensor, nn.Module), "a tensor or a module")
        self._entered: list[tuple[_ForwardPass, Any, Any]] = []
        self._warned = False

    def __enter__(self) -> offload_activations:
        forward_pass = _ForwardPass(self)
        hooks = saved_tensors_hooks(forward_pass.pack, forward_pass.unpack)
        with torch_func_refused("offload_activations"):
            hooks.__enter__()
        seen = register_module_forward_pre_hook(lambda module, args: forward_pass.stay(module))
        self._entered.append((forward_pass, seen, hooks))
        return self

    def __exit__(self, kind, value, trace) -> None:
        forward_pass, seen, hooks = self._entered.pop()
        hooks.__exit__(kind, value, trace)
        seen.remove()
        try:
            with forward_pass.guard:
                forward_pass.settle(0)
        except Exception:
            if kind is None:
                raise
        check_torch_func(value, "offload_activations")
        all_too_small = forward_pass.too_small and not forward_pass.large_enough
        if kind is None and all_too_small and not self._warned:
            self._warned = True
            warnings.warn(
                "no activation was moved: the largest storage that was saved has"
                f" {forward_pass.too_small} bytes, and min_bytes is {self.min_bytes}",
                stacklevel=2,
            )


class _State(Enum):
    """State of a saved storage; the docstring of this module shows the transitions."""

    PARTIAL = auto()  # on the device, because saved tensors cover only a part of it
    ON_DEVICE = auto()  # on the device; it will be copied down unless backward comes first
    GOING_DOWN = auto()  # still on the device
    OFFLOADED = auto()
    COMING_UP = auto()  # being copied or already copied; its users wait for the copy
    FREED = auto()


class _ForwardPass:
    """One forward pass inside the block: its storages in the order in which they were saved."""

    def __init__(self, options: offload_activations):
        self.options = options
        self.guard = Guard()
        self.known = WeakKeyDictionary()  # storage -> its latest _SavedStorage
        self.staying = WeakKeyDictionary()
        self.modules: set[int] = set()
        self.too_small = 0
        self.large_enough = False
        self.storages: list[_SavedStorage] = []  # backward reads them from the end
        self.recent: deque[_SavedStorage] = deque()  # on the device, and not going down yet
        self.going: deque[_SavedStorage] = deque()  # on the device until their copy is complete
        # the node of backward that is unpacking now, and the storages that it has unpacked
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

    def pack(self, tensor: Tensor) -> _Unmoved | _Handle:
        if not _has_storage(tensor) or self._stays(tensor):
            return _Unmoved(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.options.min_bytes):
            self.too_small = max(self.too_small, storage.nbytes())
            return _Unmoved(tensor)
        self.large_enough = True
        with self.guard:
            saved = self.known.get(storage)
            if saved is None or saved.state is _State.FREED or saved.version != tensor._version:
                saved = self.known[storage] = _SavedStorage(self, tensor)
            else:
                saved.store.stats.shared += 1
            handle = _Handle(saved, tensor)
            if saved.state is _State.PARTIAL and saved.is_covered():
                saved.state = _State.ON_DEVICE
                saved.index = len(self.storages)
                self.storages.append(saved)
                self.recent.append(saved)
            while len(self.recent) > self._ahead(self.options.prefetch, saved) + 1:
                if (oldest := self.recent.popleft()).state is _State.ON_DEVICE:
                    oldest.go_down()
                    self.going.append(oldest)
            self.settle(self._ahead(self.options.in_flight, saved))
            return handle

    def _stays(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        leaf = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        return leaf or tensor.untyped_storage() in self.staying

    def _ahead(self, wanted: int | None, saved: _SavedStorage) -> int:
        return saved.device.ahead if wanted is None else wanted

    def unpack(self, packed: _Unmoved | _Handle) -> Tensor:
        if isinstance(packed, _Unmoved):
            return packed.restore()
        with self.guard:
            node = _running_node()
            # a node may unpack a saved tensor twice, so its storages stay until the next node
            if node != self.node:
                for saved in self.read:
                    saved.release()
                self.node, self.read = node, []
            saved = packed.saved
            self.read.append(saved)
            if saved.state is not _State.PARTIAL:
                prefetch = self._ahead(self.options.prefetch, saved)
                for near in reversed(
                    self.storages[max(0, saved.index - prefetch) : saved.index + 1]
                ):
                    near.start_up()
            return packed.restore()

    def settle(self, most: int) -> None:
        """Release the device memory of all copies down except the latest `most`."""
        while len(self.going) > most:
            self.going.popleft().arrive()


class _Unmoved:
    """A saved tensor that stays on the device.

    It holds a detached tensor, because an operator that saves its own result would otherwise form a
    reference cycle and never be freed.
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        if self.tensor._version != self.version:
            shape = "(nested)" if self.tensor.is_nested else tuple(self.tensor.shape)
            raise RuntimeError(_CHANGED.format(shape=shape, when=""))
        return self.tensor


_CHANGED = (
    "a tensor of shape {shape} that backward needs was changed in place{when}; make that operation"
    " out of place"
)


class _Handle:
    """One saved tensor: a view of a saved storage. The graph holds it until its node has run."""

    # A class attribute, so that `__del__` has nothing to drop if `__init__` fails.
    saved: _SavedStorage | None = None

    def __init__(self, saved: _SavedStorage, tensor: Tensor):
        self.key = object()  # not an id, which Python may reuse before a late `drop`
        self.view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()
        # a view may skip elements or repeat them
        size = min(tensor.numel(), elements_spanned(tensor)) * tensor.itemsize
        saved.handles[self.key] = tensor.storage_offset() * tensor.itemsize, size
        saved.unread.add(self.key)
        self.saved = saved

    def restore(self) -> Tensor:
        view = view_of(self.saved.data_for(self), *self.view)
        if self.conjugated:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negated else view

    def __del__(self):
        if self.saved is not None:
            self.saved.forward_pass.guard.later(partial(self.saved.drop, self.key))


class _SavedStorage:
    """A storage that one or more saved tensors view. The handles of these tensors refer to it.

    Attributes:
        state: A `_State`.
        held: The saved data on the device, until the storage is OFFLOADED.
        reservation: Its reservation in the store, from GOING_DOWN on.
        coming: Function that returns the fetched tensor, in COMING_UP.
        index: Position among the storages of the forward pass; None while PARTIAL.
        copied_at: Number of nodes in autograd's graph when the copy down began.
        handles: Key -> (offset, bytes) of each saved tensor that still exists.
        unread: Keys of the handles that backward has not read since the storage came up.
    """

    def __init__(self, forward_pass: _ForwardPass, tensor: Tensor):
        self.state = _State.PARTIAL
        self.forward_pass = forward_pass
        self.store = forward_pass.options.store or default_store(tensor)
        self.held: Tensor | None = tensor.detach()  # shares the version counter
        self.version, self.changed = tensor._version, False
        self.device = Device.of(tensor)
        self.stream = self.device.current()
        self.index: int | None = None
        self.copied_at = -1
        self.reservation: Reservation | None = None
        self.coming: Callable[[], Tensor] | None = None
        self.handles: dict[object, tuple[int, int]] = {}
        self.unread: set[object] = set()

    def is_covered(self) -> bool:
        """Return whether the saved tensors cover the whole storage."""
        return (
            sum(nbytes for _, nbytes in set(self.handles.values()))
            >= self.held.untyped_storage().nbytes()
        )

    def go_down(self) -> None:
        self.copied_at = torch.autograd._get_sequence_nr()
        with self.device.on(self.stream):  # the stream that made it, not the current one
            self.reservation = self.store.put(bytes_of(self.held))
        self.state = _State.GOING_DOWN

    def arrive(self) -> None:
        """Wait until the copy down is complete and release the device memory.

        If the copy failed, the storage stays on the device.
        """
        if self.state is not _State.GOING_DOWN:  # it was freed in the meantime
            return
        try:
            with self.device.on(self.stream):
                self.reservation.wait()
        except BaseException:
            self.state = _State.ON_DEVICE
            self.reservation = None
            raise
        self.changed |= self.held._version != self.version
        self.state = _State.OFFLOADED
        self.held = None

    def start_up(self) -> None:
        if self.state is _State.OFFLOADED:
            self.coming = self.reservation.get()
            self.state = _State.COMING_UP

    def data_for(self, handle: _Handle) -> Tensor:
        if self.changed or (self.held is not None and self.held._version != self.version):
            raise RuntimeError(
                _CHANGED.format(shape=handle.view[1], when=" before it was copied down")
            )
        node = torch._C._current_autograd_node()
        # The operator created its node and saved the tensor, which was copied before it was
        # written.
        if writes_after_saving(node) and self.copied_at == node._sequence_nr() + 1:
            raise RuntimeError(
                f"{node.name()} needs a tensor of shape {handle.view[1]} that its operator (rrelu"
                " in training) wrote only after it had been copied down. Raise prefetch, so that it"
                " is copied later, or run the operator outside of offload_activations"
            )
        self.unread.discard(handle.key)
        if self.state is _State.COMING_UP:
            return self.device.used(self.coming())
        return self.held  # pyrefly: ignore[bad-return]  # not None: the storage is on the device

    def release(self) -> None:
        """Release the fetched copy, unless another node still has to read it.

        A retained graph fetches it again.
        """
        if self.unread:
            return
        self.unread = set(self.handles)
        if self.state is _State.COMING_UP:
            self.state = _State.OFFLOADED
            self.coming = None

    def drop(self, key: object) -> None:
        del self.handles[key]
        self.unread.discard(key)
        if not self.handles:
            if self.reservation is not None:
                self.reservation.free(self.held, self.coming)
            self.state = _State.FREED
            self.held = self.reservation = self.coming = None


def _running_node() -> Any:
    """Identify the running node of backward.

    The node itself is not returned, because a reference to it would keep its graph alive.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is plain memory: not a wrapper, sparse, quantized or nested."""
    return (
        (type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or is_symbolic(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
    )
