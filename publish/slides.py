"""Write the slides: one self-contained HTML file per lesson and language.

    python -m publish.slides --output build/slides

The `slide` metadata of a lesson's cells says what the deck shows: a short text in both languages,
code, or a result. The lesson's prose becomes speaker notes.

reveal.js 6.0.2 (MIT, 240 kB) is vendored, because no Python package contains it alone and a few
files do not justify Node.js. Formulas become MathML, which browsers draw without a script. The font
for them, STIX Two Math (OFL, 44 kB), is vendored as well, because brackets stretch only with such a
font. Both are written into every deck.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as latex_to_mathml
from nbconvert import HTMLExporter, SlidesExporter
from nbconvert.filters.highlight import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from course_lib import labels

from .cells import (
    NOTES,
    EditionError,
    check_outputs,
    check_twins,
    is_project,
    output_folder,
    read_lessons,
    run_edition,
    without_guards,
)
from .class_slides import OUTLINE, outline
from .languages import half, languages_in, words_in
from .lesson_slides import Slide, columns_of, lesson_slides
from .slide_parts import with_short_lines

LANGUAGES = {"en": "en", "zh": "zh-CN", "both": "en"}  # language of a deck -> `lang` of its page

_ASSETS = Path(__file__).parent / "slides_assets"
# Keys of the labels that follow a heading.
WORDS = {"continued": "continued", "result": "result", "figure": "picture", "solution": "solution"}


# --- notes ---


@dataclass(frozen=True)
class Note:
    """Notes for a speaker at the start of a section."""

    minutes: int
    question: dict[str, str]  # language -> a question to ask the class


def read_notes(text: str) -> dict[str, Note]:
    """Read the rows of NOTES.md, `| 2.1 | minutes | English | 中文 |`, by section number.

    Raises:
        EditionError: A row lacks a column, or its minutes are not a number.
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
    """Return the numbers of the sections for which there is no speaker note."""
    numbers = [number for notebook in lessons.values() for number, _ in _sections(notebook)]
    return [number for number in numbers if number not in notes]


def _sections(notebook: NotebookNode) -> list[tuple[str, ...]]:
    """Return (number, heading in both languages) for the lesson's title and for each section."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [
        found.groups() for source in cells if (found := re.match(r"##? ([\d.]+) ([^\n]*)", source))
    ]


# --- writing a deck ---


class _Renderer(IPythonRenderer):
    """nbconvert's renderer with formulas as MathML and links between decks.

    A link to a file without a deck becomes plain text, because that file is not next to the deck.
    Headings have no ids, because several slides have the same heading.
    """

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def heading(self, text: str, level: int, **attrs: object) -> str:
        return f"<h{level}>{text}</h{level}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        deck = re.sub(r"\.ipynb(?=#|$)", ".html", url)
        without_deck = deck == url or is_project(url)
        return text if without_deck and "://" not in url else super().link(text, deck, title)


def _mathml(formula: str, display: str) -> str:
    """Convert a formula from LaTeX to MathML."""
    # MathML leaves no space after the name of a function
    spaced = re.sub(r"(\\(?:log|max|min)(?:_\w)?)\s+(?=\\?\w)", r"\1\\,", formula.strip())
    try:
        return latex_to_mathml(spaced, display=display)
    except Exception as error:
        raise EditionError(f"a formula cannot be drawn, ${formula}$: {error}") from None


class DeckExporter(SlidesExporter):
    """nbconvert's exporter for reveal.js, with a template that loads no other files."""

    def __init__(self, **settings: object) -> None:
        super().__init__(template_name="deck", extra_template_basedirs=[str(_ASSETS)], **settings)
        self.register_filter(
            "highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self)
        )

    def from_notebook_node(
        self, nb: NotebookNode, resources: dict | None = None, **kw: object
    ) -> tuple[str, dict]:
        """Export without HTMLExporter's search for pictures without alt text.

        The search parses the page again, which takes half of the time.
        """
        return super(HTMLExporter, self).from_notebook_node(
            nb, self._init_resources(resources), **kw
        )

    @pass_context
    def markdown2html(self, context: object, source: str) -> str:
        html = MarkdownWithMath(renderer=_Renderer(escape=False)).render(source)
        # The punctuation after a formula must not move to the next line.
        return re.sub(
            r"(<math(?:(?!</math>).)*</math>[,.;:)?，。；：）？、]+)",
            r'<span class="whole">\1</span>',
            html,
            flags=re.S,
        )


