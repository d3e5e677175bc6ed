"""The slides: one self-contained deck per lesson and language, to be opened from the file system.

    python -m course_lib.teaching.editions.slides [--output build/slides]

The decks are derived from the notebooks: prose is cut at paragraphs, code at statements, a figure stands alone, and a
result appears after the code that made it. A cell's own `slideshow` metadata goes before that: `skip` leaves it out,
`notes` makes it a speaker note, `slide` and `subslide` start a new slide with it.

reveal.js 6.0.2 (MIT) is vendored, 240 kB: no Python package carries it alone, and asking for Node.js would be too much
for a few files. Formulas become MathML, which browsers draw without a script; the font for them, 44 kB of STIX Two Math
(OFL), is vendored too, since brackets stretch only with such a font. Both are written into every deck.
"""

import ast
import base64
import io
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from . import not_installed

try:
    import nbformat
    from bs4 import BeautifulSoup
    from jinja2 import pass_context
    from latex2mathml.converter import convert as latex_to_mathml
    from nbconvert import HTMLExporter, SlidesExporter
    from nbconvert.filters.highlight import Highlight2HTML
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from nbformat import NotebookNode
    from pygments.formatters import HtmlFormatter

    from ..alt import picture_in
    from ..languages import PER_LANGUAGE
    from .cells import (
        EditionError,
        check_outputs,
        check_twins,
        in_language,
        is_solution,
        output_folder,
        read_lessons,
        run_edition,
    )
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(not_installed("slides", error))

if TYPE_CHECKING:
    from PIL import Image

LANGUAGES = {"en": "en", "zh": "zh-CN", "both": "en"}  # the deck's language -> the page's `lang`
MOST_CODE_LINES = 12
CODE_WIDTH = 86  # characters that fit beside each other
NOTES = "NOTES.md"

_ASSETS = Path(__file__).parent / "slides_assets"
_WORDS = {
    "continued": ("continued", "续"),
    "result": ("result", "结果"),
    "figure": ("figure", "图"),
    "solution": ("solution", "解答"),
}
# A body's height in pixels, and what things take of it: estimates that decide where to cut. deck.js shrinks the rest.
_ROOM = 560
_CODE_LINE, _TEXT_LINE, _TABLE_ROW, _TABLE_LINE, _GAP = 31, 32, 42, 28, 30
_TABLE_WIDTH = 100  # letters in a row of a table, if its columns share the width well
_MOST_FIGURE_HEIGHT = 560  # pixels of a picture; one of several panels that is higher is cut between them


# --- notes ---


@dataclass(frozen=True)
class Note:
    """What a speaker wants to know at the start of a section."""

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
            raise EditionError(f"{NOTES} needs | section | minutes | English | 中文 | in every row, got {line!r}")
        notes[columns[0]] = Note(int(columns[1]), {"en": columns[2], "zh": columns[3]})
    return notes


def missing_notes(lessons: dict[str, NotebookNode], notes: dict[str, Note]) -> list[str]:
    """Sections of the lessons without a note."""
    numbers = [number for notebook in lessons.values() for number, _ in _sections(notebook)]
    return [number for number in numbers if number not in notes]


