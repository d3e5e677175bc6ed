"""The GPU experiment of lesson 07."""

from collections.abc import Iterator

import torch

from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching.allocator import Allocator
from course_lib.teaching.experiments import (
    TINY,
    Part,
    decoder_and_tokens,
    experiment,
    need_host_memory,
)

_FORGETFUL = {"precision": "bf16", "attention": "flash", "checkpoint": "layers"}
RECIPES = {
    "plain": Recipe(precision="bf16"),
    "forgetful": Recipe(**_FORGETFUL),
    "least": Recipe(**_FORGETFUL, in_backward=True, offload_optimizer=1.0),
}


@experiment(
    title="One step of three recipes: the peak as predicted, by the meter and by the allocator",
    sizes={
        "vocabulary": 32000,
        "hidden": 2048,
        "heads": 16,
        "layers": 24,
        "sequence": 2048,
        "batch": 4,
    },
    small={**TINY, "heads": 1},
    variants={
        "plain": "plain",
        "forgetful": "flash, checkpoints",
        "least": "state on the host, steps in backward",
    },
)
def three_recipes(device: torch.device, *, batch: int, **sizes: int) -> Iterator[Part]:
    """Measure the peak of a decoder's training step with three combinations of techniques.

    On a GPU the last combination pins about 20 GB of host memory. It needs 14 bytes per parameter,
    and more is pinned because PyTorch rounds blocks up to powers of two.
    """

    def make_batch() -> torch.Tensor:
        return random_tokens(batch, sizes["sequence"], sizes["vocabulary"])

    def make_model() -> Decoder:
        return decoder_and_tokens(device, batch=1, **sizes)[0]

    on_gpu = device.type == "cuda"
    if on_gpu:
        need_host_memory(
            24
            * (sizes["vocabulary"] * sizes["hidden"] + 12 * sizes["layers"] * sizes["hidden"] ** 2)
        )
    for name, recipe in RECIPES.items():
        tier, kind = ("host", "cuda") if on_gpu else ("file", "cpu")
        predicted = estimate(lambda: Decoder(**sizes), make_batch, recipe, tier=tier, kind=kind)
        yield {f"{name}_predicted_bytes": predicted.peak_bytes}
        allocator = Allocator(device)
        model, optimizer = build(make_model, recipe)
        tokens = make_batch().to(device)
        train_step(model, optimizer, tokens, recipe)  # creates the state
        if on_gpu:
            allocator.reset()
        with MemoryMeter(model, optimizer) as meter:
            train_step(model, optimizer, tokens, recipe)
        yield {f"{name}_peak_bytes": meter.peak_bytes}
        if on_gpu:
            yield {f"{name}_allocator_peak_bytes": allocator.peaks()["max_memory_allocated_bytes"]}
        del model, optimizer, meter
