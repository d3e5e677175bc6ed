"""Compare an AdamW with its state in a file with PyTorch's AdamW, whose state is in memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from copies import COPIES_NOTE, copies, in_two_threads
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

LAYERS = 48
NEXT_TO_COPIES = "AdamW, fused, next to copies"
COPIES_ALONE = "the copies alone, in one thread"
SPLIT = "copies and update, half in each of two threads"


def step(make: Callable, layers: int = LAYERS) -> Callable[[], object]:
    model = deep_mlp(layers, 1024)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def rows(rounds: int) -> Iterator[Row]:
    arms = {name: step(make) for name, make in MAKERS.items()}
    numbers = sum(parameter.numel() for parameter in deep_mlp(LAYERS, 1024).parameters())
    nbytes = 8 * numbers
    arms[NEXT_TO_COPIES] = in_two_threads([arms["AdamW, fused"]], [copies(nbytes)])
    arms[COPIES_ALONE] = copies(nbytes)
    here, there = (step(MAKERS["AdamW, fused"], LAYERS // 2) for _ in range(2))
    arms[SPLIT] = in_two_threads([copies(nbytes // 2), here], [there, copies(nbytes // 2)])
    notes = {
        "AdamW, fused": f"the course reads and writes {nbytes:,} bytes of moments",
        NEXT_TO_COPIES: COPIES_NOTE.format(nbytes),
        SPLIT: "no thread waits for the other one",
    }
    work = f"AdamW's step on {numbers / 1e6:.1f} M parameters, state in a file"
    yield from compare(work, arms, 3 * rounds, notes=notes)
