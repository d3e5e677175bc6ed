"""Base class of the memory-saving techniques, and checks for the fields of a recipe.

`course_lib.budget.techniques.TECHNIQUES` has one instance of each technique.
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
    from course_lib.budget.search.candidates import RecipeSearch
else:
    # Their modules import the techniques, so only a type checker can import them here.
    Recipe = RecipeSearch = Any

# Function to call after a forward pass: it raises an error if the pass has bypassed a technique.
ForwardCheck = Callable[[], None]


class Technique:
    """One memory-saving technique: everything that recipes and the search need to know about it.

    Some fields of a recipe belong to the technique. It checks them, applies them to a model, and
    describes them in labels.

    Attributes:
        fields: Mapping from each field to its check. `check(name, value)` raises if the value is
            not allowed.
        around: Part of the training that `apply` surrounds: the whole step, or the forward pass
            of each micro-batch.
        after: Techniques that are applied to a model before this one, each given by its first
            field. For example, the head must be found before its blocks are wrapped.
            `course_lib.budget.waterfall` adds techniques to the baseline in this order too, so
            cheap ones come first. None means that the technique, such as the precision, is not
            applied to a model, because the baseline already has it.
        composable: Whether the step of a recipe with this technique grows evenly with the equal
            blocks of a model, so that `course_lib.budget.search.extrapolation` can compose its
            estimate from steps with few blocks. A recipe with a technique that is not composable is
            estimated by its whole step.
        computes: Whether the technique changes which operators run, and with them the FLOPs.
        graded: Whether each candidate uses more of the technique than the one before, such as a
            larger fraction of offloaded state. Otherwise the candidates exclude one another.
        in_forward: Whether the technique changes which activations a forward pass keeps, and
            therefore which ones are offloaded.
        acts_on: Categories of live bytes that the technique makes smaller.
        hooks_saved_tensors: Whether `apply` puts `torch.autograd.graph.saved_tensors_hooks`, or a
            context manager that is built on them, around each forward pass. PyTorch runs only the
            innermost of such hooks, so a `Recipe` rejects two techniques of this kind. Checkpoints
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
        """Return whether a recipe uses the technique: one of its fields is not the default."""
        return not self.fields.keys().isdisjoint(recipe.changed_fields())

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if fields of the recipe cannot be combined, or else None."""
        return None

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        """Return an error message if the model does not support the recipe, or else None.

        May raise ValueError if the model's blocks or its head cannot be found.
        """
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[ForwardCheck | None]:
        """Return a context manager inside which the model uses the technique.

        This method is called only for recipes that use the technique (see `is_used`). The context
        manager restores the model when it exits. It may yield a function to call after a forward
        pass, which raises an error if the forward pass has bypassed the technique.
        """
        return nullcontext()

    def labels(self, recipe: Recipe) -> list[str]:
        """Return labels that describe how a recipe uses the technique; empty if it does not."""
        return []

    def candidates(self, search: RecipeSearch) -> Sequence[Mapping[str, Any]]:
        """Return the candidates of the technique that `fit` tries for the model.

        A candidate is a mapping from fields of the technique to values. The first candidate has the
        fewest FLOPs and copies. `fit` does not call this method if the base recipe sets `field`.
        """
        return ({},)

    def not_tried(self, search: RecipeSearch) -> str | None:
        """Return a sentence on why `fit` could not try the technique and what to do, or None."""
        return None


def combine_checks(checks: Iterable[ForwardCheck | None]) -> ForwardCheck:
    """Return one check that runs all given checks, ignoring None."""
    actual_checks = [check for check in checks if check is not None]

    def run() -> None:
        for check in actual_checks:
            check()

    return run


def fields_of(**checks: Callable[[str, Any], object]) -> Mapping[str, Callable[[str, Any], object]]:
    """Return the checks of several fields as an immutable mapping, for `Technique.fields`."""
    return MappingProxyType(checks)


def choice(*options: Any) -> Callable[[str, Any], object]:
    """Return a check of a field that raises an error unless the value is one of the options."""
    return partial(_one_of, options)


def _one_of(options: tuple, name: str, value: Any) -> None:
    """Raise an error unless a value is one of the options."""
    one_of(name, value, options)


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless a value is True or False."""
    kind(name, value, bool, "True or False")


def at_least(least: int, of: str = "") -> Callable[[str, Any], object]:
    """Return a function (name, value) that raises an error unless value is an integer >= `least`.

    `of` is the unit in the message, such as "bytes".
    """
    return partial(whole, least=least, of=of)


def at_least_or_none(least: int) -> Callable[[str, Any], object]:
    """Return a check of a field for None or a whole number of at least `least`."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            whole(name, value, least)

    return check


def fraction(name: str, value: Any) -> None:
    """Raise an error unless a value is a number between 0 and 1."""
    number(name, value, 0, 1)
