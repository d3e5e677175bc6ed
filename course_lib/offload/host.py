"""State in host memory, where the CPU updates it; for parameters on a device that has a memory of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .masters import Master


class OnHost(Master):
    """The weights are a pinned copy of the parameter. Gradients go down in the step, not in backward: what clips,
    unscales or sums them up between processes may change them in ways that PyTorch does not count.
    """

    def made(self) -> nn.Parameter:
        self.coming: tuple | None = None  # (gradient on the host, its copy's event)
        self.going = None  # the event of the parameter's copy up
        return nn.Parameter(self.device.pinned(self.p.shape, self.dtype).copy_(self.p.detach()))

    def send(self) -> None:
        """Start copying the gradient down."""
        host = self.device.pinned(self.p.grad.shape, self.p.grad.dtype)
        self.coming = host, self.device.copy(host, self.p.grad.detach(), "gradients")

    def settle(self) -> None:
        """Wait until the weights have gone up: they must not change under the copy."""
        if self.going is not None:
            self.device.finish(self.going)
            self.going = None

    def take(self) -> None:
        self.settle()
        super().take()

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

    def load_weights(self, values: Tensor) -> None:
        self.settle()
        super().load_weights(values)

    def held(self) -> Iterator[Tensor]:
        return iter(())
