"""What a node of the autograd graph holds."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .storages import tensors_among

AccumulateGrad = torch._C._functions.AccumulateGrad


def hooks_active() -> bool:
    """True inside saved-tensor hooks, such as those of non-reentrant checkpointing or of offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """What a kind of node saves, such as ("mat1", "mat2")."""
    return tuple(name[len("_raw_saved_") :] for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node) -> list[Tensor]:
    """What a node of the graph has saved for backward; nothing if it has been freed or one of them was changed.

    Args:
        node: a `grad_fn` made outside saved-tensor hooks (else asking would run them).
    """
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return tensors_among(node.saved_tensors)
        return tensors_among([getattr(node, f"_saved_{name}") for name in saved_names(type(node))])
    except RuntimeError:
        return []
