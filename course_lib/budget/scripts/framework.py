"""Base class of the frameworks, such as Hugging Face's Trainer, for which scripts are written."""

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
    """Base class of code that can run a recipe, such as Hugging Face's Trainer or plain PyTorch.

    A recipe is a set of memory-saving techniques for a training step. A framework states which
    recipes it can run, and writes each of them as a script.

    Attributes:
        name: Value of the argument `framework` of `fit`, and of the option `--for` of
            `python -m course_lib.budget`.
        title: Name that is shown to the user, such as "Hugging Face's Trainer".
        precisions: Values of `Recipe.precision` to try if the user does not set one.
            `python -m course_lib.budget` tries them in this order until a recipe fits the budget.
        only: Mapping from the name of a field of `Recipe` to the values that the framework can run.
            A field that is not in this mapping may have any value.
        equal_micro_batches: Whether all micro-batches must have the same number of samples.
        has_own_step: Whether the framework has a training step of its own, which differs from
            `course_lib.budget.train_step`. If so, estimates for the framework describe the
            framework's step.
        max_norm: Norm to which the framework clips the gradients by default; None if it does not
            clip them.
    """

    name: str
    title: str
    precisions: tuple[str | None, ...]
    only: Mapping[str, Collection[Any]] = MappingProxyType({})
    equal_micro_batches: bool = False
    has_own_step: bool = False
    max_norm: float | None = None

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Return whether the framework can run all of the given field values of a recipe.

        Each value is checked by itself. The method `conflict` also checks combinations of values,
        and may reject a recipe whose single values are all allowed.

        Args:
            values: Mapping from names of fields of `Recipe` to values.
        """
        return all(value in self.only[name] for name, value in values.items() if name in self.only)

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None.

        The message names the field, its allowed values, and another framework or function that can
        run the given value.
        """
        raise NotImplementedError

    def unsupported_reason(self, workload: Workload) -> str | None:
        """Return an error message if the framework cannot train the workload, or else None.

        The workload contains a model and a batch. The base class supports all workloads.
        """
        return None

    def script(self, recipe: Recipe, workload: Workload) -> str:
        """Return a short Python script that trains a model with the techniques of a recipe.

        The script stores the model in a variable `model`, and its last statement runs the training.

        Args:
            recipe: Recipe that the framework can run.
            workload: Model and batch. Its attribute `source` has the code that makes them.
        """
        raise NotImplementedError

    # ---- What the framework's own step does differently from `train_step`

    def for_model(self, model: nn.Module) -> Framework:
        """Return this framework, or a copy that rejects recipes that the model does not support.

        Args:
            model: Model with symbolic tensors, which have shapes but no values.
        """
        return self

    def model_maker(self, make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a function that makes the model for estimates of the framework's step.

        The base class returns `make_model` itself. A framework with its own step returns a function
        that also marks the model. Estimates of a marked model use the framework's methods
        `optimizer` and `around_step`.

        Args:
            make_model: Function without arguments that returns the model.
        """
        return make_model

    def optimizer(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], recipe: Recipe, lr: float
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer that the framework creates for a recipe, for use in estimates.

        The result is None if the framework creates the same optimizer as this library.

        Args:
            model: Model to train.
            parameters: Parameters to optimize.
            recipe: Memory-saving techniques of the step.
            lr: Learning rate.
        """
        return None

    def around_step(self, model: nn.Module, recipe: Recipe) -> AbstractContextManager:
        """Return a context manager that changes the model as the framework does during a step.

        An estimate of the framework's step runs inside the context manager. On exit, the model is
        restored. In the base class, the context manager changes nothing.

        Args:
            model: Model to train.
            recipe: Memory-saving techniques of the step.
        """
        return nullcontext()


@dataclass(frozen=True)
class FrameworkLimits:
    """Limits on the recipes (sets of memory-saving techniques) that a search may try.

    A framework such as Hugging Face's Trainer sets the limits, which also depend on the batch size.

    Attributes:
        framework: Framework that must be able to run the recipes; None for no limits.
        samples: Number of samples in the batch; None if it is not known.
    """

    framework: Framework | None = None
    samples: int | None = None

    def allow(self, **values: Any) -> bool:
        """Return whether the framework can run all of the given field values of a recipe.

        Each keyword is the name of a field of `Recipe`, and each value is checked by itself.
        """
        return self.framework is None or self.framework.allows(values)

    def only(self, field: str) -> Collection[Any] | None:
        """Return the values of a field of `Recipe` that the framework can run.

        The result is None if the framework can run all values.
        """
        return None if self.framework is None else self.framework.only.get(field)

    def allowed_micro_batch_counts(self, counts: Iterable[int], ranks: int = 1) -> list[int]:
        """Return those numbers of micro-batches in `counts` that the framework can run.

        If the framework needs micro-batches of equal size, only the divisors of the number of
        samples per rank are allowed. If the framework can run micro-batches of different sizes, or
        if the number of samples is not known, all numbers are allowed.

        Args:
            counts: Numbers of micro-batches to choose from.
            ranks: Number of ranks (processes) among which the batch is divided.
        """
        if self.framework is None or not self.framework.equal_micro_batches or not self.samples:
            return [*counts]
        return [count for count in counts if self.samples % (ranks * count) == 0]

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None.

        The number of micro-batches is also checked against the number of samples in the batch.
        """
        if self.framework is None:
            return None
        if problem := self.framework.conflict(recipe):
            return problem
        if self.allowed_micro_batch_counts([recipe.micro_batches], recipe.ranks):
            return None
        return (
            f"micro_batches must be a divisor of the batch's {self.samples} samples when framework"
            f" is {self.framework.name!r}, got {recipe.micro_batches}; framework='torch' supports"
            " this value"
        )

    def require(self, recipe: Recipe) -> None:
        """Raise ValueError if the framework cannot run the recipe (see `conflict`)."""
        if problem := self.conflict(recipe):
            raise ValueError(problem)
