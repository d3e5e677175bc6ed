"""What the lessons' checks are made of: verdicts, and `exercise`, so that no answer makes a check raise."""

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from course_lib.labels import markup, say, text

_COLORS = {True: "#228833", False: "#EE7733"}


@dataclass(frozen=True)
class Verdict:
    """What a check says about an answer, in labels; it shows itself, and is true if the answer is right."""

    correct: bool
    message: str
    hint: str | None = None

    def __bool__(self) -> bool:
        return self.correct

    def __repr__(self) -> str:
        return "\n".join(say(part, separator="\n") for part in self._parts())

    def _repr_html_(self) -> str:
        message, *hint = (markup(part) for part in self._parts())
        hints = "".join(f'<div style="opacity: 0.8; margin-top: 0.4em">{part}</div>' for part in hint)
        look = f"border-left: 4px solid {_COLORS[self.correct]}; padding: 0.3em 0.8em; max-width: 50em"
        return f'<div class="course-verdict" style="{look}"><div>{message}</div>{hints}</div>'

    def _parts(self) -> list[str]:
        message = text("{mark} {message}", mark="✓" if self.correct else "✗", message=self.message)
        return [message] if self.hint is None else [message, text("Hint: {hint}", hint=self.hint)]


def right(message: str) -> Verdict:
    """A right answer's verdict."""
    return Verdict(True, message)


def wrong(message: str, *, hint: str | None = None) -> Verdict:
    """A wrong answer's; a hint given here goes before the exercise's own."""
    return Verdict(False, message, hint)


def not_answered(hint: str | None = None) -> Verdict:
    return wrong("Not answered yet.", hint=hint)


class Refused(Exception):
    """Ends a check from within a function that it calls; takes what `wrong` takes."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.verdict = wrong(message, hint=hint)


def exercise(
    hint: str, *, raised: str = "It raised {error}."
) -> Callable[[Callable[[Any], Verdict]], Callable[[Any], Verdict]]:
    """Make the function below it a check, which takes an answer and returns a `Verdict`, whatever the answer is.

    The function gets no answer that is `None` or `...`: these are not answered yet. What it raises is a wrong answer's.

    Args:
        hint: shown with a wrong answer that is given no hint of its own.
        raised: what is said of an exception, with `{error}` for it.
    """

    def made(check: Callable[[Any], Verdict]) -> Callable[[Any], Verdict]:
        @functools.wraps(check)
        def checked(answer: Any) -> Verdict:
            if answer is None or answer is ...:
                return not_answered(hint)
            try:
                verdict = check(answer)
            except Refused as refused:
                verdict = refused.verdict
            except Exception as error:
                verdict = wrong(text(raised, error=_said(error)))
            return verdict if verdict or verdict.hint else replace(verdict, hint=hint)

        return checked

    return made


def _said(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # its arguments may be anything
        return type(error).__name__


def largest_that_fits(
    answer: Any, sizes: Sequence[int], peak: Callable[[int], int], budget_bytes: int, wanted: str
) -> tuple[int, int, int | None]:
    """Check that the answer is the largest of the sizes, in ascending order, whose peak is within the budget.

    Returns:
        The answer, its peak, and the peak of the next size, None if there is none.

    Raises:
        Refused: it is not; with `wanted` if it is none of the sizes.
    """
    number = _number(answer)
    if number not in sizes:
        raise Refused(wanted)
    place = sizes.index(number)
    size, here = sizes[place], peak(sizes[place])
    if here > budget_bytes:
        raise Refused(text("Too large: {size} peaks at {here:,} bytes.", size=size, here=here))
    if place + 1 == len(sizes):
        return size, here, None
    above = peak(sizes[place + 1])
    if above <= budget_bytes:
        raise Refused(
            text(
                "It fits, at {here:,} bytes, but so does {next}, at {above:,}.",
                **{"here": here, "next": sizes[place + 1], "above": above},
            )
        )
    return size, here, above


def expect_number(
    answer: Any,
    expected: float,
    *,
    tolerance: float = 0.0,
    wrong_answers: Mapping[float, str] | None = None,
    why: str | None = None,
    hint: str | None = None,
) -> Verdict:
    """Check a number. Never raises for any answer.

    Args:
        answer: a number of any kind, a tensor with one element included; `None` and `...` mean not answered yet.
        expected: the right answer.
        tolerance: relative, for the right answer and the wrong ones.
        wrong_answers: wrong number -> what went wrong.
        why: why the right answer is right; shown only with it.
        hint: shown with a wrong answer.
    """
    if answer is None or answer is ...:
        return not_answered(hint)
    number = _number(answer)
    if number is None:
        kind = type(answer).__name__
        return wrong(text("One number is wanted; this is a `{kind}`.", kind=kind), hint=hint)
    if _close(number, expected, tolerance):
        return right("Right." if why is None else text("Right. {why}", why=why))
    for mistaken, reason in (wrong_answers or {}).items():
        if _close(number, mistaken, tolerance):
            return wrong(text("Not yet. {reason}", reason=reason), hint=hint)
    return wrong("Not yet: too small." if number < expected else "Not yet: too large.", hint=hint)


def _number(answer: Any) -> Fraction | float | None:
    """The answer as a number that can be compared without overflow, or None. Infinity stays a float."""
    try:
        if hasattr(answer, "item"):  # a tensor or an array with one element, or one of numpy's numbers
            answer = answer.item()
        if isinstance(answer, bool) or not isinstance(answer, (numbers.Real, Decimal)):
            return None
        if isinstance(answer, numbers.Rational):
            return Fraction(answer.numerator, answer.denominator)
        answer = float(answer)
        if math.isnan(answer):
            return None
        return answer if math.isinf(answer) else Fraction(answer)
    except Exception:  # whatever the answer's own methods do, the reader gets a verdict
        return None


def _close(number: Fraction | float, wanted: float, tolerance: float) -> bool:
    if isinstance(number, float):  # infinite
        return False
    return abs(number - Fraction(wanted)) <= Fraction(tolerance) * abs(Fraction(wanted))
