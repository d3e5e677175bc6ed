"""Optimizer state in a file, for parameters on a CPU; a step reads and writes it page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn

from course_lib._torch.symbolic import is_symbolic
from course_lib._torch.tensors import holders_of

from .master_weights import MasterWeights, StateOptions, is_large, pages
from .stores import Reservation, StoreFull

# Key of the master weights in dicts of state tensors. No optimizer has a state of this name.
WEIGHTS = "the master weights"
# Number of references to a storage that no tensor uses, as `holders_of` counts them.
_HOLDERS_WITHOUT_TENSOR = holders_of(UntypedStorage(0))


class FileState(MasterWeights):
    """Master weights and optimizer state of one parameter, kept in a store (a file) between steps.

    Weights and state are in memory only during an optimizer step. Before the first step, the store
    has no data of the parameter, and the master weights are read from the parameter.

    Attributes:
        reservations: Map from the name of a state tensor, such as "exp_avg", to its reserved space
            in the store. The master weights have the name `WEIGHTS`.
        stored: Names of the state tensors that are in the store and not in memory.
    """

    def make_weights(self) -> nn.Parameter:
        self.reservations: dict[str, Reservation] = {}
        self.stored: set[str] = set()
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(torch.empty(self.p.shape, dtype=self.dtype))

    def attach_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        super().attach_states(states)
        # The base optimizer has checked the weights' shape, so their memory can be released now.
        self._empty_weights()

    def _empty_weights(self) -> None:
        if self.has_copy:
            self.weights.data = torch.empty(0, dtype=self.dtype)

    def nbytes(self) -> int:
        return sum(reservation.nbytes for reservation in self.reservations.values())

    # ---- a step

    @classmethod
    def reserve(cls, masters: Sequence[Self], options: StateOptions) -> None:
        if not masters:
            return
        store = options.open_store(master.p for master in masters)
        store.check_open()
        new = [master for master in masters if not master.reservations and master.p.numel()]
        try:
            for master in new:
                nbytes = master.dtype.itemsize * master.p.numel()
                for name in (
                    (*options.state_names, WEIGHTS) if master.has_copy else options.state_names
                ):
                    master.reservations[name] = store.reserve(nbytes)
        except StoreFull:
            for master in new:
                master.reservations.clear()
            raise

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Update the parameters one page after another.

        A page is a group of parameters whose state in the file has a limited size. With
        `options.overlap`, while one page is updated, the next one is read and the previous one is
        written. The memory of a page that has been written is used again for the next read.
        Otherwise, the operating system would have to map and clear new memory for each page.
        Mapping and clearing took 15 to 27% of a step of AdamW on 12.6 million parameters, measured
        on two cores.

        Args:
            masters: Master weights of the parameters that have gradients.
            update: Function that updates a list of master weights with the base optimizer, such as
                AdamW.
            options: The optimizer's options.

        Raises:
            OSError: Some state could not be written. Even so, all parameters have been updated, and
                the state that could not be written is kept in memory.
        """
        errors, reads, writes, spare = [], [], [], []
        page_list = pages(masters, options.page_bytes)
        try:
            for page, following in zip(page_list, [*page_list[1:], []], strict=False):
                for finish in reads or start_reads(page, spare):
                    finish()
                reads = start_reads(following, spare) if options.overlap else []
                try:
                    update(page)
                finally:  # runs also after an interruption, because the state in memory has changed
                    errors += finish_writes(writes, spare)
                    writes = [master.page_out() for master in page]
                if not options.overlap:
                    errors, writes = errors + finish_writes(writes, spare), []
        finally:
            errors += finish_writes(writes, [])
        if errors:
            raise errors[0]  # raised last, so that every parameter is updated and no state is lost

    def load_values(self) -> None:
        if self.weights.shape != self.p.shape:
            self.weights.data = self.p.detach().to(self.dtype, copy=True)
        else:
            super().load_values()

    def page_in(self, spare: Mapping[int, list[UntypedStorage]]) -> Callable[[], None]:
        """Start reading this parameter's state tensors from the store.

        Args:
            spare: Map from a number of bytes to unused storages of that size. State tensors of the
                same size are read into these storages, which are then removed from the map's lists.
                Other state tensors get new memory.

        Returns:
            A function that waits for the reads and gives the tensors to the base optimizer.
        """
        reads = {name: self.reservations[name].get(spare) for name in self.stored}

        def finish() -> None:
            for name, ready in reads.items():
                if name == WEIGHTS:
                    self.weights.data = ready()
                else:
                    self.states[self.weights][name] = ready()
            self.stored.clear()
            reads.clear()  # the caller may keep this function, but it must not keep the tensors

        return finish

    def page_out(self) -> Callable[[list[UntypedStorage]], list[OSError]]:
        """Start writing this parameter's state tensors to the store.

        Tensors that could not be written stay in memory and are written after a later step.

        Returns:
            A function that waits for the writes, removes the tensors from memory and returns the
            errors of the writes. Its argument is a list, to which it appends the storages that have
            become unused.
        """
        writes, errors = {}, []
        for name, tensor in self._tensors_in_memory().items():
            try:
                writes[name] = self._reservation_for(name, tensor.nbytes).put(
                    _with_own_storage(tensor)
                )
            except OSError as error:
                errors.append(error)

        def finish(spare: list[UntypedStorage]) -> list[OSError]:
            for name, reservation in writes.items():
                try:
                    reservation.wait()
                except OSError as error:
                    errors.append(error)
                    continue
                self.stored.add(name)
                storage = self._remove_from_memory(name)
                if not is_symbolic(self.p) and holders_of(storage) == _HOLDERS_WITHOUT_TENSOR:
                    spare.append(storage)
            return errors

        return finish

    def _remove_from_memory(self, name: str) -> UntypedStorage:
        if name == WEIGHTS:
            storage = self.weights.untyped_storage()
            self._empty_weights()
            return storage
        return self.states[self.weights].pop(name).untyped_storage()

    def _tensors_in_memory(self) -> dict[str, Tensor]:
        state = self.states.get(self.weights, {})
        tensors = {name: value for name, value in state.items() if is_large(value)}
        if self.has_copy and self.weights.shape == self.p.shape:
            tensors[WEIGHTS] = self.weights.data
        return tensors

    def _reservation_for(self, name: str, nbytes: int) -> Reservation:
        """Return the reservation for a state tensor; reserve again if its size has changed."""
        # `reserve` assumes that a state tensor has the parameter's size, which may be wrong.
        if name not in self.reservations or self.reservations[name].nbytes != nbytes:
            self.reservations[name] = self.options.open_store([self.p]).reserve(nbytes)
        return self.reservations[name]

    # ---- reading and setting the state

    def has_state(self) -> bool:
        return bool(self.stored or self.states.get(self.weights))

    def state(self) -> dict[str, Any]:
        """Return a copy of the parameter's optimizer state, with the keys of the base optimizer.

        State tensors that are in the store are read from it. If the parameter is bf16 or fp16, the
        dict has the additional key "master", the fp32 master weights.
        """
        reads = {name: self.reservations[name].get() for name in self.stored}
        state = {**self.states.get(self.weights, {}), **self._tensors_in_memory()}
        copies = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        copies |= {name: ready() for name, ready in reads.items()}
        return {"master" if name == WEIGHTS else name: value for name, value in copies.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stored.clear()
        super().load_state(state)
        if not state:
            self._empty_weights()
            return
        self.reserve([self], self.options)
        for error in finish_writes([self.page_out()], []):
            raise error

    def load_weights(self, values: Tensor) -> None:
        if self.has_copy:
            self.weights.data = values.to(self.dtype, copy=True)


def start_reads(
    masters: Sequence[FileState], spare: list[UntypedStorage]
) -> list[Callable[[], None]]:
    """Start reading the optimizer state of a page (parameters that are updated together).

    Args:
        masters: Master weights of the page.
        spare: Unused storages. State is read into storages of the right size. All other storages
            are released before the reads start, so that a step uses the memory of at most three
            pages. The list is empty afterwards.

    Returns:
        One function per element of `masters`. It waits for that parameter's reads and gives the
        tensors to the base optimizer.
    """
    needed = Counter(
        master.reservations[name].nbytes for master in masters for name in master.stored
    )
    fitting = {
        nbytes: [storage for storage in spare if storage.nbytes() == nbytes][:count]
        for nbytes, count in needed.items()
    }
    spare.clear()
    return [master.page_in(fitting) for master in masters]


def finish_writes(
    writes: Iterable[Callable[[list[UntypedStorage]], list[OSError]]],
    spare: list[UntypedStorage],
) -> list[OSError]:
    """Wait for the writes of a page (parameters that are updated together); return their errors.

    Args:
        writes: The functions that `FileState.page_out` returned for the page's parameters.
        spare: List to which the storages that have become unused are appended.
    """
    return [error for finish in writes for error in finish(spare)]


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor if it fills its storage, otherwise a contiguous copy that fills its own."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor
