"""Helpers that find and replace the tensors in containers, and describe storages."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in order: the value itself, or tensors in nested containers.

    Lists, tuples, mappings and dataclasses are searched, and no other objects.
    """
    if isinstance(value, Tensor):
        yield value
    else:
        for item in items_in(value):
            yield from tensors_in(item)


def tensors_among(args, kwargs: Mapping | None = None) -> list[Tensor]:
    """Return the tensors among an operator's arguments and in arguments that are lists or tuples.

    This function is faster than `tensors_in`, because it does not search nested containers.
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
    """Return `value` with each tensor replaced by `function(tensor)`.

    A container without tensors is returned as the same object, unless its type is one of `copied`.

    Args:
        function: Function that takes a tensor and returns its replacement.
        value: A tensor, or a nested container of tensors (see `tensors_in`).
        kinds: Type or types of the values that are replaced. By default these are tensors.
        copied: Types of containers that are copied even if nothing in them is replaced.
    """
    if isinstance(value, kinds):
        return function(value)
    old = items_in(value)
    new = [map_tensors(function, item, kinds=kinds, copied=copied) for item in old]
    same = all(map(operator.is_, old, new)) and not isinstance(value, copied)
    return value if same else _rebuild(value, new)


def items_in(value: Any) -> Collection[Any]:
    """Return the items of a list or tuple, the values of a mapping, or the fields of a dataclass.

    For any other object, the result is empty.
    """
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def _rebuild(value: Any, items: list) -> Any:
    """Return a copy of the container `value` with other items."""
    if isinstance(value, tuple):
        # A named tuple takes its items as separate arguments, and torch.return_types take a list.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)  # keeps the type and other attributes of the object
    if isinstance(value, list):
        result[:] = items
    # A Hugging Face output is a mapping and a dataclass, so mappings are handled first.
    elif isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            result[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(result, field.name, item)
    return result


def version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter, which counts its in-place changes.

    The result is None for an inference tensor, which has no version counter.
    """
    return None if tensor.is_inference() else tensor._version


def elements_spanned(tensor: Tensor) -> int:
    """Count the elements of memory from a tensor's first element to its last.

    Elements that its strides skip are included. The tensor must have at least one element.
    """
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def holders_of(storage: torch.UntypedStorage) -> int:
    """Return the reference count of a storage.

    References are held by the tensors that share the storage, and, in some versions of torch, by
    the storage's Python object.
    """
    return torch._C._storage_Use_Count(storage._cdata)