def deck_notebook(slides: Sequence[Slide], language: str, notes: dict[str, Note]) -> NotebookNode:
    """Return the slides as a notebook with slide types, from which nbconvert makes the deck.

    Each section is one vertical stack of slides.
    """
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


def _heading(slide: Slide, language: str) -> str:
    part = (
        f' <span class="part">{words_in(WORDS[slide.part], language)}</span>' if slide.part else ""
    )
    text = half(slide.heading, language)
    if language == "both":
        en, zh = (half(slide.heading, one) for one in ("en", "zh"))
        text = f'<span lang="en">{en}</span>{part}<span lang="zh" class="other">{zh}</span>'
        part = ""
    number = f"{slide.section} " if slide.section else ""
    return f"{'#' if slide.kind == 'title' else '##'} {number}{text}{part}"


def _note_text(note: Note, minutes_before: int, language: str) -> str:
    clock = "{}:{:02d}–{}:{:02d}".format(
        *divmod(minutes_before, 60), *divmod(minutes_before + note.minutes, 60)
    )
    lead = labels.text(
        "**{minutes} minutes**, {clock}.\n\nAsk: ", minutes=note.minutes, clock=clock
    )
    texts = {
        each: words + note.question[each]
        for each, words in zip(("en", "zh"), labels.in_both_languages(lead), strict=True)
    }
    return columns_of([texts[each] for each in languages_in(language)])


@cache
def _look() -> tuple[str, tuple[str, ...]]:
    """Return (style, scripts) of every deck."""
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
    """Return one exporter for all decks, because it caches its templates."""
    return DeckExporter()


def deck_html(notebook: NotebookNode, title: str, language: str, notes: dict[str, Note]) -> str:
    """Return one deck as a page that loads no other file."""
    style, scripts = _look()
    deck: dict[str, Any] = {
        "language": language,
        "lang": LANGUAGES[language],
        "title": title,
        "css": style,
        "scripts": scripts,
    }
    slides = deck_notebook(_with_outline(notebook, language, notes), language, notes)
    html, _ = _exporter().from_notebook_node(slides, resources={"deck": deck})
    return html


def _with_outline(notebook: NotebookNode, language: str, notes: dict[str, Note]) -> list[Slide]:
    """Return the slides of a lesson with an outline after the title."""
    minutes = {number: note.minutes for number, note in notes.items()}
    part = nbformat.v4.new_markdown_cell(outline(notebook.cells, minutes, language))
    slides = lesson_slides(notebook, language)
    slides.insert(1, Slide("outline", [part], heading=OUTLINE))
    return slides


def decks(
    lessons: dict[str, NotebookNode], notes: dict[str, Note]
) -> Iterator[tuple[str, str, str]]:
    """Yield (language, lesson's name, page) of every deck."""
    for name, notebook in lessons.items():
        try:
            short = with_short_lines(without_guards(notebook))
            for language in LANGUAGES:
                title = half(_sections(notebook)[0][1], language)
                yield language, name, deck_html(short, title, language, notes)
        except EditionError as error:
            raise EditionError(f"{name}: {error}") from None


def build(notebooks: Path, output: Path) -> None:
    """Write all decks, `output/<language>/<lesson>.html`.

    Raises:
        EditionError: A notebook, speaker note or tool is missing, or cannot be used.
    """
    stored = read_lessons(notebooks)
    lessons = {name: lesson for name, lesson in stored.items() if not is_project(name)}
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
