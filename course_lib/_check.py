"""Checks of arguments, shared by all modules of the library.

Every error says `NAME must be ALLOWED, got VALUE`: TypeError for a value of another type, and
ValueError for a value out of range.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any


def whole(
    name: str, value: Any, least: int | None = None, most: int | None = None, *, of: str = ""
) -> int:
    """Return `value` as an int within its bounds; `of` names what is counted, such as "bytes"."""
    allowed = f"a whole number{of and f' of {of}'}{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(must_be(name, allowed, describe(value)))
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(must_be(name, allowed, value))
    return int(value)


def number(name: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    """Return `value` as a finite float within its bounds."""
    allowed = f"a finite number{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(must_be(name, allowed, describe(value)))
    if (
        not math.isfinite(value)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        raise ValueError(must_be(name, allowed, value))
    return float(value)


def positive(name: str, value: Any) -> float:
    """Return `value` as a float above 0; infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(must_be(name, "a number above 0", describe(value)))
    if not value > 0:
        raise ValueError(must_be(name, "a number above 0", value))
    return float(value)


def one_of(name: str, value: Any, options: Collection) -> Any:
    """Return `value`, which must be one of the options."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in options
    ):
        raise ValueError(must_be(name, any_of(map(repr, options)), describe(value)))
    return value


def kind(name: str, value: Any, types: type | tuple[type, ...], allowed: str) -> Any:
    """Return `value`, which must be of one of the types; `allowed` describes them."""
    if not isinstance(value, types):
        raise TypeError(must_be(name, allowed, describe(value)))
    return value


def function(name: str, value: Any, allowed: str) -> Any:
    """Return `value`, which must be callable; `allowed` describes the function."""
    if not callable(value):
        raise TypeError(must_be(name, allowed, describe(value)))
    return value


def must_be(name: str, allowed: str, actual: object) -> str:
    """Return the sentence of an argument error."""
    return f"{name} must be {allowed}, got {actual}"


def any_of(options: Iterable[object]) -> str:
    """Return the options as an enumeration: "a", "a or b", "a, b or c"."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def describe(value: Any) -> str:
    """Describe a value for an error.

    Numbers and strings are shown by their repr (at most 60 characters), tensors by their shape, and
    anything else by its type.
    """
    if value is None or isinstance(value, (bool, Real, str)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        # An estimate replaces the user's tensors by fake ones; show the class that the user passed.
        kind = type(value).__name__.removeprefix("Fake")
        return f"a {kind} of shape {tuple(value.shape)} and {value.dtype}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f", at most {most}"
    return f", at least {least}" if most is None else f" between {least} and {most}"


class InfeasibleBudget(ValueError):
    """Error raised when no solution fits the budget.

    The message states a sufficient budget if one is known.

    Attributes:
        budget_bytes: The budget.
        least_bytes: Smallest budget for which a solution was found, or None if none was.
        reason: Reason why no solution fits, which ends the message.
        least: Solution that needs `least_bytes`, such as a `course_lib.budget.Estimate`; None if
            none was found.
        name: Name of the argument that sets the budget.
        not_tried: Sentences on techniques that a search could not try for this model.
        additions: Fields of `course_lib.budget.Recipe` that the search allows in addition to those
            of `least`.
    """

    not_tried: Sequence[str] = ()
    additions: Sequence[str] = ()

    def __init__(
        self,
        budget_bytes: int,
        least_bytes: int | None,
        reason: str,
        least: Any = None,
        name: str = "budget_bytes",
    ):
        super().__init__(f"{name} is {budget_bytes}, but {reason}")
        self.budget_bytes, self.least_bytes, self.reason, self.least = (
            budget_bytes,
            least_bytes,
            reason,
            least,
        )
        self.name = name

    def __reduce__(self):
        given = self.budget_bytes, self.least_bytes, self.reason, self.least, self.name
        return type(self), given, vars(self)
