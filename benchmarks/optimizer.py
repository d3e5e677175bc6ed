"""An AdamW whose state is in a file, and PyTorch's own, whose state stays in memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from copies import COPIES_NOTE, next_to_copies
from scoreboard import COURSE, Row, compare

from course_lib.models import deep_mlp
from course_lib.offload import DiskStore, OffloadedOptimizer


def offloaded(parameters) -> OffloadedOptimizer:
    return OffloadedOptimizer(parameters, fused=True, store=DiskStore(threads=1))


MAKERS = {
    COURSE: offloaded,
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
}

NEXT_TO_COPIES = "AdamW, fused, next to copies"
COPIES_ALONE = "the copies alone, in one thread"


def step(make: Callable) -> Callable[[], object]:
    model = deep_mlp(12, 1024)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def rows(rounds: int) -> Iterator[Row]:
    arms = {name: step(make) for name, make in MAKERS.items()}
    nbytes = 8 * sum(parameter.numel() for parameter in deep_mlp(12, 1024).parameters())
    arms[NEXT_TO_COPIES] = next_to_copies(nbytes, arms["AdamW, fused"])
    arms[COPIES_ALONE] = next_to_copies(nbytes, lambda: None)
    notes = {
        "AdamW, fused": f"the course reads and writes {nbytes:,} bytes of moments",
        NEXT_TO_COPIES: COPIES_NOTE.format(nbytes),
    }
    yield from compare(
        "AdamW's step on 12.6 M parameters, state in a file", arms, 5 * rounds, notes=notes
    )
