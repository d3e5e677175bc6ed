"""Minutes that a lesson takes, counted from its cells: `python -m publish.pace 02`.

With `--write`, the whole minutes go into all texts that state them: the lesson's script, the notes,
the instructor's guide, and the READMEs.

Only cells before the sections in depth are counted: their English words, guesses, figures, lines of
unfolded code, and the `minutes` in the metadata of exercises. A lesson is read in two sittings,
and a cell that begins with "End of the first sitting" ends the first one.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from .cells import NOTEBOOKS, NOTES

WORDS_PER_MINUTE = 130
LINES_PER_MINUTE = 4
MINUTES_PER_GUESS = 1.5  # the same for each figure
MOST_MINUTES = 60  # maximum of a sitting
STOP = re.compile(r"\*\*End of the first sitting\*\* \((\d+) minutes\)")
_IN_DEPTH = re.compile(r"^## In depth / 深入$", re.M)
_ENGLISH = re.compile(r'<div lang="en">(.*?)</div>', re.S)
# A row of the guide's table of minutes: "| 2.4: 9, 2.5: 3 | 12 |".
_GUIDE_ROW = r"^\| ((?:\d+\.\d+: \d+(?:, )?)+) \| \d+ \|"
READMES = (
    "README.md",
    "README.zh.md",
    "publish/student_assets/README.md",
    "publish/student_assets/README.zh.md",
)
_SECTION = re.compile(r"^## (\d+\.\d+) ", re.M)


def core(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells before the sections in depth; all cells if there are no such sections."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and _IN_DEPTH.search(cell.source):
            return notebook.cells[:number]
    return notebook.cells


def minutes_of(cell: NotebookNode) -> float:
    """Return the minutes that a reader of one language needs for a cell."""
    minutes = cell.metadata.get("minutes", 0)
    if cell.cell_type == "markdown":
        english = re.sub(r"<[^>]+>", "", " ".join(_ENGLISH.findall(cell.source)))
        guesses = english.count("Guess first")
        return minutes + len(english.split()) / WORDS_PER_MINUTE + guesses * MINUTES_PER_GUESS
    if not cell.metadata.get("jupyter", {}).get("source_hidden"):
        minutes += sum(bool(line.strip()) for line in cell.source.splitlines()) / LINES_PER_MINUTE
    outputs = (output.get("data", {}) for output in cell.get("outputs", ()))
    drawn = any("image/png" in data or "<img" in data.get("text/html", "") for data in outputs)
    return minutes + drawn * MINUTES_PER_GUESS


def minutes_per_section(cells: Iterable[NotebookNode]) -> dict[str, float]:
    """Return the minutes of each section by its number; the opening counts as section "0"."""
    minutes, section = {"0": 0.0}, "0"
    for cell in cells:
        if cell.cell_type == "markdown" and (heading := _SECTION.search(cell.source)):
            section = heading[1]
        minutes[section] = minutes.get(section, 0) + minutes_of(cell)
    return minutes


def sittings(cells: Sequence[NotebookNode]) -> list[list[NotebookNode]]:
    """Return the cells of each sitting; the cell that ends a sitting belongs to that sitting."""
    parts: list[list[NotebookNode]] = [[]]
    for cell in cells:
        parts[-1].append(cell)
        if cell.cell_type == "markdown" and STOP.search(cell.source):
            parts.append([])
    return parts


def stated_minutes(notebook: NotebookNode) -> list[dict[str, int]]:
    """Return, for each sitting, a dict from the number of a section to its whole minutes.

    Their sum is the counted minutes of the sitting, rounded.
    """
    stated = []
    for part in sittings(core(notebook)):
        names, counts = zip(*minutes_per_section(part).items(), strict=True)
        ends = [round(end) for end in accumulate(counts, initial=0)]
        stated.append({name: b - a for name, (a, b) in zip(names, pairwise(ends), strict=True)})
    return stated


def write_minutes(root: Path, number: str, notebook: NotebookNode) -> None:
    """Write the minutes of a lesson into every text below `root` that states them.

    The minutes of sections in depth are not counted, and stay as they are.

    Args:
        number: Number of the lesson, such as "02".
    """
    parts = stated_minutes(notebook)
    opening = parts[0].pop("0")
    per_section = {name: minutes for part in parts for name, minutes in part.items() if name != "0"}
    totals = [sum(minutes for name, minutes in part.items() if name != "0") for part in parts]
    totals[0] += opening
    lesson = str(int(number))
    notes = {lesson: opening, **per_section}
    (script,) = (root / NOTEBOOKS / "scripts").glob(f"{number}_*.py")
    _replace(
        script,
        (r"(\*\*(?:Goals|In this lesson)\*\* \()\d+(?= minutes)", rf"\g<1>{sum(totals)}"),
        (r"(\*\*(?:目标|本课内容)\*\*（(?:共 )?)\d+(?= 分钟)", rf"\g<1>{sum(totals)}"),
        (r"(\*\*End of the first sitting\*\* \()\d+(?= minutes)", rf"\g<1>{totals[0]}"),
        (r"(\*\*第一次学习到此结束\*\*（)\d+(?= 分钟)", rf"\g<1>{totals[0]}"),
    )
    rows = [
        (rf"^(\| {re.escape(name)} \| )\d+(?= \|)", rf"\g<1>{minutes}")
        for name, minutes in notes.items()
    ]
    _replace(root / NOTES, *rows)
    in_guide = dict(per_section)
    in_guide[next(iter(in_guide))] += opening  # the guide counts the opening with section 1
    row_of = partial(_guide_row, minutes=in_guide)
    _replace(root / NOTEBOOKS / "INSTRUCTORS.md", (_GUIDE_ROW, row_of))
    for readme in READMES:
        row = rf"^(\| \[{number}\].*? \| .*? \| )[\d +]+(?= \|)"
        _replace(root / readme, (row, r"\g<1>" + " + ".join(map(str, totals))))


def _guide_row(row: re.Match[str], minutes: Mapping[str, int]) -> str:
    """Return the first two cells of a row of the guide's table, with new minutes of a lesson."""
    shown = {name: int(stated) for name, stated in re.findall(r"(\d+\.\d+): (\d+)", row[1])}
    shown |= {name: count for name, count in minutes.items() if name in shown}
    sections = ", ".join(f"{name}: {count}" for name, count in shown.items())
    return f"| {sections} | {sum(shown.values())} |"


def _replace(path: Path, *changes: tuple[str, str | Callable[[re.Match[str]], str]]) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern, new in changes:
        text = re.sub(pattern, new, text, flags=re.M)
    path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the minutes of lessons, per section and per sitting."""
    parser = argparse.ArgumentParser(prog="python -m publish.pace", description=__doc__)
    parser.add_argument("lessons", nargs="+", help="numbers of lessons, such as 02")
    parser.add_argument("--write", action="store_true", help="write them into all texts")
    options = parser.parse_args(arguments)
    for number in options.lessons:
        (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
        notebook = nbformat.read(path, as_version=4)
        cells = core(notebook)
        sections = (f"{name}: {n:.1f}" for name, n in minutes_per_section(cells).items())
        totals = " + ".join(f"{sum(map(minutes_of, part)):.1f}" for part in sittings(cells))
        print(f"{path.stem}\n  {', '.join(sections)}\n  sittings: {totals}")
        if options.write:
            write_minutes(Path(), number, notebook)


if __name__ == "__main__":
    main()
