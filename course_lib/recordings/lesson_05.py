"""GPU experiments of lesson 05: one batch in pieces of different sizes, with fp16, a scaler and clipping."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from course_lib.accumulation import AccumulatedStep, split
from course_lib.memory import measure
from course_lib.models import Decoder, random_tokens

from . import experiment


def _loss_sum(model, tokens):
    targets = tokens[:, 1:]
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum")
    return losses, targets.numel()


@experiment(
    "05",
    "pieces_of_a_batch",
    en="A step over one batch, in pieces of 1, a quarter, and all of its samples",
    zh="对同一个批次做一步：每份分别为 1 个样本、四分之一和全部样本",
    small={"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 2, "sequence": 16, "batch": 4},
    labels={
        "one_peak_bytes": ("pieces of 1: peak of tensors", "每份 1 个：张量峰值"),
        "one_seconds": ("pieces of 1: time", "每份 1 个：时间"),
        "quarter_peak_bytes": ("a quarter each: peak of tensors", "每份四分之一：张量峰值"),
        "quarter_seconds": ("a quarter each: time", "每份四分之一：时间"),
        "all_peak_bytes": ("all at once: peak of tensors", "一次全部：张量峰值"),
        "all_seconds": ("all at once: time", "一次全部：时间"),
        "all_allocator_peak_bytes": ("all at once: allocator's peak", "一次全部：分配器峰值"),
    },
)
def pieces_of_a_batch(
    device: torch.device,
    *,
    vocabulary: int = 8192,
    hidden: int = 1024,
    heads: int = 16,
    layers: int = 8,
    sequence: int = 512,
    batch: int = 32,
) -> dict[str, float]:
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "heads": heads, "layers": layers, "sequence": sequence}
    tokens = random_tokens(batch, sequence, vocabulary).to(device)
    model = Decoder(**sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type)
    step = AccumulatedStep(model, optimizer, _loss_sum, scaler=scaler, max_norm=1.0, autocast_dtype=dtype)
    figures = {}
    for name, size in (("one", 1), ("quarter", batch // 4), ("all", batch)):
        found = measure(lambda size=size: step(split(tokens, size)), model=model, optimizer=optimizer)
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_seconds"] = found.seconds
    figures["all_allocator_peak_bytes"] = found.allocator_peak_bytes
    return figures
