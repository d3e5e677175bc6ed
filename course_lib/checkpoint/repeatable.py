"""State besides its arguments that decides what a block computes, kept for its recomputation.

`checkpoint` gives the recomputation the arguments of the first run and PyTorch's own random
numbers. A block may compute with more than these. What is kept here:

- **Generators**: Python's `random`, NumPy's global one, and generators of PyTorch, Python and NumPy
  that a module of the block holds in an attribute.
- **Attributes** of the block's modules, except parameters, buffers and submodules: the objects that
  they name, and the content of tensors, arrays, lists, tuples, dicts, sets and deques. Examples are
  the load of a mixture-of-experts gate, an average of an activation, a counter of calls.

A recomputation works on copies. No tensor that the first run has left is written, so a graph that
has saved it stays valid, and afterwards everything is again in the state that the first run left.

Not kept: parameters and buffers, other objects that are changed in place, and what lies outside of
the block's modules, such as global variables and files. With a `Comparison` a recomputation that
differs because of them is an error.
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
    """A source of random numbers: how its state is read, and set."""

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
    """Whether two states of a generator are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


# ---- attributes

_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, deque)


class _Tensor:
    """A tensor that an attribute named before the first run: the object, and a copy of its content
    if the first run changes it.

    Args:
        name: Name of the attribute, for an error.
    """

    def __init__(self, name: str, tensor: Tensor):
        self.name, self.tensor = name, tensor
        self.version = version(tensor)
        # a tensor with a history cannot be changed in place without its graph's noticing
        self.copy = None if tensor.requires_grad else tensor.detach().clone()

    def settle(self) -> None:
        """Give up the copy if the first run did not change the tensor."""
        if self.version is not None and version(self.tensor) == self.version:
            self.copy = None

    def again(self) -> Tensor:
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
    """A container that an attribute named before the first run, with the items that it held."""

    def __init__(self, container: Any, items: list[Any]):
        self.container, self.items = container, items
        self.kind = type(container)
        self.keys = list(container) if isinstance(container, dict) else None
        self.length = container.maxlen if self.kind is deque else None
        self.default = container.default_factory if self.kind is defaultdict else None

    def again(self, items: list[Any]) -> Any:
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


def _again(memory: Any, made: dict[int, Any]) -> Any:
    """Return the value of an attribute for a recomputation; `made` holds the copies of objects with
    several names."""
    if not isinstance(memory, (_Tensor, _Container)):
        return memory
    if id(memory) not in made:
        if isinstance(memory, _Tensor):
            made[id(memory)] = memory.again()
        else:
            made[id(memory)] = memory.again([_again(item, made) for item in memory.items])
    return made[id(memory)]


