"""Cases of a check: the page's, and others while notebooks are graded."""

import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

#: Environment variable with the seed of the cases that checks draw while notebooks are graded
GRADING_SEED = "COURSE_GRADING_SEED"
seed = os.environ.get(GRADING_SEED, "")  # "" on a page, whose cases are always the same
Case = TypeVar("Case")


def draw_case(page: Case, draw: Callable[[random.Random], Case]) -> Case:
    """Return the page's case, or another one while notebooks are graded.

    During grading, an answer that only looks up the page's results is therefore wrong. The same
    seed draws the same case.

    Args:
        page: The case of the page, such as a size or the seed of random tensors.
        draw: Function that draws a case for which each right answer is right.
    """
    return draw(random.Random(seed)) if seed else page


def cases(
    page: Sequence[Case], draw: Callable[[random.Random], Case], count: int = 2
) -> list[Case]:
    """Return the page's cases, and `count` more while notebooks are graded (`draw_case`)."""
    return [*page, *draw_case([], lambda rng: [draw(rng) for _ in range(count)])]


def seed_of(page: int) -> int:
    """Return the seed of random tensors: the page's, or a drawn one (`draw_case`)."""
    return draw_case(page, lambda rng: page + rng.randrange(10**6))
