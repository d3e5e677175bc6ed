"""State of a block, in addition to its arguments, that its recomputation needs.

`checkpoint` gives the recomputation the arguments of the first run and the random numbers of
PyTorch's global generators. A block may compute with more than these. This module keeps:

- **Generators**: the global random number generators of Python and NumPy, and all generators of
  PyTorch, Python and NumPy that are attributes of the block's modules.
- **Attributes** of the block's modules, except parameters, buffers and submodules. It records which
  objects the attributes refer to, and the content of tensors, arrays, lists, tuples, dicts, sets
  and deques. Examples are the load of a mixture-of-experts gate, a running average of an
  activation, and a counter of calls.

A recomputation works on copies. It does not write to tensors of the first run, so a graph that has
saved one of them stays valid. After the recomputation the state from before it is restored.

This module does not keep parameters and buffers, other objects that are changed in place, or
anything outside the block's modules, such as global variables and files. With a `Comparison`, a
recomputation that differs because of them raises an error.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from .._torch import (
    attributes_of,
    map_tensors,
    modes_when_recomputed,
    tensors_in,
    torch_func_refused,
    version,
)
from .comparison import Comparison, checksum

# ---- generators


class _Generator:
    """A source of random numbers, with functions that read and set its state."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]):
        self.get, self.set = get, set


_GLOBAL = (
    _Generator(random.getstate, random.setstate),
    _Generator(lambda: np.random.get_state(legacy=False), np.random.set_state),
)


def _as_generator(value: Any) -> _Generator | None:
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return _Generator(lambda: value.state, lambda state: setattr(value, "state", state))
    if isinstance(value, np.random.RandomState):
        return _Generator(lambda: value.get_state(legacy=False), value.set_state)
    return None


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


# ---- attributes


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


# A routing layer may keep its last loads in a deque, and count calls in a defaultdict or an array.
# To refuse a change of these, they would have to be copied and compared just the same.
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, deque)


class _Tensor:
    """A tensor to which an attribute referred before the first run.

    If the first run changes its values, this object keeps a copy of the old ones.

    Args:
        name: Name of the attribute, for error messages.
        tensor: The tensor.
    """

    def __init__(self, name: str, tensor: Tensor):
        self.name, self.tensor = name, tensor
        self.version = version(tensor)
        # No copy is needed of a tensor that requires gradients: if it is changed in place, autograd
        # raises an error anyway.
        self.copy = None if tensor.requires_grad else tensor.detach().clone()

    def drop_unchanged(self) -> None:
        """Drop the copy if the first run did not change the tensor."""
        if self.version is not None and version(self.tensor) == self.version:
            self.copy = None

    def restore(self) -> Tensor:
        """Return the tensor, or a copy with its old values, for a recomputation."""
        if self.copy is not None:
            return self.copy.clone()
        if version(self.tensor) != self.version:
            raise RuntimeError(
                f"{self.name} was changed in place after the block had run with it, so its"
                " recomputation would compute with other values. Assign a new tensor to the"
                " attribute instead, or pass the tensor to the block as an argument"
            )
        return self.tensor


class _Container:
    """A container to which an attribute referred before the first run, and its items then.

    Args:
        container: A NumPy array, or an instance of one of `_CONTAINERS`.
        items: Records of its items, or for an array, a copy of the array as the only item.
    """

    def __init__(self, container: Any, items: list[Any]):
        self.container, self.items = container, items
        self.keys = list(container) if isinstance(container, dict) else None

    def restore(self, items: list[Any]) -> Any:
        """Return a new container with these items, which are restored already."""
        if isinstance(self.container, np.ndarray):
            return items[0].copy()
        if isinstance(self.container, tuple):
            same = all(a is b for a, b in zip(items, self.container, strict=True))
            return self.container if same else tuple(items)
        new = copy.copy(self.container)  # keeps a deque's length and a defaultdict's default
        new.clear()
        fill = new.extend if isinstance(new, (list, deque)) else new.update
        fill(items if self.keys is None else zip(self.keys, items, strict=True))
        return new


def _restore(record: Any, copies: dict[int, Any]) -> Any:
    """Return the value of an attribute for a recomputation.

    Args:
        record: A `_Tensor` or a `_Container`, or a value of another type, which is not copied.
        copies: id of a record -> the value restored from it. It is filled here, so that an object
            with several names is restored only once.
    """
    if not isinstance(record, (_Tensor, _Container)):
        return record
    if id(record) not in copies:
        if isinstance(record, _Tensor):
            copies[id(record)] = record.restore()
        else:
            copies[id(record)] = record.restore([_restore(item, copies) for item in record.items])
    return copies[id(record)]


