"""A few rows that contain each valid pair of values of two choices."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations


def rows(
    choices: Mapping[str, Sequence],
    valid: Callable[[dict], bool],
    draws: int = 4000,
    unpaired: str | None = None,
) -> list[dict]:
    """Return rows, each with one value per choice, that together contain each valid pair of values.

    Each next row is the one with the most pairs that are still missing.

    Args:
        choices: Values of each choice.
        valid: Whether a row is valid.
        draws: Number of random rows to select from. More draws lead to fewer rows.
        unpaired: A choice whose pairs are not needed.
    """
    draw, found = random.Random(0), []
    candidates = [
        {name: draw.choice(values) for name, values in choices.items()} for _ in range(draws)
    ]
    with_pairs = [(row, pairs(row, unpaired)) for row in filter(valid, candidates)]
    # sets of pairs as integers, whose common bits are counted faster than intersections of sets
    every = set().union(*(contained for _, contained in with_pairs))
    bits = {pair: 1 << bit for bit, pair in enumerate(every)}
    masks = [(row, sum(bits[pair] for pair in contained)) for row, contained in with_pairs]
    missing = sum(bits.values())
    while missing:
        best, mask = max(masks, key=lambda each: (missing & each[1]).bit_count())
        found.append(best)
        missing &= ~mask
    return found


def pairs(row: dict, unpaired: str | None = None) -> set:
    return set(combinations([each for each in row.items() if each[0] != unpaired], 2))
