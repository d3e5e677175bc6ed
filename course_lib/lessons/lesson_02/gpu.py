"""The GPU experiment of lesson 02."""

import functools
from collections.abc import Callable, Iterator

import torch

from course_lib.checkpoint import checkpoint
from course_lib.teaching.experiments import TINY, Part, compared, decoder_and_tokens, experiment


@experiment(
    title="A decoder's forward and backward pass, plain and with a checkpoint a layer",
    sizes={
        "vocabulary": 32000,
        "hidden": 1024,
        "heads": 16,
        "layers": 12,
        "sequence": 1024,
        "batch": 4,
    },
    small=TINY,
    variants={"plain": "plain", "checkpointed": "checkpointed"},
)
def checkpointed_decoder(device: torch.device, **sizes: int) -> Iterator[Part]:
    model, tokens = decoder_and_tokens(device, **sizes)
    plain = [layer.forward for layer in model.layers]
    checkpointed = [
        functools.partial(checkpoint, forward, use_reentrant=False) for forward in plain
    ]

    def step(forwards: list[Callable]) -> None:
        for layer, forward in zip(model.layers, forwards, strict=True):
            layer.forward = forward
        model.loss(tokens).backward()

    variants = {"plain": lambda: step(plain), "checkpointed": lambda: step(checkpointed)}
    yield from compared(device, variants, model=model)
