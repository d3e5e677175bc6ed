"""Random mutants: the draw depends on the code and the seed alone, and a mutant is one change."""

import ast
import difflib

import library_mutants
import pytest
import random_mutants
from random_mutants import changes, draw, find, statements

SOURCE = '''\
"""Module."""
import math

LIMIT = 3


def area(width, height):
    """Function."""
    import os

    size: int
    if width > 0:
        size = (
            width * height  # comment
        )
    elif width < 0:
        return None
    else:
        size = 0
    with open("a") as file:
        file.close()
    return size


def sides(width):
    if width > 0:
        return width
'''


def test_mutation_candidates_are_executable_statements_inside_functions():
    found = [(each.text, each.occurrence) for each in statements(SOURCE)]
    assert found == [
        ("if width > 0:", 1),
        ("size = width * height", 1),
        ("return None", 1),
        ("size = 0", 1),
        ("with open('a') as file:", 1),
        ("file.close()", 1),
        ("return size", 1),
        ("if width > 0:", 2),
        ("return width", 1),
    ]


def test_each_random_mutation_changes_exactly_one_statement():
    for statement in statements(SOURCE):
        found = changes(SOURCE, statement)
        for changed in found.values():
            ast.parse(changed)
            old, new = SOURCE.splitlines(), changed.splitlines()
            blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
            edited = {n for kind, a, b, *_ in blocks if kind != "equal" for n in range(a, b)}
            assert edited and edited <= set(range(statement.first, statement.end))
    marked = random_mutants.with_line_before(SOURCE, statements(SOURCE)[1], "mark()")
    assert "    if width > 0:\n        mark()\n        size = (\n" in marked
    first = changes(SOURCE, statements(SOURCE)[0])
    assert set(first) == {
        "width > 0 → width >= 0",
        *(f"0 → {n} in `if width > 0:`" for n in (1, -1)),
        "without `if width > 0:`",
    }, "changes inside the block belong to other statements"


def test_random_draw_of_mutants_depends_only_on_sources_and_seed():
    sources = {"b.py": SOURCE, "a.py": SOURCE}
    drawn = draw(sources, 8, seed=1)
    assert drawn == draw(dict(reversed(sources.items())), 8, seed=1)
    assert drawn != draw(sources, 8, seed=2)
    assert drawn[:3] == draw(sources, 3, seed=1)
    many = [row.change for seed in range(30) for row in draw(sources, 16, seed)]
    assert "without `return size`" in many and "without `size = 0`" not in many
    with pytest.raises(ValueError, match=r"at most 18, .*got 19"):
        draw(sources, 19, seed=1)


def test_stored_mutant_is_located_after_preceding_lines_change(tmp_path, monkeypatch):
    monkeypatch.setattr(random_mutants, "STORED", tmp_path / "draw.csv")
    drawn = draw({"a.py": SOURCE}, 5, seed=0)
    random_mutants.write(drawn)
    assert random_mutants.read() == drawn
    for row in drawn:
        statement = find(row, "x = 1\n\n" + SOURCE)
        assert statement.first == find(row, SOURCE).first + 2
        assert find(row, "x = 1\n") is None


def test_every_source_file_of_mutants_has_assigned_tests():
    """Draw from packages that the table names, and from no others."""
    files = library_mutants.drawn_sources()
    assert {"checkpoint/state.py", "workload.py", "_torch/modules.py"} <= set(files)
    assert not any(file.startswith(("lessons/", "teaching/")) for file in files)
    assert library_mutants.area_of("checkpoint/state.py") == "state"
    assert library_mutants.area_of("checkpoint/blocks.py") == "checkpoint"
