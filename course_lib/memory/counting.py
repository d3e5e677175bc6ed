"""A meter that counts FLOPs too."""

from __future__ import annotations

from inspect import unwrap

import torch
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
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result
