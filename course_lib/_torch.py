"""Helpers for PyTorch that several modules need: containers, random numbers, autocast, modes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import operator
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ._check import describe

# ---- tensors in containers


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, in order.

    Other objects are not searched.
    """
    if isinstance(value, Tensor):
        yield value
    else:
        for item in items_in(value):
            yield from tensors_in(item)


def tensors_among(args, kwargs: Mapping | None = None) -> list[Tensor]:
    """Return the tensors among an operator's arguments, and in lists and tuples among them.

    This is faster than `tensors_in`, which also searches nested containers.
    """
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def map_tensors(
    function: Callable[[Any], Any],
    value: Any,
    *,
    kinds: type | tuple[type, ...] = Tensor,
    copied: tuple[type, ...] = (),
) -> Any:
    """Replace each tensor in `value` by `function(tensor)`.

    A container without tensors is returned as the same object, unless it is of one of the types
    `copied`.

    Args:
        function: Function of a tensor.
        value: A tensor, or a container of tensors.
        kinds: Types of the values that are replaced.
        copied: Types of containers that are always copied.
    """
    if isinstance(value, kinds):
        return function(value)
    old = items_in(value)
    new = [map_tensors(function, item, kinds=kinds, copied=copied) for item in old]
    same = all(map(operator.is_, old, new)) and not isinstance(value, copied)
    return value if same else _rebuild(value, new)


def items_in(value: Any) -> Collection[Any]:
    """Return the items of a list or tuple, the values of a mapping, or the fields of a dataclass.

    Any other object has none.
    """
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def _rebuild(value: Any, items: list) -> Any:
    """Return a new container of the same type as `value` with these items."""
    if isinstance(value, tuple):
        # torch.return_types take a list of items, unlike named tuples
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)  # keeps the type and other attributes of the object
    if isinstance(value, list):
        result[:] = items
    # before dataclasses, because a Hugging Face output is a mapping and a dataclass
    elif isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            result[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(result, field.name, item)
    return result


def elements_spanned(tensor: Tensor) -> int:
    """Count the elements from a tensor's first to its last in memory, including skipped ones.

    The tensor must have at least one element.
    """
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def written_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return (argument of the schema, value) of the arguments that an operator writes into."""
    arguments = func._schema.arguments
    bound = [
        *zip(arguments, args, strict=False),
        *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
    ]
    return [pair for pair in bound if pair[0].alias_info and pair[0].alias_info.is_write]


# ---- modules that run the same operators

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

    Modules count as equal if they differ only in a layer number or in a nonzero float, such as a
    dropout rate.
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


def version(tensor: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor, or None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


# ---- operators that write into tensors that they have saved for backward

# In training, rrelu saves the noise tensor for backward before it fills it with random numbers, and
# does not increase the tensor's version counter.
# `tests/sweep_gradients.py` looks for other such operators.
WRITES_AFTER_SAVING = (
    torch.ops.aten.rrelu_with_noise.default,
    torch.ops.aten.rrelu_with_noise_.default,
)


def writes_after_saving(node: Any) -> bool:
    """Return whether a node of autograd's graph belongs to one of `WRITES_AFTER_SAVING`."""
    return node is not None and node.name().startswith("RreluWithNoiseBackward")


def saved_value_may_differ(node: Any, saved: torch.Tensor) -> bool:
    """Return whether a tensor that a node of autograd's graph has saved may differ in an equal run.

    This is so for `rrelu`, which saves an uninitialized tensor before it draws its noise, and for
    `ctc_loss`, which never fills or reads the padding of its table. CUDA's kernels of
    `scaled_dot_product_attention` save the random generator's seed and offset as integers, which
    they leave uninitialized without dropout. If the seed of a dropout differs, so does the output,
    which is saved and compared too. A batch norm in training mode saves its running statistics
    before it updates them, and its backward pass does not read them.
    """
    if node is None:
        return False
    name = node.name()
    attention = name.startswith("ScaledDotProduct") and not saved.is_floating_point()
    norm = "BatchNorm" in name and saved.dim() == 1
    return attention or norm or name.startswith(("RreluWithNoiseBackward", "CtcLossBackward"))


# ---- attributes of modules

# nn.Module's own attributes, except the training mode, which is a setting like others
_INTERNAL = vars(nn.Module()).keys() - {"training"} | {"forward"}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes.

    They do not include parameters, buffers, submodules and hooks, nor weights that a hook computes
    before each run, as for weight norm and pruning.
    """
    hooks = module._forward_pre_hooks.values()
    computed = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _INTERNAL and name not in computed
    }


# ---- symbolic tensors


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


def is_symbolic(*tensors: Any) -> bool:
    """Return whether one of the tensors is symbolic (`course_lib.symbolic`).

    Without arguments, return whether new tensors are symbolic.
    """
    if not tensors:
        return torch._guards.detect_fake_mode() is not None
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def holders_of(storage: torch.UntypedStorage) -> int:
    """Return the number of a storage's holders: the tensors that share it, and its Python object,
    which counts as one holder or none, depending on the version of torch."""
    return torch._C._storage_Use_Count(storage._cdata)


def counted_kind() -> str:
    """Return the kind of device whose tensors are counted, "cpu" or "cuda".

    It is "cuda" in a symbolic mode of this kind, whose tensors are all on the CPU. There, what a
    step on CUDA keeps on the host must not be counted.
    """
    return getattr(torch._guards.detect_fake_mode(), "kind", "cpu")


@contextmanager
def not_collecting() -> Iterator[None]:
    """Disable garbage collection inside the block.

    Otherwise the collector would examine all symbolic tensors again in each of its runs.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# ---- optimizers


def needs_closure(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> bool:
    """Return whether `step` needs a closure that computes the loss, as for LBFGS."""
    arguments = inspect.signature(optimizer.step).parameters.values()
    return any(each.name == "closure" and each.default is each.empty for each in arguments)


def check_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer's step runs forward and backward passes itself."""
    if needs_closure(optimizer):
        raise TypeError(
            f"optimizer must step without a closure, got {describe(optimizer)}, whose step()"
            " computes the loss itself. Call its step(closure) in a loop of your own"
        )


def check_gradients_enabled() -> None:
    """Raise if gradients are switched off, because a training step needs them."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "gradients must be enabled for a training step, got a call inside torch.no_grad(),"
            " torch.inference_mode() or torch.set_grad_enabled(False)"
        )


def check_in_training(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is in evaluation mode, as schedule-free ones are before `train()`."""
    if any(group.get("train_mode") is False for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer must be in training mode, got {describe(optimizer)} in evaluation mode."
            " Call optimizer.train() before the step"
        )


# ---- saved-tensor hooks


def check_torch_func(error: BaseException | None, name: str) -> None:
    """Raise an error with advice if `error` says that `torch.func` does not support hooks.

    PyTorch raises it if saved-tensor hooks are set inside a transform such as `torch.func.grad`.

    Args:
        error: Error raised under saved-tensor hooks, or when they were set; None if there was none.
        name: Name of the context or function that sets the hooks, for the message.
    """
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev and hessian cannot be combined with"
            f" {name}, because PyTorch allows no saved-tensor hooks around them. Call"
            f" torch.autograd.grad(..., create_graph=True) instead, or call them outside of {name}"
        ) from error


@contextmanager
def torch_func_refused(name: str) -> Iterator[None]:
    """Apply `check_torch_func` to errors that are raised inside the block."""
    try:
        yield
    except RuntimeError as error:
        check_torch_func(error, name)
        raise


# ---- random numbers


class RandomState:
    """The states of the CPU's generator and of some devices' generators.

    Args:
        devices: Devices whose generators are included in addition to the CPU's. By default all CUDA
            devices in use. The CPU and devices without generators are ignored.
        counted: Whether meters count the tensor with the CPU generator's state, as they do if
            `torch.get_rng_state` creates it.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None, *, counted: bool = True):
        if devices is None:
            count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            devices = [torch.device("cuda", index) for index in range(count)]
        self.cpu = torch.get_rng_state() if counted else torch.default_generator.get_state()
        self.devices = {}
        for device in set(devices):
            if device.type not in ("cpu", "meta") and hasattr(
                getattr(torch, device.type, None), "get_rng_state"
            ):
                self.devices[device] = getattr(torch, device.type).get_rng_state(device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            getattr(torch, device.type).set_rng_state(state, device)

    def __eq__(self, other) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        same = self.devices.keys() == other.devices.keys() and torch.equal(self.cpu, other.cpu)
        return same and all(
            torch.equal(state, other.devices[device]) for device, state in self.devices.items()
        )

    __hash__ = None


class AllRandomState:
    """The states of all global generators: PyTorch's, Python's and NumPy's.

    The arguments are those of `RandomState`.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None, *, counted: bool = True):
        self.torch_state = RandomState(devices, counted=counted)
        self.python_state, self.numpy_state = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        self.torch_state.restore()
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@contextmanager
def random_numbers_undone() -> Iterator[None]:
    """Restore the generators after an error inside the block."""
    # not counted, because the state is not memory that the block uses
    state = AllRandomState(counted=False)
    try:
        yield
    except BaseException:
        state.restore()
        raise


