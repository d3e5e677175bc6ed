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
    """Framework for which a recipe can be written as a script, with the recipes that it can run.

    Attributes:
        name: Value of `framework` in `fit`, and of `--for`.
        title: Name that is shown to the user, such as "Hugging Face's Trainer".
        precisions: Values of `Recipe.precision` that the command tries if none is given, in this
            order, until a recipe fits.
        only: Mapping from a field of `Recipe` to the values that the framework can run. A field
            that is not in this mapping may have any value.
        equal_micro_batches: Whether all micro-batches must have the same number of samples.
        has_own_step: Whether the framework runs a training step of its own instead of `train_step`.
            Its estimates are then those of its own step.
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
        """Return whether the framework can run each of these field values, taken by itself."""
        return all(value in self.only[name] for name, value in values.items() if name in self.only)

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None.

        The message names the field, its allowed values, and code that can run the given value.
        """
        raise NotImplementedError

    def unsupported_reason(self, workload: Workload) -> str | None:
        """Return an error message if the framework cannot train the workload's model, or None."""
        return None

    def script(self, recipe: Recipe, workload: Workload) -> str:
        """Return the text of a short script that trains the workload's model by the recipe.

        The last statement of the script runs the training. The script stores the model in a
        variable `model`.
        """
        raise NotImplementedError

    # ---- What the framework's own step does differently from `train_step`

    def for_model(self, model: nn.Module) -> Framework:
        """Return the framework, with `only` restricted to values that a symbolic model supports."""
        return self

    def model_maker(self, make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a function that makes the model for estimates of the framework's own step.

        A framework with its own step sets the model's attribute `_training_code` to itself. Then
        `course_lib.budget.step` calls the methods `optimizer` and `around_step` of the framework.
        """
        return make_model

    def optimizer(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], recipe: Recipe, lr: float
    ) -> torch.optim.Optimizer | None:
        """Return the framework's optimizer of some parameters, for an estimate of its step.

        None means that the framework uses the optimizer of the recipe.
        """
        return None

    def around_step(self, model: nn.Module, recipe: Recipe) -> AbstractContextManager:
        """Return a context manager that changes the model as the framework does for its step."""
        return nullcontext()


@dataclass(frozen=True)
class FrameworkLimits:
    """Limits of a search to the recipes that a framework can run on a batch.

    Attributes:
        framework: The framework; None allows all recipes.
        samples: Number of samples in the batch; None if it is not known.
    """

    framework: Framework | None = None
    samples: int | None = None

    def allow(self, **values: Any) -> bool:
        """Return whether the framework can run each of these field values, taken by itself."""
        return self.framework is None or self.framework.allows(values)

    def only(self, field: str) -> Collection[Any] | None:
        """Return the values of a field that the framework can run, or None if it can run all."""
        return None if self.framework is None else self.framework.only.get(field)

    def allowed_micro_batch_counts(self, counts: Iterable[int], ranks: int = 1) -> list[int]:
        """Return the numbers of micro-batches that the framework can run.

        Args:
            counts: Numbers to choose from.
            ranks: Number of ranks that share the batch.
        """
        if self.framework is None or not self.framework.equal_micro_batches or not self.samples:
            return [*counts]
        return [count for count in counts if self.samples % (ranks * count) == 0]

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None."""
        if self.framework is None:
            return None
        if problem := self.framework.conflict(recipe):
            return problem
        if self.allowed_micro_batch_counts([recipe.micro_batches], recipe.ranks):
            return None
        return (
            f"micro_batches must be a divisor of the batch's {self.samples} samples when framework"
            f" is {self.framework.name!r}, got {recipe.micro_batches}; framework='torch' can run it"
        )

    def require(self, recipe: Recipe) -> None:
        """Raise ValueError if the framework cannot run the recipe."""
        if problem := self.conflict(recipe):
            raise ValueError(problem)
