"""Split batches into micro-batches.

`split` cuts a batch into micro-batches of a given size, along the first dimension of its tensors
and NumPy arrays. `parts_of` cuts it into a given number of micro-batches, with `split` or with a
function that the user has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._check import describe, whole
from ._torch.tensors import items_in, map_tensors, tensors_in

#: Type of a user's function (batch, parts) that returns a list of `parts` batches.
Split = Callable[[Any, int], Sequence[Any]]
#: Types whose first dimension `split` cuts.
ARRAYS = (Tensor, np.ndarray)
#: Advice, in error messages, for a batch that `split` cannot cut.
GIVE_SPLIT = (
    "pass a function split(batch, parts) that returns a list of `parts` batches. On the command"
    " line, set split as an attribute of the function that --model names: make_model.split = split"
)
#: Name of the attribute with which a model allows micro-batches although it has BatchNorm.
ALLOWS_BATCH_NORM = "batch_norm_per_micro_batch"


def split(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Split a batch into micro-batches along the first dimension of its tensors and NumPy arrays.

    Args:
        batch: A tensor or NumPy array, or tuples, lists, mappings and dataclasses with such values,
            nested arbitrarily. The first dimension of every tensor and array must be the samples.
            Other values, such as numbers, are in every micro-batch unchanged. A list or tuple with
            one such value per sample raises an error, unless there is only one micro-batch.
        micro_batch_size: Number of samples in each micro-batch.

    Returns:
        An iterator over micro-batches with the same structure as the batch. Their tensors and
        arrays are views, so nothing is copied. The last micro-batch may be smaller than the others.
        The iterator is empty if the batch has no samples.

    Raises:
        TypeError, ValueError: The batch contains no tensor, a nested or sparse tensor, tensors with
            different numbers of samples, or a list with one value per sample. The message says
            where in the batch the cause is.

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
    """Split a batch into a list of `parts` micro-batches.

    Args:
        batch: The batch. If `parts` is 1, it may have any type, and the list contains just the
            batch itself.
        parts: Number of micro-batches. Without `split_batch`, each has ceil(samples / parts)
            samples, and the last one may have fewer. The list may then have fewer than `parts`
            items: 5 samples in 4 parts give micro-batches of 2, 2 and 1.
        split_batch: A user's function (batch, parts) that returns a list of `parts` batches. By
            default, `split` cuts the batch along its first dimension.

    Raises:
        TypeError, ValueError: The batch cannot be split, or the result of `split_batch` is not a
            list (or tuple) of `parts` batches.
    """
    if parts == 1:
        return [batch]
    if split_batch is None:
        return list(split(batch, max(1, math.ceil(_checked_length(batch) / parts))))
    found = split_batch(batch, parts)
    if not isinstance(found, (list, tuple)):
        raise TypeError(
            f"split(batch, {parts}) must return a list of {parts} batches, got {describe(found)}"
        )
    if len(found) != parts:
        raise ValueError(
            f"split(batch, {parts}) must return a list of {parts} batches, got {describe(found)} of"
            f" {len(found)}"
        )
    return list(found)


def num_splittable_samples(batch: Any) -> int:
    """Return the number of samples in a batch that `split` can split.

    Raises:
        TypeError, ValueError: `split` cannot split the batch.
    """
    length = _checked_length(batch)
    if length > 1:
        _check_lists(batch, length)
    return length


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if it cannot be determined.

    This number is the size of the first dimension, which must be the same for all tensors and
    arrays.
    """
    try:
        return _checked_length(batch)
    except (TypeError, ValueError):
        return None


def has_samples(part: Any, batch: Any) -> bool:
    """Return whether a micro-batch contains samples.

    Tensors of the micro-batch that have the shape of a tensor of the batch are ignored, because
    they may be masks that all samples share. The micro-batch contains samples if at least one of
    its remaining tensors is not empty.

    Args:
        part: The micro-batch.
        batch: The whole batch, which was split into at least two micro-batches.
    """
    shared = {tensor.shape for tensor in tensors_in(batch)}
    return any(tensor.numel() for tensor in tensors_in(part) if tensor.shape not in shared)


