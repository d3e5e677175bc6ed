"""The interface of a device: streams, events, pinned memory and copies.

`Device` is the CPU, `Cuda` is a GPU, and `course_lib.simulated` has a device for tests. In
this package all streams, events and copies of a GPU go through these methods.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from course_lib._torch.symbolic import is_symbolic


class Device:
    """The CPU, and the base class of other devices.

    Its memory is host memory, and a copy is complete when the call returns. Streams and events are
    None.

    Attributes:
        has_own_memory: Whether its memory is separate from host memory.
        ahead: Default number of activation copies in flight per direction.
        guests: Devices, such as a simulated one, whose tensors report the CPU as their device.
    """

    has_own_memory = False
    ahead = 1
    guests: ClassVar[list[Device]] = []

    @staticmethod
    def of_tensor(tensor: Tensor) -> Device:
        """Return the device that holds a tensor.

        For a symbolic tensor, which has no memory, this is the CPU, so that no code waits.
        """
        if is_symbolic(tensor):
            return Device.from_torch(torch.device("cpu"))
        return next(
            (guest for guest in Device.guests if guest.holds(tensor)), None
        ) or Device.from_torch(tensor.device)

    @staticmethod
    def from_torch(device: torch.device | Device) -> Device:
        """Return the `Device` of a `torch.device`, the same object on each call."""
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
        """Return the stream on which operators run now."""
        return None

    def on(self, stream: Any) -> AbstractContextManager:
        """Return a context in which operators run on this stream."""
        return nullcontext()

    def side(self, name: str) -> Any:
        """Return the side stream with this name; the first call creates it."""
        return None

    def event(self) -> Any:
        """Record an event after all work so far on the current stream."""
        return None

    def wait(self, event: Any) -> None:
        """Make the current stream wait for the event; the host does not wait."""

    def finish(self, event: Any) -> None:
        """Make the host wait for the event."""

    def used(self, tensor: Tensor) -> Tensor:
        """Keep a tensor's memory from being reused before the current stream has finished with it.

        This is needed if the tensor was allocated on another stream.
        """
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory, which the device can read and write without the CPU."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def up(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device, on the current stream."""
        return tensor.to(self.device)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        """Copy between this device and the host, on the current stream.

        The host does not wait if its tensor is pinned.
        """
        target.copy_(source, non_blocking=True)

    def copy(self, target: Tensor, source: Tensor, name: str) -> Any:
        """Copy on a side stream, which first waits for the current stream's work so far.

        Returns:
            An event at the end of the copy.
        """
        work_so_far = self.event()
        with self.on(self.side(name)):
            self.wait(work_so_far)
            self.transfer(target, source)
            return self.event()


class Cuda(Device):
    """A GPU: each of its streams runs its work in order, while the host continues."""

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
        # Streams are reused, because the allocator has a separate memory pool for each.
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
