"""An optimizer whose state lives one tier down."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import kind, number, shown
from course_lib._torch import is_symbolic

from .device import Device
from .masters import Above, OnHost, Paged
from .stores import DiskStore, Room, Store, StoreFull, SymbolicStore


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives one tier down, with fp32 master weights for parameters of lower precision.

    Each step equals that of `base`: to the bit for fp32 parameters on a CPU; for bf16 and fp16 ones it is the step of
    `base` on fp32 copies, rounded afterwards.

    A CPU keeps the state in a file and pages it through memory in chunks, the next one read and the last one written
    while one is updated. For CUDA parameters the state lives in host memory and the update runs on the CPU; the next
    gradient comes down and the last parameter goes up meanwhile.

    Between `backward` and `step` gradients may be changed in any way: clipped, unscaled, summed up between processes.
    Parameters may be given new values from outside at any time, and these win. On CUDA, where there are master weights
    or the state is below, PyTorch must have counted the change: `p.copy_(...)` without gradients and `load_state_dict`
    are counted, changes in place through `p.data` and collectives are not; call
    `torch.autograd.graph.increment_version(p)` after those.

    `state` reads what is below when it is asked for, and writes what is put there: what it returns for a parameter is
    a copy where the state is in a file. `load_state_dict(state_dict())` changes no bit.

    Args:
        params: as for any optimizer.
        base: the class that does the steps; it updates each parameter by itself, with state of its own.
        fraction: of the elements whose state is below, as in Megatron-LM's hybrid optimizer, but the largest parameters
            first; the rest is updated where it is.
        overlap: copy while other parameters are updated; False: one thing after the other.
        store: for CPU parameters, a `DiskStore` or another `Store`.
        base_kwargs: for `base`: lr and so on.

    Raises:
        TypeError, ValueError: an argument is not of its kind; `base` has no per-parameter state; a parameter is
            complex, quantised or sparse; a gradient is sparse (from `step`, before anything has changed).
        StoreFull: the state found no room; the parameters are as before.
    """

    CHUNK_BYTES = 16 << 20

    def __init__(
        self, params, base=torch.optim.AdamW, *, fraction: float = 1.0, overlap: bool = True, store=None, **base_kwargs
    ):
        self._fraction, self._overlap = number("fraction", fraction, 0, 1), overlap
        self._store = kind("store", store, (Store, type(None)), "a DiskStore or another Store")
        self._base_class, self._base_kwargs = base, base_kwargs
        self._items: dict[nn.Parameter, Above] = {}
        self._states = _States(self._items, self._write)
        self._base: torch.optim.Optimizer | None = None
        self._rooms: list[Room] = []
        weakref.finalize(self, _free_all, self._rooms).atexit = False
        super().__init__(params, _per_parameter_defaults(base, base_kwargs))
        self._adopt(self.param_groups)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if self._base is not None:  # not from the constructor, which chooses among all groups at once
            try:
                self._adopt(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _adopt(self, groups: list[dict]) -> None:
        parameters = [p for group in groups for p in group["params"]]
        for p in parameters:
            if p.is_complex() or p.is_quantized or p.layout is not torch.strided:
                odd = "complex" if p.is_complex() else "quantised" if p.is_quantized else "sparse"
                raise TypeError(f"a parameter of shape {tuple(p.shape)} is {odd}; it takes real, dense ones")
        chosen = chosen_below(parameters, self._fraction)
        items = {p: (OnHost if Device.of(p).apart else Paged)(p) if p in chosen else Above(p) for p in parameters}
        for group in groups:
            masters = {**group, "params": [items[p].master for p in group["params"]]}
            if self._base is None:
                self._base = self._base_class([masters], **self._base_kwargs)
            else:
                self._base.add_param_group(masters)
        for item in items.values():
            item.states = self._base.state
            if isinstance(item, Paged):
                item.begin()
        self._items.update(items)

    @torch.no_grad()
    def step(self, closure=None):
        """One step. The closure, if there is one, computes the loss anew; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [item for item in self._items.values() if item.p.grad is not None]
        for item in due:
            if item.p.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {tuple(item.p.shape)} is sparse; "
                    "it takes dense gradients (for an embedding: sparse=False)"
                )
        paged = [item for item in due if isinstance(item, Paged)]
        hosted = [item for item in due if isinstance(item, OnHost)]
        above = [item for item in due if type(item) is Above]
        self._reserve(paged)
        self._update([item for item in above if item.master is item.p])
        # In chunks, since the gradients of masters are fp32 copies, which would take as much as the masters do.
        for chunk in self._chunks([item for item in above if item.master is not item.p], Above.master_bytes):
            self._update(chunk)
        self._update_on_host(hosted)
        self._update_paged(paged)
        return loss

    def _update(self, items: list[Above]) -> None:
        """Let `base` do its step for these parameters alone."""
        if not items:
            return
        masters, groups, mine = {item.master for item in items}, self._base.param_groups, []
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            members = [master for master in theirs["params"] if master in masters]
            if members:
                mine.append({**theirs, **ours, "params": members})
        try:
            for item in items:
                item.take()
            self._base.param_groups = mine
            self._base.step()
        finally:  # also where it was interrupted: parameters and state are then those that `base` would have left
            self._base.param_groups = groups
            for item in items:
                item.give()

    def _update_on_host(self, items: list[OnHost]) -> None:
        """One at a time, so that one goes up, and another gradient comes down, while the next is updated."""
        for item, following in _in_pairs(items):
            if self._overlap and following is not None:
                item.send()
                following.send()
            self._update([item])
            if not self._overlap:
                item.settle()

    def _update_paged(self, items: list[Paged]) -> None:
        """In chunks, one read and one written while another is updated."""
        failed, coming, going = [], None, []
        try:
            for chunk, following in _in_pairs(self._chunks(items, Paged.state_bytes)):
                for finish in coming or [item.page_in() for item in chunk]:
                    finish()
                coming = [item.page_in() for item in following] if following and self._overlap else None
                try:
                    self._update(chunk)
                finally:
                    written, going = going, [item.page_out(self.store, self._rooms) for item in chunk]
                    failed += _finished(written)
                if not self._overlap:
                    failed, going = failed + _finished(going), []
        finally:
            failed += _finished(going)
        if failed:
            raise failed[0]  # at the end: every parameter has had its step, and no state is lost

    def _chunks(self, items: list, bytes_of: Callable[[Any], int]) -> list[list]:
        """Items in their order, in lists of CHUNK_BYTES at most, or of one item that is larger."""
        chunks, room = [], 0
        for item in items:
            if not chunks or room + bytes_of(item) > self.CHUNK_BYTES:
                chunks.append([])
                room = 0
            chunks[-1].append(item)
            room += bytes_of(item)
        return chunks

    @property
    def store(self) -> Store:
        """The file with the state of CPU parameters."""
        if self._store is None:
            self._store = SymbolicStore() if is_symbolic(*self._items) else DiskStore()
        return self._store

    def _reserve(self, items: list[Paged]) -> None:
        """Room for everything that will go below, before anything changes."""
        if items:
            self.store.check_open()
        new, made = [item for item in items if item.spare is None], []
        tensors = _state_tensors(self._base_class, self._base_kwargs) if new else 0
        try:
            for item in new:
                item.reserve(self.store, tensors, made)
        except StoreFull:
            _free_all(made)
            for item in new:
                item.spare = None
            raise
        self._rooms += made

    # ---- looking at the state, saving and loading it

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """parameter -> its state, as `base` would hold it; with "master" for parameters of low precision."""
        return self._states

    @state.setter
    def state(self, value) -> None:
        self._states.clear()
        self._states.update(value)

    def held_tensors(self) -> Iterator[Tensor]:
        """Master weights and state that are where their parameters are, and not below: what a meter should count."""
        for item in self._items.values():
            yield from item.held()

    def _write(self, items: list[Paged]) -> None:
        self._reserve(items)
        failed = _finished([item.page_out(self.store, self._rooms) for item in items])
        if failed:
            raise failed[0]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `base`, or an `OffloadedOptimizer` of it, has written. The next steps are then the same."""
        self._reserve([item for item in self._items.values() if isinstance(item, Paged)])
        super().load_state_dict({**state_dict, "state": {}})  # the groups; it checks that they fit
        self.__dict__.pop("state", None)
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state = {
            p: state_dict["state"][number]
            for number, p in zip(order, parameters, strict=True)
            if number in state_dict["state"]
        }

    def __getstate__(self):
        raise TypeError("an OffloadedOptimizer cannot be copied or pickled; use its state_dict()")


class _States(MutableMapping):
    """The state of each parameter that has some, read and written where it is."""

    def __init__(self, items: dict[nn.Parameter, Above], write: Callable[[list[Paged]], None]):
        self._items, self._write = items, write

    def __getitem__(self, p: nn.Parameter) -> dict[str, Any]:
        if p not in self:
            raise KeyError(p)
        return self._items[p].state()

    @torch.no_grad()
    def __setitem__(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        item = self._items[p]
        item.load(state)
        if isinstance(item, Paged) and state:
            self._write([item])

    @torch.no_grad()
    def __delitem__(self, p: nn.Parameter) -> None:
        self._items[p].load({})

    def __contains__(self, p: object) -> bool:
        return p in self._items and self._items[p].has_state()

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for p, item in self._items.items() if item.has_state())

    def __len__(self) -> int:
        return sum(item.has_state() for item in self._items.values())

    def clear(self) -> None:
        for p in list(self):
            del self[p]


def chosen_below(parameters: Sequence[Tensor], fraction: float) -> set[Tensor]:
    """The parameters whose state goes below: the largest first, until the fraction is reached."""
    wanted, chosen = fraction * sum(p.numel() for p in parameters), set()
    for p in sorted(parameters, key=lambda p: -p.numel()):
        if wanted <= 0:
            break
        wanted -= p.numel()
        chosen.add(p)
    return chosen


def _in_pairs(things: list) -> Iterator[tuple[Any, Any]]:
    """Each with the one that follows, or None."""
    return zip(things, [*things[1:], None], strict=False)


def _finished(going: list[Callable[[], list[OSError]]]) -> list[OSError]:
    return [error for finish in going for error in finish()]


def _free_all(rooms: list[Room]) -> None:
    for room in rooms:
        with suppress(Exception):
            room.free()


def _per_parameter_defaults(base: Any, base_kwargs: dict) -> dict:
    """The default settings of `base`; an error if it is no optimizer that updates each parameter by itself."""
    takes = "a class of optimizers that keep a state for each dense parameter, such as torch.optim.AdamW"
    if not (isinstance(base, type) and issubclass(base, torch.optim.Optimizer)):
        raise TypeError(f"base is {shown(base)}; it takes {takes}")
    if issubclass(base, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(f"base is {shown(base)}; it takes {takes}")
    return base([nn.Parameter(torch.zeros(2, 2))], **base_kwargs).defaults


def _state_tensors(base: type, base_kwargs: dict) -> int:
    """How many tensors as large as the parameter `base` keeps for it: found by one step on a small one."""
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.zeros(2, 2)
    optimizer = base([p], **base_kwargs)
    with torch.enable_grad():
        optimizer.step()
    return sum(isinstance(value, Tensor) and value.shape == p.shape for value in optimizer.state[p].values())
