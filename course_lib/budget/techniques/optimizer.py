"""Techniques that choose the optimizer and offload its state (lesson 04)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from course_lib._check import any_of, argument_message, describe, one_of
from course_lib.labels import text, verbatim
from course_lib.offload.optimizer import PAGE_BYTES

from ..optimizers import OPTIMIZERS, UPDATE_VARIANTS
from .technique import Recipe, RecipeSearch, Technique, at_least, choice, fields_of, fraction

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _check_optimizer_name(name: str, value: Any) -> None:
    """Raise an error unless a value is a name in `OPTIMIZERS`.

    The error message lists the names, and says that "adam" is AdamW.
    """
    try:
        one_of(name, value, OPTIMIZERS)
    except ValueError:
        names = any_of(map(repr, OPTIMIZERS)).replace("'adam'", "'adam' (AdamW)")
        raise ValueError(argument_message(name, names, describe(value))) from None


class Optimizer(Technique):
    """Technique that chooses the optimizer and the variant of its update, such as "fused".

    `OPTIMIZERS` lists the optimizers and their variants.
    """

    fields = fields_of(optimizer=_check_optimizer_name, update=choice(*UPDATE_VARIANTS))
    after = None
    composable = True
    computes = False
    acts_on = frozenset({"optimizer"})

    def conflict(self, recipe: Recipe) -> str | None:
        options = OPTIMIZERS[recipe.optimizer].updates
        if recipe.update in options:
            return None
        allowed = f"{any_of(map(repr, options))} when optimizer is {recipe.optimizer!r}"
        return argument_message("update", allowed, repr(recipe.update))

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        takes = OPTIMIZERS[recipe.optimizer].select_parameters
        if takes is None or takes(model):
            return None
        return (
            f"optimizer {recipe.optimizer!r} needs two-dimensional parameters that require"
            " gradients in the model's lists of blocks (nn.ModuleList), got"
            f" {describe(model)} without such parameters; choose another optimizer"
        )

    def labels(self, recipe: Recipe) -> list[str]:
        name: str = verbatim(recipe.optimizer)
        if OPTIMIZERS[recipe.optimizer].load_base is not None:
            name = text("{optimizer} (by a formula)", optimizer=name)
        if recipe.update is None:
            return [name]
        return [text("{optimizer} {update}", optimizer=name, update=verbatim(recipe.update))]


class OffloadedState(Technique):
    """Technique that offloads optimizer state to the lower tier (host memory or disk).

    `course_lib.budget.build` creates an `OffloadedOptimizer` if a recipe uses this technique.
    """

    fields = fields_of(offload_optimizer=fraction, page_bytes=at_least(1, of="bytes"))
    after = ("in_backward",)
    composable = True
    computes = False
    acts_on = frozenset({"optimizer"})
    graded = True
    in_forward = False

    def conflict(self, recipe: Recipe) -> str | None:
        if not recipe.offload_optimizer:
            return None
        if recipe.precision == "bf16-only":
            return (
                "offload_optimizer must be 0 when precision is 'bf16-only', got"
                f" {recipe.offload_optimizer}: the offloaded state includes fp32 master weights,"
                " but 'bf16-only' has none. Use precision 'bf16'"
            )
        if OPTIMIZERS[recipe.optimizer].can_offload_state:
            return None
        return (
            f"offload_optimizer must be 0 when optimizer is {recipe.optimizer!r}, got"
            f" {recipe.offload_optimizer}: the state of this optimizer has no fixed number of bytes"
            " per element"
        )

    def labels(self, recipe: Recipe) -> list[str]:
        words: list[str] = []
        if recipe.offload_optimizer == 1:
            words.append(text("optimizer offloaded"))
        elif recipe.offload_optimizer:
            words.append(text("{share:.0%} of optimizer offloaded", share=recipe.offload_optimizer))
        if recipe.page_bytes != PAGE_BYTES and recipe.uses_offloaded_optimizer:
            words.append(text("pages of {size}", size=_binary_size(recipe.page_bytes)))
        return words

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        base = search.cache.base
        tensors = OPTIMIZERS[base.optimizer].state_tensors
        # Without state, only the master weights of bf16 parameters can be offloaded.
        nothing = tensors is None or (tensors == 0 and base.precision in ("fp32", "autocast"))
        nothing = nothing or base.precision == "bf16-only"
        shares = FRACTIONS[:: len(FRACTIONS) - 1] if search.quick else FRACTIONS
        return [{self.field: share} for share in (FRACTIONS[:1] if nothing else shares)]


def _binary_size(nbytes: int) -> str:
    """Return a number of bytes as text, such as "16 MiB".

    The unit is the largest one of MiB, KiB and bytes for which the number is an integer.
    """
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if nbytes % size == 0)
    return f"{nbytes // size:,} {unit}"
