"""The optimizers that a recipe names: a class and its settings, and how each runs on symbolic
tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from course_lib._torch import is_symbolic

from .recipe import Recipe

LR = 1e-3
UPDATES = {
    None: {},  # PyTorch chooses by the device of the parameters
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class _AnyNumber(TorchFunctionMode):
    """Mode in which a symbolic tensor has a value, so that a program that asks for one runs on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, which scales its steps by norms that it reads; what it takes does not
    depend on them."""

    def step(self, closure=None):
        with _AnyNumber():
            return super().step(closure)


class Adam8bit(torch.optim.Optimizer):
    """Adam with moments in 8 bits, on symbolic tensors: it holds what that of bitsandbytes holds,
    by a formula.

    A byte an element for each of the two moments, a scale in fp32 for each 256 of them, and a table
    of 256 numbers for each moment; small parameters keep their moments in fp32. Its step makes
    nothing: it is one operator there.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2; the limit is that of bitsandbytes.
    """

    BLOCK = 256
    SMALL = 4096
    LEVELS = 256

    def __init__(self, params, lr: float = LR, **_):
        super().__init__(params, {"lr": lr})
        self.tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                state = self.state[p]
                small = p.numel() < self.SMALL
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(
                        p, dtype=torch.float32 if small else torch.uint8
                    )
                    if not small:
                        state[f"{moment}_scales"] = p.new_zeros(
                            -(-p.numel() // self.BLOCK), dtype=torch.float32
                        )
                        table = p.new_zeros(self.LEVELS, dtype=torch.float32)
                        state[f"{moment}_table"] = self.tables.setdefault(moment, table)


BASES = {
    "adam": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adafactor": Adafactor,
}


def base_of(recipe: Recipe) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and its settings but for lr.

    Raises:
        ValueError: the class is another library's, which is not installed.
    """
    if recipe.optimizer == "adam8bit":
        return Adam8bit if is_symbolic() else _of_bitsandbytes(), {}
    momentum = {"momentum": 0.9} if recipe.optimizer == "momentum" else {}
    return BASES[recipe.optimizer], {**UPDATES[recipe.update], **momentum}


def _of_bitsandbytes() -> type[torch.optim.Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            "optimizer must not be 'adam8bit' without bitsandbytes, which runs its step, got"
            " 'adam8bit'; pip install bitsandbytes, or choose another optimizer"
        ) from error
    return AdamW8bit
