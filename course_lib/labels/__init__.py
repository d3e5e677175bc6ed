"""The words that code shows, said in English or in Chinese.

Code has them in English alone; the Chinese stands in `zh.toml` beside this file, the only place for
it.

    text("{n:,} tokens", n=1024)  # "1,024 tokens", which can be said in Chinese wherever it goes
    say("peak, MB")               # in the language in force, for plain text
    markup("peak, MB")            # as HTML in both languages; a page shows one of them
    verbatim("sgd")               # the same in both languages, as the name of an option is

A label is found by its English, so it may pass through lists, f-strings and matplotlib. It needs
the standard library alone, since all of the course may import it.
"""

import html
import os
import re
import string
import tomllib
from collections.abc import Iterable
from functools import cache, reduce
from pathlib import Path

LANGUAGES = ("en", "zh", "both")
CATALOG = Path(__file__).parent / "zh.toml"
_MOST_MADE = 4096
# What `text` has made, by its English: what stands in the catalog as it is, and the last of those
# with values.
_fixed: dict[str, "Label"] = {}
_made: dict[str, "Label"] = {}
# None until `choose` is called; then `current` asks the environment each time
_chosen: str | None = None
# The languages of HTML and figures: both, of which a page shows one, until `choose_only`
_shown: tuple[str, ...] = ("en", "zh")

# What is the same in every language: code, math, and placeholders.
_NOT_WORDS = re.compile(r"`[^`]*`|\$[^$]*\$|\{[^{}]*\}|https?://\S+")
# An English word: lower-case letters, perhaps after one capital. `fp32`, `d_model`, `GFLOPs` and
# `x` are none.
_WORD = re.compile(r"(?<![\w.+=/])(?<!\d-)[A-Za-z][a-z]+(?![\w(]|\.\w)")

_HAN = re.compile("[\u3400-\u9fff]")


class LabelError(ValueError):
    """A label that lacks its Chinese, or whose Chinese does not fit it."""


# The language in force
# ------------------------------------------------------------------------------------------------


def choose(default: str) -> str:
    """Set the language of plain text: COURSE_LANG's, or else the default; return it.

    Raises:
        ValueError: the environment variable or `default` is none of the three.
    """
    global _chosen
    _chosen = _from_environment() or _known(default, "default")
    return _chosen


def choose_only(language: str) -> None:
    """Set the language of plain text, HTML and figures alike, for a page in one language alone;
    COURSE_LANG is not asked.

    Raises:
        ValueError: it is neither "en" nor "zh".
    """
    global _chosen, _shown
    if language not in ("en", "zh"):
        raise ValueError(f'language must be "en" or "zh", got {language!r}')
    _chosen, _shown = language, (language,)


def shown() -> tuple[str, ...]:
    """The languages that HTML and figures stand in: ("en", "zh") or one of them."""
    return _shown


def current() -> str:
    """The language in force: "en", "zh" or "both"."""
    return _chosen or _from_environment() or "en"


def _from_environment() -> str | None:
    value = os.environ.get("COURSE_LANG")
    return _known(value, "COURSE_LANG") if value else None


def _known(value: str, name: str) -> str:
    if value not in LANGUAGES:
        raise ValueError(f'{name} must be "en", "zh" or "both", got {value!r}')
    return value


# Labels
# --------------------------------------------------------------------------------------------------


class Label(str):
    """English words that know the template and the values they were made from; a notebook shows
    both languages."""

    template: str
    values: dict[str, object]

    def in_chinese(self) -> str | None:
        """Return the Chinese with the values in it, or None if the template has no Chinese.

        Raises:
            LabelError: a value is English without Chinese, and COURSE_LABELS is "strict".
        """
        zh = catalog().get(self.template)
        if zh is None:
            if is_english(self.template):
                return None
            zh = self.template
        values = {name: self._value(value) for name, value in self.values.items()}
        return zh.format(**values) if values else zh

    def _value(self, value: object) -> object:
        """A value as it appears in the Chinese; without Chinese of its own, the value itself."""
        if value == self or not isinstance(value, str):
            return value
        found = chinese(value)
        if found is None and _is_strict() and is_english(value):
            raise LabelError(
                f"{value!r}, a value of {self.template!r}, has no Chinese: give it an entry in"
                f" {CATALOG.name}, or `verbatim` if it is the same in every language"
            )
        return value if found is None else found

    def _repr_html_(self) -> str:
        return f"<div>{markup(self)}</div>"


class Verbatim(str):
    """Words that are shown as they are in every language; `verbatim` makes them."""


def verbatim(words: object) -> Verbatim:
    """Mark words that have no Chinese on purpose: a file's name, the name of an option, a message
    of Python's."""
    return Verbatim(words)


def text(english: str, /, **values: object) -> Label:
    """A label: English, with values in its placeholders as `str.format` puts them; values may be
    labels themselves.

    Raises:
        LabelError: the placeholders have other names than the values.
    """
    if values and placeholders(english) != set(values):
        raise LabelError(
            f"label {english!r} has placeholders {sorted(placeholders(english))}, but got"
            f" {sorted(values)}"
        )
    if isinstance(english, Label):
        return english
    label = Label(english.format(**values) if values else english)
    label.template, label.values = english, values
    _remember(label)
    return label


