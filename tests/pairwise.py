"""Few rows in which every two values of two levers meet that go together."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

DRAWS = 4000


def rows(
    levers: Mapping[str, Sequence], valid: Callable[[dict], bool], seed: int, draws: int = DRAWS
) -> list[dict]:
    """Rows, a value of each lever in each, that hold every pair of two levers' values that goes
    together, some pairs more than once: always the row next that has most of what is missing."""
    draw, found = random.Random(seed), []
    candidates = [
        {name: draw.choice(values) for name, values in levers.items()} for _ in range(draws)
    ]
    known = [(row, pairs(row)) for row in filter(valid, candidates)]
    todo = set().union(*(held for _, held in known))
    while todo:
        best, held = max(known, key=lambda each: len(todo & each[1]))
        found.append(best)
        todo -= held
    return found


def pairs(row: dict) -> set:
    return set(combinations(row.items(), 2))
