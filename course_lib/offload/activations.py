"""Offload tensors when autograd saves them, and fetch them shortly before backward reads them.

A storage is always offloaded as a whole, and only once, even if several saved tensors are views of
it. A storage is always in one of these states (`_State`), and methods of `_SavedStorage` move
it to the next one:

    PARTIAL
       |      pack: the saved tensors cover the storage
    ON_DEVICE <---------.
       |  start_offload |  finish_offload: the copy failed
    OFFLOADING ---------'
       |      finish_offload: the copy is complete
    OFFLOADED <---------.
       |  start_fetch   |  release: every node that needs the storage has read it
    FETCHING -----------'

    from every state to FREED, when the last handle is dropped

`pack` and `unpack` are autograd's saved-tensor hooks. `pack` creates a storage as PARTIAL. If the
first saved tensor covers the whole storage, the storage becomes ON_DEVICE in the same call. Until
the copy to the lower tier is complete, the attribute `device_tensor` refers to the device memory.
While a storage is FETCHING, `finish_fetch` refers to the device memory. From OFFLOADING on, the
storage has a reservation in the store. Only an OFFLOADED storage uses no device memory, and saving
this memory is the purpose of the module. If a graph is retained, its storages can change between
OFFLOADED and FETCHING more than once.
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
    checked_torch_func,
    current_graph_task_id,
    current_node,
    writes_after_saving,
)
from course_lib._torch.symbolic import is_symbolic
from course_lib._torch.tensors import elements_spanned

from .device import Device
from .stores import DeferringLock, Reservation, Store, bytes_of, default_store, view_of


class offload_activations:
    """Offload the tensors that autograd saves inside a `with` block, until backward needs them.

    A tensor is offloaded by copying its storage to a lower tier, which is host memory or a disk.
    This saves device memory between forward and backward, at the cost of two copies per offloaded
    storage. These tensors and storages are not offloaded:

    - parameters and buffers of modules that run inside the `with` block, views of them, and tensors
      in `keep`
    - storages smaller than `min_bytes`
    - the storages saved last (see `prefetch`), because backward needs them first
    - storages that the saved tensors cover only in part. For example, if a saved batch is a slice
      of a data set, the data set stays in memory anyway, so offloading would free nothing.
    - sparse, quantized and nested tensors

    A storage is copied to the lower tier only once, even if several saved tensors are views of it.
    Backward restores each of these views.

    Args:
        store: Lower tier, which is a `HostStore`, a `DiskStore` or another `Store`. By default host
            memory for CUDA tensors and a file for CPU tensors.
        min_bytes: Size of the smallest storage that is offloaded.
        keep: Tensors, or modules with their parameters and buffers, whose storages stay on the
            device.
        prefetch: Number of offloaded storages that backward fetches before it needs them. The
            `prefetch + 1` storages that were saved last are not offloaded. By default 2 on CUDA and
            1 on a CPU.
        in_flight: Number of copies to the lower tier that may be in flight at the same time. A
            larger number hides longer copies but uses more device memory. By default 2 on CUDA and
            1 on a CPU.

    Warns:
        UserWarning: Once, at the end of the `with` block, if tensors were saved but all of them are
            smaller than `min_bytes`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
        StoreFull: The next tensor that autograd saves does not fit into the store. The error is
            raised in the forward pass, by the operator that saves this tensor. All tensors that
            were offloaded before can still be read.
        RuntimeError: A saved tensor was changed in place before its copy was complete, or the noise
            of `rrelu` in training mode was offloaded. The error is raised in the backward pass.

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
        with checked_torch_func("offload_activations"):
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
            with forward_pass.lock:
                forward_pass.finish_copies(0)
        except Exception:
            if kind is None:
                raise
        check_torch_func(value, "offload_activations")
        all_too_small = forward_pass.too_small and not forward_pass.large_enough
        if kind is None and all_too_small and not self._warned:
            self._warned = True
            warnings.warn(
                "no activation was moved: the largest storage that was saved for backward has"
                f" {forward_pass.too_small} bytes, less than min_bytes = {self.min_bytes}",
                stacklevel=2,
            )


