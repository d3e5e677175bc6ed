"""Parts of slides: code and tables cut to fit, and the outputs that a deck shows."""

import ast
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import cast

import nbformat
from bs4 import BeautifulSoup, Tag
from nbformat import NotebookNode

from course_lib import labels
from course_lib.teaching.pictures import pictures_in

from .cells import EditionError, without_markers
from .languages import languages_in, output_in

MOST_CODE_LINES = 18  # more lines do not fit on a slide
CODE_WIDTH = 86  # characters that fit on a line
# Heights in pixels of a slide's body, and estimated heights of its parts. They determine where
# content is cut; deck.js shrinks slides that are still too high.
ROOM = 560
CODE_LINE, _TEXT_LINE, _TABLE_ROW, _TABLE_LINE, GAP = 31, 32, 42, 28, 30
_SECOND_HEADING = 60  # pixels that the second heading of a bilingual slide takes
_TABLE_WIDTH = 80  # letters in a row of a table whose columns share the width well
_CLAIM_COLUMNS = tuple(  # English and Chinese headings of `claims.claims_table`
    zip(
        *map(labels.in_both_languages, ("claim", "source", "experiment", "measured", "verdict")),
        strict=True,
    )
)


# --- code ---


def shown_code(source: str) -> str:
    """Return the code of a cell without its imports and the markers of a solution."""
    source = without_markers(source)
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip("\n")


def cut_code(code: str, most: int = MOST_CODE_LINES) -> list[str]:
    """Cut code into parts of at most `most` lines, between statements where possible.

    A cut between outer statements is preferred to one between inner statements.
    """
    lines = re.sub(r"\n{2,}", "\n\n", code.strip("\n")).splitlines()
    # least[i]: (lowest cost of cutting lines[:i], line at which the last part starts)
    least: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(lines) + 1):
        costs = (
            (least[start][0] + _cost_of_cut(lines, start) + 6 * (end - start < 3), start)
            for start in range(max(0, end - most), end)
        )
        least.append(min(costs))
    parts: list[str] = []
    end = len(lines)
    while end:
        start = least[end][1]
        parts.insert(0, "\n".join(lines[start:end]).strip("\n"))
        end = start
    return [part for part in parts if part.strip()]


def _cost_of_cut(lines: Sequence[str], start: int) -> float:
    """Return the cost of starting a part of the code at a line.

    `cut_code` minimizes the sum of these costs. A part costs 10. It costs more if it starts inside
    a statement or directly after a header, and less if it starts after an empty line.
    """
    if start == 0:
        return 10.0
    line, before = lines[start], lines[start - 1]
    indent = len(line) - len(line.lstrip())
    inside = line.lstrip()[:1] in tuple(")]}") or before.rstrip()[-1:] in tuple("([{,")
    header = before.lstrip().startswith("@") or before.rstrip().endswith(":")
    return 10.0 + indent + 25 * inside + 12 * header - 2 * (not before.strip())


@cache
def find_ruff() -> str:
    """Return the path of ruff, which breaks long lines.

    Raises:
        EditionError: ruff is not installed.
    """
    found = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if found is None:
        raise EditionError("ruff, which breaks long lines of code for the slides, is not installed")
    return found


