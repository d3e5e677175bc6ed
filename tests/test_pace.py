"""How long a lesson takes, counted from its cells: what it states, and what guide and notes give
its sections, agree.

A line of open code takes 15 seconds, 200 words of prose a minute, an exercise the `minutes` of its
cell's metadata. A newcomer needs a quarter more than that, and this is what a lesson states.
"""

import re

import pytest
from test_notebooks import PATHS, load, nbformat

NEWCOMER = 1.25
MOST_MINUTES = 100
IN_DEPTH = re.compile(r"^## In depth / 深入$", re.M)


def core(notebook):
    """The cells before the heading of the optional sections; all of them where there is none."""
    cells = notebook.cells
    depth = [
        n for n, c in enumerate(cells) if c.cell_type == "markdown" and IN_DEPTH.search(c.source)
    ]
    return cells[: depth[0] if depth else None]


def sections(cells):
    """The numbers of the sections, "2.1", in order."""
    return re.findall(
        r"^## (\d+\.\d+) ", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M
    )


ENGLISH = re.compile(r'<div lang="en">(.*?)</div>', re.S)


def minutes_of(cell):
    """Minutes that a reader of one language needs for a cell."""
    minutes = cell.metadata.get("minutes", 0)
    if cell.cell_type == "markdown":
        words = re.sub(r"<[^>]+>", "", " ".join(ENGLISH.findall(cell.source))).split()
        return minutes + len(words) / 200
    folded = cell.metadata.get("jupyter", {}).get("source_hidden")
    return minutes + (0 if folded else sum(map(bool, map(str.strip, cell.source.splitlines()))) / 4)


def pace_problems(notebook, factor=NEWCOMER):
    """A lesson whose stated minutes are more than a tenth from what its cells take, or too many; an
    exercise without minutes."""
    cells = core(notebook)
    prose = "\n".join(cell.source for cell in cells)
    stated = {int(number) for number in re.findall(r"[(（](\d+) (?:minutes|分钟)[)）]", prose)}
    counted = factor * sum(map(minutes_of, cells))
    problems = [
        f"an exercise needs `minutes`: {cell.source[:40]!r}"
        for cell in cells
        if cell.cell_type == "code" and re.search(r"\bcheck_\w+\(", cell.source)
        if "minutes" not in cell.metadata and "### BEGIN SOLUTION" not in cell.source
    ]
    if len(stated) != 1 or abs(counted - min(stated)) > min(stated) / 10:
        problems.append(f"states {sorted(stated)} minutes, its cells take {counted:.1f}")
    if counted > MOST_MINUTES:
        problems.append(f"takes {counted:.1f} minutes, at most {MOST_MINUTES}")
    return problems


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_lesson_states_the_minutes_that_its_cells_take(path):
    assert pace_problems(load(path)) == []


def test_every_lesson_but_the_first_has_a_core():
    assert [path for path in PATHS if core(load(path)) == load(path).cells] == PATHS[:1]


def test_minutes_are_counted_by_the_rule():
    new, prose = nbformat.v4, f'<div lang="en">{"word " * 200}</div>（6 分钟）'
    exercise = new.new_code_cell("\n\ncheck_x(1)\n" * 8, metadata={"minutes": 3})
    folded = new.new_code_cell("x\n" * 99, metadata={"jupyter": {"source_hidden": True}})
    notebook = new.new_notebook(cells=[new.new_markdown_cell(prose), exercise, folded])
    assert pace_problems(notebook, 1.0) == []  # 1 + 2 + 3 minutes
    exercise.metadata = {}
    asks, states = pace_problems(notebook)
    assert asks.startswith("an exercise needs") and states.endswith("its cells take 3.8")
