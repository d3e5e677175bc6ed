"""The slides: one self-contained deck per lesson and language, to be opened from the file system.

    python -m publish.slides --output build/slides

A lesson says in its cells' `slide` metadata what is shown: a short text in both languages, code, a
result; its prose becomes speaker notes. The deck of a lesson that says nothing is derived: prose is
cut at paragraphs, code at statements, a figure stands alone, and a result appears after the code
that made it. A cell's own `slideshow` metadata goes before that: `skip` leaves it out, `notes`
makes it a speaker note, `slide` and `subslide` start a new slide.

reveal.js 6.0.2 (MIT) is vendored, 240 kB: no Python package carries it alone, and asking for
Node.js would be too much for a few files. Formulas become MathML, which browsers draw without a
script; the font for them, 44 kB of STIX Two Math (OFL), is vendored too, since brackets stretch
only with such a font. Both are written into every deck.
"""

import base64
import re
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from course_lib import labels

from . import not_installed

try:
    import nbformat
    from jinja2 import pass_context
    from latex2mathml.converter import convert as latex_to_mathml
    from nbconvert import HTMLExporter, SlidesExporter
    from nbconvert.filters.highlight import Highlight2HTML
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from nbformat import NotebookNode
    from pygments.formatters import HtmlFormatter

    from .cells import (
        NOTES,
        EditionError,
        check_outputs,
        check_twins,
        output_folder,
        read_lessons,
        run_edition,
        without_guards,
    )
    from .lesson_slides import Slide, columns_of, is_told, lesson_slides
    from .slide_parts import with_short_lines
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(not_installed("slides", error))

LANGUAGES = {"en": "en", "zh": "zh-CN", "both": "en"}  # the deck's language -> the page's `lang`

_ASSETS = Path(__file__).parent / "slides_assets"
# labels
WORDS = {"continued": "continued", "result": "result", "figure": "picture", "solution": "solution"}


# --- notes ---


@dataclass(frozen=True)
class Note:
    """Notes for a speaker at the start of a section."""

    minutes: int
    question: dict[str, str]  # language -> a question to ask the class


def read_notes(text: str) -> dict[str, Note]:
    """The rows of NOTES.md, `| 2.1 | minutes | English | 中文 |`, by section number.

    Raises:
        EditionError: a row that lacks a column, or whose minutes are no number.
    """
    notes = {}
    for line in re.findall(r"^\| \d[^\n]*", text, re.M):
        columns = [column.strip() for column in line.strip().strip("|").split(" | ")]
        if len(columns) != 4 or not all(columns) or not columns[1].isdigit():
            raise EditionError(
                f"{NOTES} needs | section | minutes | English | 中文 | in every row, got {line!r}"
            )
        notes[columns[0]] = Note(int(columns[1]), {"en": columns[2], "zh": columns[3]})
    return notes


def missing_notes(lessons: dict[str, NotebookNode], notes: dict[str, Note]) -> list[str]:
    """Sections of the lessons without a note."""
    numbers = [number for notebook in lessons.values() for number, _ in _sections(notebook)]
    return [number for number in numbers if number not in notes]


def _sections(notebook: NotebookNode) -> list[tuple[str, ...]]:
    """(number, heading in both languages) of each section; the lesson's title has the lesson's
    number."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [
        found.groups() for source in cells if (found := re.match(r"##? ([\d.]+) ([^\n]*)", source))
    ]


# --- writing a deck ---


class _Renderer(IPythonRenderer):
    """nbconvert's, with formulas as MathML, headings without ids (they repeat), and links between
    decks."""

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def heading(self, text: str, level: int, **attrs: object) -> str:
        return f"<h{level}>{text}</h{level}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, re.sub(r"\.ipynb(?=#|$)", ".html", url), title)


def _mathml(formula: str, display: str) -> str:
    """A formula in LaTeX as MathML; there a function's name does not keep its distance by
    itself."""
    spaced = re.sub(r"(\\(?:log|max|min)(?:_\w)?)\s+(?=\\?\w)", r"\1\\,", formula.strip())
    try:
        return latex_to_mathml(spaced, display=display)
    except Exception as error:
        raise EditionError(f"a formula cannot be drawn, ${formula}$: {error}") from None


class DeckExporter(SlidesExporter):
    """nbconvert's exporter for reveal.js, with a template that loads nothing from elsewhere."""

    def __init__(self, **settings: object) -> None:
        super().__init__(template_name="deck", extra_template_basedirs=[str(_ASSETS)], **settings)
        self.register_filter(
            "highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self)
        )

    def from_notebook_node(
        self, nb: NotebookNode, resources: dict | None = None, **kw: object
    ) -> tuple[str, dict]:
        """HTMLExporter's own would parse the page again, to look for pictures without words: half
        of all the time."""
        return super(HTMLExporter, self).from_notebook_node(
            nb, self._init_resources(resources), **kw
        )

    @pass_context
    def markdown2html(self, context: object, source: str) -> str:
        html = MarkdownWithMath(renderer=_Renderer(escape=False)).render(source)
        # A line must not begin with what follows a formula.
        return re.sub(
            r"(<math(?:(?!</math>).)*</math>[,.;:)?，。；：）？、]+)",
            r'<span class="whole">\1</span>',
            html,
            flags=re.S,
        )


