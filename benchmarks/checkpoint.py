"""Time and peak of a step with the readable checkpoint and with `torch.utils.checkpoint`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.utils.checkpoint as theirs
from scoreboard import COURSE, Row, compare, peak
from torch import nn

from course_lib.checkpoint import readable
from course_lib.models import Decoder, random_tokens

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
MODES = ("reentrant", "not reentrant", "selective")


class Around(nn.Module):
    """A layer whose forward pass runs inside a checkpoint of `module`."""

    def __init__(self, layer: nn.Module, module, mode: str):
        super().__init__()
        self.layer, self.call = layer, partial(module.checkpoint, layer, use_reentrant=False)
        if mode == "reentrant":
            self.call = partial(module.checkpoint, layer, use_reentrant=True)
        elif mode == "selective":
            contexts = partial(theirs.create_selective_checkpoint_contexts, PRODUCTS)
            options = {"keep": PRODUCTS} if module is readable else {"context_fn": contexts}
            self.call = partial(self.call, **options)

    def forward(self, x):
        return self.call(x)


def decoder_step(module, mode: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=12, sequence=64, dropout=0.1)
    model.layers = nn.ModuleList(Around(layer, module, mode) for layer in model.layers)
    tokens = random_tokens(4, 64, 500)

    def step() -> None:
        model.zero_grad()
        model.loss(tokens).backward()

    return step


def rows(rounds: int) -> Iterator[Row]:
    for mode in MODES:
        arms = {
            COURSE: decoder_step(readable, mode),
            "torch.utils.checkpoint": decoder_step(theirs, mode),
        }
        peaks = {name: peak(step) for name, step in arms.items()}
        yield from compare(f"decoder, 12 layers, {mode}", arms, rounds, bytes_of=peaks)
