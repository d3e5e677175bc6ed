"""Micro-batches whose gradients are accumulated (lesson 05)."""

from __future__ import annotations

import math

from course_lib.labels import text

from .technique import Recipe, Technique, choice, count, fields_of


class MicroBatches(Technique):
    """Gradient accumulation over micro-batches, which `AccumulatedStep` runs."""

    fields = fields_of(accumulate=choice("fp32", None), micro_batches=count(1))
    after = ("checkpoint",)
    composable = True
    computes = False
    acts_on = frozenset({"activation", "temporary", "input"})

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.in_backward and recipe.accumulate:
            return (
                "accumulate must be None when in_backward is True, which accumulates nothing, got"
                f" {recipe.accumulate!r}"
            )
        return None

    def words(self, recipe: Recipe) -> list[str]:
        words: list[str] = [text("fp32 sums")] if recipe.accumulate else []
        if recipe.micro_batches > 1:
            words.append(text("{count} micro-batches", count=recipe.micro_batches))
        return words


def counts_allowed(samples: int) -> list[int]:
    """Return the numbers of micro-batches into which the samples can be split.

    All micro-batches have the same size except the last one.
    """
    return [m for m in range(1, samples + 1) if math.ceil(samples / math.ceil(samples / m)) == m]