def _sections(notebook: NotebookNode) -> list[tuple[str, str]]:
    """(number, heading in both languages) of each section; the lesson's title has the lesson's number."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [found.groups() for source in cells if (found := re.match(r"##? ([\d.]+) ([^\n]*)", source))]


# --- what a slide is made of ---


@dataclass
class Slide:
    """A slide before it is written: its kind, what stands under its heading, and whether a section starts with it."""

    kind: str  # title, prose, code, figure, table; heading: nothing below it so far
    parts: list[NotebookNode] = field(default_factory=list)
    part: str = ""  # a key of _WORDS, written small behind the heading
    starts: bool = False
    section: str = ""
    heading: str = ""
    notes: list[str] = field(default_factory=list)
    height: float = 0.0  # pixels that the parts are expected to take

    def code_lines(self) -> int:
        """Lines of code on it."""
        return sum(len(part.source.splitlines()) for part in self.parts if part.cell_type == "code")


def lesson_slides(notebook: NotebookNode, language: str) -> list[Slide]:
    """The slides of one lesson in one language, or in both.

    Raises:
        EditionError: a cell before the lesson's title, or a cell that lacks the language.
    """
    slides: list[Slide] = []
    section = heading = ""
    cells = [cell for cell in notebook.cells if _slide_type(cell) != "skip"]
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        found = re.match(r"(##?) ([\d.]+) ([^\n]*)\n*", cell.source) if cell.cell_type == "markdown" else None
        if found:
            section, heading = found[2], found[3]
        if not heading:
            raise EditionError(f"a lesson starts with its title, '# 2 English / 中文', got {cell.source[:60]!r}")
        if _slide_type(cell) == "notes":
            slides[-1].notes.append(_text_in(cell.source, language))
            continue
        if cell.cell_type == "markdown":
            body = cell.source[found.end() :] if found else cell.source
            new = _prose_slides(body, language, kind="title" if found and found[1] == "#" else "prose")
        else:
            new = _code_slides(cell, following, language)
        if found and not new:
            new = [Slide("heading")]
        for slide in new:
            slide.section, slide.heading = section, heading
        if found:
            new[0].starts = True
        elif _slide_type(cell) not in ("slide", "subslide"):
            new = _joined(slides, new)
        slides += new
    return [slide for slide in slides if slide.parts or slide.kind == "title"]


def _slide_type(cell: NotebookNode) -> str | None:
    return cell.metadata.get("slideshow", {}).get("slide_type")


def _joined(slides: list[Slide], new: list[Slide]) -> list[Slide]:
    """The last slide takes what follows if there is room: a few words and the code they speak of, a result and why."""
    last = slides[-1]
    while new and (last.kind == "heading" or _fit_together(last, new[0])):
        taken = new.pop(0)
        if _has_fragment(last):  # what explains a result comes after it
            for part in taken.parts:
                part.metadata.slideshow = {"slide_type": "fragment"}
        if last.kind == "heading":
            last.part = taken.part
        last.kind = taken.kind
        last.parts += taken.parts
        last.height += taken.height + _GAP
    return new


def _fit_together(last: Slide, following: Slide) -> bool:
    """Whether two slides may be one; titles, figures and solutions stay alone."""
    alone = {"title", "figure"}
    if {last.kind, following.kind} & alone or "solution" in (last.part, following.part) or following.notes:
        return False
    if following.kind == "code" and _has_fragment(last):  # new code under an old result would be taken for its cause
        return False
    return (
        last.height + following.height <= _ROOM - 60 and last.code_lines() + following.code_lines() <= MOST_CODE_LINES
    )


def _has_fragment(slide: Slide) -> bool:
    return any(_slide_type(part) == "fragment" for part in slide.parts)


# --- prose ---


def _text_in(source: str, language: str) -> str:
    """A cell in the language, or in both, as plain markdown."""
    if language == "both":
        return "\n\n".join(in_language(source, one) for one in ("en", "zh"))
    return in_language(source, language)


def _prose_slides(source: str, language: str, kind: str) -> list[Slide]:
    bodies = [paragraphs(in_language(source, one)) for one in (("en", "zh") if language == "both" else (language,))]
    if not any(bodies):
        return [Slide(kind)] if kind == "title" else []
    if len({len(body) for body in bodies}) > 1:  # no pairs of paragraphs: all of it on one slide
        bodies = [["\n\n".join(body)] for body in bodies]
    width, room = (46, 15.5) if language == "both" else (76, 12.0)
    if kind == "title":
        room -= 3
    rows = list(zip(*bodies, strict=True))
    heights = [max(_height(text, width) for text in row) for row in rows]
    slides = []
    for group in pack(heights, room):
        chosen = [rows[index] for index in group]
        columns = ["\n\n".join(column) for column in zip(*chosen, strict=True)]
        slides.append(Slide(kind if not slides else "prose", [nbformat.v4.new_markdown_cell(_columns(columns))]))
        slides[-1].part = "continued" if len(slides) > 1 else ""
        slides[-1].height = _ROOM / room * sum(heights[index] for index in group)
    return slides


def _columns(texts: Sequence[str]) -> str:
    """One text as it is, two beside each other, English and Chinese."""
    if len(texts) == 1:
        return texts[0]
    divs = [f'<div lang="{name}">\n\n{text}\n\n</div>' for name, text in zip(("en", "zh"), texts, strict=True)]
    return '<div class="columns">\n' + "\n".join(divs) + "\n</div>"


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a markdown text; one that ends with a colon keeps the one after it."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if found and re.search(r"[:：]\**$", found[-1]):
            found[-1] += f"\n\n{paragraph}"
        elif paragraph:
            found.append(paragraph)
    return found


def _height(text: str, width: int) -> float:
    """Lines that a paragraph takes where so many Latin letters fit into one; a Chinese character is as wide as two."""
    lines = 0.0
    for line in text.splitlines():
        plain = re.sub(r"\$\$.*?\$\$|[*`]|\]\([^)]*\)|\\[a-z]+", "", line)
        cells = _width(plain)
        if line.startswith("$$"):
            lines += 2.6
        elif line.startswith("|"):
            lines += 0 if set(line) <= set("|-: ") else 1.35 * max(1, math.ceil(cells / width))
        else:
            lines += math.ceil(cells / width) + (0.25 if line.startswith("- ") else 0)
    return lines + 0.45


def _width(text: str) -> int:
    """Latin letters that would be as wide."""
    return sum(1 if ord(character) < 0x2E80 else 2 for character in text)


def pack(heights: Sequence[float], room: float) -> list[list[int]]:
    """Put things into as few groups as have room for them, in order, and make the groups about equally full."""

    def fill(limit: float) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        taken = 0.0
        for index, height in enumerate(heights):
            if groups[-1] and taken + height > limit:
                groups.append([])
                taken = 0.0
            groups[-1].append(index)
            taken += height
        return groups

    if not heights:
        return []
    fewest = len(fill(room))
    limits = [sum(heights) / fewest + step * room / 20 for step in range(21)]
    return next((groups for limit in limits if limit <= room and len(groups := fill(limit)) == fewest), fill(room))


# --- code and results ---


def _code_slides(cell: NotebookNode, following: NotebookNode | None, language: str) -> list[Slide]:
    if _is_plumbing(cell.source):
        return []
    outputs = [shown for output in cell.outputs if (shown := output_in(output, language)) is not None]
    solved = "solution" if is_solution(cell) else ""
    if following is not None and is_solution(following):  # an attempt: its verdict says only that it is one
        outputs = []
    code = _shown_code(cell.source, outputs)
    figures = [part for output in outputs if "image/png" in output.get("data", {}) for part in _cut_figure(output)]
    others = [output for output in outputs if "image/png" not in output.get("data", {})]

    slides = []
    for number, chunk in enumerate(cut_code(code)):
        part = nbformat.v4.new_code_cell(chunk)
        slides.append(Slide("code", [part], solved or ("continued" if number else "")))
        slides[-1].height = _CODE_LINE * len(chunk.splitlines()) + _GAP
    for group in _groups(others, language):
        result = nbformat.v4.new_code_cell(outputs=group)
        height = sum(_output_height(output, language) for output in group)
        if slides and slides[-1].height + height <= _ROOM and slides[-1].kind == "code":
            result.metadata.slideshow = {"slide_type": "fragment"}
            slides[-1].parts.append(result)
            slides[-1].height += height
        else:
            slides.append(Slide("table", [result], solved or ("result" if slides else ""), height=height))
    for figure in figures:
        slides.append(Slide("figure", [nbformat.v4.new_code_cell(outputs=[figure])], "figure" if slides else ""))
    return slides


def _is_plumbing(source: str) -> bool:
    """Imports, the language switch, and places for guesses: nothing to show."""
    statements = ast.parse(source).body

    def is_plumbing(node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, ast.Assign):
            return isinstance(node.value, ast.Constant) and node.value.value is None
        call = node.value if isinstance(node, ast.Expr) else None
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        return name == "language" or name.startswith("exercises.check_")

    return not is_solution_source(source) and all(map(is_plumbing, statements))


def is_solution_source(source: str) -> bool:
    """Whether there are solution markers in it."""
    return "### BEGIN SOLUTION" in source


def _shown_code(source: str, outputs: Sequence[NotebookNode]) -> str:
    """The code worth showing: without imports, and none of it where it only draws or tabulates."""
    source = re.sub(r"^### (BEGIN|END) SOLUTION\n?", "", source, flags=re.M)
    body = ast.parse(source).body
    lines = source.splitlines()
    for node in reversed(body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            del lines[node.lineno - 1 : node.end_lineno]
    makes_things = any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.With) for node in body)
    last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
    call = ast.unparse(last.func) if isinstance(last, ast.Call) else ""
    draws = any("image/png" in output.get("data", {}) for output in outputs)
    only_shows = call in ("what_you_may_have_read", "on_gpu", "about_this_machine", "course_map", "timelines")
    tabulates = call in ("table", "predictions", "compare") and all(map(_makes_headings, body[:-1]))
    hidden = outputs and not makes_things and (draws or only_shows or tabulates)
    return "" if hidden else "\n".join(lines).strip("\n")


def _makes_headings(node: ast.stmt) -> bool:
    """Whether a statement gives the headings of a table, and does nothing else."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return all(isinstance(target, ast.Name) and target.id == "headings" for target in targets)


