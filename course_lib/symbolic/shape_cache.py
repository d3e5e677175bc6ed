"""Cache the shapes and storages of operators' symbolic results, so that symbolic steps run faster.

The keys of the cache are the operators with the shapes, strides and dtypes of their inputs.
"""

from __future__ import annotations

from functools import cache, partial
from inspect import unwrap
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import ListType, Tensor

from .._torch.modes import DisableTorchDispatch
from .._torch.operators import make_contiguous_strides_for
from .._torch.symbolic import FakeTensor, FakeTensorMode, allow_data_pointers, refuse_data_pointers
from .._torch.tensors import elements_spanned, tensors_in
from . import cpu_kernels

# The cache is cleared when it has this number of entries.
MAX_ENTRIES = 1 << 16
# PyTorch's own method, which runs an operator on fake tensors. PyTorch wraps this method in
# functions, for example to keep the compiler out of it. These wrappers take a third of a symbolic
# operator's time, so `unwrap` removes them.
fake = unwrap(FakeTensorMode.__torch_dispatch__)
# Types of arguments, other than tensors, that can be part of a key.
_KEY_TYPES = (
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
# PyTorch's own method. `parameter_subclasses` replaces it in `Tensor` while a model is made.
_make_subclass = Tensor._make_subclass
# Returned by `cached_result` if the cache does not have the result of a call.
NOT_FOUND = object()
_LIFT = torch.ops.aten.lift_fresh.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add_.Tensor
# Operators without PyTorch's tag `pointwise` whose results have the shape of their input.
_KEEP_SHAPE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.zeros_like.default,
}
# The cache: maps keys to results of `_outline_of`, or to None if a result cannot be cached.
_entries: dict[tuple, tuple | None] = {}


