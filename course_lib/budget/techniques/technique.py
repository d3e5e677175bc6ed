"""Base class of the memory-saving techniques, and checks for the fields of a recipe.

Each technique is a row of the table `course_lib.budget.techniques.TECHNIQUES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from course_lib._check import kind, number, one_of, whole

if TYPE_CHECKING:
    from course_lib.budget.recipe import Recipe
    from course_lib.budget.search.candidates import Search
else:
    # Their modules import the techniques, so only a type checker can import them here.
    Recipe = Search = Any

Check = Callable[[], None]


class Technique:
    """One memory-saving technique: everything that recipes and the search need to know about it.

    Some fields of a recipe belong to the technique. It checks them, applies them to a model, and
    describes them in labels.

    Attributes:
        fields: Mapping from each field to its check. `check(name, value)` raises if the value is
            not allowed.
        around: Part of the training that `apply` surrounds: the whole step, or the forward pass
            of each micro-batch.
        after: First fields of the techniques that are applied to a model before this one. For
            example, the head must be found before its blocks are wrapped. The steps from the
            baseline to a recipe add techniques in the same order, with cheap ones first. None means
            that the technique is not applied to a model and that the baseline already has it, such
            as the precision.
        composable: Whether the step of a recipe with this technique grows evenly with the equal
            blocks of a model, so that `course_lib.budget.search.extrapolation` can compose its
            estimate from steps with few blocks. Recipes that use any other technique are estimated
            by their whole steps.
        computes: Whether the technique changes which operators run, and with them the FLOPs.
        graded: Whether each candidate uses more of the technique than the one before. Otherwise the
            candidates exclude one another.
        in_forward: Whether the technique changes which activations a forward pass keeps, and
            therefore which ones are offloaded.
        acts_on: Categories of live bytes that the technique makes smaller.
        hooks_saved_tensors: Whether `apply` puts `torch.autograd.graph.saved_tensors_hooks`, or a
            context manager that is built on them, around each forward pass. PyTorch runs only the
            innermost of such hooks, so a `Recipe` refuses two techniques of this kind. Checkpoints
            of blocks do not count: their hooks are inside the forward pass, and nest on purpose.
    """

    fields: Mapping[str, Callable[[str, Any], object]] = MappingProxyType({})
    around: Literal["step", "forward"] = "step"
    after: tuple[str, ...] | None = ()
    composable: bool = False
    computes: bool = True
    graded: bool = False
    in_forward: bool = True
    acts_on: frozenset[str] = frozenset()
    hooks_saved_tensors: bool = False

    @property
    def field(self) -> str:
        """Name of the first field, whose values are the candidates of the technique."""
        return next(iter(self.fields))

    def is_used(self, recipe: Recipe) -> bool:
        """Return whether a recipe uses the technique.

        A recipe uses the technique if any of the technique's fields differs from its default.
        """
        return not self.fields.keys().isdisjoint(recipe.changed_fields())

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if fields of the recipe cannot be combined, or else None."""
        return None

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        """Return an error message if the model does not support the recipe, or else None.

        May raise ValueError if the model's blocks or its head cannot be found.
        """
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[Check | None]:
        """Return a context manager inside which the model uses the technique.

        This method is called only for recipes that use the technique (see `is_used`). The context
        manager restores the model when it exits. It may yield a function to call after a forward
        pass, which raises an error if the forward pass has bypassed the technique.
        """
        return nullcontext()

    def words(self, recipe: Recipe) -> list[str]:
        """Return labels for a table that describe how the recipe uses the technique.

        The list is empty if the recipe does not use it.
        """
        return []

    def candidates(self, search: Search) -> Sequence[Mapping[str, Any]]:
        """Return values of the technique's fields that `fit` tries for the model.

        The first candidate has the fewest FLOPs and copies. `fit` does not call this method if the
        base sets the technique.
        """
        return ({},)

    def not_tried(self, search: Search) -> str | None:
        """Return a sentence on why `fit` could not try the technique, with a remedy, or None."""
        return None


def all_of(checks: Iterable[Check | None]) -> Check:
    """Return one check that runs all given checks, ignoring None."""
    actual_checks = [check for check in checks if check is not None]

    def run() -> None:
        for check in actual_checks:
            check()

    return run


def fields_of(**checks: Callable[[str, Any], object]) -> Mapping[str, Callable[[str, Any], object]]:
    """Return an immutable mapping from each field to its check."""
    return MappingProxyType(checks)


def choice(*options: Any) -> Callable[[str, Any], object]:
    """Return a check that a value is one of the options."""
    return partial(_one_of, options)


def _one_of(options: tuple, name: str, value: Any) -> None:
    one_of(name, value, options)


def yes_or_no(name: str, value: Any) -> None:
    """Check that a value is True or False."""
    kind(name, value, bool, "True or False")


def count(least: int, of: str = "") -> Callable[[str, Any], object]:
    """Return a check that a value is a whole number of at least `least`."""
    return partial(whole, least=least, of=of)


def count_or_none(least: int) -> Callable[[str, Any], object]:
    """Return a check that a value is None or a whole number of at least `least`."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            whole(name, value, least)

    return check


def fraction(name: str, value: Any) -> None:
    """Check that a value is between 0 and 1."""
    number(name, value, 0, 1)
