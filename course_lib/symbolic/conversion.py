"""Dtype conversion of modules, which also works on symbolic tensors."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .._torch.symbolic import FakeTensor, is_symbolic
from .quantization import is_quantized

_apply = nn.Module._apply


class _Once:
    """Conversion that replaces each symbolic tensor by one other tensor, even if several modules
    share it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.made = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)

    def in_place_of(self, old: Tensor) -> Tensor:
        """Return the tensor that replaces this one, or the tensor itself if the conversion does not
        change it."""
        if old not in self.made:
            # The class of a parameter may have its own `to`, such as one that quantizes it.
            has_class = isinstance(old, nn.Parameter) and type(old) is not FakeTensor
            given = old if has_class else old.detach()
            with torch.no_grad():
                new = self(given)
            if has_class and new.device == old.device:
                old.data, new = new, old
            elif new is given:
                new = old
            elif isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            self.made[old] = new
        return self.made[old]


def apply_to_module(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
    """Replace the symbolic tensors of a module by converted ones, and return the module.

    This function replaces `Module._apply`, which `module.to` calls, because the data of a symbolic
    tensor cannot be replaced in place.
    """
    once = function if isinstance(function, _Once) else _Once(function)
    for child in module.children() if recurse else ():
        child._apply(once)
    if not is_symbolic(module, *module._parameters.values(), *module._buffers.values()):
        return _apply(module, once, recurse=False)
    for tensors in (module._parameters, module._buffers):
        tensors.update(
            {name: once.in_place_of(old) for name, old in tensors.items() if old is not None}
        )
    return module


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating-point parameters and buffers, as `module.to(dtype)` does,
    including symbolic ones. Weights that bitsandbytes has quantized are left unchanged.

    Complex tensors are left unchanged unless `dtype` is complex, because they would lose their
    imaginary parts. In a symbolic module, new tensors replace the old ones, whose gradients are
    dropped. Create the optimizer after the conversion.

    Args:
        module: Module with real or symbolic parameters and buffers.
        dtype: A floating-point or complex dtype.

    Returns:
        The module.
    """

    def convert(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() or (tensor.is_complex() and dtype.is_complex)
        return tensor.to(dtype) if wanted and not is_quantized(tensor) else tensor

    with patch.object(nn.Module, "_apply", apply_to_module):
        return module._apply(convert)
