"""Steps without memory: symbolic tensors, and a dtype conversion that works on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .._torch import RandomState, is_symbolic
from .known import Symbolic


@contextmanager
def symbolic(mode: Symbolic | None = None) -> Iterator[Symbolic]:
    """A context in which tensors have shapes, dtypes and storages, but no memory: build a model and step it for free.

    A `MemoryMeter` inside counts the bytes that the same step would take for real. Everything that the step uses must
    be made inside the context, but for tensors of whole numbers; `module.to(dtype)` fails on modules whose parameters
    are of another dtype, `cast` converts them.

    Tensors of whole numbers and truth values, such as tokens, labels and masks, are real on the CPU up to 4 MiB each,
    so that a step that looks at them goes the way that it goes for real: a mask that is all ones is dropped, say. What
    depends on other values is unknown, and to look at it raises PyTorch's own error, which names the operator. Where
    layers are dropped at random, one draw is taken; the generators of random numbers are put back in the end.

    Args:
        mode: what an earlier `with symbolic() as mode` gave, to go on with its tensors.

    PyTorch's own counterpart of a meter in this context is `torch.distributed._tools.mem_tracker.MemTracker`.

    Example::

        with symbolic():
            model, batch = cast(make_model(), torch.bfloat16), make_batch()
            with MemoryMeter(model) as meter:
                train_step(model, batch)

    Source: `torch._subclasses.FakeTensorMode`.
    """
    state = RandomState(counted=False)  # tokens, say, are drawn for real
    try:
        # It draws again what lies outside, and looks for that; symbolic weights need no values.
        without_values = patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
        with without_values, patch.object(nn.Module, "_apply", _applied), mode or Symbolic() as mode:
            yield mode
    finally:
        state.restore()


_apply = nn.Module._apply


def _applied(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
    """What `module.to` calls: symbolic tensors cannot be given other data, but need none where all are as asked."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    same = is_symbolic(*tensors) and all(function(tensor) is tensor for tensor in tensors) if tensors else False
    return module if same else _apply(module, function, recurse)


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating parameters and buffers in place, as `module.to(dtype)` does; symbolic ones too.

    Complex ones are left as they are, unless the dtype is complex: they would lose their imaginary parts.

    Symbolic tensors cannot be given other data, so new ones take their place, once for each that modules share; their
    gradients are dropped, and an optimizer is made afterwards.

    Args:
        module: its parameters and buffers are real or symbolic.
        dtype: a floating or complex dtype.

    Returns:
        The module.
    """

    def is_converted(tensor: Tensor) -> bool:
        return tensor.is_floating_point() or (tensor.is_complex() and dtype.is_complex)

    if not is_symbolic(*module.parameters(), *module.buffers()):
        return module._apply(lambda tensor: tensor.to(dtype) if is_converted(tensor) else tensor)
    made: dict[Tensor, Tensor] = {}
    for old in (*module.parameters(), *module.buffers()):  # each once
        if is_converted(old) and old.dtype != dtype:
            new = old.detach().to(dtype)
            made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: made[old] for name, old in tensors.items() if old in made})
    return module
