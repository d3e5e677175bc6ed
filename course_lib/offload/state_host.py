"""Optimizer state in host memory, where the CPU updates it, for parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

from torch import Tensor, nn

from .master_weights import MasterWeights, StateOptions


class HostState(MasterWeights):
    """Weights in pinned host memory, with their state.

    The weights are a copy of the parameter. They never change while they are being copied up.
    Before an update the gradient is copied down, and that copy is ordered after the previous copy
    up. Gradients are copied down in `step`, unless the caller has used `sending` to promise that
    nothing will change them. Clipping, unscaling and sums over processes may change them in ways
    that PyTorch does not count.
    """

    def make_weights(self) -> nn.Parameter:
        self.coming: tuple | None = None  # (gradient on the host, its copy's event)
        self.going = None  # the event of the parameter's last copy up
        return nn.Parameter(self.device.pinned(self.p.shape, self.dtype).copy_(self.p.detach()))

    @classmethod
    def step(
        cls, masters: Sequence[Self], update: Callable[..., None], options: StateOptions
    ) -> None:
        """Update one parameter at a time on the CPU.

        With `options.overlap`, the gradients of later parameters are copied to the host and earlier
        updated parameters are copied to the GPU in the meantime.
        """
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
        """Drop a gradient copy that is not used; the stream first waits until it is complete."""
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
        if self.p.dtype != self.dtype:  # rounded before the copy, so that fewer bytes go up
            source = self.device.pinned(self.p.shape, self.p.dtype).copy_(source)
        self.going = self.device.copy(self.p.detach(), source, "parameters")
        self.device.wait(self.going)

    def held_tensors(self) -> Iterator[Tensor]:
        return iter(())


@contextmanager
def sending(masters: Sequence[HostState]) -> Iterator[None]:
    """Copy gradients down inside the block, as soon as backward has computed them.

    A gradient that is accumulated again, by a backward pass within backward, is copied down again,
    and the earlier copy is not used.
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
