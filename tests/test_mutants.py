"""Each check refuses the solution of its exercise with one slip of the hand in it.

`COURSE_MUTANTS=all pytest tests/test_mutants.py` also tries all mutants of the slow checks,
which takes minutes instead of seconds.
"""

import os
import sys

import pytest
from answers import ANSWERS, CHECKS, EQUIVALENT

from course_lib import lessons

pytest.importorskip("jupytext")  # not on a bare GPU machine
import mutants
from mutants import Steps, findings, solutions

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # What a mutant hands to a finalizer may fail long after its check.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Lessons whose solutions run in seconds; checks that run a step for each answer get a sample.
LESSONS = [number for number in lessons.LESSONS if number != "00"]
SAMPLED = {} if os.environ.get("COURSE_MUTANTS") == "all" else {"01.largest_batch": 2}


def instructions_in(source):
    """Return how many instructions of a mutant the counter sees."""
    steps = Steps()
    with steps:
        exec(compile(source, mutants.MUTANT, "exec"), {})
    assert steps.complete
    return steps.own_taken


@pytest.fixture(scope="module", autouse=True)
def counter():
    """Fail at once if instructions are not counted, because an endless mutant would not end."""
    assert instructions_in("for _ in range(100): pass") > 200


@pytest.mark.parametrize("number", LESSONS)
def test_a_check_refuses_its_solution_with_a_slip_in_it_unless_that_is_right_as_well(number):
    problems = []
    for name, each in findings(number, SAMPLED).items():
        listed = EQUIVALENT.get(name, {})
        problems += [f"{name} accepts {said}" for said in each.passed - set(listed)]
        problems += [
            f"{name} refuses, but its list has {said}"
            for said in set(listed) & each.tried - each.passed
        ]
        problems += [f"{name} has no mutant {said}" for said in set(listed) - each.made]
    assert problems == []


@pytest.mark.parametrize("number", LESSONS)
def test_running_all_cells_leaves_an_accepted_answer_in_its_name(number):
    for each in solutions(number):
        answer = ANSWERS[each.name][0][0]
        exercises = lessons.lesson(number, "exercises")
        names = dict.fromkeys(each.taken, answer) | {"exercises": exercises}
        if each.taken:
            assert CHECKS[each.name](answer)
            exec(each.source, names)
        assert all(names[name] is answer for name in each.taken), each.name


def test_every_check_has_a_solution_that_calls_it():
    found = [each.name for number in LESSONS for each in solutions(number)]
    assert sorted(found) == sorted(CHECKS), "a cell between BEGIN and END SOLUTION for each check"


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


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    try:\n        while True: pass\n    except Exception: pass",
        "forever()",  # lines outside of the mutant are not counted, calls are
    ],
)
def test_code_that_does_not_end_is_ended(source):
    forever = "def once(): pass\n\ndef forever():\n    while True: once()"
    exec(compile(forever, "library", "exec"), library := {})
    code, steps, before = compile(source, mutants.MUTANT, "exec"), Steps(1000), sys.gettrace()
    with pytest.raises(mutants.Endless), steps:
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
def test_many_instructions_or_a_deep_recursion_of_a_mutant_are_ended(source):
    code, steps = compile(source, mutants.MUTANT, "exec"), Steps(own_limit=20_000)
    with pytest.raises(mutants.Endless), steps:
        exec(code, {})
    assert steps.own_taken <= 20_001 and steps.complete


def test_calls_one_after_another_and_generators_are_not_deep():
    source = "def f(): yield 1\nfor _ in range(500): sum(x for x in f()), next(f())"
    code, steps = compile(source, mutants.MUTANT, "exec"), Steps()
    with steps:
        exec(code, {})
    assert steps.taken > steps.own_taken > 500 and steps.complete


@pytest.mark.parametrize(
    ("loop", "called"),
    [
        ("def f():\n    for _ in range(100): pass", "f()"),
        ("def f():\n    for _ in range(100): yield", "list(f())"),
        ("class C:\n    def __init__(self): [_ for _ in range(100)]", "C()"),
        ("f = lambda: sum(1 for _ in range(100))", "f()"),
    ],
)
def test_instructions_of_the_first_call_are_counted_as_those_of_the_second(loop, called):
    once, twice = (instructions_in("\n".join([loop, *[called] * n])) for n in (1, 2))
    alone = instructions_in(loop)
    assert once - alone > 200 and twice - once == once - alone


def test_steps_that_are_no_longer_counted_are_noticed():
    steps = Steps()
    with steps:
        sys.settrace(None)
    assert not steps.complete
