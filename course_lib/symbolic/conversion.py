"""Convert the dtype of modules whose parameters and buffers may be symbolic."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .._torch.symbolic import FakeTensor, is_symbolic
from .quantization import is_quantized

_apply = nn.Module._apply


class _ConvertOnce:
    """Function object that converts tensors, and converts each symbolic tensor only once.

    Modules that share a tensor therefore share the converted tensor, too.

    Args:
        function: Function that converts a tensor.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.replacements = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)

    def replacement_of(self, old: Tensor) -> Tensor:
        """Return the converted tensor that replaces a symbolic parameter or buffer.

        If the conversion does not change the tensor, the result is `old` itself.
        """
        if old not in self.replacements:
            # A parameter with a class of its own is not detached, because this class can have its
            # own method `to`, for example one that quantizes the parameter.
            has_class = isinstance(old, nn.Parameter) and type(old) is not FakeTensor
            source = old if has_class else old.detach()
            with torch.no_grad():
                new = self(source)
            if has_class and new.device == old.device:
                old.data, new = new, old
            elif new is source:
                new = old
            elif isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            self.replacements[old] = new
        return self.replacements[old]


def apply_to_module(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
    """Convert a module's parameters and buffers with a function, as `Module._apply` does.

    The tensors may be symbolic, that is, have a shape and a dtype but no values. PyTorch's own
    `_apply` replaces the data of each tensor in place, which is not possible for a symbolic tensor.
    This function puts a new tensor into the module instead. `symbolic()` installs this function as
    `Module._apply`, which `module.to` calls.

    Args:
        module: The module.
        function: Function that takes a tensor and returns the converted tensor.
        recurse: Whether to convert submodules too.

    Returns:
        The module.
    """
    convert_once = function if isinstance(function, _ConvertOnce) else _ConvertOnce(function)
    for child in module.children() if recurse else ():
        child._apply(convert_once)
    if not is_symbolic(module, *module._parameters.values(), *module._buffers.values()):
        return _apply(module, convert_once, recurse=False)
    for tensors in (module._parameters, module._buffers):
        tensors.update(
            {
                name: convert_once.replacement_of(old)
                for name, old in tensors.items()
                if old is not None
            }
        )
    return module


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating-point parameters and buffers, as `module.to(dtype)` does.

    Two kinds of tensors are left unchanged: weights that bitsandbytes has quantized, and complex
    tensors if `dtype` is not complex, because they would lose their imaginary parts. If the tensors
    are symbolic (with shapes but without values), the module gets new tensors without gradients, so
    create the optimizer after the conversion.

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
