"""Steps without memory: symbolic tensors, and a dtype conversion that works on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .._torch import AllRandomState, is_symbolic
from .compiler import compiled_code_set_aside
from .concrete_ints import Symbolic


@contextmanager
def symbolic(mode: Symbolic | None = None) -> Iterator[Symbolic]:
    """A context in which tensors have shapes, dtypes and storages, but no memory: build a model and
    step it for free.

    A `MemoryMeter` inside counts the bytes that the same step would take for real. Everything that
    the step uses must be made inside the context, but for tensors of whole numbers.

    Tensors of whole numbers and truth values, such as tokens, labels and masks, are real on the CPU
    up to 4 MiB each, so that a step that looks at them goes the way that it goes for real: a mask
    that is all ones is dropped, say. What depends on other values is unknown, and to look at it
    raises PyTorch's own error, which names the operator. Where layers are dropped at random, one
    draw is taken; the generators of random numbers are put back in the end. Functions and modules
    that `torch.compile` has compiled run uncompiled inside the context, and compiled after it.

    Args:
        mode: what an earlier `with symbolic() as mode` gave, to go on with its tensors.

    PyTorch's own counterpart of a meter in this context is
    `torch.distributed._tools.mem_tracker.MemTracker`.

    Example:
        >>> with symbolic():
        ...     model, batch = nn.Linear(100_000, 100_000), torch.randn(8, 100_000)
        ...     with MemoryMeter(model) as meter:
        ...         model(batch).sum().backward()
        >>> meter.peak_bytes
        80000800008

    Source: `torch._subclasses.FakeTensorMode`.
    """
    state = AllRandomState(counted=False)  # tokens, say, are drawn for real
    try:
        # It draws again what lies outside, and looks for that; symbolic weights need no values.
        without_values = patch.object(
            nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor
        )
        with (
            without_values,
            patch.object(nn.Module, "_apply", _applied),
            compiled_code_set_aside(),
            mode or Symbolic() as mode,
        ):
            yield mode
    finally:
        state.restore()


_apply = nn.Module._apply


class _Once:
    """A conversion that gives each symbolic tensor one other in its place, for all modules that
    share it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.made = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)

    def in_place_of(self, old: Tensor) -> Tensor:
        if old not in self.made:
            given = old.detach()
            new = self(given)
            if new is given:
                new = old
            elif isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            self.made[old] = new
        return self.made[old]


def _applied(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
    """Stand in for `Module._apply`, which `module.to` calls: symbolic tensors cannot be given other
    data, so that new ones take their place."""
    once = function if isinstance(function, _Once) else _Once(function)
    for child in module.children() if recurse else ():
        child._apply(once)
    if not is_symbolic(module, *module._parameters.values(), *module._buffers.values()):
        return _apply(module, once, recurse=False)
    for tensors in (module._parameters, module._buffers):
        tensors.update(
            {name: once.in_place_of(old) for name, old in tensors.items() if old is not None}
        )
    return module


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating parameters and buffers, as `module.to(dtype)` does; symbolic ones
    too.

    Complex ones are left as they are, unless the dtype is complex: they would lose their imaginary
    parts. In a symbolic module, new tensors take the place of the old ones; their gradients are
    dropped, and an optimizer is made afterwards.

    Args:
        module: its parameters and buffers are real or symbolic.
        dtype: a floating or complex dtype.

    Returns:
        The module.
    """

    def converted(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() or (tensor.is_complex() and dtype.is_complex)
        return tensor.to(dtype) if wanted else tensor

    with patch.object(nn.Module, "_apply", _applied):
        return module._apply(converted)
