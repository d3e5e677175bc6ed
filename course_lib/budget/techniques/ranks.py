"""Several ranks that share the batch, and the tensors that are sharded across them (lesson 08)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from course_lib._check import any_of, must_be
from course_lib.labels import text, verbatim

from .technique import Recipe, Technique, choice, count, fields_of

SHARDS = ("ddp", "zero1", "zero2", "zero3")
# Maps a field to its values that the engines of `course_lib.distributed` support. A field that is
# neither here nor in `ANY` must have its default.
RUN: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16"),
    "optimizer": ("adam",),
    "update": ("fused",),
    "checkpoint": ("none", "selective", "layers"),
}
# Fields that may have any value.
ANY = {"ranks", "shard", "micro_batches", "attention", "blocks"}
ANY |= {"min_bytes", "prefetch", "in_flight", "page_bytes"}  # without offload they change nothing


class Ranks(Technique):
    """Data parallelism over several ranks, with or without sharding."""

    fields = fields_of(ranks=count(1), shard=choice(*SHARDS, None))
    after = None
    computes = False
    acts_on = frozenset({"parameter", "gradient", "optimizer", "activation"})

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.ranks == 1 and recipe.shard:
            return f"shard must be None when ranks is 1, got {recipe.shard!r}"
        for field in fields(recipe) if recipe.ranks > 1 else ():
            value, values = getattr(recipe, field.name), RUN.get(field.name, (field.default,))
            if field.name not in ANY and value not in values:
                allowed = f"{any_of(map(repr, values))} when ranks is {recipe.ranks}"
                return must_be(field.name, allowed, repr(value))
        return None

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.ranks == 1:
            return None
        return (
            f"ranks must be 1 in a single process, got {recipe.ranks}; to run several ranks, start"
            " python -m course_lib.distributed with torchrun"
        )

    def words(self, recipe: Recipe) -> list[str]:
        if recipe.ranks == 1:
            return []
        shard = verbatim(recipe.shard or "?")
        return [text("{shard} on {count} ranks", shard=shard, count=recipe.ranks)]
