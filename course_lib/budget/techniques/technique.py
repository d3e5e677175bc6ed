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
    # The modules that define these classes import the techniques, so at run time this module cannot
    # import the classes.
    Recipe = RecipeSearch = Any

# Function to call after a forward pass: it raises an error if the pass has bypassed a technique.
ForwardCheck = Callable[[], None]


class Technique:
    """Base class of a memory-saving technique, such as activation checkpointing.

    A `Recipe` is the set of values of all techniques' fields for one training step. A technique
    checks the values of its own fields, applies them to a model, and describes them in labels. The
    function `fit` searches for the fastest recipe within a memory budget. It tries the values that
    the method `candidates` of each technique returns.

    Attributes:
        fields: Mapping from the name of each field of the technique to a function (name, value).
            The function raises an error if the value is not allowed.
        around: Code that runs inside the context manager of `apply`: "step" for the whole training
            step, or "forward" for the forward pass of each micro-batch.
        after: Techniques that must be applied to a model before this technique, each given by the
            name of its first field. An example is ("head_chunk",) for `Checkpoint`, because the
            output head must be found before the blocks are wrapped. `course_lib.budget.waterfall`
            adds techniques to the baseline in the same order. The attribute is None for settings
            that the baseline also has, such as the precision.
        composable: Whether each of several equal blocks of a model adds the same bytes and FLOPs to
            a step with this technique. If so, `course_lib.budget.search.extrapolation` computes an
            estimate from steps with only a few of the blocks. If not, the step is run with all
            blocks.
        computes: Whether the technique can change the FLOPs of forward and backward.
        graded: Whether each of the `candidates` uses the technique to a larger extent than the one
            before, such as a larger fraction of offloaded optimizer state. If False, the candidates
            are alternatives, such as different kinds of checkpoints.
        in_forward: Whether the technique changes which activations a forward pass keeps for
            backward. These are the activations that can be offloaded.
        acts_on: Names of the memory categories that the technique reduces, from
            `course_lib.memory.CATEGORIES`, such as "activation".
        hooks_saved_tensors: Whether `apply` installs `torch.autograd.graph.saved_tensors_hooks`
            around each forward pass, directly or through another context manager. PyTorch runs only
            the innermost of several such hooks, so `Recipe` rejects two techniques with hooks.
            The attribute is False for checkpoints of blocks, because their hooks are installed
            inside the forward pass and are meant to be nested.
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
        """Name of the technique's first field, for which `course_lib.budget.fit` tries values."""
        return next(iter(self.fields))

    def is_used(self, recipe: Recipe) -> bool:
        """Return whether a recipe sets a field of the technique to a non-default value."""
        return not self.fields.keys().isdisjoint(recipe.changed_fields())

    def conflict(self, recipe: Recipe) -> str | None:
        """Return an error message if fields of the recipe cannot be combined, or else None.

        Each technique checks the combinations that involve its own fields. No model is needed.
        """
        return None

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        """Return an error message if a model does not support the technique, or else None.

        Args:
            recipe: Recipe with the settings of the technique.
            model: Model to check.

        Raises:
            ValueError: The technique needs the model's blocks or its output head and cannot find
                them.
        """
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[ForwardCheck | None]:
        """Return a context manager inside which the model uses the technique.

        The context manager changes the model in place and restores it on exit. Some techniques
        yield a function without arguments, which must be called after each forward pass. This
        function raises an error if the forward pass did not use the technique, for example because
        the forward pass never called the changed module. All other techniques yield None.

        Args:
            recipe: Recipe that uses the technique (see `is_used`).
            model: Model to change.
            store: Store for offloaded activations; None for the default store. Other techniques
                ignore it.
        """
        return nullcontext()

    def labels(self, recipe: Recipe) -> list[str]:
        """Return short texts that describe the technique in a recipe, such as "4 micro-batches".

        The list is empty if there is nothing to describe, as in the base class.
        """
        return []

    def candidates(self, search: RecipeSearch) -> Sequence[Mapping[str, Any]]:
        """Return the settings of the technique that `course_lib.budget.fit` tries.

        Each candidate is a mapping from field names of the technique to values. The first candidate
        needs the fewest FLOPs and copies to and from the lower tier (host memory or disk). This
        method is not called if the base recipe of the search already sets the technique's first
        field.

        Args:
            search: Object of the search that `fit` runs. `search.cache` has the model, the batch
                and the base recipe (the settings that the user has fixed).
        """
        return ({},)

    def not_tried(self, search: RecipeSearch) -> str | None:
        """Return a sentence for the user if `course_lib.budget.fit` could not try the technique.

        The sentence states the reason and, if possible, what the user can do about it. The result
        is None if there is nothing to report, as in the base class.

        Args:
            search: Object of the search that `fit` runs. `search.cache` has the model, the batch
                and the base recipe (the settings that the user has fixed).
        """
        return None


def combine_checks(checks: Iterable[ForwardCheck | None]) -> ForwardCheck:
    """Return a function that calls each of the given functions in order, skipping None.

    Each of these functions takes no arguments, and raises an error if a forward pass did not use a
    technique. The returned function takes no arguments either.
    """
    actual_checks = [check for check in checks if check is not None]

    def run() -> None:
        for check in actual_checks:
            check()

    return run


def fields_of(**checks: Callable[[str, Any], object]) -> Mapping[str, Callable[[str, Any], object]]:
    """Return the keyword arguments as an immutable mapping, for the attribute `Technique.fields`.

    Each keyword is the name of a field of `Recipe`. Its value is a function (name, value) that
    raises an error if the value is not allowed.
    """
    return MappingProxyType(checks)


def choice(*options: Any) -> Callable[[str, Any], object]:
    """Return a function (name, value) that raises ValueError unless the value is one of `options`.

    The argument `name` of this function is the name of a field, for the error message.
    """
    return partial(_one_of, options)


def _one_of(options: tuple, name: str, value: Any) -> None:
    """Raise an error unless a value is one of the options."""
    one_of(name, value, options)


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless the value of the field `name` is True or False."""
    kind(name, value, bool, "True or False")


def at_least(least: int, of: str = "") -> Callable[[str, Any], object]:
    """Return a function (name, value) that raises an error unless value is an integer >= `least`.

    The error is TypeError if the value is not an integer, and ValueError if it is too small. The
    message of the error contains the name of the field and the argument `of`, which is a unit such
    as "bytes".
    """
    return partial(whole, least=least, of=of)


def at_least_or_none(least: int) -> Callable[[str, Any], object]:
    """Return a function (name, value) that accepts None and integers of at least `least`.

    For any other value, the returned function raises TypeError or ValueError, with the field name
    in the message.
    """

    def check(name: str, value: Any) -> None:
        if value is not None:
            whole(name, value, least)

    return check


def fraction(name: str, value: Any) -> None:
    """Raise an error unless the value of the field `name` is a number from 0 to 1."""
    number(name, value, 0, 1)
