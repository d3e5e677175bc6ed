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
    # sets of pairs as bits of integers, whose intersections are counted faster than those of sets
    bits = {pair: 1 << bit for bit, pair in enumerate(set().union(*(held for _, held in known)))}
    masks = [(row, sum(bits[pair] for pair in held)) for row, held in known]
    todo = sum(bits.values())
    while todo:
        best, held = max(masks, key=lambda each: (todo & each[1]).bit_count())
        found.append(best)
        todo &= ~held
    return found


def pairs(row: dict) -> set:
    return set(combinations(row.items(), 2))