def mixes_samples(model: nn.Module) -> bool:
    """Return whether splitting a batch would change the loss of a sample, because of BatchNorm.

    BatchNorm in training mode normalizes with the mean over all samples of a micro-batch. The
    result is False if the user accepts this. To accept it, the user sets the attribute
    `batch_norm_per_micro_batch` to True, on the model or on a module inside it.
    """
    allowed = any(getattr(module, ALLOWS_BATCH_NORM, False) for module in model.modules())
    return has_batch_norm(model) and not allowed


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm in training mode."""
    norm = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, norm) and module.training for module in model.modules())


# ---- checks


def _checked_length(batch: Any) -> int:
    """Return the number of samples in a batch, or raise if its tensors and arrays cannot be cut."""
    found = list(_arrays(batch))
    for key, array in found:
        if isinstance(array, Tensor) and (array.is_nested or array.layout is not torch.strided):
            nested = "a nested tensor" if array.is_nested else "a tensor"
            raise TypeError(
                f"batch must contain only dense tensors so that it can be split, got {nested} with"
                f" the layout {array.layout} in {key}. For other batches, {GIVE_SPLIT}"
            )
    if not found:
        raise TypeError(
            "batch must be a tensor or a container of tensors so that it can be split, got"
            f" {describe(batch)}, which contains no tensor. For other batches, {GIVE_SPLIT}"
        )
    (key, first), *others = found
    differing = [each for each in others if each[1].shape[:1] != first.shape[:1]]
    if differing or not first.shape:
        actual = " and ".join(
            f"{key} with {len(array)} samples" if array.shape else f"{key} without dimensions"
            for key, array in [(key, first), *differing[:1]]
        )
        raise ValueError(
            "batch must have the same number of samples in all tensors so that it can be split,"
            f" got {actual}. For other batches, {GIVE_SPLIT}"
        )
    return len(first)


def _check_lists(batch: Any, length: int) -> None:
    """Raise ValueError if a list in the batch holds one plain value for each sample."""
    if found := _find_list_without_tensors(batch, length):
        key, values = found
        raise ValueError(
            f"{key} must be a tensor or a NumPy array so that the batch can be split, got"
            f" {describe(values)} with one value for each of the {length} samples. Convert"
            f" {key} to a tensor, or {GIVE_SPLIT}"
        )


def _arrays(value: Any, key: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield pairs (key, array) of the tensors and arrays in a batch.

    The key is an expression such as "batch['labels']", for messages.
    """
    if isinstance(value, ARRAYS):
        yield key, value
    else:
        for name, item in _named_items(value):
            yield from _arrays(item, key + name)


def _find_list_without_tensors(
    value: Any, length: int, key: str = "batch"
) -> tuple[str, Any] | None:
    """Return (key, list) of the first list in a batch that has `length` items and no tensors.

    The result is None if there is no such list.
    """
    if isinstance(value, ARRAYS):
        return None
    if _lists_values(value) and len(value) == length and not any(True for _ in _arrays(value)):
        return key, value
    inner = (
        _find_list_without_tensors(item, length, key + name) for name, item in _named_items(value)
    )
    return next(filter(None, inner), None)


def _lists_values(value: Any) -> bool:
    """Return whether a value is a sequence that may have one item per sample.

    This is the case for lists, tuples and objects that NumPy can convert to an array, such as a
    pandas Series. It is not the case for strings, and for named tuples, whose items have names.
    """
    if isinstance(value, Sequence):
        return not isinstance(value, (str, bytes)) and not hasattr(value, "_fields")
    return hasattr(value, "__array__") and hasattr(value, "__len__")


def _named_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return pairs (name, item) of the items in a container.

    The name is a subscript or attribute, such as "['labels']", "[0]" or ".labels". For an object
    that is not a container the result is empty.
    """
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
