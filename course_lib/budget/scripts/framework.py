"""Base class of the frameworks for which a recipe can be written as a script."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
    """

    name: str
    title: str
    precisions: tuple[str | None, ...]
    only: Mapping[str, Collection[Any]] = MappingProxyType({})

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Return whether the framework can run each of these fields of a recipe by itself."""
        return all(value in self.only[name] for name, value in values.items() if name in self.only)

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if the framework cannot run the recipe, or else None.

        It names the field that it cannot run, and the frameworks that can.
        """
        raise NotImplementedError

    def refuse(self, workload: Workload) -> str | None:
        """Return an error message if the framework cannot train the workload's model, or None."""
        return None

    def script(self, recipe: Recipe, workload: Workload) -> str:
        """Return a script of ten to twenty lines that trains the workload's model by the recipe.

        Its last statement is the training. If it is executed, it leaves the name `model`.
        """
        raise NotImplementedError
