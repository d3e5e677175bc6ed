"""State before the first run of a block or a step, from which later runs start.

A checkpoint, a schedule and a measurement run the same function several times. Each run must start
from the same state as the first one: random numbers, attributes, buffers, running statistics. This
module keeps this state. Options exclude the parts of the state that a caller restores by itself.

- `ModuleState` is a snapshot of the attributes and buffers of a block's modules.
- `StateBeforeFirstRun` records the state before the first run of a block and restores it for later
  runs.

A later run works on copies. It does not write to tensors of the first run, so a graph that has
saved one of them stays valid. At the end of a later run, the state from before that run is
restored.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .._torch.generators import RandomState
from .._torch.modes import ObserverMode, disable_current_modes
from .._torch.modules import Namespace, attributes_of
from .._torch.symbolic import is_symbolic
from .._torch.tensors import version

# ---- random numbers


class _Generator(NamedTuple):
    """Functions that read and set the state of a random number generator."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


# The global generators of Python and NumPy.
_GLOBAL_GENERATORS = (
    _Generator(random.getstate, random.setstate),
    _Generator(lambda: np.random.get_state(legacy=False), np.random.set_state),
)


def _as_generator(value: Any) -> _Generator | None:
    """Return the functions for a generator object, or None if the object is not a generator."""
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


class _GeneratorStates:
    """States of several random number generators, read when this object is created."""

    def __init__(self, generators: Iterable[_Generator]):
        self.states = [(generator, generator.get()) for generator in generators]

    def restore(self) -> None:
        """Set all generators to the states that were read."""
        for generator, state in self.states:
            generator.set(state)

    def current(self) -> _GeneratorStates:
        """Return a new object with the current states of the same generators."""
        return _GeneratorStates([generator for generator, _ in self.states])

    def drop_unchanged(self) -> None:
        """Remove the generators whose current state equals the recorded state."""
        self.states = [pair for pair in self.states if not _states_equal(pair[0].get(), pair[1])]


def _states_equal(a: Any, b: Any) -> bool:
    """Return whether two states of a random number generator are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_states_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


class _RandomOperatorDetector(ObserverMode):
    """Dispatch mode that sets `seen` if an operator that draws random numbers runs.

    It is used with symbolic tensors, where such operators do not change a generator's state.
    """

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(
            func, "tags", ()
        ) and not _is_attention_without_dropout(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_attention_without_dropout(func, args: tuple, kwargs: dict) -> bool:
    """Return whether an operator is attention without dropout, which draws no random numbers."""
    arguments = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        | kwargs
    )
    return "query" in arguments and not arguments.get("dropout_p")


# ---- tensors and containers


class _TensorRecord:
    """A tensor in an attribute or buffer, and a copy of its values before the first run.

    The copy is kept only if the first run changes the values.

    Args:
        name: Name of the attribute, for error messages.
        tensor: The tensor.
        written_by: The module that owns the buffer, or None for a tensor that is treated as an
            attribute. A buffer's values are compared to find a change, because normalization layers
            change their statistics without increasing the version counter. Symbolic and sparse
            tensors cannot be compared.
    """

    def __init__(self, name: str, tensor: Tensor, written_by: nn.Module | None):
        self.name, self.tensor, self.written_by = name, tensor, written_by
        self.version = version(tensor)
        # A tensor that requires gradients needs no copy, because autograd raises an error anyway if
        # it is changed in place.
        self.copy = None if tensor.requires_grad else tensor.detach().clone()

    def drop_unchanged(self) -> None:
        """Delete the copy if the first run did not change the tensor."""
        changed = self.version is None or version(self.tensor) != self.version
        if self.written_by is not None and self.copy is not None:
            if is_symbolic(self.copy) or self.copy.layout is not torch.strided:
                changed = changed or _is_norm_in_training(self.written_by)
            else:
                changed = not torch.equal(self.tensor, self.copy)
        if not changed:
            self.copy = None

    def restore(self, last: bool) -> Tensor:
        """Return a tensor with the values that the recorded tensor had before the first run.

        Args:
            last: Whether this is the last run, which may use the copy itself instead of another
                copy.

        Raises:
            RuntimeError: The attribute was changed in place after the first run, and no copy of
                its earlier values exists.
        """
        if self.copy is not None:
            return self.copy if last else self.copy.clone()
        if self.written_by is None and version(self.tensor) != self.version:
            raise RuntimeError(
                f"the tensor `{self.name}` was changed in place after the block had run with it,"
                " so a recomputation of the block would use other values. Assign a new tensor to"
                " the attribute instead, or pass the tensor to the block as an argument"
            )
        return self.tensor


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors use the same storage."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


# Types of containers whose content is restored. A routing layer, for example, may keep its last
# loads in a deque and count calls in a defaultdict.
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, deque)


def _leaves(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for each object in nested containers that is not itself a container.

    Keys of dicts are yielded too, because `copy.deepcopy` would copy keys as well.

    Args:
        name: Name of the value.
        value: A container, or another object, which is yielded itself.
        seen: id of each container that was searched already. This function adds to it.
    """
    if type(value) not in _CONTAINERS:
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{name}[{key!r}]", key, seen)
            yield from _leaves(f"{name}[{key!r}]", item, seen)
        yield name, getattr(value, "default_factory", None)


