"""Texts of slides that are not in a cell of a lesson: outlines, and slides for exercises.

The outline follows the title and states minutes. The slide of an exercise stays on the screen while
the class works.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from nbformat import NotebookNode

from .languages import half
from .pace import STOP

IN_DEPTH = "In depth / 深入"
OUTLINE = "In this lesson / 本课内容"
NUMBER = re.compile(r"\*\*Exercise (\d+)\b")
_TASK = {
    "en": "**Exercise {number}** · {minutes} minutes\n\n"
    "In your notebook, section {section}: `{check}`",
    "zh": "**练习 {number}** · {minutes} 分钟\n\n在你的 notebook 里，{section} 节：`{check}`",
}
_HEADINGS = {
    "en": ("section", "minutes", "exercises"),
    "zh": ("节", "分钟", "练习"),
    "both": ("section / 节", "minutes / 分钟", "exercises / 练习"),
}
_FIRST_SITTING = "**first sitting** / **第一次学习**"


def task(number: str, minutes: int, section: str, check: str, language: str) -> str:
    """Return the text of the slide that is shown while the class works on an exercise."""
    return _TASK[language].format(number=number, minutes=minutes, section=section, check=check)


def outline(cells: Iterable[NotebookNode], minutes: Mapping[str, int], language: str) -> str:
    """Return a table of the lesson's sections, with their minutes and the numbers of exercises.

    A lesson is read in two sittings. A row with the minutes of the first sitting is placed where
    that sitting ends. The sections in depth are left out.

    Args:
        minutes: Dict from the number of a section to its minutes.
        language: "en", "zh", or "both" for headings in both languages.
    """
    rows: list[tuple[str, str, list[str]]] = []  # title, minutes, exercises
    for cell in cells:
        if cell.cell_type != "markdown":
            continue
        if cell.source.startswith(f"## {IN_DEPTH}"):
            break
        if heading := re.match(r"## ([\d.]+) ([^\n]*)", cell.source):
            title = f"{heading[1]} {half(heading[2], language)}"
            rows.append((title, str(minutes[heading[1]]), []))
        if rows:
            rows[-1][2].extend(NUMBER.findall(cell.source))
        if stop := STOP.search(cell.source):
            rows.append((half(_FIRST_SITTING, language), f"**{stop[1]}**", []))
    return _table(
        _HEADINGS[language],
        [(title, shown, ", ".join(exercises)) for title, shown, exercises in rows],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ("---", "--:", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
