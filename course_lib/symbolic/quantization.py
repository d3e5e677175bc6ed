"""Make symbolic parameters of subclasses of `nn.Parameter`, such as those of bitsandbytes.

Such subclasses make their instances with `Tensor._make_subclass`, which rejects symbolic tensors.
Therefore this module makes an instance of a class that is derived from both the parameter's class
and `FakeTensor`. The instance has the methods of the parameter's class, such as the method that
quantizes the parameter. Operators on the instance run their symbolic kernels. bitsandbytes itself
registers symbolic kernels for its operators.
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
    """Inside a `with` block, allow subclasses of `nn.Parameter` to be made from symbolic tensors.

    Outside the block, `Tensor._make_subclass`, which these classes call, rejects symbolic tensors.
    """
    with ExitStack() as stack:

        def make(cls: type, data: Tensor, requires_grad: bool = False, **options: Any) -> Tensor:
            if not isinstance(data, FakeTensor) or not is_parameter_subclass(cls):
                return _make_subclass(cls, data, requires_grad, **options)
            _adapt_bitsandbytes(data.fake_mode, stack)
            return _as_parameter_of_class(cls, data.detach(), requires_grad)

        stack.enter_context(patch.object(Tensor, "_make_subclass", make))
        yield


def _adapt_bitsandbytes(mode: FakeTensorMode, stack: ExitStack) -> None:
    """Prepare bitsandbytes, if it is imported, for the mode's symbolic tensors.

    If the mode's kind is "cuda", 8-bit layers run the matrix product that they run on CUDA.

    Args:
        mode: The symbolic mode.
        stack: Exit stack. Closing it undoes the changes to bitsandbytes.
    """
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None or is_symbolic(functional.name2qmap.get("dynamic")):
        return
    # bitsandbytes makes this table for double quantization once per process. A meter must not count
    # it as part of the step.
    with disable_current_modes(), mode:
        table = torch.empty(256, dtype=torch.float32)
    stack.enter_context(patch.dict(functional.name2qmap, dynamic=table))
    if getattr(mode, "kind", "cpu") == "cuda":
        functions = sys.modules["bitsandbytes.autograd._functions"]
        stack.enter_context(patch.object(functions, "MatMul8bitFp", functions.MatMul8bitLt))
        # The logger would print a line per matrix product.
        stack.enter_context(patch.object(functions.logger, "disabled", True))


def copy_parameter_subclasses(
    symbolic: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter], memo: dict[int, Any]
) -> None:
    """Copy parameters whose class is a subclass of `nn.Parameter`, as symbolic tensors.

    Call this function before `copy.deepcopy` copies the model inside a dispatch mode that makes the
    copied tensors symbolic. The function adds its copies to `memo`, so that `copy.deepcopy` uses
    them instead of copying these parameters. The mode alone does not suffice, because a subclass
    can copy its parameters without calling operators.

    Args:
        symbolic: Function that returns a symbolic tensor with the shape and dtype of a real tensor.
        parameters: Parameters of any class. Plain `nn.Parameter` objects are ignored.
        memo: Memo of `copy.deepcopy`: a dict from the `id` of an object to its copy. The symbolic
            copies are added to this dict. They also have copies of the parameters' attributes.
    """
    for parameter in parameters:
        if is_parameter_subclass(type(parameter)) and id(parameter) not in memo:
            with disable_current_modes():
                plain = parameter.detach()  # a tensor of PyTorch's own class
            cls, copied = type(parameter), symbolic(plain)
            copied = _as_parameter_of_class(cls, copied, parameter.requires_grad)
            # An attribute can refer to the parameter itself. Therefore the parameter's copy is put
            # into the memo before the attributes are copied.
            memo[id(parameter)] = copied
            vars(copied).update(copy.deepcopy(vars(parameter), memo))


def is_parameter_subclass(cls: type) -> bool:
    """Return whether a class is a subclass of `nn.Parameter`, but not `nn.Parameter` itself.

    The result is False also for PyTorch's classes of uninitialized parameters, which lazy modules
    have.
    """
    lazy = nn.parameter.UninitializedTensorMixin
    return issubclass(cls, nn.Parameter) and cls is not nn.Parameter and not issubclass(cls, lazy)


def _as_parameter_of_class(cls: type[nn.Parameter], tensor: Any, requires_grad: bool) -> Any:
    """Turn a symbolic tensor into a symbolic parameter of class `cls`, in place, and return it."""
    tensor.__class__ = _symbolic_class(cls)
    return tensor.requires_grad_(requires_grad)


@cache
def _symbolic_class(cls: type[nn.Parameter]) -> type:
    """Return the class of symbolic parameters that have the name and the methods of `cls`."""
    if issubclass(cls, FakeTensor):
        return cls
    return type(cls)(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight that bitsandbytes has quantized.

    The dtype does not show whether a weight is quantized, because bitsandbytes may store the
    quantized bits in a floating-point dtype.
    """
    return getattr(tensor, "bnb_quantized", False)


def quantization_state(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that bitsandbytes stores in addition to a model's quantized weights.

    These tensors are the scales (the largest magnitude of each block or row) and the tables of
    codes. With double quantization, the scales of the quantized scales are yielded too.
    """
    if "bitsandbytes" in sys.modules:
        for module in model.modules():
            for holder in (module, *module._parameters.values()):
                if _is_of_bitsandbytes(holder):
                    for value in vars(holder).values():
                        yield from _tensors_of(value)


def _is_of_bitsandbytes(value: Any) -> bool:
    """Return whether an object's class, or one of its base classes, is defined by bitsandbytes."""
    return any(each.__module__.startswith("bitsandbytes.") for each in type(value).__mro__)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield `value` if it is a tensor, or the tensors in its attributes if bitsandbytes made it."""
    if isinstance(value, Tensor):
        yield value
    elif _is_of_bitsandbytes(value) and not isinstance(value, nn.Module):
        for part in vars(value).values():
            yield from _tensors_of(part)
