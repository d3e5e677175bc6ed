"""GPU experiments of lesson 02: what checkpoints save and cost on a device."""

from __future__ import annotations

import torch
from torch import nn

from course_lib.checkpoint import checkpoint
from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens

from . import experiment

SMALL = {"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 2}


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@experiment(
    "02",
    "checkpointed_decoder",
    en="A decoder's forward and backward pass, plain and with a checkpoint a layer",
    zh="解码器的前向与反向：普通，以及每层一个检查点",
    small=SMALL,
    labels={
        "plain_peak_bytes": ("plain: peak of tensors", "普通：张量峰值"),
        "plain_allocator_peak_bytes": ("plain: allocator's peak", "普通：分配器峰值"),
        "plain_seconds": ("plain: time", "普通：时间"),
        "checkpointed_peak_bytes": ("checkpointed: peak of tensors", "检查点：张量峰值"),
        "checkpointed_allocator_peak_bytes": ("checkpointed: allocator's peak", "检查点：分配器峰值"),
        "checkpointed_seconds": ("checkpointed: time", "检查点：时间"),
    },
)
def checkpointed_decoder(
    device: torch.device,
    *,
    vocabulary: int = 32000,
    hidden: int = 1024,
    heads: int = 16,
    layers: int = 12,
    sequence: int = 1024,
    batch: int = 4,
) -> dict[str, float]:
    model = Decoder(vocabulary=vocabulary, hidden=hidden, heads=heads, layers=layers, sequence=sequence).to(device)
    tokens = random_tokens(batch, sequence, vocabulary).to(device)
    figures = {}
    for name in ("plain", "checkpointed"):
        if name == "checkpointed":
            model.layers = nn.ModuleList(_Checkpointed(layer) for layer in model.layers)
        found = measure(lambda: model.loss(tokens).backward(), model=model)
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_allocator_peak_bytes"] = found.allocator_peak_bytes
        figures[f"{name}_seconds"] = found.seconds
    return figures