class _Place:
    """Where a module keeps values by name, and which of the names are looked at."""

    def __init__(self, name: str, values: dict[str, Any], names: Callable[[], Iterable[str]]):
        self.name, self.values, self.names = name, values, names

    def read(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.names()}

    def write(self, wanted: dict[str, Any]) -> None:
        """Past nn.Module's own rules for attributes."""
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
        self.places = list(_places(block))
        self.known: dict[int, Any] = {}  # what one object became, wherever it is found
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
            if value.is_leaf and value.requires_grad:
                return value  # trained: the optimizer's to change
            self.tensors.append(_Tensor(name, value))
            return self.tensors[-1]
        if isinstance(value, np.ndarray):
            return _Container(value, [value.copy()]) if value.dtype != object else value
        if type(value) in _CONTAINERS:
            self.known[id(value)] = value  # where it holds itself
            items = value.values() if isinstance(value, dict) else value
            return _Container(value, [self._remember(name, item) for item in items])
        if generator := _as_generator(value):
            self.generators.append(generator)
        return value

    def settle(self) -> None:
        for tensor in self.tensors:
            tensor.settle()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside the block the attributes are copies of what they were; after it, what they are
        now."""
        now = [place.read() for place in self.places]
        made: dict[int, Any] = {}
        before = [
            {key: _again(memory, made) for key, memory in memories.items()}
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
        block: the module whose state is kept.
        comparison: compares the runs; None where it is not asked for.
        statistics: put back the running statistics that norms update again, in training.
    """

    def __init__(
        self, block: nn.Module, comparison: Comparison | None = None, *, statistics: bool = False
    ):
        self.block, self.comparison, self.statistics = block, comparison, statistics
        self.attributes: _Attributes | None = None  # once the first run has begun
        self.generators: list[tuple[_Generator, Any]] = []

    def next_run(self, more: bool = True) -> AbstractContextManager:
        """The context of the block's next run: `first` for its first run, else `again`.

        Args:
            more: Whether another run follows. A block that runs only once needs no copies.
        """
        if self.attributes is not None:
            return self.again()
        return self.first() if more else nullcontext()

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
    def first(self) -> Iterator[None]:
        """Keep what the first run, inside the block, finds and changes."""
        attributes = self.attributes = _Attributes(self.block)
        with _disable_current_modes():  # states are no tensors of the step
            found = [(each, each.get()) for each in (*_GLOBAL, *attributes.generators)]
        yield
        attributes.settle()
        with _disable_current_modes():
            self.generators = [
                (each, state) for each, state in found if not _equal(each.get(), state)
            ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside the block everything kept is as the first run found it; after it, as it is now."""
        with _disable_current_modes():
            now = [(each, each.get()) for each, _ in self.generators]
            for each, state in self.generators:
                each.set(state)
        kept = statistics_of(self.block) if self.statistics else []
        kept = [(buffer, buffer.clone()) for buffer in kept]
        try:
            with self._unchanged(), self.attributes.again():
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
        """With a comparison, raise if the recomputation inside the block changes a tensor of the
        block's that is not put back."""
        comparison = self.comparison
        if comparison is None:
            yield
            return
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        tensors |= {each.name: each.tensor for each in self.attributes.tensors}
        comparison.start(statistics_of(self.block), tensors)
        try:
            yield
        except Exception:
            raise  # it says more
        except BaseException:  # the recomputation ends early
            comparison.finish(tensors)
            raise
        comparison.finish(tensors)


class Repeatable:
    """A function as a checkpoint runs it: for the first time, and again with the state that a block
    had then. Errors name the function."""

    def __init__(self, function: Callable, state: BlockState):
        self.function, self.state = function, state
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.state.next_run():
            return self.function(*args, **kwargs)


# ---- comparison of both runs


class Comparison:
    """Checksums of what the first run of a block saves, compared with what its recomputation saves.

    Outputs would not do, because a recomputation ends early and never runs the last operator; a
    schedule, which runs stages to their end, compares outputs. The checksums are computed outside
    of the sight of meters. On a CPU they are exact; elsewhere they allow for rounding, since an
    operator may add up in any order there. Not compared: symbolic tensors, which have no values,
    and sparse, nested and quantized tensors and subclasses.

    Args:
        name: Name of the block, for the error.
        advice: Advice for the error, instead of running the block again.
    """

    def __init__(self, name: str, advice: str):
        self.name, self.advice = name, advice
        self.sums: list[Any] = []
        self.before: dict[str, Any] = {}
        self.statistics: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        """Note the next tensor of the first run."""
        self.sums.append(checksum(tensor))

    def difference(self, position: int, tensor: Tensor, name: str = "") -> str:
        """Describe how a tensor of the recomputation differs from that of the first run; return ""
        if their checksums are equal.

        Args:
            name: Name for the description; left out for a tensor that is saved for backward.
        """
        if position >= len(self.sums) or not differ(self.sums[position], checksum(tensor)):
            return ""
        if tensor.untyped_storage().data_ptr() in self.statistics:
            return ""
        kind = f"{str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)}"
        return f"{name or f'tensor {position} saved for backward'} ({kind}) has other values"

    def start(self, statistics: list[Tensor], tensors: dict[str, Tensor]) -> None:
        """Note the block's own tensors before the recomputation.

        Args:
            statistics: tensors that may change in each run.
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
    """The running statistics that the batch norms in a block update in training, and do not compute
    with."""
    norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [buffer for norm in norms if norm.training for buffer in norm.buffers()]


def is_instance_norm(module: nn.Module) -> bool:
    """Whether a module updates running statistics and saves copies of them for backward. They are
    kept as attributes are."""
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training


def checksum(tensor: Tensor) -> Any:
    """A number that differs for tensors of other values; None where it cannot be computed."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return None
    with _disable_current_modes(), torch.no_grad():
        tensor = tensor.detach()
        tensor = tensor.conj() if tensor.is_conj() else tensor
        tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded one repeats its values
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        # in the order of memory, so that a transposed one is not copied
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        return _bits(tensor) if tensor.device.type == "cpu" else Sketch(tensor)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> int:
    """A checksum of the bits. NumPy's memory is none of PyTorch's allocator's."""
    return zlib.crc32(np.ascontiguousarray(tensor.view(_INTEGERS[tensor.itemsize]).numpy()))


class Sketch:
    """Sum of a tensor's values with random signs, and the norm: equal up to rounding if
    the values are equal."""

    chunk = 1 << 18  # values at a time: 2 MiB for each temporary

    def __init__(self, tensor: Tensor):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (self.chunk,), generator=generator, dtype=torch.int8)
        signs = signs.to(tensor.device) * 2 - 1
        self.sum = torch.zeros((), dtype=torch.float64, device=tensor.device)
        self.square = self.sum.clone()
        for number, part in enumerate(tensor.reshape(-1).split(self.chunk)):
            values = part.double()
            self.square += values.square().sum()
            # rolled, so that parts in another order are seen
            self.sum += values.mul_(signs.roll(number)[: len(values)]).sum()
        exact = not tensor.is_floating_point()
        self.tolerance = 0.0 if exact else 2e-2 if tensor.itemsize < 4 else 1e-3

    def differs(self, other: Sketch) -> bool:
        mine, its, square = float(self.sum), float(other.sum), float(self.square)
        if not np.isfinite([mine, its, square]).all():
            return bool(np.isfinite([mine, its]).any())
        return abs(mine - its) > self.tolerance * square**0.5


def differ(a: Any, b: Any) -> bool:
    """Whether two checksums say that the values differ; not where one of them is unknown."""
    if a is None or b is None:
        return False
    return a.differs(b) if isinstance(a, Sketch) else a != b