def cut_code(code: str, most: int = MOST_CODE_LINES) -> list[str]:
    """Cut code into pieces of at most so many lines, where it hurts least: between statements, the outer ones first."""
    lines = re.sub(r"\n{2,}", "\n\n", code.strip("\n")).splitlines()
    # least[i]: (cost of cutting what precedes line i, where its last piece begins)
    least: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(lines) + 1):
        costs = (
            (least[start][0] + _cost_of_cut(lines, start) + 6 * (end - start < 3), start)
            for start in range(max(0, end - most), end)
        )
        least.append(min(costs))
    pieces: list[str] = []
    end = len(lines)
    while end:
        start = least[end][1]
        pieces.insert(0, "\n".join(lines[start:end]).strip("\n"))
        end = start
    return [piece for piece in pieces if piece.strip()]


def _cost_of_cut(lines: Sequence[str], start: int) -> float:
    """A piece costs 10; one that begins deep in a statement or behind its header more, behind an empty line less."""
    if start == 0:
        return 10.0
    line, before = lines[start], lines[start - 1]
    indent = len(line) - len(line.lstrip())
    inside = line.lstrip()[:1] in tuple(")]}") or before.rstrip()[-1:] in tuple("([{,")
    header = before.lstrip().startswith("@") or before.rstrip().endswith(":")
    return 10.0 + indent + 25 * inside + 12 * header - 2 * (not before.strip())


