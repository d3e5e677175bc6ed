"""Read and restore attributes of modules, and compare modules by the operators that they run."""

import re
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NUMBERED = re.compile(
    "idx|index|layer|number"
)  # names of attributes that hold the number of a block


_SIMPLE = (str, int, NoneType, torch.dtype, torch.device, FunctionType, BuiltinFunctionType)


def kind_of(tensor: Tensor) -> tuple:
    """Return a tensor's shape, dtype, device and `requires_grad`."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


# nn.Module's own attributes, except the training mode, which is a setting like others
_INTERNAL = vars(nn.Module()).keys() - {"training"} | {"forward"}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes, as a dict from name to value.

    The dict does not include parameters, buffers, submodules and hooks. It does not include weights
    that a hook computes before each run either, as for weight norm and pruning.
    """
    hooks = module._forward_pre_hooks.values()
    computed = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _INTERNAL and name not in computed
    }


def look_of(module: nn.Module) -> tuple:
    """Return the structure and the settings of a module, without the values of its tensors.

    Modules with equal results run the same operators on inputs of the same kind, if no setting is
    an object of a class of its own: only the classes of such objects are compared.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        *((name, type(part), *_settings(part)) for name, part in module.named_modules()),
        *((name, *kind_of(tensor)) for name, tensor in tensors),
    )


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that determine how it runs, such as a stride.

    The result does not depend on layer numbers and on the values of nonzero floats, such as dropout
    rates, so modules that differ only in these count as equal.
    """
    return [(name, _comparable(name, value)) for name, value in attributes_of(part).items()]


def _comparable(name: str, value: Any) -> Any:
    """Return what is compared of a value: the value, or the class of an object of another kind."""
    if type(value) is int and NUMBERED.search(name):
        return int
    if type(value) is float:
        return value == 0
    if isinstance(value, tuple | list):
        return tuple(_comparable(name, each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _comparable(name, each)) for key, each in value.items())
    return value if isinstance(value, _SIMPLE) else type(value)


class Namespace(NamedTuple):
    """A dictionary of a module, such as its `__dict__` or its buffers.

    Attributes:
        name: Name of the module in the block.
        values: The dictionary.
        names: Function that returns the keys whose values are restored.
        written_by: The module if its buffers are written to, or else None.
    """

    name: str
    values: dict[str, Any]
    names: Callable[[], Iterable[str]]
    written_by: nn.Module | None = None

    def read(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.names()}

    def write(self, values: dict[str, Any]) -> None:
        """Replace the values directly in the dictionary, without `nn.Module.__setattr__`."""
        if [*self.names()] != [*values]:  # keeps the order of parameters and buffers
            for name in [*self.names()]:
                del self.values[name]
        self.values.update(values)