class Outline(NamedTuple):
    """Description of a tensor that an operator returns, from which an equal tensor can be made.

    Attributes:
        of: Index of the operator's input tensor whose storage the result shares; None if the result
            has a new storage.
        size: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        offset: Offset of the tensor in its storage, in elements.
        dtype: Dtype of the tensor.
        device: Device that the tensor reports.
    """

    of: int | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def dispatch_cached(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Run an operator on symbolic tensors and return its result, from the cache if possible.

    Symbolic tensors have shapes and storages, but no values. The result has the same strides and
    the same storage sizes as the result of the operator on real tensors. PyTorch's `FakeTensorMode`
    runs calls that are not in the cache. It also runs calls that cannot be cached, such as calls
    with sparse, quantized or constant tensors.

    Args:
        mode: The symbolic mode, an instance of `course_lib.symbolic.Symbolic`.
        func, types, args, kwargs: Arguments of `__torch_dispatch__`: the operator, the tensor
            types, and the operator's arguments.
    """
    if func is _LIFT and type(args[0]) is Tensor and args[0].dim() == 0:
        return _make_constant(mode, args[0])
    # Optimizers count their steps with these two operators, on a tensor whose value is known.
    if func in (_ITEM, _ADD) and (constant := getattr(args[0], "constant", None)) is not None:
        if func is _ITEM:
            return constant.item()
        if len(args) == 2 and type(args[1]) in (int, float) and not kwargs:
            with DisableTorchDispatch():
                constant.add_(args[1])
            return args[0]
    inputs: list[Tensor] = []
    cacheable = _is_cacheable(func) and not torch.is_inference_mode_enabled()
    key = _key(mode.kind, func, args, kwargs, inputs) if cacheable else None
    if key is None:
        if func.is_view and getattr(args[0], "constant", None) is not None:
            return _view_of_constant(mode, func, types, args, kwargs)
        return _run_uncached(mode, func, types, args, kwargs)
    entry = _entries.get(key, False)
    if entry:
        return _recreate(mode, entry, inputs)
    if entry is None:
        return _run_uncached(mode, func, types, args, kwargs)
    if len(_entries) >= MAX_ENTRIES:
        _entries.clear()
    shared_key = _key_for_any_shape(mode.kind, func, args, kwargs, inputs)
    if shared_key is not None and (shared := _entries.get(shared_key)):
        _entries[key] = entry = _with_shape_of(inputs[0], shared)
        return _recreate(mode, entry, inputs)
    result = _run_uncached(mode, func, types, args, kwargs)
    _entries[key] = entry = _outline_of(func, result, inputs)
    if shared_key is not None and entry == _with_shape_of(inputs[0], entry):
        _entries[shared_key] = entry
    return result


def cached_result(mode: FakeTensorMode, func, args, kwargs) -> Any:
    """Return the cached result of an operator on symbolic tensors; `NOT_FOUND` if there is none.

    Unlike `dispatch_cached`, this function runs no operator.

    Args:
        mode, func, args, kwargs: As in `dispatch_cached`. At least one argument must be a tensor.
    """
    inputs: list[Tensor] = []
    key = _key(mode.kind, func, args, kwargs, inputs)
    if key is None or not inputs or not (entry := _entries.get(key)):
        return NOT_FOUND
    return _recreate(mode, entry, inputs)


@cache
def _is_cacheable(func) -> bool:
    """Return whether calls of an operator can be cached.

    The calls cannot be cached if the operator changes the shape or strides of an input in place, as
    `t_` does, or writes its result into an argument `out`.
    """
    return torch.Tag.inplace_view not in func.tags and func._overloadname != "out"


def _run_uncached(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Run an operator on symbolic tensors, without the cache of this module."""
    dispatch = partial(dispatch_cached, mode)
    symbolically, kind = partial(fake, mode), mode.kind
    return cpu_kernels.with_real_strides(
        symbolically, dispatch, func, types, args, kwargs, kind=kind
    )


def _make_constant(mode: FakeTensorMode, number: Tensor) -> FakeTensor:
    """Return a symbolic tensor whose value is known, as PyTorch makes it for `torch.tensor(1.0)`.

    Optimizers make such a tensor in each step, and PyTorch's own function takes five times as long.

    Args:
        mode: The symbolic mode.
        number: Real tensor with the value.
    """
    outline = Outline(None, number.size(), number.stride(), 0, number.dtype, number.device)
    result = make_fake(mode, outline, [])
    with DisableTorchDispatch():
        result.constant = number.clone()
    mode.fake_tensor_converter.add_constant_storage_mapping(result)
    return result


def _view_of_constant(mode: FakeTensorMode, func, types, args, kwargs) -> Any:
    """Run a view operator on a tensor with known values, so that the view has known values too.

    `FakeTensorMode` would discard the known values of the tensor, and those of the view.
    """
    base, values = args[0], args[0].constant
    base.constant = None
    try:
        result = dispatch_cached(mode, func, types, args, kwargs)
    finally:
        base.constant = values
    for view, view_values in zip(
        tensors_in(result), tensors_in(func(values, *args[1:], **kwargs)), strict=True
    ):
        view.constant = view_values
        mode.fake_tensor_converter.add_constant_storage_mapping(view)
    return result


def _key(kind: str, func, args, kwargs, inputs: list[Tensor]) -> tuple | None:
    """Return the cache key of an operator call: everything that determines the call's result.

    Args:
        kind: Kind of device of the symbolic mode, "cpu" or "cuda".
        func, args, kwargs: Operator and its arguments, as `__torch_dispatch__` receives them.
        inputs: List to which the tensors among the arguments are appended.

    Returns:
        The key, or None if the call cannot be cached.
    """
    try:
        named = [(name, _describe_argument(kwargs[name], inputs)) for name in sorted(kwargs or ())]
        return (
            kind,
            func,
            torch.get_default_dtype(),
            *[_describe_argument(value, inputs) for value in args],
            *named,
        )
    except TypeError:
        return None


def _describe_argument(value: Any, inputs: list[Tensor]) -> Any:
    """Return the part of a cache key that describes one argument.

    Args:
        value: The argument.
        inputs: List to which the tensors in the argument are appended.

    Raises:
        TypeError: The argument cannot be part of a key.
    """
    if type(value) is FakeTensor and _is_plain_fake_tensor(value):
        inputs.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (list, tuple)):
        return tuple([_describe_argument(item, inputs) for item in value])
    if not isinstance(value, _KEY_TYPES):
        raise TypeError
    return type(value), value


def _outline_of(func, result: Any, inputs: list[Tensor]) -> tuple | None:
    """Return a description of an operator's result, from which `_recreate` makes an equal result.

    Args:
        func: The operator.
        result: Result of the operator: a tensor, a tuple or list of tensors, or None.
        inputs: Input tensors of the operator.

    Returns:
        The type of the container (None for a single tensor), and a list with one item per tensor.
        An item is an `Outline`, or the index of an input if the operator returned this input
        itself. `_outline_of` returns None if the result cannot be described in this way.
    """
    if result is None:
        return NoneType, []
    container = next((kind for kind in (tuple, list) if isinstance(result, kind)), None)
    storages = [_storage_address(tensor) for tensor in inputs]
    outlines = []
    for tensor in result if container else [result]:
        same = [i for i, other in enumerate(inputs) if other is tensor]
        if bool(same) != func._schema.is_mutable or not _is_plain_fake_tensor(tensor):
            return None
        storage = _storage_address(tensor)
        of = same[0] if same else storages.index(storage) if storage in storages else None
        can_be_described = of is not None or (
            tensor.untyped_storage().nbytes() == extent(tensor) and not tensor.storage_offset()
        )
        # A tensor that fills only a part of a new storage is not described, and neither is a view
        # of an earlier output.
        if not can_be_described or (of is not None and of >= len(inputs)):
            return None
        outlines.append(of if same else Outline(of, *_describe_argument(tensor, [])))
        storages.append(storage)
    return container, outlines


