"""Checks of arguments, in one place: every refusal names the argument, what it got and what it
takes."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any


def whole(
    name: str, value: Any, least: int | None = None, most: int | None = None, *, of: str = ""
) -> int:
    """`value` as an int within its bounds; `of` says what is counted ("bytes")."""
    takes = f"a whole number{of and f' of {of}'}{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)}; it takes {takes}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it takes {takes}")
    return int(value)


def number(name: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    """`value` as a finite float within its bounds."""
    takes = f"a finite number{_range(least, most)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it takes {takes}")
    if (
        not math.isfinite(value)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        raise ValueError(f"{name} is {value}; it takes {takes}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """`value` as a float above 0; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it takes a number above 0")
    if not value > 0:
        raise ValueError(f"{name} is {value}; it takes a number above 0")
    return float(value)


def one_of(name: str, value: Any, options: Collection) -> Any:
    """`value`, which is one of the options."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in options
    ):
        raise ValueError(f"{name} is {shown(value)}; it takes {' or '.join(map(repr, options))}")
    return value


def kind(name: str, value: Any, types: type | tuple[type, ...], takes: str) -> Any:
    """`value`, which is of one of the types; `takes` says in words what they are."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {shown(value)}; it takes {takes}")
    return value


def function(name: str, value: Any, takes: str) -> Any:
    """`value`, which can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}; it takes {takes}")
    return value


def shown(value: Any) -> str:
    """A value as an error names it: numbers and short texts as they are, tensors by shape, the rest
    by type."""
    if value is None or isinstance(value, (bool, Real, str)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        # of an estimate: the reader has passed a tensor
        kind = type(value).__name__.removeprefix("Fake")
        return f"a {kind} of shape {tuple(value.shape)} and {value.dtype}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f", {most} or less"
    return f", {least} or more" if most is None else f", {least} to {most}"


class InfeasibleBudget(ValueError):
    """Nothing fits the budget; the message says what would.

    Attributes:
        budget_bytes: the budget.
        least_bytes: the least budget for which something was found; None if nothing was.
        least: what takes so little, such as a `course_lib.budget.Estimate`; None if that is not
            known.
        name: of the argument that is the budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        least_bytes: int | None,
        told: str,
        least: Any = None,
        name: str = "budget_bytes",
    ):
        super().__init__(f"{name} is {budget_bytes}, but {told}")
        self.budget_bytes, self.least_bytes, self.told, self.least = (
            budget_bytes,
            least_bytes,
            told,
            least,
        )
        self.name = name

    def __reduce__(self):
        return type(self), (self.budget_bytes, self.least_bytes, self.told, self.least, self.name)
