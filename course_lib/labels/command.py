"""Command lines in the user's language: `Parser` translates help, usage and errors.

`run_command` runs a command's `main` function and ends the process with its exit status.
"""

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

# argparse's own texts that are translated. argparse passes each of them to gettext.
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


# Text that may precede an error message: the name of an option, or the number of a system error.
_LEAD = re.compile(r"参数 \S+：|\[Errno \d+\] ")
# Place in the user's code, as `course_lib._origin` adds it to a message.
_PLACE = r"[^()]+?, line \d+(?:, in \S+)?"
_PLACE_AT_END = re.compile(rf" \(({_PLACE})\)$")
_CJK = "[\u3000-\u9fff\uff00-\uffef]"
# Descriptions of objects, as `course_lib._check.describe` writes them, and numbers of bytes.
_DESCRIPTIONS = (
    (
        re.compile(r"\ban? (\w+) of shape (\([\d, ]*\)) and (\S+?)(?=,|$)"),
        r"形状为 \2、dtype 为 \3 的 \1",
    ),
    (re.compile(r"\bthe class (?=\w+$)"), "类 "),
    (re.compile(r"([\d,]+) bytes \(([\d,.]+ MB)\)"), r"\1 字节（\2）"),
    (re.compile(r"([\d,]+) bytes"), r"\1 字节"),
    (re.compile(r"\ban? (?=\w+$)"), ""),
)

# Exit status that a shell shows for a process that the signal SIGPIPE has ended.
CLOSED_PIPE = 128 + 13


class Parser(argparse.ArgumentParser):
    """Argument parser whose help, usage and errors are in the user's language.

    Both argparse's own text and the help text that is passed to the parser are translated. If the
    environment variable COURSE_LANG is "both", all text is in English, because text in two
    languages needs too much space in a terminal.

    Attributes:
        options: Names of the arguments that were added, such as "--device".
    """

    options: list[str]

    def __init__(self, *args: Any, description: str = "", epilog: str = "", **options: Any) -> None:
        try:
            current()
        except ValueError as error:  # COURSE_LANG is invalid, so the error is in English
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None
        with _translated_argparse():
            super().__init__(
                *args, description=_translate(description), epilog=_translate(epilog), **options
            )
        # A value such as -5GB must not be parsed as an option, so that the check of the option's
        # value rejects it.
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
        """Return the unknown arguments as a string, with a suggestion for the first one."""
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
        """Print the help to `file`, by default to standard output.

        Unlike argparse, the method raises an error if the help cannot be written.
        """
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Print an error message in one line, and exit with status 2.

        Unlike argparse, the method does not print the list of all options.
        """
        sentence = text("error: {sentence} (see --help)", sentence=translated_error(message))
        self.exit(2, f"{_translate(sentence)}\n")


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with the command's exit status.

    If the program that reads the command's output has closed the pipe, the exit status is 141 and
    nothing is printed. If the output cannot be written for another reason, the exit status is 1 and
    one line is printed to standard error. After Ctrl-C the exit status is 130.

    Args:
        main: Function that runs the command. It returns the exit status, or None for status 0.
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
        # An error with a file name is not an error of writing the output.
        if error.filename is not None:
            raise
        sentence = text("error: the output cannot be written ({reason})", reason=verbatim(error))
        sys.stderr.write(f"{_translate(sentence)}\n")
        status = 1
        _discard_output()
    sys.exit(status)


def _discard_output() -> None:
    """Discard output that is not written yet, which Python would otherwise try to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def translated_error(message: str) -> str:
    """Return an error message in Chinese if the current language is "zh", otherwise unchanged.

    The Chinese is read from the section [errors] of `zh.toml`, whose entries have placeholders for
    the values in a message. A message that is not in this section is returned unchanged.
    """
    if current() != "zh":
        return verbatim(message)
    if lead := _LEAD.match(message):
        return verbatim(lead[0] + translated_error(message[lead.end() :]))
    if place := _PLACE_AT_END.search(message):
        message, end = message[: place.start()], message[place.start() :]
        found = _sentence_in_chinese(message)
        return verbatim(found + _place_in_chinese(place[1]) if found else message + end)
    return verbatim(_sentence_in_chinese(message) or message)


