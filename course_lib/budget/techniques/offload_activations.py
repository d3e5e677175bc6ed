"""Technique that offloads activations to host memory or to disk (lesson 04)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from course_lib.labels import text
from course_lib.offload import offload_activations

from .technique import (
    Recipe,
    RecipeSearch,
    Technique,
    at_least,
    at_least_or_none,
    check_bool,
    fields_of,
)

MIN_BYTES = 1 << 20


class OffloadedActivations(Technique):
    """Technique that offloads tensors saved for backward to the lower tier (host memory or disk).

    The tensors are copied back when backward needs them.
    """

    fields = fields_of(
        offload_activations=check_bool,
        min_bytes=at_least(0),
        prefetch=at_least_or_none(0),
        in_flight=at_least_or_none(0),
    )
    around = "forward"
    after = ("offload_optimizer",)
    composable = True
    computes = False
    acts_on = frozenset({"activation"})
    hooks_saved_tensors = True

    def conflict(self, recipe: Recipe) -> str | None:
        if not recipe.offload_activations or recipe.checkpoint not in ("selective", "optimal"):
            return None
        return (
            f"offload_activations cannot be combined with checkpoint={recipe.checkpoint!r},"
            " because this checkpoint decides itself which activations stay in memory; use"
            " checkpoint='none', 'layers' or 'segments'"
        )

    def apply(self, recipe: Recipe, model: nn.Module, store: Any = None) -> AbstractContextManager:
        if not recipe.offload_activations:
            return nullcontext()
        return offload_activations(
            store,
            min_bytes=recipe.min_bytes,
            keep=[model],
            prefetch=recipe.prefetch,
            in_flight=recipe.in_flight,
        )

    def labels(self, recipe: Recipe) -> list[str]:
        if not recipe.offload_activations:
            return []
        words: list[str] = [text("activations offloaded")]
        if recipe.min_bytes != MIN_BYTES:
            words = [text("activations offloaded from {least} bytes on", least=recipe.min_bytes)]
        if recipe.prefetch is not None:
            words.append(text("{count} fetched ahead", count=recipe.prefetch))
        if recipe.in_flight is not None:
            words.append(text("{count} in flight", count=recipe.in_flight))
        return words

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        return [{self.field: down} for down in (False, True)]
