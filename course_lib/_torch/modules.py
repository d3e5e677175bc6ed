"""Read and restore attributes of modules, and compare modules by the operators that they run."""

import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

NUMBERED = re.compile(
    "idx|index|layer|number"
)  # names of attributes that hold the number of a block


def kind_of(tensor: Tensor) -> tuple:
    """Return a tensor's shape, dtype, device and `requires_grad`."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def look_of(module: nn.Module) -> tuple:
    """Return all properties of a module except its tensors' values.

    Modules with equal results run the same operators.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        *((name, type(part), *_settings(part)) for name, part in module.named_modules()),
        *((name, *kind_of(tensor)) for name, tensor in tensors),
    )


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that determine how it runs, such as a sliding window.

    The result does not depend on layer numbers and on the values of nonzero floats, such as dropout
    rates, so modules that differ only in these count as equal.
    """

    def comparable(name: str, value: Any) -> Any:
        if type(value) is int and NUMBERED.search(name):
            return int
        return value == 0 if type(value) is float else value

    simple = (str, int, float, NoneType)
    return [
        (name, comparable(name, value))
        for name, value in vars(part).items()
        if isinstance(value, simple)
    ]


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
