"""Minutes of lessons, which `publish.pace` counts from their cells.

Each sitting has at most an hour, and the lesson, README, guide and notes state the same minutes.
"""

import re
from copy import deepcopy

import pytest
from test_notebooks import PATHS, ROOT, load, nbformat

from publish import pace
from publish.cells import is_project
from publish.pace import core

LESSONS = [path for path in PATHS if not is_project(path.stem)]


def sections(cells):
    """Return the numbers of the sections, such as "2.1", in order."""
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^## (\d+\.\d+) ", text, re.M)


def pace_problems(notebook):
    """Find long or badly divided sittings, and exercises without minutes."""
    cells = core(notebook)
    parts = pace.sittings(cells)
    problems = [
        f"an exercise needs `minutes`: {cell.source[:40]!r}"
        for cell in cells
        if cell.cell_type == "code" and re.search(r"\bcheck_\w+\(", cell.source)
        if "minutes" not in cell.metadata and "### BEGIN SOLUTION" not in cell.source
    ]
    problems += [
        f"a sitting takes {counted:.1f} minutes, at most {pace.MOST_MINUTES}"
        for counted in (sum(map(pace.minutes_of, part)) for part in parts)
        if counted > pace.MOST_MINUTES
    ]
    problems += [
        "the first sitting must end with a section"
        for part in parts[1:]
        if not part or not re.match(r"## \d+\.\d+ ", part[0].source)
    ]
    return problems


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_duration_does_not_exceed_its_limits(path):
    assert pace_problems(load(path)) == []


STATING = (*pace.READMES, "notebooks/INSTRUCTORS.md", "publish/NOTES.md")


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_minutes_stated_in_all_texts_equal_computed_lesson_duration(path, tmp_path):
    """If this fails, run `python -m publish.pace --write` with the lesson's number."""
    names = [*STATING, f"notebooks/scripts/{path.stem}.py"]
    stored = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    for name, text in stored.items():
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    pace.write_minutes(tmp_path, path.stem[:2], load(path))
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in names} == stored

    longer = deepcopy(load(path))
    longer.cells.insert(2, prose("word " * 6500))
    pace.write_minutes(tmp_path, path.stem[:2], longer)
    changed = [name for name in names if (tmp_path / name).read_text("utf-8") != stored[name]]
    assert changed == names


def prose(text):
    return nbformat.v4.new_markdown_cell(f'<div lang="en">{text}</div>')


def lesson():
    """Return a lesson with sittings of 1 + 2 + 3 + 1.5 + 0.1 minutes and of 2.5 minutes."""
    new = nbformat.v4
    picture = new.new_output("display_data", data={"text/html": "<img src=''>"})
    return new.new_notebook(
        cells=[
            prose("word " * 127 + "**Goals** (10 minutes)"),
            new.new_code_cell("\n\ncheck_x(1)\n" * 8, metadata={"minutes": 3}),
            new.new_code_cell(
                "x\n" * 99, metadata={"jupyter": {"source_hidden": True}}, outputs=[picture]
            ),
            prose("**End of the first sitting** (8 minutes). " + "word " * 6),
            new.new_markdown_cell('## 9.1 A\n\n<div lang="en">' + "word " * 130 + "</div>"),
            prose("Guess first" + " word" * 2),
            new.new_markdown_cell("## In depth / 深入"),
            new.new_markdown_cell("## 9.2 B"),
        ]
    )


def test_lesson_duration_is_computed_per_sitting_and_section():
    parts = pace.sittings(core(lesson()))
    assert [round(sum(map(pace.minutes_of, part)), 1) for part in parts] == [7.6, 2.5]
    assert pace.minutes_per_section(core(lesson())).keys() == {"0", "9.1"}
    assert pace_problems(lesson()) == []
    pace.main(["00"])
