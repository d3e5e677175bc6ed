"""Master weights, and where the weights and the optimizer state of a parameter are kept.

If a parameter has low precision, the optimizer updates an fp32 copy of it, the master weights.
`MasterWeights` keeps this copy and the optimizer state on the parameter's device. Two subclasses
keep the copy and the state on a lower tier. `HostState` (`state_host.py`) keeps them in host
memory, where the CPU updates them. `FileState` (`state_file.py`) keeps them in a file, and a step
reads them page by page. A subclass can override

- how a step updates all parameters that have gradients (`step`), and which bytes of the store it
  reserves before the update (`reserve`);
- which tensor the base optimizer, such as AdamW, updates (`make_weights`, `attach_states`);
- how parameter values and gradients are copied to the weights, and how the updated weights are
  written back to the parameter (`values`, `gradient`, `write_values`);
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
    """Options of an `OffloadedOptimizer`, shared by the `MasterWeights` of all parameters.

    Attributes:
        overlap: Whether copies overlap the update of other parameters.
        page_bytes: Largest size of a page in bytes. A page is a group of parameters that are
            updated together, with their optimizer state.
        state_names: Keys of the state tensors that have the shape of their parameter, such as
            "exp_avg" of AdamW.
        store: The store (a file, for example) for the state of CPU parameters; None until it is
            first needed.
    """

    overlap: bool
    page_bytes: int
    state_names: Sequence[str]
    store: Store | None = None

    def open_store(self, parameters: Iterable[Tensor]) -> Store:
        """Return the store for optimizer state. If there is none yet, create it.

        The new store is a `SymbolicStore` if the parameters are symbolic, otherwise a `DiskStore`.
        """
        if self.store is None:
            self.store = SymbolicStore() if is_symbolic(*parameters) else DiskStore()
        return self.store


class MasterWeights:
    """The tensor that the optimizer updates for one parameter, with its optimizer state.

    This tensor, called the weights, is the parameter itself, or an fp32 copy if the parameter is
    bf16 or fp16. The base optimizer, such as AdamW, computes the update. After each update, the
    fp32 copy, if there is one, is rounded and written to the parameter.

    Attributes:
        p: The parameter.
        dtype: Data type of the weights and of their state tensors.
        weights: The tensor that the base optimizer updates.
        states: The `state` of the base optimizer, a dict from each tensor that it updates to the
            state of that tensor.
        version: Address and version counter of the parameter when it was last equal to the weights.
            If one of the two differs later, other code has changed the parameter. None for a
            parameter on a CPU, where the parameter's values are compared instead.
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
        """Whether the optimizer updates a copy of the parameter instead of the parameter itself."""
        return self.weights is not self.p

    def make_weights(self) -> nn.Parameter:
        """Return the tensor that the optimizer updates.

        This is the parameter itself, or a copy of it if `dtype` is not the parameter's data type.
        """
        if self.p.dtype == self.dtype:
            return self.p
        return nn.Parameter(self.p.detach().to(self.dtype, copy=True))

    def attach_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Store a reference to the `state` dict of the base optimizer, such as AdamW.

        Call this after the master weights have been passed to the base optimizer.
        """
        self.states = states

    def nbytes(self) -> int:
        """Return the bytes that this parameter adds to its page.

        A page is a group of parameters that are updated together. Its size is limited.
        """
        return self.dtype.itemsize * self.p.numel()

    # ---- one step of all parameters that have gradients

    @classmethod
    def reserve(cls, masters: Sequence[Self], options: StateOptions) -> None:
        """Reserve the space that an optimizer step with these master weights needs in the store.

        The store is a file, for example. An optimizer calls this method before it changes anything,
        so that an error leaves the parameters unchanged. In the base class, no space is needed, so
        the method does nothing.
        """

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Run an optimizer step on the parameters that belong to the given master weights.

        Parameters without an fp32 copy are updated together. Parameters with an fp32 copy are
        updated one page after another; a page is a group of limited size. The update of an fp32
        copy also needs the gradient in fp32. Because of the pages, these fp32 gradients exist for
        only one page at a time.

        Args:
            masters: Master weights of the parameters that have gradients.
            update: Function that updates a list of master weights with the base optimizer, such as
                AdamW.
            options: The optimizer's options.
        """
        update([master for master in masters if not master.has_copy])
        for page in pages([master for master in masters if master.has_copy], options.page_bytes):
            update(page)

    # ---- around the base optimizer's update

    def load_grad(self) -> None:
        """Prepare an update: set the gradient of the master weights to the parameter's gradient.

        Elements of the parameter that other code has changed are also copied (see `load_values`).
        If the master weights are the parameter itself, nothing is copied.
        """
        if self.has_copy:
            self.load_values()
            self.weights.grad = self.gradient().to(self.dtype)

    def load_values(self) -> None:
        """Copy to the master weights those elements of the parameter that other code has changed.

        All other elements of the master weights keep their fp32 values.
        """
        if self.device.has_own_memory and self.version == self.current_version():
            return  # comparing the values would make the host wait for the device
        values = self.values()
        rounded = self.weights.to(values.dtype)
        if not is_symbolic(values) and not torch.equal(rounded, values):
            self.weights.copy_(torch.where(rounded == values, self.weights, values.to(self.dtype)))

    def write_back(self) -> None:
        """After an update, round the master weights and write them to the parameter.

        If the master weights are the parameter itself, nothing is written.
        """
        if self.has_copy and self.weights.grad is not None:
            self.weights.grad = None
            self.write_values()
            self.record_version()

    def record_version(self) -> None:
        """Record that the parameter and the master weights are equal now.

        The record shows later whether other code has changed the parameter.
        """
        self.version = self.current_version() if self.device.has_own_memory else None

    def current_version(self) -> tuple[int, int]:
        """Return the address and the version counter of the parameter."""
        return self.p.data_ptr(), self.p._version

    def values(self) -> Tensor:
        """Return the parameter, in its own dtype, on the device of the master weights."""
        return self.p.detach()

    def gradient(self) -> Tensor | None:
        """Return the parameter's gradient, on the device of the master weights.

        None if the parameter has no gradient.
        """
        return self.p.grad

    def write_values(self) -> None:
        """Copy the master weights to the parameter, rounded to the parameter's data type."""
        self.p.copy_(self.weights)

    # ---- reading and setting the state: the dict of the base optimizer. If the weights have a
    # dtype that differs from the parameter's, the dict has the additional key "master".

    def has_state(self) -> bool:
        """Return whether there is optimizer state, or an fp32 copy unequal to the parameter."""
        if self.states.get(self.weights):
            return True
        return self.p.dtype != self.dtype and not torch.equal(
            self.weights, self.values().to(self.dtype)
        )

    def state(self) -> dict[str, Any]:
        """Return the parameter's optimizer state, as a dict with the keys of the base optimizer.

        If the parameter is bf16 or fp16, this is a new dict with the additional key "master", a
        copy of the fp32 master weights.
        """
        state = self.states.get(self.weights, {})
        if self.p.dtype == self.dtype:
            return state
        return {**state, "master": self.weights.detach().clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the parameter's optimizer state to a copy of `state`.

        Args:
            state: State with the keys that the method `state` returns. An empty dict removes the
                current state, and sets the master weights to the parameter's values.
        """
        state = dict(state)
        self.load_weights(state.pop("master", self.p.detach()))
        self.states.pop(self.weights, None)
        if state:
            self.states[self.weights] = {
                name: self._copy_of(value) for name, value in state.items()
            }

    def load_weights(self, values: Tensor) -> None:
        """Set the master weights to `values`.

        If the master weights are the parameter itself, nothing is changed.
        """
        if self.has_copy:
            self.weights.copy_(values)
            self.record_version()

    def _copy_of(self, value: Any) -> Any:
        """Return a copy of a state value; large tensors get the device and dtype of the weights."""
        if not isinstance(value, Tensor):
            return value
        dtype = self.dtype if is_large(value) and value.is_floating_point() else value.dtype
        return value.to(self.weights.device if is_large(value) else value.device, dtype, copy=True)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the state tensors, and the master weights if they are a copy of the parameter.

        These tensors are on the parameter's device.
        """
        if self.has_copy:
            yield self.weights
        yield from (
            value
            for value in self.states.get(self.weights, {}).values()
            if isinstance(value, Tensor)
        )


def is_large(value: Any) -> bool:
    """Return whether a value of an optimizer's state is a tensor of more than one number.

    Only these tensors are offloaded. A step count, for example, is a single number and stays in
    memory.
    """
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def pages(masters: Sequence[Master], page_bytes: int) -> list[list[Master]]:
    """Split a list of master weights, in order, into pages, which are updated one after another.

    Args:
        masters: Master weights to split.
        page_bytes: Largest size of a page, as the sum of `nbytes()`. A parameter that is larger is
            a page by itself.

    Returns:
        The pages, each a list of master weights.
    """
    result: list[list[Master]] = []
    filled = 0
    for master in masters:
        if not result or filled + master.nbytes() > page_bytes:
            result.append([])
            filled = 0
        result[-1].append(master)
        filled += master.nbytes()
    return result
