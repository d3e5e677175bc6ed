"""A lesson as slides: what stands on each, under which heading."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import nbformat
from nbformat import NotebookNode

from .cells import EditionError, in_language, is_solution
from .slide_parts import (
    CODE_LINE,
    GAP,
    MOST_CHOSEN_LINES,
    MOST_CODE_LINES,
    ROOM,
    claims_in,
    cut_code,
    cut_figure,
    output_height,
    outputs_in,
    pack,
    paragraphs,
    result_groups,
    shown_code,
    text_height,
)

_POINT_HEIGHT = 200  # pixels of a slide's own text above a table: the same in all languages


@dataclass
class Slide:
    """A slide before it is written: its kind, what stands under its heading, and whether a section
    starts with it."""

    kind: str  # title, prose, point, code, figure, table, claim; heading: nothing below it so far
    parts: list[NotebookNode] = field(default_factory=list)
    part: str = ""  # a key of `slides.WORDS`, written small behind the heading
    starts: bool = False
    section: str = ""
    heading: str = ""
    notes: list[str] = field(default_factory=list)
    height: float = 0.0  # pixels that the parts are expected to take

    def code_lines(self) -> int:
        """Lines of code on it."""
        return sum(len(part.source.splitlines()) for part in self.parts if part.cell_type == "code")


def lesson_slides(notebook: NotebookNode, language: str) -> list[Slide]:
    """The slides of one lesson in one language, or in both: what its cells' `slide` metadata names,
    or all of it.

    `slide={"en": "short text", "zh": "短文"}` on prose shows that text, and the prose becomes
    speaker notes. On code, `slide="code"`, `"result"` or `"both"` says what is shown of the cell.

    Raises:
        EditionError: a cell before the title, a cell that lacks the language, `slide` metadata of
            another kind.
    """
    slides: list[Slide] = []
    section = heading = ""
    cells = [cell for cell in notebook.cells if slide_type(cell) != "skip"]
    told = is_told(notebook)
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        found = (
            re.match(r"(##?) ([\d.]+) ([^\n]*)\n*", cell.source)
            if cell.cell_type == "markdown"
            else None
        )
        if found:
            section, heading = found[2], found[3]
        if not heading:
            raise EditionError(
                "a lesson must start with its title, '# 2 English / 中文', got"
                f" {cell.source[:60]!r}"
            )
        kind = "title" if found and found[1] == "#" else "prose"
        body = cell.source[found.end() :] if found else cell.source
        if slide_type(cell) == "notes":
            slides[-1].notes.append(_text_in(cell.source, language))
            continue
        if told:
            new = _told_slides(cell, following, language)
        elif cell.cell_type == "markdown":
            new = _prose_slides(body, language, kind)
        else:
            new = _code_slides(cell, following, language)
        if (found or (told and cell.source.startswith("## "))) and not new:
            new = [Slide("heading")]
        for slide in new:
            slide.section, slide.heading = section, heading
        if told and cell.cell_type == "markdown":
            (new or slides)[-1].notes.append(_text_in(body, language))
        if found:
            new[0].starts = True
            new[0].kind = kind if kind == "title" else new[0].kind
        elif slide_type(cell) not in ("slide", "subslide"):
            new = _joined(slides, new)
        slides += new
    return [slide for slide in slides if slide.parts or slide.kind == "title"]


def is_told(notebook: NotebookNode) -> bool:
    """Whether the lesson says which slides it has; all others are derived from its cells."""
    return any("slide" in cell.metadata for cell in notebook.cells)


def _told_slides(cell: NotebookNode, following: NotebookNode | None, language: str) -> list[Slide]:
    wanted = cell.metadata.get("slide")
    if wanted is None:
        return []
    if cell.cell_type == "code" and wanted in ("code", "result", "both"):
        return _code_slides(cell, following, language, shown=wanted)
    if cell.cell_type == "code" or not isinstance(wanted, dict) or set(wanted) != {"en", "zh"}:
        raise EditionError(
            '`slide` must be "code", "result" or "both" on code, {"en": text, "zh": text} on prose,'
            f" got {wanted!r} on {cell.cell_type} that starts {cell.source[:40]!r}"
        )
    texts = [wanted[one] for one in (("en", "zh") if language == "both" else (language,))]
    return [
        Slide("point", [nbformat.v4.new_markdown_cell(columns_of(texts))], height=_POINT_HEIGHT)
    ]


def slide_type(cell: NotebookNode) -> str | None:
    return cell.metadata.get("slideshow", {}).get("slide_type")


def _joined(slides: list[Slide], new: list[Slide]) -> list[Slide]:
    """The last slide takes what follows if there is room: a few words and the code they speak of, a
    result and why."""
    last = slides[-1]
    while new and (last.kind == "heading" or _fit_together(last, new[0])):
        taken = new.pop(0)
        if _has_fragment(last) or (taken.kind == "table" and last.kind in ("point", "code")):
            # what explains a result comes after it, and a result after the question
            for part in taken.parts:
                part.metadata.slideshow = {"slide_type": "fragment"}
        if last.kind == "heading":
            last.part = taken.part
        last.kind = taken.kind
        last.parts += taken.parts
        last.notes += taken.notes
        last.height += taken.height + GAP
    return new


def _fit_together(last: Slide, following: Slide) -> bool:
    """Whether two slides may be one; titles, figures and solutions stay alone."""
    alone = {"title", "figure", "claim"}
    if (
        {last.kind, following.kind} & alone
        or "solution" in (last.part, following.part)
        or following.notes
    ):
        return False
    if last.kind == "point" and following.kind != "table":
        return False
    # new code under an old result would be taken for its cause
    if following.kind == "code" and _has_fragment(last):
        return False
    return (
        last.height + following.height <= ROOM - 60
        and last.code_lines() + following.code_lines() <= MOST_CODE_LINES
    )


def _has_fragment(slide: Slide) -> bool:
    return any(slide_type(part) == "fragment" for part in slide.parts)


def _text_in(source: str, language: str) -> str:
    """A cell in the language, or in both, as plain markdown."""
    return "\n\n".join(
        in_language(source, one) for one in (("en", "zh") if language == "both" else (language,))
    )


def _prose_slides(source: str, language: str, kind: str) -> list[Slide]:
    bodies = [
        paragraphs(in_language(source, one))
        for one in (("en", "zh") if language == "both" else (language,))
    ]
    if not any(bodies):
        return [Slide(kind)] if kind == "title" else []
    if len({len(body) for body in bodies}) > 1:  # no pairs of paragraphs: all of it on one slide
        bodies = [["\n\n".join(body)] for body in bodies]
    width, room = (46, 15.5) if language == "both" else (76, 12.0)
    if kind == "title":
        room -= 3
    rows = list(zip(*bodies, strict=True))
    heights = [max(text_height(text, width) for text in row) for row in rows]
    slides = []
    for group in pack(heights, room):
        chosen = [rows[index] for index in group]
        columns = ["\n\n".join(column) for column in zip(*chosen, strict=True)]
        slides.append(
            Slide(
                kind if not slides else "prose",
                [nbformat.v4.new_markdown_cell(columns_of(columns))],
            )
        )
        slides[-1].part = "continued" if len(slides) > 1 else ""
        slides[-1].height = ROOM / room * sum(heights[index] for index in group)
    return slides


def columns_of(texts: Sequence[str]) -> str:
    """One text unchanged, or two in two columns, English and Chinese."""
    if len(texts) == 1:
        return texts[0]
    divs = [
        f'<div lang="{name}">\n\n{text}\n\n</div>'
        for name, text in zip(("en", "zh"), texts, strict=True)
    ]
    return '<div class="columns">\n' + "\n".join(divs) + "\n</div>"


def _code_slides(
    cell: NotebookNode, following: NotebookNode | None, language: str, shown: str = ""
) -> list[Slide]:
    """The code and its outputs; `shown` may ask for "code", "result" or "both", whatever they
    are."""
    if not shown and _is_plumbing(cell.source):
        return []
    outputs = [each for output in cell.outputs for each in outputs_in(output, language)]
    solved = "solution" if is_solution(cell) else ""
    # an attempt: its verdict says only that it is one
    if following is not None and is_solution(following):
        outputs = []
    if shown == "code":
        outputs = []
    code = "" if shown == "result" else shown_code(cell.source, [] if shown else outputs)
    figures = [
        part
        for output in outputs
        if "image/png" in output.get("data", {})
        for part in cut_figure(output)
    ]
    others = [output for output in outputs if "image/png" not in output.get("data", {})]

    slides = []
    # what it shows is seen, not the code
    folded = not solved and cell.metadata.get("jupyter", {}).get("source_hidden")
    most = MOST_CHOSEN_LINES if shown else MOST_CODE_LINES
    for number, chunk in enumerate([] if folded else cut_code(code, most)):
        part = nbformat.v4.new_code_cell(chunk)
        slides.append(Slide("code", [part], solved or ("continued" if number else "")))
        slides[-1].height = CODE_LINE * len(chunk.splitlines()) + GAP
    claims = [each for output in others for each in claims_in(output)]
    others = [output for output in others if not claims_in(output)]
    for claim, verdict in claims:  # hands up before the click
        parts = [nbformat.v4.new_code_cell(outputs=[each]) for each in (claim, verdict)]
        parts[1].metadata.slideshow = {"slide_type": "fragment"}
        slides.append(Slide("claim", parts))
    for group in result_groups(others, language):
        result = nbformat.v4.new_code_cell(outputs=group)
        height = sum(output_height(output, language) for output in group)
        if slides and slides[-1].height + height <= ROOM and slides[-1].kind == "code":
            result.metadata.slideshow = {"slide_type": "fragment"}
            slides[-1].parts.append(result)
            slides[-1].height += height
        else:
            slides.append(
                Slide("table", [result], solved or ("result" if slides else ""), height=height)
            )
    for figure in figures:
        slides.append(
            Slide(
                "figure", [nbformat.v4.new_code_cell(outputs=[figure])], "figure" if slides else ""
            )
        )
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
        return name == "language" or name.split(".")[-1].startswith("check_")

    return "### BEGIN SOLUTION" not in source and all(map(is_plumbing, statements))
