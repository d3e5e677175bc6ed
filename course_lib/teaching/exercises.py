"""Parts of the lessons' checks: verdicts, and `exercise`, so that no answer makes a check raise."""

import functools
import inspect
import linecache
import math
import numbers
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from course_lib.labels import markup, say, text, verbatim

_COLORS = {True: "#228833", False: "#EE7733", None: "#777777"}
_MARKS = {True: "✓", False: "✗", None: "→"}
_UNANSWERED = "Not answered yet."
_BYTE_UNITS = {
    **{name: 1000**power for power, name in enumerate(("kB", "MB", "GB", "TB"), 1)},
    **{name: 1024**power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
# What Python says of a call that does not fit a function's arguments; other TypeErrors are about
# values.
_MISCALLED = re.compile(
    r"\(\) (takes|missing|got an unexpected keyword|got multiple values|got some positional)"
)


@dataclass(frozen=True)
class Verdict:
    """Answer of a check, in labels; it shows itself, and is true if the answer is right.

    Args:
        correct: None for an answer that nobody judges, such as a reason in the reader's own words.
        hint: said below the message.
        exact: whether the message names the very mistake: no hint of the exercise's goes with it.
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
    """A right answer's verdict."""
    return Verdict(True, message)


def wrong(message: str, *, hint: str | None = None, exact: bool = False) -> Verdict:
    """A wrong answer's; a hint given here goes before the exercise's own, and after an exact
    message there is none."""
    return Verdict(False, message, hint, exact)


def not_answered() -> Verdict:
    """The verdict on a cell that is as it came; no hint goes with it, since nothing has been
    tried."""
    return wrong(_UNANSWERED, exact=True)


class Refused(Exception):
    """Ends a check from within a function that it calls; takes what `wrong` takes."""

    def __init__(self, message: str, *, hint: str | None = None, exact: bool = False) -> None:
        super().__init__(message)
        self.verdict = wrong(message, hint=hint, exact=exact)


class Exercise:
    """A check: takes an answer and returns a `Verdict`, whatever the answer is. `exercise` makes
    it.

    Attributes:
        accepted: whether the last answer was right. A solution asks before it takes the reader's
            names.
        tries: wrong answers in this process that one of its hints was shown with.
    """

    def __init__(self, check: Callable[[Any], Verdict], hints: Sequence[str], raised: str) -> None:
        functools.update_wrapper(self, check)
        self._check, self._hints, self._raised = check, hints, raised
        self.accepted, self.tries = False, 0

    def __call__(self, answer: Any) -> Verdict:
        self.accepted = False
        verdict = self._judged(answer)
        if verdict.message == _UNANSWERED:
            return not_answered()
        if verdict.correct is not False:
            self.accepted = bool(verdict)
            return verdict
        if verdict.hint or verdict.exact:
            return verdict
        self.tries += 1
        return replace(verdict, hint=self._hints[min(self.tries, len(self._hints)) - 1])

    def _judged(self, answer: Any) -> Verdict:
        if answer is None or answer is ...:
            return not_answered()
        try:
            return self._check(answer)
        except Refused as refused:
            return refused.verdict
        except Exception as error:
            if type(error) is NotImplementedError and not error.args:  # a stub's
                return not_answered()
            if (
                type(error) is TypeError
                and not callable(answer)
                and f"{error}".endswith("object is not callable")
            ):
                return wrong(
                    text("A function is wanted; this is a `{kind}`.", kind=type(answer).__name__),
                    exact=True,
                )
            slip = isinstance(error, NameError | SyntaxError) or _is_miscalled(error)
            return wrong(
                _own_line(error, answer) or text(self._raised, error=verbatim(_said(error))),
                exact=slip,
            )


def exercise(
    hint: str | Sequence[str], *, raised: str = "It raised {error}."
) -> Callable[[Callable[[Any], Verdict]], Exercise]:
    """Make the function below it a check, which takes an answer and returns a `Verdict`, whatever
    the answer is.

    The function gets no answer that is `None` or `...`: these are not answered yet. What it raises
    is a wrong answer's, and shows the reader's own line where there is one.

    Args:
        hint: one, or a first and a second: shown with the first wrong answer that takes one, and
            those after it. None is shown before anything was tried, with a message that names the
            mistake (`exact`, or a hint of its own), and with a slip in typing: a name that does not
            exist, a call with other arguments.
        raised: what is said of an exception that no line of the reader's led to, with `{error}` for
            it.
    """
    hints = (hint,) if isinstance(hint, str) else tuple(hint)
    return lambda check: Exercise(check, hints, raised)


def in_words(model: str) -> Exercise:
    """A place for a reason in the reader's own words, which nobody judges: then it shows one, to
    compare.

    Args:
        model: a sentence or two that would get full marks.
    """

    def reason(answer: Any) -> Verdict:
        if not isinstance(answer, str):
            return wrong("Write a sentence, between quotes.", exact=True)
        if not answer.strip():
            return not_answered()
        return Verdict(None, text("Compare with yours: {model}", model=model), exact=True)

    return Exercise(reason, (), "It raised {error}.")


def _said(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # its arguments may be anything
        return type(error).__name__


def _own_line(error: Exception, answer: Any) -> str | None:
    """The error with the line it came from, of those that the reader wrote; None if none of them
    was running.

    Cells run as `__main__`, and `linecache` has their text. A call that does not fit the reader's
    function runs no line of it: its first one is shown.
    """
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    if not frames and _is_miscalled(error) and inspect.isfunction(function := _unwrapped(answer)):
        if function.__module__ == "__main__":
            frames = [(function.__code__.co_filename, function.__code__.co_firstlineno)]
    if not frames:
        return None
    filename, line = frames[-1]
    code = linecache.getline(filename, line).strip()
    said = verbatim(f"{type(error).__name__}: {_first_line(error)}".removesuffix(": "))
    if not code:
        return text("Line {line} of your cell: {error}", line=line, error=said)
    return text(
        "Line {line} of your cell, {code}: {error}", line=line, code=f"`{code}`", error=said
    )


def _is_miscalled(error: Exception) -> bool:
    return type(error) is TypeError and bool(_MISCALLED.search(_first_line(error)))


def _first_line(error: Exception) -> str:
    try:
        return str(error).strip().partition("\n")[0][:200]
    except Exception:  # its arguments may be anything
        return ""


def _unwrapped(answer: Any) -> Any:
    try:
        return inspect.unwrap(answer)  # what `functools.cache` wraps
    except Exception:  # whatever the answer's own attributes do
        return None


def largest_that_fits(
    answer: Any, sizes: Sequence[int], peak: Callable[[int], int], budget_bytes: int, wanted: str
) -> tuple[int, int, int | None]:
    """Check that the answer is the largest of the sizes, in ascending order, whose peak is within
    the budget.

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
    in_bytes: bool = False,
) -> Verdict:
    """Check a number. Never raises for any answer.

    Args:
        answer: a number of any kind, a tensor with one element included; `None` and `...` mean not
            answered yet.
        expected: the right answer.
        tolerance: relative, for the right answer and the wrong ones.
        wrong_answers: wrong number -> what went wrong; the verdict is then `exact`.
        why: why the right answer is right; shown only with it.
        in_bytes: whether bytes are expected. The right answer in another unit, such as MB or GiB,
            rounded or not, is then a mistake with a name.
    """
    if answer is None or answer is ...:
        return not_answered()
    number = _number(answer)
    if number is None:
        kind = type(answer).__name__
        return wrong(text("One number is wanted; this is a `{kind}`.", kind=kind), exact=True)
    if _close(number, expected, tolerance):
        return right("Right." if why is None else text("Right. {why}", why=why))
    for mistaken, reason in (wrong_answers or {}).items():
        if _close(number, mistaken, tolerance):
            return wrong(text("Not yet. {reason}", reason=reason), exact=True)
    for unit, size in _BYTE_UNITS.items() if in_bytes else ():
        if _close(number * size, expected, 0.01):
            return wrong(text("That is in {unit}. Give bytes.", unit=unit), exact=True)
    return wrong("Not yet: too small." if number < expected else "Not yet: too large.")


def _number(answer: Any) -> Fraction | float | None:
    """The answer as a number that can be compared without overflow, or None. Infinity stays a
    float."""
    try:
        # a tensor or an array with one element, or one of numpy's numbers
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
    except Exception:  # whatever the answer's own methods do, the reader gets a verdict
        return None


def _close(number: Fraction | float, wanted: float, tolerance: float) -> bool:
    if isinstance(number, float):  # infinite
        return False
    return abs(number - Fraction(wanted)) <= Fraction(tolerance) * abs(Fraction(wanted))
