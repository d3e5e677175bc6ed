"""An AdamW whose state is in a file, and PyTorch's own, whose state stays in memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from offload import next_to_copies
from scoreboard import COURSE, Row, compare

from course_lib.models import deep_mlp
from course_lib.offload import OffloadedOptimizer

MAKERS = {
    COURSE: partial(OffloadedOptimizer, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
}

COPIES = "AdamW, fused, another thread copies as many bytes"


def step(make: Callable) -> Callable[[], object]:
    model = deep_mlp(12, 1024)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def rows(rounds: int) -> Iterator[Row]:
    arms = {name: step(make) for name, make in MAKERS.items()}
    nbytes = 8 * sum(parameter.numel() for parameter in deep_mlp(12, 1024).parameters())
    arms[COPIES] = next_to_copies(nbytes, arms["AdamW, fused"])
    notes = {
        "AdamW, fused": f"the course reads and writes {nbytes:,} bytes of moments",
        COPIES: f"the update does not wait for the {nbytes:,} bytes each way",
    }
    yield from compare(
        "AdamW's step on 12.6 M parameters, state in a file", arms, rounds, notes=notes
    )
