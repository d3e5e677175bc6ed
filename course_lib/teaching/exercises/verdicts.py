"""Verdicts: the results that a check returns for an answer."""

from dataclasses import dataclass

from course_lib.labels import markup, say, text

_COLORS = {True: "#228833", False: "#EE7733", None: "#777777"}
_MARKS = {True: "✓", False: "✗", None: "→"}
UNANSWERED = "Not answered yet."


@dataclass(frozen=True)
class Verdict:
    """The result of a check, as labels. It displays itself, and is true if the answer is right.

    Args:
        correct: Whether the answer is right; None if it is not judged, such as a reason in words.
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

    If `hint` is given, it replaces the exercise's own hint. If `exact` is true, no hint is added.
    """
    return Verdict(False, message, hint, exact)


def not_answered() -> Verdict:
    """Return the verdict on an unchanged cell, which has no hint."""
    return wrong(UNANSWERED, exact=True)


def returns_none(case: str) -> Verdict:
    """Return the verdict on a function that returns None for `case`, but answers other cases."""
    return wrong(
        text("Your function returns None for {case}. Every branch needs a `return`.", case=case),
        exact=True,
    )


class WrongAnswer(Exception):
    """Error that ends a check with the verdict that `wrong` returns for the same arguments."""

    def __init__(self, message: str, *, hint: str | None = None, exact: bool = False) -> None:
        super().__init__(message)
        self.verdict = wrong(message, hint=hint, exact=exact)
