"""Each check rejects the mutants of its solution, which have one small mistake each.

`COURSE_MUTANTS=all pytest -k exercise_mutants` also tries all mutants of the slow checks,
which takes minutes instead of seconds.
"""

import os

import pytest
from answers import ANSWERS, CHECKS, EQUIVALENT

from course_lib import lessons

pytest.importorskip("jupytext")  # not on a bare GPU machine
from exercise_mutants import findings, solutions

from publish.cells import PROJECTS

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # a mutant's finalizer may fail long after its check
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LESSONS = [number for number in lessons.LESSONS if number not in PROJECTS]
# Checks that run a step for each answer get a sample of mutants.
SAMPLED = {"01.largest_batch": 2, "02.in_chunks": 6, "03.nested": 12, "07.peak_without_memory": 6}
if os.environ.get("COURSE_MUTANTS") == "all":
    SAMPLED = {}


@pytest.mark.parametrize("number", LESSONS)
def test_exercise_check_rejects_every_mutated_solution_except_equivalent_ones(number):
    problems = []
    for name, (generated, tried, accepted) in findings(number, SAMPLED).items():
        listed = EQUIVALENT.get(name, {}).keys()
        problems += [f"{name} accepts {mutant}" for mutant in accepted - listed]
        problems += [
            f"{name} rejects, but EQUIVALENT lists {mutant}" for mutant in listed & tried - accepted
        ]
        problems += [f"{name} has no mutant {mutant}" for mutant in listed - generated]
    assert problems == []


@pytest.mark.parametrize("number", LESSONS)
def test_running_solution_cell_does_not_overwrite_accepted_answer(number):
    for each in solutions(number):
        answer = ANSWERS[each.name][0][0]
        exercises = lessons.lesson(number, "exercises")
        names = dict.fromkeys(each.answer_names, answer) | {"exercises": exercises}
        if each.answer_names:
            CHECKS[each.name].accepted = True
            exec(each.source, names)
        assert all(names[name] is answer for name in each.answer_names), each.name


def test_every_exercise_check_is_called_in_exactly_one_solution():
    found = [each.name for number in LESSONS for each in solutions(number)]
    assert sorted(found) == sorted(CHECKS)
