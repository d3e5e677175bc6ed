"""An optimizer's state in host memory, where the CPU updates it; for parameters on a device that
has a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

from torch import Tensor, nn

from .master_weights import MasterWeights, StateOptions


class HostState(MasterWeights):
    """Weights in pinned memory, with their state.

    The weights are a copy of the parameter. They do not change under their copy up: something
    comes down before they change, and that comes after what went up. Gradients go down in the step,
    unless somebody says that nothing will change them: what clips, unscales or adds them up over
    processes may do so in ways that PyTorch does not count.
    """

    def make_weights(self) -> nn.Parameter:
        self.coming: tuple | None = None  # (gradient on the host, its copy's event)
        self.going = None  # the event of the parameter's last copy up
        return nn.Parameter(self.device.pinned(self.p.shape, self.dtype).copy_(self.p.detach()))

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """One at a time, so that others come down and go up while one is updated."""
        update = partial(update, fused=True)  # on a CPU about four times as fast as a loop
        try:
            for master in masters if options.overlap else ():
                if master.coming is None:
                    master.send()
            for master in masters:
                update([master])
                if not options.overlap:
                    master.device.finish(master.going)
        finally:
            for master in masters:
                master.unsend()

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

    def write_values(self) -> None:
        source = self.weights.detach()
        if self.p.dtype != self.dtype:  # rounded here, so that fewer bytes go up
            source = self.device.pinned(self.p.shape, self.p.dtype).copy_(source)
        self.going = self.device.copy(self.p.detach(), source, "parameters")
        self.device.wait(self.going)

    def held_tensors(self) -> Iterator[Tensor]:
        return iter(())


@contextmanager
def sending(masters: Sequence[HostState]) -> Iterator[None]:
    """Send gradients down, inside the block, as soon as backward has made them.

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
