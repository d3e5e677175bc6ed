"""Mutants of randomly drawn statements of the library, for `library_mutants.py --random`.

The mutants in `library_mutants.toml` were written together with the tests that kill them. These
ones are drawn without knowledge of the tests: a statement, then one of the changes in
`mutation_operators.py`. `random_mutants.csv` stores the draw, so that the same mutants can be
tried before and after a change of the tests. The draw depends on the library and the seed alone.

Statements outside functions are left out, because every test imports them, and so are docstrings,
bare annotations and `elif`. The removal of an assignment to local names is left out, because any
run of it raises `NameError`. Statements that no test executes are not left out: a mutant of such a
statement survives, and `library_mutants.py` reports it as "not run".
"""

from __future__ import annotations

import ast
import csv
import random
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mutation_operators import mutants

STORED = Path(__file__).with_suffix(".csv")


class Statement(NamedTuple):
    """A statement of a function.

    Attributes:
        text: Its first line, as `ast.unparse` prints it.
        occurrence: Its number among the statements of the file with the same text, from 1.
        first: Number of its first line, from 0.
        end: Number of the line after it, from 0.
        source: Its code without comments and indentation.
    """

    text: str
    occurrence: int
    first: int
    end: int
    source: str


class RandomMutant(NamedTuple):
    """A row of the table: one change of one statement."""

    file: str  # relative to course_lib
    statement: str
    occurrence: int
    change: str


def statements(source: str) -> list[Statement]:
    """Return the statements inside functions, in the order of the file."""
    lines, found, counts = source.splitlines(), [], Counter[str]()
    for node in _in_functions(ast.parse(source), inside=False):
        if isinstance(node, (ast.Expr, ast.AnnAssign)) and _has_no_effect(node):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if lines[node.lineno - 1].lstrip().startswith("elif"):
            continue
        code = ast.unparse(node)
        text = code.splitlines()[0]
        counts[text] += 1
        found.append(Statement(text, counts[text], node.lineno - 1, node.end_lineno, code))
    return found


def _in_functions(node: ast.AST, inside: bool) -> Iterator[ast.stmt]:
    if inside and isinstance(node, ast.stmt):
        yield node
    inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(node):
        yield from _in_functions(child, inside)


def _has_no_effect(node: ast.Expr | ast.AnnAssign) -> bool:
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


def draw(sources: dict[str, str], count: int, seed: int) -> list[RandomMutant]:
    """Draw statements, and one change of each.

    Args:
        sources: Name of a file to its source.
        count: Number of mutants.
        seed: Seed of the draw.
    """
    generator = random.Random(seed)
    pairs = [(file, each) for file in sorted(sources) for each in statements(sources[file])]
    drawn: list[RandomMutant] = []
    for file, statement in generator.sample(pairs, len(pairs)):
        if len(drawn) == count:
            return drawn
        names = sorted(changes(sources[file], statement))
        if _assigns_names(statement):
            names = [name for name in names if not name.startswith("without `")]
        if names:
            change = generator.choice(names)
            drawn.append(RandomMutant(file, statement.text, statement.occurrence, change))
    if len(drawn) == count:
        return drawn
    raise ValueError(f"count must be at most {len(drawn)}, the number of statements, got {count}")


def _assigns_names(statement: Statement) -> bool:
    """Return whether each run fails without the statement, because local names are missing."""
    node = ast.parse(statement.source).body[0]
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [each for target in targets for each in getattr(target, "elts", [target])]
    return bool(names) and all(isinstance(name, ast.Name) for name in names)


def find(mutant: RandomMutant, source: str) -> Statement | None:
    """Return the statement of a mutant, or None if the file no longer has it."""
    for each in statements(source):
        if (each.text, each.occurrence) == (mutant.statement, mutant.occurrence):
            return each if mutant.change in changes(source, each) else None
    return None


def read() -> list[RandomMutant]:
    """Read the stored draw."""
    with STORED.open(encoding="utf-8", newline="") as file:
        return [
            RandomMutant(row["file"], row["statement"], int(row["occurrence"]), row["change"])
            for row in csv.DictReader(file)
        ]


def write(drawn: Iterable[RandomMutant]) -> None:
    """Store a draw."""
    with STORED.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(RandomMutant._fields)
        rows.writerows(drawn)
