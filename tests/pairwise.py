"""A few rows that contain each valid pair of values of two choices."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations


def rows(
    choices: Mapping[str, Sequence], valid: Callable[[dict], bool], draws: int = 4000
) -> list[dict]:
    """Return rows, each with one value per choice, that together contain each valid pair of values.

    Each next row is the one with the most pairs that are still missing.
    """
    draw, found = random.Random(0), []
    candidates = [
        {name: draw.choice(values) for name, values in choices.items()} for _ in range(draws)
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
