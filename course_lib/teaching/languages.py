"""Two languages in one notebook: the words that figures, tables and verdicts use."""

import html
import os
import re

LANGUAGES = ("en", "zh", "both")
_joined: dict[str, tuple[str, str]] = {}  # "en 中文" -> its two halves, for `parts`
_chosen: str | None = None  # None until `choose` is called; then `current` asks the environment each time


def choose(default: str) -> str:
    """Set the language of `text`, figures and plain tables: COURSE_LANG's, or else the default; return it.

    Raises:
        ValueError: the environment variable or `default` is none of the three.
    """
    global _chosen
    _chosen = _from_environment() or _known(default, "default")
    return _chosen


def current() -> str:
    """The language in force: "en", "zh" or "both"."""
    return _chosen or _from_environment() or "both"


def text(en: str, zh: str, separator: str = " ") -> str:
    """A label in the current language; for both, "en 中文"."""
    chosen = current()
    if chosen != "both" or en == zh:
        return zh if chosen == "zh" else en
    joined = f"{en}{separator}{zh}"
    _joined[joined] = (en, zh)
    return joined


def parts(words: str) -> tuple[str, str]:
    """(English, Chinese) of words that `text` has made, alone or within longer ones; words of no language are in both.

    So a label that was drawn in both languages can be said in each.
    """
    en = zh = words
    for joined in sorted(filter(words.__contains__, _joined), key=len, reverse=True):
        english, chinese = _joined[joined]
        en, zh = en.replace(joined, english), zh.replace(joined, chinese)
    return en, zh


def label(words: "str | tuple[str, str]", separator: str = " ") -> str:
    """The same for a label that is one string in every language, or an (en, zh) pair.

    Raises:
        ValueError: a tuple that is not a pair.
    """
    return text(*_pair(words), separator) if isinstance(words, tuple) else str(words)


def label_html(words: "str | tuple[str, str]") -> str:
    """HTML of a label, escaped, with `backquotes` as code; a pair gives one element a language, one above the other."""
    if not isinstance(words, tuple):
        return _escape(words)
    en, zh = map(_escape, _pair(words))
    if en == zh:
        return en
    # The space keeps the two apart where a viewer strips the styles.
    return f'<span lang="en" style="display: block">{en}</span> <span lang="zh" style="display: block">{zh}</span>'


def _escape(words: object) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(words)))


def _pair(words: tuple) -> tuple[str, str]:
    if len(words) != 2:
        raise ValueError(f"a label is a string or an (English, Chinese) pair, got a tuple of {len(words)}: {words!r}")
    return str(words[0]), str(words[1])


def _from_environment() -> str | None:
    value = os.environ.get("COURSE_LANG")
    return _known(value, "COURSE_LANG") if value else None


def _known(value: str, name: str) -> str:
    if value not in LANGUAGES:
        raise ValueError(f'{name} is {value!r}, but must be "en", "zh" or "both"')
    return value
