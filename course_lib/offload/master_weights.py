"""Master weights: what an optimizer steps in place of a parameter, with its state.

`MasterWeights` keeps both with the parameter. Two others keep them one tier down: `HostState`
(`state_host.py`), where the CPU updates them, and `FileState` (`state_file.py`), from which they
are paged into memory. Each is a `MasterWeights` that says otherwise

- how all that are due are updated (`step`), and what must be there before (`reserve`);
- what the base optimizer steps (`make_weights`, `adopted`);
- how values and gradients get to the weights and back (`values`, `gradient`, `write_values`);
- how the state is asked for and set (`has_state`, `state`, `load_state`, `held_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from course_lib._torch import is_symbolic

from .device import Device
from .stores import DiskStore, Store, SymbolicStore

Master = TypeVar("Master", bound="MasterWeights")


@dataclass
class StateOptions:
    """Options that all the state of an optimizer has in common.

    Attributes:
        overlap: copy while other parameters are updated.
        page_bytes: of weights and state that are updated at once.
        names: of the tensors as large as a parameter that the base optimizer keeps for it.
        store: the file for state of CPU parameters; made when it is first asked for.
    """

    overlap: bool
    page_bytes: int
    names: Sequence[str]
    store: Store | None = None

    def open_store(self, parameters: Iterable[Tensor]) -> Store:
        if self.store is None:
            self.store = SymbolicStore() if is_symbolic(*parameters) else DiskStore()
        return self.store


class MasterWeights:
    """The weights that the base optimizer steps for one parameter: the parameter itself, or a copy
    in fp32; and their state.

    Attributes:
        p: the parameter.
        dtype: of the weights and of what is as large as they are in their state.
        weights: what the base optimizer steps.
        states: the state of the base optimizer, by weights.
        version: where the parameter's values were, and how often PyTorch had counted a change of
            them, when the weights were last the same; None where comparing the values costs no
            wait, and so is done instead.
    """

    def __init__(self, p: nn.Parameter, options: StateOptions):
        self.p, self.options = p, options
        self.device = Device.of(p)
        self.dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
        self.weights = self.make_weights()
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.record_version()

    @property
    def has_copy(self) -> bool:
        """Whether the weights are a copy, and not the parameter itself."""
        return self.weights is not self.p

    def make_weights(self) -> nn.Parameter:
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(self.p.detach().to(self.dtype, copy=True))

    def adopted(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """The base optimizer knows the weights now, and keeps their state in `states`."""
        self.states = states

    def nbytes(self) -> int:
        """Bytes of a page that it takes."""
        return self.dtype.itemsize * self.p.numel()

    # ---- a step of all that are due

    @classmethod
    def reserve(cls, masters: Sequence[Self], options: StateOptions) -> None:
        """Take what room these will need, before anything changes."""

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Let the base optimizer `update` these, a list of them at a time.

        Gradients of copies in fp32 are copies too, which for all at once would take as much as the
        weights do: so those go a page at a time.
        """
        update([master for master in masters if not master.has_copy])
        for page in pages([master for master in masters if master.has_copy], options.page_bytes):
            update(page)

    # ---- around the base optimizer's update

    def load_grad(self) -> None:
        """Hand, before the update, the gradient to the weights, and values that the parameter was
        given from outside."""
        if self.has_copy:
            self.load_values()
            self.weights.grad = self.gradient().to(self.dtype)

    def load_values(self) -> None:
        if self.device.apart and self.version == self.current_version():
            return  # to look would make the device wait
        now = self.values()
        rounded = self.weights.to(now.dtype)
        if not is_symbolic(now) and not torch.equal(rounded, now):
            self.weights.copy_(torch.where(rounded == now, self.weights, now.to(self.dtype)))

    def write_back(self) -> None:
        """Write, after the update, the weights to the parameter, rounded."""
        if self.has_copy and self.weights.grad is not None:
            self.weights.grad = None
            self.write_values()
            self.record_version()

    def record_version(self) -> None:
        """Remember that parameter and weights are the same now."""
        self.version = self.current_version() if self.device.apart else None

    def current_version(self) -> tuple[int, int]:
        return self.p.data_ptr(), self.p._version

    def values(self) -> Tensor:
        """The parameter's values, where the weights are."""
        return self.p.detach()

    def gradient(self) -> Tensor | None:
        """The parameter's gradient, where the weights are."""
        return self.p.grad

    def write_values(self) -> None:
        self.p.copy_(self.weights)

    # ---- the state as the base optimizer would hold it, with "master" for weights that the
    # parameter does not hold

    def has_state(self) -> bool:
        if self.states.get(self.weights):
            return True
        return self.p.dtype != self.dtype and not torch.equal(
            self.weights, self.values().to(self.dtype)
        )

    def state(self) -> dict[str, Any]:
        """The state itself where the parameter holds the weights, else a copy of the dict."""
        state = self.states.get(self.weights, {})
        if self.p.dtype == self.dtype:
            return state
        return {**state, "master": self.weights.detach().clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a copy of a state; {} for none."""
        state = dict(state)
        self.load_weights(state.pop("master", self.p.detach()))
        self.states.pop(self.weights, None)
        if state:
            self.states[self.weights] = {name: self._copied(value) for name, value in state.items()}

    def load_weights(self, values: Tensor) -> None:
        if self.has_copy:
            self.weights.copy_(values)
            self.record_version()

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self.dtype if is_large(value) and value.is_floating_point() else value.dtype
        return value.to(self.weights.device if is_large(value) else value.device, dtype, copy=True)

    def held_tensors(self) -> Iterator[Tensor]:
        """Tensors that are where the parameter is."""
        if self.has_copy:
            yield self.weights
        yield from (
            value
            for value in self.states.get(self.weights, {}).values()
            if isinstance(value, Tensor)
        )


def is_large(value: Any) -> bool:
    """Whether a piece of state moves: a tensor with more than the single number that a step count
    is."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def pages(masters: Sequence[Master], most: int) -> list[list[Master]]:
    """Masters in their order, in lists of `most` bytes, or of one that is larger."""
    found: list[list[Master]] = []
    room = 0
    for master in masters:
        if not found or room + master.nbytes() > most:
            found.append([])
            room = 0
        found[-1].append(master)
        room += master.nbytes()
    return found
