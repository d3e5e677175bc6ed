"""Checks of exercises: `exercise` turns a function into a check that returns a `Verdict`.

A check never raises an error, whatever the answer is.
"""

import functools
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from course_lib.labels import text, verbatim

from .messages import Messages
from .verdicts import UNANSWERED, Verdict, WrongAnswer, not_answered, wrong

# Python's messages for a call that does not match a function's arguments. Other TypeErrors are
# about values.
_MISCALLED = re.compile(
    r"\(\) (takes|missing|got an unexpected keyword|got multiple values|got some positional)"
)


class Exercise:
    """The check of an exercise. Calling it with a learner's answer returns a `Verdict`.

    A call never raises an error, whatever the answer is. The decorator `exercise` creates
    instances.

    Attributes:
        accepted: Whether the last answer was right. The notebook cell with the solution reads this
            attribute, and defines the solution only if it is False.
        tries: Number of wrong answers so far after which a hint of the exercise was shown.
    """

    def __init__(
        self,
        check: Callable[[Any], Verdict],
        hints: Sequence[str],
        raised: Callable[[str], str],
        errors: Mapping[str, str] | None = None,
    ) -> None:
        functools.update_wrapper(self, check)
        self._check, self._hints, self._raised = check, hints, raised
        self._errors = errors or {}
        self.accepted, self.tries = False, 0

    def __call__(self, answer: Any) -> Verdict:
        self.accepted = False
        verdict = self._verdict_on(answer)
        if verdict.message == UNANSWERED:
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
        except WrongAnswer as error:
            return error.verdict
        except Exception as error:
            if type(error) is NotImplementedError and not error.args:  # raised by a stub
                return not_answered()
            for part, message in self._errors.items():
                if part in _first_line(error):
                    return wrong(message, exact=True)
            if (
                type(error) is TypeError
                and not callable(answer)
                and f"{error}".endswith("object is not callable")
            ):
                kind = verbatim(type(answer).__name__)
                return wrong(text("Expected a function, got a `{kind}`.", kind=kind), exact=True)
            mistyped = isinstance(error, NameError | SyntaxError) or _is_miscalled(error)
            return wrong(
                _own_line(error, answer) or self._raised(verbatim(_error_repr(error))),
                exact=mistyped or _is_from_library(error),
            )


def exercise(
    *, errors: Mapping[str, str] | None = None
) -> Callable[[Callable[[Any], Verdict]], Exercise]:
    """Turn a function `check_NAME` into the check of an exercise.

    The resulting check never raises an error. `check_NAME` takes the learner's answer. Its module
    has an instance of `Messages`, named `say`, with the messages of the lesson's `messages.toml`.
    `check_NAME` returns `say.right(...)`, or rejects the answer with `say.reject`, `say.reject_if`
    or `say.wrong`. The table NAME of `messages.toml` has these messages of the check:

    - `hint` is shown after the first wrong answer.
    - `later_hint`, if it exists, is shown after later wrong answers.
    - `raised`, if it exists, is shown after an error. Its placeholder {error} is the error.

    No hint is shown in these cases:

    - The learner has not changed the cell.
    - The message names the mistake (`exact`), or has its own hint.
    - The library raised a ValueError or TypeError.
    - The answer has a typing mistake: a name that does not exist, or a call with wrong arguments.

    The answers None and `...` mean that the learner has not changed the cell, and `check_NAME` is
    not called. If the answer is a function that returns None or `...`, `check_NAME` must return
    `not_answered()`.

    An error counts as a wrong answer. If the error passed through the learner's code, the verdict
    shows the last line of this code instead of the message `raised`. `check_NAME` should compare
    numbers with `expect_number`, because `==` treats True as 1 and raises an error for some arrays.

    Args:
        errors: Dict from a text to the name of a message. If the first line of an error contains
            the text, the message explains the error to the learner. By default, no error is
            explained.
    """
    return lambda check: Exercise(check, *messages_of(check, errors or {}))


def messages_of(
    check: Callable, errors: Mapping[str, str]
) -> tuple[list[str], Callable[[str], str], dict[str, str]]:
    """Return the messages of a check as a tuple (hints, message for errors, explanations).

    The message for errors is a function of an error's text. The explanations are a dict from a text
    to a message. The message explains errors whose first line contains the text.

    Args:
        check: The function `check_NAME` that the decorator `exercise` turns into a check.
        errors: Dict from a text, as in the explanations, to the name of the message.
    """
    say, table = Messages(inspect.getfile(check)), table_of(check)
    hints: list[str] = [say(f"{table}.hint")]
    hints += [say(name) for name in (f"{table}.later_hint",) if name in say]

    def message_for(error: str) -> str:
        if f"{table}.raised" in say:
            return say(f"{table}.raised", error=error)
        return text("It raised {error}.", error=error)

    meanings: dict[str, str] = {part: say(name) for part, name in errors.items()}
    return hints, message_for, meanings


def table_of(check: Callable) -> str:
    """Return the name of the table with a check's messages: NAME for a function `check_NAME`."""
    return check.__name__.removeprefix("_").removeprefix("check_")


def _error_repr(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:  # the error's arguments may have methods that raise
        return type(error).__name__


def error_text(error: Exception) -> str:
    """Describe an error as a label: its type, its message, and the line of the learner's code.

    If the error did not pass through the learner's code, the line is left out.
    """
    message = verbatim(f"{type(error).__name__}: {_first_line(error, 1000)}")
    return _own_line(error, None, 1000) or message


def _own_line(error: Exception, answer: Any, most: int = 200) -> str | None:
    """Return the error with the last line of the learner's code that was running, or None.

    The learner's code runs in the module `__main__`, and `linecache` stores the text of its lines.
    If a call does not match the learner's function, no line of the function runs, so the first line
    of the function is shown.
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
    message = verbatim(f"{type(error).__name__}: {_first_line(error, most)}".removesuffix(": "))
    if not code:
        return text("Line {line} of your cell: {error}", line=line, error=message)
    return text(
        "Line {line} of your cell, {code}: {error}", line=line, code=f"`{code}`", error=message
    )


def _is_miscalled(error: Exception) -> bool:
    return type(error) is TypeError and bool(_MISCALLED.search(_first_line(error)))


def _is_from_library(error: Exception) -> bool:
    """Return whether a `raise` statement of the library raised the error.

    The message of such an error says what to do. If an expression in the library fails instead,
    such as `None + 1` in a check, the message comes from Python.
    """
    if not isinstance(error, ValueError | TypeError):
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    statement = linecache.getline(frame.f_code.co_filename, line)
    return package == "course_lib" and statement.lstrip().startswith("raise ")


def _first_line(error: Exception, most: int = 200) -> str:
    try:
        return str(error).strip().partition("\n")[0][:most]
    except Exception:  # the error's arguments may have methods that raise
        return ""


def _unwrap(answer: Any) -> Any:
    try:
        return inspect.unwrap(answer)  # the function inside `functools.cache`
    except Exception:  # the answer's own attributes may raise
        return None
