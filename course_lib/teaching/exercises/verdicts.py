"""Verdicts of checks on answers."""

from dataclasses import dataclass

from course_lib.labels import markup, say, text

_COLORS = {True: "#228833", False: "#EE7733", None: "#777777"}
_MARKS = {True: "✓", False: "✗", None: "→"}
UNANSWERED = "Not answered yet."


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
    return wrong(UNANSWERED, exact=True)


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
