"""Training steps without memory: symbolic tensors, and a dtype conversion that works on them."""

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
    """Return a context in which tensors have shapes, dtypes and storages, but take no memory. A
    model can be built and trained for a step inside it.

    A `MemoryMeter` inside the context counts the bytes that the same step would take for real.
    Everything that the step uses must be made inside the context, except for tensors of integers.

    Tensors of integers and booleans, such as tokens, labels and masks, are real if they are on the
    CPU and take at most 4 MiB each. A step that reads their values then takes the same branches as
    the real step: for example, it drops a mask that is all ones. All other values are unknown, and
    reading them raises PyTorch's own error, which names the operator. Where layers are dropped at
    random, one random draw decides which. At the end of the context the random number generators
    are restored to their earlier states. Functions and modules that `torch.compile` has compiled
    run uncompiled inside the context, and compiled after it.

    Args:
        mode: The mode that an earlier `with symbolic() as mode` returned, to continue with its
            tensors.

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
    # Real tensors, such as tokens, are drawn from the real generators, whose states are restored at
    # the end.
    state = AllRandomState(counted=False)
    try:
        # `_no_grad_trunc_normal_` draws values outside the bounds again, for which it must read
        # them. Symbolic weights need no values.
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
    """Conversion that replaces each symbolic tensor by one other tensor, also if several modules
    share it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.made = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)

    def in_place_of(self, old: Tensor) -> Tensor:
        """Return the tensor that replaces this one, or the tensor itself if the conversion does not
        change it."""
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
    """Replace the symbolic tensors of a module by converted ones, and return the module.

    This function replaces `Module._apply`, which `module.to` calls, because the data of a symbolic
    tensor cannot be replaced in place.
    """
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
    """Convert a module's floating-point parameters and buffers, as `module.to(dtype)` does,
    including symbolic ones.

    Complex tensors are left unchanged unless `dtype` is complex, because they would lose their
    imaginary parts. In a symbolic module, new tensors replace the old ones, whose gradients are
    dropped. Create the optimizer after the conversion.

    Args:
        module: Module with real or symbolic parameters and buffers.
        dtype: A floating-point or complex dtype.

    Returns:
        The module.
    """

    def converted(tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() or (tensor.is_complex() and dtype.is_complex)
        return tensor.to(dtype) if wanted else tensor

    with patch.object(nn.Module, "_apply", _applied):
        return module._apply(converted)
