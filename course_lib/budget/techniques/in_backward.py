"""Technique that updates parameters in backward and releases their gradients (lesson 05)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from course_lib.labels import text

from .technique import Recipe, RecipeSearch, Technique, check_bool, fields_of


class InBackward(Technique):
    """Technique that updates each parameter during backward, as soon as its gradient is complete.

    The gradient is then released. `AccumulatedStep` does this with its option `in_backward`.
    """

    fields = fields_of(in_backward=check_bool)
    after = ("accumulate",)
    composable = True
    computes = False
    acts_on = frozenset({"gradient"})
    in_forward = False

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.in_backward and recipe.micro_batches > 1:
            return (
                "in_backward must be False when gradients of several micro-batches are accumulated,"
                f" got True with micro_batches={recipe.micro_batches}"
            )
        return None

    def labels(self, recipe: Recipe) -> list[str]:
        return [text("steps in backward")] if recipe.in_backward else []

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        base = search.cache.base
        one = search.cache.max_norm is None and base.accumulate is None and base.micro_batches == 1
        return [{self.field: inside} for inside in ((False, True) if one else (False,))]
