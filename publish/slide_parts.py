"""Content of the slides, cut so that it fits: prose at paragraphs, code at statements, tables and
figures."""

import ast
import base64
import io
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import nbformat
from bs4 import BeautifulSoup, Tag
from nbformat import NotebookNode

from course_lib import labels
from course_lib.teaching.pictures import pictures_in
from course_lib.teaching.switch import PER_LANGUAGE

from .cells import EditionError

if TYPE_CHECKING:
    from PIL import Image

MOST_CODE_LINES = 12
MOST_CHOSEN_LINES = 18  # of code that a lesson chose to show: all that fits
CODE_WIDTH = 86  # characters that fit on a line
# A body's height in pixels, and what things take of it: estimates that decide where to cut. deck.js
# shrinks the rest.
ROOM = 560
CODE_LINE, _TEXT_LINE, _TABLE_ROW, _TABLE_LINE, GAP = 31, 32, 42, 28, 30
_SECOND_HEADING = 60  # pixels that a heading in both languages takes more, and the air around it
_TABLE_WIDTH = 80  # letters in a row of a table, if its columns share the width well
# pixels of a picture; one of several panels that is higher is cut between them
_MOST_FIGURE_HEIGHT = 560
_WHITE = ((255, 255),) * 3
_TITLE_HEIGHT = 22  # pixels of a panel's title
_CLAIM_COLUMNS = tuple(  # in English, in Chinese: the headings of `said.what_you_may_have_read`
    zip(*map(labels.both, ("claim", "source", "experiment", "measured", "verdict")), strict=True)
)


# --- prose ---


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a markdown text; one that ends with a colon keeps the one after it."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if found and re.search(r"[:：]\**$", found[-1]):
            found[-1] += f"\n\n{paragraph}"
        elif paragraph:
            found.append(paragraph)
    return found


def pack(heights: Sequence[float], room: float) -> list[list[int]]:
    """Put things into as few groups as have room for them, in order, and make the groups about
    equally full."""

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


def text_height(text: str, width: int) -> float:
    """Lines that a paragraph takes where so many Latin letters fit into one; a Chinese character is
    as wide as two."""
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


# --- code ---


def shown_code(source: str, outputs: Sequence[NotebookNode]) -> str:
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
    only_shows = call in (
        "what_you_may_have_read",
        "on_gpu",
        "about_this_machine",
        "course_map",
        "timelines",
    )
    tabulates = call in ("table", "predictions", "compare") and all(map(_makes_headings, body[:-1]))
    hidden = outputs and not makes_things and (draws or only_shows or tabulates)
    return "" if hidden else "\n".join(lines).strip("\n")


def _makes_headings(node: ast.stmt) -> bool:
    """Whether a statement gives the headings of a table, and does nothing else."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return all(isinstance(target, ast.Name) and target.id == "headings" for target in targets)


def cut_code(code: str, most: int = MOST_CODE_LINES) -> list[str]:
    """Cut code into parts of at most `most` lines, where it hurts least: between statements, the
    outer ones first."""
    lines = re.sub(r"\n{2,}", "\n\n", code.strip("\n")).splitlines()
    # least[i]: (cost of cutting what precedes line i, where its last part begins)
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
    """A part costs 10; one that begins deep in a statement or behind its header more, behind an
    empty line less."""
    if start == 0:
        return 10.0
    line, before = lines[start], lines[start - 1]
    indent = len(line) - len(line.lstrip())
    inside = line.lstrip()[:1] in tuple(")]}") or before.rstrip()[-1:] in tuple("([{,")
    header = before.lstrip().startswith("@") or before.rstrip().endswith(":")
    return 10.0 + indent + 25 * inside + 12 * header - 2 * (not before.strip())


@cache
def find_ruff() -> str:
    found = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if found is None:
        raise EditionError("ruff, which breaks long lines of code for the slides, is not installed")
    return found


def with_short_lines(notebook: NotebookNode, width: int = CODE_WIDTH) -> NotebookNode:
    """The notebook with its code formatted for so many characters a line.

    Raises:
        EditionError: there is no ruff, or a code cell is no Python.
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


def outputs_in(output: NotebookNode, language: str) -> list[NotebookNode]:
    """An output in the language; nothing if it shows nothing, as a slider without a kernel or a
    progress bar.

    A figure becomes image/png data, with its alt text in the metadata; for both languages it
    becomes two.
    """
    output = deepcopy(output)
    data = output.get("data", {})
    if pictures := pictures_in(data.get("text/html", "")):
        # drawn for slides; a lesson stored before has none
        large = output.metadata.get("slides", {})
        return [
            nbformat.v4.new_output(
                "display_data",
                {"image/png": large.get(spoken, each.png)},
                metadata={"alt": each.alt, "lang": spoken, "drawn_for_slides": spoken in large},
            )
            for spoken, each in pictures.items()
            if language in (spoken, "both")
        ]
    if "text/html" in data:
        soup = BeautifulSoup(data["text/html"], "html.parser")
        if soup.select_one(".course-language"):
            return []
        for element in soup.find_all(
            PER_LANGUAGE, lang={"en": "zh", "zh": "en", "both": "none"}[language]
        ):
            element.decompose()
        for element in soup.find_all("section"):  # reveal.js would take it for a slide
            element.name = "article"
        data["text/html"] = str(soup)
        return [output]
    text = output.get("text", "") or data.get("text/plain", "")
    nothing = (
        not text.strip()
        or re.match(r"(interactive|VBox|HBox|Output)\(", text)
        or re.search(r"\d+%\|", text)
    )
    return [] if nothing or output.output_type == "error" else [output]


def output_height(output: NotebookNode, language: str) -> float:
    """Pixels that a table or text is expected to take."""
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
    """The results of a cell, those together that fit on a slide; a long table is cut between its
    rows."""
    parts = [part for output in outputs for part in cut_table(output, language)]
    return [
        [parts[index] for index in group]
        for group in pack([output_height(p, language) for p in parts], ROOM)
    ]


def cut_table(output: NotebookNode, language: str) -> list[NotebookNode]:
    """A table that is higher than a slide as several, each with the headings; what stands below it
    goes to the last."""
    soup = BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser")
    rows = soup.select("tbody tr")
    count = math.ceil(
        output_height(output, language) / (ROOM - _SECOND_HEADING * (language == "both"))
    )
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


def claims_in(output: NotebookNode) -> list[tuple[NotebookNode, NotebookNode]]:
    """(the claim and its source, what was measured and the verdict) of each row of a table of
    claims, as outputs.

    The words are those of the table that the lesson shows, `course_lib.teaching.claims`; any other
    output has none.
    """
    soup = BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser")
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


def cut_figure(output: NotebookNode) -> list[NotebookNode]:
    """A high figure of several panels as several pictures, cut in the widest empty bands."""
    from PIL import Image

    if output.metadata.get("drawn_for_slides"):
        return [output]
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
        # one line of text between two bands: a panel's title, which goes with the panel below
        if above:
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
    rows = [
        picture.crop((0, y, picture.width, y + 1)).getextrema() == _WHITE
        for y in range(picture.height)
    ]
    edges = [
        y
        for y in range(picture.height + 1)
        if (y and rows[y - 1]) != (y < picture.height and rows[y])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))
