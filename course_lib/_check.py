"""Check arguments of functions, with the same form of error message in the whole library.

Each check returns the value, or raises an error with the message `NAME must be ALLOWED, got VALUE`.
The error is a TypeError for a value of another type, and a ValueError for a value out of range.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any


def whole(
    name: str, value: Any, least: int | None = None, most: int | None = None, *, of: str = ""
) -> int:
    """Return `value` as an int, or raise if it is not a whole number within its bounds.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        least, most: Smallest and largest allowed value; None for no bound.
        of: Noun for the things that are counted, such as "bytes", for the message.
    """
    allowed = f"a whole number{of and f' of {of}'}{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(argument_message(name, allowed, describe(value)))
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(argument_message(name, allowed, value))
    return int(value)


def number(name: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    """Return `value` as a float, or raise if it is not a finite number within its bounds.

    The arguments have the same meaning as in `whole`.
    """
    allowed = f"a finite number{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(argument_message(name, allowed, describe(value)))
    if (
        not math.isfinite(value)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        raise ValueError(argument_message(name, allowed, value))
    return float(value)


def positive(name: str, value: Any) -> float:
    """Return `value` as a float, or raise if it is not above 0; infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(argument_message(name, "a number above 0", describe(value)))
    if not value > 0:
        raise ValueError(argument_message(name, "a number above 0", value))
    return float(value)


def one_of(name: str, value: Any, options: Collection) -> Any:
    """Return `value`, or raise if no option has the same type and is equal to it."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in options
    ):
        raise ValueError(argument_message(name, any_of(map(repr, options)), describe(value)))
    return value


def kind(name: str, value: Any, types: type | tuple[type, ...], allowed: str) -> Any:
    """Return `value`, or raise if it is not an instance of one of the types.

    `allowed` describes the types in the message, such as "a torch.device or None".
    """
    if not isinstance(value, types):
        raise TypeError(argument_message(name, allowed, describe(value)))
    return value


def function(name: str, value: Any, allowed: str) -> Any:
    """Return `value`, or raise if it is not callable.

    `allowed` describes the function in the message.
    """
    if not callable(value):
        raise TypeError(argument_message(name, allowed, describe(value)))
    return value


def argument_message(name: str, allowed: str, actual: object) -> str:
    """Return the message of an argument error: "{name} must be {allowed}, got {actual}"."""
    return f"{name} must be {allowed}, got {actual}"


def any_of(options: Iterable[object]) -> str:
    """Join options into a text such as "a", "a or b" or "a, b or c"."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def describe(value: Any) -> str:
    """Return a description of a value for an error message.

    Numbers, strings and None are shown by their repr (at most 60 characters), tensors and arrays by
    shape and dtype, and anything else by its type.
    """
    if value is None or isinstance(value, (bool, Real, str)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        # An estimate replaces the user's tensors by fake tensors, whose classes begin with "Fake".
        # The message shows the class that the user passed.
        kind = type(value).__name__.removeprefix("Fake")
        return f"{_with_article(kind)} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def _range(least: float | None, most: float | None) -> str:
    """Return the bounds as the end of a clause, such as ", at least 1" or " between 0 and 1"."""
    if least is None:
        return "" if most is None else f", at most {most}"
    return f", at least {least}" if most is None else f" between {least} and {most}"


class InfeasibleBudget(ValueError):
    """Error raised when the search finds no schedule or recipe that fits a memory budget.

    A recipe is a combination of memory-saving techniques. The message states a larger budget that
    suffices, if one was found.

    Attributes:
        budget_bytes: The budget in bytes.
        least_bytes: Smallest budget in bytes for which a solution (a schedule or recipe) was found;
            None if none was found.
        reason: Explanation why no solution fits, the second part of the message.
        least: Solution that needs `least_bytes`, such as a `course_lib.budget.Estimate`; None if
            none was found.
        name: Name of the argument that sets the budget, for the message.
        not_tried: Sentences on techniques that the search could not try for this model.
        additions: Techniques that could be added to the recipe of `least`, given as names of fields
            of `course_lib.budget.Recipe`.
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
        arguments = self.budget_bytes, self.least_bytes, self.reason, self.least, self.name
        return type(self), arguments, vars(self)
