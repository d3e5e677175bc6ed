"""The optimizers that a recipe names: a class and its settings, and how each runs on symbolic
tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from course_lib._torch import is_symbolic

from .recipe import Recipe

LR = 1e-3
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    """Adam with moments in 8 bits, on symbolic tensors. A formula gives what the state of
    bitsandbytes' optimizer takes.

    Each of the two moments has one byte per element, one scale in fp32 per 256 elements, and a
    table of 256 numbers, which all parameters share. Small parameters keep their moments in fp32,
    and so do the weights that a module has registered for that with bitsandbytes, as its own
    `StableEmbedding` and `Embedding` do. The step makes no tensors, since it is one operator there.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2; the limit and the registered weights
    are those of `bitsandbytes.optim.optimizer`.
    """

    BLOCK = 256
    SMALL = 4096
    LEVELS = 256

    def __init__(self, params, lr: float = LR, **_):
        super().__init__(params, {"lr": lr})
        self.tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        new = [p for p in parameters if p.grad is not None and not self.state[p]]
        registered = _registered_with_bitsandbytes() if new else {}
        for p in new:
            limit = {"optim_bits": 8, "min_8bit_size": self.SMALL} | registered.get(p, {})
            if limit["optim_bits"] == 32 or p.numel() < limit["min_8bit_size"]:
                self._keep_in_fp32(p)
            else:
                self._keep_in_8_bits(p)

    def _keep_in_fp32(self, p: Tensor) -> None:
        for moment in MOMENTS:
            self.state[p][moment] = torch.zeros_like(p, dtype=torch.float32)

    def _keep_in_8_bits(self, p: Tensor) -> None:
        scales = -(-p.numel() // self.BLOCK)
        for moment in MOMENTS:
            table = p.new_zeros(self.LEVELS, dtype=torch.float32)
            self.state[p] |= {
                moment: torch.zeros_like(p, dtype=torch.uint8),
                f"{moment}_scales": p.new_zeros(scales, dtype=torch.float32),
                f"{moment}_table": self.tables.setdefault(moment, table),
            }


def _registered_with_bitsandbytes() -> dict[Tensor, dict[str, Any]]:
    """Settings that modules have registered with bitsandbytes for their parameters; none while it
    is not imported."""
    optimizers = sys.modules.get("bitsandbytes.optim")
    if optimizers is None:
        return {}
    registered = optimizers.GlobalOptimManager.get_instance().module_weight_config_triple
    return {getattr(module, name): settings for module, name, settings in registered}


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
