"""Technique: a way of saving memory and all that it tells of itself, a row of the table
`course_lib.budget.techniques.TECHNIQUES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from course_lib._check import kind, number, one_of, whole

Recipe = Any  # a `course_lib.budget.Recipe`: it is made of these, and so cannot be imported here
Known = Any  # a `course_lib.budget.knowledge.Known`, likewise
Check = Callable[[], None]


class Technique:
    """One way of saving memory: fields of a recipe, what they refuse, how they are put on a model,
    and their words.

    Attributes:
        fields: name -> what raises where a value is not of the field's kind: `check(name, value)`.
        around: what `applied` is around: the whole step, or each micro-batch's forward pass.
        place: in the order in which they are put on a model (the head is looked for before its
            blocks are wrapped), and are added on the way from the plain step to a recipe: cheap
            ones first. None for what the plain step has.
        graded: each of its candidates uses more of it than the one before; else they exclude one
            another.
        in_forward: it changes what a forward pass keeps, and so what offloading would move.
        acts_on: categories of live bytes that it makes smaller.
        hooks_saved_tensors: `applied` puts `torch.autograd.graph.saved_tensors_hooks`, or a context
            manager that is built on them, around each forward pass. PyTorch runs only the innermost
            of such hooks, so a `Recipe` refuses two techniques of this kind. Checkpoints of blocks
            do not count: their hooks are inside the forward pass, and nest on purpose.
    """

    fields: Mapping[str, Callable[[str, Any], object]] = MappingProxyType({})
    around: Literal["step", "forward"] = "step"
    place: int | None = None
    graded: bool = False
    in_forward: bool = True
    acts_on: frozenset[str] = frozenset()
    hooks_saved_tensors: bool = False

    @property
    def field(self) -> str:
        """Name of the field that tells its candidates apart: the first."""
        return next(iter(self.fields))

    def conflict(self, recipe: Recipe) -> str | None:
        """Say in one sentence what of the recipe's fields does not go together; None if all
        does."""
        return None

    def refuse(self, recipe: Recipe, model: nn.Module) -> str | None:
        """Say why it does not go with the model; None if it does. What looks for parts of the model
        may raise as well."""
        return None

    def applied(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[Check | None]:
        """Let the model use the technique inside the block; afterwards it is as before.

        What is entered may give a function to be called after a forward pass, which raises if that
        has bypassed it.
        """
        return nullcontext()

    def words(self, recipe: Recipe) -> list[str]:
        """Labels of what the recipe has of it, for a table; none where it has nothing."""
        return []

    def candidates(self, known: Known) -> Sequence[Mapping[str, Any]]:
        """Values of its fields that `fit` tries, by what is known of the model: first the plainest,
        with the fewest FLOPs and copies. Where the base sets the technique, that is kept instead.
        """
        return ({},)


def all_of(checks: Iterable[Check | None]) -> Check:
    """One check that runs these."""
    told = [check for check in checks if check is not None]

    def run() -> None:
        for check in told:
            check()

    return run


def fields_of(**checks: Callable[[str, Any], object]) -> Mapping[str, Callable[[str, Any], object]]:
    """Checks by field, each of which raises where a value is not of its kind."""
    return MappingProxyType(checks)


def choice(*options: Any) -> Callable[[str, Any], object]:
    return partial(_one_of, options)


def _one_of(options: tuple, name: str, value: Any) -> None:
    one_of(name, value, options)


def yes_or_no(name: str, value: Any) -> None:
    kind(name, value, bool, "True or False")


def count(least: int, of: str = "") -> Callable[[str, Any], object]:
    return partial(whole, least=least, of=of)


def count_or_none(least: int) -> Callable[[str, Any], object]:
    def check(name: str, value: Any) -> None:
        if value is not None:
            whole(name, value, least)

    return check


def fraction(name: str, value: Any) -> None:
    number(name, value, 0, 1)
