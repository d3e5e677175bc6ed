"""Verdicts: the results that a check returns for an answer."""

from dataclasses import dataclass

from course_lib.labels import markup, say, text

_COLORS = {True: "#228833", False: "#EE7733", None: "#777777"}
_MARKS = {True: "✓", False: "✗", None: "→"}
UNANSWERED = "Not answered yet."


@dataclass(frozen=True)
class Verdict:
    """The result of a check, which a notebook displays.

    `bool(verdict)` is True only if the answer is right.

    Args:
        correct: Whether the answer is right. None for an answer that is not judged, such as a
            reason in words.
        message: First line of the verdict, as a label (text with a Chinese translation).
        hint: Label of a hint, shown below the message. None for no hint.
        exact: Whether the message names the precise mistake. If it does, `Exercise` adds no hint.
            Otherwise it adds the hint of the exercise to a wrong verdict without a hint.
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
    """Return a verdict that an answer is right.

    Args:
        message: Text of the verdict, as a label (text with a Chinese translation).
    """
    return Verdict(True, message)


def wrong(message: str, *, hint: str | None = None, exact: bool = False) -> Verdict:
    """Return a verdict that an answer is wrong.

    Args:
        message: First line of the verdict, as a label (text with a Chinese translation).
        hint: Label of a hint, shown instead of the hint of the exercise. None shows the hint of the
            exercise, unless `exact` is true.
        exact: Whether the message names the precise mistake, so that the hint of the exercise is
            not needed.
    """
    return Verdict(False, message, hint, exact)


def not_answered() -> Verdict:
    """Return the verdict "Not answered yet." for a cell that the learner has not changed."""
    return wrong(UNANSWERED, exact=True)


def returns_none(case: str) -> Verdict:
    """Return a verdict on a learner's function that returns None in some, but not all test cases.

    Args:
        case: Label of a case in which the function returns None, such as "k = 3".
    """
    return wrong(
        text("Your function returns None for {case}. Every branch needs a `return`.", case=case),
        exact=True,
    )


class WrongAnswer(Exception):
    """Error that ends a check because the learner's answer is wrong.

    A check may raise it anywhere, instead of returning a verdict. `Exercise` catches the error, and
    returns the verdict in its attribute `verdict`.

    Args:
        message: First line of the verdict, as a label (text with a Chinese translation).
        hint: Label of a hint, shown instead of the hint of the exercise. None shows the hint of the
            exercise, unless `exact` is true.
        exact: Whether the message names the precise mistake, so that the hint of the exercise is
            not needed.
    """

    def __init__(self, message: str, *, hint: str | None = None, exact: bool = False) -> None:
        super().__init__(message)
        self.verdict = wrong(message, hint=hint, exact=exact)
