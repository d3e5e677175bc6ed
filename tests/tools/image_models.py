"""Models of images, in plain PyTorch, whose memory formats depend on the strides of what they
reshape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.models import seed_generators

CHANNELS = 16


def images(samples: int, size: int = 8, channels_last: bool = False) -> Tensor:
    with seed_generators(3):
        batch = torch.randn(samples, CHANNELS, size, size)
    return batch.to(memory_format=torch.channels_last) if channels_last else batch


class Image(nn.Module):
    """Model with a body from images to images, whose loss uses the means of the channels.

    It begins with a convolution, since the backward pass of GroupNorm crashes in torch 2.13 where
    its input is channels_last and needs no gradient.
    """

    def __init__(self, make_body: Callable[[], nn.Module], frozen: bool = False):
        super().__init__()
        body = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), make_body())
        self.body, self.head = body.requires_grad_(not frozen), nn.Linear(CHANNELS, 4)

    def loss_sum(self, x: Tensor) -> tuple[Tensor, int]:
        return self.head(self.body(x).mean((2, 3))).float().square().mean(1).sum(), len(x)


class Residual(nn.Module):
    """Two norms and convolutions."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, CHANNELS) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y)))
        return x + y


class Attention(nn.Module):
    """Attention between pixels with two heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        tokens = self.norm(x).view(b, c, h * w).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(tokens).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.out(y.transpose(1, 2).flatten(2))
        return x + y.transpose(-1, -2).reshape(b, c, h, w)


class UNet(nn.Module):
    """U-Net with attention at half the resolution and one skip connection."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Residual(), Residual()
        self.middle = nn.Sequential(Residual(), Attention(), Residual())
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.up = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.join = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.first(x)
        y = self.middle(self.down(skipped))
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.last(self.join(torch.cat([y, skipped], 1)))


BODIES: dict[str, Callable[[], nn.Module]] = {"attention": Attention, "U-Net": UNet}
