"""Models of images, in plain PyTorch, whose memory formats depend on the strides of what they
reshape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.models import seed_generators

CHANNELS = 16


def images(samples: int, size: int = 8, channels_last: bool = False) -> Tensor:
    with seed_generators(3):
        made = torch.randn(samples, CHANNELS, size, size)
    return made.to(memory_format=torch.channels_last) if channels_last else made


class Image(nn.Module):
    """A model with a body from images to images, whose loss is of the means of the channels.

    It begins with a convolution, since the backward pass of GroupNorm crashes in torch 2.13 where
    its input is channels_last and needs no gradient.
    """

    def __init__(self, make_body: Callable[[], nn.Module], frozen: bool = False):
        super().__init__()
        body = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), make_body())
        self.body, self.head = body.requires_grad_(not frozen), nn.Linear(CHANNELS, 4)

    def loss_sum(self, x: Tensor) -> tuple[Tensor, int]:
        return self.head(self.body(x).mean((2, 3))).float().square().mean(1).sum(), len(x)


class Projected(nn.Module):
    """The end of an attention block on images, and the norm after it."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(CHANNELS, CHANNELS), nn.GroupNorm(4, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(x.view(*x.shape[:2], -1).transpose(1, 2))
        return self.norm(tokens.transpose(-1, -2).reshape(x.shape))


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
    """Attention between pixels with two heads, by the fused operator or by its parts."""

    def __init__(self, fused: bool = True):
        super().__init__()
        self.norm, self.fused = nn.GroupNorm(4, CHANNELS), fused
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        tokens = self.norm(x).view(b, c, h * w).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(tokens).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).flatten(2))
        return x + y.transpose(-1, -2).reshape(b, c, h, w)


class UNet(nn.Module):
    """Half the resolution, attention there, and back, with what was kept beside it."""

    def __init__(self, fused: bool = True):
        super().__init__()
        self.first, self.last = Residual(), Residual()
        self.middle = nn.Sequential(Residual(), Attention(fused), Residual())
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.up = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.join = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        y = self.middle(self.down(kept))
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.last(self.join(torch.cat([y, kept], 1)))


class ConvNext(nn.Module):
    """Blocks of a convolution and of Linears on the last dimension."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
            self.norm, self.scale = nn.LayerNorm(CHANNELS), nn.Parameter(torch.ones(CHANNELS))
            self.up, self.down = nn.Linear(CHANNELS, 32), nn.Linear(32, CHANNELS)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            y = self.scale * self.down(F.gelu(self.up(y)))
            return x + y.permute(0, 3, 1, 2)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.relu6(x)


class Windows(nn.Module):
    """Attention in shifted windows, whose keys are the window's mean beside each pixel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.qk, self.norm = nn.Linear(CHANNELS, 2 * CHANNELS), nn.InstanceNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        (b, c, h, w), side = x.shape, 4
        y = torch.roll(x.permute(0, 2, 3, 1), (-2, -2), (1, 2))
        y = y.view(b, h // side, side, w // side, side, c).transpose(2, 3).flatten(3, 4)
        q, k = self.qk(y).chunk(2, -1)
        mean = k.mean(-2).unsqueeze(-2).expand(-1, -1, -1, side * side, -1).reshape(k.shape)
        y = (q * mean.squeeze(0).view(q.shape).sigmoid() + k * (k > 0)).unflatten(3, (side, side))
        y = y.transpose(2, 3).reshape(b, h, w, c)
        y = torch.roll(y, (2, 2), (1, 2)).permute(0, 3, 1, 2)
        return self.norm(self.conv(x + y))


BODIES: dict[str, Callable[[], nn.Module]] = {
    "projection": Projected,
    "attention": Attention,
    "U-Net": UNet,
    "U-Net without a fused attention": partial(UNet, fused=False),
    "ConvNeXt": ConvNext,
    "windows": Windows,
}
