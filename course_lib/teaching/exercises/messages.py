"""Messages of a lesson's exercises, in English and Chinese, from the lesson's `messages.toml`.

A table of this file has the messages of one exercise, or messages that several exercises share:

    [peak_formula.no_inputs]
    en = "You left out the inputs. Each checkpoint keeps the input of its layer."
    zh = "漏掉了输入。每个检查点都保留该层的输入。"

The code refers to a message by its name: `say("peak_formula.no_inputs")`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from course_lib.labels import Label, LabelError, pair, placeholders

from .verdicts import Verdict, WrongAnswer, right


class Messages:
    """Messages of a lesson's exercises, from its `messages.toml`.

    If an instance is named `say`, the call `say("checkpoint.right")` returns a message as a label.
    The name consists of the name of a table in the file, here "checkpoint", and the name of a
    message in this table, here "right".

    Args:
        file: `__file__` of a module in the lesson's folder.

    Raises:
        LabelError: A message is missing in one language, or its placeholders differ between the
            languages.
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
        """Return a message as a label, with values for its placeholders.

        Values without a placeholder in the message are ignored. A call of the instance, such as
        `say(name, n=1)`, raises an error instead.

        Args:
            name: Table and name of the message, such as "checkpoint.right".
            values: Values of the placeholders.
        """
        wanted = placeholders(self._messages[name][0]) if name in self else ()
        return self(name, **{each: values[each] for each in wanted})

    def reasons(self, table: str, mistakes: Mapping[str, Any]) -> dict[float, str]:
        """Return messages about wrong numbers, as a dict from wrong number to message.

        The dict can be passed to `expect_number` as `wrong_answers`.

        Args:
            table: Name of the table with the messages.
            mistakes: Dict from the name of a message to the wrong number that the message explains,
                or to a tuple of wrong numbers. If two messages have the same number, the first one
                is used.
        """
        found: dict[float, str] = {}
        for name, numbers in mistakes.items():
            for number in numbers if isinstance(numbers, tuple) else (numbers,):
                found.setdefault(number, self(f"{table}.{name}"))
        return found

    def right(self, name: str, /, **values: object) -> Verdict:
        """Return a verdict that the answer is right, with a message.

        Args:
            name: Table and name of the message, such as "checkpoint.right".
            values: Values of the message's placeholders.
        """
        return right(self(name, **values))

    def reject(self, name: str, /, **values: object) -> NoReturn:
        """Reject the learner's answer by an error, with a message that names the mistake.

        No hint is shown with the message. The error ends the check, which turns it into a verdict.

        Args:
            name: Table and name of the message, such as "common.kept".
            values: Values of the message's placeholders.

        Raises:
            WrongAnswer: Always.
        """
        raise WrongAnswer(self(name, **values), exact=True)

    def reject_if(self, mistake: object, name: str, /, **values: object) -> None:
        """Reject the learner's answer, as `reject` does, if a condition is true.

        Args:
            mistake: The condition.
            name: Table and name of the message, such as "common.kept".
            values: Values of the message's placeholders.

        Raises:
            WrongAnswer: The condition is true.
        """
        if mistake:
            self.reject(name, **values)

    def wrong(self, name: str, /, *, hint: str | None = None, **values: object) -> NoReturn:
        """Reject the learner's answer by an error, with a message and a hint.

        The error ends the check, which turns it into a verdict.

        Args:
            name: Table and name of the message, such as "common.kept".
            hint: Table and name of the hint. By default, the hint of the exercise is shown.
            values: Values of the message's placeholders.

        Raises:
            WrongAnswer: Always.
        """
        raise WrongAnswer(self(name, **values), hint=None if hint is None else self(hint))


@cache
def read(file: Path) -> dict[str, tuple[str, str]]:
    """Read the messages of a lesson's `messages.toml`.

    Returns:
        Dict from "table.name" to a pair (English, Chinese).

    Raises:
        LabelError: A message is missing in one language, or its placeholders differ between the
            languages.
    """
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
