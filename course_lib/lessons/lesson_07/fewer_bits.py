"""Weights in 4 bits and Adam moments in 8 bits, in plain PyTorch that runs on any computer.

Both formats store the index of the nearest of a few levels, and one fp32 scale per block of
numbers. bitsandbytes stores the same bytes and has faster kernels; a test compares the bytes.
"""

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.budget import Recipe, build, train_step
from course_lib.budget.optimizers import MOMENTS
from course_lib.budget.optimizers import Adam8bit as Adam8bitState
from course_lib.budget.step import make_state
from course_lib.memory import MemoryMeter


@cache
def nf4_levels() -> tuple[float, ...]:
    """Return the 16 levels of NF4 (4-bit NormalFloat).

    The levels are quantiles of a normal distribution, scaled to [-1, 1]. Source: Dettmers et al.
    2023, QLoRA, arXiv:2305.14314, section 3 and appendix E.
    """
    highest = 0.9677083
    normal = NormalDist()
    positive, negative = (
        [normal.inv_cdf(0.5 + (highest - 0.5) * n / count) for n in range(1, count + 1)]
        for count in (8, 7)
    )
    levels = sorted([-level for level in negative] + [0.0] + positive)
    return tuple(level / positive[-1] for level in levels)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the level nearest to each value, as one byte."""
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values, middles, out_int32=True).to(torch.uint8)


class _FourBitMatmul(torch.autograd.Function):
    """Linear function with a rounded weight, which is expanded only during the matrix product."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "FourBitLinear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantize(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantize(grad.dtype), None


class FourBitLinear(nn.Module):
    """Frozen linear layer with a 4-bit weight, and one fp32 scale per 64 elements of the weight.

    Args:
        linear: Layer to quantize. The number of its weights must be a multiple of 64.
    """

    BLOCK = 64

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        blocks = linear.weight.detach().reshape(-1, self.BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        codes = _nearest(blocks / scales, torch.tensor(nf4_levels()))
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("scales", scales)

    def _apply(self, *given, **named) -> "FourBitLinear":
        """Convert or move the layer as any module, but keep the scales in fp32."""
        super()._apply(*given, **named)
        self.scales = self.scales.float()
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, which was rounded to 4 bits, as a new tensor of the given dtype."""
        levels = torch.tensor(nf4_levels(), dtype=torch.float32)
        codes = torch.stack([self.codes // 16, self.codes % 16], dim=-1).flatten(1)
        weight = levels[codes.int()] * self.scales
        return weight.reshape(self.out_features, self.in_features).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _FourBitMatmul.apply(x, self)


class Adam8bit(Adam8bitState):
    """AdamW with 8-bit moments, and one fp32 scale per 256 elements of a moment.

    Moments are rounded to levels that form a geometric series. The levels of the library
    bitsandbytes are finer, although its tables have the same size.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8
    DECAY = 0.01

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, lr=lr)
        self.lr = lr

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Update all parameters that have gradients.

        Args:
            closure: Ignored.
        """
        super().step()  # creates the state of new parameters
        for p, state in self.state.items():
            if p.grad is None:
                continue
            state["count"] = count = state.get("count", 0) + 1
            moments = []
            values = (p.grad, p.grad.square())
            for name, value, beta in zip(MOMENTS, values, self.BETAS, strict=True):
                moment = self._dequantized(state, name).lerp_(value, 1 - beta)
                self._store_quantized(state, name, moment)
                moments.append(moment / (1 - beta**count))
            p.mul_(1 - self.lr * self.DECAY)
            p.addcdiv_(moments[0], moments[1].sqrt_().add_(self.EPSILON), value=-self.lr)

    def _dequantized(self, state: dict[str, Any], name: str) -> Tensor:
        codes = state[name]
        if codes.dtype != torch.uint8:
            return codes
        table = _moment_levels(signed=name == MOMENTS[0])
        blocks = table[codes.int()].reshape(-1, self.BLOCK) * state[f"{name}_scales"][:, None]
        return blocks.reshape(codes.shape)

    def _store_quantized(self, state: dict[str, Any], name: str, moment: Tensor) -> None:
        if state[name].dtype != torch.uint8:
            return
        table = state[f"{name}_table"].copy_(_moment_levels(signed=name == MOMENTS[0]))
        blocks = moment.reshape(-1, self.BLOCK)
        scales = blocks.abs().amax(dim=1)
        state[f"{name}_scales"].copy_(scales)
        shares = blocks / scales.clamp_min(1e-30)[:, None]
        state[name].copy_(_nearest(shares, table).reshape(moment.shape))


def _moment_levels(signed: bool) -> Tensor:
    """Return 256 levels: 0, a geometric series up to 1 and, if `signed`, its negatives."""
    if not signed:
        return torch.cat([torch.zeros(1), torch.logspace(-7, 0, 255)])
    positive = torch.logspace(-5, 0, 127)
    return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)])


def run_in_8_bits(
    make_model: Callable[[], nn.Module], make_batch: Callable[[], Tensor], recipe: Recipe
) -> MemoryMeter:
    """Run a training step with 8-bit AdamW whose moments exist already, and return its meter.

    The update of `Adam8bit` creates temporary tensors, unlike the update of the library
    bitsandbytes. If the peak occurs in backward, both optimizers have the same peak.

    Args:
        make_model, make_batch: Functions that return the model and the batch.
        recipe: Techniques of the step. Its `optimizer` is ignored.
    """
    model, _ = build(make_model, recipe)
    adam = Adam8bit(model.parameters())
    batch = make_batch()
    make_state(model, adam)
    with MemoryMeter(model, adam) as meter:
        train_step(model, adam, batch, recipe)
    return meter
