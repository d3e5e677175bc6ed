"""Display of figures. Each figure is drawn once per language, and a page shows one picture of it.

JupyterLab and nbconvert's own template show an image output without alt text, even if the output's
metadata has one. An HTML `<img>` keeps its alt text in JupyterLab, in nbconvert and on a Sphinx
page. Therefore figures are shown as HTML.
"""

import base64
import html
import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib import labels

from .alt import alt_text, in_language

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

LANGUAGES = ("en", "zh")
SLIDE = (1176, 560)  # largest size in pixels of a picture on a slide
LARGER = 1.6  # factor by which letters on a slide are larger than in the picture of the page
_FACTORS = (LARGER, 1.45, 1.3, 1.15, 1.0)  # `enlarge` tries these in order
_LEAST_AXES = 0.5  # smallest part of a slide's height that the axes may take
# Environment variable. If it is set for a Jupyter kernel, figures are also drawn for slides.
FOR_SLIDES = "COURSE_SLIDES"
# Fast compression is enough, because `_small` compresses each picture again.
_FAST = {"compress_level": 1}
_COLORS = 128  # colors of a stored picture; the limit halves its bytes, and plots have few colors


@dataclass(frozen=True)
class Picture:
    """A figure in one language, as stored in the output of a notebook cell.

    Attributes:
        png: The picture, as base64.
        alt: Alt text.
    """

    png: str  # base64
    alt: str


def show_in_both_languages() -> None:
    """Make notebooks show each matplotlib figure as one picture per language, with alt texts.

    Without IPython, the function does nothing.
    """
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.display_formatter.ipython_display_formatter.for_type_by_name(
            "matplotlib.figure", "Figure", show
        )


def show(drawn: "Figure") -> None:
    """Show a figure as HTML, with one picture per language.

    IPython's own PNG is left out, because it would make a notebook larger by half. If the
    environment variable COURSE_SLIDES is set, the function also draws pictures for slides, and
    stores them in the output's metadata, under the key "slides". Drawing these pictures takes twice
    as long as drawing those for the page. Therefore only `make notebooks` and `make results` set
    the variable.
    """
    from IPython.core.pylabtools import print_figure
    from IPython.display import display

    found = {}
    for language, words in zip(LANGUAGES, description(drawn), strict=True):
        if language not in labels.shown_languages():
            continue
        with drawn_in(drawn, language):
            png = print_figure(drawn, pil_kwargs=_FAST)  # None for a figure without axes
        if png:
            source = f"data:image/png;base64,{_small(png)}"
            picture = f'<img alt="{html.escape(words)}" src="{source}">'
            found[language] = f'<figure lang="{language}" style="margin: 0">{picture}</figure>'
    bundle = {"text/plain": repr(drawn)}
    if found:
        # Pictures for slides are drawn last, so they cannot affect the pictures of the page.
        metadata = {"slides": _for_slides(drawn, found)} if os.environ.get(FOR_SLIDES) else {}
        display({**bundle, "text/html": "\n".join(found.values())}, metadata=metadata, raw=True)
    else:
        display(bundle, raw=True)


def _for_slides(drawn: "Figure", languages: Iterable[str]) -> dict[str, str]:
    """Return a dict from language to the figure for a slide, as base64."""
    pictures = {}
    for language in languages:
        with drawn_in(drawn, language):
            pictures[language] = _slide_png(drawn)
    return pictures


@contextmanager
def enlarge(drawn: "Figure") -> Iterator[None]:
    """Give a figure the format of a slide in a `with` block, with larger letters and lines.

    The figure gets the aspect ratio of a slide and a smaller size in inches, so that its letters
    and lines look larger on the slide. Letters are usually `LARGER` times as large. They are
    enlarged less if the axes would otherwise become too low, or if the attribute `course_larger` of
    the figure is smaller than `LARGER`. Ticks are chosen again for the smaller axes, and long
    titles are broken into lines.
    """
    size = drawn.get_size_inches().copy()
    titles = [text for text in (drawn._suptitle, *_panel_titles(drawn)) if text and text.get_text()]
    words = [text.get_text() for text in titles]
    try:
        for factor in _FACTORS:
            if factor > getattr(drawn, "course_larger", LARGER):
                continue
            sheet = [
                side / (factor * min(SLIDE[0] / size[0], SLIDE[1] / size[1])) for side in SLIDE
            ]
            drawn.set_size_inches(sheet)
            for text, title in zip(titles, words, strict=True):
                text.set_text(title)
            _arrange(drawn)
            for text in titles:
                _break_lines(text, sheet[0] * drawn.dpi)
            _arrange(drawn)
            if _share_of_axes(drawn) >= _LEAST_AXES:
                break
        yield
    finally:
        for text, title in zip(titles, words, strict=True):
            text.set_text(title)
        drawn.set_size_inches(size)


