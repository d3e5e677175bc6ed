"""Display of figures: drawn once in each language from the same data, as two pictures of which a
page shows one.

JupyterLab shows a picture's bytes without any alt text, whatever the output's metadata say, and so
does nbconvert's own template. An `<img>` in HTML keeps its alt in both, and on a Sphinx page too:
so that is how figures are shown.
"""

import base64
import html
import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib import labels

from .alt import alt_text, in_language

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

LANGUAGES = ("en", "zh")
SLIDE = (1176, 560)  # pixels that a picture may take on a slide
LARGER = 1.6  # letters on a slide, beside those of the page's picture blown up to the slide
_FACTORS = (LARGER, 1.45, 1.3, 1.15, 1.0)  # tried in turn
_LEAST_AXES = 0.5  # of a slide's picture, in height
_COLORS = 128  # of a stored picture: plots have few, and it takes half of the bytes of all


@dataclass(frozen=True)
class Picture:
    """A figure in one language, as it is stored in a notebook's output."""

    png: str  # base64
    alt: str


def show_in_both_languages() -> None:
    """Show figures, from now on, in notebooks as two pictures with alt texts. Without IPython
    nothing happens."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.display_formatter.ipython_display_formatter.for_type_by_name(
            "matplotlib.figure", "Figure", show
        )


def show(drawn: "Figure") -> None:
    """Show a figure in place of IPython's own PNG, not beside it: once more would make the notebook
    larger by half.

    The pictures for slides stand in the output's metadata, `slides`, where no page shows them.
    """
    from IPython.core.pylabtools import print_figure
    from IPython.display import display

    found, large = [], {}
    for language, words in zip(LANGUAGES, description(drawn), strict=True):
        if language not in labels.shown():
            continue
        with drawn_in(drawn, language):
            png = print_figure(drawn)  # None for a figure without axes
            large[language] = _slide_png(drawn) if png else ""
        if png:
            source = f"data:image/png;base64,{_small(png)}"
            picture = f'<img alt="{html.escape(words)}" src="{source}">'
            found.append(f'<figure lang="{language}" style="margin: 0">{picture}</figure>')
    bundle = {"text/plain": repr(drawn)}
    if found:
        markup = "\n".join(found)
        display({**bundle, "text/html": markup}, metadata={"slides": large}, raw=True)
    else:
        display(bundle, raw=True)


@contextmanager
def enlarged(drawn: "Figure") -> Iterator[None]:
    """A figure on a smaller sheet of a slide's shape, while the block lasts, so that letters and
    lines are larger.

    Ticks are chosen anew for the shorter axes; titles that are too long for the sheet are broken
    into lines. Letters become `LARGER` times as large, less where the axes would keep too little of
    the sheet, or as `course_larger` says.
    """
    size = drawn.get_size_inches().copy()
    titles = [text for text in (drawn._suptitle, *_panel_titles(drawn)) if text and text.get_text()]
    words = [text.get_text() for text in titles]
    try:
        for times in _FACTORS:
            if times > getattr(drawn, "course_larger", LARGER):
                continue
            sheet = [side / (times * min(SLIDE[0] / size[0], SLIDE[1] / size[1])) for side in SLIDE]
            drawn.set_size_inches(sheet)
            for text, said in zip(titles, words, strict=True):
                text.set_text(said)
            drawn.draw_without_rendering()
            for text in titles:
                _break_lines(text, sheet[0] * drawn.dpi)
            drawn.draw_without_rendering()
            if _share_of_axes(drawn) >= _LEAST_AXES:
                break
        yield
    finally:
        for text, said in zip(titles, words, strict=True):
            text.set_text(said)
        drawn.set_size_inches(size)


def _share_of_axes(drawn: "Figure") -> float:
    """Share of a figure's height that its axes take, those beside each other once."""
    return sum(
        {round(box.y0, 2): box.height for box in (ax.get_position() for ax in drawn.axes)}.values()
    )


def _panel_titles(drawn: "Figure") -> list["Text"]:
    return [text for ax in drawn.axes for text in (ax.title, ax._left_title, ax._right_title)]


def _break_lines(text: "Text", sheet: float) -> None:
    """Lines of about one width where a title is longer than the panel it stands above, or than the
    sheet."""
    room = text.axes.get_window_extent().width if text.axes else 0.97 * sheet
    ratio = text.get_window_extent().width / room
    if ratio <= 1:
        return
    said = text.get_text().replace("\n", " ")
    if re.search("[\u3400-\u9fff]", said):  # lines may end anywhere, but best behind a mark
        pieces = re.findall("[^，：；。]+[，：；。]?", said)
        middle = min(
            range(1, max(2, len(pieces))),
            key=lambda n: abs(2 * len("".join(pieces[:n])) - len(said)),
        )
        text.set_text("".join(pieces[:middle]) + "\n" + "".join(pieces[middle:]))
    else:
        text.set_text(textwrap.fill(said, max(8, int(0.97 * len(said) / ratio))))


def _slide_png(drawn: "Figure") -> str:
    """The figure for a slide: base64."""
    stream = io.BytesIO()
    with enlarged(drawn):
        dots = SLIDE[0] / drawn.get_size_inches()[0]
        drawn.savefig(stream, format="png", dpi=dots, bbox_inches="tight")
    return _small(stream.getvalue())


def _small(png: bytes) -> str:
    """A PNG with a palette of its own: base64."""
    from PIL import Image

    stream = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(_COLORS).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def description(drawn: "Figure") -> tuple[str, str]:
    """A figure's alt text, (English, Chinese)."""
    with drawn_in(drawn, "zh"):
        chinese = alt_text(drawn, "zh")
    return alt_text(drawn, "en"), chinese


def pictures_in(markup: str) -> dict[str, Picture]:
    """The pictures that an output's HTML consists of, by language; none in any other HTML."""
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
    """All words of a figure in one language, while the block lasts; it is drawn with English ones.

    Raises:
        ValueError: the language is neither "en" nor "zh".
        LabelError: a label lacks its Chinese, as `course_lib.labels.both` has it.
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
    """Ticks are written anew by their formatter whenever the figure is drawn."""
    write = formatter.format_ticks
    formatter.format_ticks = lambda values: [
        in_language(words, language) for words in write(values)
    ]
    after.callback(delattr, formatter, "format_ticks")
