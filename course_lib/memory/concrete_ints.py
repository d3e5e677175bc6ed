"""Symbolic tensors, but small ones of whole numbers, which are real: steps look at those."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .._torch import map_tensors, tensors_in, written_arguments
from . import cpu_kernels, shape_cache
from .storages import tensors_among

# of a real storage, so that a symbolic model takes no memory: tokens of 128 samples of 4,096
MOST_BYTES = 1 << 22
_aten = torch.ops.aten
_WITHOUT_VALUES = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# Floating masks are made so, and asked so whether they are causal.
_FILLED = {_aten.zeros, _aten.ones, _aten.full}
_COPIED = {_aten._to_copy, _aten.clone, _aten.triu, _aten.tril}
_COMPARED = {_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.isinf}
_LOOKED_AT = {_aten.rand, _aten.linspace}  # layers are dropped at random, at rising rates
_LOOKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Symbolic(FakeTensorMode):
    """Tensors are symbolic, but those of whole numbers and truth values on the CPU are real as long
    as they are small.

    Steps look at those: Hugging Face models drop an attention mask that is all ones, but do not ask
    a symbolic one. An operator runs for real where all that it reads is real and what it makes is
    to be. If one of its inputs is symbolic, so are its outputs; what it writes into a real tensor
    is unknown from there on, and to look at that is refused, as with symbolic tensors.

    A single floating number that is drawn or computed from real tensors, and the numbers of
    `torch.linspace` and of its parts, are symbolic and yet known, as PyTorch has it for
    `torch.tensor(0.5)`: `item` answers. What `torch.ones`, `torch.zeros` and `torch.full` make, and
    triangles of it, are known until they are written to: compared with each other or with numbers,
    or converted to whole numbers, they give real tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self):
        super().__init__()
        # of the symbolic tensors of a device
        self.attributes: dict[torch.device, dict[str, Any]] = {}
        self.looks = 0  # how often the values of a real tensor were looked at
        self._unknown: WeakSet[torch.UntypedStorage] = WeakSet()  # of real tensors
        # Of symbolic ones: what makes their numbers, which take memory only where somebody asks.
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, Callable[[], Tensor]] = (
            WeakKeyDictionary()
        )
        self._cached = partial(shape_cache.dispatch_cached, self)
        self._inside = False  # an operator that PyTorch takes apart

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # its parts are symbolic as it is: real numbers made for it would meet symbolic ones
        if self._inside:
            return shape_cache.fake(self, func, types, args, kwargs or {})
        self._inside = True
        try:
            return self._dispatched(func, types, args, kwargs or {})
        finally:
            self._inside = False

    def _dispatched(self, func, types, args, kwargs) -> Any:
        if found := cpu_kernels.INEXACT.get(func):
            warnings.warn(f"{func} {found.reason}; {found.remedy}", stacklevel=2)
        met = tensors_among(args, kwargs)
        real = [tensor for tensor in met if not isinstance(tensor, FakeTensor)]
        if not isinstance(func, OpOverload):
            return shape_cache.fake(self, func, types, args, kwargs)
        indexes = func.overloadpacket in _INDEXING
        if met and not real and not indexes and not self._have_numbers(met):
            return shape_cache.dispatch_cached(self, func, types, args, kwargs)
        if not all(map(_is_whole, real)):
            return shape_cache.dispatch_cached(self, func, types, args, kwargs)
        if len(real) < len(met):
            result = self._symbolically(func, types, args, kwargs)
            if func.overloadpacket not in _COPIED | _COMPARED or real:
                return result
            return self._known(func, result, met, args, kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags:  # of known values or not
            return func(*args, **kwargs)
        if not all(map(self.knows, real)):
            return self._symbolically(func, types, args, kwargs)
        return self._for_real(func, types, args, kwargs)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is real, and nothing symbolic has been written into its storage."""
        return not isinstance(tensor, FakeTensor) and (
            tensor.untyped_storage() not in self._unknown
        )

    def _have_numbers(self, tensors: list[Tensor]) -> bool:
        """Whether of any of these symbolic tensors it is known what makes its numbers."""
        numbers = self._numbers
        return bool(numbers) and any(tensor.untyped_storage() in numbers for tensor in tensors)

    def _for_real(self, func, types, args, kwargs) -> Any:
        """The operator itself, if its outputs are to be real: the outline of others is enough."""
        looks = bool(_LOOKING & set(func.tags))
        self.looks += looks
        if func._schema.is_mutable or looks:
            return func(*args, **kwargs)
        outline, kind = self._symbolically(func, types, args, kwargs), func.overloadpacket
        made = tensors_among((outline,))
        if kind in _WITHOUT_VALUES or any(tensor.device.type != "cpu" for tensor in made):
            return outline
        if all(map(_is_small, made)):
            return func(*args, **kwargs)
        if kind in _FILLED:  # the default dtype may be another one when somebody asks
            self._keep(outline, partial(func, *args, **kwargs | {"dtype": outline.dtype}))
        number = (
            isinstance(outline, Tensor) and outline.is_floating_point() and outline.numel() == 1
        )
        if kind in _LOOKED_AT or (number and tensors_among(args, kwargs)):
            return self.fake_tensor_converter.from_real_tensor(
                self, func(*args, **kwargs), make_constant=True
            )
        return outline

    def _known(self, func, outline: Tensor, met: list[Tensor], args, kwargs) -> Tensor:
        """The outline, or real numbers in its place, of an operator that reads symbolic tensors
        alone."""
        makers = [self._numbers.get(tensor.untyped_storage()) for tensor in met]
        if None in makers or outline.device.type != "cpu":
            return outline
        parts = {tensor: _part(maker, tensor) for tensor, maker in zip(met, makers, strict=True)}
        if _is_small(outline):
            return func(*map_tensors(lambda tensor: parts[tensor](), args), **kwargs)
        if func.overloadpacket in _COPIED:
            of, *others = parts[args[0]], *args[1:]
            self._keep(outline, lambda: func(of(), *others, **kwargs))
        return outline

    def _keep(self, outline: Tensor, numbers: Callable[[], Tensor]) -> None:
        storage = outline.untyped_storage()
        if outline.is_floating_point() and storage.nbytes() <= MOST_BYTES * outline.itemsize:
            self._numbers[storage] = numbers

    def _symbolically(self, func, types, args, kwargs) -> Any:
        """The operator with symbolic tensors in place of real ones."""
        in_place_of: dict[Tensor, Tensor] = {}

        def symbolic(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if tensor not in in_place_of:
                in_place_of[tensor] = cpu_kernels.made(
                    self._cached, tensor.size(), tensor.stride(), tensor
                )
            return in_place_of[tensor]

        if func.overloadpacket in _INDEXING:  # a mask that is known selects known places
            args = args[0], self._places(args[1]), *args[2:]
        result = self._cached(func, types, *map_tensors(symbolic, (args, kwargs)))
        if not func._schema.is_mutable:
            return result
        written = list(tensors_in([value for _, value in written_arguments(func, args, kwargs)]))
        for tensor in written:
            self._numbers.pop(tensor.untyped_storage(), None)
        back = {in_place_of[tensor]: tensor for tensor in written if tensor in in_place_of}
        self._unknown.update(tensor.untyped_storage() for tensor in back.values())
        return map_tensors(lambda tensor: back.get(tensor, tensor), result)

    def _places(self, indices) -> list[Tensor | None]:
        found = []
        for index in indices:
            mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            found += index.nonzero().unbind(1) if mask and self.knows(index) else [index]
        return found


def _part(maker: Callable[[], Tensor], of: Tensor) -> Callable[[], Tensor]:
    """Function that gives the numbers of a symbolic tensor, which it does not keep, from those of
    its storage."""
    place, dtype = (of.storage_offset(), of.size(), of.stride()), of.dtype
    return lambda: torch.empty(0, dtype=dtype, device="cpu").set_(maker().untyped_storage(), *place)


def _is_small(made: Tensor) -> bool:
    return _is_whole(made) and made.untyped_storage().nbytes() <= MOST_BYTES


def _is_whole(given: Tensor | torch.dtype | None) -> bool:
    """Whether it is an ordinary tensor of whole numbers or truth values, or their dtype."""
    if isinstance(given, Tensor):
        return type(given) in (Tensor, nn.Parameter, FakeTensor) and _is_whole(given.dtype)
    return given is not None and not given.is_floating_point and not given.is_complex