@cache
def _find_ruff() -> str:
    found = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if found is None:
        raise EditionError("ruff, which breaks long lines of code for the slides, is not installed")
    return found


def with_short_lines(notebook: NotebookNode, width: int = CODE_WIDTH) -> NotebookNode:
    """The notebook with its code formatted for so many characters a line.

    Raises:
        EditionError: there is no ruff, or a code cell is no Python.
    """
    command = [_find_ruff(), "format", "--isolated", "--stdin-filename", "lesson.ipynb", "--line-length", str(width)]
    command += ["--config", "format.skip-magic-trailing-comma=true"]
    done = subprocess.run(command, input=nbformat.writes(notebook), capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise EditionError(f"a code cell is no Python: {done.stderr.strip().splitlines()[0]}")
    return nbformat.reads(done.stdout, as_version=4)


def output_in(output: NotebookNode, language: str) -> NotebookNode | None:
    """An output in the language; None if it shows nothing, as a slider without a kernel or a progress bar.

    A figure becomes image/png data, its alt text the output's metadata.
    """
    output = deepcopy(output)
    data = output.get("data", {})
    if picture := picture_in(data.get("text/html", "")):
        words = {"en": picture.en, "zh": picture.zh, "both": " ".join(dict.fromkeys((picture.en, picture.zh)))}
        return nbformat.v4.new_output("display_data", {"image/png": picture.png}, metadata={"alt": words[language]})
    if "text/html" in data:
        soup = BeautifulSoup(data["text/html"], "html.parser")
        if soup.select_one(".course-language"):
            return None
        for element in soup.find_all(PER_LANGUAGE, lang={"en": "zh", "zh": "en", "both": "none"}[language]):
            element.decompose()
        for element in soup.find_all("section"):  # reveal.js would take it for a slide
            element.name = "article"
        data["text/html"] = str(soup)
        return output
    text = output.get("text", "") or data.get("text/plain", "")
    nothing = not text.strip() or re.match(r"(interactive|VBox|HBox|Output)\(", text) or re.search(r"\d+%\|", text)
    return None if nothing or output.output_type == "error" else output


def _output_height(output: NotebookNode, language: str) -> float:
    """Pixels that a table or text is expected to take."""
    html = output.get("data", {}).get("text/html")
    if html is None:
        text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
        return _TEXT_LINE * sum(max(1, math.ceil(len(line) / CODE_WIDTH)) for line in text.splitlines())
    soup = BeautifulSoup(html, "html.parser")
    height = 0.0
    for row in soup.find_all("tr") or [soup]:
        double = language == "both" and row.select_one('[lang="zh"]') is not None
        lines = max(1 + 0.8 * double, 1.35 * _width(row.get_text(" ", strip=True)) / _TABLE_WIDTH)
        height += _TABLE_ROW + _TABLE_LINE * (lines - 1)
    return height + (2 * _TEXT_LINE if soup.select_one(".course-gpu, .course-verdict") else 0)


def _groups(outputs: Sequence[NotebookNode], language: str) -> list[list[NotebookNode]]:
    """The results of a cell, those together that fit on a slide; a long table is cut between its rows."""
    parts = [part for output in outputs for part in _cut_table(output, language)]
    return [[parts[index] for index in group] for group in pack([_output_height(p, language) for p in parts], _ROOM)]


def _cut_table(output: NotebookNode, language: str) -> list[NotebookNode]:
    """A table that is higher than a slide as several, each with the headings; what stands below it goes to the last."""
    soup = BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser")
    rows = soup.select("tbody tr")
    count = math.ceil(_output_height(output, language) / (1.15 * _ROOM))
    if len(soup.select("table")) != 1 or count < 2:
        return [output]
    size = math.ceil(len(rows) / count)
    parts = []
    for start in range(0, len(rows), size):
        soup = BeautifulSoup(output.data["text/html"], "html.parser")
        for index, row in enumerate(soup.select("tbody tr")):
            if not start <= index < start + size:
                row.decompose()
        if start + size < len(rows):
            for element in soup.select_one("table").find_next_siblings():
                element.decompose()
        part = deepcopy(output)
        part.data["text/html"] = str(soup)
        parts.append(part)
    return parts


def _cut_figure(output: NotebookNode) -> list[NotebookNode]:
    """A high figure of several panels as several pictures, cut in the widest empty bands."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
    count = math.ceil(picture.height / _MOST_FIGURE_HEIGHT)
    cuts = [0]
    for number in range(1, count):
        wanted, slack = number * picture.height / count, 0.3 * picture.height / count
        near = [band for band in _empty_bands(picture) if abs(sum(band) / 2 - wanted) < slack]
        if not near:
            return [output]
        top, bottom = max(near, key=lambda band: band[1] - band[0])
        above = [band for band in near if 0 < top - band[1] <= _TITLE_HEIGHT]
        if above:  # one line of text between two bands: a panel's title, which goes with the panel below
            top, bottom = above[0]
        cuts.append((top + bottom) // 2)
    if count == 1:
        return [output]
    parts: list[NotebookNode] = []
    for top, bottom in zip(cuts, [*cuts[1:], picture.height], strict=True):
        stream = io.BytesIO()
        picture.crop((0, top, picture.width, bottom)).save(stream, "PNG", optimize=True)
        part = deepcopy(output)
        part.data["image/png"] = base64.b64encode(stream.getvalue()).decode()
        part.metadata.alt += f" ({len(parts) + 1}/{len(cuts)})"
        parts.append(part)
    return parts


def _empty_bands(picture: "Image.Image") -> list[tuple[int, int]]:
    """(first row, one after the last) of the runs of white rows."""
    rows = [picture.crop((0, y, picture.width, y + 1)).getextrema() == _WHITE for y in range(picture.height)]
    edges = [y for y in range(picture.height + 1) if (y and rows[y - 1]) != (y < picture.height and rows[y])]
    return list(zip(edges[::2], edges[1::2], strict=True))


_WHITE = ((255, 255),) * 3
_TITLE_HEIGHT = 22  # pixels


# --- writing a deck ---


class _Renderer(IPythonRenderer):
    """nbconvert's, with formulas as MathML, headings without ids (they repeat), and links between decks."""

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def heading(self, text: str, level: int, **attrs: object) -> str:
        return f"<h{level}>{text}</h{level}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, re.sub(r"\.ipynb(?=#|$)", ".html", url), title)


def _mathml(formula: str, display: str) -> str:
    """A formula in LaTeX as MathML; there a function's name does not keep its distance by itself."""
    spaced = re.sub(r"(\\(?:log|max|min)(?:_\w)?)\s+(?=\\?\w)", r"\1\\,", formula.strip())
    try:
        return latex_to_mathml(spaced, display=display)
    except Exception as error:
        raise EditionError(f"a formula cannot be drawn, ${formula}$: {error}") from None


class DeckExporter(SlidesExporter):
    """nbconvert's exporter for reveal.js, with a template that loads nothing from elsewhere."""

    def __init__(self, **settings: object) -> None:
        super().__init__(template_name="deck", extra_template_basedirs=[str(_ASSETS)], **settings)
        self.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self))

    def from_notebook_node(self, nb: NotebookNode, resources: dict | None = None, **kw: object) -> tuple[str, dict]:
        """HTMLExporter's own would parse the page again, to look for pictures without words: half of all the time."""
        return super(HTMLExporter, self).from_notebook_node(nb, self._init_resources(resources), **kw)

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
            nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": "notes"}}) for text in texts
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
    en, zh = _WORDS[key]
    return {"en": en, "zh": zh, "both": f"{en} {zh}"}[language]


