"""A meter that counts FLOPs too."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .meter import MemoryMeter

_metered = unwrap(MemoryMeter.__torch_dispatch__)
_aten = torch.ops.aten
# The fused attention of a CPU has no formula of its own, and counts as that of a GPU.
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class CountingMeter(MemoryMeter):
    """Counts FLOPs by the formulas of `FlopCounterMode`, whose own hooks on modules keep tensors alive."""

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # no guards against compilation: symbolic steps take less time without
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = _metered(self, func, types, args, kwargs)
        formula = flop_registry.get(_COUNTED_AS.get(func._overloadpacket, func._overloadpacket))
        if formula is not None and result is not NotImplemented:
            self.flops += _flops(formula, args, kwargs or {}, result)
        return result


def _flops(formula: Callable[..., int], args: tuple, kwargs: dict, result: Any) -> int:
    """By the formula, once for all tensors of these shapes: it takes longer than a symbolic operator."""
    if kwargs or not all(isinstance(value, Tensor) for value in args):
        return formula(*args, **kwargs, out_val=result)
    key = formula, *[tensor.shape for tensor in args]
    if key not in _known:
        _known[key] = formula(*args, out_val=result)
    return _known[key]


_known: dict[tuple, int] = {}
