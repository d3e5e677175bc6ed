"""FLOPs of an operator, by the formulas of `FlopCounterMode`, whose own hooks on modules keep
tensors alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# The fused attention of a CPU has no formula of its own, and counts as that of a GPU.
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


def flops_of(func, args: tuple, kwargs: dict | None, result: Any) -> int:
    """The FLOPs of one call of an operator; 0 for one without a formula."""
    formula = flop_registry.get(_COUNTED_AS.get(func.overloadpacket, func.overloadpacket))
    return 0 if formula is None else _by(formula, args, kwargs or {}, result)


def _by(formula: Callable[..., int], args: tuple, kwargs: dict, result: Any) -> int:
    """Count FLOPs by the formula, once for all tensors of these shapes: it takes longer than a
    symbolic operator."""
    if kwargs or not all(isinstance(value, Tensor) for value in args):
        return formula(*args, **kwargs, out_val=result)
    key = formula, *[tensor.shape for tensor in args]
    if key not in _known:
        _known[key] = formula(*args, out_val=result)
    return _known[key]


_known: dict[tuple, int] = {}
