"""Streams, events, pinned memory and copies of a device, behind one small interface.

`Device` is the CPU, `Cuda` is a GPU, and `course_lib.simulated` has a simulated GPU for tests. This
package uses streams, events and copies only through the methods of these classes, so that the
simulated device can replace a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from course_lib._torch.symbolic import is_symbolic


class Device:
    """Base class of devices, with methods for streams, events and copies.

    This class itself represents a CPU, and its subclass `Cuda` represents a GPU. The memory of a
    CPU is host memory, and a copy is complete when the call returns. A CPU has no streams and
    events, so methods that return a stream or an event return None here.

    Attributes:
        has_own_memory: Whether the device's memory is separate from host memory.
        ahead: Default value of the arguments `prefetch` and `in_flight` of `offload_activations`.
        guests: Registered devices, such as a simulated GPU, whose tensors are CPU tensors for
            PyTorch. `of_tensor` checks these devices first.
    """

    has_own_memory = False
    ahead = 1
    guests: ClassVar[list[Device]] = []

    @staticmethod
    def of_tensor(tensor: Tensor) -> Device:
        """Return the device that a tensor is on.

        For a symbolic tensor, the result is the CPU: the tensor has no memory, and a copy needs no
        synchronization.
        """
        if is_symbolic(tensor):
            return Device.from_torch(torch.device("cpu"))
        return next(
            (guest for guest in Device.guests if guest.holds(tensor)), None
        ) or Device.from_torch(tensor.device)

    @staticmethod
    def from_torch(device: torch.device | Device) -> Device:
        """Return the `Device` for a `torch.device`; a `Device` is returned unchanged.

        Each call with the same `torch.device` returns the same object.
        """
        if isinstance(device, Device):
            return device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in _devices:
            _devices[device] = Cuda(device) if device.type == "cuda" else Device(device)
        return _devices[device]

    def __init__(self, device: torch.device):
        self.device = device

    def current(self) -> Any:
        """Return the current stream, on which operators run; None on a CPU."""
        return None

    def on(self, stream: Any) -> AbstractContextManager:
        """Return a context manager that makes `stream` the current stream."""
        return nullcontext()

    def side(self, name: str) -> Any:
        """Return an additional stream, such as one for copies; None on a CPU.

        Args:
            name: Name of the stream. The first call with a name creates the stream.
        """
        return None

    def event(self) -> Any:
        """Record and return an event after all operations enqueued on the current stream so far.

        On a CPU, which has no streams, the event is None.
        """
        return None

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event; the host continues."""

    def finish(self, event: Any) -> None:
        """Make the host wait for an event."""

    def used(self, tensor: Tensor) -> Tensor:
        """Keep a tensor's memory from being reused before the current stream has finished with it.

        Call this for a tensor that was allocated on another stream. Otherwise, its memory could be
        reused while the current stream still uses it.

        Returns:
            The same tensor.
        """
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized host tensor that this device can copy by itself (DMA).

        On a GPU the tensor is in pinned memory, and on a CPU in ordinary memory.
        """
        return torch.empty(shape, dtype=dtype, device="cpu")

    def up(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device, on the current stream, and return the copy.

        A tensor that is already on this device is returned unchanged. On a CPU, this is the case
        for every host tensor.
        """
        return tensor.to(self.device)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor from this device to the host or back, on the current stream.

        The host does not wait for the copy if the host tensor is pinned.

        Args:
            target: Tensor that receives the values, on the host or on this device.
            source: Tensor with the values, on this device or on the host.
        """
        target.copy_(source, non_blocking=True)

    def copy(self, target: Tensor, source: Tensor, name: str) -> Any:
        """Copy a tensor on a side stream, after all operations enqueued on the current stream.

        The copy is from this device to the host, or from the host to this device.

        Args:
            target: Tensor that receives the values.
            source: Tensor with the values.
            name: Name of the side stream (see `side`).

        Returns:
            An event at the end of the copy.
        """
        enqueued_so_far = self.event()
        with self.on(self.side(name)):
            self.wait(enqueued_so_far)
            self.transfer(target, source)
            return self.event()


class Cuda(Device):
    """A CUDA GPU. The operations of a stream run in order, and the host does not wait for them."""

    has_own_memory = True
    ahead = 2

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._sides: dict[str, torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def side(self, name: str) -> torch.cuda.Stream:
        # Streams are reused, because the allocator has a separate memory pool for each stream.
        if name not in self._sides:
            self._sides[name] = torch.cuda.Stream(self.device)
        return self._sides[name]

    def event(self) -> torch.Event:
        return self.current().record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self.current().wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def used(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(self.current())
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        # PyTorch caches pinned memory and does not reuse it before copies from it have finished.
        # device="cpu" is explicit, because the default device may be a different one.
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def up(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


_devices: dict[torch.device, Device] = {}
