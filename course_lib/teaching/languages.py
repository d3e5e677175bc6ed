"""Two languages in one notebook: the switch in its first cell, and the words that figures and tables use."""

import html
import os
import re

LANGUAGES = ("en", "zh", "both")
# What stands once per language. Anything else with a `lang` is for every reader: a picture, the switch's own
# labels, a section that is there in English only.
PER_LANGUAGE = ("div", "span", "p", "td", "th", "li", "tr", "details", "figure")
_joined: dict[str, tuple[str, str]] = {}  # "en 中文" -> its two halves, for `parts`
_chosen: str | None = None  # None until `language` is called; then `current` asks the environment each time

# One rule per language hides the other. `.jp-Notebook` is one open notebook (JupyterLab, Notebook 7) or the whole of an
# exported page, so open notebooks do not disturb each other. Only elements inside cells are hidden, because the page
# itself has a `lang`. `:not` keeps a second switch in the same notebook from hiding everything.
_RULE = (
    ".jp-Notebook:has(.course-language input[value={shown}]:checked)"
    ":not(:has(.course-language input:not([value={shown}]):checked)) "
    f".jp-Cell :is({', '.join(PER_LANGUAGE)})"
    "[lang={hidden}] {{ display: none !important; }}"
)
_LOOK = """\
.course-language fieldset { display: flex; flex-wrap: wrap; gap: 0 1.1em; align-items: center;
  border: 0; margin: 0; padding: 0.15em 0;
  font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; color: inherit; }
.course-language label { display: inline-flex; gap: 0.35em; align-items: center; cursor: pointer; opacity: 0.75; }
.course-language label:has(input:checked) { opacity: 1; }
.course-language input { margin: 0; accent-color: var(--jp-brand-color1, #4477aa); }
.course-language input:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
.course-language legend { float: left; padding: 0; opacity: 0.75; }"""
_OPTIONS = (("en", "English"), ("zh", "中文"), ("both", "both 双语"))


class _Switch:
    """The switch as an output: a form in a notebook, one line in a terminal."""

    def __init__(self, chosen: str) -> None:
        self.chosen = chosen

    def __repr__(self) -> str:
        return f"Language 语言: {dict(_OPTIONS)[self.chosen]} (COURSE_LANG=en | zh | both)"

    def _repr_html_(self) -> str:
        # A radio group ends at its <form>, so the name need not differ from notebook to notebook. method="dialog" makes
        # the Enter key do nothing; the data attribute keeps JupyterLab from taking the arrow keys for its own.
        buttons = "\n".join(
            f'<label lang="{value if value in ("en", "zh") else "mul"}"><input type="radio" name="course-language" '
            f'value="{value}" data-lm-suppress-shortcuts="true"{" checked" * (value == self.chosen)}> {words}</label>'
            for value, words in _OPTIONS
        )
        rules = "\n".join(_RULE.format(shown=shown, hidden=hidden) for shown, hidden in (("en", "zh"), ("zh", "en")))
        return (
            '<form class="course-language" method="dialog" autocomplete="off">\n'
            f'<fieldset>\n<legend lang="mul">Language 语言</legend>\n{buttons}\n</fieldset>\n</form>\n'
            f"<style>\n{rules}\n{_LOOK}\n</style>"
        )


def language(default: str = "both") -> None:
    """Show the language switch, and set the language of `text`, figures and plain tables.

    The switch works on the cells of its own notebook, without a kernel. It cannot redraw a figure: figures and plain
    text keep the language they were made in. Without IPython one line is printed instead.

    Args:
        default: "en", "zh" or "both"; the environment variable COURSE_LANG, where set, goes before it.

    Raises:
        ValueError: the environment variable or `default` is none of the three.
    """
    from .alt import show_with_alt_text

    global _chosen
    _chosen = _from_environment() or _known(default, "default")
    switch = _Switch(_chosen)
    try:
        from IPython.display import display
    except ImportError:
        print(switch)
    else:
        display(switch)
        show_with_alt_text()


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
