"""Commands in the reader's language: `Parser` says its help, its usage and its errors through the
catalog."""

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn

from . import both, current, sentences, text, verbatim

# What argparse says itself, as it asks gettext for it.
_OWN = (
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


class Parser(argparse.ArgumentParser):
    """argparse's, whose words are labels: those that it is given, and its own.

    With COURSE_LANG=both it speaks English: a terminal has no room for two.

    Attributes:
        options: names of the options that were added.
    """

    options: list[str]

    def __init__(self, *args: Any, description: str = "", epilog: str = "", **options: Any) -> None:
        try:
            current()
        except ValueError as error:  # no language to say it in: English
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
        with _own_words():
            super().__init__(*args, description=_said(description), epilog=_said(epilog), **options)

    def add_argument(self, *names: str, help: str = "", **options: Any) -> argparse.Action:
        self.__dict__.setdefault("options", []).extend(names)
        return super().add_argument(*names, help=_said(help), **options)

    def parse_args(self, *args: Any, **options: Any) -> argparse.Namespace:
        with _own_words():
            given, others = self.parse_known_args(*args, **options)
            if others:
                self.error(f"unrecognized arguments: {self._explained(others)}")
            return given

    def _explained(self, others: list[str]) -> str:
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
        with _own_words():
            return super().format_help()

    def format_usage(self) -> str:
        with _own_words():
            return super().format_usage()

    def error(self, message: str) -> NoReturn:
        """One line; argparse's own says all options first."""
        sentence = text("error: {sentence} (see --help)", sentence=said_error(message))
        self.exit(2, f"{_said(sentence)}\n")


def said_error(message: str) -> str:
    """Return an error in the reader's language if the catalog has its sentence, else unchanged.

    An error's English is written where it is raised; `zh.toml` has its Chinese under [errors], with
    a placeholder for each value.
    """
    if current() != "zh":
        return verbatim(message)
    if lead := re.match(r"参数 \S+：", message):
        return verbatim(lead[0] + said_error(message[lead.end() :]))
    for pattern, chinese in _patterns():
        if found := pattern.fullmatch(message):
            return verbatim(chinese.format(**found.groupdict()))
    return verbatim(message)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Each sentence under [errors] as a pattern with a group for each value; those with the most
    words of their own first, since a value may be any text."""
    known = sorted(sentences().items(), key=lambda entry: -len(re.sub(r"\{\w+\}", "", entry[0])))
    return [
        (re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(english)), re.S), zh)
        for english, zh in known
    ]


def _said(words: str) -> str:
    return both(words)[1] if current() == "zh" and words else words


@contextmanager
def _own_words() -> Iterator[None]:
    """argparse's own words through the catalog while the block lasts: it looks its `_` up whenever
    it speaks."""
    before = argparse._
    argparse._ = lambda words: _said(words) if words in _OWN else before(words)
    try:
        yield
    finally:
        argparse._ = before
