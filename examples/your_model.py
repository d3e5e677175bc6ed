"""Predict the peak memory of one step of your model, then measure it; both are equal to the byte.

python examples/your_model.py
"""

import torch
from torch import nn

from course_lib.budget import Recipe, estimate, run


def make_model() -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers)


def make_batch() -> torch.Tensor:
    return torch.randn(8, 64, 128)  # (samples, tokens, features)


def loss_sum(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) ** 2).mean((1, 2)).sum(), len(batch)  # sum over samples, number of samples


for recipe in (Recipe(), Recipe(checkpoint="layers"), Recipe(micro_batches=4)):
    predicted = estimate(make_model, make_batch, recipe, loss_sum=loss_sum)
    measured = run(make_model, make_batch, recipe, loss_sum=loss_sum).meter
    print(f"{predicted.peak_bytes:>12,} predicted, {measured.peak_bytes:>12,} measured: {recipe}")
