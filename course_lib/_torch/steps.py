"""Check what a training step requires of its optimizer and of autograd."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._check import describe


def needs_closure(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer's `step` needs a closure for the loss, as that of LBFGS does."""
    arguments = inspect.signature(optimizer.step).parameters.values()
    return any(each.name == "closure" and each.default is each.empty for each in arguments)


def check_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if an optimizer's `step` needs a closure that computes the loss."""
    if needs_closure(optimizer):
        raise TypeError(
            f"optimizer must have a step() without a closure, got {describe(optimizer)}, whose"
            " step(closure) computes the loss itself. Train with this optimizer in a loop of your"
            " own"
        )


def check_in_training(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer is in evaluation mode.

    Schedule-free optimizers are in evaluation mode until their method `train` is called.
    """
    if any(group.get("train_mode") is False for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer must be in training mode, got {describe(optimizer)} in evaluation mode."
            " Call optimizer.train() before the step"
        )


def check_gradients_enabled() -> None:
    """Raise RuntimeError if gradients are disabled, because a training step needs them."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "gradients must be enabled for a training step, got a call inside torch.no_grad(),"
            " torch.inference_mode() or torch.set_grad_enabled(False)"
        )


@contextmanager
def not_collecting() -> Iterator[None]:
    """Disable automatic garbage collection inside a `with` block, to save time.

    A step on symbolic tensors makes many objects, and each collection would examine all of them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
