"""The reentrant mode of `checkpoint`: one autograd node, whose backward runs the function again.

This second run has its own backward pass inside the backward pass.

The first part of this file serves both modes. It preserves the inputs of a function and the global
state of its first run, which together determine the function's result.
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

# ---- inputs: autograd saves the tensors, and this module the containers that they were in

_PLACEHOLDER = torch.empty(0, device="cpu")
# lists and dicts are copied, because a function may change those that it receives
_map_copying = partial(map_tensors, copied=(list, dict))


def without_tensors(value: Any) -> Any:
    """Copy `value` with a placeholder for each tensor; lists and dicts are copied, too."""
    return _map_copying(lambda tensor: _PLACEHOLDER, value)


def with_tensors(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Undo `without_tensors`: copy `value` with each placeholder replaced by the next tensor."""
    remaining = iter(tensors)
    return _map_copying(lambda placeholder: next(remaining), value)


def saved_inputs(node: Any, function: Callable, changed: bool = False) -> tuple[Tensor, ...]:
    """Return the input tensors that an autograd node has saved.

    Args:
        node: The node.
        function: The checkpointed function, for the error message.
        changed: Whether an input is already known to have been changed in place.

    Raises:
        RuntimeError: An input was changed in place.
    """
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
    """Return the number of in-place changes of a tensor, or None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


class RunningStatistics:
    """Copies of the running statistics among the inputs of a function.

    Every floating-point vector that does not require gradients is assumed to hold running
    statistics, because PyTorch's functions, such as `F.instance_norm`, change only such arguments
    in place. These vectors are copied before the first run. After that run, the copies of unchanged
    vectors are dropped. The recomputation gets copies of the vectors that the first run changed, so
    it starts from the same values and changes only copies. `F.batch_norm` does not increase the
    version counter, so its changes are not detected.

    Attributes:
        copies: Position of an input -> its copy. After `drop_unchanged`, only changed inputs have
            one.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        vectors = {
            i: x
            for i, x in enumerate(tensors)
            if x.dim() == 1 and x.is_floating_point() and not x.requires_grad
        }
        self.versions = {i: (x, version(x)) for i, x in vectors.items()}
        self.copies = {i: x.clone() for i, x in vectors.items()}

    def drop_unchanged(self) -> None:
        """After the first run, drop the copies of the inputs that it did not change."""
        for i, (x, version_before) in self.versions.items():
            if version(x) == version_before:
                del self.copies[i]
        self.versions = {}


# ---- global state: random numbers, autocast, the default device


class GlobalState:
    """Global state on which the result of a function depends, recorded before its first run.

    Args:
        tensors: Inputs of the function, whose devices are included.
        preserve_rng_state: Whether to record the states of random number generators.
    """

    def __init__(self, tensors: list[Tensor], preserve_rng_state: bool):
        devices = {tensor.device for tensor in tensors}
        device_types = {
            DefaultDeviceType.get_device_type(),
            *(device.type for device in devices),
        } - {"cpu"}
        self.autocast = AutocastState(device_types)
        active = _get_current_function_mode_stack()
        modes = [mode for mode in active if isinstance(mode, DeviceContext)]
        self.default_device = modes[-1].device if modes else nullcontext()
        self.modes = modes_when_recomputed()
        self.random = None
        self.unused = set()
        if preserve_rng_state:
            # Reading the random state of a device that is not in use would initialize the device.
            used = {device_type for device_type in device_types if _in_use(device_type)}
            self.unused = device_types - used
            current = [
                torch.device(device_type, getattr(torch, device_type).current_device())
                for device_type in used
            ]
            self.random = RandomState(
                [*current, *(device for device in devices if device.type in used)]
            )

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore this state inside the block, and the current state after it."""
        current_random = None if self.random is None else RandomState(self.random.devices)
        try:
            if current_random is not None:
                self.random.restore()
            with self.autocast.restore(), self.default_device, ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode)
                yield
        finally:
            if current_random is not None:
                current_random.restore()

    def check_devices(self) -> None:
        """Raise an error if the function initialized a device, by using it first.

        The random state of this device before the function is then unknown.
        """
        for device_type in self.unused:
            if _in_use(device_type):
                raise RuntimeError(
                    "PyTorch's device state was initialized in the forward pass of a Checkpoint,"
                    " which is not allowed, because its RNG state could not be kept. Call"
                    f" torch.{device_type}.init() before the first checkpoint"
                )


def _in_use(device_type: str) -> bool:
    return getattr(getattr(torch, device_type, None), "_initialized", False)


# ---- the autograd node of the reentrant mode


class CheckpointFunction(torch.autograd.Function):
    """The reentrant mode: `CheckpointFunction.apply(function, preserve_rng_state, *args)`.

    In the second run the inputs are leaves, so the inner backward pass ends at them. It adds the
    gradients of the parameters to their `.grad`, and `backward` returns the gradients of the
    inputs. Autograd calls `backward` only if at least one input requires gradients.
    """

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, *args):
        check_backward_validity(args)
        tensors = list(tensors_in(args))
        ctx.run_function = run_function
        ctx.args = without_tensors(args)
        ctx.global_state = GlobalState(tensors, preserve_rng_state)
        statistics = RunningStatistics(tensors)
        versions_before = [version(x) for x in tensors]
        with torch.no_grad():
            outputs = run_function(*args)
        statistics.drop_unchanged()
        inputs_saved = [statistics.copies.get(i, x) for i, x in enumerate(tensors)]
        ctx.save_for_backward(*inputs_saved)
        # autograd detects only changes after save_for_backward; this detects those before it
        ctx.changed = any(
            x is tensor and version(tensor) != version_before
            for x, tensor, version_before in zip(
                inputs_saved, tensors, versions_before, strict=True
            )
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
        # Tensors that are arguments themselves become leaves, whose gradients are returned below.
        # Tensors inside containers keep their history, so backward continues through them.
        inputs = detach_variable(
            with_tensors(ctx.args, saved_inputs(ctx, ctx.run_function, ctx.changed))
        )
        with torch.enable_grad(), ctx.global_state.restore():
            outputs = ctx.run_function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if len(outputs) != len(grads):
            raise CheckpointError(
                f"checkpoint: the forward pass returned {len(grads)} values, but the recomputation"
                f" returned {len(outputs)}. The function must do the same whenever it is run"
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