# ---- modules


def _namespaces(block: nn.Module, attributes: bool, buffers: bool) -> Iterator[Namespace]:
    """Yield a `Namespace` for each dict of attributes or buffers of a block's modules."""
    # Buffers come first: a tensor that is an attribute as well is recorded as a buffer.
    for name, module in block.named_modules():
        if buffers or is_instance_norm(module):
            names = partial(list, module._buffers)
            yield Namespace(name, module._buffers, names, module if buffers else None)
    for name, module in block.named_modules() if attributes else ():
        yield Namespace(name, vars(module), partial(attributes_of, module))


class ModuleState:
    """Snapshot of the attributes and buffers of a block and its submodules.

    The content of an attribute is recorded if it is a tensor, a NumPy array, a random number
    generator, or a list, tuple, dict, set or deque of such objects. For other attributes, only the
    reference is recorded. Parameters and submodules are not recorded.

    Args:
        block: The block, a module.
        attributes: Whether attributes are recorded.
        buffers: Whether all buffers are recorded. With False, only buffers of instance norms in
            training mode are recorded.
    """

    def __init__(self, block: nn.Module, *, attributes: bool = True, buffers: bool = False):
        self.block = block
        self.namespaces = list(_namespaces(block, attributes, buffers))
        # Objects that are not copied when the containers are copied, by their id.
        self.leaves: dict[int, Any] = {}
        self.tensors: list[_TensorRecord] = []
        self.generators: list[_Generator] = []
        initial = [namespace.read() for namespace in self.namespaces]
        seen: set[int] = set()
        for namespace, values in zip(self.namespaces, initial, strict=True):
            for key, value in values.items():
                name = f"{namespace.name}.{key}".removeprefix(".")
                for part_name, part in _leaves(name, value, seen):
                    self._record(part_name, part, namespace.written_by)
        self.initial = copy.deepcopy(initial, dict(self.leaves))

    def _record(self, name: str, value: Any, written_by: nn.Module | None) -> None:
        """Record an object that is not a container.

        NumPy arrays of numbers are ignored here, because `copy.deepcopy` copies them with the
        containers.
        """
        is_array = isinstance(value, np.ndarray) and value.dtype != object
        if is_array or id(value) in self.leaves:
            return
        self.leaves[id(value)] = value
        if isinstance(value, Tensor):
            # Parameters are not recorded, because only the optimizer changes them.
            if not (isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad)):
                self.tensors.append(_TensorRecord(name, value, written_by))
        elif generator := _as_generator(value):
            self.generators.append(generator)

    def drop_unchanged(self) -> None:
        """Delete the recorded copies of tensors that the block's first run did not change.

        Call this after the first run.

        Raises:
            RuntimeError: The first run changed an attribute in place, and the attribute shares its
                memory with another tensor. The two tensors cannot be restored, because copies of
                them would not share memory.
        """
        with disable_current_modes():
            for tensor in self.tensors:
                tensor.drop_unchanged()
        changed = [
            record
            for record in self.tensors
            if record.copy is not None and record.version is not None and record.written_by is None
        ]
        if not changed:
            return
        others = {id(record.tensor): (record.name, record.tensor) for record in self.tensors}
        others |= {id(tensor): (name, tensor) for name, tensor in self.block.named_buffers()}
        for record in changed:
            for name, tensor in others.values():
                if tensor is not record.tensor and _shares_memory(tensor, record.tensor):
                    raise RuntimeError(
                        f"the tensor `{record.name}` was changed in place, but shares its memory"
                        f" with `{name}`, so they cannot be restored for the recomputation. Keep"
                        " only one of them as an attribute, and compute the other one from it in"
                        " forward"
                    )

    @contextmanager
    def restore(self, last: bool = False) -> Iterator[None]:
        """Inside a `with` block, give the modules the recorded attributes and buffers.

        Tensors and containers that have changed since the snapshot are replaced by copies with the
        recorded content. At the end, the modules get back the values that they had before the
        `with` block.

        Args:
            last: Whether this is the last use of the snapshot. If so, the modules get the copies of
                tensors that the snapshot holds, and no further copies are made.
        """
        current = [namespace.read() for namespace in self.namespaces]
        restored = {id(record.tensor): record.restore(last) for record in self.tensors}
        initial = copy.deepcopy(self.initial, self.leaves | restored)
        try:
            self._write(initial)
            yield
        finally:
            self._write(current)

    def _write(self, values_per_namespace: list[dict[str, Any]]) -> None:
        """Write values to the modules; each dict has the new entries of one `Namespace`."""
        for namespace, values in zip(self.namespaces, values_per_namespace, strict=True):
            namespace.write(values)


# ---- norms with running statistics


def statistics_of(block: nn.Module) -> list[Tensor]:
    """Return the running statistics (buffers) of a block's batch norms that are in training mode.

    These batch norms update the statistics, but their outputs do not depend on them.
    """
    norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms if norm.training for buffer in norm.buffers()]


