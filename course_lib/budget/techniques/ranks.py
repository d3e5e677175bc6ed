"""Several devices that share the batch, and what is cut among them (lesson 08)."""

from __future__ import annotations

from typing import Any

from torch import nn

from course_lib.labels import text, verbatim

from .precision import PRECISIONS
from .technique import Recipe, Technique, choice, count, fields_of

SHARDS = ("ddp", "zero1", "zero2", "zero3")
# What the engines of `course_lib.distributed` run: field -> values.
RUN: dict[str, tuple[Any, ...]] = {
    "precision": tuple(PRECISIONS),
    "optimizer": ("adam",),
    "checkpoint": ("none", "selective", "layers"),
    "update": ("fused",),
    "offload_optimizer": (0,),
    "offload_activations": (False,),
    "in_backward": (False,),
    "head_chunk": (None,),
    "accumulate": (None,),
    "first_blocks": (None,),
}


class Ranks(Technique):
    fields = fields_of(ranks=count(1), shard=choice(*SHARDS, None))

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.ranks == 1 and recipe.shard:
            return f'shard is "{recipe.shard}" and ranks is 1; it takes None, or 2 ranks or more'
        for name, values in RUN.items() if recipe.ranks > 1 else ():
            if getattr(recipe, name) not in values:
                got = f"{name} is {getattr(recipe, name)!r} and ranks is {recipe.ranks}"
                return f"{got}; it takes {' or '.join(map(repr, values))}"
        return None

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.ranks == 1:
            return None
        got = f"ranks is {recipe.ranks}, which one process cannot run"
        return f"{got}; it takes 1, or python -m course_lib.distributed, started by torchrun"

    def words(self, recipe: Recipe) -> list[str]:
        if recipe.ranks == 1:
            return []
        shard = verbatim(recipe.shard or "?")
        return [text("{shard} on {count} ranks", shard=shard, count=recipe.ranks)]
