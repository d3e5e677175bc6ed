"""How figures are shown: drawn once in each language from the same data, as two pictures of which a page shows one.

JupyterLab shows a picture's bytes without any alt text, whatever the output's metadata say, and so does nbconvert's
own template. An `<img>` in HTML keeps its alt in both, and on a Sphinx page too: so that is how figures are shown.
"""

import html
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .alt import alt_text, in_language

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Picture:
    """A figure in one language, as it is stored in a notebook's output."""

    png: str  # base64
    alt: str


def show_in_both_languages() -> None:
    """From now on figures are shown in notebooks as two pictures with alt texts. Without IPython nothing happens."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.display_formatter.ipython_display_formatter.for_type_by_name("matplotlib.figure", "Figure", show)


def show(drawn: "Figure") -> None:
    """Instead of IPython's own PNG, not beside it: once more would make the notebook larger by half."""
    from IPython.core.pylabtools import print_figure
    from IPython.display import display

    found = []
    for language, words in zip(LANGUAGES, description(drawn), strict=True):
        with drawn_in(drawn, language):
            png = print_figure(drawn, base64=True)
        if png:  # None for a figure without axes
            picture = f'<img alt="{html.escape(words)}" src="data:image/png;base64,{png}">'
            found.append(f'<figure lang="{language}" style="margin: 0">{picture}</figure>')
    bundle = {"text/plain": repr(drawn)}
    display({**bundle, "text/html": "\n".join(found)} if found else bundle, raw=True)


def description(drawn: "Figure") -> tuple[str, str]:
    """A figure's alt text, (English, Chinese)."""
    with drawn_in(drawn, "zh"):
        chinese = alt_text(drawn, "zh")
    return alt_text(drawn, "en"), chinese


def pictures_in(markup: str) -> dict[str, Picture]:
    """The pictures that an output's HTML consists of, by language; none in any other HTML."""
    one = r'<figure lang="(\w+)" style="margin: 0"><img alt="([^"]*)" src="data:image/png;base64,([^"]*)"></figure>\s*'
    if not re.fullmatch(f"(?:{one})+", markup):
        return {}
    return {language: Picture(png, html.unescape(alt)) for language, alt, png in re.findall(one, markup)}


@contextmanager
def drawn_in(drawn: "Figure", language: str) -> Iterator[None]:
    """All words of a figure in one language, while the block lasts; it is drawn with English ones.

    Raises:
        ValueError: the language is neither "en" nor "zh".
        LabelError: a label lacks its Chinese, as `course_lib.labels.both` has it.
    """
    if language not in LANGUAGES:
        raise ValueError(f'a figure is drawn in "en" or in "zh", not in {language!r}')
    if language == "en":
        yield
        return
    from matplotlib.text import Text

    ticks = {
        text for ax in drawn.axes for axis in _axes(ax) for text in [*axis.get_ticklabels("both"), axis.offsetText]
    }
    english = {text: text.get_text() for text in drawn.findobj(Text) if text not in ticks}
    with ExitStack() as after:
        for text, words in english.items():
            text.set_text(in_language(words, language))
            after.callback(text.set_text, words)
        for formatter in {each for ax in drawn.axes for axis in _axes(ax) for each in _formatters(axis)}:
            _translate_ticks(formatter, language, after)
        yield


def _axes(ax: Any) -> list[Any]:
    return [axis for name in ("x", "y", "z") if (axis := getattr(ax, f"{name}axis", None)) is not None]


def _formatters(axis: Any) -> list[Any]:
    return [axis.get_major_formatter(), axis.get_minor_formatter()]


def _translate_ticks(formatter: Any, language: str, after: ExitStack) -> None:
    """Ticks are written anew by their formatter whenever the figure is drawn."""
    write = formatter.format_ticks
    formatter.format_ticks = lambda values: [in_language(words, language) for words in write(values)]
    after.callback(delattr, formatter, "format_ticks")