class _State(Enum):
    """State of a saved storage. The module docstring shows the transitions between states."""

    PARTIAL = auto()  # stays on the device, because saved tensors cover only a part of the storage
    ON_DEVICE = auto()  # on the device; will be offloaded unless backward begins first
    OFFLOADING = auto()  # being copied to the lower tier, and still on the device
    OFFLOADED = auto()
    FETCHING = auto()  # the copy back to the device has started; readers wait for it
    FREED = auto()


class _ForwardPass:
    """Saved-tensor hooks of one `with offload_activations(...)` block, and the storages it saves.

    Attributes:
        latest_by_storage: Map from the storage of a tensor to the latest `_SavedStorage` for it.
        kept_storages: Storages of parameters, buffers and tensors in `keep`, as keys.
        modules: Identities of the modules whose parameters and buffers are in `kept_storages`.
        too_small: Bytes of the largest saved storage that is smaller than `min_bytes`.
        large_enough: Whether a storage of at least `min_bytes` was saved.
        storages: All storages that may be offloaded, in the order in which they were saved.
        on_device: The storages that were saved last. Their copies to the lower tier have not yet
            started.
        offloading: Storages whose copy to the lower tier may be in flight.
        running_node: Autograd node that is reading its saved tensors now, in backward.
        unpacked: Storages that `running_node` has read.
    """

    def __init__(self, options: offload_activations):
        self.options = options
        self.lock = DeferringLock()
        self.latest_by_storage = WeakKeyDictionary()
        self.kept_storages = WeakKeyDictionary()
        self.modules: set[int] = set()
        self.too_small = 0
        self.large_enough = False
        self.storages: list[_SavedStorage] = []  # backward reads the list from its end
        self.on_device: deque[_SavedStorage] = deque()
        self.offloading: deque[_SavedStorage] = deque()
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
        """Return what autograd saves instead of a tensor; autograd calls this hook.

        The result is a handle if the tensor is to be offloaded, and a `_KeptTensor` otherwise.
        """
        if not _has_storage(tensor) or self._must_stay(tensor):
            return _KeptTensor(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.options.min_bytes):
            self.too_small = max(self.too_small, storage.nbytes())
            return _KeptTensor(tensor)
        self.large_enough = True
        with self.lock:
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
            while len(self.on_device) > self._or_device_default(self.options.prefetch, saved) + 1:
                if (oldest := self.on_device.popleft()).state is _State.ON_DEVICE:
                    oldest.start_offload()
                    self.offloading.append(oldest)
            self.finish_copies(self._or_device_default(self.options.in_flight, saved))
            return handle

    def _must_stay(self, tensor: Tensor) -> bool:
        """Return whether a tensor must not be offloaded.

        This is True for parameters, for other leaf tensors that require gradients, for views of
        parameters or such leaf tensors, and for tensors whose storage is in `kept_storages`.
        """
        base = tensor._base if tensor._is_view() else tensor
        leaf = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        return leaf or tensor.untyped_storage() in self.kept_storages

    def _or_device_default(self, requested: int | None, saved: _SavedStorage) -> int:
        """Return `requested`, or the default of the storage's device if `requested` is None."""
        return saved.device.ahead if requested is None else requested

    def unpack(self, packed: _KeptTensor | _Handle) -> Tensor:
        """Return a saved tensor for backward, and start fetching the storages needed next."""
        if isinstance(packed, _KeptTensor):
            return packed.restore()
        with self.lock:
            node = _running_node()
            # A node may read a saved tensor twice. Therefore the storages that a node has read are
            # released only when the next node reads a tensor.
            if node != self.running_node:
                for saved in self.unpacked:
                    saved.release()
                self.running_node, self.unpacked = node, []
            saved = packed.saved
            self.unpacked.append(saved)
            if saved.state is not _State.PARTIAL:
                prefetch = self._or_device_default(self.options.prefetch, saved)
                for storage_ahead in reversed(
                    self.storages[max(0, saved.index - prefetch) : saved.index + 1]
                ):
                    storage_ahead.start_fetch()
            return packed.restore()

    def finish_copies(self, in_flight: int) -> None:
        """Wait for all copies to the lower tier, except the latest `in_flight` copies."""
        while len(self.offloading) > in_flight:
            self.offloading.popleft().finish_offload()


