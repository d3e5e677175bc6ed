"""Each check refuses the solution of its exercise with one slip of the hand in it.

`COURSE_MUTANTS=all pytest tests/test_mutants.py` tries all mutants of the dear checks as well,
minutes in place of seconds; with `-s` it says how many there are.
"""

import os
import sys

import pytest
from answers import ANSWERS, CHECKS, EQUIVALENT

from course_lib import lessons
from course_lib.teaching.exercises import exercise, right, wrong

pytest.importorskip("jupytext")  # not on a bare GPU machine
import mutants
from mutants import Steps, accepted, findings, solutions

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # What a mutant hands to a finalizer may fail long after its check.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Lessons whose solutions run in seconds; checks that run a step for each answer get a sample.
LESSONS = [number for number in lessons.LESSONS if number != "00"]
SAMPLED = {} if os.environ.get("COURSE_MUTANTS") == "all" else {"01.largest_batch": 2}


@pytest.mark.parametrize("number", LESSONS)
def test_a_check_refuses_its_solution_with_a_slip_in_it_unless_that_is_right_as_well(
    number, little_to_collect
):
    problems = []
    found = findings(number, SAMPLED)
    for name, each in found.items():
        listed = EQUIVALENT.get(name, {})
        problems += [f"{name} accepts {said}" for said in each.passed - set(listed)]
        problems += [
            f"{name} refuses, but its list has {said}"
            for said in set(listed) & each.tried - each.passed
        ]
        problems += [f"{name} has no mutant {said}" for said in set(listed) - set(each.made)]
    made, tried = (
        sum(len(getattr(each, kind)) for each in found.values()) for kind in ("made", "tried")
    )
    same, passed = (
        sum(each.same for each in found.values()),
        sum(len(each.passed) for each in found.values()),
    )
    print(
        f"lesson {number}: {made} mutants, {tried} tried, {same} give the same answer, {passed}"
        " pass"
    )
    assert problems == []


@pytest.mark.parametrize("number", LESSONS)
def test_running_all_cells_leaves_an_accepted_answer_in_its_name(number):
    for each in solutions(number):
        answer = ANSWERS[each.name][0][0]
        names = dict.fromkeys(each.taken, answer) | {f"lesson_{number}": lessons.lesson(number)}
        assert not each.taken or CHECKS[each.name](answer)
        if each.taken:
            exec(each.source, names)
        assert all(names[name] is answer for name in each.taken), each.name


@pytest.fixture
def exercise_of_sums(monkeypatch):
    """A check, under a lesson's name, of a function that adds up what is above a bound, on cases of
    its own."""

    def made(*cases):
        @exercise("hint")
        def check(function):
            return (
                right("yes")
                if all(function(*given) == wanted for given, wanted in cases)
                else wrong("no")
            )

        monkeypatch.setitem(CHECKS, "01.sums", check)

    return made


SUMS = """def sums(numbers, bound):
    total = 0
    for each in numbers:
        if each > bound:
            total += each
    return total

lesson_01.check_sums(sums)"""


def test_a_check_that_is_too_kind_is_found_by_a_mutant(exercise_of_sums):
    def passing():
        return {
            said
            for said, source in mutants.mutants(SUMS).items()
            if accepted("01.sums", source, {})
        }

    exercise_of_sums((([1, 2, 3], 0), 6))
    assert passing() == {"each > bound → each >= bound"}
    exercise_of_sums((([1, 2, 3], 1), 5))
    assert passing() == set()


def test_mutants_are_slips_of_every_kind():
    source = """def f(block, x, gradient):
    with torch.no_grad():
        y = block(x.detach(), 2)[1:]
    return -y if x <= 1 else max(y, True)"""
    assert {
        "without `with torch.no_grad():`",
        "without `y = block(x.detach(), 2)[1:]`",
        "torch.no_grad → torch.enable_grad",
        "block(x.detach(), 2) → block(2, x.detach())",
        "x.detach() → x",
        "2 → 3 in `y = block(x.detach(), 2)[1:]`",
        "[1:] without its lower end",
        "-y → y",
        "x <= 1 → x < 1",
        "max → min",
        "max(y, True) → max(y.detach(), True)",
        "True → False in `return -y if x <= 1 else max(y, True)`",
    } <= set(mutants.mutants(source))


def test_code_that_does_not_end_is_not_accepted(exercise_of_sums):
    exercise_of_sums()
    endless = (
        "while True:\n    try:\n        while True: pass\n    except Exception:"
        " pass\nlesson_01.check_sums(len)"
    )
    steps = Steps(limit=1000)
    assert accepted("01.sums", endless, {}, steps=steps) is None
    assert steps.taken == 1001
    assert accepted("01.sums", "lesson_01.check_sums(len)", {}) == (len,)


def test_library_code_that_does_not_end_is_not_accepted(exercise_of_sums):
    """Lines outside the mutant are not counted, calls are."""
    exercise_of_sums()
    forever = "def once(): pass\n\ndef forever():\n    while True: once()"
    exec(compile(forever, "library", "exec"), library := {})
    steps = Steps(limit=1000)
    assert accepted("01.sums", "forever()\nlesson_01.check_sums(len)", library, steps=steps) is None
    assert steps.taken == 1001


def test_steps_leave_a_tracer_as_it_was():
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(mutants.Endless), Steps(limit=0):
            exercise("hint")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