def with_short_lines(notebook: NotebookNode, width: int = CODE_WIDTH) -> NotebookNode:
    """Return the notebook with its code formatted for lines of `width` characters.

    Raises:
        EditionError: ruff is not installed, or a code cell is not Python.
    """
    command = [
        find_ruff(),
        "format",
        "--isolated",
        "--stdin-filename",
        "lesson.ipynb",
        "--line-length",
        str(width),
    ]
    command += ["--config", "format.skip-magic-trailing-comma=true"]
    done = subprocess.run(
        command, input=nbformat.writes(notebook), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise EditionError(f"a code cell is not Python: {done.stderr.strip().splitlines()[0]}")
    return cast(NotebookNode, nbformat.reads(done.stdout, as_version=4))


# --- results ---


def shown_outputs(output: NotebookNode, language: str) -> list[NotebookNode]:
    """Return the outputs that a deck shows for an output: none, one, or a picture per language.

    Sliders, progress bars and the language switch are not shown. A figure becomes the picture that
    was drawn for slides, as image/png, with its alt text in the metadata.

    Raises:
        EditionError: A figure has no picture for slides.
    """
    html = output.get("data", {}).get("text/html", "")
    if pictures := pictures_in(html):
        large = output.metadata.get("slides", {})
        if missing := set(pictures) - set(large):
            raise EditionError(
                f"a figure has no picture for slides in {', '.join(sorted(missing))}:"
                " `make notebooks` draws it, and so does a cell that is run in `make results`"
            )
        return [
            nbformat.v4.new_output(
                "display_data",
                {"image/png": large[each]},
                metadata={"alt": pictures[each].alt, "lang": each},
            )
            for each in languages_in(language)
        ]
    if "course-language" in html:
        return []
    output = output_in(output, language)
    if html:
        return [output]
    text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
    nothing = (
        not text.strip()
        or re.match(r"(interactive|VBox|HBox|Output)\(", text)
        or re.search(r"\d+%\|", text)
    )
    return [] if nothing or output.output_type == "error" else [output]


def pack(heights: Sequence[float], room: float) -> list[list[int]]:
    """Divide heights, in order, into the fewest groups of at most `room`, about equally full."""

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
    return next(
        (groups for limit in limits if limit <= room and len(groups := fill(limit)) == fewest),
        fill(room),
    )


def _width(text: str) -> int:
    """Return the width of a text in Latin letters; a Chinese character is as wide as two."""
    return sum(1 if ord(character) < 0x2E80 else 2 for character in text)


def output_height(output: NotebookNode, language: str) -> float:
    """Return the estimated height of a table or a text in pixels."""
    html = output.get("data", {}).get("text/html")
    if html is None:
        text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
        return _TEXT_LINE * sum(
            max(1, math.ceil(len(line) / CODE_WIDTH)) for line in text.splitlines()
        )
    soup = BeautifulSoup(html, "html.parser")
    height = 0.0
    for row in soup.find_all("tr") or [soup]:
        double = language == "both" and row.select_one('[lang="zh"]') is not None
        lines = max(1 + double, 1.35 * _width(row.get_text(" ", strip=True)) / _TABLE_WIDTH)
        height += _TABLE_ROW + _TABLE_LINE * (lines - 1)
    return height + (2 * _TEXT_LINE if soup.select_one(".course-gpu, .course-verdict") else 0)


def result_groups(outputs: Sequence[NotebookNode], language: str) -> list[list[NotebookNode]]:
    """Group the results of a cell by slide, and cut tables that are too long between rows."""
    parts = [part for output in outputs for part in cut_table(output, language)]
    return [
        [parts[index] for index in group]
        for group in pack([output_height(p, language) for p in parts], ROOM)
    ]


def cut_table(output: NotebookNode, language: str) -> list[NotebookNode]:
    """Cut a table that is higher than a slide.

    Each part has the table's headings. Text below the table goes to the last part.
    """
    count = math.ceil(
        output_height(output, language) / (ROOM - _SECOND_HEADING * (language == "both"))
    )
    if count < 2:
        return [output]
    soup = BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser")
    if len(soup.select("table")) != 1:
        return [output]
    rows = soup.select("tbody tr")
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


def claims_in(output: NotebookNode) -> list[tuple[NotebookNode, NotebookNode]]:
    """Return two outputs per row of a table of claims: claim and source, measurement and verdict.

    The rows are those of the table that a lesson shows with `course_lib.teaching.claims`. For any
    other output, the list is empty.
    """
    html = output.get("data", {}).get("text/html", "")
    if "<thead" not in html:
        return []
    soup = BeautifulSoup(html, "html.parser")
    columns = [th.get_text(" ", strip=True) for th in soup.select("thead th")]
    names = [" ".join(words) for words in zip(*_CLAIM_COLUMNS, strict=True)]  # in both languages
    found = [list(one) for one in (*_CLAIM_COLUMNS, names)]
    if columns not in found:
        return []
    return [_claim_outputs(row.find_all("td")) for row in soup.select("tbody tr")]


def _claim_outputs(cells: Sequence[Tag]) -> tuple[NotebookNode, NotebookNode]:
    claim, source, _, measured, verdict = ((cell.div or cell).decode_contents() for cell in cells)
    # The first words of a verdict are the outcome.
    verdict = re.sub(
        r"(?:^|(?<=>))([^\s<:：.。][^<:：.。]*[:：.。])", r"<strong>\1</strong>", verdict
    )
    halves = [
        (("claim", claim), ("source", source)),
        (("measured", measured), ("verdict", verdict)),
    ]
    html = (
        "".join(f'<div class="{name}">{words}</div>' for name, words in half) for half in halves
    )
    front, back = (nbformat.v4.new_output("display_data", {"text/html": each}) for each in html)
    return front, back