class _KeptTensor:
    """A saved tensor that is not offloaded.

    This object refers to the tensor without the tensor's autograd history. With the history, an
    operator that saves its own result would be part of a reference cycle. The graph would then not
    be freed when the last reference from outside the cycle is dropped.
    """

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        """Return the tensor; raise a RuntimeError if it was changed in place after it was saved."""
        if self.tensor._version != self.version:
            shape = "(nested)" if self.tensor.is_nested else tuple(self.tensor.shape)
            raise RuntimeError(_CHANGED.format(shape=shape, when=""))
        return self.tensor


_CHANGED = (
    "a tensor of shape {shape} that backward needs was changed in place{when}; use an out-of-place"
    " operation instead"
)


class _Handle:
    """Reference from autograd's graph to a saved storage, which restores one saved tensor.

    Autograd drops the handle when it frees the node's saved tensors, usually after the node has run
    in backward. The storage is freed when its last handle is dropped.
    """

    # A class attribute, so that `__del__` finds it (and does nothing) even if `__init__` fails.
    saved: _SavedStorage | None = None

    def __init__(self, saved: _SavedStorage, tensor: Tensor):
        self.key = object()  # an id might be reused before `remove_handle` runs
        self.view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()
        # Count each byte of the storage once, because a view may skip elements or repeat them.
        size = min(tensor.numel(), elements_spanned(tensor)) * tensor.itemsize
        saved.handles[self.key] = tensor.storage_offset() * tensor.itemsize, size
        saved.unread.add(self.key)
        self.saved = saved

    def restore(self) -> Tensor:
        """Fetch the storage if necessary, and return the saved tensor as a view of it."""
        view = view_of(self.saved.wait_for_data(self), *self.view)
        if self.conjugated:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negated else view

    def __del__(self):
        if self.saved is not None:
            self.saved.forward_pass.lock.call_when_free(partial(self.saved.remove_handle, self.key))


