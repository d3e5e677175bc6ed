"""Count the FLOPs of single operators with the formulas of PyTorch's `FlopCounterMode`.

The meter uses this module instead of `FlopCounterMode`, whose hooks on modules keep tensors alive.

Where PyTorch has a formula, the counts differ in one case: causal fused attention. Here only the
scores that the causal mask allows are counted, whereas PyTorch's formulas count all scores. Fused
kernels skip the scores above the diagonal, except in the tiles that the diagonal crosses.
FlashAttention's own benchmark halves its count for the same reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from course_lib._torch.operators import HigherOrderOperator, OpOverload, run_and_save_rng_state

_aten = torch.ops.aten
# PyTorch has no FLOP formula for the CPU's operators of fused attention. This dict maps them to the
# GPU's operators, whose formulas are used instead.
_SAME_FORMULA_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
# Maps operators of fused attention to the position of the query among the arguments. The key and
# the value follow the query.
_QUERY_POSITION = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}


def _packed_weight_flops(x: Tensor, _, shape: Sequence[int], *others: Any, **named: Any) -> int:
    """Return the FLOPs of the matrix product of `x` with a quantized weight.

    A byte of the weight holds several elements, so the shape of the weight is a separate argument.
    """
    return 2 * x.numel() * shape[0]


# Formulas for the matrix products of bitsandbytes, which registers none with PyTorch.
_BITSANDBYTES_FORMULAS: dict[str, Callable[..., int]] = {
    "gemm_4bit": _packed_weight_flops,
    "gemv_4bit": _packed_weight_flops,
    "int8_scaled_mm": lambda x, w, *_, **__: 2 * x.numel() * w.shape[0],
}


def flops_of(func, args: tuple, kwargs: dict | None, result: Any) -> int:
    """Return the FLOPs of one operator call; 0 if no formula exists for the operator.

    The function uses the formulas of PyTorch's `FlopCounterMode`, with the changes that
    `own_formulas` returns.

    Args:
        func, args, kwargs: Operator and its arguments, as `__torch_dispatch__` receives them.
        result: Value that the operator returned.
    """
    # `HigherOrderOperator` is an abstract class, with which `isinstance` takes longer.
    if not isinstance(func, OpOverload) and isinstance(func, HigherOrderOperator):
        # Compiled code does not call a random operator directly. It passes the operator as an
        # argument to a higher-order operator, which runs it and can repeat the run with the same
        # random numbers.
        position = next((i for i, each in enumerate(args) if isinstance(each, OpOverload)), None)
        if position is None:
            return 0
        result = result[1] if func is run_and_save_rng_state else result
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "rng_state"}
        func, args = args[position], args[position + 1 :]
    packet = getattr(func, "overloadpacket", None)
    kind = _SAME_FORMULA_AS.get(packet, packet)
    formula = flop_registry.get(kind)
    if formula is None and getattr(func, "namespace", None) == "bitsandbytes":
        formula = _BITSANDBYTES_FORMULAS.get(packet.__name__)
    if formula is None:
        return 0
    if kind not in _QUERY_POSITION:
        return _evaluate_formula(formula, args, kwargs or {}, result)
    query = _QUERY_POSITION[kind]
    flops = _evaluate_formula(formula, _expand_kv_heads(query, args), kwargs or {}, result)
    if not flops or not _is_causal(func, args, kwargs or {}):
        return flops
    n_q, n_k = args[query].shape[2], args[query + 1].shape[2]
    # With PyTorch's `is_causal`, query i attends to the keys 0 to i, or to all keys if there are
    # fewer.
    growing = min(n_q, n_k)  # number of queries that attend to 1, 2, 3, ... keys
    scores = growing * (growing + 1) // 2 + (n_q - growing) * n_k
    return flops // (n_q * n_k) * scores


def own_formulas() -> dict[Any, Callable[..., int]]:
    """Return FLOP formulas that extend or replace formulas of PyTorch's `FlopCounterMode`.

    The formulas are for fused attention and, if bitsandbytes has been imported, for the matrix
    products of bitsandbytes. To use them, pass the result to `FlopCounterMode` as its argument
    `custom_mapping`.

    Returns:
        A dict from operator packet, such as `torch.ops.aten.mm`, to a function that takes the
        operator's arguments and returns FLOPs.
    """

    def formula(packet: Any) -> Callable[..., int]:
        def count(*args, out_val=None, **kwargs) -> int:
            return flops_of(packet.default, args, kwargs, out_val)

        count._get_raw = True  # otherwise `FlopCounterMode` passes shapes instead of tensors
        return count

    packets = [*_SAME_FORMULA_AS, *_QUERY_POSITION]
    if "bitsandbytes" in sys.modules:
        known = torch.ops.bitsandbytes
        packets += [getattr(known, name) for name in _BITSANDBYTES_FORMULAS if hasattr(known, name)]
    return {packet: formula(packet) for packet in packets}


def _is_causal(func, args: tuple, kwargs: dict) -> bool:
    """Return the value of `is_causal` in a call of a fused attention operator."""
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("is_causal")
    return args[position] if position < len(args) else kwargs.get("is_causal", False)


def _expand_kv_heads(query: int, args: tuple) -> tuple:
    """Return the arguments of fused attention as if key and value had as many heads as the query.

    Grouped-query attention has fewer heads for key and value. The formulas of torch 2.9 reject such
    arguments. The formulas of newer versions return the FLOPs of the expanded key and value.

    Args:
        query: Position of the query in `args`.
        args: Arguments of the operator. If key and value have fewer heads, the result contains
            their expanded shapes instead of the tensors.
    """
    batch, heads, *_ = args[query].shape
    shared = args[query + 1 : query + 3]
    if not heads or shared[0].shape[1] == heads:
        return args
    shapes = (torch.Size((batch, heads, *tensor.shape[2:])) for tensor in shared)
    return (*args[: query + 1], *shapes, *args[query + 3 :])


def _evaluate_formula(formula: Callable[..., int], args: tuple, kwargs: dict, result: Any) -> int:
    """Return the FLOPs that a formula gives for a call, from a cache if the shapes occurred before.

    Without the cache, evaluating a formula would take longer than a symbolic operator.
    """
    if kwargs or not all(isinstance(value, Tensor) for value in args):
        return formula(*args, **kwargs, out_val=result)
    key = formula, *[tensor.shape for tensor in args]
    if key not in _flops_by_shapes:
        _flops_by_shapes[key] = formula(*args, out_val=result)
    return _flops_by_shapes[key]


# Cache of `_evaluate_formula`: maps (formula, shapes of the arguments) to FLOPs.
_flops_by_shapes: dict[tuple, int] = {}
