"""The slides of a lesson, each with its content and its heading."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import nbformat
from nbformat import NotebookNode

from .cells import EditionError, is_solution
from .class_slides import IN_DEPTH, NUMBER, task
from .languages import languages_in, markdown_in
from .slide_parts import (
    CODE_LINE,
    GAP,
    ROOM,
    claims_in,
    cut_code,
    output_height,
    result_groups,
    shown_code,
    shown_outputs,
)
from .student import check_of

_POINT_HEIGHT = 200  # pixels of the text above a table, the same in all languages
_MOST_JOINED_LINES = 12  # maximal lines of code on a slide that was joined from two


@dataclass
class Slide:
    """A slide before it is written as HTML.

    Attributes:
        kind: "title", "outline", "point" (a short text), "exercise", "code", "figure", "table",
            "claim", or "heading" for a section without content so far.
        parts: Cells below the heading.
        part: Key of a word in `slides.WORDS`, such as "continued". The word is shown in small
            letters after the heading.
        starts: Whether a section starts with this slide.
        height: Pixels that the parts are expected to need.
    """

    kind: str
    parts: list[NotebookNode] = field(default_factory=list)
    part: str = ""
    starts: bool = False
    section: str = ""
    heading: str = ""
    notes: list[str] = field(default_factory=list)
    height: float = 0.0

    def code_lines(self) -> int:
        """Count the lines of code on the slide."""
        return sum(len(part.source.splitlines()) for part in self.parts if part.cell_type == "code")


def lesson_slides(notebook: NotebookNode, language: str) -> list[Slide]:
    """Return the slides of one lesson in one language, or in both.

    The `slide` metadata of a cell says which part is shown. `{"en": "short text", "zh": "短文"}` on
    prose shows that text. "code", "result" or "both" on code shows the code, its output, or both.
    Cells without `slide` metadata are not shown, except that each exercise outside of the sections
    in depth gets a slide with its minutes. All prose becomes speaker notes.

    Raises:
        EditionError: No cell has `slide` metadata, the metadata has another form, the first cell is
            not the title, or a cell lacks the language.
    """
    if not any("slide" in cell.metadata for cell in notebook.cells):
        raise EditionError(
            "no cell has `slide` metadata, so there is nothing to show: add it to the cells of the"
            " lesson's script that the deck should show"
        )
    slides: list[Slide] = []
    section = heading = exercise = ""
    in_depth = False
    for cell in notebook.cells:
        is_prose = cell.cell_type == "markdown"
        in_depth = in_depth or (is_prose and cell.source.startswith(f"## {IN_DEPTH}"))
        if is_prose and "**Exercise " in cell.source:
            exercise = cell.source
        found = re.match(r"(##?) ([\d.]+) ([^\n]*)\n*", cell.source) if is_prose else None
        if found:
            section, heading = found[2], found[3]
        if not heading:
            raise EditionError(
                "a lesson must start with its title, '# 2 English / 中文', got"
                f" {cell.source[:60]!r}"
            )
        new = _cell_slides(cell, language)
        if is_prose and re.match("##? ", cell.source):
            new = new or [Slide("heading")]
        if found:
            new[0].starts = True
            if found[1] == "#":
                new[0].kind = "title"
        for slide in new:
            slide.section, slide.heading = section, heading
        if is_prose:
            text = cell.source[found.end() :] if found else cell.source
            spoken = (markdown_in(text, each) for each in languages_in(language))
            (new or slides)[-1].notes.append("\n\n".join(spoken))
        slides += new if found else _join(slides, new)
        if not is_prose and not in_depth:
            slides += _join(slides, _exercise_slides(cell, exercise, section, heading, language))
    return [slide for slide in slides if slide.parts or slide.kind == "title"]


def _cell_slides(cell: NotebookNode, language: str) -> list[Slide]:
    wanted = cell.metadata.get("slide")
    if wanted is None:
        return []
    if cell.cell_type == "code" and wanted in ("code", "result", "both"):
        return _code_slides(cell, language, wanted)
    if cell.cell_type == "code" or not isinstance(wanted, dict) or set(wanted) != {"en", "zh"}:
        raise EditionError(
            '`slide` must be "code", "result" or "both" on code, {"en": text, "zh": text} on prose,'
            f" got {wanted!r} on {cell.cell_type} that starts {cell.source[:40]!r}"
        )
    text = columns_of([wanted[each] for each in languages_in(language)])
    return [Slide("point", [nbformat.v4.new_markdown_cell(text)], height=_POINT_HEIGHT)]


def _exercise_slides(
    cell: NotebookNode, prose: str, section: str, heading: str, language: str
) -> list[Slide]:
    """Return a list with the slide that is shown while the class works, or an empty list.

    Args:
        prose: The cell that states the exercise, which becomes the speaker's note.
    """
    minutes, check, number = cell.metadata.get("minutes"), check_of(cell), NUMBER.search(prose)
    if not minutes or not check or not number or is_solution(cell):
        return []
    languages = languages_in(language)
    texts = [task(number[1], minutes, section, check, each) for each in languages]
    return [
        Slide(
            "exercise",
            [nbformat.v4.new_markdown_cell(columns_of(texts))],
            section=section,
            heading=heading,
            notes=["\n\n".join(markdown_in(prose, each) for each in languages)],
            height=_POINT_HEIGHT,
        )
    ]


def _join(slides: list[Slide], new: list[Slide]) -> list[Slide]:
    """Merge new slides into the last slide while they fit, and return the other new slides.

    Code and its result then share a slide, as do a question and a table.
    """
    last = slides[-1]
    while new and (last.kind == "heading" or _fit_together(last, new[0])):
        following = new.pop(0)
        if _has_fragment(last) or (following.kind == "table" and last.kind in ("point", "code")):
            # A result appears after the question, and its explanation after the result.
            for part in following.parts:
                part.metadata.slideshow = {"slide_type": "fragment"}
        if last.kind == "heading":
            last.part = following.part
        last.kind = following.kind
        last.parts += following.parts
        last.notes += following.notes
        last.height += following.height + GAP
    return new


def _fit_together(last: Slide, following: Slide) -> bool:
    """Return whether two slides may be merged into one.

    Titles, figures, claims, exercises and solutions are never merged.
    """
    alone = {"title", "figure", "claim", "exercise"}
    if (
        {last.kind, following.kind} & alone
        or "solution" in (last.part, following.part)
        or following.notes
    ):
        return False
    if last.kind == "point" and following.kind != "table":
        return False
    # New code below an old result would look like the cause of that result.
    if following.kind == "code" and _has_fragment(last):
        return False
    return (
        last.height + following.height <= ROOM - 60
        and last.code_lines() + following.code_lines() <= _MOST_JOINED_LINES
    )


def _has_fragment(slide: Slide) -> bool:
    return any("slideshow" in part.metadata for part in slide.parts)


def columns_of(texts: Sequence[str]) -> str:
    """Return a single text unchanged, or two texts (English, Chinese) as two columns."""
    if len(texts) == 1:
        return texts[0]
    divs = [
        f'<div lang="{name}">\n\n{text}\n\n</div>'
        for name, text in zip(("en", "zh"), texts, strict=True)
    ]
    return '<div class="columns">\n' + "\n".join(divs) + "\n</div>"


def _code_slides(cell: NotebookNode, language: str, wanted: str) -> list[Slide]:
    """Return the slides with a cell's code ("code"), its outputs ("result"), or "both"."""
    solved = "solution" if is_solution(cell) else ""
    # If the lesson folds a cell's code, only the result is shown. Solutions are folded, too, but
    # their code is shown.
    folded = not solved and cell.metadata.get("jupyter", {}).get("source_hidden")
    slides = []
    if wanted != "result" and not folded:
        for number, chunk in enumerate(cut_code(shown_code(cell.source))):
            part = nbformat.v4.new_code_cell(chunk)
            slides.append(Slide("code", [part], solved or ("continued" if number else "")))
            slides[-1].height = CODE_LINE * len(chunk.splitlines()) + GAP
    if wanted == "code":
        return slides
    outputs = [each for output in cell.outputs for each in shown_outputs(output, language)]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    others = [output for output in outputs if output not in figures]
    for claim, verdict in (claim for output in others for claim in claims_in(output)):
        parts = [nbformat.v4.new_code_cell(outputs=[each]) for each in (claim, verdict)]
        parts[1].metadata.slideshow = {"slide_type": "fragment"}  # the class votes before the click
        slides.append(Slide("claim", parts))
    for group in result_groups([each for each in others if not claims_in(each)], language):
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
        part = nbformat.v4.new_code_cell(outputs=[figure])
        slides.append(Slide("figure", [part], "figure" if slides else ""))
    return slides
