"""Compute the loss of one micro-batch as a pair (sum of losses, weight).

The loss is computed by the model, or by the user's function `loss_sum`. `check_loss` raises an
error if the losses of several micro-batches cannot be added up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from course_lib._batches import ALLOWS_BATCH_NORM, mixes_samples
from course_lib._check import describe, function
from course_lib._hugging_face_losses import (
    GIVE_LOSS_SUM,
    has_loss_sum,
    has_method,
    is_hugging_face,
    own_loss,
    takes_arguments,
    wrapped_in,
)
from course_lib._torch.steps import check_gradients_enabled
from course_lib._torch.symbolic import is_symbolic
from course_lib.symbolic.views import views_by_geometry

from .stages import CHAINED, runs_stages, staged_loss

# This is `course_lib.budget.Recipe`. It cannot be imported here, because its techniques import this
# module.
Recipe = Any
# Example for error messages: the loss of a classifier whose batch is (inputs, labels).
LOSS_SUM_EXAMPLE = (
    "def loss_sum(model, batch): return torch.nn.functional.cross_entropy(model(batch[0]),"
    " batch[1], reduction='sum'), len(batch[1])"
)
LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


def loss_of(
    model: nn.Module, batch: Any, recipe: Recipe, loss_sum=None
) -> tuple[Tensor, float | Tensor]:
    """Return the loss of one micro-batch as a pair (sum of losses, weight).

    The sum is later divided by the weight, which is the number of tokens or samples in the sum. The
    pair comes from the first of these sources that exists:

    - the function `loss_sum(model, batch)`, if it is given;
    - the model's method `stages`, if the recipe runs it (see `runs_stages`);
    - the model's own loss.

    Args:
        model: Model to train.
        batch: Micro-batch whose loss is computed.
        recipe: Memory-saving techniques of the training step.
        loss_sum: Function of the user that computes the pair; None if the user gave no function.

    Raises:
        ValueError: The model's code uses a symbolic tensor that it stored during an earlier
            estimate, for example in a cache.
    """
    try:
        with views_by_geometry() if is_symbolic() else nullcontext():
            return _loss_of(model, batch, recipe, loss_sum)
    except AssertionError as error:
        if is_symbolic() or "FakeTensor" not in str(error):
            raise
        raise ValueError(
            "the model uses a symbolic tensor, which has no values. Code of the model stored it"
            " during an earlier estimate, for example in a global cache. Clear that cache, or run"
            " the step in a process without an earlier estimate"
        ) from error


def _loss_of(model, batch, recipe: Recipe, loss_sum) -> tuple[Tensor, float | Tensor]:
    if loss_sum is not None:
        return loss_sum(model, batch)
    if runs_stages(model, recipe):
        return staged_loss(model, batch, recipe)
    return own_loss(model, batch, recipe.micro_batches)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that require gradients, as a list."""
    return [p for p in model.parameters() if p.requires_grad]


def check_loss(model: nn.Module, recipe: Recipe, loss_sum: Any) -> None:
    """Raise an error if the model has no loss, or if its loss cannot be used with the recipe.

    For several micro-batches, the loss must be a sum with a known weight, because means cannot be
    added up.

    Args:
        model: Model to train.
        recipe: Memory-saving techniques of the training step.
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the number by
            which the sum is divided, such as the number of tokens. None uses the model's own loss.

    Raises:
        TypeError: The model has no loss, or `loss_sum` is not a function of (model, batch).
        ValueError: Recipe and loss cannot be combined. For example, the recipe has several
            micro-batches and the loss is a mean.
        RuntimeError: Gradients are switched off.
    """
    check_gradients_enabled()
    name = type(wrapped_in(model)).__name__
    count = recipe.micro_batches
    if loss_sum is not None:
        function("loss_sum", loss_sum, "a function (model, batch) -> (sum of losses, weight)")
        takes_arguments("loss_sum", loss_sum, "(model, batch)", model, None)
        if runs_stages(model, recipe):
            raise ValueError(
                f"loss_sum must be None with checkpoint={recipe.checkpoint!r} and blocks=None, got"
                " a function. With these settings, the last function in the list that"
                " model.stages() returns computes the loss. Leave out loss_sum, or set blocks to"
                " the names of the model's blocks"
            )
    elif not has_loss_sum(model) and not has_method(model, "loss") and not is_hugging_face(model):
        raise TypeError(
            f"model must have a loss, got {describe(model)} without one; {GIVE_LOSS_SUM}. Example"
            f" of such a function: {LOSS_SUM_EXAMPLE}"
        )
    elif not has_loss_sum(model) and count > 1:
        raise ValueError(
            f"micro_batches must be 1 for {describe(model)}, got {count}: its loss is a mean, and"
            " the number of tokens or samples in that mean is not known. To use several"
            f" micro-batches, {GIVE_LOSS_SUM}"
        )
    if (
        recipe.offload_activations
        and recipe.checkpoint in CHAINED
        and not runs_stages(model, recipe)
    ):
        raise ValueError(
            f"offload_activations cannot be combined with checkpoint={recipe.checkpoint!r} for a"
            f" {name}: the schedule that runs its blocks keeps the inputs of the blocks in memory."
            " Use checkpoint='none' or 'layers'"
        )
    if count > 1 and mixes_samples(model):
        raise ValueError(
            f"micro_batches must be 1 for {describe(model)} with BatchNorm in training mode, got"
            f" {count}: BatchNorm computes its statistics from each micro-batch instead of the"
            " whole batch. Put BatchNorm into eval mode, or allow such statistics with"
            f" model.{ALLOWS_BATCH_NORM} = True"
        )


def warn_if_not_compiled(model: nn.Module, loss_sum: Any) -> None:
    """Warn if a model was compiled, but its loss runs uncompiled.

    `torch.compile(model)` does not compile the methods `loss` and `loss_sum` of the model. Such a
    method calls the original, uncompiled module. Nothing happens if `loss_sum` is given.

    Args:
        model: Model to train.
        loss_sum: Function of the user that computes the loss instead of the model; or None.
    """
    names = [name for name in ("loss_sum", "loss") if has_method(model, name)]
    if loss_sum is None and hasattr(model, "_orig_mod") and names:
        name = type(wrapped_in(model)).__name__
        warnings.warn(
            f"the step runs uncompiled, because torch.compile(model) does not compile {name}."
            f"{names[0]}; compile the module in place with model.compile(), or pass a loss_sum that"
            " calls the compiled model",
            stacklevel=3,
        )