def _note_text(note: Note, minutes_before: int, language: str) -> str:
    clock = "{}:{:02d}–{}:{:02d}".format(*divmod(minutes_before, 60), *divmod(minutes_before + note.minutes, 60))
    texts = {
        "en": f"**{note.minutes} minutes**, {clock}.\n\nAsk: {note.question['en']}",
        "zh": f"**{note.minutes} 分钟**，{clock}。\n\n提问：{note.question['zh']}",
    }
    return _columns([texts[one] for one in ("en", "zh")]) if language == "both" else texts[language]


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
    deck = {"language": language, "lang": LANGUAGES[language], "title": title, "css": style, "scripts": scripts}
    slides = deck_notebook(lesson_slides(notebook, language), language, notes)
    html, _ = _exporter().from_notebook_node(slides, resources={"deck": deck})
    return html


def decks(lessons: dict[str, NotebookNode], notes: dict[str, Note]) -> Iterator[tuple[str, str, str]]:
    """(language, lesson's name, page) of every deck."""
    for name, notebook in lessons.items():
        try:
            short = with_short_lines(notebook)
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
    if not (notebooks / NOTES).is_file():
        raise EditionError(f"{notebooks / NOTES} with the speaker notes is missing")
    notes = read_notes((notebooks / NOTES).read_text("utf-8"))
    if missing := missing_notes(lessons, notes):
        raise EditionError(f"{notebooks / NOTES} has no row for section {', '.join(missing)}")
    with output_folder(output) as folder:
        for language, name, page in decks(lessons, notes):
            (folder / language).mkdir(exist_ok=True)
            (folder / language / f"{name}.html").write_text(page, "utf-8")


if __name__ == "__main__":
    run_edition(build, "slides", __doc__.splitlines()[0])
