"""Grade twenty generated submissions, right, wrong, crashing and cheating, and compare the table
with the expected verdicts.

    python tests/twenty_submissions.py    # with the options of pytest

It takes minutes: each runs in a kernel of its own, and two of them until their time limit. One
of lesson 00 and one with several verdicts are in test_grade.py.
"""

import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from editions import NOTEBOOKS, stored_lessons
from mutants import solutions
from test_grade import hand_in, submission

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
# reads memory that does not belong to the process
DIES = """from numpy import ones
from numpy.lib.stride_tricks import as_strided

as_strided(ones(1), (10**9,), (10**9,)).sum()"""
FAKE = "class Fake:\n    def __repr__(self):\n        return '✓ Right.'\n"
TITLES = {name[:2]: notebook.cells[0].source for name, notebook in stored_lessons().items()}


@cache
def lessons():
    """The lessons with the cells of exercises, those that they need, and those that import."""
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


def handed_in(number, solve=lambda name: True, before="", after="", change=lambda source: source):
    """A student's notebook of a lesson: its exercises, and the cells that they need.

    Args:
        solve: whether an exercise such as "01.meter" is solved, by the lesson's own solution.
        before: a cell in front of all others.
        after: one behind the first exercise.
        change: what is done to each exercise's cell.
    """
    cells, lesson = [before], lessons()[number]
    for each in solutions(number):
        check = f"check_{each.name[3:]}"
        source, call = lesson.stubs[check], lesson.calls[check]
        solution = without_markers(each.plain)
        if solve(each.name):
            wanted, answer = (re.search(rf"{check}\((.*)\)", code)[1] for code in (call, solution))
            source = source.replace(call, f"{solution}\n{wanted} = {answer}\n{call}")
        # an earlier exercise is there already, as it was changed
        needed = [above for above in each.above if f"lesson_{number}.check_" not in above]
        cells += [above for above in needed if above not in cells]
        cells += [change(source), after]
        after = ""
    return submission(*cells, title=TITLES[number])


def never(name):
    return False


def edited(source):
    return f"{source.rstrip()} or 'ok'"


def uncalled(source):
    return source.rpartition("\n")[0] or "pass"


def faked(source):
    return f"{FAKE}{uncalled(source)}\nFake()"


def without_syntax(source):
    return f"mine = [\n{source}" if "check_adapter" in source else source


ODD = {"06.log_sum_exp", "06.flops", "06.causal_tiles"}
RIGHT, UNTOUCHED = ("01", "02", "03", "04", "05", "08"), ("01", "02", "03", "05")
# name -> (lesson, how it is handed in, marks that exercises get, what a message must hold)
SUBMISSIONS = {
    **{f"{each} right": (each, {}, {"✓"}, "") for each in RIGHT},
    **{f"{each} untouched": (each, {"solve": never}, {"○"}, "Not answered") for each in UNTOUCHED},
    "06 half": ("06", {"solve": ODD.__contains__}, {"✓", "○"}, ""),
    "01 syntax": ("01", {"change": without_syntax}, {"✓", "✗"}, "SyntaxError"),
    "01 dies": (
        "01",
        {"after": DIES},
        {"✓", "!"},
        "died",
    ),
    "01 endless": ("01", {"after": LOOP}, {"✓", "!"}, "it computed for more than 60"),
    "01 prints": ("01", {"after": "while True:\n    print('x' * 10**5)"}, {"✓", "!"}, "printed"),
    "01 memory": ("01", {"after": "spare = bytearray(50 * 10**9)"}, {"✓"}, ""),
    "01 calls edited": ("01", {"solve": never, "change": edited}, {"!"}, "was edited"),
    "01 patched": ("01", {"solve": never, "before": PATCH}, {"○"}, "was not run"),
    "01 verdict faked": ("01", {"solve": never, "change": faked}, {"!"}, "missing"),
    "01 checks gone": ("01", {"solve": never, "change": uncalled}, {"!"}, "missing"),
}


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_gets_its_expected_verdicts(tmp_path, name):
    number, options, marks, words = SUBMISSIONS[name]
    path = hand_in(tmp_path / "a.ipynb", handed_in(number, **options))
    submitted = replace(grade.read(path, lessons()), seed="7")
    limits = Limits(60 if "endless" in name else 600)
    rows = grade.grade(submitted, limits, untouched(number))
    assert {row.verdict for row in rows if row.exercise != "–"} == marks, rows
    assert any(words in row.message for row in rows), rows


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
