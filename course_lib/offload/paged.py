"""State in a file, paged through memory in chunks; for parameters on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .masters import Master, is_large
from .stores import Room, Store, StoreFull

WEIGHTS = "the master weights"  # among the names of the state, where no optimizer uses it


class Paged(Master):
    """Weights and state have rooms below and come into memory for a step. Until the first one, the
    weights are the parameter's values.
    """

    def made(self) -> nn.Parameter:
        self.rooms: dict[str, Room] = {}  # by the name of what goes there
        self.below: set[str] = set()  # what is there, and not in memory
        return (
            self.p
            if self.p.dtype == self.dtype
            else nn.Parameter(torch.empty(self.p.shape, dtype=self.dtype))
        )

    def begin(self) -> None:
        """`base` has seen the shape of the weights."""
        if self.weights is not self.p:
            self.weights.data = torch.empty(0, dtype=self.dtype)

    def take_values(self) -> None:
        if self.weights.shape != self.p.shape:
            self.weights.data = self.p.detach().to(self.dtype, copy=True)
        else:
            super().take_values()

    def nbytes(self) -> int:
        return sum(room.nbytes for room in self.rooms.values())

    def page_in(self) -> Callable[[], None]:
        """Start reading; the function returned puts everything where `base` looks for it."""
        coming = {name: self.rooms[name].get() for name in self.below}

        def finish() -> None:
            for name, ready in coming.items():
                if name == WEIGHTS:
                    self.weights.data = ready()
                else:
                    self.states[self.weights][name] = ready()
            self.below.clear()

        return finish

    def page_out(self, store: Store) -> Callable[[], list[OSError]]:
        """Start writing; the function returned lets go of the memory once it is written, and says
        what was not.

        That stays in memory, and goes down another time.
        """
        going, failed = {}, []
        for name, tensor in self._in_memory().items():
            try:
                going[name] = self._room(name, tensor.nbytes, store).put(_whole(tensor))
            except OSError as error:
                failed.append(error)

        def finish() -> list[OSError]:
            for name, room in going.items():
                try:
                    room.wait()
                except OSError as error:
                    failed.append(error)
                    continue
                self.below.add(name)
                if name == WEIGHTS:
                    self.begin()
                else:
                    del self.states[self.weights][name]
            return failed

        return finish

    def _in_memory(self) -> dict[str, Tensor]:
        found = {
            name: value
            for name, value in self.states.get(self.weights, {}).items()
            if is_large(value)
        }
        if self.weights is not self.p and self.weights.shape == self.p.shape:
            found[WEIGHTS] = self.weights.data
        return found

    def _room(self, name: str, nbytes: int, store: Store) -> Room:
        # a state of another shape than the parameter
        if name not in self.rooms or self.rooms[name].nbytes != nbytes:
            self.rooms[name] = store.reserve(nbytes)
        return self.rooms[name]

    def has_state(self) -> bool:
        return bool(self.below or self.states.get(self.weights))

    def state(self) -> dict[str, Any]:
        """A copy, with what is below paged in."""
        coming = {name: self.rooms[name].get() for name in self.below}
        state = {**self.states.get(self.weights, {}), **self._in_memory()}
        found = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        found |= {name: ready() for name, ready in coming.items()}
        return {"master" if name == WEIGHTS else name: value for name, value in found.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.below.clear()
        super().load(state)
        if not state:
            self.begin()

    def load_weights(self, values: Tensor) -> None:
        if self.weights is not self.p:
            self.weights.data = values.to(self.dtype, copy=True)


def reserve(masters: list[Paged], names: Iterable[str], store: Store) -> None:
    """Room for tensors of these names, as large as the parameter, before anything changes."""
    store.check_open()
    new = [master for master in masters if not master.rooms and master.p.numel()]
    try:
        for master in new:
            nbytes = master.dtype.itemsize * master.p.numel()
            for name in (*names, WEIGHTS) if master.weights is not master.p else names:
                master.rooms[name] = store.reserve(nbytes)
    except StoreFull:
        for master in new:
            master.rooms.clear()
        raise


def update_paged(
    masters: list[list[Paged]], update: Callable[[list], None], store: Store, overlap: bool
) -> None:
    """Chunk by chunk: one is read and one written while another is updated."""
    failed, coming, going = [], [], []
    try:
        for chunk, following in zip(masters, [*masters[1:], []], strict=False):
            for finish in coming or [master.page_in() for master in chunk]:
                finish()
            coming = [master.page_in() for master in following] if overlap else []
            try:
                update(chunk)
            finally:  # also where it was interrupted: what is in memory is the state now
                failed += written(going)
                going = [master.page_out(store) for master in chunk]
            if not overlap:
                failed, going = failed + written(going), []
    finally:
        failed += written(going)
    if failed:
        raise failed[0]  # at the end: every parameter has had its step, and no state is lost


def written(going: list[Callable[[], list[OSError]]]) -> list[OSError]:
    """Wait for these pages; the errors of those that could not be written."""
    return [error for finish in going for error in finish()]


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it is a part of its storage."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor
