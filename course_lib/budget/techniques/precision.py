"""Dtype of parameters, gradients and activations."""

from __future__ import annotations

import torch
from torch import nn

from course_lib._check import describe
from course_lib.labels import text
from course_lib.symbolic.quantization import is_quantized

from .technique import Recipe, Technique, choice, fields_of

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Precision(Technique):
    """Precision of the model: fp32, or bf16 with fp32 master weights; `build` converts it."""

    fields = fields_of(precision=choice(*PRECISIONS, None))
    after = None
    composable = True
    computes = False
    acts_on = frozenset({"parameter", "gradient", "activation", "temporary"})

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        for p in model.parameters() if recipe.precision is not None else ():
            if p.is_floating_point() and p.dtype != recipe.dtype and not is_quantized(p):
                return (
                    f"precision must be that of the model's parameters, got {recipe.precision!r}"
                    f" for a model with {describe(p)}; make the model with `build`"
                )
        return None

    def words(self, recipe: Recipe) -> list[str]:
        return [recipe.precision or text("own precision")]
