"""Offload tensors when autograd saves them, and fetch them shortly before backward reads them.

The unit is a storage: it is moved once and as a whole, however many saved tensors are views of it.
Its states (`_State`):

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

`pack` and `unpack` are autograd's saved-tensor hooks. `pack` creates a storage as PARTIAL. If the
first saved tensor covers the whole storage, it becomes ON_DEVICE in the same call. The attribute
`held` refers to the device memory until the copy to the host is complete, and `fetched` does in
COMING_UP.
The `reservation` in the store exists from GOING_DOWN on. Only an OFFLOADED storage takes no device
memory, which is the purpose of this module. If a graph is retained, its storages can go back and
forth between OFFLOADED and COMING_UP.
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
from course_lib._torch.autograd import (
    check_torch_func,
    current_graph_task_id,
    current_node,
    torch_func_refused,
    writes_after_saving,
)
from course_lib._torch.symbolic import is_symbolic
from course_lib._torch.tensors import elements_spanned

from .device import Device
from .stores import Guard, Reservation, Store, bytes_of, default_store, view_of


class offload_activations:
    """Offload the tensors that autograd saves inside the block; backward fetches them.

    These stay on the device:

    - parameters and buffers of modules that run inside the block, views of them, and tensors in
      `keep`
    - storages smaller than `min_bytes`
    - the storages saved last (see `prefetch`), because backward needs them first
    - storages that the saved tensors cover only in part, such as a data set if the batch is a slice
      of it: the data set stays in memory anyway, so offloading would free nothing
    - sparse, quantized and nested tensors

    A storage is copied to the lower tier once, however many saved tensors are views of it. Each of
    them is restored as the same view.

    Args:
        store: Lower tier, which is a `HostStore`, a `DiskStore` or another `Store`. By default
            host memory for CUDA tensors and a file for CPU tensors.
        min_bytes: Size of the smallest storage that is offloaded.
        keep: Tensors, or modules with their parameters and buffers, whose storages stay on the
            device.
        prefetch: Number of storages that backward fetches ahead; `prefetch + 1` storages stay on
            the device at the end of the block. By default 2 on CUDA and 1 on a CPU.
        in_flight: Number of copies to the lower tier that may be in flight. A larger number hides
            longer copies and holds more device memory. By default 2 on CUDA and 1 on a CPU.

    Warns:
        UserWarning: Once, at the end of the block, if tensors were saved but all of them are
            smaller than `min_bytes`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
        StoreFull: Raised by the operator whose saved tensor does not fit into the store. Everything
            saved before is intact.
        RuntimeError: Raised in backward if a saved tensor was changed in place before its copy was
            complete, or if the noise of `rrelu` in training was offloaded.

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
        module_hook = register_module_forward_pre_hook(
            lambda module, args: forward_pass.keep_on_device(module)
        )
        self._entered.append((forward_pass, module_hook, hooks))
        return self

    def __exit__(self, kind, value, trace) -> None:
        forward_pass, module_hook, hooks = self._entered.pop()
        hooks.__exit__(kind, value, trace)
        module_hook.remove()
        try:
            with forward_pass.guard:
                forward_pass.finish_copies(0)
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
    """State of a saved storage; the module docstring shows the transitions."""

    PARTIAL = auto()  # on the device, because the saved tensors cover only a part of it
    ON_DEVICE = auto()  # on the device; it will be offloaded unless backward begins first
    GOING_DOWN = auto()  # being copied to the lower tier, and still on the device
    OFFLOADED = auto()
    COMING_UP = auto()  # being copied back, or already copied; its users wait for the copy
    FREED = auto()


