"""Command lines in the reader's language: `Parser` translates help, usage and errors."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

from . import current, in_both_languages, sentences, text, verbatim

# argparse's own texts that are translated; argparse passes each of them to gettext
_ARGPARSE_TEXTS = (
    "usage: ",
    "options",
    "positional arguments",
    "show this help message and exit",
    "argument %(argument_name)s: %(message)s",
    "expected one argument",
    "invalid %(type)s value: %(value)r",
    "invalid choice: %(value)r (choose from %(choices)s)",
    "the following arguments are required: %s",
)


# Exit status that a shell shows for a process that the signal SIGPIPE has ended.
CLOSED_PIPE = 128 + 13


class Parser(argparse.ArgumentParser):
    """An argparse parser that translates argparse's own text and the help that is passed to it.

    With COURSE_LANG=both all text is in English, because a terminal has no room for two languages.

    Attributes:
        options: Names of the options that were added.
    """

    options: list[str]

    def __init__(self, *args: Any, description: str = "", epilog: str = "", **options: Any) -> None:
        try:
            current()
        except ValueError as error:  # the language is unknown, so this is in English
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
        with _translated_argparse():
            super().__init__(
                *args, description=_translate(description), epilog=_translate(epilog), **options
            )
        # A value such as -5GB is refused by its own check, and not taken for an option.
        self._negative_number_matcher = re.compile(r"-\d")

    def add_argument(self, *names: str, help: str = "", **options: Any) -> argparse.Action:
        self.__dict__.setdefault("options", []).extend(names)
        return super().add_argument(*names, help=_translate(help), **options)

    def parse_args(self, *args: Any, **options: Any) -> argparse.Namespace:
        with _translated_argparse():
            parsed, others = self.parse_known_args(*args, **options)
            if others:
                self.error(f"unrecognized arguments: {self._with_suggestion(others)}")
            return parsed

    def _with_suggestion(self, others: list[str]) -> str:
        """Return the arguments that belong to no option, with a suggestion for the first one."""
        words, first = " ".join(others), others[0]
        if not first.startswith("-"):
            is_config = first.endswith(".json") and "--config" in self.options
            meant = f"--config {first}" if is_config else ""
        else:
            near = get_close_matches(first.partition("=")[0], self.options, 1)
            meant = "".join(near)
        return f"{words}; did you mean {meant}?" if meant else words

    def format_help(self) -> str:
        with _translated_argparse():
            return super().format_help()

    def format_usage(self) -> str:
        with _translated_argparse():
            return super().format_usage()

    def print_help(self, file: Any = None) -> None:
        """Print the help, and raise an error if it cannot be written; argparse would ignore it."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Print the error in one line; argparse would print all options first."""
        sentence = text("error: {sentence} (see --help)", sentence=translated_error(message))
        self.exit(2, f"{_translate(sentence)}\n")


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit status.

    If the reader of its output has closed the pipe, the command ends without a message, as other
    commands do. If the output cannot be written, it prints one line.
    """
    status: Any = 1
    try:
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = CLOSED_PIPE
        _discard_output()
    except OSError as error:
        # An error that names a file is not about the output.
        if error.filename is not None:
            raise
        sentence = text("error: the output cannot be written ({reason})", reason=verbatim(error))
        sys.stderr.write(f"{_translate(sentence)}\n")
        status = 1
        _discard_output()
    sys.exit(status)


def _discard_output() -> None:
    """Discard the output that is not written yet; Python would try to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def translated_error(message: str) -> str:
    """Return an error in the reader's language if the catalog has its sentence, else unchanged.

    An error's English is written where it is raised; `zh.toml` has its Chinese under [errors], with
    a placeholder for each value.
    """
    if current() != "zh":
        return verbatim(message)
    if lead := re.match(r"参数 \S+：", message):
        return verbatim(lead[0] + translated_error(message[lead.end() :]))
    for pattern, chinese in _patterns():
        if found := pattern.fullmatch(message):
            return verbatim(chinese.format(**found.groupdict()))
    return verbatim(message)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return each sentence under [errors] as (pattern with one group per value, Chinese).

    Sentences with the most fixed text come first. A sentence with little fixed text matches many
    messages, because a placeholder matches any text.
    """
    templates = sorted(
        sentences().items(), key=lambda entry: -len(re.sub(r"\{\w+\}", "", entry[0]))
    )
    return [
        (re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(english)), re.S), zh)
        for english, zh in templates
    ]


def _translate(words: str) -> str:
    return in_both_languages(words)[1] if current() == "zh" and words else words


@contextmanager
def _translated_argparse() -> Iterator[None]:
    """Translate argparse's own text inside the block.

    argparse calls `argparse._`, its name for gettext, each time that it shows a text.
    """
    gettext = argparse._
    argparse._ = lambda words: _translate(words) if words in _ARGPARSE_TEXTS else gettext(words)
    try:
        yield
    finally:
        argparse._ = gettext
