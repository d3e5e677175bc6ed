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
        names = [arg.arg for arg in [*given.posonlyargs, *given.args]][::-1]
        pairs = [*zip(names, given.defaults[::-1], strict=False)]
        pairs += [
            (arg.arg, value)
            for arg, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
            if value
        ]
        if isinstance(node, ast.Lambda):
            bound = bool(pairs)
        else:
            bound = any(name == ast.unparse(value) for name, value in pairs)
        found += [ast.unparse(node).splitlines()[0]] * bound
    return found


def tuples_as_statements(sources):
    """Tuples that are made for what happens on the way; the value that a cell shows at its end is
    none."""
    found = []
    for tree in map(ast.parse, sources):
        shown = tree.body[-1] if tree.body else None
        for node in ast.walk(tree):
            dropped = (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Tuple)
                and node is not shown
            )
            picked = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Tuple)
            found += [ast.unparse(node)] * (dropped or picked)
    return found


def closures_two_deep(sources):
    def depth(node):
        return isinstance(node, FUNCTIONS) + max(map(depth, ast.iter_child_nodes(node)), default=0)

    return [
        ast.unparse(node).splitlines()[0]
        for source in sources
        for node in ast.parse(source).body
        if depth(node) > 2
    ]


def names_out_of_sight(sources):
    """Names that no open cell has defined or imported before; a function may use what its own cell
    defines later."""
    known, found = set(dir(builtins)), []
    for source in sources:
        statements = [(node, *names_in(node)) for node in ast.parse(source).body]
        of_the_cell = set().union(*(bound for _, bound, _ in statements)) if statements else set()
        for node, bound, used in statements:
            later = of_the_cell if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
            own = set() if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) else bound
            found += sorted(used - known - later - own)
            known |= bound
    return found


def names_in(statement):
    """(names that a statement defines, names that it takes from outside)."""
    table = symtable.symtable(ast.unparse(statement), "cell", "exec")
    bound = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    used, tables = (
        {s.get_name() for s in table.get_symbols() if s.is_referenced()},
        list(table.get_children()),
    )
    while tables:
        inner = tables.pop()
        used |= {s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced()}
        tables += inner.get_children()
    return bound, used


RULES = {
    rule.__name__: rule
    for rule in (
        *(too_long, too_wide, chinese, defaults_that_bind),
        *(tuples_as_statements, closures_two_deep, names_out_of_sight),
    )
}


# --- the lessons ---


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:2])
def test_the_open_cells_of_a_lesson_keep_the_rules(script):
    sources = open_cells(script)
    found = {name: problems for name, rule in RULES.items() if (problems := rule(sources))}
    assert found == {}


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
        (
            closures_two_deep,
            "def f():\n    return lambda: 1",
            "def f():\n    return lambda: lambda: 1",
        ),
        (names_out_of_sight, "import math\nmath.pi", "math.pi"),
        (names_out_of_sight, "x = 1\nx += 1", "x = x + 1"),
        (names_out_of_sight, "def f():\n    return x\n\n\nx = 1", "def f():\n    return x"),
        (names_out_of_sight, "[x for x in range(2)]", "[y for x in range(2)]"),
        (names_out_of_sight, "for x in range(2):\n    y = x\n    y", "for x in y:\n    x"),
    ],
)
def test_a_fault_in_an_open_cell_is_found(rule, right, wrong):
    assert rule([right]) == [] and rule([wrong]) != []


def test_what_is_defined_in_an_open_cell_is_known_in_those_after_it():
    assert names_out_of_sight(["x = 1", "x"]) == [] and names_out_of_sight(["x", "x = 1"]) == ["x"]
