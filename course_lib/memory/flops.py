"""FLOPs of an operator, by the formulas of `FlopCounterMode`.

`FlopCounterMode` itself is not used, because its hooks on modules keep tensors alive.

There is one difference. With a causal mask, fused attention is counted by the scores that its
queries see, whereas PyTorch's formulas count all scores. Fused kernels skip the scores above the
diagonal, except those in the tiles on the diagonal. FlashAttention's own benchmark halves its
count for the same reason.
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
# The fused attention of a CPU has no formula, so it is counted by the formula of a GPU's.
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
# Fused attention: position of the query among the arguments. Key and value follow it.
_QUERY_AT = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}


def _times_weight(x: Tensor, _, shape: Sequence[int], *others: Any, **named: Any) -> int:
    """Return the FLOPs of a product with a weight of this shape, which is packed."""
    return 2 * x.numel() * shape[0]


# Products of bitsandbytes, which registers no formulas.
_OF_BITSANDBYTES: dict[str, Callable[..., int]] = {
    "gemm_4bit": _times_weight,
    "gemv_4bit": _times_weight,
    "int8_scaled_mm": lambda x, w, *_, **__: 2 * x.numel() * w.shape[0],
}


def flops_of(func, args: tuple, kwargs: dict | None, result: Any) -> int:
    """Return the FLOPs of one call of an operator; 0 if it has no formula."""
    if isinstance(func, HigherOrderOperator):
        inside = next((i for i, each in enumerate(args) if isinstance(each, OpOverload)), None)
        if inside is None:
            return 0
        # Through these, compiled code runs an operator again with the same random numbers.
        result = result[1] if func is run_and_save_rng_state else result
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "rng_state"}
        func, args = args[inside], args[inside + 1 :]
    packet = getattr(func, "overloadpacket", None)
    kind = _COUNTED_AS.get(packet, packet)
    formula = flop_registry.get(kind)
    if formula is None and getattr(func, "namespace", None) == "bitsandbytes":
        formula = _OF_BITSANDBYTES.get(packet.__name__)
    if formula is None:
        return 0
    if kind not in _QUERY_AT:
        return _count_with(formula, args, kwargs or {}, result)
    query = _QUERY_AT[kind]
    flops = _count_with(formula, _with_all_heads(query, args), kwargs or {}, result)
    if not flops or not _is_causal(func, args, kwargs or {}):
        return flops
    n_q, n_k = args[query].shape[2], args[query + 1].shape[2]
    # With PyTorch's `is_causal`, query i sees the keys up to i: 1, 2, ... keys, and at most all.
    growing = min(n_q, n_k)
    seen = growing * (growing + 1) // 2 + (n_q - growing) * n_k
    return flops // (n_q * n_k) * seen


def own_formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas that PyTorch lacks, for fused attention and the products of bitsandbytes,
    in the form of `FlopCounterMode`'s `custom_mapping`.

    A counter with these formulas counts what `flops_of` counts.
    """

    def formula(packet: Any) -> Callable[..., int]:
        def count(*args, out_val=None, **kwargs) -> int:
            return flops_of(packet.default, args, kwargs, out_val)

        count._get_raw = True  # otherwise `FlopCounterMode` passes shapes instead of tensors
        return count

    packets = [*_COUNTED_AS, *_QUERY_AT]
    if "bitsandbytes" in sys.modules:
        known = torch.ops.bitsandbytes
        packets += [getattr(known, name) for name in _OF_BITSANDBYTES if hasattr(known, name)]
    return {packet: formula(packet) for packet in packets}


def _is_causal(func, args: tuple, kwargs: dict) -> bool:
    """Return the value of the operator's argument `is_causal`."""
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("is_causal")
    return args[position] if position < len(args) else kwargs.get("is_causal", False)


def _with_all_heads(query: int, args: tuple) -> tuple:
    """Return the arguments with as many heads for keys and values as for queries.

    The formulas of torch 2.9 refuse fewer heads, and those of newer versions count in this way.
    """
    batch, heads, *_ = args[query].shape
    shared = args[query + 1 : query + 3]
    if not heads or shared[0].shape[1] == heads:
        return args
    shapes = (torch.Size((batch, heads, *tensor.shape[2:])) for tensor in shared)
    return (*args[: query + 1], *shapes, *args[query + 3 :])


def _count_with(formula: Callable[..., int], args: tuple, kwargs: dict, result: Any) -> int:
    """Return the FLOPs by the formula, which is evaluated once for all tensors of these shapes.

    Evaluating a formula takes longer than running a symbolic operator.
    """
    if kwargs or not all(isinstance(value, Tensor) for value in args):
        return formula(*args, **kwargs, out_val=result)
    key = formula, *[tensor.shape for tensor in args]
    if key not in _known:
        _known[key] = formula(*args, out_val=result)
    return _known[key]


_known: dict[tuple, int] = {}
