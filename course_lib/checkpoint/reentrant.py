"""The reentrant mode: one autograd node that runs the function again.

This second run has its own backward pass inside the backward pass.

The first part of this file serves both modes. It preserves what determines the result of a
function: its inputs, and the global state when it first ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import (
    CheckpointError,
    DefaultDeviceType,
    check_backward_validity,
    detach_variable,
)

from .._torch import AutocastState, RandomState, map_tensors, modes_when_recomputed, tensors_in

# ---- inputs: containers without their tensors, which autograd keeps and checks

_PLACE = torch.empty(0, device="cpu")
# a function may change a list or dict that it receives, so these are copied
_copied = partial(map_tensors, copied=(list, dict))


def without_tensors(value: Any) -> Any:
    """Copy `value` with a placeholder for each tensor; lists and dicts are copied, too."""
    return _copied(lambda tensor: _PLACE, value)


def with_tensors(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Copy `value` with tensors for the placeholders, in the order of `tensors_in`."""
    rest = iter(tensors)
    return _copied(lambda place: next(rest), value)


def kept_inputs(node: Any, function: Callable, changed: bool = False) -> tuple[Tensor, ...]:
    """Return the inputs that a node has saved; raise if one was changed in place."""
    error = None
    try:
        if not changed:
            return node.saved_tensors
    except RuntimeError as caught:
        if "inplace operation" not in str(caught):
            raise
        error = caught
    name = getattr(function, "__qualname__", type(function).__name__)
    raise RuntimeError(
        f"checkpoint: an input of {name} has been modified by an inplace operation since the"
        " forward pass began, so the recomputation would start from other values. Let the function"
        " work on a copy: x = x.clone()"
    ) from error


def version(tensor: Tensor) -> int | None:
    """Return a tensor's count of in-place changes; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


class Statistics:
    """Running statistics among the inputs of a function.

    They are vectors without gradients, the only kind of argument that functions of PyTorch, such as
    `F.instance_norm`, change in place. All of them are copied before the first run. After it, the
    copies of unchanged ones are dropped. The recomputation works on the copies of those that the
    first run has changed, so it starts from the same values and changes only copies. `F.batch_norm`
    does not count its changes, so they are not noticed.

    Attributes:
        copies: Position of an input -> its copy; after `settle`, of changed inputs only.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        vectors = {
            i: x
            for i, x in enumerate(tensors)
            if x.dim() == 1 and x.is_floating_point() and not x.requires_grad
        }
        self.versions = {i: (x, version(x)) for i, x in vectors.items()}
        self.copies = {i: x.clone() for i, x in vectors.items()}

    def settle(self) -> None:
        """Drop the copies of the inputs that the first run did not change."""
        for i, (x, before) in self.versions.items():
            if version(x) == before:
                del self.copies[i]
        self.versions = {}


# ---- global state: random numbers, autocast, the default device


class Surroundings:
    """Global state that determines what a function returns, recorded when it first ran."""

    def __init__(self, tensors: list[Tensor], preserve_rng_state: bool):
        devices = {tensor.device for tensor in tensors}
        kinds = {DefaultDeviceType.get_device_type(), *(device.type for device in devices)} - {
            "cpu"
        }
        self.autocast = AutocastState(kinds)
        active = _get_current_function_mode_stack()
        modes = [mode for mode in active if isinstance(mode, DeviceContext)]
        self.default_device = modes[-1].device if modes else nullcontext()
        self.modes = modes_when_recomputed()
        self.random = None
        self.unused = set()
        if preserve_rng_state:
            # reading the state of a device that is not in use would initialize it
            used = {kind for kind in kinds if _in_use(kind)}
            self.unused = kinds - used
            current = [torch.device(kind, getattr(torch, kind).current_device()) for kind in used]
            self.random = RandomState(
                [*current, *(device for device in devices if device.type in used)]
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state inside the block, and the current state after it."""
        now = None if self.random is None else RandomState(self.random.devices)
        try:
            if now is not None:
                self.random.restore()
            with self.autocast.restored(), self.default_device, ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode)
                yield
        finally:
            if now is not None:
                now.restore()

    def check_devices(self) -> None:
        """Raise if the function was the first to use a device.

        The state of its random numbers before the function is then unknown.
        """
        for kind in self.unused:
            if _in_use(kind):
                raise RuntimeError(
                    "PyTorch's device state was initialized in the forward pass of a Checkpoint,"
                    " which is not allowed: its RNG state could not be kept. Call"
                    f" torch.{kind}.init() before the first checkpoint"
                )


def _in_use(device_type: str) -> bool:
    return getattr(getattr(torch, device_type, None), "_initialized", False)


# ---- the mode


class CheckpointFunction(torch.autograd.Function):
    """The reentrant mode: `CheckpointFunction.apply(function, preserve_rng_state, *args)`.

    In the second run the inputs are leaves, so the inner backward pass ends at them. A node's
    `backward` is only called if an input requires gradients, which it then returns. The parameters
    get their gradients from the inner pass.
    """

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, *args):
        check_backward_validity(args)
        tensors = list(tensors_in(args))
        ctx.run_function = run_function
        ctx.args = without_tensors(args)
        ctx.surroundings = Surroundings(tensors, preserve_rng_state)
        statistics = Statistics(tensors)
        versions = [version(x) for x in tensors]
        with torch.no_grad():
            outputs = run_function(*args)
        statistics.settle()
        kept = [statistics.copies.get(i, x) for i, x in enumerate(tensors)]
        ctx.save_for_backward(*kept)
        # autograd checks versions only from here on, so changes before this are checked here
        ctx.changed = any(
            x is tensor and version(tensor) != before
            for x, tensor, before in zip(kept, tensors, versions, strict=True)
        )
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or"
                " passing an `inputs` parameter to .backward(). Set use_reentrant=False, or call"
                " .backward() without it"
            )
        # Inputs are leaves, and their gradients are returned; tensors in containers keep their
        # history.
        inputs = detach_variable(
            with_tensors(ctx.args, kept_inputs(ctx, ctx.run_function, ctx.changed))
        )
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = ctx.run_function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if len(outputs) != len(grads):
            raise CheckpointError(
                f"checkpoint: the forward pass returned {len(grads)} values, the recomputation"
                f" {len(outputs)}. The function must do the same whenever it is run"
            )
        pairs = [
            (y, g)
            for y, g in zip(outputs, grads, strict=True)
            if isinstance(y, Tensor) and y.requires_grad
        ]
        if not pairs:
            raise RuntimeError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)
