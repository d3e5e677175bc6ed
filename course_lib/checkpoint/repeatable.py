"""State of a block, besides its arguments, that its recomputation needs.

`checkpoint` gives the recomputation the arguments of the first run and PyTorch's own random
numbers. A block may compute with more than these. This module keeps:

- **Generators**: Python's `random`, NumPy's global one, and generators of PyTorch, Python and NumPy
  that a module of the block holds in an attribute.
- **Attributes** of the block's modules, except parameters, buffers and submodules: the objects that
  they name, and the content of tensors, arrays, lists, tuples, dicts, sets and deques. Examples are
  the load of a mixture-of-experts gate, an average of an activation, and a counter of calls.

A recomputation works on copies. Tensors of the first run are not written to, so a graph that has
saved one stays valid. After the recomputation everything is again in the state after the first run.

This module does not keep parameters and buffers, other objects that are changed in place, or
anything outside the block's modules, such as global variables and files. With a `Comparison`, a
recomputation that differs because of them raises an error.
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .._torch import attributes_of
from .reentrant import version

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


_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, deque)


class _Tensor:
    """A tensor that an attribute named before the first run.

    It includes a copy of the values if the first run changes them.

    Args:
        name: Name of the attribute, for an error.
    """

    def __init__(self, name: str, tensor: Tensor):
        self.name, self.tensor = name, tensor
        self.version = version(tensor)
        # if a tensor with a history is changed in place, its graph raises an error anyway
        self.copy = None if tensor.requires_grad else tensor.detach().clone()

    def settle(self) -> None:
        """Drop the copy if the first run did not change the tensor."""
        if self.version is not None and version(self.tensor) == self.version:
            self.copy = None

    def restored(self) -> Tensor:
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
    """A container that an attribute named before the first run, with the items it held."""

    def __init__(self, container: Any, items: list[Any]):
        self.container, self.items = container, items
        self.kind = type(container)
        self.keys = list(container) if isinstance(container, dict) else None
        self.length = container.maxlen if self.kind is deque else None
        self.default = container.default_factory if self.kind is defaultdict else None

    def restored(self, items: list[Any]) -> Any:
        if isinstance(self.container, np.ndarray):
            return items[0].copy()
        if self.kind is tuple:
            same = all(a is b for a, b in zip(items, self.container, strict=True))
            return self.container if same else tuple(items)
        if self.kind is deque:
            return deque(items, self.length)
        if self.keys is None:
            return self.kind(items)
        pairs = zip(self.keys, items, strict=True)
        return defaultdict(self.default, pairs) if self.kind is defaultdict else self.kind(pairs)


def _restored(memory: Any, made: dict[int, Any]) -> Any:
    """Return the value of an attribute for a recomputation.

    `made` holds the copies made so far, so that an object with several names is copied once.
    """
    if not isinstance(memory, (_Tensor, _Container)):
        return memory
    if id(memory) not in made:
        if isinstance(memory, _Tensor):
            made[id(memory)] = memory.restored()
        else:
            made[id(memory)] = memory.restored([_restored(item, made) for item in memory.items])
    return made[id(memory)]


class _Place:
    """A dictionary in which a module keeps values by name, and a function that selects names."""

    def __init__(self, name: str, values: dict[str, Any], names: Callable[[], Iterable[str]]):
        self.name, self.values, self.names = name, values, names

    def read(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.names()}

    def write(self, wanted: dict[str, Any]) -> None:
        """Set the values directly, without nn.Module's rules for attributes."""
        for name in set(self.names()) - wanted.keys():
            del self.values[name]
        self.values.update(wanted)


def _places(block: nn.Module) -> Iterator[_Place]:
    for name, module in block.named_modules():
        yield _Place(name, vars(module), lambda module=module: attributes_of(module))
        if is_instance_norm(module):
            yield _Place(name, module._buffers, lambda module=module: list(module._buffers))


