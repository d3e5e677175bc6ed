"""Labels: the text that the course's code shows, in English or in Chinese.

The code contains only the English. The Chinese is in `zh.toml` next to this file, except for the
messages of exercises, which are in both languages in their lesson's `messages.toml`
(`course_lib.teaching`).

    text("{n:,} tokens", n=1024)  # "1,024 tokens", a string that can be translated later
    say("peak (MB)")              # plain text in the current language
    markup("peak (MB)")           # HTML in both languages; a page shows one of them
    verbatim("sgd")               # the same in both languages, such as the name of an option

A label is found by its English text, so it is still translated after an f-string or matplotlib has
turned it into an ordinary string. This module imports only the standard library, because every part
of the course may import it.
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
# File next to the learner's lessons. It contains the language that the learner chose, for example
# with `make lab LANGUAGE=zh`.
SETTING = Path(".course-language")
CATALOG = Path(__file__).parent / "zh.toml"
_MAX_MADE = 4096
# Both dicts map an English text to its label. `_fixed` has each label without placeholders whose
# Chinese text is in the catalog or was passed with the label. `_made` has the newest other labels,
# at most `_MAX_MADE`.
_fixed: dict[str, "Label"] = {}
_made: dict[str, "Label"] = {}
# Current language. It is None until `choose` or `choose_only` is called, and until then `current`
# reads the environment.
_chosen: str | None = None
# Languages in which HTML and figures are written. If there are two languages, the page's switch
# hides one of them. After `choose_only` there is only one language.
_shown: tuple[str, ...] = ("en", "zh")

# Text that is the same in every language: code, math, placeholders and addresses.
_NOT_WORDS = re.compile(r"`[^`]*`|\$[^$]*\$|\{[^{}]*\}|https?://\S+")
# An English word: at least two letters, of which only the first can be a capital. `fp32`,
# `d_model`, `GFLOPs` and `x` are not words.
_WORD = re.compile(r"(?<![\w.+=/])(?<!\d-)[A-Za-z][a-z]+(?![\w(]|\.\w)")

_HAN = re.compile("[\u3400-\u9fff]")


class LabelError(ValueError):
    """Error in a label or in its translation.

    The error is raised in three cases:

    - A Chinese translation is missing.
    - A label's English text and its Chinese translation have different placeholders, or the names
      of the given values are not those of the placeholders.
    - Two sections of `zh.toml` contain the same English text.
    """


# The current language
# ------------------------------------------------------------------------------------------------


def choose(default: str) -> str:
    """Set the language of plain text, and return this language.

    The language is the user's setting, which `user_language` returns. Without a setting, the
    language is `default`.

    Args:
        default: Language if the user has no setting: "en", "zh" or "both".

    Raises:
        ValueError: The setting or `default` is not "en", "zh" or "both".
    """
    global _chosen
    _chosen = user_language() or _checked_language(default, "default")
    return _chosen


def user_language() -> str | None:
    """Return the language that the user has set ("en", "zh" or "both"), or None without a setting.

    The environment variable COURSE_LANG is read first. If it is not set, the language is read from
    the file `.course-language` in the working directory.

    Raises:
        ValueError: The setting is not "en", "zh" or "both".
    """
    if chosen := _from_environment():
        return chosen
    if SETTING.is_file():
        return _checked_language(SETTING.read_text(encoding="utf-8").strip(), str(SETTING))
    return None


def choose_only(language: str) -> None:
    """Write plain text, HTML and figures in a single language from now on.

    Call this function for a page without a language switch. The language overrides the environment
    variable COURSE_LANG.

    Args:
        language: "en" or "zh".

    Raises:
        ValueError: The language is neither "en" nor "zh".
    """
    global _chosen, _shown
    if language not in ("en", "zh"):
        raise ValueError(f'language must be "en" or "zh", got {language!r}')
    _chosen, _shown = language, (language,)


def shown_languages() -> tuple[str, ...]:
    """Return the languages in which HTML and figures are written.

    The result is ("en", "zh"), ("en",) or ("zh",).
    """
    return _shown


def current() -> str:
    """Return the current language of plain text: "en", "zh" or "both".

    The result is the language that `choose` or `choose_only` has set. Before that, it is the value
    of the environment variable COURSE_LANG, or "en" if the variable is not set.
    """
    return _chosen or _from_environment() or "en"


def _from_environment() -> str | None:
    """Return the language in the environment variable COURSE_LANG, or None if it is not set."""
    value = os.environ.get("COURSE_LANG")
    return _checked_language(value, "COURSE_LANG") if value else None


def _checked_language(value: str, name: str) -> str:
    """Return `value` if it is a known language, or raise a ValueError that names the setting."""
    if value not in LANGUAGES:
        raise ValueError(f'{name} must be "en", "zh" or "both", got {value!r}')
    return value


# Labels
# --------------------------------------------------------------------------------------------------


class Label(str):
    """English text that can be translated into Chinese later.

    A notebook shows a label in both languages, unless `choose_only` was called.

    Attributes:
        template: English text with placeholders as for `str.format`. The label itself, as a string,
            is the template with the values filled in.
        values: Dict from the name of a placeholder to its value.
        own_chinese: Chinese text of the template, for a label that `pair` created. None for other
            labels, whose Chinese is in the catalog, `zh.toml`.
    """

    template: str
    values: dict[str, object]
    own_chinese: str | None = None

    def in_chinese(self) -> str | None:
        """Return the Chinese text with the values filled in, or None if there is no translation.

        Raises:
            LabelError: The value of a placeholder is English text without a Chinese translation,
                and the environment variable COURSE_LABELS is "strict".
        """
        zh = self.own_chinese or catalog().get(self.template)
        if zh is None:
            if is_english(self.template):
                return None
            zh = self.template
        values = {name: self._translated_value(value) for name, value in self.values.items()}
        return zh.format(**values) if values else zh

    def _translated_value(self, value: object) -> object:
        """Return a placeholder's value in Chinese, or unchanged if there is no translation."""
        if value == self or not isinstance(value, str):
            return value
        found = chinese(value)
        if found is None and _is_strict() and is_english(value):
            raise LabelError(
                f"{value!r}, the value of a placeholder in {self.template!r}, must have a Chinese"
                f" translation: add an entry to {CATALOG.name}, or use `verbatim` for text that is"
                " the same in every language"
            )
        return value if found is None else found

    def _repr_html_(self) -> str:
        return f"<div>{markup(self)}</div>"


class Verbatim(str):
    """Text that is the same in every language, such as a file name. Use `verbatim` to create it."""


def verbatim(words: object) -> Verbatim:
    """Mark text as the same in every language, such as a file name, an option or a Python error."""
    return Verbatim(words)


def text(english: str, /, **values: object) -> Label:
    """Create a label from English text, whose Chinese translation is in the catalog, `zh.toml`.

    Args:
        english: English text, with placeholders as for `str.format`.
        values: Values of the placeholders, which may be labels themselves.

    Raises:
        LabelError: Values are given, but their names are not the names of the placeholders.
    """
    if values and placeholders(english) != set(values):
        raise LabelError(
            f"label {english!r} has placeholders {sorted(placeholders(english))}, but got"
            f" {sorted(values)}"
        )
    return english if isinstance(english, Label) else _made_label(english, values)


def pair(english: str, chinese: str, /, **values: object) -> Label:
    """Create a label from an English and a Chinese text that are not in the catalog, `zh.toml`.

    An example is a message from the `messages.toml` of a lesson.

    Args:
        english, chinese: The text in both languages, with the same placeholders.
        values: Values of the placeholders, which may be labels themselves.

    Raises:
        LabelError: The two texts do not have the same placeholders, or the names of the values are
            not those of the placeholders.
    """
    if not placeholders(english) == placeholders(chinese) == set(values):
        raise LabelError(
            f"the placeholders of message {english!r} must be the same in English, in Chinese and"
            f" in the values, got {sorted(placeholders(english))} in English,"
            f" {sorted(placeholders(chinese))} in Chinese and {sorted(values)} in the values"
        )
    return _made_label(english, values, chinese)


def _made_label(english: str, values: dict[str, object], zh: str | None = None) -> Label:
    """Create and store a label. `zh` is the Chinese text of a label that is not in the catalog."""
    label = Label(english.format(**values) if values else english)
    label.template, label.values, label.own_chinese = english, values, zh
    _remember(label)
    return label


def _remember(label: Label) -> None:
    """Store a label, so that `chinese` finds it by its English text.

    Labels without placeholders that have a Chinese text are always kept, because they are few. Only
    the newest `_MAX_MADE` of all other labels are kept.
    """
    if not label.values and (label.own_chinese or label in catalog()):
        _fixed[str(label)] = label
        return
    _made.pop(label, None)
    _made[str(label)] = label
    if len(_made) > _MAX_MADE:
        _made.pop(next(iter(_made)), None)


def join_labels(words: Iterable[object], separator: str = ", ") -> str:
    """Join labels into one label, such as "forward, backward".

    Args:
        words: Labels or other objects. Objects that are not strings are converted to strings. If
            there are no words, the result is "".
        separator: English text between two labels. For each separator, the catalog, `zh.toml`, must
            have an entry for the whole pattern, such as "{first}, {rest}" for the separator ", ".
    """
    template = f"{{first}}{separator}{{rest}}"
    items = [str(each) if not isinstance(each, str) else each for each in words]
    return (
        reduce(lambda first, rest: text(template, first=first, rest=rest), items) if items else ""
    )


def _is_strict() -> bool:
    """Return whether missing Chinese is an error, as in builds and tests of the course."""
    return os.environ.get("COURSE_LABELS") == "strict"


