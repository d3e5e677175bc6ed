"""Technique that sets the dtype of parameters, gradients and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from course_lib._check import describe
from course_lib._torch.symbolic import tracked_device_kind
from course_lib._torch.tensors import map_tensors
from course_lib.labels import text
from course_lib.symbolic.cuda_autocast import CudaCasts, in_fp32
from course_lib.symbolic.quantization import is_quantized

from .technique import Recipe, Technique, choice, fields_of

# Maps each precision to the dtype of the parameters.
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "autocast": torch.float32,
    "bf16-only": torch.bfloat16,
}


class Precision(Technique):
    """Technique that chooses the dtypes of parameters, gradients and activations.

    `course_lib.budget.build` converts the model. With precision="autocast", `autocast_forward` runs
    the model under autocast.
    """

    fields = fields_of(precision=choice(*PRECISIONS, None))
    after = None
    composable = True
    computes = False
    acts_on = frozenset({"parameter", "gradient", "activation", "temporary"})

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        for p in model.parameters() if sets_parameter_dtype(recipe, model) else ():
            if p.is_floating_point() and p.dtype != recipe.dtype and not is_quantized(p):
                return (
                    "precision must match the dtype of the model's parameters, got"
                    f" {recipe.precision!r} for a model with {describe(p)}; create the model with"
                    " course_lib.budget.build"
                )
        return None

    def labels(self, recipe: Recipe) -> list[str]:
        if recipe.precision == "autocast":
            return [text("bf16 autocast")]
        if recipe.precision == "bf16-only":
            return [text("bf16 without fp32 master weights")]
        return [recipe.precision or text("own precision")]


def sets_parameter_dtype(recipe: Recipe, model: nn.Module) -> bool:
    """Return whether a recipe sets the dtype of a model's parameters.

    The result is False if `recipe.precision` is None. The precision "autocast" sets the parameters
    to float32, but only in a model without frozen parameters. With frozen parameters, the result is
    False, because the frozen weights of a model with LoRA adapters can be quantized or in bf16.
    """
    frozen = any(not p.requires_grad for p in model.parameters())
    return recipe.precision is not None and not (recipe.precision == "autocast" and frozen)


@contextmanager
def autocast_forward(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Context manager in which `model.forward` runs under bf16 autocast and returns fp32 outputs.

    Inside its `with` block, each call of `model.forward` runs under autocast, and bf16 and fp16
    tensors in the result are converted to fp32. Hugging Face's Trainer does the same with
    `bf16=True`.

    The context manager yields a function without arguments, to be called after the loss is
    computed. This function raises ValueError if `model.forward` was not called, because autocast
    then had no effect.

    Source: `accelerate.Accelerator.prepare_model`.
    """
    own, forward = vars(model).get("forward"), model.forward
    device = next(model.parameters()).device.type
    on_cuda = tracked_device_kind() == "cuda"
    calls: list[bool] = []

    @wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        with torch.autocast(device, torch.bfloat16), CudaCasts() if on_cuda else nullcontext():
            output = forward(*args, **kwargs)
        return map_tensors(in_fp32, output)

    def check() -> None:
        if not calls:
            raise ValueError(
                "precision 'autocast' applies only to calls of model(...), but the loss of"
                f" {describe(model)} is computed without such a call. Pass a loss_sum that calls"
                " model(...), or choose another precision"
            )

    try:
        model.forward = under_autocast
        yield check
    finally:
        del model.forward
        if own is not None:
            model.forward = own
