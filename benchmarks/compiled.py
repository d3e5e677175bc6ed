"""Checkpoints under `torch.compile`: those of the course and PyTorch, a selective checkpoint, and
the compiler's memory budget. The backend needs no C++ compiler, so no generated kernel is timed."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch._functorch.config
from checkpoint import PRODUCTS
from scoreboard import COURSE, Row, compare, peak
from torch.utils.checkpoint import checkpoint

from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, random_tokens

BACKEND = "aot_eager_decomp_partition"


def compiled_step(change: Callable, budget: float = 1.0) -> Callable[[], None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=4, sequence=64)
    change(model)
    tokens = random_tokens(4, 64, 500)
    loss = torch.compile(model.loss, backend=BACKEND)

    def step() -> None:
        model.zero_grad()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            loss(tokens).backward()

    step()
    return step


def with_torch(model: Decoder) -> None:
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def with_course(model: Decoder, **options) -> None:
    checkpoint_blocks(model, "layers.*", **options)


def rows(rounds: int) -> Iterator[Row]:
    arms = {COURSE: compiled_step(with_course), "torch.utils.checkpoint": compiled_step(with_torch)}
    peaks = {name: peak(step) for name, step in arms.items()}
    yield from compare("decoder, 4 layers, compiled", arms, rounds, bytes_of=peaks)
    arms = {COURSE: compiled_step(partial(with_course, policy=PRODUCTS))}
    for budget in (0.25, 0.5):
        name = f"activation_memory_budget={budget}"
        arms[name] = compiled_step(lambda model: None, budget)
    peaks = {name: peak(step) for name, step in arms.items()}
    yield from compare("decoder, 4 layers, compiled, products kept", arms, rounds, bytes_of=peaks)
