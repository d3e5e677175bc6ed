"""Base class of the frameworks for which a recipe can be written as a script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from course_lib.budget.recipe import Recipe

if TYPE_CHECKING:
    from course_lib.workload import Workload


class Framework:
    """Training code in which a recipe can be run: which recipes it can run, and their scripts.

    Attributes:
        name: Value of `framework` in `fit`, and of `--for`.
        title: Name for a reader, such as "Hugging Face's Trainer"; a label.
        precisions: Values of `Recipe.precision` that the command tries if none is given, in this
            order, until a recipe fits.
        only: Mapping from a field of `Recipe` to the values that the framework can run. A field
            that is missing here may have any value.
        equal_micro_batches: Whether all micro-batches must have the same number of samples.
        has_own_step: Whether its step differs from `train_step`, and with it the estimate.
        max_norm: Norm to which the script clips the gradients, because the framework does so by
            default; None if it does not clip them.
    """

    name: str
    title: str
    precisions: tuple[str | None, ...]
    only: Mapping[str, Collection[Any]] = MappingProxyType({})
    equal_micro_batches: bool = False
    has_own_step: bool = False
    max_norm: float | None = None

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Return whether the framework can run each of these values, checked one by one."""
        return all(value in self.only[name] for name, value in values.items() if name in self.only)

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None.

        It names the field, its allowed values, and what can run the given value.
        """
        raise NotImplementedError

    def refuse(self, workload: Workload) -> str | None:
        """Return an error message if the framework cannot train the workload's model, or None."""
        return None

    def script(self, recipe: Recipe, workload: Workload) -> str:
        """Return a short script that trains the workload's model by the recipe.

        Its last statement is the training. If it is executed, it leaves the name `model`.
        """
        raise NotImplementedError

    # ---- What the framework's own step does differently from `train_step`

    def for_model(self, model: nn.Module) -> Framework:
        """Return the framework with the values in `only` that it can run for a symbolic model."""
        return self

    def model_maker(self, make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a function that makes the model for estimates of the framework's step.

        `course_lib.budget.step` calls `optimizer` and `around_step` for a model whose attribute
        `_training_code` is the framework.
        """
        return make_model

    def optimizer(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], recipe: Recipe, lr: float
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of some parameters in an estimate; None uses that of the recipe."""
        return None

    def around_step(self, model: nn.Module, recipe: Recipe) -> AbstractContextManager:
        """Return a context manager inside which the model is as in the framework's step."""
        return nullcontext()


@dataclass(frozen=True)
class Limits:
    """The recipes that a framework can run for one batch.

    Attributes:
        framework: The framework; None allows all recipes.
        samples: Number of samples in the batch; None if it is not known.
    """

    framework: Framework | None = None
    samples: int | None = None

    def allow(self, **values: Any) -> bool:
        """Return whether the framework can run each of these values, checked one by one."""
        return self.framework is None or self.framework.allows(values)

    def only(self, field: str) -> Collection[Any] | None:
        """Return the values of a field that the framework can run; None for all."""
        return None if self.framework is None else self.framework.only.get(field)

    def even_counts(self, counts: Iterable[int], ranks: int = 1) -> list[int]:
        """Return those of the numbers of micro-batches that the framework can run."""
        if self.framework is None or not self.framework.equal_micro_batches or not self.samples:
            return [*counts]
        return [count for count in counts if self.samples % (ranks * count) == 0]

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None."""
        if self.framework is None:
            return None
        if problem := self.framework.conflict(recipe):
            return problem
        if self.even_counts([recipe.micro_batches], recipe.ranks):
            return None
        return (
            f"micro_batches must be a divisor of the batch's {self.samples} samples when framework"
            f" is {self.framework.name!r}, got {recipe.micro_batches}; framework='torch' can run it"
        )

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError if the framework cannot run the recipe."""
        if problem := self.conflict(recipe):
            raise ValueError(problem)
