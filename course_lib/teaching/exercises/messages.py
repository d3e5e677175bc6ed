"""Messages of a lesson's exercises: English beside Chinese, in the lesson's `messages.toml`.

A table is an exercise, or something that several exercises share, and holds messages by name:

    [peak_formula.no_inputs]
    en = "You left out the inputs. Each checkpoint keeps the input of its layer."
    zh = "漏掉了输入。每个检查点都保留该层的输入。"

The code has only the name: `say("peak_formula.no_inputs")`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from course_lib.labels import Label, LabelError, pair, placeholders

from .verdicts import Verdict, WrongAnswer, right


class Messages:
    """Messages of one lesson, found by "table.name". Calling it returns a label.

    Args:
        file: `__file__` of a module in the lesson's folder.

    Raises:
        LabelError: A message lacks a language, or has other placeholders in it.
    """

    def __init__(self, file: str | Path) -> None:
        self._file = Path(file).with_name("messages.toml")
        self._messages = read(self._file)

    def __contains__(self, name: str) -> bool:
        return name in self._messages

    def __call__(self, name: str, /, **values: object) -> Label:
        """Return a message as a label, with values for its placeholders.

        Raises:
            LabelError: There is no such message, or it has other placeholders.
        """
        if name not in self._messages:
            raise LabelError(f"{self._file.parent.name}/{self._file.name} has no message {name!r}")
        return pair(*self._messages[name], **values)

    def fill(self, name: str, /, **values: object) -> Label:
        """Return a message with those of the values that it has placeholders for."""
        wanted = placeholders(self._messages[name][0]) if name in self else ()
        return self(name, **{each: values[each] for each in wanted})

    def reasons(self, table: str, mistakes: Mapping[str, Any]) -> dict[float, str]:
        """Return wrong number -> message, for `expect_number`.

        Args:
            table: Table of the messages.
            mistakes: Name of a message -> the wrong number that it explains, or a tuple of them. If
                two mistakes have the same number, the first one is named.
        """
        found: dict[float, str] = {}
        for name, numbers in mistakes.items():
            for number in numbers if isinstance(numbers, tuple) else (numbers,):
                found.setdefault(number, self(f"{table}.{name}"))
        return found

    def right(self, name: str, /, **values: object) -> Verdict:
        """Return the verdict on a right answer."""
        return right(self(name, **values))

    def refuse(self, name: str, /, **values: object) -> NoReturn:
        """End the check as wrong, with a message that names the precise mistake; no hint follows.

        Raises:
            WrongAnswer: Always.
        """
        raise WrongAnswer(self(name, **values), exact=True)

    def refuse_if(self, mistake: object, name: str, /, **values: object) -> None:
        """Refuse the answer if it has this mistake (`refuse`)."""
        if mistake:
            self.refuse(name, **values)

    def wrong(self, name: str, /, *, hint: str | None = None, **values: object) -> NoReturn:
        """End the check as wrong, with a hint: this message, or else the exercise's own hints.

        Raises:
            WrongAnswer: Always.
        """
        raise WrongAnswer(self(name, **values), hint=None if hint is None else self(hint))


@cache
def read(file: Path) -> dict[str, tuple[str, str]]:
    """Return "table.name" -> (English, Chinese) of a file of messages."""
    found = {}
    for table, messages in tomllib.loads(file.read_text("utf-8")).items():
        for name, message in messages.items():
            place = f"message {table}.{name} of {file.parent.name}"
            if set(message) != {"en", "zh"} or not all(message.values()):
                raise LabelError(f"{place} must have `en` and `zh`, got {sorted(message)}")
            if placeholders(message["en"]) != placeholders(message["zh"]):
                raise LabelError(f"{place} must have the same placeholders in both languages")
            found[f"{table}.{name}"] = (message["en"], message["zh"])
    return found
