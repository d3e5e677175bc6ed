"""Open code cells show the idea: short, in English, and with every name in sight."""

import ast
import builtins
import re
import symtable
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
TransformerManager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager

SCRIPTS = sorted((Path(__file__).parents[1] / "notebooks" / "scripts").glob("*.py"))
MOST_LINES, MOST_COLUMNS = 15, 100
HAN = re.compile("[\u3400-\u9fff]")


# --- the rules: sources of a lesson's open cells -> what is wrong ---


def open_cells(script):
    """The code that a reader sees without unfolding anything."""
    return [
        TransformerManager().transform_cell(cell.source)
        for cell in jupytext.read(script, fmt="py:percent").cells
        if cell.cell_type == "code" and not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]


def lines_of(source):
    return [line for line in source.splitlines() if line.strip()]


def too_long(sources):
    return [lines_of(source)[0] for source in sources if len(lines_of(source)) > MOST_LINES]


def too_wide(sources):
    return [line for source in sources for line in lines_of(source) if len(line) > MOST_COLUMNS]


def chinese(sources):
    return [line for source in sources for line in lines_of(source) if HAN.search(line)]


def names_out_of_sight(sources):
    """Names that no open cell defines or imports. Running the notebook checks their order."""
    tables = [symtable.symtable("\n".join(sources), "cells", "exec")]
    of_the_cells = tables[0].get_symbols()
    known = {
        s.get_name() for s in of_the_cells if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    used = {s.get_name() for s in of_the_cells if s.is_referenced()}
    while tables:
        inner = tables.pop()
        used |= {s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced()}
        tables += inner.get_children()
    return sorted(used - known - set(dir(builtins)))


def hidden_files(sources):
    """Files of a lesson, such as `figures`, whose name another line of the cells takes."""
    tree = ast.parse("\n".join(sources))
    files = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and re.fullmatch(r"course_lib\.lessons\.lesson_\d\d", node.module or "")
        for alias in node.names
    }
    taken = {
        getattr(node, "id", getattr(node, "name", getattr(node, "arg", "")))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    return sorted(files & taken)


RULES = (too_long, too_wide, chinese, names_out_of_sight, hidden_files)


# --- the lessons ---


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:2])
def test_the_open_cells_of_a_lesson_keep_the_rules(script):
    sources = open_cells(script)
    assert {rule.__name__: found for rule in RULES if (found := rule(sources))} == {}


# --- each rule finds a fault ---


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (too_long, "x = 1\n" * 15, "x = 1\n" * 15 + "# a comment is read too\n"),
        (
            hidden_files,
            "from course_lib.lessons.lesson_01 import figures\ndrawn = figures.f()",
            "from course_lib.lessons.lesson_01 import figures\nfigures = figures.f()",
        ),
        (too_wide, f"x = '{'a' * 94}'", f"x = '{'a' * 95}'"),
        (chinese, "x = 'peak'", "x = 'peak'  # 峰值"),
        (names_out_of_sight, "import math\nmath.pi", "math.pi"),
        (names_out_of_sight, "x = 1\nx += 1", "x[0] = 1"),
        (names_out_of_sight, "def f():\n    return x\n\n\nx = 1", "def f():\n    return x"),
        (names_out_of_sight, "[x for x in range(2)]", "[y for x in range(2)]"),
        (names_out_of_sight, "for x in range(2):\n    y = x\n    y", "for x in y:\n    x"),
    ],
)
def test_a_fault_in_an_open_cell_is_found(rule, right, wrong):
    assert rule([right]) == [] and rule([wrong]) != []
