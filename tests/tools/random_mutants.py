"""Mutants of randomly drawn statements of the library, for `library_mutants.py --random`.

The mutants in `library_mutants.toml` were written together with the tests that kill them. These
ones are drawn without knowledge of the tests: a statement, then one of the changes in
`mutation_operators.py`. The draw depends on the library and the seed alone, so that the same
mutants can be tried before and after a change of the tests.

Statements outside functions are left out, because every test imports them, and so are docstrings,
bare annotations and `elif`. The removal of an assignment to local names is left out, because any
run of it raises `NameError`. Statements that no test executes are not left out: a mutant of such a
statement survives, and `library_mutants.py` reports it as "not run".
"""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from mutation_operators import mutants

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
LEFT_OUT = *FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass


class Statement(NamedTuple):
    """A statement of a function.

    Attributes:
        first: Number of its first line, from 0.
        end: Number of the line after it, from 0.
        source: Its code without comments and indentation.
    """

    first: int
    end: int
    source: str


class RandomMutant(NamedTuple):
    """One change of one statement, and the changed source of the file."""

    file: str  # relative to course_lib
    statement: Statement
    change: str
    source: str


def statements(source: str) -> list[Statement]:
    """Return the statements inside functions, in the order of the file."""
    lines, found = source.splitlines(), []
    for node in _in_functions(ast.parse(source), inside=False):
        is_elif = lines[node.lineno - 1].lstrip().startswith("elif")
        if not is_elif and not isinstance(node, LEFT_OUT) and not _has_no_effect(node):
            found.append(Statement(node.lineno - 1, node.end_lineno, ast.unparse(node)))
    return found


def _in_functions(node: ast.AST, inside: bool) -> Iterator[ast.stmt]:
    if inside and isinstance(node, ast.stmt):
        yield node
    inside = inside or isinstance(node, FUNCTIONS)
    for child in ast.iter_child_nodes(node):
        yield from _in_functions(child, inside)


def _has_no_effect(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or a bare annotation."""
    if not isinstance(node, (ast.Expr, ast.AnnAssign)):
        return False
    return node.value is None or isinstance(node.value, ast.Constant)


def changes(source: str, statement: Statement) -> dict[str, str]:
    """Map the name of each change of a statement to the changed source of the file."""
    lines = source.splitlines(keepends=True)
    start, rest = lines[: statement.first], lines[statement.end :]
    return {
        name: "".join([*start, _indented(new, lines[statement.first]), *rest])
        for name, new in mutants(statement.source, first_statement_only=True).items()
    }


def with_line_before(source: str, statement: Statement, line: str) -> str:
    """Return the source with one more line before a statement."""
    lines = source.splitlines(keepends=True)
    lines.insert(statement.first, _indented(line, lines[statement.first]))
    return "".join(lines)


def _indented(code: str, model: str) -> str:
    indentation = model[: len(model) - len(model.lstrip())]
    return textwrap.indent(code + "\n", indentation)


def draw(sources: dict[str, str], seed: int) -> Iterator[RandomMutant]:
    """Yield one change of each statement, in random order.

    Args:
        sources: Name of a file to its source.
        seed: Seed of the draw.
    """
    generator = random.Random(seed)
    pairs = [(file, each) for file in sorted(sources) for each in statements(sources[file])]
    for file, statement in generator.sample(pairs, len(pairs)):
        found = changes(sources[file], statement)
        names = sorted(found)
        if _assigns_names(statement):
            names = [name for name in names if not name.startswith("without `")]
        if names:
            change = generator.choice(names)
            yield RandomMutant(file, statement, change, found[change])


def _assigns_names(statement: Statement) -> bool:
    """Return whether each run fails without the statement, because local names are missing."""
    node = ast.parse(statement.source).body[0]
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [each for target in targets for each in getattr(target, "elts", [target])]
    return bool(names) and all(isinstance(name, ast.Name) for name in names)
