"""Where one parameter's optimizer state is: beside the parameter, in a file, or in host memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._torch import is_symbolic

from .device import Device
from .stores import Room, Store


class Above:
    """The state is where the parameter is. `base` steps the master: the parameter itself, or an fp32 copy of it.

    Attributes:
        states: the state of `base`, by master.
    """

    def __init__(self, p: nn.Parameter):
        self.p, self.device = p, Device.of(p)
        self.dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
        self.master = self.made()
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.stamp()

    def made(self) -> nn.Parameter:
        return self.p if self.p.dtype == self.dtype else nn.Parameter(self.p.detach().to(self.dtype, copy=True))

    def stamp(self) -> None:
        """Remember which values the parameter has, as far as PyTorch counts: looking would make a device wait."""
        self.seen = (self.p.data_ptr(), self.p._version) if self.device.apart else None

    def take(self) -> None:
        """Before `base` steps: give the master its gradient, and values that the parameter was given from outside."""
        if self.master is not self.p:
            self.take_values()
            self.master.grad = self.gradient().to(self.dtype)

    def take_values(self) -> None:
        if self.device.apart and self.seen == (self.p.data_ptr(), self.p._version):
            return
        now, master = self.values(), self.master
        rounded = master.to(now.dtype)
        if not is_symbolic(now) and not torch.equal(rounded, now):
            master.copy_(torch.where(rounded == now, master, now.to(self.dtype)))

    def values(self) -> Tensor:
        """The parameter's, where the master is."""
        return self.p.detach()

    def gradient(self) -> Tensor:
        return self.p.grad

    def give(self) -> None:
        """After `base` has stepped: the parameter becomes the master, rounded."""
        if self.master is not self.p and self.master.grad is not None:
            self.master.grad = None
            self.give_values()
            self.stamp()

    def give_values(self) -> None:
        self.p.copy_(self.master)

    def master_bytes(self) -> int:
        return self.dtype.itemsize * self.p.numel()

    # ---- the state as `base` would hold it, and "master" where the parameter is rounded

    def has_state(self) -> bool:
        return bool(self.states.get(self.master)) or self.is_rounded()

    def is_rounded(self) -> bool:
        """Whether the master holds what the parameter does not."""
        return self.p.dtype != self.dtype and not torch.equal(self.master, self.values().to(self.dtype))

    def state(self) -> dict[str, Any]:
        """The state itself if there are no masters, else a copy of the dict."""
        found = self.states.get(self.master, {})
        return found if self.p.dtype == self.dtype else {**found, "master": self.master.detach().clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Take a copy of a state; {} for none."""
        state = dict(state)
        self.take_master(state.pop("master", self.values()))
        self.states.pop(self.master, None)
        if state:
            self.states[self.master] = {name: self._placed(value) for name, value in state.items()}

    def take_master(self, value: Tensor) -> None:
        if self.master is not self.p:
            self.master.copy_(value)
            self.stamp()

    def _placed(self, value: Any) -> Any:
        if not is_large(value):
            return copy.copy(value) if not isinstance(value, Tensor) else value.clone()
        return value.to(self.master.device, self.dtype if value.is_floating_point() else value.dtype, copy=True)

    def held(self) -> Iterator[Tensor]:
        """Tensors that are where the parameter is."""
        if self.master is not self.p:
            yield self.master
        yield from (value for value in self.states.get(self.master, {}).values() if isinstance(value, Tensor))


class OnHost(Above):
    """The state is in host memory, as a pinned copy of the parameter is, and the CPU updates it there.

    Gradients go down in the step, not in backward: what clips, unscales or sums them up between processes may change
    them in ways that PyTorch does not count.
    """

    def made(self) -> nn.Parameter:
        self.coming: tuple | None = None  # (gradient on the host, its copy's event)
        self.going = None  # event of the parameter's copy up
        return nn.Parameter(self.device.pinned(self.p.shape, self.dtype).copy_(self.p.detach()))

    def send(self) -> None:
        """Start copying the gradient down."""
        host = self.device.pinned(self.p.grad.shape, self.p.grad.dtype)
        self.coming = host, self.device.copy(host, self.p.grad.detach(), "gradients")

    def take(self) -> None:
        self.settle()
        super().take()

    def gradient(self) -> Tensor:
        if self.coming is None:
            self.send()
        (gradient, event), self.coming = self.coming, None
        self.device.finish(event)
        return gradient

    def values(self) -> Tensor:
        return self.device.pinned(self.p.shape, self.p.dtype).copy_(self.p.detach())

    def give_values(self) -> None:
        source = self.master.detach()
        if self.p.dtype != self.dtype:  # rounded here, so that fewer bytes go up
            source = self.device.pinned(self.p.shape, self.p.dtype).copy_(source)
        self.going = self.device.copy(self.p.detach(), source, "parameters")
        self.device.wait(self.going)

    def settle(self) -> None:
        """What is on its way up must not change under it."""
        if self.going is not None:
            self.device.finish(self.going)
            self.going = None

    def take_master(self, value: Tensor) -> None:
        self.settle()
        super().take_master(value)

    def held(self) -> Iterator[Tensor]:
        return iter(())


class Paged(Above):
    """The state is in a store, in rooms of its own, and comes into memory for the step."""

    def made(self) -> nn.Parameter:
        self.rooms: dict[str, Room] = {}  # by name
        self.spare: list[Room] | None = None  # reserved for what has no name yet
        self.below: set[str] = set()  # what is in its room, and not in memory
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(torch.empty(self.p.shape, dtype=self.dtype))  # its shape, for `base` to see

    def begin(self) -> None:
        """`base` has seen the master: until the first step it is the parameter."""
        if self.master is not self.p:
            self.master.data = torch.empty(0, dtype=self.dtype)

    def reserve(self, store: Store, tensors: int, into: list[Room]) -> None:
        """Room for so many tensors as large as the parameter, and for the master."""
        self.spare = []
        for _ in range(tensors + (self.master is not self.p) if self.p.numel() else 0):
            into.append(store.reserve(self.master_bytes()))
            self.spare.append(into[-1])

    def state_bytes(self) -> int:
        return sum(room.nbytes for room in (*self.rooms.values(), *(self.spare or ())))

    def take_values(self) -> None:
        if self.master.shape != self.p.shape:
            self.master.data = self.p.detach().to(self.dtype, copy=True)
        else:
            super().take_values()

    def page_in(self) -> Callable[[], None]:
        """Start reading; the function returned puts the state where `base` looks for it."""
        coming = {name: self.rooms[name].get() for name in self.below}

        def finish() -> None:
            for name, ready in coming.items():
                if name == MASTER:
                    self.master.data = ready()
                else:
                    self.states[self.master][name] = ready()
            self.below.clear()

        return finish

    def page_out(self, store: Store, rooms: list[Room]) -> Callable[[], list[OSError]]:
        """Start writing; the function returned lets go of the memory once it is written, and says what was not."""
        state, going, failed = self.states.get(self.master, {}), {}, []
        tensors = {name: value for name, value in state.items() if is_large(value)}
        if self.master is not self.p and self.master.numel():
            tensors[MASTER] = self.master.data
        for name, tensor in tensors.items():
            tensor = whole_storage(tensor)
            try:
                going[name] = self._room(name, tensor.nbytes, store, rooms).put(tensor)
            except OSError as error:
                failed.append(error)

        def finish() -> list[OSError]:
            for name, room in going.items():
                try:
                    room.wait()
                except OSError as error:  # what was not written stays in memory, and goes down another time
                    failed.append(error)
                    continue
                self.below.add(name)
                if name == MASTER:
                    self.master.data = torch.empty(0, dtype=self.dtype)
                else:
                    del state[name]
            return failed

        return finish

    def _room(self, name: str, nbytes: int, store: Store, rooms: list[Room]) -> Room:
        if name not in self.rooms or self.rooms[name].nbytes != nbytes:
            found = next((room for room in self.spare if room.nbytes == nbytes), None)
            if found is not None:
                self.spare.remove(found)
            else:  # a state of another shape than the parameter
                found = store.reserve(nbytes)
                rooms.append(found)
            self.rooms[name] = found
        return self.rooms[name]

    def has_state(self) -> bool:
        return bool(self.below or self.states.get(self.master))

    def state(self) -> dict[str, Any]:
        """A copy, with what is below paged in."""
        state = dict(self.states.get(self.master, {}))
        if self.master is not self.p and self.master.numel():
            state[MASTER] = self.master.data
        found = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        coming = {name: self.rooms[name].get() for name in self.below}
        found |= {name: ready() for name, ready in coming.items()}
        return {"master" if name == MASTER else name: value for name, value in found.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.below.clear()
        super().load(state)
        if not state:
            self.begin()

    def take_master(self, value: Tensor) -> None:
        if self.master is not self.p:
            self.master.data = value.to(self.dtype, copy=True)


MASTER = "the master weights"  # among the names of the state, where no optimizer uses it


def is_large(value: Any) -> bool:
    """Whether a piece of state moves: a tensor with more than the single number that a step count is."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def whole_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it is a part of its storage."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor
