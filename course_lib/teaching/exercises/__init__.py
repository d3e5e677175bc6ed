"""Exercises: a check returns a `Verdict` for any answer, and never raises an error.

If the answer to an exercise consists of numbers, its check has a table of mistakes with the wrong
numbers (`numbers`, `largest`). Any other check is a function that tests the answer (`exercise`).
The messages of a lesson are in its `messages.toml`, in both languages (`Messages`). The module
`probes` has functions that several checks need.
"""

from .exercise import Exercise, exercise
from .graded_cases import GRADING_SEED, cases, draw_case, seed_of
from .messages import Messages
from .numbers import (
    Largest,
    Numbers,
    each,
    expect_number,
    largest,
    largest_that_fits,
    numbers,
    throughout,
)
from .verdicts import Verdict, WrongAnswer, not_answered, returns_none, right, wrong

__all__ = [
    "GRADING_SEED",
    "Exercise",
    "Largest",
    "Messages",
    "Numbers",
    "Verdict",
    "WrongAnswer",
    "cases",
    "draw_case",
    "each",
    "exercise",
    "expect_number",
    "largest",
    "largest_that_fits",
    "not_answered",
    "numbers",
    "returns_none",
    "right",
    "seed_of",
    "throughout",
    "wrong",
]
