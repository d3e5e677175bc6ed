"""Steps without memory: symbolic tensors, and a dtype conversion that works on them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from .._torch import is_symbolic


def symbolic() -> AbstractContextManager:
    """A context in which tensors have shapes, dtypes and storages, but no memory: build a model and step it for free.

    A `MemoryMeter` inside counts the bytes that the same step would take for real. Everything that the step uses must
    be made inside the context; `module.to(dtype)` fails on modules with such parameters, `cast` converts them.
    PyTorch's own counterpart of a meter in this context is `torch.distributed._tools.mem_tracker.MemTracker`.

    Example::

        with symbolic():
            model, batch = cast(make_model(), torch.bfloat16), make_batch()
            with MemoryMeter(model) as meter:
                train_step(model, batch)

    Source: `torch._subclasses.FakeTensorMode`.
    """
    return FakeTensorMode()


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating parameters and buffers in place, as `module.to(dtype)` does; symbolic ones too.

    Symbolic tensors cannot be given other data, so new ones take their place, once for each that modules share; their
    gradients are dropped, and an optimizer is made afterwards.

    Args:
        module: its parameters and buffers are real or symbolic.
        dtype: a floating or complex dtype.

    Returns:
        The module.
    """
    if not is_symbolic(*module.parameters(), *module.buffers()):
        return module.to(dtype)
    made: dict[Tensor, Tensor] = {}
    for old in (*module.parameters(), *module.buffers()):  # each once
        if (old.is_floating_point() or old.is_complex()) and old.dtype != dtype:
            new = old.detach().to(dtype)
            made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: made[old] for name, old in tensors.items() if old in made})
    return module
