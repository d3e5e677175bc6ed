"""The loss of one micro-batch: its sum and its weight, the model's own or given, with checkpoints
and loss head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from course_lib._check import function, shown
from course_lib._losses import (
    has_loss_sum,
    has_method,
    is_hugging_face,
    own_loss,
    samples_in,  # noqa: F401 - for the package
    takes_arguments,
    wrapped_in,
)
from course_lib._torch import is_symbolic

from .stages import CHAINED, runs_stages, staged_loss

Recipe = Any  # a `course_lib.budget.Recipe`, whose techniques need what is here
LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


def loss_of(
    model: nn.Module, batch: Any, recipe: Recipe, loss_sum=None
) -> tuple[Tensor, float | Tensor]:
    """The sum of losses of one micro-batch and its weight."""
    try:
        return _loss_of(model, batch, recipe, loss_sum)
    except AssertionError as error:
        if is_symbolic() or "FakeTensor" not in str(error):
            raise
        got = (
            "the model's code has kept a symbolic tensor of an estimate, as in a cache outside of"
            " the model"
        )
        raise ValueError(
            f"{got}; it takes that cache emptied, or a process without estimates"
        ) from error


def _loss_of(model, batch, recipe: Recipe, loss_sum) -> tuple[Tensor, float | Tensor]:
    if loss_sum is not None:
        return loss_sum(model, batch)
    if runs_stages(model, recipe):
        return staged_loss(model, batch, recipe)
    return own_loss(model, batch, recipe.micro_batches)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_loss(model: nn.Module, recipe: Recipe, loss_sum: Any) -> None:
    """Whether there is a loss, and its weight is known where micro-batches are to be added up."""
    told = (
        "it takes a loss_sum(model, batch) -> (sum of losses, weight), or such a method of the"
        " model"
    )
    name = type(wrapped_in(model)).__name__
    pieces = recipe.micro_batches
    if loss_sum is not None:
        function("loss_sum", loss_sum, "a function (model, batch) -> (sum of losses, weight)")
        takes_arguments("loss_sum", loss_sum, "(model, batch)", model, None)
        if runs_stages(model, recipe):
            got = f"checkpoint is {recipe.checkpoint!r} with a loss_sum"
            raise ValueError(f"{got}; it takes the model's own loss, or the names of its blocks")
    elif not has_loss_sum(model) and not has_method(model, "loss") and not is_hugging_face(model):
        raise TypeError(f"model is {shown(model)} without a loss; {told}")
    elif not has_loss_sum(model) and pieces > 1:
        raise ValueError(
            f"micro_batches is {pieces} and {name}.loss is a mean of unknown weight; {told}"
        )
    if (
        recipe.offload_activations
        and recipe.checkpoint in CHAINED
        and not runs_stages(model, recipe)
    ):
        got = (
            f"offload_activations is True and checkpoint is {recipe.checkpoint!r} and the model is"
            f" a {name}"
        )
        raise ValueError(
            f'{got}, whose blocks\' inputs the schedule holds; it takes "none" or "layers"'
        )
    if pieces > 1 and mixes_samples(model):
        got = (
            f"micro_batches is {pieces} and the model is a {name} with BatchNorm in training, whose"
            " loss is no sum"
        )
        raise ValueError(f"{got} over samples; it takes 1, or BatchNorm in eval mode")


def mixes_samples(model: nn.Module) -> bool:
    """Whether a sample's loss depends on the others in its batch."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules()
    )