# ---- autocast


class AutocastState:
    """Settings of `torch.autocast` for the CPU and the types of some devices."""

    def __init__(self, device_types: Iterable[str] = ()):
        kinds = {"cpu", *device_types}
        self.states = {
            kind: _autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restore(self, *, cache_enabled: bool | None = None) -> Iterator[None]:
        """Restore these settings inside the block.

        Args:
            cache_enabled: Setting of the cache; by default the stored one.
        """
        with ExitStack() as stack:
            for kind, (enabled, dtype, cached) in self.states.items():
                settings = (enabled, dtype, cached if cache_enabled is None else cache_enabled)
                if settings != _autocast(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, settings[0], cache_enabled=settings[2])
                    )
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def autocast_of(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the tensor's device, or None if autocast is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


# ---- dispatch and function modes


class ObserverMode(TorchDispatchMode):
    """A dispatch mode that does not disable code compiled by `torch.compile`.

    Under any other mode, Dynamo runs a frame without compiling it, and never compiles it again in
    the process. It sets this mode aside while it compiles, and the compiled code then runs under
    the mode, which sees the operators that the code calls.
    """

    # a compiled graph calls higher-order operators, such as those that repeat random numbers
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def modes_when_recomputed() -> list[TorchFunctionMode]:
    """Return the active function modes with an attribute `when_recomputed` that is true.

    Checkpoints enter these modes again for the recomputation.
    """
    return [
        mode
        for mode in _get_current_function_mode_stack()
        if getattr(mode, "when_recomputed", False)
    ]


# ---- devices


def wait_for(device: torch.device | str) -> None:
    """Block until the device has finished all its work; return at once for a CPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        getattr(torch, device.type).synchronize(device)