def _key_for_any_shape(kind: str, func, args, kwargs, inputs: list[Tensor]) -> tuple | None:
    """Return a cache key of an operator call that does not contain the shapes of the call's inputs.

    Only operators whose results have the shape of their inputs have such a key. With it, training
    steps on models of different sizes share entries of the cache.

    Args:
        kind, func, args, kwargs: The call, as in `_key`.
        inputs: Input tensors of the call.

    Returns:
        The key, or None for operators whose results may have another shape, and for inputs that are
        not contiguous tensors of the same shape. The key is also None if a dimension has the size 0
        or 1. A tensor with such a dimension may be contiguous and channels-last at once, because
        the stride of the dimension does not matter. The result would not show which of the two
        formats the operator keeps.
    """
    if not inputs or not _keeps_shape(func):
        return None
    size, stride = inputs[0].size(), inputs[0].stride()
    if min(size, default=0) < 2 or stride != make_contiguous_strides_for(size):
        return None
    if any(x.size() != size or x.stride() != stride for x in inputs[1:]):
        return None
    values = [*args, *(value for item in sorted(kwargs.items()) for value in item)]
    described = [
        (value.dtype, value.fake_device) if isinstance(value, Tensor) else (type(value), value)
        for value in values
    ]
    return "any shape", kind, func, torch.get_default_dtype(), *described


@cache
def _keeps_shape(func) -> bool:
    """Return whether an operator on tensors of equal shapes returns tensors of the same shape."""
    if any(isinstance(argument.type, ListType) for argument in func._schema.arguments):
        return False
    return torch.Tag.pointwise in func.tags or func in _KEEP_SHAPE


def _with_shape_of(like: Tensor, entry: tuple | None) -> tuple | None:
    """Return a cache entry whose outlines have the shape and strides of `like`.

    The result is None if the entry describes a view or is None.

    Args:
        like: Contiguous tensor.
        entry: Value of `_outline_of`.
    """
    if entry is None:
        return None
    container, outlines = entry
    if any(not isinstance(x, int) and x.of is not None for x in outlines):
        return None
    place = {"size": like.size(), "stride": like.stride(), "offset": 0}
    return container, [x if isinstance(x, int) else x._replace(**place) for x in outlines]


def _is_plain_fake_tensor(tensor: Any) -> bool:
    """Return whether a value is a strided fake tensor without special properties.

    Such a tensor has no known values, and it is not a lazy conjugate or a lazy negative.
    """
    plain = (
        type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided
    )
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which identifies it."""
    return tensor.untyped_storage()._cdata


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last, including any gaps.

    This is the size of the smallest storage that can hold the tensor with its strides. The result
    is 0 for an empty tensor.
    """
    return elements_spanned(tensor) * tensor.itemsize if tensor.numel() else 0


def _recreate(mode: FakeTensorMode, entry: tuple, inputs: list[Tensor]) -> Any:
    """Make the result that an entry of the cache describes, and return it.

    Args:
        mode: The symbolic mode.
        entry: Value of `_outline_of`.
        inputs: Input tensors of the operator.
    """
    container, outlines = entry
    if container is NoneType:  # the operator returns nothing, as `_foreach_add_` does
        return None
    result = [inputs[x] if isinstance(x, int) else make_fake(mode, x, inputs) for x in outlines]
    return container(result) if container else result[0]


def make_fake(mode: FakeTensorMode, outline: Outline, inputs: list[Tensor]) -> FakeTensor:
    """Return a new `FakeTensor` with the properties in an `Outline`.

    The function takes a quarter of the time of PyTorch's constructor.

    Args:
        mode: The symbolic mode.
        outline: Description of the tensor.
        inputs: Input tensors of the operator. The index `outline.of` refers to this list, which is
            not used if `outline.of` is None.
    """
    with DisableTorchDispatch():
        if outline.of is None:
            bare = torch.empty_strided(
                outline.size, outline.stride, dtype=outline.dtype, device="meta"
            )
        else:
            bare = torch.empty(0, dtype=outline.dtype, device="meta")
            storage = inputs[outline.of].untyped_storage()
            bare.set_(storage, outline.offset, outline.size, outline.stride)
    if (attributes := mode.attributes.get(outline.device)) is None:
        attributes = dict(vars(FakeTensor(mode, bare, outline.device)))
        mode.attributes[outline.device] = attributes
    options = {"dispatch_device": True, "device_for_backend_keys": outline.device}
    tensor = _make_subclass(FakeTensor, bare, False, **options)
    # This setting of the mode allows access to data pointers, although no bytes exist.
    if mode._allow_unsafe_data_ptr_access:
        allow_data_pointers(tensor)
    else:
        refuse_data_pointers(tensor)
    vars(tensor).update(attributes)
    return tensor