def chinese(words: object) -> str | None:
    """Return the Chinese translation of a label, or of a string that contains labels.

    Returns:
        The Chinese text. None if there is no translation, or if `words` is not a string.

    Raises:
        LabelError: The value of a placeholder is English text without a Chinese translation, and
            the environment variable COURSE_LABELS is "strict".
    """
    if not isinstance(words, str):
        return None
    if isinstance(words, Verbatim):
        return words
    if isinstance(words, Label):
        made = words
    elif words in catalog():
        # The catalog is searched before `_made`. A label in `_made` whose placeholder holds a
        # `verbatim` value can by chance have the same English text as an entry of the catalog. But
        # that label's Chinese text would contain the value in English.
        return catalog()[words]
    else:
        made = _made.get(words) or _fixed.get(words)
    found = made.in_chinese() if made is not None else None
    return found or catalog().get(words) or _translate_labels_in(words)


def in_both_languages(words: object) -> tuple[str, str]:
    """Return the English and the Chinese text of a label as a pair.

    If there is no Chinese translation, both items of the pair are the English text, because a
    learner may write labels without Chinese. If the environment variable COURSE_LABELS is "strict",
    a missing translation is an error instead. Builds and tests of the course set this variable.

    Raises:
        LabelError: COURSE_LABELS is "strict", and the label, or the value of one of its
            placeholders, is English text without a Chinese translation.
    """
    words = words if isinstance(words, str) else str(words)
    zh = chinese(words)
    if zh is None and _is_strict() and is_english(words):
        raise LabelError(
            f"{words!r} must have a Chinese translation: add an entry to {CATALOG.name}. If the"
            " text is code, write it between backquotes instead, such as `x.grad`"
        )
    return str(words), str(words) if zh is None else zh


def say(words: object, separator: str = " ") -> str:
    """Return a label as plain text in the current language (see `current`).

    If the current language is "both", the result is the English text, the separator and the Chinese
    text. If both texts are equal, the result is the text once.
    """
    en, zh = in_both_languages(words)
    return {"en": en, "zh": zh, "both": en if en == zh else f"{en}{separator}{zh}"}[current()]


def markup(words: object) -> str:
    """Return a label as escaped HTML. Text between `backquotes` is shown as code.

    If the English and Chinese texts differ and the page has both (see `shown_languages`), the HTML
    has one element per language, one above the other. The language switch of the page can hide one
    of them.
    """
    en, zh = (
        re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(each))
        for each in in_both_languages(words)
    )
    if en == zh or _shown == ("en",):
        return en
    if _shown == ("zh",):
        return zh
    # The space separates the two languages if a viewer of the notebook removes the styles.
    return (
        f'<span lang="en" style="display: block">{en}</span> <span lang="zh" style="display:'
        f' block">{zh}</span>'
    )


def _translate_labels_in(words: str) -> str | None:
    """Return `words` in Chinese, with each label in it translated.

    Returns:
        The string, or None if it contains no label or if English words would remain.
    """
    if not is_english(words):  # in code, a name such as `input` is not translated
        return None
    stored = (*_fixed.items(), *_made.items())
    inside = {
        en: zh
        for en, made in stored
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
    """Return whether a text is English that needs a Chinese translation.

    This is the case if the text has no Chinese character and at least one English word that must be
    translated. Code needs no translation, nor do the words that `same` lists, such as Adam.
    """
    return not _HAN.search(words) and any(
        word not in same() for word in _WORD.findall(_NOT_WORDS.sub(" ", words))
    )


def placeholders(template: str) -> set[str]:
    """Return the names of the placeholders in a template, such as {"n"} for "{n} tokens"."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@cache
def catalog() -> dict[str, str]:
    """Return the translations of labels in `zh.toml`, as a dict from English to Chinese.

    Error messages are not included; see `sentences`.

    Raises:
        LabelError: Two sections of the file contain the same English text, or a Chinese text does
            not have the placeholders of its English text.
    """
    return entries({name: words for name, words in _read_catalog().items() if name != "errors"})


@cache
def sentences() -> dict[str, str]:
    """Return the translations of error messages in `zh.toml`, as a dict from English to Chinese.

    Command-line programs use this dict to translate the errors that they print.

    Raises:
        LabelError: A Chinese text does not have the placeholders of its English text.
    """
    return entries({"errors": _read_catalog()["errors"]})


@cache
def same() -> frozenset[str]:
    """Return the English words that stay in English in Chinese text, such as Adam or Llama."""
    return frozenset(_read_catalog()["same"])


@cache
def _read_catalog() -> dict:
    """Return the content of the catalog's file, by section."""
    return tomllib.loads(CATALOG.read_text(encoding="utf-8"))


def entries(sections: dict) -> dict[str, str]:
    """Merge the sections of a catalog of translations into one dict from English to Chinese.

    Args:
        sections: Dict from the name of a section to its dict from English to Chinese. Entries that
            are not dicts are ignored.

    Raises:
        LabelError: Two sections contain the same English text, or a Chinese text does not have the
            placeholders of its English text.
    """
    found: dict[str, str] = {}
    for section, words in sections.items():
        for en, zh in words.items() if isinstance(words, dict) else ():
            if en in found:
                raise LabelError(
                    f"{en!r} must be in one section only, got it in [{section}] and in an earlier"
                    " section"
                )
            if placeholders(en) != placeholders(zh):
                raise LabelError(
                    f"{en!r} in [{section}] and its translation {zh!r} must have the same"
                    " placeholders"
                )
            found[en] = zh
    return found
