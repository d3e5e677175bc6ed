"""Master weights: the weights that an optimizer updates instead of a parameter, and their state.

`MasterWeights` keeps both on the parameter's device. Two subclasses keep them on the lower tier:
`HostState` (`state_host.py`) in host memory, where the CPU updates them, and `FileState`
(`state_file.py`) in a file, from which they are read page by page. A subclass can override

- how a step updates all parameters that have gradients (`step`), and which space in the store it
  reserves before (`reserve`);
- which tensor the base optimizer updates (`make_weights`, `attach_states`);
- how values and gradients reach the weights, and how the result is written back (`values`,
  `gradient`, `write_values`);
- how the state is read and set (`has_state`, `state`, `load_state`, `held_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from course_lib._torch.symbolic import is_symbolic

from .device import Device
from .stores import DiskStore, Store, SymbolicStore

Master = TypeVar("Master", bound="MasterWeights")


@dataclass
class StateOptions:
    """Options of an `OffloadedOptimizer` that all of its master weights share.

    Attributes:
        overlap: Whether copies overlap the update of other parameters.
        page_bytes: Bytes of weights and state that are updated at once.
        names: Names of the tensors that the base optimizer keeps for a parameter and that have its
            shape.
        store: The file for state of CPU parameters; None until it is first needed.
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
    """The weights that the base optimizer updates for one parameter, with their state.

    The weights are the parameter itself, or a copy of it in fp32.

    Attributes:
        p: The parameter.
        dtype: Data type of the weights and of state tensors of their shape.
        weights: The tensor that the base optimizer updates.
        states: The state of the base optimizer: weights -> their state.
        version: Address and version counter of the parameter when it was last equal to the weights.
            None on a CPU, where the values themselves are compared, because that needs no waiting.
    """

    def __init__(self, p: nn.Parameter, options: StateOptions):
        self.p, self.options = p, options
        self.device = Device.of_tensor(p)
        self.dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
        self.weights = self.make_weights()
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.record_version()

    @property
    def has_copy(self) -> bool:
        """Whether the weights are a copy of the parameter rather than the parameter itself."""
        return self.weights is not self.p

    def make_weights(self) -> nn.Parameter:
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(self.p.detach().to(self.dtype, copy=True))

    def attach_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Keep a reference to the base optimizer's state, now that it has received the weights."""
        self.states = states

    def nbytes(self) -> int:
        """Return the number of bytes with which this parameter counts toward `page_bytes`."""
        return self.dtype.itemsize * self.p.numel()

    # ---- one step of all parameters that have gradients

    @classmethod
    def reserve(cls, masters: Sequence[Self], options: StateOptions) -> None:
        """Reserve the space in the store that these master weights need, before any changes."""

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Call `update`, which runs the base optimizer, on one list of master weights at a time.

        Weights that are an fp32 copy also need an fp32 copy of the gradient. All these gradients
        together would take as much memory as the weights. The weights are therefore updated one
        page at a time.
        """
        update([master for master in masters if not master.has_copy])
        for page in pages([master for master in masters if master.has_copy], options.page_bytes):
            update(page)

    # ---- around the base optimizer's update

    def load_grad(self) -> None:
        """Before the update, copy the gradient and changed parameter values to the weights.

        Values have changed if code other than this optimizer has set the parameter.
        """
        if self.has_copy:
            self.load_values()
            self.weights.grad = self.gradient().to(self.dtype)

    def load_values(self) -> None:
        if self.device.has_own_memory and self.version == self.current_version():
            return  # comparing the values would make the host wait for the device
        values = self.values()
        rounded = self.weights.to(values.dtype)
        if not is_symbolic(values) and not torch.equal(rounded, values):
            self.weights.copy_(torch.where(rounded == values, self.weights, values.to(self.dtype)))

    def write_back(self) -> None:
        """After the update, write the rounded weights to the parameter."""
        if self.has_copy and self.weights.grad is not None:
            self.weights.grad = None
            self.write_values()
            self.record_version()

    def record_version(self) -> None:
        """Record that the parameter and the weights are equal now."""
        self.version = self.current_version() if self.device.has_own_memory else None

    def current_version(self) -> tuple[int, int]:
        return self.p.data_ptr(), self.p._version

    def values(self) -> Tensor:
        """Return the parameter's values, on the device of the weights."""
        return self.p.detach()

    def gradient(self) -> Tensor | None:
        """Return the parameter's gradient, on the device of the weights."""
        return self.p.grad

    def write_values(self) -> None:
        self.p.copy_(self.weights)

    # ---- the state as the base optimizer would have it, and the key "master" for weights whose
    # dtype differs from the parameter's

    def has_state(self) -> bool:
        if self.states.get(self.weights):
            return True
        return self.p.dtype != self.dtype and not torch.equal(
            self.weights, self.values().to(self.dtype)
        )

    def state(self) -> dict[str, Any]:
        """Return the state; for a low-precision parameter a new dict that also has "master"."""
        state = self.states.get(self.weights, {})
        if self.p.dtype == self.dtype:
            return state
        return {**state, "master": self.weights.detach().clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the state to a copy of `state`; an empty dict removes the current state."""
        state = dict(state)
        self.load_weights(state.pop("master", self.p.detach()))
        self.states.pop(self.weights, None)
        if state:
            self.states[self.weights] = {
                name: self._copy_of(value) for name, value in state.items()
            }

    def load_weights(self, values: Tensor) -> None:
        if self.has_copy:
            self.weights.copy_(values)
            self.record_version()

    def _copy_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self.dtype if is_large(value) and value.is_floating_point() else value.dtype
        return value.to(self.weights.device if is_large(value) else value.device, dtype, copy=True)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the weights and state tensors that are on the parameter's device."""
        if self.has_copy:
            yield self.weights
        yield from (
            value
            for value in self.states.get(self.weights, {}).values()
            if isinstance(value, Tensor)
        )


def is_large(value: Any) -> bool:
    """Return whether a value of the state can be offloaded: a tensor of more than one number.

    A step count, for example, is a single number and stays in memory.
    """
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def pages(masters: Sequence[Master], page_bytes: int) -> list[list[Master]]:
    """Split master weights, in order, into pages of at most `page_bytes` or of one parameter."""
    result: list[list[Master]] = []
    filled = 0
    for master in masters:
        if not result or filled + master.nbytes() > page_bytes:
            result.append([])
            filled = 0
        result[-1].append(master)
        filled += master.nbytes()
    return result