class _Attributes:
    """The attributes of a block's modules before its first run."""

    def __init__(self, block: nn.Module):
        self.block = block
        self.places = list(_places(block))
        self.known: dict[int, Any] = {}  # id of an object -> its record, also if found again
        self.tensors: list[_Tensor] = []
        self.generators: list[_Generator] = []
        self.before = [
            {
                key: self._remember(f"{place.name}.{key}".removeprefix("."), value)
                for key, value in place.read().items()
            }
            for place in self.places
        ]
        del self.known

    def _remember(self, name: str, value: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = self._remembered(name, value)
        return self.known[id(value)]

    def _remembered(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            # Only the optimizer changes parameters, frozen ones included.
            if isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad):
                return value
            self.tensors.append(_Tensor(name, value))
            return self.tensors[-1]
        if isinstance(value, np.ndarray):
            return _Container(value, [value.copy()]) if value.dtype != object else value
        if type(value) in _CONTAINERS:
            self.known[id(value)] = value  # in case it contains itself
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return _Container(
                value, [self._remember(f"{name}[{key!r}]", item) for key, item in items]
            )
        if generator := _as_generator(value):
            self.generators.append(generator)
        return value

    def settle(self) -> None:
        """Drop copies of tensors that the first run did not change.

        Raises:
            RuntimeError: It changed a tensor that shares its memory with another one. Copies would
                not share it.
        """
        for tensor in self.tensors:
            tensor.settle()
        changed = [
            each for each in self.tensors if each.copy is not None and each.version is not None
        ]
        if not changed:
            return
        others = {id(each.tensor): (each.name, each.tensor) for each in self.tensors}
        others |= {id(tensor): (name, tensor) for name, tensor in self.block.named_buffers()}
        for each in changed:
            for name, tensor in others.values():
                if tensor is not each.tensor and _shares_memory(tensor, each.tensor):
                    raise RuntimeError(
                        f"{each.name} was changed in place, but shares its memory with {name}, so"
                        " they cannot be restored for the recomputation. Keep one of them as an"
                        " attribute, and make the other one from it in forward"
                    )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the attributes to copies of their values before the first run, inside the block.

        Afterwards the attributes have the values from before the block.
        """
        now = [place.read() for place in self.places]
        made: dict[int, Any] = {}
        before = [
            {key: _restored(memory, made) for key, memory in memories.items()}
            for memories in self.before
        ]
        try:
            self._write(before)
            yield
        finally:
            self._write(now)

    def _write(self, wanted: list[dict[str, Any]]) -> None:
        for place, values in zip(self.places, wanted, strict=True):
            place.write(values)


# ---- a block that runs again


class BlockState:
    """State of a block for its first run and the runs that repeat it.

    Args:
        block: The module whose state is kept.
        comparison: Comparison of the runs, or None.
        statistics: Whether to restore the running statistics that normalization layers update again
            in training.
    """

    def __init__(
        self, block: nn.Module, comparison: Comparison | None = None, *, statistics: bool = False
    ):
        self.block, self.comparison, self.statistics = block, comparison, statistics
        self.attributes: _Attributes | None = None  # None before the first run
        self.running: list[Tensor] = []  # statistics that the first run updated
        self.generators: list[tuple[_Generator, Any]] = []

    def next_run(self, more: bool = True) -> AbstractContextManager:
        """Return the context of the block's next run, which is its first run or a repetition.

        Args:
            more: Whether another run follows. A block that runs only once needs no copies.
        """
        if self.attributes is not None:
            return self.repeated()
        return self.first_run() if more else nullcontext()

    def check_output(self, output: Tensor, more: bool) -> None:
        """With a comparison, raise if the output of a later run differs from that of the first.

        Args:
            more: Whether another run follows.
        """
        if self.comparison is None:
            return
        if difference := self.comparison.difference(0, output, "its output"):
            self.comparison.fail(difference)
        if more and not self.comparison.sums:
            self.comparison.note(output)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Record what the first run, inside the block, uses and changes."""
        attributes = self.attributes = _Attributes(self.block)
        self.running = statistics_of(self.block)
        with _disable_current_modes():  # generator states are not tensors of the step
            found = [(each, each.get()) for each in (*_GLOBAL, *attributes.generators)]
        yield
        attributes.settle()
        with _disable_current_modes():
            self.generators = [
                (each, state) for each, state in found if not _equal(each.get(), state)
            ]

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Restore the state of the first run inside the block, and the current state after it."""
        with _disable_current_modes():
            now = [(each, each.get()) for each, _ in self.generators]
            for each, state in self.generators:
                each.set(state)
        kept = [(buffer, buffer.clone()) for buffer in self.running if self.statistics]
        try:
            with self._unchanged(), self.attributes.restored():
                yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
            with _disable_current_modes():
                for each, state in now:
                    each.set(state)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """With a comparison, raise if a recomputation changes a tensor that is not restored."""
        comparison = self.comparison
        if comparison is None:
            yield
            return
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        tensors |= {each.name: each.tensor for each in self.attributes.tensors}
        comparison.start(self.running, tensors)
        try:
            yield
        except Exception:
            raise  # its message is more specific
        except BaseException:  # the recomputation ended early
            comparison.finish(tensors)
            raise
        comparison.finish(tensors)


class Repeatable:
    """A function that a checkpoint can repeat, with the state that its block had at first.

    Errors name the function.
    """

    def __init__(self, function: Callable, state: BlockState):
        self.function, self.state = function, state
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.state.next_run():
            return self.function(*args, **kwargs)


# ---- comparison of both runs


class Comparison:
    """Checksums of the tensors that a block's first run saves, compared with its recomputation.

    Comparing outputs would not work, because a recomputation ends early and does not run the last
    operator. A schedule runs stages to their end and compares outputs. Checksums are computed
    invisibly to meters. On a CPU they are exact. Elsewhere they allow for rounding, since operators
    may add in any order there. Symbolic tensors, which have no values, and sparse, nested and
    quantized tensors and subclasses are not compared.

    Args:
        name: Name of the block, for the error.
        advice: Advice of the error on what to do instead of running the block again.
    """

    def __init__(self, name: str, advice: str):
        self.name, self.advice = name, advice
        self.sums: list[Any] = []
        self.before: dict[str, Any] = {}
        self.statistics: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        """Record the next tensor of the first run."""
        self.sums.append(checksum(tensor))

    def difference(self, position: int, tensor: Tensor, name: str = "") -> str:
        """Describe how a tensor of the recomputation differs from that of the first run.

        Args:
            name: Name for the description; by default the tensor is called saved for backward.

        Returns:
            The description, or "" if the checksums are equal.
        """
        if position >= len(self.sums) or not differ(self.sums[position], checksum(tensor)):
            return ""
        if tensor.untyped_storage().data_ptr() in self.statistics:
            return ""
        kind = f"{str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)}"
        return f"{name or f'tensor {position} saved for backward'} ({kind}) has other values"

    def start(self, statistics: list[Tensor], tensors: dict[str, Tensor]) -> None:
        """Record the block's own tensors before the recomputation.

        Args:
            statistics: Tensors that may change in each run.
        """
        self.statistics = {each.untyped_storage().data_ptr() for each in statistics}
        self.before = {name: checksum(tensor) for name, tensor in tensors.items()}

    def finish(self, tensors: dict[str, Tensor]) -> None:
        """Compare the block's own tensors after the recomputation."""
        for name, tensor in tensors.items():
            if differ(self.before[name], checksum(tensor)):
                if tensor.untyped_storage().data_ptr() not in self.statistics:
                    self.fail(f"it changes {name} again")
        self.before = {}

    def fail(self, difference: str) -> None:
        raise RuntimeError(
            f"the recomputation of {self.name} is not equal to its first run, so gradients or"
            f" buffers would be wrong: {difference}. A block that is recomputed may change its"
            " attributes (tensors, numbers and containers of these) and draw random numbers of"
            " torch, random, numpy or a generator in an attribute. It must not change buffers or"
            f" parameters, global variables, or other objects. Change the block, or {self.advice}"
        )


def statistics_of(block: nn.Module) -> list[Tensor]:
    """Return the running statistics that batch norms in a block update in training.

    The batch norms do not compute with them.
    """
    norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms if norm.training for buffer in norm.buffers()]