class _Namespace:
    """A dictionary of a module, such as its `__dict__` or its buffers.

    Args:
        name: Name of the module in the block.
        values: The dictionary.
        names: Function that returns the keys whose values are restored.
    """

    def __init__(self, name: str, values: dict[str, Any], names: Callable[[], Iterable[str]]):
        self.name, self.values, self.names = name, values, names

    def read(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.names()}

    def write(self, values: dict[str, Any]) -> None:
        """Replace the values directly in the dictionary, without `nn.Module.__setattr__`."""
        for name in set(self.names()) - values.keys():
            del self.values[name]
        self.values.update(values)


def _namespaces(block: nn.Module) -> Iterator[_Namespace]:
    for name, module in block.named_modules():
        yield _Namespace(name, vars(module), lambda module=module: attributes_of(module))
        if is_instance_norm(module):
            yield _Namespace(name, module._buffers, lambda module=module: list(module._buffers))


class _Attributes:
    """The attributes of a block's modules before its first run."""

    def __init__(self, block: nn.Module):
        self.block = block
        self.namespaces = list(_namespaces(block))
        self.records: dict[int, Any] = {}  # id of an object -> its record, shared by all its names
        self.tensors: list[_Tensor] = []
        self.generators: list[_Generator] = []
        self.initial = [
            {
                key: self._record(f"{namespace.name}.{key}".removeprefix("."), value)
                for key, value in namespace.read().items()
            }
            for namespace in self.namespaces
        ]
        del self.records

    def _record(self, name: str, value: Any) -> Any:
        if id(value) not in self.records:
            self.records[id(value)] = self._new_record(name, value)
        return self.records[id(value)]

    def _new_record(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            # Parameters are not recorded, because only the optimizer changes them.
            if isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad):
                return value
            self.tensors.append(_Tensor(name, value))
            return self.tensors[-1]
        if isinstance(value, np.ndarray):
            return _Container(value, [value.copy()]) if value.dtype != object else value
        if type(value) in _CONTAINERS:
            self.records[id(value)] = value  # in case it contains itself
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return _Container(
                value, [self._record(f"{name}[{key!r}]", item) for key, item in items]
            )
        if generator := _as_generator(value):
            self.generators.append(generator)
        return value

    def drop_unchanged(self) -> None:
        """After the first run, drop the copies of tensors that it did not change.

        Raises:
            RuntimeError: The first run changed a tensor that shares its memory with another one,
                and copies of the two would not share memory.
        """
        for tensor in self.tensors:
            tensor.drop_unchanged()
        changed = [
            record
            for record in self.tensors
            if record.copy is not None and record.version is not None
        ]
        if not changed:
            return
        others = {id(record.tensor): (record.name, record.tensor) for record in self.tensors}
        others |= {id(tensor): (name, tensor) for name, tensor in self.block.named_buffers()}
        for record in changed:
            for name, tensor in others.values():
                if tensor is not record.tensor and _shares_memory(tensor, record.tensor):
                    raise RuntimeError(
                        f"{record.name} was changed in place, but shares its memory with {name}, so"
                        " they cannot be restored for the recomputation. Keep only one of them as"
                        " an attribute, and compute the other one from it in forward"
                    )

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Inside the `with` block, set the attributes to their values before the first run.

        Changed tensors and containers are copies. Afterwards the attributes have their current
        values again.
        """
        current = [namespace.read() for namespace in self.namespaces]
        copies: dict[int, Any] = {}
        initial = [
            {key: _restore(record, copies) for key, record in records_by_name.items()}
            for records_by_name in self.initial
        ]
        try:
            self._write(initial)
            yield
        finally:
            self._write(current)

    def _write(self, values_per_namespace: list[dict[str, Any]]) -> None:
        for namespace, values in zip(self.namespaces, values_per_namespace, strict=True):
            namespace.write(values)


# ---- the state of a block that runs several times


class BlockState:
    """State of a block before its first run, which every later run starts from.

    Args:
        block: The module whose state is kept.
        comparison: Comparison of the later runs with the first one, or None to not compare them.
        statistics: Whether a later run leaves the running statistics of batch norms unchanged.
            Otherwise it updates them again.
    """

    def __init__(
        self, block: nn.Module, comparison: Comparison | None = None, *, statistics: bool = False
    ):
        self.block, self.comparison, self.statistics = block, comparison, statistics
        self.attributes: _Attributes | None = None  # None before the first run
        self.running: list[Tensor] = []  # statistics that the first run updated
        self.generators: list[tuple[_Generator, Any]] = []
        self.output: Any = None  # checksum of the first run's output, if runs are compared

    def next_run(self, runs_again: bool = True) -> AbstractContextManager:
        """Return the context manager for the block's next run.

        Args:
            runs_again: Whether another run follows. A block that runs only once needs no copies.
        """
        if self.attributes is not None:
            return self.repeat()
        return self.first_run() if runs_again else nullcontext()

    def check_output(self, output: Tensor, runs_again: bool) -> None:
        """If runs are compared, raise an error if an output differs from that of the first run.

        Args:
            output: Output of the run that has just ended.
            runs_again: Whether another run follows.
        """
        if self.comparison is None:
            return
        if difference := self.comparison.difference(self.output, output, "its output"):
            self.comparison.fail(difference)
        if runs_again and self.output is None:
            self.output = checksum(output)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Record the state that the first run, inside the `with` block, uses and changes."""
        attributes = self.attributes = _Attributes(self.block)
        self.running = statistics_of(self.block)
        with _disable_current_modes():  # hides generator states from meters and symbolic modes
            states = [
                (generator, generator.get()) for generator in (*_GLOBAL, *attributes.generators)
            ]
        yield
        attributes.drop_unchanged()
        with _disable_current_modes():
            self.generators = [
                (generator, state)
                for generator, state in states
                if not _equal(generator.get(), state)
            ]

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Restore the state before the first run, and after the `with` block the current state."""
        with _disable_current_modes():
            current = [(generator, generator.get()) for generator, _ in self.generators]
            for generator, state in self.generators:
                generator.set(state)
        statistics = [(buffer, buffer.clone()) for buffer in self.running if self.statistics]
        try:
            with self._check_unchanged(), self.attributes.restore():
                yield
        finally:
            with torch.no_grad():
                for buffer, value in statistics:
                    buffer.copy_(value)
            with _disable_current_modes():
                for generator, state in current:
                    generator.set(state)

    @contextmanager
    def _check_unchanged(self) -> Iterator[None]:
        """Raise an error if the run inside the `with` block changes a tensor of the block.

        Running statistics may change. Without a comparison, nothing is checked.
        """
        comparison = self.comparison
        if comparison is None:
            yield
            return
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        tensors |= {record.name: record.tensor for record in self.attributes.tensors}
        comparison.start(self.running, tensors)
        try:
            yield
        except Exception:
            raise  # the message of this error is more specific
        except BaseException:  # early stop ends a recomputation with a BaseException
            comparison.finish(tensors)
            raise
        comparison.finish(tensors)


# A function may change the lists and dicts that it receives, so they are copied.
_map_copying = partial(map_tensors, copied=(list, dict))
_PLACEHOLDER = torch.empty(0, device="cpu")


class Repeatable:
    """A block's function, whose recomputation starts from what its first run started from.

    PyTorch's checkpoint saves only tensors that are arguments themselves. It passes the same lists
    and dicts to both runs, so a block that appends to a list would append twice. Therefore the
    checkpoint receives the tensors alone, wherever they are in nested lists, tuples, mappings and
    dataclasses. The first run receives the caller's own arguments. The recomputation receives new
    lists and dicts with their content before the first run, and starts from the block's state
    before the first run.

    An object is used for one call of the function. Error messages name the function.

    Args:
        function: The block's function.
        state: State of the block before its first run, or None to leave the state as it is.
    """

    def __init__(self, function: Callable, state: BlockState | None = None):
        self.function, self.state = function, state
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def checkpoint(self, args: tuple, kwargs: dict[str, Any], **options: Any) -> Any:
        """Return `function(*args, **kwargs)`, computed in PyTorch's checkpoint.

        Args:
            args, kwargs: The function's arguments.
            options: Options of `torch.utils.checkpoint.checkpoint` without reentrant autograd.
        """
        self.own_arguments = args, kwargs
        self.modes = modes_when_recomputed()
        tensors = list(tensors_in(self.own_arguments))
        self.inputs = _map_copying(lambda tensor: _PLACEHOLDER, self.own_arguments)
        return checkpoint(self, *tensors, use_reentrant=False, **options)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the function; the checkpoint calls this with the tensors among the arguments."""
        if self.own_arguments is not None:
            # They are released before the run, because only the checkpoint may hold the tensors.
            (args, kwargs), self.own_arguments, modes = self.own_arguments, None, []
        else:
            remaining, modes = iter(tensors), self.modes
            args, kwargs = _map_copying(lambda placeholder: next(remaining), self.inputs)
        stop = None
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if self.state is not None:
                stack.enter_context(self.state.next_run())
            stack.enter_context(torch_func_refused("a checkpoint"))
            try:
                return self.function(*args, **kwargs)
            except _StopRecomputationError as early_stop:
                stop = early_stop  # this is not an error of the block, whose state is checked
        try:
            raise stop
        finally:
            del stop  # its traceback refers to this frame


# ---- norms with running statistics


def statistics_of(block: nn.Module) -> list[Tensor]:
    """Return the running statistics of a block's batch norms that are in training mode.

    These batch norms update the statistics but do not normalize with them.
    """
    norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms if norm.training for buffer in norm.buffers()]


def is_instance_norm(module: nn.Module) -> bool:
    """Return whether a module is an instance norm in training mode.

    If an instance norm has running statistics, it updates them and also saves copies of them for
    backward. Its buffers are therefore treated like attributes: the recomputation starts from their
    values before the first run.
    """
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training
