"""A few rows that contain each valid pair of values of two choices."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations


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
    with_pairs = [(row, pairs(row)) for row in filter(valid, candidates)]
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


def without(name: str, table: list[dict]) -> list[dict]:
    """Return the rows that are needed for the pairs of all choices except `name`."""
    of_row = [{pair for pair in pairs(row) if name not in dict(pair)} for row in table]
    counts = Counter(chain.from_iterable(of_row))
    needed = []
    for row, contained in reversed([*zip(table, of_row, strict=True)]):
        if all(counts[pair] > 1 for pair in contained):
            counts.subtract(contained)
        else:
            needed.append(row)
    return needed[::-1]


def pairs(row: dict) -> set:
    return set(combinations(row.items(), 2))