def is_instance_norm(module: nn.Module) -> bool:
    """Return whether a module is an instance norm in training mode.

    If it has running statistics, it updates them and also saves copies of them for backward. Its
    buffers are therefore treated like attributes, and the recomputation starts from their first
    values.
    """
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training


def checksum(tensor: Tensor) -> Any:
    """Return a number that differs for tensors with different values, or None if it is unknown."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return None
    with _disable_current_modes(), torch.no_grad():
        tensor = tensor.detach()
        tensor = tensor.conj() if tensor.is_conj() else tensor
        tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded dimension repeats its values
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        # in the order of memory, so that a transposed tensor is not copied
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        return _bits(tensor) if tensor.device.type == "cpu" else Sketch(tensor)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> int:
    """Return a checksum of the bits, computed in NumPy's memory, which PyTorch does not count."""
    return zlib.crc32(np.ascontiguousarray(tensor.view(_INTEGERS[tensor.itemsize]).numpy()))


class Sketch:
    """A sum of a tensor's values with random signs, and its norm.

    Two sketches are equal up to rounding if the values are equal.
    """

    chunk = 1 << 18  # values at a time, so that each temporary has 2 MiB

    def __init__(self, tensor: Tensor):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (self.chunk,), generator=generator, dtype=torch.int8)
        signs = signs.to(tensor.device) * 2 - 1
        self.sum = torch.zeros((), dtype=torch.float64, device=tensor.device)
        self.square = self.sum.clone()
        for number, part in enumerate(tensor.reshape(-1).split(self.chunk)):
            # A copy even of float64 values, because the product below is computed in place.
            values = part.to(torch.float64, copy=True)
            self.square += values.square().sum()
            # the signs are rotated, so that exchanged parts give another sum
            self.sum += values.mul_(signs.roll(number)[: len(values)]).sum()
        exact = not tensor.is_floating_point()
        self.tolerance = 0.0 if exact else 2e-2 if tensor.itemsize < 4 else 1e-3

    def differs(self, other: Sketch) -> bool:
        mine, its, square = float(self.sum), float(other.sum), float(self.square)
        if not np.isfinite([mine, its, square]).all():
            return bool(np.isfinite([mine, its]).any())
        return abs(mine - its) > self.tolerance * square**0.5


def differ(a: Any, b: Any) -> bool:
    """Return whether two checksums show different values; False if one of them is unknown."""
    if a is None or b is None:
        return False
    return a.differs(b) if isinstance(a, Sketch) else a != b
