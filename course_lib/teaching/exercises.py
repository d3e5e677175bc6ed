"""Checks of exercises: `exercise` turns a function into a check that returns a `Verdict`.

A check never raises an error, whatever the answer is.
"""

import functools
import inspect
import linecache
import math
import numbers
import os
import random
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

from course_lib.labels import markup, say, text, verbatim

#: Environment variable with the seed of the cases that checks draw while notebooks are graded
GRADING_SEED = "COURSE_GRADING_SEED"
seed = os.environ.get(GRADING_SEED, "")  # "" on a page, whose cases are always the same
Case = TypeVar("Case")
_COLORS = {True: "#228833", False: "#EE7733", None: "#777777"}
_MARKS = {True: "✓", False: "✗", None: "→"}
_UNANSWERED = "Not answered yet."
_BYTE_UNITS = {
    **{name: 1000**power for power, name in enumerate(("kB", "MB", "GB", "TB"), 1)},
    **{name: 1024**power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
# Python's messages for a call that does not match a function's arguments; other TypeErrors are
# about values.
_MISCALLED = re.compile(
    r"\(\) (takes|missing|got an unexpected keyword|got multiple values|got some positional)"
)


@dataclass(frozen=True)
class Verdict:
    """The result of a check, in labels. It displays itself, and is true if the answer is right.

    Args:
        correct: None for an answer that is not judged, such as a reason in the reader's own words.
        message: First line of the verdict.
        hint: Shown below the message.
        exact: Whether the message names the precise mistake, so that no hint of the exercise is
            added.
    """

    correct: bool | None
    message: str
    hint: str | None = None
    exact: bool = False

    def __bool__(self) -> bool:
        return bool(self.correct)

    def __repr__(self) -> str:
        return "\n".join(say(part, separator="\n") for part in self._parts())

    def _repr_html_(self) -> str:
        message, *hint = (markup(part) for part in self._parts())
        hints = "".join(
            f'<div style="opacity: 0.8; margin-top: 0.4em">{part}</div>' for part in hint
        )
        look = (
            f"border-left: 4px solid {_COLORS[self.correct]}; padding: 0.3em 0.8em; max-width: 50em"
        )
        return f'<div class="course-verdict" style="{look}"><div>{message}</div>{hints}</div>'

    def _parts(self) -> list[str]:
        message = text("{mark} {message}", mark=_MARKS[self.correct], message=self.message)
        return [message] if self.hint is None else [message, text("Hint: {hint}", hint=self.hint)]


def right(message: str) -> Verdict:
    """Return the verdict on a right answer."""
    return Verdict(True, message)


def wrong(message: str, *, hint: str | None = None, exact: bool = False) -> Verdict:
    """Return the verdict on a wrong answer.

    A hint given here replaces the exercise's own. An exact message gets no hint.
    """
    return Verdict(False, message, hint, exact)


def not_answered() -> Verdict:
    """Return the verdict on an unchanged cell; it has no hint, because nothing was tried yet."""
    return wrong(_UNANSWERED, exact=True)


def returns_none(case: str) -> Verdict:
    """Return the verdict on a function that answers other cases, but not this one."""
    return wrong(
        text("Your function returns None for {case}. Every branch needs a `return`.", case=case),
        exact=True,
    )


class WrongAnswer(Exception):
    """Error with which a helper ends a check as wrong; the arguments are those of `wrong`."""

    def __init__(self, message: str, *, hint: str | None = None, exact: bool = False) -> None:
        super().__init__(message)
        self.verdict = wrong(message, hint=hint, exact=exact)


class Exercise:
    """A check, made by `exercise`: a function of an answer that returns a `Verdict` for any answer.

    Attributes:
        accepted: Whether the last answer was right. A solution cell reads this before it overwrites
            the reader's names.
        tries: Number of wrong answers in this process that were shown with one of the exercise's
            hints.
    """

    def __init__(self, check: Callable[[Any], Verdict], hints: Sequence[str], raised: str) -> None:
        functools.update_wrapper(self, check)
        self._check, self._hints, self._raised = check, hints, raised
        self.accepted, self.tries = False, 0

    def __call__(self, answer: Any) -> Verdict:
        self.accepted = False
        verdict = self._verdict_on(answer)
        if verdict.message == _UNANSWERED:
            return not_answered()
        if verdict.correct is not False:
            self.accepted = bool(verdict)
            return verdict
        if verdict.hint or verdict.exact:
            return verdict
        self.tries += 1
        return replace(verdict, hint=self._hints[min(self.tries, len(self._hints)) - 1])

    def _verdict_on(self, answer: Any) -> Verdict:
        if answer is None or answer is ...:
            return not_answered()
        try:
            return self._check(answer)
        except WrongAnswer as refused:
            return refused.verdict
        except Exception as error:
            if type(error) is NotImplementedError and not error.args:  # raised by a stub
                return not_answered()
            if (
                type(error) is TypeError
                and not callable(answer)
                and f"{error}".endswith("object is not callable")
            ):
                return wrong(
                    text("Expected a function, got a `{kind}`.", kind=type(answer).__name__),
                    exact=True,
                )
            mistyped = isinstance(error, NameError | SyntaxError) or _is_miscalled(error)
            return wrong(
                _own_line(error, answer) or text(self._raised, error=verbatim(_error_repr(error))),
                exact=mistyped or _is_from_library(error),
            )


def exercise(
    hint: str | Sequence[str], *, raised: str = "It raised {error}."
) -> Callable[[Callable[[Any], Verdict]], Exercise]:
    """Decorate a function as a check, which returns a `Verdict` for any answer.

    The function is not called with `None` or `...`, which mean that a cell is not answered yet. An
    error of the function counts as a wrong answer, and the reader's own line is shown if there is
    one.

    Args:
        hint: One hint, or two: for the first wrong answer and for later ones. No hint is shown
            before an answer was tried, with a message that names the mistake (`exact`, or with its
            own hint), with a ValueError or TypeError that the library raises, or with a typing
            mistake: a name that does not exist, or a call with wrong arguments.
        raised: Message for an error that no line of the reader's led to, with `{error}` for the
            error.
    """
    hints = (hint,) if isinstance(hint, str) else tuple(hint)
    return lambda check: Exercise(check, hints, raised)


def in_words(model: str) -> Exercise:
    """Create an exercise for a reason in the reader's own words.

    It is not judged; a model answer is shown for comparison.

    Args:
        model: One or two sentences that would get full marks.
    """

    def reason(answer: Any) -> Verdict:
        if not isinstance(answer, str):
            return wrong("Write a sentence in quotes.", exact=True)
        if not answer.strip():
            return not_answered()
        return Verdict(None, text("Compare with yours: {model}", model=model), exact=True)

    return Exercise(reason, (), "It raised {error}.")


def _error_repr(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # the error's arguments may have methods that raise
        return type(error).__name__


def _own_line(error: Exception, answer: Any) -> str | None:
    """Return the error with the last line of the reader's code that was running, or None.

    Cells run as `__main__`, and `linecache` has their text. If a call does not match the reader's
    function, no line of it runs, so its first line is shown.
    """
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    if not frames and _is_miscalled(error) and inspect.isfunction(function := _unwrap(answer)):
        if function.__module__ == "__main__":
            frames = [(function.__code__.co_filename, function.__code__.co_firstlineno)]
    if not frames:
        return None
    filename, line = frames[-1]
    code = linecache.getline(filename, line).strip()
    message = verbatim(f"{type(error).__name__}: {_first_line(error)}".removesuffix(": "))
    if not code:
        return text("Line {line} of your cell: {error}", line=line, error=message)
    return text(
        "Line {line} of your cell, {code}: {error}", line=line, code=f"`{code}`", error=message
    )


def _is_miscalled(error: Exception) -> bool:
    return type(error) is TypeError and bool(_MISCALLED.search(_first_line(error)))


def _is_from_library(error: Exception) -> bool:
    """Return whether a `raise` statement of the library raised the error.

    Its message then says what to do. An expression of the library that fails, such as `None + 1` in
    a check, has a message of Python's instead.
    """
    if not isinstance(error, ValueError | TypeError):
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    statement = linecache.getline(frame.f_code.co_filename, line)
    return package == "course_lib" and statement.lstrip().startswith("raise ")


def _first_line(error: Exception) -> str:
    try:
        return str(error).strip().partition("\n")[0][:200]
    except Exception:  # the error's arguments may have methods that raise
        return ""


def _unwrap(answer: Any) -> Any:
    try:
        return inspect.unwrap(answer)  # the function inside `functools.cache`
    except Exception:  # the answer's own attributes may raise
        return None


def draw_case(page: Case, draw: Callable[[random.Random], Case]) -> Case:
    """Return the page's case, or another one while notebooks are graded.

    During grading, an answer that only looks up the page's results is therefore wrong. The same
    seed draws the same case.

    Args:
        page: The case of the page, such as a size or the seed of random tensors.
        draw: Function that draws a case for which each right answer is right.
    """
    return draw(random.Random(seed)) if seed else page


def cases(
    page: Sequence[Case], draw: Callable[[random.Random], Case], count: int = 2
) -> list[Case]:
    """Return the page's cases, and `count` more while notebooks are graded (`draw_case`)."""
    return [*page, *draw_case([], lambda rng: [draw(rng) for _ in range(count)])]


def seed_of(page: int) -> int:
    """Return the seed of random tensors: the page's, or a drawn one (`draw_case`)."""
    return draw_case(page, lambda rng: page + rng.randrange(10**6))


def largest_that_fits(
    answer: Any,
    sizes: Sequence[int],
    peak: Callable[[int], int],
    budget_bytes: int,
    not_a_size: str,
) -> tuple[int, int, int | None]:
    """Check that the answer is the largest size whose peak is within the budget.

    Args:
        answer: The reader's answer.
        sizes: Allowed sizes in ascending order.
        peak: Function of a size that returns its peak in bytes.
        budget_bytes: The budget.
        not_a_size: Message if the answer is not one of the sizes.

    Returns:
        The answer, its peak, and the peak of the next size, or None if there is no next size.

    Raises:
        WrongAnswer: The answer is wrong.
    """
    number = _number(answer)
    if number not in sizes:
        raise WrongAnswer(not_a_size, exact=True)
    place = sizes.index(number)
    size, here = sizes[place], peak(sizes[place])
    if here > budget_bytes:
        raise WrongAnswer(
            text("Your size is too large: {size} peaks at {here:,} bytes.", size=size, here=here)
        )
    if place + 1 == len(sizes):
        return size, here, None
    above = peak(sizes[place + 1])
    if above <= budget_bytes:
        raise WrongAnswer(
            text(
                "Your size fits, with a peak of {here:,} bytes, but {next} fits as well, with"
                " {above:,} bytes.",
                here=here,
                next=sizes[place + 1],
                above=above,
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
    in_bytes: bool = False,
) -> Verdict:
    """Check a number. Never raises, whatever the answer is.

    Args:
        answer: A number of any type, including a tensor with one element. `None` and `...` mean
            that the cell is not answered yet.
        expected: The right answer.
        tolerance: Relative tolerance, for the right answer and for the wrong ones.
        wrong_answers: Wrong number -> what went wrong. The verdict is then `exact`.
        why: Why the right answer is right; shown only with it.
        in_bytes: Whether bytes are expected. The right answer in another unit, such as MB or GiB,
            exact or rounded, then gets its own message.
    """
    if answer is None or answer is ...:
        return not_answered()
    number = _number(answer)
    if number is None:
        kind = type(answer).__name__
        return wrong(text("Expected one number, got a `{kind}`.", kind=kind), exact=True)
    if _close(number, expected, max(tolerance, _rounding_error(answer))):
        return right("Right." if why is None else text("Right. {why}", why=why))
    for mistaken, reason in (wrong_answers or {}).items():
        if _close(number, mistaken, tolerance):
            return wrong(text("Not yet. {reason}", reason=reason), exact=True)
    for unit, size in _BYTE_UNITS.items() if in_bytes else ():
        if _close(number * size, expected, 0.01):
            return wrong(text("That is in {unit}. Give bytes.", unit=unit), exact=True)
    return wrong(
        "Not yet. The number is too small."
        if number < expected
        else "Not yet. The number is too large."
    )


def _number(answer: Any) -> Fraction | float | None:
    """Return the answer as a number that can be compared without overflow, or None.

    Infinity stays a float.
    """
    try:
        # a tensor or an array with one element, or a NumPy number
        if hasattr(answer, "item"):
            answer = answer.item()
        if isinstance(answer, bool) or not isinstance(answer, (numbers.Real, Decimal)):
            return None
        if isinstance(answer, numbers.Rational):
            return Fraction(answer.numerator, answer.denominator)
        answer = float(answer)
        if math.isnan(answer):
            return None
        return answer if math.isinf(answer) else Fraction(answer)
    except Exception:  # the answer's own methods may raise, but the reader gets a verdict
        return None


def _rounding_error(answer: Any) -> float:
    """Return the relative error of a number that has fp32's 24 bits, and 0 for other numbers."""
    return 2.0**-23 if str(getattr(answer, "dtype", "")).endswith("float32") else 0.0


def _close(number: Fraction | float, expected: float, tolerance: float) -> bool:
    if isinstance(number, float):  # infinite
        return False
    return abs(number - Fraction(expected)) <= Fraction(tolerance) * abs(Fraction(expected))
