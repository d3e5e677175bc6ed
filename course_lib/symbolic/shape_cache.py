"""Cache of the symbolic tensors that operators return, keyed by the shapes, strides and dtypes of
their inputs."""

from __future__ import annotations

from functools import cache, partial
from inspect import unwrap
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.modes import DisableTorchDispatch
from .._torch.symbolic import FakeTensor, FakeTensorMode, allow_data_pointers, refuse_data_pointers
from .._torch.tensors import elements_spanned, tensors_in
from . import cpu_kernels

# Largest number of entries, after which the cache is cleared.
MOST = 1 << 16
# `unwrap` removes the guards against compilation that PyTorch puts around modes. They take a third
# of a symbolic operator's time.
fake = unwrap(FakeTensorMode.__torch_dispatch__)
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_LIFT = torch.ops.aten.lift_fresh.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add_.Tensor
_known: dict[tuple, tuple | None] = {}


class Outline(NamedTuple):
    """Description of a tensor that an operator returns.

    `of` is the index of the tensor whose storage it shares, or None if its storage is new.
    """

    of: int | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def dispatch_cached(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Return the result of an operator as `FakeTensorMode` makes it, with the storages and strides
    that the real result has.

    `FakeTensorMode` has its own cache, whose keys contain more than is needed here. Calls with
    sparse, quantized or constant tensors, and all other calls that cannot be cached here, are
    passed on to it.
    """
    if func is _LIFT and type(args[0]) is Tensor and args[0].dim() == 0:
        return _constant(mode, args[0])
    # Optimizers count their steps with these two operators.
    if func in (_ITEM, _ADD) and (known := getattr(args[0], "constant", None)) is not None:
        if func is _ITEM:
            return known.item()
        if len(args) == 2 and type(args[1]) in (int, float) and not kwargs:
            with DisableTorchDispatch():
                known.add_(args[1])
            return args[0]
    given: list[Tensor] = []
    cacheable = _is_cacheable(func) and not torch.is_inference_mode_enabled()
    key = _key(mode.kind, func, args, kwargs, given) if cacheable else None
    if key is None:
        if func.is_view and getattr(args[0], "constant", None) is not None:
            return _part_of_known(mode, func, types, args, kwargs)
        return _made_now(mode, func, types, args, kwargs)
    made = _known.get(key, False)
    if made:
        return _recreate(mode, made, given)
    result = _made_now(mode, func, types, args, kwargs)
    if made is False:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _outline_of(func, result, given)
    return result


@cache
def _is_cacheable(func) -> bool:
    """Return whether an operator neither changes the view that a tensor is nor writes into a tensor
    that its caller names."""
    return torch.Tag.inplace_view not in func.tags and func._overloadname != "out"


def _made_now(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Return the result of an operator without looking in the cache."""
    dispatch = partial(dispatch_cached, mode)
    symbolically, kind = partial(fake, mode), mode.kind
    return cpu_kernels.as_for_real(symbolically, dispatch, func, types, args, kwargs, kind=kind)


def _constant(mode: FakeTensorMode, number: Tensor) -> FakeTensor:
    """Return a symbolic tensor whose value is known, as PyTorch makes it for `torch.tensor(1.0)`.

    Optimizers make one in each step, and PyTorch's own function takes five times as long.
    """
    outline = Outline(None, number.size(), number.stride(), 0, number.dtype, number.device)
    result = make_fake(mode, outline, [])
    with DisableTorchDispatch():
        result.constant = number.clone()
    mode.fake_tensor_converter.add_constant_storage_mapping(result)
    return result


def _part_of_known(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Return a view of a tensor whose values are known; the values of the view are known too.

    PyTorch would forget the values of both tensors.
    """
    whole, known = args[0], args[0].constant
    whole.constant = None
    try:
        result = dispatch_cached(mode, func, types, args, kwargs)
    finally:
        whole.constant = known
    for part, numbers in zip(
        tensors_in(result), tensors_in(func(known, *args[1:], **kwargs)), strict=True
    ):
        part.constant = numbers
        mode.fake_tensor_converter.add_constant_storage_mapping(part)
    return result


def _key(kind: str, func, args, kwargs, given: list[Tensor]) -> tuple | None:
    """Return everything that determines the result of an operator, or None if the call cannot be
    cached.

    The tensors among the arguments are appended to `given`.
    """
    try:
        named = [(name, _look(kwargs[name], given)) for name in sorted(kwargs)] if kwargs else ()
        return (
            kind,
            func,
            torch.get_default_dtype(),
            *[_look(value, given) for value in args],
            *named,
        )
    except TypeError:
        return None


def _look(value: Any, given: list[Tensor]) -> Any:
    """Return the part of the key that describes one argument.

    Raises:
        TypeError: The argument cannot be part of a key.
    """
    if type(value) is FakeTensor and _is_plain(value):
        given.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (list, tuple)):
        return tuple([_look(item, given) for item in value])
    if not isinstance(value, _PLAIN):
        raise TypeError
    return type(value), value


def _outline_of(func, result: Any, given: list[Tensor]) -> tuple | None:
    """Return a description of a result from which it can be made again, or None if the result is
    not plain.

    A result is one tensor, a tuple or list of tensors, or None.
    """
    if result is None:
        return NoneType, []
    kind = next((kind for kind in (tuple, list) if isinstance(result, kind)), None)
    storages = [_storage(tensor) for tensor in given]
    made = []
    for tensor in result if kind else [result]:
        same = [i for i, other in enumerate(given) if other is tensor]
        if bool(same) != func._schema.is_mutable or not _is_plain(tensor):
            return None
        storage = _storage(tensor)
        of = same[0] if same else storages.index(storage) if storage in storages else None
        own = of is not None or (
            tensor.untyped_storage().nbytes() == extent(tensor) and not tensor.storage_offset()
        )
        # Not cached: a part of a storage that no input has, or a view of an earlier output.
        if not own or (of is not None and of >= len(given)):
            return None
        made.append(of if same else Outline(of, *_look(tensor, [])))
        storages.append(storage)
    return kind, made


def _is_plain(tensor: Any) -> bool:
    """Return whether the argument is a strided fake tensor that has no known values and is neither
    a lazy conjugate nor a lazy negative."""
    plain = (
        type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided
    )
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def extent(tensor: Tensor) -> int:
    """Return the bytes of a storage that holds this tensor alone."""
    return elements_spanned(tensor) * tensor.itemsize if tensor.numel() else 0


def _recreate(mode: FakeTensorMode, known: tuple, given: list[Tensor]) -> Any:
    """Return a new result of the form that the cache describes."""
    kind, made = known
    if kind is NoneType:  # as for `_foreach_add_`, which writes to its arguments
        return None
    result = [given[x] if isinstance(x, int) else make_fake(mode, x, given) for x in made]
    return kind(result) if kind else result[0]


def make_fake(mode: FakeTensorMode, made: Outline, given: list[Tensor]) -> FakeTensor:
    """Make a `FakeTensor` with the attributes that PyTorch gives it, in a quarter of the time that
    PyTorch takes."""
    with DisableTorchDispatch():
        if made.of is None:
            bare = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=made.dtype, device="meta")
            bare.set_(given[made.of].untyped_storage(), made.offset, made.size, made.stride)
    if (alike := mode.attributes.get(made.device)) is None:
        alike = mode.attributes[made.device] = dict(vars(FakeTensor(mode, bare, made.device)))
    like = {"dispatch_device": True, "device_for_backend_keys": made.device}
    tensor = Tensor._make_subclass(FakeTensor, bare, False, **like)
    # This setting allows access to the data pointer although there are no bytes behind it.
    if mode._allow_unsafe_data_ptr_access:
        allow_data_pointers(tensor)
    else:
        refuse_data_pointers(tensor)
    vars(tensor).update(alike)
    return tensor
