"""Open code cells show the idea: short, in English, without tricks, and with every name in
sight."""

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
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


# --- the rules: sources of a lesson's open cells -> what is wrong ---


def open_cells(script):
    """The code that a reader sees without unfolding anything."""
    cells = [
        cell for cell in jupytext.read(script, fmt="py:percent").cells if cell.cell_type == "code"
    ]
    seen = [
        cell.source for cell in cells if not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]
    return [TransformerManager().transform_cell(source) for source in seen]


def lines_of(source):
    return [line for line in source.splitlines() if line.strip()]


def nodes(sources, kind):
    return [
        node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, kind)
    ]


def too_long(sources):
    return [lines_of(source)[0] for source in sources if len(lines_of(source)) > MOST_LINES]


def too_wide(sources):
    return [line for source in sources for line in lines_of(source) if len(line) > MOST_COLUMNS]


def chinese(sources):
    return [line for source in sources for line in lines_of(source) if HAN.search(line)]


def defaults_that_bind(sources):
    """`lambda x=x: …`, and `def f(x=x)`: they keep a loop's value."""
    found = []
    for node in nodes(sources, FUNCTIONS):
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        names = [*positional[len(positional) - len(given.defaults) :], *given.kwonlyargs]
        values = [*given.defaults, *given.kw_defaults]
        bound = [
            n.arg
            for n, value in zip(names, values, strict=True)
            if value and n.arg == ast.unparse(value)
        ]
        found += bound or ["lambda"] * (isinstance(node, ast.Lambda) and any(values))
    return found


def tuples_as_statements(sources):
    """Tuples that are made for what happens on the way; the value that a cell shows at its end is
    none."""
    shown = [ast.parse(source).body[-1:] for source in sources]
    ends = [ast.unparse(node) for body in shown for node in body]
    return [
        ast.unparse(node)
        for node in nodes(sources, ast.Expr | ast.Subscript)
        if isinstance(node.value, ast.Tuple) and ast.unparse(node) not in ends
    ]


def closures_two_deep(sources):
    def depth(node):
        return isinstance(node, FUNCTIONS) + max(map(depth, ast.iter_child_nodes(node)), default=0)

    return [ast.unparse(node) for node in nodes(sources, FUNCTIONS) if depth(node) > 2]


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


RULES = (too_long, too_wide, chinese, defaults_that_bind, tuples_as_statements, closures_two_deep)
RULES += (names_out_of_sight,)


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
        (too_wide, f"x = '{'a' * 94}'", f"x = '{'a' * 95}'"),
        (chinese, "x = 'peak'", "x = 'peak'  # 峰值"),
        (defaults_that_bind, "lambda x: x", "lambda x, n=n: x"),
        (defaults_that_bind, "def f(x, size=2, *, n=None): x", "def f(x, size=2, *, n=n): x"),
        (defaults_that_bind, "def f(n, x=1): x", "def f(n, x=x): x"),
        (tuples_as_statements, "x = 1, 2\nx, x", "x.pop(), x.pop()\nx"),
        (tuples_as_statements, "x[0]", "f(lambda: (x.pop(), x)[1])"),
        (closures_two_deep, "def f():\n    lambda: 1", "def f():\n    lambda: lambda: 1"),
        (names_out_of_sight, "import math\nmath.pi", "math.pi"),
        (names_out_of_sight, "x = 1\nx += 1", "x[0] = 1"),
        (names_out_of_sight, "def f():\n    return x\n\n\nx = 1", "def f():\n    return x"),
        (names_out_of_sight, "[x for x in range(2)]", "[y for x in range(2)]"),
        (names_out_of_sight, "for x in range(2):\n    y = x\n    y", "for x in y:\n    x"),
    ],
)
def test_a_fault_in_an_open_cell_is_found(rule, right, wrong):
    assert rule([right]) == [] and rule([wrong]) != []