def deck_notebook(slides: Sequence[Slide], language: str, notes: dict[str, Note]) -> NotebookNode:
    """The slides as a notebook with slide types, for nbconvert: a stack of slides a section."""
    cells = []
    minutes_before = 0
    for slide in slides:
        heading = nbformat.v4.new_markdown_cell(_heading(slide, language))
        heading.metadata = {
            "slideshow": {"slide_type": "slide" if slide.starts else "subslide"},
            "deck": {"kind": slide.kind},
        }
        texts = list(slide.notes)
        if slide.starts:
            note = notes[slide.section]
            texts.insert(0, _note_text(note, minutes_before, language))
            minutes_before += note.minutes
        notes_cells = [
            nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": "notes"}})
            for text in texts
        ]
        cells += [heading, *notes_cells, *deepcopy(slide.parts)]
    return nbformat.v4.new_notebook(cells=cells)


def _plain_heading(heading: str, language: str) -> str:
    if language == "both":
        return heading
    return heading.split(" / ", 1)[language == "zh"]


def _heading(slide: Slide, language: str) -> str:
    part = f' <span class="part">{_word(slide.part, language)}</span>' if slide.part else ""
    text = _plain_heading(slide.heading, language)
    if language == "both":
        en, zh = (_plain_heading(slide.heading, one) for one in ("en", "zh"))
        text = f'<span lang="en">{en}</span>{part}<span lang="zh" class="other">{zh}</span>'
        part = ""
    return f"{'#' if slide.kind == 'title' else '##'} {slide.section} {text}{part}"


def _word(key: str, language: str) -> str:
    en, zh = labels.both(WORDS[key])
    return {"en": en, "zh": zh, "both": f"{en} {zh}"}[language]


def _note_text(note: Note, minutes_before: int, language: str) -> str:
    clock = "{}:{:02d}–{}:{:02d}".format(
        *divmod(minutes_before, 60), *divmod(minutes_before + note.minutes, 60)
    )
    lead = labels.text(
        "**{minutes} minutes**, {clock}.\n\nAsk: ", minutes=note.minutes, clock=clock
    )
    texts = {
        one: said + note.question[one]
        for one, said in zip(("en", "zh"), labels.both(lead), strict=True)
    }
    return columns_of(list(texts.values())) if language == "both" else texts[language]


@cache
def _look() -> tuple[str, tuple[str, ...]]:
    """(style, scripts) that are written into every deck."""
    reveal = _ASSETS / "reveal.js"
    licence = "/*! reveal.js 6.0.2, MIT\n" + (reveal / "LICENSE").read_text("utf-8") + "*/\n"
    highlighting = HtmlFormatter(style="tango").get_style_defs(".highlight")
    font = base64.b64encode((_ASSETS / "math" / "CourseMath.woff").read_bytes()).decode()
    style = [
        f'@font-face {{ font-family: "Course Math"; src: url("data:font/woff;base64,{font}"); }}',
        licence + (reveal / "reveal.css").read_text("utf-8"),
        highlighting.replace("background: #f8f8f8;", ""),
        (_ASSETS / "deck.css").read_text("utf-8"),
    ]
    scripts = [reveal / "reveal.js", reveal / "notes.js", _ASSETS / "deck.js"]
    return "\n".join(style), tuple(path.read_text("utf-8") for path in scripts)


@cache
def _exporter() -> DeckExporter:
    """One for all decks, which keeps its templates."""
    return DeckExporter()


def deck_html(notebook: NotebookNode, title: str, language: str, notes: dict[str, Note]) -> str:
    """One deck as a page that needs nothing beyond itself."""
    style, scripts = _look()
    deck: dict[str, Any] = {
        "language": language,
        "lang": LANGUAGES[language],
        "title": title,
        "css": style,
        "scripts": scripts,
    }
    deck["told"] = is_told(notebook)
    slides = deck_notebook(lesson_slides(notebook, language), language, notes)
    html, _ = _exporter().from_notebook_node(slides, resources={"deck": deck})
    return html


def decks(
    lessons: dict[str, NotebookNode], notes: dict[str, Note]
) -> Iterator[tuple[str, str, str]]:
    """(language, lesson's name, page) of every deck."""
    for name, notebook in lessons.items():
        try:
            short = with_short_lines(without_guards(notebook))
            for language in LANGUAGES:
                title = _plain_heading(_sections(notebook)[0][1], language)
                yield language, name, deck_html(short, title, language, notes)
        except EditionError as error:
            raise EditionError(f"{name}: {error}") from None


def build(notebooks: Path, output: Path) -> None:
    """Write all decks, `output/<language>/<lesson>.html`.

    Raises:
        EditionError: a notebook, a note or a tool that is missing or cannot be used.
    """
    lessons = read_lessons(notebooks)
    check_twins(notebooks, lessons)
    check_outputs(notebooks, lessons)
    path = notebooks.resolve().parent / NOTES
    if not path.is_file():
        raise EditionError(f"{path} with the speaker notes is missing")
    notes = read_notes(path.read_text("utf-8"))
    if missing := missing_notes(lessons, notes):
        raise EditionError(f"{path} has no row for section {', '.join(missing)}")
    with output_folder(output) as folder:
        for language, name, page in decks(lessons, notes):
            (folder / language).mkdir(exist_ok=True)
            (folder / language / f"{name}.html").write_text(page, "utf-8")


if __name__ == "__main__":
    run_edition(build, "slides", __doc__.partition("\n\n")[0])