def _sentence_in_chinese(message: str) -> str | None:
    """Return an error message, or a part of one, in Chinese; None if there is no translation."""
    for pattern, chinese in _patterns():
        if found := pattern.fullmatch(message):
            values = {}
            for name, value in found.groupdict().items():
                value = _value_in_chinese(name, value)
                # No space is needed between Chinese text and a value that is Chinese.
                if re.match(_CJK, value):
                    chinese = re.sub(rf"(?<={_CJK}) \{{{name}\}}", f"{{{name}}}", chinese)
                if re.match(_CJK, value[-1:]):
                    chinese = re.sub(rf"\{{{name}\}} (?={_CJK})", f"{{{name}}}", chinese)
                values[name] = value
            return chinese.format(**values)
    return None


def _value_in_chinese(name: str, value: str) -> str:
    """Return a placeholder's value in Chinese, or unchanged if the library has no translation.

    The value may itself be an entry of the catalog's [errors], such as the advice in a message.
    """
    if name == "place":
        return _place_in_chinese(value)
    if name == "options":
        return value.replace(", ", "、").replace(" or ", " 或 ")
    # In a message, the advice can begin a sentence. Its first letter is then a capital, unlike in
    # the catalog.
    found = _sentence_in_chinese(value) or _sentence_in_chinese(value[:1].lower() + value[1:])
    if found is not None:
        return found
    for pattern, chinese in _DESCRIPTIONS:
        value = pattern.sub(chinese, value)
    return value


def _place_in_chinese(place: str) -> str:
    """Return a place in the user's code, such as "mine.py, line 5, in loss", in Chinese."""
    found = re.fullmatch(r"(?: at )?(.+), line (\d+)(?:, in (\S+))?", place)
    within = f"，{found[3]}" if found and found[3] else ""
    return f"（{found[1]} 第 {found[2]} 行{within}）" if found else place


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return a pair (pattern, Chinese text) for each error message in the catalog's [errors].

    A pattern matches the English message, and has one group per placeholder. {options} matches an
    enumeration such as "'none' or 'layers'", without English words. {number} matches an integer.
    {place} matches "" or a place in the user's code, such as " at mine.py, line 5, in loss". Any
    other placeholder matches any text.

    Messages with the most fixed text come first. The pattern of a message with little fixed text
    also matches many other messages.
    """
    templates = sorted(
        sentences().items(), key=lambda entry: -len(re.sub(r"\{\w+\}", "", entry[0]))
    )
    return [
        (re.compile(re.sub(r"\\\{(\w+)\\\}", _group_pattern, re.escape(english)), re.S), zh)
        for english, zh in templates
    ]


def _group_pattern(placeholder: re.Match[str]) -> str:
    """Return a regular expression for the value of a placeholder."""
    one = r"(?:'[^']*'(?: \(\w+\))?|-?\d[\w.]*|None|True|False|torch\.\w+)"
    values = {
        "options": rf"(?:{one}, )*{one}(?: or {one})?",
        "number": r"-?\d+",
        "place": rf"(?: at {_PLACE})?",
        "shape": r"(?:\([\d, ]*\)|.+?)",
    }
    return f"(?P<{placeholder[1]}>{values.get(placeholder[1], '.+?')})"


def _translate(words: str) -> str:
    """Return the Chinese of a label if the language is Chinese, otherwise the label itself."""
    return in_both_languages(words)[1] if current() == "zh" and words else words


@contextmanager
def _translated_argparse() -> Iterator[None]:
    """Translate argparse's own text inside a `with` block.

    argparse calls `argparse._`, its name for gettext, each time that it shows a text.
    """
    gettext = argparse._
    argparse._ = lambda words: _translate(words) if words in _ARGPARSE_TEXTS else gettext(words)
    try:
        yield
    finally:
        argparse._ = gettext
