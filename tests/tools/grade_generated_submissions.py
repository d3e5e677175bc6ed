"""Grade generated submissions of the lessons and compare the table with the expected verdicts.

    python tests/tools/grade_generated_submissions.py    # with the options of pytest

The submissions are right, or exceed the limit of time, output or memory. Each runs in its own
kernel, and one runs until its time limit, so this program takes minutes. `test_grade.py` has faster
tests.
"""

import re
import sys
from dataclasses import replace
from functools import cache

import nbformat
import pytest
from edition_fixtures import NOTEBOOKS, stored_lessons

sys.path.append(str(NOTEBOOKS.parent / "tests/lessons"))  # has the answers
from exercise_mutants import solutions

from publish import grade
from publish.cells import without_markers
from publish.kernels import Limits

LOOP = """while True:
    try:
        while True:
            pass
    except BaseException:
        pass"""
TITLES = {name[:2]: notebook.cells[0].source for name, notebook in stored_lessons().items()}


@cache
def lessons():
    return grade.lessons_of(NOTEBOOKS)


def submission_of(number, after):
    """Return a student's notebook of a lesson, which has only its solved exercises.

    The source `after` is a cell after the first exercise.
    """
    cells, lesson = [], lessons()[number]
    for each in solutions(number):
        check = f"check_{each.name[3:]}"
        source, call = lesson.stubs[check], lesson.calls[check]
        solution = without_markers(each.plain)
        wanted, answer = (re.search(rf"{check}\((.*)\)", code)[1] for code in (call, solution))
        cells.append(source.replace(call, f"{solution}\n{wanted} = {answer}\n{call}"))
    cells.insert(1, after)
    code = map(nbformat.v4.new_code_cell, cells)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(TITLES[number]), *code])


RIGHT = ("01", "02", "03", "04", "05", "08")
# name -> (lesson, cell after the first exercise, expected verdicts, a part of a message)
SUBMISSIONS = {
    **{f"{each} right": (each, "", {"✓"}, "") for each in RIGHT},
    "01 endless": ("01", LOOP, {"✓", "!"}, "it computed for more than 60"),
    "01 prints": ("01", "while True:\n    print('x' * 10**5)", {"✓", "!"}, "printed"),
    "01 memory": ("01", "spare = bytearray(50 * 10**9)", {"✓"}, ""),
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_submission_gets_expected_verdicts(tmp_path, name):
    number, after, marks, words = SUBMISSIONS[name]
    path = tmp_path / "a.ipynb"
    nbformat.write(submission_of(number, after), path)
    submitted = replace(grade.read(path, lessons()), seed="7")
    limits = Limits(60 if "endless" in name else 600)
    rows = grade.grade(submitted, limits, grade.fingerprints_of(lessons()[number]))
    assert {row.verdict for row in rows if row.exercise != "–"} == marks, rows
    assert any(words in row.message for row in rows), rows


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
