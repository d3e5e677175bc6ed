"""Technique that divides the batch among several ranks and shards tensors (lesson 08)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from course_lib._check import any_of, argument_message
from course_lib.labels import text, verbatim

from .technique import Recipe, Technique, at_least, choice, fields_of

SHARDS = ("ddp", "zero1", "zero2", "zero3")
# Maps a field to the values that `course_lib.distributed` supports on several ranks. A field that
# is neither in this table nor in `UNRESTRICTED_FIELDS` must have its default.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16"),
    "optimizer": ("adam",),
    "update": ("fused",),
    "checkpoint": ("none", "selective", "layers"),
}
# Fields that can have every valid value on several ranks.
UNRESTRICTED_FIELDS = {"ranks", "shard", "micro_batches", "attention", "blocks"}
# These fields have no effect, because they need offloading, which several ranks do not support.
UNRESTRICTED_FIELDS |= {"min_bytes", "prefetch", "in_flight", "page_bytes"}


class Ranks(Technique):
    """Technique that divides the batch among several ranks (processes), with or without sharding.

    `course_lib.distributed` runs the training step on several ranks.
    """

    fields = fields_of(ranks=at_least(1), shard=choice(*SHARDS, None))
    after = None
    computes = False
    acts_on = frozenset({"parameter", "gradient", "optimizer", "activation"})

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.ranks == 1 and recipe.shard:
            return f"shard must be None when ranks is 1, got {recipe.shard!r}"
        for field in fields(recipe) if recipe.ranks > 1 else ():
            value, values = (
                getattr(recipe, field.name),
                SUPPORTED_VALUES.get(field.name, (field.default,)),
            )
            if field.name not in UNRESTRICTED_FIELDS and value not in values:
                allowed = f"{any_of(map(repr, values))} when ranks is {recipe.ranks}"
                return argument_message(field.name, allowed, repr(value))
        return None

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.ranks == 1:
            return None
        return (
            f"ranks must be 1 in a single process, got {recipe.ranks}; to run several ranks, start"
            " python -m course_lib.distributed with torchrun"
        )

    def labels(self, recipe: Recipe) -> list[str]:
        if recipe.ranks == 1:
            return []
        shard = verbatim(recipe.shard or "?")
        return [text("{shard} on {count} ranks", shard=shard, count=recipe.ranks)]
