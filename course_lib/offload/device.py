"""All that is asked of a device: streams, events, pinned memory, copies. Whatever has these methods
can be one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from course_lib._torch import is_symbolic


class Device:
    """A CPU: its memory is the host's, and a copy is complete when the call returns."""

    apart = False  # whether its memory is another than the host's
    # how many copies of activations are under way in one direction, unless the user says so
    ahead = 1
    guests: ClassVar[list[Device]] = []  # devices whose tensors look like those of a CPU

    @staticmethod
    def of(tensor: Tensor) -> Device:
        """The device that holds a tensor. Symbolic tensors are held by none, so nothing need be
        waited for."""
        if is_symbolic(tensor):
            return Device.at(torch.device("cpu"))
        return next((guest for guest in Device.guests if guest.holds(tensor)), None) or Device.at(
            tensor.device
        )

    @staticmethod
    def at(device: torch.device | Device) -> Device:
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
        """The stream on which operators run now."""
        return None

    def on(self, stream: Any) -> AbstractContextManager:
        """Run operators on this stream inside the block."""
        return nullcontext()

    def side(self, name: str) -> Any:
        """A stream beside the current one, the same for each call."""
        return None

    def event(self) -> Any:
        """A mark behind all that the current stream was given so far."""
        return None

    def wait(self, event: Any) -> None:
        """The current stream goes on after the event; the host does not wait."""

    def finish(self, event: Any) -> None:
        """The host goes on after the event."""

    def used(self, tensor: Tensor) -> Tensor:
        """The current stream uses a tensor that was made on another one: its memory is not given
        away before."""
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from and to by itself."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def up(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on this device; the current stream copies it."""
        return tensor.to(self.device)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        """The current stream copies between this device and the host; the host does not wait if its
        side is pinned."""
        target.copy_(source, non_blocking=True)

    def copy(self, target: Tensor, source: Tensor, name: str) -> Any:
        """Copy on a side stream, after what the current one was given so far; the event is the
        copy's end."""
        now = self.event()
        with self.on(self.side(name)):
            self.wait(now)
            self.transfer(target, source)
            return self.event()


class Cuda(Device):
    """A GPU: it works through its streams, each in order, while the host goes on."""

    apart = True
    ahead = 2

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._sides: dict[str, torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def side(self, name: str) -> torch.cuda.Stream:
        # a new one each time would each get memory of its own from the allocator
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
        # PyTorch keeps pinned memory for use again, and gives none away that a copy has not left
        # yet.
        # also where another one is the default
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def up(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


_devices: dict[torch.device, Device] = {}
