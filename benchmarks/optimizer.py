"""An AdamW whose state is on the host beside PyTorch's own: time of its step on a CPU.

The host is then other memory of the same kind: what is seen is the cost of bookkeeping and copies.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from scoreboard import COURSE, Row, compare

from course_lib.models import deep_mlp
from course_lib.offload import OffloadedOptimizer

MAKERS = {
    COURSE: partial(OffloadedOptimizer, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
}


def step(make: Callable) -> Callable[[], object]:
    model = deep_mlp(12, 1024)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def rows(rounds: int) -> Iterator[Row]:
    arms = {name: step(make) for name, make in MAKERS.items()}
    yield from compare("AdamW's step on 12.6 M parameters, state on the host", arms, rounds)
