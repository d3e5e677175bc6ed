"""GPU experiments of lesson 07: what three recipes take, predicted and as the allocator saw it."""

from __future__ import annotations

import torch

from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens

from . import experiment

RECIPES = {
    "plain": Recipe(precision="bf16"),
    "forgetful": Recipe(precision="bf16", attention="flash", checkpoint="layers"),
    "least": Recipe(precision="bf16", attention="flash", checkpoint="layers", in_backward=True, offload_optimizer=1.0),
}
WORDS = {
    "plain": ("plain", "普通"),
    "forgetful": ("flash, checkpoints", "flash、检查点"),
    "least": ("state on the host, steps in backward", "状态在主机，反向中更新"),
}
FIGURES = {
    "predicted_bytes": ("predicted peak", "预测峰值"),
    "peak_bytes": ("peak of tensors", "张量峰值"),
    "allocator_peak_bytes": ("allocator's peak", "分配器峰值"),
}


@experiment(
    "07",
    "three_recipes",
    en="A step by three recipes: predicted, the meter's peak, the allocator's",
    zh="三个配方各做一步：预测、计量器的峰值、分配器的峰值",
    small={"vocabulary": 64, "hidden": 32, "layers": 2, "sequence": 16, "batch": 2},
    labels={
        f"{name}_{figure}": (f"{en}: {what[0]}", f"{zh}：{what[1]}")
        for name, (en, zh) in WORDS.items()
        for figure, what in FIGURES.items()
    },
)
def three_recipes(
    device: torch.device,
    *,
    vocabulary: int = 32000,
    hidden: int = 2048,
    layers: int = 24,
    sequence: int = 2048,
    batch: int = 4,
) -> dict[str, float]:
    def make_model():
        sizes = {"vocabulary": vocabulary, "hidden": hidden, "layers": layers, "sequence": sequence}
        return Decoder(**sizes, heads=max(1, hidden // 128))

    def make_batch():
        return random_tokens(batch, sequence, vocabulary)

    figures = {}
    for name, recipe in RECIPES.items():
        tier = "host" if device.type == "cuda" else "file"
        figures[f"{name}_predicted_bytes"] = estimate(make_model, make_batch, recipe, tier=tier).peak_bytes
        model, optimizer = build(lambda: make_model().to(device), recipe)
        tokens = make_batch().to(device)
        train_step(model, optimizer, tokens, recipe)  # makes the state
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with MemoryMeter(model, optimizer) as meter:
            train_step(model, optimizer, tokens, recipe)
        figures[f"{name}_peak_bytes"] = meter.peak_bytes
        if device.type == "cuda":
            figures[f"{name}_allocator_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        del model, optimizer, meter
    return figures
