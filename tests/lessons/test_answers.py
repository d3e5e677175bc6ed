"""Verdicts of the lessons' checks on the answers in `answers/` and on meaningless objects."""

import inspect
import math
import random
from fractions import Fraction
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from answers import ANSWERS, CHECKS, FILES, TABLES
from html_checks import spoken_problems
from test_teaching import RaisesOnUse

from course_lib.teaching import Verdict
from course_lib.teaching.exercises import Largest, graded_cases

pytest.importorskip("IPython")  # not on a bare GPU machine
from publish.watching import Watch

pytestmark = pytest.mark.usefixtures("fresh")


def test_every_exercise_check_has_sample_right_and_wrong_answers():
    assert ANSWERS.keys() == CHECKS.keys()
    assert all(right and wrong for right, wrong in ANSWERS.values())


# Exercises with the same cases in grading: their answer is a number or a table of numbers, they are
# about the course's own model, or they measure the answer itself, such as a recipe or a schedule.
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
# Results of these exercises are not right without their graphs or hooks.
NO_TABLES = {
    "02.checkpoint",
    "02.dropout_checkpoint",
    "02.hooks",
    "02.in_chunks",
    "02.loss_in_pieces",
    "03.nested",
    "05.fp32_sums",
    "05.loop",
    "07.adapted_layer",
}


# The other exercises have the same cases in grading, which the next test runs.
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - SAME_IN_GRADING))
def test_exercise_check_accepts_every_sample_right_answer(name):
    for answer in ANSWERS[name][0]:
        verdict = CHECKS[name](answer)
        assert verdict and verdict.hint is None, verdict


@pytest.mark.parametrize("name", CHECKS)
def test_grading_accepts_right_answers_without_reporting_tampering(name, monkeypatch):
    monkeypatch.setattr(graded_cases, "seed", "1")
    draws = Mock(wraps=random.Random)
    monkeypatch.setattr(graded_cases, "random", SimpleNamespace(Random=draws))
    watch = Watch(vars(FILES[name[:2]]))
    for answer in ANSWERS[name][0]:
        watch.start()
        verdict = CHECKS[name](answer)
        assert watch.stop() == [] and verdict and verdict.hint is None, answer
    if name == "06.kernel":  # its check draws nothing without Triton
        pytest.importorskip("triton")
    assert draws.called == (name not in SAME_IN_GRADING), "list what draws no cases"


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - SAME_IN_GRADING - NO_TABLES))
def test_grading_rejects_answer_that_replays_recorded_results(name, monkeypatch):
    """Replay the results of a right answer to the cases of the page on the cases of grading."""
    answer, results = ANSWERS[name][0][0], []
    functions = answer if isinstance(answer, tuple) else (answer,)
    if not all(map(inspect.isfunction, functions)):
        pytest.skip("the answer is a class")
    if name == "06.kernel":
        pytest.importorskip("triton")

    def record(function, *args, **options):
        results.append(function(*args, **options))
        return results[-1]

    def replay(table, function, *args, **options):
        function(*args, **options)
        return next(table)

    def answer_with(call):
        calls = [partial(call, function) for function in functions]
        return calls if isinstance(answer, tuple) else calls[0]

    assert CHECKS[name](answer_with(record))
    assert CHECKS[name](answer_with(partial(replay, iter(results))))
    monkeypatch.setattr(graded_cases, "seed", "1")
    verdict = CHECKS[name](answer_with(partial(replay, iter(results))))
    assert not verdict, (
        "draw other cases, or add the check to NO_TABLES if its results need a graph"
    )


def with_number_type(kind, answer):
    """Convert each number of an answer or of its results, unless the conversion would round it."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if not math.isfinite(answer) or (kind is numpy.int64 and answer != int(answer)):
            return answer
        return kind(answer)
    if isinstance(answer, dict) and answer:  # an empty one may be filled later
        return {key: with_number_type(kind, value) for key, value in answer.items()}
    if callable(answer) and not isinstance(answer, type):
        return lambda *args, **options: with_number_type(kind, answer(*args, **options))
    return answer


def double(number):
    return torch.tensor(float(number), dtype=torch.float64)


KINDS = (double, numpy.int64, Fraction)


@pytest.mark.parametrize("name", CHECKS)
def test_exercise_check_accepts_right_answers_of_other_numeric_types(name):
    functions = [answer for answer in ANSWERS[name][0] if callable(answer)]
    numbers = [answer for answer in ANSWERS[name][0] if not callable(answer)]
    # checks of functions take long, and look at the numbers of all functions in the same way
    for answer, kind in [*product(numbers, KINDS), *product(functions[:1], KINDS[:1])]:
        converted = with_number_type(kind, answer)
        if converted is not answer:
            assert CHECKS[name](converted), (kind, answer)


@pytest.mark.parametrize("name", CHECKS)
def test_exercise_check_rejects_wrong_answers_with_message_or_hint(name):
    for case in ANSWERS[name][1]:
        answer, reason = case if isinstance(case, tuple) else (case, "")
        verdict = CHECKS[name](answer)
        assert not verdict and (verdict.exact or verdict.hint), (answer, verdict)
        assert (reason or "") in verdict.message, verdict
        assert "LabelError" not in verdict.message, verdict


NONSENSE = [
    RaisesOnUse(),
    RaisesOnUse,
    object(),
    "x",
    {},
    [RaisesOnUse()],
    lambda *_: 1 / 0,
    math.nan,
    10**5000,
]


@pytest.mark.parametrize("name", CHECKS)
def test_exercise_check_rejects_arbitrary_objects_without_raising(name):
    for answer in (None, ...):
        verdict = CHECKS[name](answer)
        assert not verdict and verdict.message == "Not answered yet." and verdict.hint is None
    assert spoken_problems(verdict._repr_html_()) == []
    for answer in NONSENSE:
        verdict = CHECKS[name](answer)
        assert isinstance(verdict, Verdict) and not verdict
        assert repr(verdict) and (verdict.exact or verdict.hint)