def is_instance_norm(module: nn.Module) -> bool:
    """Return whether a module is an instance norm in training mode.

    An instance norm with running statistics updates them and also saves copies of them for
    backward. Its buffers are therefore restored like attributes: the recomputation starts from
    their values before the first run.
    """
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training


def _is_norm_in_training(module: nn.Module) -> bool:
    """Return whether a module is a batch norm or instance norm in training mode."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


# ---- a block that runs several times


class StateBeforeFirstRun:
    """State of a block before its first run, from which every later run starts.

    The first run is in the forward pass, and later runs recompute it. The state always includes the
    attributes of the block's modules, including attributes that are random number generators. It
    also always includes the global generators of Python and NumPy.

    Args:
        block: The module whose state is kept.
        statistics: Whether the running statistics of batch norms have the same values after a later
            run as before it. With False, a later run updates them again, unless `buffers` is True.
        buffers: Whether a later run starts with the values that the buffers had before the first
            run. After the later run, the buffers get back the values from just before that run.
            With False, only buffers of instance norms in training mode are treated in this way.
    """

    def __init__(self, block: nn.Module, *, statistics: bool = False, buffers: bool = False):
        self.block, self.statistics, self.buffers = block, statistics, buffers
        self.modules: ModuleState | None = None  # None before the first run
        self.running_statistics: list[Tensor] = []  # statistics that the first run updated
        self.generators = _GeneratorStates(())
        self.random: RandomState | None = None  # None if PyTorch's generators are not restored

    def next_run(
        self, runs_again: bool = True, device: torch.device | None = None
    ) -> AbstractContextManager:
        """Return the context manager in which the caller must run the block the next time.

        For the block's first run, the context manager records the block's state. For a later run,
        it restores the recorded state. After the later run, it restores the state from just before
        that run.

        In `with state.next_run(...) as detector`, the value `detector` is another context manager.
        It is needed only if `device` is passed and the block runs without an autograd graph. The
        caller then also enters `detector`, and runs the block inside both. For symbolic tensors, in
        the first of several runs, `detector` records whether an operator draws random numbers.
        Otherwise, `detector` does nothing.

        Args:
            runs_again: Whether the block runs again after this run. With False, a first run records
                nothing. With False, a later run gives the block the recorded tensor copies
                themselves, and makes no further copies.
            device: Device whose PyTorch generator is recorded in the first run and restored in
                later runs, together with that of the CPU. With None, the caller restores PyTorch's
                generators, as a checkpoint does. Later runs ignore this argument.
        """
        if self.modules is not None:
            return self.later_run(last=not runs_again)
        return self.first_run(device) if runs_again else nullcontext(nullcontext())

    @contextmanager
    def first_run(self, device: torch.device | None = None) -> Iterator[Any]:
        """Context manager that records the block's state; the caller does the first run inside it.

        At the end of the `with` block, the recorded copies of tensors and generator states that the
        run has not changed are deleted.

        Args:
            device: Device whose PyTorch generator is recorded, together with that of the CPU. With
                None, PyTorch's generators are not recorded.

        Yields:
            A context manager inside which the caller runs the block. If tensors are symbolic and
            `device` is given, it detects operators that draw random numbers, and otherwise it does
            nothing. `first_run` itself reads the result at the end of the `with` block. If there
            was no such operator, later runs do not restore PyTorch's generators.
        """
        self.random = None if device is None else RandomState([device])
        symbolic = self.random is not None and is_symbolic()
        detector = _RandomOperatorDetector() if symbolic else nullcontext()
        modules = self.modules = ModuleState(self.block, buffers=self.buffers)
        self.running_statistics = statistics_of(self.block)
        with disable_current_modes():  # meters and symbolic modes must not see generator states
            generators = _GeneratorStates((*_GLOBAL_GENERATORS, *modules.generators))
        yield detector
        modules.drop_unchanged()
        with disable_current_modes():
            generators.drop_unchanged()
            if self.random is not None:
                drew = detector.seen if symbolic else self.random != RandomState([device])
                self.random = self.random if drew else None
        self.generators = generators

    @contextmanager
    def later_run(self, last: bool = False) -> Iterator[Any]:
        """Inside a `with` block, give the module the state that it had before its first run.

        The caller runs the module again in the `with` block. At the end of the `with` block, the
        state from just before the `with` block is restored.

        Args:
            last: Whether no further run follows, so that the recorded state need not be copied
                again.

        Yields:
            A context manager that does nothing, so that callers can treat all runs alike.
        """
        current_random = None if self.random is None else RandomState(self.random.devices)
        with disable_current_modes():
            current = self.generators.current()
            self.generators.restore()
        statistics = [
            (buffer, buffer.clone()) for buffer in self.running_statistics if self.statistics
        ]
        try:
            if self.random is not None:
                self.random.restore()
            with self.modules.restore(last):
                yield nullcontext()
        finally:
            with torch.no_grad():
                for buffer, value in statistics:
                    buffer.copy_(value)
            with disable_current_modes():
                current.restore()
            if current_random is not None:
                current_random.restore()
