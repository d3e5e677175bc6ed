"""Cases of a check: fixed ones in a lesson, and random ones while notebooks are graded."""

import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

#: Environment variable with the seed of the cases that checks draw while notebooks are graded
GRADING_SEED = "COURSE_GRADING_SEED"
seed = os.environ.get(GRADING_SEED, "")  # "" outside grading, when cases are always the same
Case = TypeVar("Case")


def draw_case(page: Case, draw: Callable[[random.Random], Case]) -> Case:
    """Return the fixed test case of an exercise, or a random case while notebooks are graded.

    Random cases detect an answer that only repeats the known results of the fixed case. Notebooks
    are graded if the environment variable COURSE_GRADING_SEED is set. Its value is the seed of the
    random cases.

    Args:
        page: The fixed case, such as a size or the seed of random tensors.
        draw: Function of a random generator that draws a case in which every right answer passes.
    """
    return draw(random.Random(seed)) if seed else page


def cases(
    page: Sequence[Case], draw: Callable[[random.Random], Case], count: int = 2
) -> list[Case]:
    """Return the fixed test cases of an exercise. While notebooks are graded, add random cases.

    Grading is explained at `draw_case`.

    Args:
        page: The fixed cases.
        draw: Function of a random generator that draws a case in which every right answer passes.
        count: Number of random cases.
    """
    return [*page, *draw_case([], lambda rng: [draw(rng) for _ in range(count)])]


def seed_of(page: int) -> int:
    """Return a seed for random tensors: `page`, or a random seed while notebooks are graded."""
    return draw_case(page, lambda rng: page + rng.randrange(10**6))
