"""What the lessons' checks say of the answers in `answers/`, and of nonsense."""

import math
from fractions import Fraction

import numpy
import pytest
import torch
from answers import ANSWERS, CHECKS, FILES
from markup import spoken_problems
from test_teaching import Hostile

from course_lib.teaching import Verdict

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
