"""What the lessons' checks are made of: verdicts, and `exercise`, so that no answer makes a check raise."""

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .languages import label, label_html

Pair = tuple[str, str]
_COLORS = {True: "#228833", False: "#EE7733"}


@dataclass(frozen=True)
class Verdict:
    """What a check says about an answer; it shows itself, and is true if the answer is right."""

    correct: bool
    message: Pair  # (English, Chinese)
    hint: Pair | None = None

    def __bool__(self) -> bool:
        return self.correct

    def __repr__(self) -> str:
        parts = [self._marked()] if self.hint is None else [self._marked(), self._labelled_hint()]
        return "\n".join(label(part, separator="\n") for part in parts)

    def _repr_html_(self) -> str:
        parts = [f"<div>{label_html(self._marked())}</div>"]
        if self.hint is not None:
            parts.append(f'<div style="opacity: 0.8; margin-top: 0.4em">{label_html(self._labelled_hint())}</div>')
        look = f"border-left: 4px solid {_COLORS[self.correct]}; padding: 0.3em 0.8em; max-width: 50em"
        return f'<div class="course-verdict" style="{look}">{"".join(parts)}</div>'

    def _marked(self) -> Pair:
        mark = "✓" if self.correct else "✗"
        return f"{mark} {self.message[0]}", f"{mark} {self.message[1]}"

    def _labelled_hint(self) -> Pair:
        assert self.hint is not None
        return f"Hint: {self.hint[0]}", f"提示：{self.hint[1]}"


def right(en: str, zh: str) -> Verdict:
    return Verdict(True, (en, zh))


def wrong(en: str, zh: str, hint: Pair | None = None) -> Verdict:
    """A hint given here goes before the exercise's own."""
    return Verdict(False, (en, zh), hint)


def not_answered(hint: Pair | None = None) -> Verdict:
    return wrong("Not answered yet.", "还没有作答。", hint)


class Refused(Exception):
    """Ends a check from within a function that it calls; takes what `wrong` takes."""

    def __init__(self, en: str, zh: str, hint: Pair | None = None) -> None:
        super().__init__(en)
        self.verdict = wrong(en, zh, hint)


def exercise(
    hint: Pair, *, raised: Pair = ("It raised {}.", "它抛出了 {}。")
) -> Callable[[Callable[[Any], Verdict]], Callable[[Any], Verdict]]:
    """Make the function below it a check, which takes an answer and returns a `Verdict`, whatever the answer is.

    The function gets no answer that is `None` or `...`: these are not answered yet. What it raises is a wrong answer's.

    Args:
        hint: shown with a wrong answer that is given no hint of its own.
        raised: what is said of an exception, with `{}` for it.
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
                said = _said(error)
                verdict = wrong(raised[0].format(said), raised[1].format(said))
            return verdict if verdict or verdict.hint else replace(verdict, hint=hint)

        return checked

    return made


def _said(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # its arguments may be anything
        return type(error).__name__


def largest_that_fits(
    answer: Any, sizes: Sequence[int], peak: Callable[[int], int], budget_bytes: int, wanted: Pair
) -> tuple[int, int, int | None]:
    """Check that the answer is the largest of the sizes, in ascending order, whose peak is within the budget.

    Returns:
        The answer, its peak, and the peak of the next size, None if there is none.

    Raises:
        Refused: it is not; with `wanted` if it is none of the sizes.
    """
    number = _number(answer)
    if number not in sizes:
        raise Refused(*wanted)
    place = sizes.index(number)
    size, here = sizes[place], peak(sizes[place])
    if here > budget_bytes:
        raise Refused(f"Too large: {size} peaks at {here:,} bytes.", f"太大：取 {size} 时峰值是 {here:,} 字节。")
    if place + 1 == len(sizes):
        return size, here, None
    above = peak(sizes[place + 1])
    if above <= budget_bytes:
        raise Refused(
            f"It fits, at {here:,} bytes, but so does {sizes[place + 1]}, at {above:,}.",
            f"装得下，峰值 {here:,} 字节；但取 {sizes[place + 1]} 也装得下，峰值 {above:,} 字节。",
        )
    return size, here, above


def expect_number(
    answer: Any,
    expected: float,
    *,
    tolerance: float = 0.0,
    wrong_answers: Mapping[float, Pair] | None = None,
    why: Pair | None = None,
    hint: Pair | None = None,
) -> Verdict:
    """Check a number. Never raises for any answer.

    Args:
        answer: a number of any kind, a tensor with one element included; `None` and `...` mean not answered yet.
        expected: the right answer.
        tolerance: relative, for the right answer and the wrong ones.
        wrong_answers: wrong number -> what went wrong, (English, Chinese).
        why: why the right answer is right; shown only with it.
        hint: shown with a wrong answer.
    """
    if answer is None or answer is ...:
        return not_answered(hint)
    number = _number(answer)
    if number is None:
        kind = type(answer).__name__
        return wrong(f"One number is wanted; this is a `{kind}`.", f"需要一个数，这里得到的是 `{kind}`。", hint)
    if _close(number, expected, tolerance):
        return right("Right.", "正确。") if why is None else right(f"Right. {why[0]}", f"正确。{why[1]}")
    for mistaken, reason in (wrong_answers or {}).items():
        if _close(number, mistaken, tolerance):
            return wrong(f"Not yet. {reason[0]}", f"还不对。{reason[1]}", hint)
    if number < expected:
        return wrong("Not yet: too small.", "还不对：太小了。", hint)
    return wrong("Not yet: too large.", "还不对：太大了。", hint)


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
