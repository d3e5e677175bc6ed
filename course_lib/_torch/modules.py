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


# Attributes that every nn.Module has, which are therefore not settings. The exception is
# `training`, which counts as a setting.
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
    """Return a pair (name, comparable value) for each plain attribute of a module.

    `_comparable` keeps values that determine which operators run, such as the stride of a
    convolution. It simplifies values that do not, such as layer numbers and the exact value of a
    dropout rate.
    """
    return [(name, _comparable(name, value)) for name, value in attributes_of(part).items()]


def _comparable(name: str, value: Any) -> Any:
    """Return a simplified value of a module's setting, by which two settings are compared.

    A float is replaced by True if it is 0 and by False otherwise. A layer number is replaced by the
    class `int`. An object whose class is not in `_COMPARED_TYPES` is replaced by its class.
    Containers are replaced item by item.

    Args:
        name: Name of the attribute that has the setting.
        value: Value of the attribute.
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
        written_by: The module that owns the buffers in the dictionary, if the module's forward is
            expected to write into these buffers; otherwise None.
    """

    name: str
    values: dict[str, Any]
    names: Callable[[], Iterable[str]]
    written_by: nn.Module | None = None

    def read(self) -> dict[str, Any]:
        """Return a dict with those entries of the dictionary whose keys `names` returns."""
        return {name: self.values[name] for name in self.names()}

    def write(self, values: dict[str, Any]) -> None:
        """Replace the entries that `read` returns by those of `values`; keep all other entries.

        Keys that `names` returns but that are not in `values` are deleted. The dictionary is
        changed directly, without a call of `nn.Module.__setattr__`.
        """
        # If keys were added, removed or reordered, all entries are deleted first. Adding them again
        # restores the order of parameters and buffers.
        if [*self.names()] != [*values]:
            for name in [*self.names()]:
                del self.values[name]
        self.values.update(values)
