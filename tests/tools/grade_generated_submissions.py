"""Grade generated submissions of the lessons and compare the table with the expected verdicts.

    python tests/tools/grade_generated_submissions.py    # with the options of pytest

The submissions are right, unsolved, crashing or cheating. Each runs in its own kernel, and one runs
until its time limit, so this program takes minutes. `test_grade.py` has faster tests.
"""

import re
import sys
from dataclasses import replace
from functools import cache

import nbformat
import pytest
from edition_fixtures import NOTEBOOKS, stored_lessons
from exercise_mutants import solutions

from publish import grade
from publish.cells import names_in, without_markers
from publish.kernels import Limits
from publish.student import check_of
from publish.submissions import bare

LOOP = """while True:
    try:
        while True:
            pass
    except BaseException:
        pass"""
PATCH = (
    "from course_lib.teaching import exercises\n"
    "exercises.Exercise.__call__ = lambda self, answer: exercises.right('Yes.')"
)
# reads memory outside the array
DIES = """from numpy import ones
from numpy.lib.stride_tricks import as_strided

as_strided(ones(1), (10**9,), (10**9,)).sum()"""
TITLES = {name[:2]: notebook.cells[0].source for name, notebook in stored_lessons().items()}


@cache
def lessons():
    """Return the lessons with the cells of exercises, the cells that these need, and imports."""
    found = {}
    for number, lesson in grade.lessons_of(NOTEBOOKS).items():
        needed = {bare(cell) for each in solutions(number) for cell in each.above}
        stubs = [names_in(cell.source)[1] for cell in lesson.cells if check_of(cell)]
        read = set().union(*stubs)
        cells = [
            cell
            for cell in lesson.cells
            if check_of(cell)
            or bare(cell.source) in needed
            or "import" in cell.source
            or names_in(cell.source)[0] & read
        ]
        found[number] = replace(lesson, cells=cells)
    return found


@cache
def untouched(number):
    return grade.fingerprints_of(lessons()[number])


def submission_of(
    number, solve=lambda name: True, before="", after="", change=lambda source: source
):
    """Return a student's notebook of a lesson: its exercises, and the cells that they need.

    Args:
        solve: Whether an exercise such as "01.meter" is solved with the lesson's solution.
        before: Source of a cell before all others.
        after: Source of a cell after the first exercise.
        change: Function that changes the source of each exercise's cell.
    """
    cells, lesson = [before], lessons()[number]
    for each in solutions(number):
        check = f"check_{each.name[3:]}"
        source, call = lesson.stubs[check], lesson.calls[check]
        solution = without_markers(each.plain)
        if solve(each.name):
            wanted, answer = (re.search(rf"{check}\((.*)\)", code)[1] for code in (call, solution))
            source = source.replace(call, f"{solution}\n{wanted} = {answer}\n{call}")
        # the cells of earlier exercises are in the notebook already
        needed = [above for above in each.above if f"lesson_{number}.check_" not in above]
        cells += [above for above in needed if above not in cells]
        cells += [change(source), after]
        after = ""
    code = map(nbformat.v4.new_code_cell, cells)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(TITLES[number]), *code])


def never(name):
    return False


def without_syntax(source):
    return f"mine = [\n{source}" if "check_adapter" in source else source


RIGHT = ("01", "02", "03", "04", "05", "08")
# name -> (lesson, options of `submission_of`, expected verdicts, a part of a message)
SUBMISSIONS = {
    **{f"{each} right": (each, {}, {"✓"}, "") for each in RIGHT},
    "01 unsolved": ("01", {"solve": never}, {"○"}, "Not answered"),
    "01 syntax": ("01", {"change": without_syntax}, {"✓", "✗"}, "SyntaxError"),
    "01 dies": ("01", {"after": DIES}, {"✓", "!"}, "died"),
    "01 endless": ("01", {"after": LOOP}, {"✓", "!"}, "it computed for more than 60"),
    "01 prints": ("01", {"after": "while True:\n    print('x' * 10**5)"}, {"✓", "!"}, "printed"),
    "01 memory": ("01", {"after": "spare = bytearray(50 * 10**9)"}, {"✓"}, ""),
    "01 patched": ("01", {"solve": never, "before": PATCH}, {"○"}, "was not run"),
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_submission_gets_expected_verdicts(tmp_path, name):
    number, options, marks, words = SUBMISSIONS[name]
    path = tmp_path / "a.ipynb"
    nbformat.write(submission_of(number, **options), path)
    submitted = replace(grade.read(path, lessons()), seed="7")
    limits = Limits(60 if "endless" in name else 600)
    rows = grade.grade(submitted, limits, untouched(number))
    assert {row.verdict for row in rows if row.exercise != "–"} == marks, rows
    assert any(words in row.message for row in rows), rows


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
