"""Read and restore attributes of modules, and find out whether modules run the same operators."""

import re
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Matches names of attributes that contain the number of a block, such as `layer_idx`.
NUMBER_ATTRIBUTES = re.compile("idx|index|layer|number")
# Types of settings that `_comparable` compares by their values.
_COMPARED_TYPES = (str, int, NoneType, torch.dtype, torch.device, FunctionType, BuiltinFunctionType)


def kind_of(tensor: Tensor) -> tuple:
    """Return the tuple (shape, dtype, device, requires_grad) of a tensor."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


# The attributes of every nn.Module, except `training`, which is a setting like others.
_MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"training"} | {"forward"}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings and other plain attributes, as a dict from name to value.

    The dict does not include parameters, buffers, submodules and hooks. It also does not include
    weights that a hook computes before each forward pass, as weight norm and pruning do.
    """
    hooks = module._forward_pre_hooks.values()
    computed = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES and name not in computed
    }


def module_signature(module: nn.Module) -> tuple:
    """Return a tuple that determines which operators a module runs.

    Modules with equal tuples run the same operators on inputs of the same shapes and dtypes. The
    tuple describes the structure and the settings of the module, and the shapes and dtypes of its
    tensors, but not their values. A setting that is an object of a user's class is described only
    by its class, so modules that differ in such an object may have equal tuples.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        *((name, type(part), *_settings(part)) for name, part in module.named_modules()),
        *((name, *kind_of(tensor)) for name, tensor in tensors),
    )


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """Return pairs (name, value) of the attributes that determine which operators a module runs.

    An example is the stride of a convolution. Layer numbers and the values of nonzero floats, such
    as dropout rates, do not affect the result, so modules that differ only in these count as equal.
    """
    return [(name, _comparable(name, value)) for name, value in attributes_of(part).items()]


def _comparable(name: str, value: Any) -> Any:
    """Return a value that is equal for settings which count as equal.

    A float is replaced by whether it is 0, and a layer number by `int`. An object whose class is
    not in `_COMPARED_TYPES` is replaced by its class. Containers are replaced item by item.

    Args:
        name: Name of the attribute.
        value: Its value.
    """
    if type(value) is int and NUMBER_ATTRIBUTES.search(name):
        return int
    if type(value) is float:
        return value == 0
    if isinstance(value, tuple | list):
        return tuple(_comparable(name, each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _comparable(name, each)) for key, each in value.items())
    return value if isinstance(value, _COMPARED_TYPES) else type(value)


class Namespace(NamedTuple):
    """Dictionary of a module, such as its `__dict__` or its buffers, to be saved and restored.

    Attributes:
        name: Name of the module in the model or block.
        values: The dictionary.
        names: Function that returns the keys whose values are saved and restored.
        written_by: The module whose buffers the dictionary contains, if its forward is expected to
            write into them; otherwise None.
    """

    name: str
    values: dict[str, Any]
    names: Callable[[], Iterable[str]]
    written_by: nn.Module | None = None

    def read(self) -> dict[str, Any]:
        """Return a copy of the dictionary with the keys that `names` returns."""
        return {name: self.values[name] for name in self.names()}

    def write(self, values: dict[str, Any]) -> None:
        """Replace the entries whose keys `names` returns by the entries of `values`.

        The dictionary is changed directly, without a call of `nn.Module.__setattr__`.
        """
        # If keys were added or removed, all are deleted first, so that the order of parameters and
        # buffers is restored, too.
        if [*self.names()] != [*values]:
            for name in [*self.names()]:
                del self.values[name]
        self.values.update(values)
