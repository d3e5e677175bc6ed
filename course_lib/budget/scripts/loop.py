"""Base class of the frameworks whose scripts are training loops in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from course_lib._check import any_of
from course_lib.budget.recipe import Recipe
from course_lib.budget.traces.rank_trace import one_rank_recipe
from course_lib.symbolic import symbolic

from .framework import Framework
from .lines import Lines, batch_problem
from .settings import has_statistics, settable_attentions

if TYPE_CHECKING:
    from course_lib.workload import Workload


class Loop(Framework):
    """Base class of the frameworks whose script is a training loop in PyTorch.

    Attributes:
        alternatives: Mapping from the name of a field of `Recipe` to the last clause of the error
            message that rejects a value of this field. The clause tells the user what can run the
            value, as in "framework='fsdp2' can run several ranks".
    """

    alternatives: Mapping[str, str] = MappingProxyType({})

    def conflict(self, recipe: Recipe) -> str | None:
        for name, allowed in self.only.items():
            if (value := getattr(recipe, name)) not in allowed:
                named = "at least 2" if isinstance(allowed, range) else _any_of(allowed)
                return (
                    f"{name} must be {named} when framework is {self.name!r}, got {value!r};"
                    f" {self.alternatives[name]}"
                )
        return None

    def unsupported_reason(self, workload: Workload) -> str | None:
        with symbolic():
            return batch_problem(workload.make_batch())

    def for_model(self, model: nn.Module) -> Framework:
        """Return a copy of the framework that rejects recipes that a script cannot run.

        For example, a script cannot set every kind of attention in every model. The copy may allow
        fewer values of the recipe's fields `attention` and `checkpoint`.

        Args:
            model: Model with symbolic tensors, which have shapes but no values.
        """
        changed = copy(self)
        only = {**self.only, "attention": settable_attentions(model)}
        if has_statistics(model):  # a checkpoint would update the running statistics twice
            only["checkpoint"] = ("none",)
        changed.only = MappingProxyType(only)
        return changed


def checked_lines(framework: Loop, recipe: Recipe, workload: Workload) -> Lines:
    """Return a new script builder, after checking that the framework can run the recipe.

    If the recipe has several ranks, the builder gets the recipe of a single rank.

    Raises:
        ValueError: The framework cannot run the recipe.
    """
    if problem := framework.conflict(recipe):
        raise ValueError(problem)
    one = recipe if recipe.ranks == 1 else one_rank_recipe(recipe)
    return Lines(replace(one, micro_batches=recipe.micro_batches), workload)


def _any_of(values: Collection[Any]) -> str:
    """Return values as text for an error message, such as "'zero2' or 'zero3'"."""
    return any_of(map(repr, values))
