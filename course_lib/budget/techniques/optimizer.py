"""The optimizer, how many parameters it updates at once, and how much of its state is one tier down
(lesson 04)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from course_lib._check import any_of, must_be
from course_lib.labels import text, verbatim
from course_lib.offload.optimizer import PAGE_BYTES

from .technique import Known, Recipe, Technique, choice, count, fields_of, fraction

OPTIMIZERS = ("adam", "sgd", "momentum", "adafactor", "adam8bit")
ALL_ABOVE = ("adafactor", "adam8bit")  # whose state is small, and is not offloaded
UPDATES = (None, "loop", "foreach", "fused")
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Optimizer(Technique):
    fields = fields_of(optimizer=choice(*OPTIMIZERS), update=choice(*UPDATES))

    def conflict(self, recipe: Recipe) -> str | None:
        updates = {"adafactor": (None, "loop", "foreach"), "adam8bit": (None, "loop")}
        options = updates.get(recipe.optimizer, UPDATES)
        if recipe.update in options:
            return None
        allowed = f"{any_of(map(repr, options))} when optimizer is {recipe.optimizer!r}"
        return must_be("update", allowed, repr(recipe.update))

    def words(self, recipe: Recipe) -> list[str]:
        name: str = verbatim(recipe.optimizer)
        if recipe.optimizer == "adam8bit":
            name = text("{optimizer} (by a formula)", optimizer=name)
        if recipe.update is None:
            return [name]
        return [text("{optimizer} {update}", optimizer=name, update=verbatim(recipe.update))]


class OffloadedState(Technique):
    """The optimizer's state on the tier below; `build` makes an `OffloadedOptimizer`."""

    fields = fields_of(offload_optimizer=fraction, page_bytes=count(1, of="bytes"))
    place = 5
    acts_on = frozenset({"optimizer"})
    graded = True
    in_forward = False

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.optimizer not in ALL_ABOVE or not recipe.offload_optimizer:
            return None
        return (
            f"offload_optimizer must be 0 when optimizer is {recipe.optimizer!r}, whose state is"
            f" small, got {recipe.offload_optimizer}"
        )

    def words(self, recipe: Recipe) -> list[str]:
        words: list[str] = []
        if recipe.offload_optimizer == 1:
            words.append(text("optimizer offloaded"))
        elif recipe.offload_optimizer:
            words.append(text("{share:.0%} of optimizer offloaded", share=recipe.offload_optimizer))
        if recipe.page_bytes != PAGE_BYTES and recipe.has_pages:
            words.append(text("pages of {size}", size=_binary(recipe.page_bytes)))
        return words

    def candidates(self, known: Known) -> list[Mapping[str, Any]]:
        base = known.base
        stateless = base.optimizer in ALL_ABOVE
        stateless |= (base.optimizer, base.precision) == ("sgd", "fp32")
        shares = FRACTIONS[:: len(FRACTIONS) - 1] if known.quick else FRACTIONS
        return [{self.field: share} for share in (FRACTIONS[:1] if stateless else shares)]


def _binary(nbytes: int) -> str:
    """A size in the largest unit of which it is a whole number."""
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if nbytes % size == 0)
    return f"{nbytes // size:,} {unit}"
