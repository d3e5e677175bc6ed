"""An optimizer whose state lives one tier down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import kind, must_be, number, shown, whole
from course_lib._torch import needs_closure

from .device import Device
from .master_weights import MasterWeights, StateOptions, is_large
from .state_file import FileState
from .state_host import HostState, sending
from .stores import Store

PAGE_BYTES = 16 << 20
HOMES: tuple[type[MasterWeights], ...] = (MasterWeights, HostState, FileState)  # in a step's order


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives one tier down, with fp32 master weights for parameters of
    lower precision.

    Each step equals that of `base`: to the bit for fp32 parameters on a CPU; for bf16 and fp16 ones
    it is the step of `base` on fp32 copies, rounded afterwards.

    A CPU keeps the state in a file and pages it through memory, the next page read and the last one
    written while one is updated, so that a step holds three pages. For CUDA parameters the state
    lives in host memory and the update runs on the CPU, as that of `base` with `fused=True` where
    it has that and neither `fused` nor `foreach=True` is given; other gradients come down and
    parameters go up meanwhile.

    Between `backward` and `step` gradients may be changed in any way: clipped, unscaled, summed up
    between processes. Parameters may be given new values from outside at any time, and these win.
    On CUDA, where there are master weights or the state is below, PyTorch must have counted the
    change: `p.copy_(...)` without gradients and `load_state_dict` are counted, changes in place
    through `p.data` and collectives are not; call
    `torch.autograd.graph.increment_version(p)` after those.

    `state` reads what is below when it is asked for, and writes what is put there: what it returns
    for a parameter is a copy where the state is in a file. `load_state_dict(state_dict())` changes
    no bit.

    Args:
        params: as for any optimizer.
        base: the class that does the steps; it updates each parameter by itself, with state of its
            own.
        fraction: of the elements whose state is below, as in Megatron-LM's hybrid optimizer, but
            the largest parameters first; the rest is updated where it is.
        overlap: copy while other parameters are updated; False: one thing after the other.
        store: for CPU parameters, a `DiskStore` or another `Store`.
        page_bytes: of state, masters included, that are updated at once; a parameter with more is a
            page by itself.
        base_kwargs: for `base`: lr and so on.

    Raises:
        TypeError, ValueError: an argument is not of its kind; `base` has no per-parameter state; a
            parameter is complex or sparse; a gradient is sparse (from `step`, before anything has
            changed).
        StoreFull: the state found no room; the parameters are as before.
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
        defaults, names = _defaults_and_names(base, base_kwargs)
        self._options = StateOptions(overlap, page_bytes, names, store)
        self._base_class, self._base_kwargs = base, base_kwargs
        self._masters: dict[nn.Parameter, MasterWeights] = {}
        self._states = _States(self._masters)
        self._base: torch.optim.Optimizer | None = None
        super().__init__(params, defaults)
        self._adopt(self.param_groups)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        # not from the constructor, which chooses among all groups at once
        if self._base is not None:
            try:
                self._adopt(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _adopt(self, groups: list[dict]) -> None:
        masters = _masters_of(
            [p for group in groups for p in group["params"]], self._fraction, self._options
        )
        for group in groups:
            theirs = {**group, "params": [masters[p].weights for p in group["params"]]}
            if self._base is None:
                self._base = self._base_class([theirs], **self._base_kwargs)
            else:
                self._base.add_param_group(theirs)
        for master in masters.values():
            master.adopted(self._base.state)
        self._masters.update(masters)

    @torch.no_grad()
    def step(self, closure=None):
        """One step. The closure, if there is one, computes the loss anew; its value is returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        due = [master for master in self._masters.values() if master.p.grad is not None]
        for master in due:
            _check_dense("the gradient of a parameter", master.p.grad)
        self._reserve(due)
        update = partial(_update_with, self._base, self.param_groups)
        for home in HOMES:
            home.step([master for master in due if type(master) is home], update, self._options)
        return loss

    @property
    def state_on_host(self) -> bool:
        """Whether gradients go down to host memory."""
        return any(isinstance(master, HostState) for master in self._masters.values())

    def sending(self) -> AbstractContextManager:
        """Send gradients down, inside the block, as soon as backward has made them; `step` uses
        what went down.

        For the last backward pass before a step and the step, and only where nothing changes
        gradients in between: clipping, unscaling, collectives and `.data` would do so unseen.
        `AccumulatedStep` does this where it can.
        """
        return sending(
            [master for master in self._masters.values() if isinstance(master, HostState)]
        )

    @property
    def store(self) -> Store:
        """The file with the state of CPU parameters."""
        return self._options.open_store(self._masters)

    def _reserve(self, masters: Iterable[MasterWeights]) -> None:
        """Room for everything that will go below, before anything changes."""
        masters = list(masters)
        for home in HOMES:
            home.reserve([master for master in masters if type(master) is home], self._options)

    # ---- looking at the state, saving and loading it

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """parameter -> its state, as `base` would hold it; with "master" for parameters of low
        precision."""
        return self._states

    @state.setter
    def state(self, value) -> None:
        self._states.clear()
        self._states.update(value)

    def held_tensors(self) -> Iterator[Tensor]:
        """Master weights and state that are where their parameters are, and not below: what a meter
        should count."""
        for master in self._masters.values():
            yield from master.held_tensors()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `base`, or an `OffloadedOptimizer` of it, has written. The next steps are then
        the same."""
        self._reserve(self._masters.values())
        super().load_state_dict({**state_dict, "state": {}})  # the groups; it checks that they fit
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = state_dict["state"]
        self.state = {
            p: states[index] for index, p in zip(order, parameters, strict=True) if index in states
        }

    def __getstate__(self):
        raise TypeError("an OffloadedOptimizer cannot be copied or pickled; use its state_dict()")


class _States(MutableMapping):
    """The state of each parameter that has some, read and written where it is."""

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
    """The parameters whose state goes below: the largest first, until the fraction is reached."""
    wanted = fraction * sum(p.numel() for p in parameters)
    chosen = set()
    for p in sorted(parameters, key=lambda p: -p.numel()):
        if wanted <= 0:
            break
        wanted -= p.numel()
        chosen.add(p)
    return chosen


def _masters_of(
    parameters: list[nn.Parameter], fraction: float, options: StateOptions
) -> dict[nn.Parameter, MasterWeights]:
    for p in parameters:
        _check_dense("a parameter", p)
    chosen = chosen_below(parameters, fraction)

    def home(p: nn.Parameter) -> type[MasterWeights]:
        if p not in chosen:
            return MasterWeights
        return HostState if Device.of(p).apart else FileState

    return {p: home(p)(p, options) for p in parameters}


def _update_with(
    base: torch.optim.Optimizer,
    groups: list[dict],
    masters: Sequence[MasterWeights],
    *,
    fused: bool = False,
) -> None:
    """Let `base` do its step for these masters alone, with the settings of `groups`; fused if they
    leave it open."""
    if not masters:
        return
    chosen = {master.weights for master in masters}
    all_groups = base.param_groups
    mine = []
    for ours, theirs in zip(groups, all_groups, strict=True):
        members = [weights for weights in theirs["params"] if weights in chosen]
        if members:
            mine.append({**theirs, **ours, "params": members})
            if fused and ours.get("fused", False) is None and not ours.get("foreach"):
                mine[-1]["fused"] = True
    try:
        for master in masters:
            master.load_grad()
        base.param_groups = mine
        base.step()
    # also where it was interrupted: parameters and state are then those that `base` would have left
    finally:
        base.param_groups = all_groups
        for master in masters:
            master.write_back()


def _defaults_and_names(base: Any, base_kwargs: dict) -> tuple[dict[str, Any], list[str]]:
    """The default settings of `base`, and the names of the tensors as large as a parameter that it
    keeps for it.

    Found by one step on a small parameter; an error if `base` is no optimizer that updates each by
    itself.
    """
    good = isinstance(base, type) and issubclass(base, torch.optim.Optimizer)
    if not good or issubclass(base, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        allowed = (
            "an optimizer class that keeps a state for each dense parameter, such as"
            " torch.optim.AdamW"
        )
        raise TypeError(must_be("base", allowed, shown(base)))
    if needs_closure(base) or (hasattr(base, "train") and hasattr(base, "eval")):
        raise TypeError(
            "base must be a class whose step() needs neither a closure nor a call of train(), got"
            f" {shown(base)}. Step with that class itself, or offload the state of another, such as"
            " torch.optim.AdamW"
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
    if tensor.layout is not torch.strided or tensor.is_complex():
        odd = "complex" if tensor.is_complex() else "sparse"
        raise TypeError(
            f"{name} must be real and dense, got a {odd} tensor of shape {tuple(tensor.shape)}"
        )