def _remember(label: Label) -> None:
    """Words that code has as they are stay known, being as few as the catalog's; others until many
    more were made."""
    if not label.values and label in catalog():
        _fixed[str(label)] = label
        return
    _made.pop(label, None)
    _made[str(label)] = label
    if len(_made) > _MOST_MADE:
        _made.pop(next(iter(_made)), None)


def listed(words: Iterable[object], separator: str = ", ") -> str:
    """Labels in a row; Chinese has its own marks for ", ", "; " and the space between two
    sentences."""
    template = f"{{first}}{separator}{{rest}}"
    items = [str(each) if not isinstance(each, str) else each for each in words]
    return (
        reduce(lambda first, rest: text(template, first=first, rest=rest), items) if items else ""
    )


def _is_strict() -> bool:
    """Whether English that has no Chinese is an error, as where the course is built and tested."""
    return os.environ.get("COURSE_LABELS") == "strict"


def chinese(words: object) -> str | None:
    """The Chinese of a label, of words that `text` has made, or of words that contain such; None if
    there is none.

    Raises:
        LabelError: a value in the label is English without Chinese, and COURSE_LABELS is "strict".
    """
    if not isinstance(words, str):
        return None
    if isinstance(words, Verbatim):
        return words
    made = words if isinstance(words, Label) else _made.get(words) or _fixed.get(words)
    found = made.in_chinese() if made is not None else None
    return found or catalog().get(words) or _piecewise(words)


def both(words: object) -> tuple[str, str]:
    """(English, Chinese) of a label; the English twice where there is no Chinese.

    Raises:
        LabelError: the words, or a value in them, are English without Chinese, and the environment
            variable COURSE_LABELS is "strict". A learner's own labels are not an error, so it is
            set only to build and to test the course.
    """
    words = words if isinstance(words, str) else str(words)
    zh = chinese(words)
    if zh is None and _is_strict() and is_english(words):
        raise LabelError(
            f"{words!r} has no Chinese: give it an entry in {CATALOG.name}, or `backquotes` if it"
            " is code"
        )
    return str(words), str(words) if zh is None else zh


def say(words: object, separator: str = " ") -> str:
    """A label as plain text in the language in force; for both, the English, the separator, the
    Chinese."""
    en, zh = both(words)
    return {"en": en, "zh": zh, "both": en if en == zh else f"{en}{separator}{zh}"}[current()]


def markup(words: object) -> str:
    """HTML of a label, escaped, with `backquotes` as code: an element a language, one above the
    other."""
    en, zh = (re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(each)) for each in both(words))
    if en == zh or _shown == ("en",):
        return en
    if _shown == ("zh",):
        return zh
    # The space keeps the two apart where a viewer strips the styles.
    return (
        f'<span lang="en" style="display: block">{en}</span> <span lang="zh" style="display:'
        f' block">{zh}</span>'
    )


def _piecewise(words: str) -> str | None:
    """The Chinese of words that contain what `text` has made; None if English would be left among
    them."""
    if not is_english(words):  # code, say, where `input` is a name
        return None
    known = (*_fixed.items(), *_made.items())
    inside = {
        en: zh
        for en, made in known
        if en and en in words and en != words and (zh := made.in_chinese())
    }
    if not inside:
        return None
    longest_first = "|".join(map(re.escape, sorted(inside, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![A-Za-z])(?:{longest_first})(?![A-Za-z])")
    return (
        None
        if is_english(pattern.sub(" ", words))
        else pattern.sub(lambda found: inside[found[0]], words)
    )


# The catalog
# --------------------------------------------------------------------------------------------------


def is_english(words: str) -> bool:
    """Whether words want Chinese: they have an English word that is neither code nor `same`, and
    none of Chinese."""
    return not _HAN.search(words) and any(
        word not in same() for word in _WORD.findall(_NOT_WORDS.sub(" ", words))
    )


def placeholders(template: str) -> set[str]:
    """The names in a template's braces."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@cache
def catalog() -> dict[str, str]:
    """English -> Chinese.

    Raises:
        LabelError: an entry stands in two sections, or its Chinese has other placeholders.
    """
    return entries({name: words for name, words in _read().items() if name != "errors"})


@cache
def sentences() -> dict[str, str]:
    """Sentences of errors, which code raises in English -> Chinese; for commands, which say them.

    Raises:
        LabelError: as `catalog` does.
    """
    return entries({"errors": _read()["errors"]})


@cache
def same() -> frozenset[str]:
    """Words that are the same in both languages."""
    return frozenset(_read()["same"])


@cache
def _read() -> dict:
    return tomllib.loads(CATALOG.read_text(encoding="utf-8"))


def entries(sections: dict) -> dict[str, str]:
    """The entries of all sections of a catalog; raises what `catalog` does."""
    found: dict[str, str] = {}
    for section, words in sections.items():
        for en, zh in words.items() if isinstance(words, dict) else ():
            if en in found:
                raise LabelError(f"{en!r} stands in [{section}] and in a section before it")
            if placeholders(en) != placeholders(zh):
                raise LabelError(
                    f"the placeholders of {en!r} in [{section}] are not those of {zh!r}"
                )
            found[en] = zh
    return found
