"""What the lessons' checks say of the answers in `answers/`, and of nonsense."""

import inspect
import math
import random
from fractions import Fraction
from functools import partial

import numpy
import pytest
import torch
from answers import ANSWERS, CHECKS, FILES, TABLES
from markup import spoken_problems
from test_teaching import Hostile

from course_lib.teaching import Verdict
from course_lib.teaching.exercises import Largest, graded_cases

pytestmark = pytest.mark.usefixtures("fresh")


def test_every_check_has_answers_here():
    """A check is written for the answers that it refuses, so it has three of them at least."""
    assert ANSWERS.keys() == CHECKS.keys(), "a check that its lesson exports, and its answers"
    assert [
        name for name, (right, wrong, *_) in ANSWERS.items() if not right or len(wrong) < 3
    ] == []


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_accepts_right_answers(name):
    for answer in ANSWERS[name][0]:
        verdict = CHECKS[name](answer)
        assert verdict and verdict.hint is None, verdict


# Exercises whose cases are the same in grading: all whose answer is a number or a table of numbers,
# and those below, which are about the course's own model, or measure the answer itself, such as a
# recipe or a schedule.
SAME_IN_GRADING = {
    name
    for name, check in TABLES.items()
    if isinstance(check, Largest) or not callable(check.right_answer())
}
SAME_IN_GRADING |= {
    "02.peak_formula",
    "02.which_block",
    "02.policy",
    "03.drawn_schedule",
    "03.gives_up_early",
    "04.offloading",
    "05.peaks",
    "07.same_flops",
    "07.keeps_clipping",
    "07.fifty",
    "09.recipe",
}
# Others whose results are no right answer alone, because a graph or a hook belongs to each of them.
NO_TABLES = {
    "02.checkpoint",
    "02.dropout_checkpoint",
    "02.hooks",
    "02.in_chunks",
    "02.loss_in_pieces",
    "05.fp32_sums",
    "05.loop",
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_accepts_right_answers_on_the_cases_that_grading_draws(name, monkeypatch):
    draws = []

    class Recorded(random.Random):
        def __init__(self, seed):
            draws.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(graded_cases.random, "Random", Recorded)
    for seed in "123" if name not in SAME_IN_GRADING else "1":
        monkeypatch.setattr(graded_cases, "seed", seed)
        # a second seed for all answers would take minutes
        for answer in ANSWERS[name][0] if seed == "1" else ANSWERS[name][0][:1]:
            assert CHECKS[name](answer), (seed, answer)
    if name == "06.kernel":  # its check draws nothing without Triton
        pytest.importorskip("triton")
    if name in SAME_IN_GRADING:
        assert not draws, "it draws cases, so SAME_IN_GRADING must not list it"
    else:
        assert draws, "it draws no cases (`cases`, `seed_of`), so SAME_IN_GRADING must list it"


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - SAME_IN_GRADING - NO_TABLES))
def test_a_table_of_the_answers_for_the_page_is_no_right_answer_in_grading(name, monkeypatch):
    """A function does what a right answer does, but returns what that has returned for the page."""
    answer, results = ANSWERS[name][0][0], []
    functions = answer if isinstance(answer, tuple) else (answer,)
    if not all(map(inspect.isfunction, functions)):
        pytest.skip("the answer is a class")
    if name == "06.kernel":
        pytest.importorskip("triton")

    def recorded(function, *given, **named):
        results.append(function(*given, **named))
        return results[-1]

    def from_table(table, function, *given, **named):
        function(*given, **named)
        return next(table)

    def answer_by(call):
        made = [partial(call, function) for function in functions]
        return made if isinstance(answer, tuple) else made[0]

    assert CHECKS[name](answer_by(recorded))
    assert CHECKS[name](answer_by(partial(from_table, iter(results))))
    monkeypatch.setattr(graded_cases, "seed", "1")
    verdict = CHECKS[name](answer_by(partial(from_table, iter(results))))
    assert not verdict, (
        "draw other cases, or add the check to NO_TABLES if its results need a graph"
    )


def in_numbers_of(kind, answer):
    """The answer with each number in it, or that it returns, made one of the kind; a number that is
    not whole stays what it is where the kind would round it."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if not math.isfinite(answer) or (kind is numpy.int64 and answer != int(answer)):
            return answer
        return kind(answer)
    if isinstance(answer, dict) and answer:  # an empty one may be filled later
        return {key: in_numbers_of(kind, value) for key, value in answer.items()}
    if callable(answer) and not isinstance(answer, type):
        return lambda *given, **named: in_numbers_of(kind, answer(*given, **named))
    return answer


def double(number):
    return torch.tensor(float(number), dtype=torch.float64)


KINDS = (double, numpy.int64, Fraction)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_accepts_numbers_of_any_kind(name):
    for answer in ANSWERS[name][0]:
        # a function is called for each kind, which takes long
        for kind in KINDS[:1] if callable(answer) else KINDS:
            again = in_numbers_of(kind, answer)
            if again is not answer:
                verdict = CHECKS[name](again)
                assert verdict, (answer, verdict)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_refuses_wrong_answers_and_names_the_mistake_or_gives_a_hint(name):
    recipes = name in {"07.same_flops", "07.keeps_clipping", "07.fifty"}
    wrong = [*ANSWERS[name][1], *(FILES["07"].NO_RECIPES if recipes else ())]
    for case in wrong:
        answer, reason = case if isinstance(case, tuple) else (case, "")
        verdict = CHECKS[name](answer)
        assert not verdict and (verdict.exact or verdict.hint), (answer, verdict)
        assert (reason or "") in verdict.message, verdict
        assert "LabelError" not in verdict.message, verdict  # a sentence that cannot be said


NONSENSE = [Hostile(), Hostile, object(), "x", {}, [Hostile()], lambda *_: 1 / 0, math.nan]
NONSENSE.append(10**5000)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_survives_nonsense(name):
    for answer in (None, ...):
        verdict = CHECKS[name](answer)
        assert not verdict and verdict.message == "Not answered yet." and verdict.hint is None
    assert spoken_problems(verdict._repr_html_()) == []
    for answer in NONSENSE:
        verdict = CHECKS[name](answer)
        assert isinstance(verdict, Verdict) and not verdict
        assert repr(verdict) and (verdict.exact or verdict.hint)
