"""What a node of the autograd graph holds."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

AccumulateGrad = torch._C._functions.AccumulateGrad


def hooks_active() -> bool:
    """True inside saved-tensor hooks, such as those of non-reentrant checkpointing or of offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@cache
def saved_names(kind: type) -> tuple[str, ...]:
    """What a kind of node saves, such as ("mat1", "mat2")."""
    return tuple(name[len("_raw_saved_") :] for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node) -> list[tuple[str, Tensor]]:
    """(name, tensor) for each tensor that a node of the graph has saved for backward.

    Args:
        node: a `grad_fn`, not freed, made outside saved-tensor hooks (else asking would run them).

    Returns:
        Names are those of the operator's arguments ("self", "mat2", "result"), or "saved_tensors" for a
        `torch.autograd.Function`. A node that has been freed, or whose saved tensor was changed, gives nothing.
    """
    found = []
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found = [("saved_tensors", value) for value in node.saved_tensors]
        else:
            for name in saved_names(type(node)):
                value = getattr(node, f"_saved_{name}")
                found.extend((name, item) for item in (value if isinstance(value, list | tuple) else (value,)))
    except RuntimeError:
        pass
    return [(name, value) for name, value in found if isinstance(value, Tensor)]
