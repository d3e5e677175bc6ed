"""An optimizer's state in a file, paged through memory; for parameters on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from .master_weights import MasterWeights, StateOptions, is_large, pages
from .stores import Room, StoreFull

WEIGHTS = "the master weights"  # among the names of the state, where no optimizer uses it


class FileState(MasterWeights):
    """Weights and state that have rooms in a store and come into memory for a step. Until the first
    one, the weights are the parameter's values.

    Attributes:
        rooms: by the name of what goes there.
        below: names of what is there, and not in memory.
    """

    def make_weights(self) -> nn.Parameter:
        self.rooms: dict[str, Room] = {}
        self.below: set[str] = set()
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(torch.empty(self.p.shape, dtype=self.dtype))

    def adopted(self, states: dict[Tensor, dict[str, Any]]) -> None:
        super().adopted(states)
        self._empty_weights()  # the base optimizer has seen their shape

    def _empty_weights(self) -> None:
        if self.has_copy:
            self.weights.data = torch.empty(0, dtype=self.dtype)

    def nbytes(self) -> int:
        return sum(room.nbytes for room in self.rooms.values())

    # ---- a step

    @classmethod
    def reserve(cls, masters: Sequence[Self], options: StateOptions) -> None:
        if not masters:
            return
        store = options.open_store(master.p for master in masters)
        store.check_open()
        new = [master for master in masters if not master.rooms and master.p.numel()]
        try:
            for master in new:
                nbytes = master.dtype.itemsize * master.p.numel()
                for name in (*options.names, WEIGHTS) if master.has_copy else options.names:
                    master.rooms[name] = store.reserve(nbytes)
        except StoreFull:
            for master in new:
                master.rooms.clear()
            raise

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Page by page: one is read and one written while another is updated."""
        failed, coming, going = [], [], []
        todo = pages(masters, options.page_bytes)
        try:
            for page, following in zip(todo, [*todo[1:], []], strict=False):
                for finish in coming or [master.page_in() for master in page]:
                    finish()
                coming = [master.page_in() for master in following] if options.overlap else []
                try:
                    update(page)
                finally:  # also where it was interrupted: what is in memory is the state now
                    failed += written(going)
                    going = [master.page_out() for master in page]
                if not options.overlap:
                    failed, going = failed + written(going), []
        finally:
            failed += written(going)
        if failed:
            raise failed[0]  # at the end: every parameter has had its step, and no state is lost

    def load_values(self) -> None:
        if self.weights.shape != self.p.shape:
            self.weights.data = self.p.detach().to(self.dtype, copy=True)
        else:
            super().load_values()

    def page_in(self) -> Callable[[], None]:
        """Start reading; the function returned puts everything where the base optimizer looks for
        it."""
        coming = {name: self.rooms[name].get() for name in self.below}

        def finish() -> None:
            for name, ready in coming.items():
                if name == WEIGHTS:
                    self.weights.data = ready()
                else:
                    self.states[self.weights][name] = ready()
            self.below.clear()

        return finish

    def page_out(self) -> Callable[[], list[OSError]]:
        """Start writing; the function returned lets go of the memory once it is written, and says
        what was not.

        That stays in memory, and goes down another time.
        """
        going, failed = {}, []
        for name, tensor in self._in_memory().items():
            try:
                going[name] = self._room(name, tensor.nbytes).put(_whole(tensor))
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
                    self._empty_weights()
                else:
                    del self.states[self.weights][name]
            return failed

        return finish

    def _in_memory(self) -> dict[str, Tensor]:
        state = self.states.get(self.weights, {})
        found = {name: value for name, value in state.items() if is_large(value)}
        if self.has_copy and self.weights.shape == self.p.shape:
            found[WEIGHTS] = self.weights.data
        return found

    def _room(self, name: str, nbytes: int) -> Room:
        # a state of another shape than the parameter
        if name not in self.rooms or self.rooms[name].nbytes != nbytes:
            self.rooms[name] = self.options.open_store([self.p]).reserve(nbytes)
        return self.rooms[name]

    # ---- the state

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

    def load_state(self, state: dict[str, Any]) -> None:
        self.below.clear()
        super().load_state(state)
        if not state:
            self._empty_weights()
            return
        self.reserve([self], self.options)
        for error in written([self.page_out()]):
            raise error

    def load_weights(self, values: Tensor) -> None:
        if self.has_copy:
            self.weights.data = values.to(self.dtype, copy=True)


def written(going: Iterable[Callable[[], list[OSError]]]) -> list[OSError]:
    """Wait for these pages; the errors of those that could not be written."""
    return [error for finish in going for error in finish()]


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it is a part of its storage."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor
