"""Batches, and how they are cut into micro-batches.

`split` cuts a batch into micro-batches of a given size, along the first dimension of its tensors
and NumPy arrays. `parts_of` cuts it into a given number of parts, by `split` or by a function of
the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._check import describe, must_be, whole
from ._torch.tensors import items_in, map_tensors, tensors_in

#: Function (batch, parts) -> a list of `parts` batches.
Split = Callable[[Any, int], Sequence[Any]]
#: Types whose first dimension `split` cuts.
ARRAYS = (Tensor, np.ndarray)
#: The way out of a batch that cannot be cut along first dimensions, for error messages.
GIVE_SPLIT = (
    "pass a function split(batch, parts) that returns a list of `parts` batches (to a command, as"
    " the attribute split of the function that --model names)"
)
#: Attribute with which a model allows micro-batches although it has BatchNorm.
ALLOWS_BATCH_NORM = "batch_norm_per_micro_batch"


def split(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches along the first dimension of its tensors and arrays.

    Args:
        batch: A tensor, or tuples, lists, mappings and dataclasses with tensors, nested
            arbitrarily. The first dimension of every tensor and NumPy array is the sample
            dimension. Other values are in every micro-batch unchanged. A list or tuple of such
            values with one of them per sample is refused, unless there is only one micro-batch.
        micro_batch_size: Number of samples in each micro-batch.

    Returns:
        An iterator over micro-batches with the structure of the batch. Their tensors and arrays are
        views, so nothing is copied. The last micro-batch may be smaller than the others. A batch
        without samples has no micro-batches.

    Raises:
        TypeError, ValueError: The batch contains no tensor, a nested or sparse tensor, tensors with
            different numbers of samples, or a list with one value per sample. The message names the
            place in the batch.

    Example:
        >>> [len(each) for each in split(torch.zeros(20, 3), 8)]
        [8, 8, 4]
    """
    size = whole("micro_batch_size", micro_batch_size, 1, of="samples")
    length = _checked_length(batch)
    if length > size:
        _check_lists(batch, length)
    return (
        map_tensors(lambda part, start=start: part[start : start + size], batch, kinds=ARRAYS)
        for start in range(0, length, size)
    )


def parts_of(batch: Any, parts: int, split_batch: Split | None = None) -> list[Any]:
    """Return a batch as a list of `parts` micro-batches.

    A single part is the batch itself, which may then be of any type.

    Args:
        batch: The batch.
        parts: Number of parts. Without `split_batch`, all have the same number of samples except
            the last one, so there may be fewer parts.
        split_batch: The user's function `split`, which cuts the batch. By default it is cut along
            the first dimension of its tensors and arrays.

    Raises:
        TypeError, ValueError: The batch cannot be split, or `split_batch` returned something else.
    """
    if parts == 1:
        return [batch]
    if split_batch is None:
        return list(split(batch, max(1, math.ceil(_checked_length(batch) / parts))))
    found = split_batch(batch, parts)
    allowed = f"a list of {parts} batches when it is called with parts={parts}"
    if not isinstance(found, (list, tuple)):
        raise TypeError(must_be("the result of split", allowed, describe(found)))
    if len(found) != parts:
        raise ValueError(
            must_be("the result of split", allowed, f"{describe(found)} of {len(found)}")
        )
    return list(found)


def samples_to_split(batch: Any) -> int:
    """Return the number of samples in a batch, or raise as `split` does if it cannot be split."""
    length = _checked_length(batch)
    if length > 1:
        _check_lists(batch, length)
    return length


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if it is not known.

    It is known if all tensors and arrays of the batch begin with the same dimension.
    """
    try:
        return _checked_length(batch)
    except (TypeError, ValueError):
        return None


def has_samples(part: Any, batch: Any) -> bool:
    """Return whether a part of a batch has samples.

    Tensors that have a shape of the whole batch, such as a mask that all samples share, do not
    count.
    """
    shared = {tensor.shape for tensor in tensors_in(batch)}
    return any(tensor.numel() for tensor in tensors_in(part) if tensor.shape not in shared)


def mixes_samples(model: nn.Module) -> bool:
    """Return whether micro-batches change the loss of a sample, because of BatchNorm.

    They do not if the model allows it: a module of it has the attribute
    `batch_norm_per_micro_batch`, set to True.
    """
    allowed = any(getattr(module, ALLOWS_BATCH_NORM, False) for module in model.modules())
    return has_batch_norm(model) and not allowed


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm in training mode."""
    norm = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, norm) and module.training for module in model.modules())


# ---- checks


def _checked_length(batch: Any) -> int:
    """Return the number of samples, or raise if tensors and arrays do not agree on it."""
    found = list(_arrays(batch))
    for key, array in found:
        if isinstance(array, Tensor) and (array.is_nested or array.layout is not torch.strided):
            nested = "a nested tensor" if array.is_nested else "a tensor"
            raise TypeError(
                f"batch must hold dense tensors to be split, got {key}, {nested} with the layout"
                f" {array.layout}, which PyTorch cannot cut into views along the first dimension;"
                f" {GIVE_SPLIT}"
            )
    if not found:
        raise TypeError(
            "batch must be a tensor or a container of tensors to be split, got"
            f" {describe(batch)}, which contains no tensor; {GIVE_SPLIT}"
        )
    (key, first), *others = found
    differing = [each for each in others if each[1].shape[:1] != first.shape[:1]]
    if differing or not first.shape:
        actual = " and ".join(
            f"{key} with {len(array)} samples" if array.shape else f"{key} without dimensions"
            for key, array in [(key, first), *differing[:1]]
        )
        raise ValueError(
            "batch must have the same number of samples in each tensor to be split, got"
            f" {actual}; {GIVE_SPLIT}"
        )
    return len(first)


def _check_lists(batch: Any, length: int) -> None:
    """Raise ValueError if a list in the batch holds one plain value for each sample."""
    if found := _list_of_values(batch, length):
        key, values = found
        raise ValueError(
            f"batch must have its values per sample in tensors or NumPy arrays to be split, got"
            f" {key}, {describe(values)} with one value for each of the {length} samples; make it a"
            f" tensor, or {GIVE_SPLIT}"
        )


def _arrays(value: Any, key: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each tensor and array in a batch."""
    if isinstance(value, ARRAYS):
        yield key, value
    else:
        for name, item in _named_items(value):
            yield from _arrays(item, key + name)


def _list_of_values(value: Any, length: int, key: str = "batch") -> tuple[str, Any] | None:
    """Return (key, list) of the first list with `length` plain values in a batch, or None."""
    if isinstance(value, ARRAYS):
        return None
    if _lists_values(value) and len(value) == length and not any(True for _ in _arrays(value)):
        return key, value
    inner = (_list_of_values(item, length, key + name) for name, item in _named_items(value))
    return next(filter(None, inner), None)


def _lists_values(value: Any) -> bool:
    """Return whether a value is a sequence whose items may be values of samples.

    A named tuple is not, because its items have names. An object that NumPy reads as an array, such
    as a pandas Series, is.
    """
    if isinstance(value, Sequence):
        return not isinstance(value, (str, bytes)) and not hasattr(value, "_fields")
    return hasattr(value, "__array__") and hasattr(value, "__len__")


def _named_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return (subscript or attribute, item) of the items that `items_in` returns."""
    items = items_in(value)
    if isinstance(value, Mapping):
        return zip([f"[{key!r}]" for key in value], items, strict=True)
    if isinstance(value, (list, tuple)):
        named = getattr(value, "_fields", None)
        names = [f".{name}" for name in named] if named else [f"[{i}]" for i in range(len(items))]
        return zip(names, items, strict=True)
    if not items:
        return ()
    return zip([f".{field.name}" for field in fields(value)], items, strict=True)
