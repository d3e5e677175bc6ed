"""Each check rejects the mutants of its solution, which have one small mistake each.

`COURSE_MUTANTS=all pytest -k exercise_mutants` also tries all mutants of the slow checks,
which takes minutes instead of seconds.
"""

import os
import sys

import pytest
from answers import ANSWERS, CHECKS, EQUIVALENT

from course_lib import lessons

pytest.importorskip("jupytext")  # not on a bare GPU machine
import exercise_mutants
from exercise_mutants import Steps, findings, solutions

from publish.cells import PROJECTS

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # a mutant's finalizer may fail long after its check
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Checks that run a step for each answer get a sample of mutants.
LESSONS = [number for number in lessons.LESSONS if number not in PROJECTS]
SAMPLED = {} if os.environ.get("COURSE_MUTANTS") == "all" else {"01.largest_batch": 2}


def instructions_in(source):
    """Return the number of instructions of a mutant that are counted."""
    steps = Steps()
    with steps:
        exec(compile(source, exercise_mutants.MUTANT, "exec"), {})
    assert steps.complete
    return steps.own_taken


@pytest.fixture(scope="module", autouse=True)
def counter():
    """Fail at once if instructions are not counted, because an endless mutant would not end."""
    assert instructions_in("for _ in range(100): pass") > 200
    assert instructions_in("def f():\n    for _ in range(100): pass\nf()") > 200


@pytest.mark.parametrize("number", LESSONS)
def test_exercise_check_rejects_every_mutated_solution_except_equivalent_ones(number):
    problems = []
    for name, each in findings(number, SAMPLED).items():
        listed = EQUIVALENT.get(name, {})
        problems += [f"{name} accepts {mutant}" for mutant in each.accepted - set(listed)]
        problems += [
            f"{name} rejects, but EQUIVALENT lists {mutant}"
            for mutant in set(listed) & each.tried - each.accepted
        ]
        problems += [f"{name} has no mutant {mutant}" for mutant in set(listed) - each.generated]
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


def test_mutants_cover_statements_calls_arguments_operators_and_literals():
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
    } <= set(exercise_mutants.mutants(source))


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    try:\n        while True: pass\n    except Exception: pass",
        "forever()",  # lines outside of the mutant are not counted, calls are
    ],
)
def test_step_limit_stops_infinite_loop(source):
    forever = "def once(): pass\n\ndef forever():\n    while True: once()"
    exec(compile(forever, "library", "exec"), library := {})
    code, steps, before = (
        compile(source, exercise_mutants.MUTANT, "exec"),
        Steps(1000),
        sys.gettrace(),
    )
    with pytest.raises(exercise_mutants.Endless), steps:
        exec(code, library)
    assert steps.taken == 1001 and steps.complete and sys.gettrace() is before


@pytest.mark.parametrize(
    "source",
    [
        "for _ in range(10**4): pass",  # with 3 instructions each
        # where Python's own limit ends the recursion, nothing is counted after it
        "def f(): f()\ntry: f()\nexcept RecursionError: pass",
        "def g(): yield from g()\ntry: list(g())\nexcept RecursionError: pass",
    ],
)
def test_instruction_limit_stops_long_loop_or_deep_recursion(source):
    code, steps = compile(source, exercise_mutants.MUTANT, "exec"), Steps(own_limit=20_000)
    with pytest.raises(exercise_mutants.Endless), steps:
        exec(code, {})
    assert steps.own_taken <= 20_001 and steps.complete
