"""The storages of tensors, which the reader's memory meters count."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested values, by address."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}