class _ForwardPass:
    """The storages that one entry of `offload_activations` saves, and its saved-tensor hooks.

    Attributes:
        latest_by_storage: Storage of a tensor -> its latest `_SavedStorage`.
        kept_storages: Storages of parameters, buffers and tensors in `keep`.
        too_small, large_enough: Bytes of the largest storage below `min_bytes`, and whether any
            storage was not too small.
        storages: All storages that may be offloaded, in the order in which they were saved.
        on_device: The latest of these storages, whose copies have not started yet.
        going_down: Storages whose copy to the lower tier may be in flight.
        running_node, unpacked: Node of backward that is unpacking now, and the storages that it has
            unpacked.
    """

    def __init__(self, options: offload_activations):
        self.options = options
        self.guard = Guard()
        self.latest_by_storage = WeakKeyDictionary()
        self.kept_storages = WeakKeyDictionary()
        self.modules: set[int] = set()
        self.too_small = 0
        self.large_enough = False
        self.storages: list[_SavedStorage] = []  # backward reads them from the end
        self.on_device: deque[_SavedStorage] = deque()
        self.going_down: deque[_SavedStorage] = deque()
        self.running_node, self.unpacked = None, []
        for thing in options.keep:
            self.keep_on_device(thing)

    def keep_on_device(self, thing: Tensor | nn.Module) -> None:
        """Exclude a tensor, or a module's parameters and buffers, from offloading."""
        if isinstance(thing, Tensor):
            tensors = [thing]
        elif id(thing) in self.modules:
            return
        else:
            self.modules.update(map(id, thing.modules()))
            tensors = [*thing.parameters(), *thing.buffers()]
        for tensor in filter(_has_storage, tensors):
            self.kept_storages[tensor.untyped_storage()] = True

    def pack(self, tensor: Tensor) -> _KeptTensor | _Handle:
        if not _has_storage(tensor) or self._stays(tensor):
            return _KeptTensor(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.options.min_bytes):
            self.too_small = max(self.too_small, storage.nbytes())
            return _KeptTensor(tensor)
        self.large_enough = True
        with self.guard:
            saved = self.latest_by_storage.get(storage)
            if saved is None or saved.state is _State.FREED or saved.version != tensor._version:
                saved = self.latest_by_storage[storage] = _SavedStorage(self, tensor)
            else:
                saved.store.stats.shared += 1
            handle = _Handle(saved, tensor)
            if saved.state is _State.PARTIAL and saved.is_covered():
                saved.state = _State.ON_DEVICE
                saved.index = len(self.storages)
                self.storages.append(saved)
                self.on_device.append(saved)
            while len(self.on_device) > self._ahead(self.options.prefetch, saved) + 1:
                if (oldest := self.on_device.popleft()).state is _State.ON_DEVICE:
                    oldest.go_down()
                    self.going_down.append(oldest)
            self.finish_copies(self._ahead(self.options.in_flight, saved))
            return handle

    def _stays(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        leaf = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        return leaf or tensor.untyped_storage() in self.kept_storages

    def _ahead(self, requested: int | None, saved: _SavedStorage) -> int:
        return saved.device.ahead if requested is None else requested

    def unpack(self, packed: _KeptTensor | _Handle) -> Tensor:
        if isinstance(packed, _KeptTensor):
            return packed.restore()
        with self.guard:
            node = _running_node()
            # A node may unpack a saved tensor twice, so its storages are released by the next node.
            if node != self.running_node:
                for saved in self.unpacked:
                    saved.release()
                self.running_node, self.unpacked = node, []
            saved = packed.saved
            self.unpacked.append(saved)
            if saved.state is not _State.PARTIAL:
                prefetch = self._ahead(self.options.prefetch, saved)
                for storage_ahead in reversed(
                    self.storages[max(0, saved.index - prefetch) : saved.index + 1]
                ):
                    storage_ahead.start_up()
            return packed.restore()

    def finish_copies(self, in_flight: int) -> None:
        """Wait for all copies to the host except the latest `in_flight`; release their memory."""
        while len(self.going_down) > in_flight:
            self.going_down.popleft().arrive()


class _KeptTensor:
    """A saved tensor that stays on the device.

    The tensor is detached: an operator that saves its own result would otherwise be part of a
    reference cycle, and its graph would never be freed.
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        if self.tensor._version != self.version:
            shape = "(nested)" if self.tensor.is_nested else tuple(self.tensor.shape)
            raise RuntimeError(_CHANGED.format(shape=shape, when=""))
        return self.tensor


_CHANGED = (
    "a tensor of shape {shape} that backward needs was changed in place{when}; use an out-of-place"
    " operation instead"
)


class _Handle:
    """One saved tensor, as a view of a saved storage; autograd's graph refers to it.

    The graph drops it after its node has run in backward. When the last handle of a storage is
    dropped, the storage is freed.
    """

    # As a class attribute this also exists if `__init__` fails, so that `__del__` does nothing
    # then.
    saved: _SavedStorage | None = None

    def __init__(self, saved: _SavedStorage, tensor: Tensor):
        self.key = object()  # an id could be reused before this handle's delayed `drop`
        self.view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()
        # Bytes of the storage that it covers, because a view may skip elements or repeat them.
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
    """A storage with one or more saved tensors, whose handles refer to it.

    Attributes:
        state: A `_State`.
        held: The saved data on the device, until the storage is OFFLOADED.
        reservation: Its reservation in the store, from GOING_DOWN on.
        fetched: Function that waits and returns the fetched tensor, in COMING_UP.
        index: Position among the storages of the forward pass; None while PARTIAL.
        handles: Key -> (offset, bytes) of each saved tensor that still exists.
        unread: Keys of the handles that backward has not read since the storage was fetched.
    """

    def __init__(self, forward_pass: _ForwardPass, tensor: Tensor):
        self.state = _State.PARTIAL
        self.forward_pass = forward_pass
        self.store = forward_pass.options.store or default_store(tensor)
        self.held: Tensor | None = tensor.detach()  # shares the version counter
        self.version, self.changed = tensor._version, False
        self.device = Device.of_tensor(tensor)
        self.stream = self.device.current()
        self.index: int | None = None
        self.reservation: Reservation | None = None
        self.fetched: Callable[[], Tensor] | None = None
        self.handles: dict[object, tuple[int, int]] = {}
        self.unread: set[object] = set()

    def is_covered(self) -> bool:
        """Return whether the saved tensors cover the whole storage."""
        return (
            sum(nbytes for _, nbytes in set(self.handles.values()))
            >= self.held.untyped_storage().nbytes()
        )

    def go_down(self) -> None:
        with self.device.on(self.stream):  # the device that holds it may not be current
            self.reservation = self.store.put(bytes_of(self.held))
        self.state = _State.GOING_DOWN

    def arrive(self) -> None:
        """Wait until the copy to the host is complete and release the device memory.

        If the copy failed, the storage stays on the device.
        """
        if self.state is not _State.GOING_DOWN:  # it was freed while the copy was in flight
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
            self.fetched = self.reservation.get()
            self.state = _State.COMING_UP

    def data_for(self, handle: _Handle) -> Tensor:
        if self.changed or (self.held is not None and self.held._version != self.version):
            raise RuntimeError(
                _CHANGED.format(shape=handle.view[1], when=" before it was offloaded")
            )
        # It may have been copied before the operator wrote it.
        if self.reservation is not None and writes_after_saving(current_node()):
            raise RuntimeError(
                "rrelu in training cannot be combined with offload_activations, because it saves"
                f" its noise, of shape {handle.view[1]}, before it draws it. Use leaky_relu, or run"
                " rrelu outside of offload_activations"
            )
        self.unread.discard(handle.key)
        if self.state is _State.COMING_UP:
            return self.device.used(self.fetched())
        return self.held  # pyrefly: ignore[bad-return]  # not None: the storage is on the device

    def release(self) -> None:
        """Release the fetched copy, unless another node still has to read it.

        It is fetched again if the graph is retained and backward runs once more.
        """
        if self.unread:
            return
        self.unread = set(self.handles)
        if self.state is _State.COMING_UP:
            self.state = _State.OFFLOADED
            self.fetched = None

    def drop(self, key: object) -> None:
        del self.handles[key]
        self.unread.discard(key)
        if not self.handles:
            if self.reservation is not None:
                self.reservation.free(self.held, self.fetched)
            self.state = _State.FREED
            self.held = self.reservation = self.fetched = None


def _running_node() -> Any:
    """Return a pair of numbers that identifies the running node of backward, or None outside of it.

    The node itself is not returned, because a reference to it would keep its graph alive.
    """
    node = current_node()
    return None if node is None else (current_graph_task_id(), node._sequence_nr())


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has its values in one storage that can be offloaded.

    Subclasses that wrap tensors, and sparse, quantized, nested and inference tensors do not.
    """
    return (
        (type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or is_symbolic(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
    )
