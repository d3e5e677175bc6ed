"""What an optimizer steps in place of a parameter, and where its state is: with the parameter, or
in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._torch import is_symbolic

from .device import Device


class Master:
    """One parameter, and what `base` steps in its place: the parameter itself, or a copy in fp32.

    Attributes:
        weights: what `base` steps.
        states: the state of `base`, by weights.
    """

    def __init__(self, p: nn.Parameter):
        self.p, self.device = p, Device.of(p)
        self.dtype = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype
        self.weights = self.made()
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.stamp()

    def made(self) -> nn.Parameter:
        return (
            self.p
            if self.p.dtype == self.dtype
            else nn.Parameter(self.p.detach().to(self.dtype, copy=True))
        )

    def nbytes(self) -> int:
        return self.dtype.itemsize * self.p.numel()

    # ---- a step

    def take(self) -> None:
        """Before `base` steps: the gradient, and values that the parameter was given from
        outside."""
        if self.weights is not self.p:
            self.take_values()
            self.weights.grad = self.gradient().to(self.dtype)

    def take_values(self) -> None:
        if self.device.apart and self.seen == (self.p.data_ptr(), self.p._version):
            return  # to look would make the device wait
        now = self.values()
        rounded = self.weights.to(now.dtype)
        if not is_symbolic(now) and not torch.equal(rounded, now):
            self.weights.copy_(torch.where(rounded == now, self.weights, now.to(self.dtype)))

    def give(self) -> None:
        """After `base` has stepped: the parameter takes the weights, rounded."""
        if self.weights is not self.p and self.weights.grad is not None:
            self.weights.grad = None
            self.give_values()
            self.stamp()

    def stamp(self) -> None:
        """Remember the parameter's values, as far as PyTorch counts their changes."""
        self.seen = (self.p.data_ptr(), self.p._version) if self.device.apart else None

    def values(self) -> Tensor:
        """The parameter's values, where the weights are."""
        return self.p.detach()

    def gradient(self) -> Tensor:
        return self.p.grad

    def give_values(self) -> None:
        self.p.copy_(self.weights)

    # ---- the state as `base` would hold it, with "master" for weights that the parameter does not
    # hold

    def has_state(self) -> bool:
        if self.states.get(self.weights):
            return True
        return self.p.dtype != self.dtype and not torch.equal(
            self.weights, self.values().to(self.dtype)
        )

    def state(self) -> dict[str, Any]:
        """The state itself where the parameter holds the weights, else a copy of the dict."""
        state = self.states.get(self.weights, {})
        return (
            state
            if self.p.dtype == self.dtype
            else {**state, "master": self.weights.detach().clone()}
        )

    def load(self, state: dict[str, Any]) -> None:
        """Take a copy of a state; {} for none."""
        state = dict(state)
        self.load_weights(state.pop("master", self.p.detach()))
        self.states.pop(self.weights, None)
        if state:
            self.states[self.weights] = {name: self._copied(value) for name, value in state.items()}

    def load_weights(self, values: Tensor) -> None:
        if self.weights is not self.p:
            self.weights.copy_(values)
            self.stamp()

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self.dtype if is_large(value) and value.is_floating_point() else value.dtype
        return value.to(self.weights.device if is_large(value) else value.device, dtype, copy=True)

    def held(self) -> Iterator[Tensor]:
        """Tensors that are where the parameter is."""
        if self.weights is not self.p:
            yield self.weights
        yield from (
            value
            for value in self.states.get(self.weights, {}).values()
            if isinstance(value, Tensor)
        )


class OnHost(Master):
    """State in host memory, where the CPU updates it; for parameters on a device that has a memory
    of its own.

    The weights are a pinned copy of the parameter. They do not change under their copy up:
    something comes down before they change, and that comes after what went up. Gradients go down in
    the step, unless somebody says that nothing will change them: what clips, unscales or adds them
    up over processes may do so in ways that PyTorch does not count.
    """

    def made(self) -> nn.Parameter:
        self.coming: tuple | None = None  # (gradient on the host, its copy's event)
        self.going = None  # the event of the parameter's last copy up
        return nn.Parameter(self.device.pinned(self.p.shape, self.dtype).copy_(self.p.detach()))

    def send(self) -> None:
        """Start copying the gradient down."""
        host = self.device.pinned(self.p.grad.shape, self.p.grad.dtype)
        self.coming = host, self.device.copy(host, self.p.grad.detach(), "gradients")

    def unsend(self) -> None:
        """The gradient is not wanted, and may be freed: its memory must not be written under the
        copy."""
        if self.coming is not None:
            self.device.wait(self.coming[1])
            self.coming = None

    def gradient(self) -> Tensor:
        if self.coming is None:
            self.send()
        (gradient, event), self.coming = self.coming, None
        self.device.finish(event)
        return gradient

    def values(self) -> Tensor:
        return self.device.pinned(self.p.shape, self.p.dtype).copy_(self.p.detach())

    def give_values(self) -> None:
        source = self.weights.detach()
        if self.p.dtype != self.dtype:  # rounded here, so that fewer bytes go up
            source = self.device.pinned(self.p.shape, self.p.dtype).copy_(source)
        self.going = self.device.copy(self.p.detach(), source, "parameters")
        self.device.wait(self.going)

    def held(self) -> Iterator[Tensor]:
        return iter(())


def update_on_host(masters: list[OnHost], update: Callable[[list], None], overlap: bool) -> None:
    """One at a time, so that others come down and go up while one is updated."""
    try:
        for master in masters if overlap else ():
            if master.coming is None:
                master.send()
        for master in masters:
            update([master])
            if not overlap:
                master.device.finish(master.going)
    finally:
        for master in masters:
            master.unsend()


@contextmanager
def sending(masters: list[OnHost]) -> Iterator[None]:
    """Inside, gradients go down as soon as backward has made them.

    One to which a backward pass within backward adds goes down again, and what went before is not
    used.
    """
    hooks = [
        master.p.register_post_accumulate_grad_hook(lambda p, master=master: master.send())
        for master in masters
    ]
    try:
        yield
    finally:
        for hook, master in zip(hooks, masters, strict=True):
            hook.remove()
            master.unsend()


def is_large(value: Any) -> bool:
    """Whether a piece of state moves: a tensor with more than the single number that a step count
    is."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() > 1


def chunks(masters: list[Master], most: int) -> list[list[Master]]:
    """Masters in their order, in lists of `most` bytes, or of one that is larger."""
    found, room = [], 0
    for master in masters:
        if not found or room + master.nbytes() > most:
            found.append([])
            room = 0
        found[-1].append(master)
        room += master.nbytes()
    return found


def update_with(
    base: torch.optim.Optimizer, groups: list[dict], masters: list[Master], *, fused: bool = False
) -> None:
    """Let `base` do its step for these masters alone, with the settings of `groups`; fused if they
    leave it open."""
    if not masters:
        return
    chosen, all_groups, mine = {master.weights for master in masters}, base.param_groups, []
    for ours, theirs in zip(groups, all_groups, strict=True):
        members = [weights for weights in theirs["params"] if weights in chosen]
        if members:
            mine.append({**theirs, **ours, "params": members})
            if fused and ours.get("fused", False) is None and not ours.get("foreach"):
                mine[-1]["fused"] = True  # on a CPU about four times as fast as a loop
    try:
        for master in masters:
            master.take()
        base.param_groups = mine
        base.step()
    # also where it was interrupted: parameters and state are then those that `base` would have left
    finally:
        base.param_groups = all_groups
        for master in masters:
            master.give()
