"""An optimizer whose state is offloaded to host memory or to a file.

`OffloadedOptimizer` wraps any PyTorch optimizer. For each parameter, one of the classes in
`master_weights.py`, `state_host.py` and `state_file.py` keeps the weights and the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import argument_message, describe, kind, number, whole
from course_lib._torch.steps import needs_closure

from .device import Device
from .master_weights import MasterWeights, StateOptions, is_large
from .state_file import FileState
from .state_host import HostState
from .stores import Store

PAGE_BYTES = 16 << 20
# Classes that keep the state of a parameter, in the order in which a step updates their parameters.
STATE_CLASSES: tuple[type[MasterWeights], ...] = (MasterWeights, HostState, FileState)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is offloaded, with fp32 master weights for low-precision parameters.

    Use it like the optimizer class `base`. Offloading saves the memory of the state between steps,
    at the cost of copies in each step. For fp32 parameters on a CPU, each step equals that of
    `base` bit for bit. For bf16 and fp16 parameters, `base` updates fp32 copies (master weights),
    and the results are rounded and written to the parameters.

    **CPU parameters.** The state is in a file, and a step reads and writes it in pages of
    `page_bytes`. While one page is updated, the next page is read and the previous page is written,
    so three pages are in memory.

    **CUDA parameters.** The state is in host memory, and the CPU runs the update. While the CPU
    updates one parameter, gradients of other parameters are copied to the host, and updated
    parameters are copied to the GPU. The update uses `fused=True` if `base` has that option and
    neither `fused` nor `foreach=True` is passed.

    **Changes by other code.** Between `backward` and `step`, gradients may be changed in any way.
    For example, they may be clipped, unscaled, or summed over processes. Other code may set
    parameters at any time, and the next step starts from the new values. On CUDA, for parameters
    with master weights or offloaded state, the optimizer recognizes a changed parameter by
    PyTorch's version counter. `p.copy_(...)` under `torch.no_grad()` and `load_state_dict` increase
    the counter. In-place changes through `p.data` and by collectives do not increase it. After such
    a change, call `torch.autograd.graph.increment_version(p)`.

    **Reading the state.** `optimizer.state[p]` returns the state of a parameter `p` as a dict. If
    the state is in a file, the dict and its tensors are copies, so changing them in place has no
    effect on later steps. For a bf16 or fp16 parameter, the dict also has the fp32 master weights
    under the key "master". This tensor is always a copy. To change the state, assign the complete
    dict: `optimizer.state[p] = changed` writes it to the file or to host memory.
    `load_state_dict(state_dict())` restores the state bit for bit.

    Args:
        params: Parameters or groups, as for any optimizer.
        base: Optimizer class that computes the updates, such as `torch.optim.AdamW`. It must update
            each parameter separately and keep a separate state for each parameter.
        fraction: Fraction of the optimizer state that is offloaded, 0 to 1, counted in elements of
            the parameters. The largest parameters are chosen first. The state of the other
            parameters stays on their device. Megatron-LM's hybrid optimizer has the same option,
            but chooses the parameters in another order.
        overlap: Whether copies overlap the update of other parameters. With False, copies and
            updates run one after another.
        store: `DiskStore` or another `Store` for CPU parameters, by default a new `DiskStore`.
        page_bytes: Largest size of a page in bytes. A page is a group of parameters that are
            updated together, and its size is that of their state and master weights. A parameter
            that exceeds this size is a page by itself.
        base_kwargs: Options of `base`, such as lr.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value, `base` does not keep a state
            for each parameter, or a parameter is complex or sparse.
        TypeError: (In `step`) a gradient is complex or sparse. The parameters are unchanged.
        StoreFull: The state does not fit into the store. The parameters are unchanged.
    """

    def __init__(
        self,
        params,
        base=torch.optim.AdamW,
        *,
        fraction: float = 1.0,
        overlap: bool = True,
        store=None,
        page_bytes: int = PAGE_BYTES,
        **base_kwargs,
    ):
        self._fraction = number("fraction", fraction, 0, 1)
        store = kind("store", store, (Store, type(None)), "a DiskStore or another Store")
        page_bytes = whole("page_bytes", page_bytes, 1, of="bytes")
        defaults, names = _defaults_and_state_names(base, base_kwargs)
        self._options = StateOptions(overlap, page_bytes, names, store)
        self._base_class, self._base_kwargs = base, base_kwargs
        self._masters: dict[nn.Parameter, MasterWeights] = {}
        self._states = _States(self._masters)
        self._base: torch.optim.Optimizer | None = None
        super().__init__(params, defaults)
        self._add_masters(self.param_groups)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        # `_base` is None while the constructor of `torch.optim.Optimizer` calls this method for
        # each group. Our constructor later makes the master weights of all groups together, so that
        # the largest parameters of all groups are offloaded.
        if self._base is not None:
            try:
                self._add_masters(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _add_masters(self, groups: list[dict]) -> None:
        """Make the master weights of these groups, and add them to the base optimizer."""
        masters = _make_masters(
            [p for group in groups for p in group["params"]], self._fraction, self._options
        )
        for group in groups:
            base_group = {**group, "params": [masters[p].weights for p in group["params"]]}
            if self._base is None:
                self._base = self._base_class([base_group], **self._base_kwargs)
            else:
                self._base.add_param_group(base_group)
        for master in masters.values():
            master.attach_states(self._base.state)
        self._masters.update(masters)

    @torch.no_grad()
    def step(self, closure=None):
        """Do one optimizer step.

        Args:
            closure: Function that computes the loss again and returns it, as for any optimizer.

        Returns:
            The loss that the closure returns, or None without a closure.

        Raises:
            TypeError: A gradient is complex or sparse. Parameters and state are unchanged.
            StoreFull: The state does not fit into the store. Parameters and state are unchanged.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        pending = [master for master in self._masters.values() if master.p.grad is not None]
        for master in pending:
            _check_dense("the gradient of a parameter", master.p.grad)
        self._reserve(pending)
        update = partial(_update_with, self._base, self.param_groups)
        for state_class in STATE_CLASSES:
            state_class.step(
                [master for master in pending if type(master) is state_class], update, self._options
            )
        return loss

    @property
    def store(self) -> Store:
        """The store that keeps the offloaded state of CPU parameters, by default in a file."""
        return self._options.open_store(self._masters)

    def _reserve(self, masters: Iterable[MasterWeights]) -> None:
        """Reserve space in the store for these master weights, before anything is changed."""
        masters = list(masters)
        for state_class in STATE_CLASSES:
            state_class.reserve(
                [master for master in masters if type(master) is state_class], self._options
            )

    # ---- reading, saving and loading the state

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """Mapping from each parameter to its optimizer state, a dict with the keys of `base`.

        The state of a bf16 or fp16 parameter also has the key "master", its fp32 master weights.
        """
        return self._states

    @state.setter
    def state(self, value) -> None:
        self._states.clear()
        self._states.update(value)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the master weights and state tensors that stay on the parameters' devices.

        A memory meter can count these tensors. Offloaded tensors are not among them.
        """
        for master in self._masters.values():
            yield from master.held_tensors()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `base` or of an `OffloadedOptimizer` with the same `base`.

        The next steps are then the same as those of the optimizer that was saved.

        Args:
            state_dict: Result of `state_dict()` of the saved optimizer.
        """
        self._reserve(self._masters.values())
        # The base class loads and checks only the groups, and the setter below loads the state.
        super().load_state_dict({**state_dict, "state": {}})
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = state_dict["state"]
        self.state = {
            p: states[index] for index, p in zip(order, parameters, strict=True) if index in states
        }

    def __getstate__(self):
        raise TypeError("an OffloadedOptimizer cannot be copied or pickled; use its state_dict()")


class _States(MutableMapping):
    """The `state` of an `OffloadedOptimizer`: a mapping from each parameter to its state.

    Reading an item fetches the state from the place where the parameter's `MasterWeights` keeps it,
    and setting an item writes to this place. Parameters without state are not keys.
    """

    def __init__(self, masters: dict[nn.Parameter, MasterWeights]):
        self._masters = masters

    def __getitem__(self, p: nn.Parameter) -> dict[str, Any]:
        if p not in self:
            raise KeyError(p)
        return self._masters[p].state()

    @torch.no_grad()
    def __setitem__(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        self._masters[p].load_state(state)

    @torch.no_grad()
    def __delitem__(self, p: nn.Parameter) -> None:
        self._masters[p].load_state({})

    def __contains__(self, p: object) -> bool:
        return p in self._masters and self._masters[p].has_state()

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for p, master in self._masters.items() if master.has_state())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for p in list(self):
            del self[p]


def chosen_below(parameters: Sequence[Tensor], fraction: float) -> set[Tensor]:
    """Choose the parameters whose optimizer state is offloaded, starting with the largest.

    Args:
        parameters: Parameters to choose from.
        fraction: Fraction of all elements of `parameters`, 0 to 1. The chosen parameters together
            have at least this fraction of the elements.

    Returns:
        The chosen parameters, as few as possible.
    """
    remaining = fraction * sum(p.numel() for p in parameters)
    chosen = set()
    for p in sorted(parameters, key=lambda p: -p.numel()):
        if remaining <= 0:
            break
        remaining -= p.numel()
        chosen.add(p)
    return chosen


def _make_masters(
    parameters: list[nn.Parameter], fraction: float, options: StateOptions
) -> dict[nn.Parameter, MasterWeights]:
    """Make the master weights of each parameter.

    Their class depends on whether the parameter's state is offloaded, and on the parameter's
    device.
    """
    for p in parameters:
        _check_dense("a parameter", p)
    chosen = chosen_below(parameters, fraction)

    def class_of(p: nn.Parameter) -> type[MasterWeights]:
        if p not in chosen:
            return MasterWeights
        return HostState if Device.of_tensor(p).has_own_memory else FileState

    return {p: class_of(p)(p, options) for p in parameters}


def _update_with(
    base: torch.optim.Optimizer,
    groups: list[dict],
    masters: Sequence[MasterWeights],
    *,
    fused: bool = False,
) -> None:
    """Run a step of the base optimizer that updates only these master weights.

    Args:
        base: The base optimizer, whose groups contain weights instead of parameters.
        groups: Groups of the `OffloadedOptimizer`, whose settings, such as lr, are used.
        masters: Master weights to update.
        fused: Whether to use `fused=True` for groups whose option `fused` is None and that do not
            set `foreach`.
    """
    if not masters:
        return
    chosen = {master.weights for master in masters}
    all_groups = base.param_groups
    chosen_groups = []
    for group, base_group in zip(groups, all_groups, strict=True):
        members = [weights for weights in base_group["params"] if weights in chosen]
        if members:
            chosen_groups.append({**base_group, **group, "params": members})
            if fused and group.get("fused", False) is None and not group.get("foreach"):
                chosen_groups[-1]["fused"] = True
    try:
        for master in masters:
            master.load_grad()
        base.param_groups = chosen_groups
        base.step()
    # This also runs if the step is interrupted: weights that `base` has already updated must be
    # written to their parameters.
    finally:
        base.param_groups = all_groups
        for master in masters:
            master.write_back()


def _defaults_and_state_names(base: Any, base_kwargs: dict) -> tuple[dict[str, Any], list[str]]:
    """Return the default settings of `base`, and the names of its large state tensors.

    Large state tensors have the shape of their parameter. To find them, this function runs one step
    on a parameter of shape (2, 2).

    Raises:
        TypeError: `base` is not an optimizer class that updates each parameter separately.
    """
    is_optimizer = isinstance(base, type) and issubclass(base, torch.optim.Optimizer)
    if not is_optimizer or issubclass(base, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        allowed = (
            "an optimizer class that keeps a state for each dense parameter, such as"
            " torch.optim.AdamW"
        )
        raise TypeError(argument_message("base", allowed, describe(base)))
    if needs_closure(base) or (hasattr(base, "train") and hasattr(base, "eval")):
        raise TypeError(
            "base must be an optimizer class that needs neither a closure in step() nor calls of"
            f" optimizer.train(), got {describe(base)}. Pass another class, such as"
            f" torch.optim.AdamW, or use {describe(base)} without offloading"
        )
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.zeros(2, 2)
    optimizer = base([p], **base_kwargs)
    optimizer.step()
    names = [
        name
        for name, value in optimizer.state[p].items()
        if is_large(value) and value.shape == p.shape
    ]
    return optimizer.defaults, names


def _check_dense(name: str, tensor: Tensor) -> None:
    """Raise a TypeError if a tensor is sparse or complex; `name` begins the message."""
    if tensor.layout is not torch.strided or tensor.is_complex():
        actual = "complex" if tensor.is_complex() else "sparse"
        raise TypeError(
            f"{name} must be real and dense, got a {actual} tensor of shape {tuple(tensor.shape)}"
        )