def _arrange(drawn: "Figure") -> None:
    """Place the axes of a figure for its current size and texts, without drawing it."""
    if layout := drawn.get_layout_engine():
        layout.execute(drawn)
    else:
        drawn.draw_without_rendering()


def _share_of_axes(drawn: "Figure") -> float:
    """Return the share of a figure's height that its axes take.

    Axes that are side by side in a row count once.
    """
    return sum(
        {round(box.y0, 2): box.height for box in (ax.get_position() for ax in drawn.axes)}.values()
    )


def _panel_titles(drawn: "Figure") -> list["Text"]:
    return [text for ax in drawn.axes for text in (ax.title, ax._left_title, ax._right_title)]


def _break_lines(text: "Text", sheet: float) -> None:
    """Break a title into lines of similar width if it is wider than its panel or the sheet."""
    available = text.axes.get_window_extent().width if text.axes else 0.97 * sheet
    ratio = text.get_window_extent().width / available
    if ratio <= 1:
        return
    title = text.get_text().replace("\n", " ")
    if re.search("[\u3400-\u9fff]", title):  # Chinese is broken after a punctuation mark
        clauses = re.findall("[^，：；。]+[，：；。]?", title)
        middle = min(
            range(1, max(2, len(clauses))),
            key=lambda n: abs(2 * len("".join(clauses[:n])) - len(title)),
        )
        text.set_text("".join(clauses[:middle]) + "\n" + "".join(clauses[middle:]))
    else:
        text.set_text(textwrap.fill(title, max(8, int(0.97 * len(title) / ratio))))


def _slide_png(drawn: "Figure") -> str:
    """Return the figure for a slide, as base64."""
    stream = io.BytesIO()
    with enlarge(drawn):
        dots = SLIDE[0] / drawn.get_size_inches()[0]
        drawn.savefig(stream, format="png", dpi=dots, bbox_inches="tight", pil_kwargs=_FAST)
    return _small(stream.getvalue())


def _small(png: bytes) -> str:
    """Return a PNG as base64, after reducing its colors to a palette of `_COLORS` colors."""
    from PIL import Image

    stream = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(_COLORS).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def description(drawn: "Figure") -> tuple[str, str]:
    """Return a figure's alt text as a pair (English, Chinese)."""
    with drawn_in(drawn, "zh"):
        chinese = alt_text(drawn, "zh")
    return alt_text(drawn, "en"), chinese


def pictures_in(markup: str) -> dict[str, Picture]:
    """Return the pictures in the HTML of a notebook output, as a dict from language to picture.

    The dict is empty if the HTML contains anything besides pictures that `show` has written.
    """
    one = (
        r'<figure lang="(\w+)" style="margin: 0"><img alt="([^"]*)"'
        r' src="data:image/png;base64,([^"]*)"></figure>\s*'
    )
    if not re.fullmatch(f"(?:{one})+", markup):
        return {}
    return {
        language: Picture(png, html.unescape(alt)) for language, alt, png in re.findall(one, markup)
    }


@contextmanager
def drawn_in(drawn: "Figure", language: str) -> Iterator[None]:
    """Translate the words of a figure in a `with` block.

    After the block the words are in English again.

    Args:
        drawn: The figure.
        language: "en" or "zh".

    Raises:
        ValueError: The language is neither "en" nor "zh".
        LabelError: A label has no Chinese translation (see `course_lib.labels.in_both_languages`).
    """
    if language not in LANGUAGES:
        raise ValueError(f"language must be 'en' or 'zh', got {language!r}")
    if language == "en":
        yield
        return
    from matplotlib.text import Text

    ticks = {
        text
        for ax in drawn.axes
        for axis in _axes(ax)
        for text in [*axis.get_ticklabels("both"), axis.offsetText]
    }
    english = {text: text.get_text() for text in drawn.findobj(Text) if text not in ticks}
    with ExitStack() as after:
        for text, words in english.items():
            text.set_text(in_language(words, language))
            after.callback(text.set_text, words)
        for formatter in {
            each for ax in drawn.axes for axis in _axes(ax) for each in _formatters(axis)
        }:
            _translate_ticks(formatter, language, after)
        yield


def _axes(ax: Any) -> list[Any]:
    return [
        axis for name in ("x", "y", "z") if (axis := getattr(ax, f"{name}axis", None)) is not None
    ]


def _formatters(axis: Any) -> list[Any]:
    return [axis.get_major_formatter(), axis.get_minor_formatter()]


def _translate_ticks(formatter: Any, language: str, after: ExitStack) -> None:
    """Translate the tick labels that a formatter writes, until `after` is closed.

    The formatter is changed, because it writes the labels again whenever the figure is drawn.
    """
    write = formatter.format_ticks
    formatter.format_ticks = lambda values: [
        in_language(words, language) for words in write(values)
    ]
    after.callback(delattr, formatter, "format_ticks")
