"""Time and peak of the loss in chunks, and of `F.cross_entropy` over all logits at once."""

from collections.abc import Iterator

import torch
from scoreboard import COURSE, Row, compare, installed, missing, peak
from torch.nn import functional as F

from course_lib.checkpoint import checkpointed_loss

WORK = "loss of 2,048 tokens over 8,000 words, 256 tokens at a time"


def rows(rounds: int) -> Iterator[Row]:
    hidden = torch.randn(2048, 128, requires_grad=True)
    weight = torch.randn(8000, 128, requires_grad=True)
    targets = torch.randint(8000, (2048,))
    arms = {
        COURSE: lambda: checkpointed_loss(hidden, weight, targets, chunk=256).backward(),
        "F.cross_entropy": lambda: F.cross_entropy(hidden @ weight.T, targets).backward(),
    }
    peaks = {name: peak(step) for name, step in arms.items()}
    yield from compare(WORK, arms, rounds, bytes_of=peaks)
    if not installed("liger_kernel"):
        yield missing(WORK, "Liger's fused loss")
