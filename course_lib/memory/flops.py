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
# Fused attention: which argument is the query; key and value follow it.
_QUERY_AT = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}


def flops_of(func, args: tuple, kwargs: dict | None, result: Any) -> int:
    """The FLOPs of one call of an operator; 0 for one without a formula."""
    packet = getattr(func, "overloadpacket", None)  # an operator of higher order has none
    kind = _COUNTED_AS.get(packet, packet)
    formula = flop_registry.get(kind)
    if formula is None:
        return 0
    if kind in _QUERY_AT:
        args = _with_all_heads(_QUERY_AT[kind], args)
    return _by(formula, args, kwargs or {}, result)


def _with_all_heads(query: int, args: tuple) -> tuple:
    """The shapes of keys and values with as many heads as the queries have: the formulas of torch
    2.9 refuse fewer, and those of newer ones count so."""
    batch, heads, *_ = args[query].shape
    shared = args[query + 1 : query + 3]
    if not heads or shared[0].shape[1] == heads:
        return args
    shapes = (torch.Size((batch, heads, *tensor.shape[2:])) for tensor in shared)
    return (*args[: query + 1], *shapes, *args[query + 3 :])


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