class _SavedStorage:
    """A storage with one or more tensors that autograd has saved, and the state of its offload.

    Attributes:
        state: Where the data is, as a `_State`.
        device_tensor: A tensor on the device that has this storage. None once the state is
            OFFLOADED.
        version: Version counter of the tensor when it was saved.
        changed: Whether the tensor had been changed in place by the time its copy was complete.
        stream: The stream on which the tensor was saved.
        index: Position in `storages` of the forward pass; None while the state is PARTIAL.
        reservation: Reservation of space in the store. None until the state is OFFLOADING.
        finish_fetch: While FETCHING, a function that waits for the copy and returns the tensor.
        handles: Map from the key of each live handle to (offset, size) of its tensor, in bytes.
        unread: Keys of the handles that backward has not read since the storage was fetched.
    """

    def __init__(self, forward_pass: _ForwardPass, tensor: Tensor):
        self.state = _State.PARTIAL
        self.forward_pass = forward_pass
        self.store = forward_pass.options.store or default_store(tensor)
        self.device_tensor: Tensor | None = tensor.detach()  # shares the tensor's version counter
        self.version, self.changed = tensor._version, False
        self.device = Device.of_tensor(tensor)
        self.stream = self.device.current()
        self.index: int | None = None
        self.reservation: Reservation | None = None
        self.finish_fetch: Callable[[], Tensor] | None = None
        self.handles: dict[object, tuple[int, int]] = {}
        self.unread: set[object] = set()

    def is_covered(self) -> bool:
        """Return whether the saved tensors cover the whole storage."""
        return (
            sum(nbytes for _, nbytes in set(self.handles.values()))
            >= self.device_tensor.untyped_storage().nbytes()
        )

    def start_offload(self) -> None:
        """Start copying the storage to the lower tier."""
        with self.device.on(self.stream):  # the tensor's device may not be the current one
            self.reservation = self.store.put(bytes_of(self.device_tensor))
        self.state = _State.OFFLOADING

    def finish_offload(self) -> None:
        """Wait until the copy to the lower tier is complete, and free the device memory.

        If the copy failed, the storage stays on the device and the error is raised.
        """
        if self.state is not _State.OFFLOADING:  # the storage was freed during the copy
            return
        try:
            with self.device.on(self.stream):
                self.reservation.wait()
        except BaseException:
            self.state = _State.ON_DEVICE
            self.reservation = None
            raise
        self.changed |= self.device_tensor._version != self.version
        self.state = _State.OFFLOADED
        self.device_tensor = None

    def start_fetch(self) -> None:
        """Start copying the storage back to the device if it is offloaded."""
        if self.state is _State.OFFLOADED:
            self.finish_fetch = self.reservation.get()
            self.state = _State.FETCHING

    def wait_for_data(self, handle: _Handle) -> Tensor:
        """Wait for the storage's copy, and return a tensor with its data on the device.

        Args:
            handle: The handle whose saved tensor backward reads now.

        Raises:
            RuntimeError: The data was changed in place before it was offloaded. The error is also
                raised if the running operator is `rrelu` in training mode, which saves a tensor
                before it fills the tensor.
        """
        if self.changed or (
            self.device_tensor is not None and self.device_tensor._version != self.version
        ):
            raise RuntimeError(
                _CHANGED.format(shape=handle.view[1], when=" before it was offloaded")
            )
        # The store may have copied the tensor before rrelu filled it.
        if self.reservation is not None and writes_after_saving(current_node()):
            raise RuntimeError(
                "rrelu in training mode cannot run inside offload_activations: it saves its noise"
                f" tensor, of shape {handle.view[1]}, before filling this tensor with random"
                " numbers. Use leaky_relu, or run rrelu outside of offload_activations"
            )
        self.unread.discard(handle.key)
        if self.state is _State.FETCHING:
            return self.device.used(self.finish_fetch())
        return self.device_tensor  # pyrefly: ignore[bad-return]  # it is not None here

    def release(self) -> None:
        """Free the fetched copy, unless another node still has to read it.

        The data is fetched again if the graph is retained and backward runs once more.
        """
        if self.unread:
            return
        self.unread = set(self.handles)
        if self.state is _State.FETCHING:
            self.state = _State.OFFLOADED
            self.finish_fetch = None

    def remove_handle(self, key: object) -> None:
        """Remove a dropped handle; if it was the last one, free the data on device and in store."""
        del self.handles[key]
        self.unread.discard(key)
        if not self.handles:
            if self.reservation is not None:
                self.reservation.free(self.device_tensor, self.finish_fetch)
            self.state = _State.FREED
            self.device_tensor = self.reservation = self.finish_fetch = None


def _running_node() -> Any:
    """Return two numbers that identify the running node of backward, or None outside of backward.

    The node itself is not returned, because a reference to it would keep its graph alive.
    """
    node = current_node()
    return None if node is None else (current_graph_task_id(), node._sequence_nr())


def _has_storage(tensor: Tensor) -> bool:
    """Return whether all values of a tensor are in one storage that can be offloaded.

    This is False for subclasses that wrap tensors, and for sparse, quantized, nested and inference
    tensors.
    """
    return (
        (type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or is_symbolic(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
    )
