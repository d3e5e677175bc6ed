"""Quantized weights of bitsandbytes, and parameters of other subclasses of `nn.Parameter`, on
symbolic tensors.

Such classes make their instances with `Tensor._make_subclass`, which refuses symbolic tensors. In
symbolic mode the instance is made of a class that is derived from both the parameter's class and
`FakeTensor`. It runs the methods of its own class, such as the one that quantizes it, and its
operators have symbolic kernels. bitsandbytes registers those of its own operators itself.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .._torch.modes import disable_current_modes
from .._torch.symbolic import FakeTensor, FakeTensorMode, is_symbolic

_make_subclass = Tensor._make_subclass
# On some CPUs bitsandbytes warns when it is imported without the package `kernels`, which it uses
# only to evaluate models.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def parameter_subclasses() -> Iterator[None]:
    """Make subclasses of `nn.Parameter` of symbolic tensors inside the block."""
    with ExitStack() as stack:

        def make(cls: type, data: Tensor, requires_grad: bool = False, **options: Any) -> Tensor:
            if not isinstance(data, FakeTensor) or not is_parameter_subclass(cls):
                return _make_subclass(cls, data, requires_grad, **options)
            _adapt_bitsandbytes(data.fake_mode, stack)
            return _of_class(cls, data.detach(), requires_grad)

        stack.enter_context(patch.object(Tensor, "_make_subclass", make))
        yield


def _adapt_bitsandbytes(mode: FakeTensorMode, stack: ExitStack) -> None:
    """Let bitsandbytes run on the mode's tensors until the stack is closed, if it is imported.

    It uses the products of 8-bit weights of the mode's kind of device.
    """
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None or is_symbolic(functional.name2qmap.get("dynamic")):
        return
    # The table of double quantization, which bitsandbytes makes once per process.
    with disable_current_modes(), mode:  # it does not belong to a step that is metered
        table = torch.empty(256, dtype=torch.float32)
    stack.enter_context(patch.dict(functional.name2qmap, dynamic=table))
    if getattr(mode, "kind", "cpu") == "cuda":
        functions = sys.modules["bitsandbytes.autograd._functions"]
        stack.enter_context(patch.object(functions, "MatMul8bitFp", functions.MatMul8bitLt))
        stack.enter_context(patch.object(functions.logger, "disabled", True))  # a line per product


def copy_parameter_subclasses(
    symbolic: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter], memo: dict[int, Any]
) -> None:
    """Copy the parameters of subclasses of `nn.Parameter` as symbolic ones into a memo for
    `copy.deepcopy`.

    Such a class may copy its parameters without the operators that make other copies symbolic.
    Call this where `copy.deepcopy` makes symbolic tensors.

    Args:
        symbolic: Function that returns a symbolic tensor like a real one.
        parameters: Parameters of any class, of which the others are left out.
        memo: The memo. A copy of a parameter has copies of its attributes.
    """
    for parameter in parameters:
        if is_parameter_subclass(type(parameter)) and id(parameter) not in memo:
            with disable_current_modes():
                plain = parameter.detach()  # a tensor of PyTorch's own class
            bare = symbolic(plain)
            # Attributes may refer to the parameter, so the memo contains it before they are copied.
            made = memo[id(parameter)] = _of_class(type(parameter), bare, parameter.requires_grad)
            vars(made).update(copy.deepcopy(vars(parameter), memo))


def is_parameter_subclass(cls: type) -> bool:
    """Return whether a class is one of initialized parameters, other than `nn.Parameter` itself."""
    lazy = nn.parameter.UninitializedTensorMixin
    return issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not issubclass(cls, lazy)


def _of_class(cls: type[nn.Parameter], tensor: Any, requires_grad: bool) -> Any:
    """Turn a symbolic tensor into a parameter of a class, and return it."""
    tensor.__class__ = _symbolic_class(cls)
    return tensor.requires_grad_(requires_grad)


@cache
def _symbolic_class(cls: type[nn.Parameter]) -> type:
    """Return the class of symbolic parameters that have the name and the methods of a class."""
    if issubclass(cls, FakeTensor):
        return cls
    return type(cls)(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor holds the bits of a weight that bitsandbytes has quantized.

    They may be stored in a floating-point dtype.
    """
    return getattr(tensor, "bnb_quantized", False)


def quantization_state(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that bitsandbytes keeps in addition to a model's quantized weights.

    They are the largest magnitudes of blocks or rows, their own quantization state with double
    quantization, and the tables of codes.
    """
    if "bitsandbytes" in sys.modules:
        for module in model.modules():
            for holder in (module, *module._parameters.values()):
                if _is_of_bitsandbytes(holder):
                    for value in vars(holder).values():
                        yield from _tensors_of(value)


def _is_of_bitsandbytes(value: Any) -> bool:
    return any(each.__module__.startswith("bitsandbytes.") for each in type(value).__mro__)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in the attributes of an object of bitsandbytes."""
    if isinstance(value, Tensor):
        yield value
    elif _is_of_bitsandbytes(value) and not isinstance(value, nn.Module):
        for part in vars(value).values():
            yield from _tensors_of(part)
