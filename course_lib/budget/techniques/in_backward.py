"""Optimizer steps in backward, so that the gradients never exist all at once (lesson 05)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from course_lib.labels import text

from .technique import Recipe, Search, Technique, fields_of, yes_or_no


class InBackward(Technique):
    """Optimizer steps in backward, which `course_lib.budget.step` implements."""

    fields = fields_of(in_backward=yes_or_no)
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

    def words(self, recipe: Recipe) -> list[str]:
        return [text("steps in backward")] if recipe.in_backward else []

    def candidates(self, search: Search) -> list[Mapping[str, Any]]:
        base = search.known.base
        one = search.known.max_norm is None and base.accumulate is None and base.micro_batches == 1
        return [{self.field: inside} for inside in ((False, True) if one else (False,))]
