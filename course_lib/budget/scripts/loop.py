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
from course_lib.budget.traces.rank_trace import single
from course_lib.symbolic import symbolic

from .framework import Framework
from .lines import Lines, problem_of_batch
from .settings import attentions, has_statistics

if TYPE_CHECKING:
    from course_lib.workload import Workload


class Loop(Framework):
    """A training loop in PyTorch, which the reader can change.

    Attributes:
        instead: Mapping from a field in `only` to what can run other values.
    """

    instead: Mapping[str, str] = MappingProxyType({})

    def conflict(self, recipe: Recipe) -> str | None:
        for name, allowed in self.only.items():
            if (value := getattr(recipe, name)) not in allowed:
                named = "at least 2" if isinstance(allowed, range) else _any_of(allowed)
                return (
                    f"{name} must be {named} when framework is {self.name!r}, got {value!r};"
                    f" {self.instead[name]}"
                )
        return None

    def refuse(self, workload: Workload) -> str | None:
        with symbolic():
            return problem_of_batch(workload.make_batch())

    def for_model(self, model: nn.Module) -> Framework:
        """Return the framework with the attention and checkpoints that a script sets in a model."""
        changed = copy(self)
        only = {**self.only, "attention": attentions(model)}
        if has_statistics(model):  # a checkpoint would update them twice
            only["checkpoint"] = ("none",)
        changed.only = MappingProxyType(only)
        return changed


def checked_lines(framework: Loop, recipe: Recipe, workload: Workload) -> Lines:
    """Return the `Lines` of a script, after checking that the framework can run the recipe.

    Raises:
        ValueError: The framework cannot run the recipe.
    """
    if problem := framework.conflict(recipe):
        raise ValueError(problem)
    one = recipe if recipe.ranks == 1 else single(recipe)
    return Lines(replace(one, micro_batches=recipe.micro_batches), workload)


def _any_of(values: Collection[Any]) -> str:
    return any_of(map(repr, values))
