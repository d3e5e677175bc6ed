"""Lesson 05 on a GPU: one batch in micro-batches of different sizes."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from course_lib.accumulation import AccumulatedStep, split
from course_lib.teaching.experiments import (
    TINY,
    Part,
    compare_variants,
    decoder_and_tokens,
    experiment,
)


def _loss_sum(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    targets = tokens[:, 1:].flatten()
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


@experiment(
    title=(
        "One step over one batch, in micro-batches of 1 sample, of a quarter and of all samples"
    ),
    sizes={
        "vocabulary": 8192,
        "hidden": 1024,
        "heads": 16,
        "layers": 8,
        "sequence": 512,
        "batch": 16,
    },
    small={**TINY, "batch": 4},
    variants={
        "one": "1 sample each",
        "quarter": "a quarter each",
        "all": "all at once",
    },
)
def pieces_of_a_batch(device: torch.device, **sizes: int) -> Iterator[Part]:
    model, tokens = decoder_and_tokens(device, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = AccumulatedStep(
        model,
        optimizer,
        _loss_sum,
        scaler=torch.amp.GradScaler(device.type),
        max_norm=1.0,
        autocast_dtype=torch.float16 if device.type == "cuda" else torch.bfloat16,
    )
    sizes = {"one": 1, "quarter": len(tokens) // 4, "all": len(tokens)}
    variants = {name: lambda size=size: step(split(tokens, size)) for name, size in sizes.items()}
    yield from compare_variants(device, variants, model=model, optimizer=optimizer)
