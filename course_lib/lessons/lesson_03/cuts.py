"""The exercises of lesson 03 on segments: their peak, their number, and the best cuts."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course_lib.teaching import Verdict
from course_lib.teaching.exercises import (
    Messages,
    cases,
    exercise,
    not_answered,
    numbers,
    returns_none,
    throughout,
)

say = Messages(__file__)

B, A = 100_000, 200_000  # bytes of a boundary, and bytes that a layer saves, in 3.2 to 3.4

# The peak of segments
# --------------------------------------------------------------------------------------------------


def _sizes(cuts: Sequence[int]) -> list[int]:
    """Return the number of layers of each segment."""
    return [end - start for start, end in pairwise(cuts)]


def _sums(cuts: Sequence[int], layer_bytes: int = A) -> list[int]:
    """Return the bytes of each segment's layers, and of the inputs kept while it runs backward."""
    return [(j + 1) * B + size * layer_bytes for j, size in enumerate(_sizes(cuts))]


def _peak(cuts: Sequence[int]) -> int:
    """Return the peak of segments in bytes: the largest sum, and one gradient."""
    return max(_sums(cuts)) + B


def _sums_of_largest(cuts: Sequence[int]) -> list[int]:
    """Return the sums of the segments with the most layers, of which the last is the greatest."""
    sizes = _sizes(cuts)
    return [total for total, size in zip(_sums(cuts), sizes, strict=True) if size == max(sizes)]


def _largest_or_last(cuts: Sequence[int]) -> tuple[int, int]:
    """Return the peak of the last segment and the largest one: the last such one, or the first."""
    largest, last = _sums_of_largest(cuts), _sums(cuts)[-1]
    return max(largest[-1], last) + B, max(largest[0], last) + B


#: Message on a mistake -> the peak that it gives. Several mistakes are right for some cuts.
_PEAKS: dict[str, Callable[[Sequence[int]], Any]] = {
    "units": lambda cuts: _peak(cuts) / B,
    "layer_and_boundary": lambda cuts: max(_sums(cuts, A + B)) + B,
    "no_gradient": lambda cuts: _peak(cuts) - B,
    "all_inputs": lambda cuts: (len(cuts) - 1) * B + max(_sizes(cuts)) * A + B,
    "last": lambda cuts: _sums(cuts)[-1] + B,
    "largest": lambda cuts: _sums_of_largest(cuts)[-1] + B,
    "first_or_last": lambda cuts: max(_sums(cuts)[0], _sums(cuts)[-1]) + B,
    "largest_or_last": _largest_or_last,
    "mean": lambda cuts: (len(cuts) - 1) * B + cuts[-1] / (len(cuts) - 1) * A + B,
    "sum": lambda cuts: sum(_sums(cuts)) + B,
    "reversed": lambda cuts: (
        max((len(cuts) - 1 - j) * B + size * A for j, size in enumerate(_sizes(cuts))) + B
    ),
    "loss": lambda cuts: _peak(cuts) + 8,
}


def _draw_cuts(rng: random.Random) -> list[int]:
    return [0, *itertools.accumulate(rng.randint(1, 9) for _ in range(rng.randint(3, 8)))]


_CUTS = [[0, 40, 70, 90, 100], [0, 1, 2, 9], [0, 100], [*range(0, 101, 10)], [*range(8), 20]]
# The last segment has the peak though the first is the largest; then one in the middle has it.
_CUTS += [[0, 4, 7, 10, 13], [0, 3, 8, 10]]
# Here it is neither the largest segment, nor the first, nor the last.
_CUTS += [[0, 6, 11, 16, 21, 22], [0, 4, 8, 9]]


@numbers(
    {name: throughout(peak, tolerance=1e-9) for name, peak in _PEAKS.items()},
    cases=lambda: cases(_CUTS, _draw_cuts),
    tolerance=1e-9,
    in_bytes=True,
    otherwise="otherwise",
    blank=(None, ..., 0),
)
def check_predicted_peak(cuts: Sequence[int]) -> int:
    """Check a function of cuts that returns the peak of segments in bytes.

    While segment j runs backward, j + 1 inputs, its own layers and one gradient are live.
    """
    return _peak(cuts)


# The number of equal segments
# --------------------------------------------------------------------------------------------------

# (L, A, B), with a best count below L in each. For (70, 5, 1) it is 18.7: rounding down is wrong.
# For (25, 3, 2), L·A/B is not a whole number.
_TRIPLES = ((100, 2, 1), (64, 4, 1), (50, 200, 100), (60, 3, 5), (30, 7, 2), (70, 5, 1), (25, 3, 2))


def _draw_triple(rng: random.Random) -> tuple[int, int, int]:
    """Return L, A and B for which one whole number of segments is the best."""
    while True:
        layers, kept, boundary = rng.randint(20, 120), rng.randint(2, 9), rng.randint(1, 4)
        sums = sorted(k * boundary + layers / k * kept for k in range(1, layers + 1))
        if sums[0] + 1e-6 < sums[1]:
            return layers, kept, boundary


#: Message on a mistake -> the number of segments that it gives, or a tuple of them.
_COUNTS: dict[str, Callable[[int, int, int], Any]] = {
    "root_of_layers": lambda L, A, B: math.sqrt(L),
    "no_root": lambda L, A, B: L * A / B,
    "part_of_root": lambda L, A, B: math.sqrt(L) * A / B,
    "no_boundary": lambda L, A, B: math.sqrt(L * A),
    "no_layers": lambda L, A, B: math.sqrt(A / B),
    "added": lambda L, A, B: math.sqrt(L * A / (A + B)),
    "swapped": lambda L, A, B: math.sqrt(L * B / A),
    "peak": lambda L, A, B: (2 * math.sqrt(L * A * B), 2 * math.sqrt(L * A * B) + B),
    "this_chain": lambda L, A, B: math.sqrt(2 * L),
    "whole_layers": lambda L, A, B: min(
        range(1, L + 1), key=lambda k: k * B + math.ceil(L / k) * A
    ),
    "rounded_down": lambda L, A, B: math.floor(math.sqrt(L * A / B)),
    "rounded_up": lambda L, A, B: math.ceil(math.sqrt(L * A / B)),
    "rounded_layers": lambda L, A, B: L // round(math.sqrt(L * B / A)),
}


def _rounded_or_not(mistake: Callable[[int, int, int], Any]) -> throughout:
    """Return the mistake with its numbers as they are, and rounded."""

    def ways(L: int, A: int, B: int) -> tuple[float, ...]:
        found = mistake(L, A, B)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *map(round, found)

    return throughout(ways, tolerance=1e-9)


def _right_if_whole(L: int, A: int, B: int) -> tuple[int, int]:
    """Return the whole number with the smallest sum, and the rounded root."""
    best = min(range(1, L + 1), key=lambda k: k * B + L / k * A)
    return best, round(math.sqrt(L * A / B))


@numbers(
    {name: _rounded_or_not(mistake) for name, mistake in _COUNTS.items()},
    cases=lambda: cases(_TRIPLES, _draw_triple),
    also=_right_if_whole,
    tolerance=1e-3,
    otherwise="otherwise",
)
def check_best_count(L: int, A: int, B: int) -> float:
    """Check a function of L, A and B that returns the best number of equal segments.

    The best whole number is right, too.
    """
    return math.sqrt(L * A / B)


# Tapered segments
# --------------------------------------------------------------------------------------------------


@cache
def least_peak(depth: int) -> int:
    """Return the least peak, in bytes, of all cuts of `depth` equal layers."""

    @cache
    def peak_of_rest(layers: int, inputs: int) -> int:  # `inputs`: number of inputs kept before
        if layers == 0:
            return 0
        sizes = range(1, layers + 1)
        return min(
            max((inputs + 1) * B + size * A, peak_of_rest(layers - size, inputs + 1))
            for size in sizes
        )

    return peak_of_rest(depth, 0) + B


@exercise()
def check_tapered(answer: Any) -> Verdict:
    """Check a function depth -> cuts, whose peak must be the least one of all cuts.

    Some of the depths divide evenly and some do not.
    """
    depths = [*range(2, 20), *cases([25, 50, 64], lambda rng: rng.randint(20, 90)), 100]
    raw = [answer(depth) for depth in depths]
    if all(given is None for given in raw) or all(
        hasattr(given, "__len__") and [*given] == [0, depth]
        for given, depth in zip(raw, depths, strict=True)
    ):
        return not_answered()
    for given, depth in zip(raw, depths, strict=True):
        if given is None:
            return returns_none(f"depth = {depth}")
    given = [_cuts_of(one, depth) for one, depth in zip(raw, depths, strict=True)]
    peaks, least = [*map(_peak, given)], [*map(least_peak, depths)]
    if peaks == least:
        return say.right("tapered.right", count=f"{peaks[-1] / B:g}")
    turned = [[cuts[-1] - cut for cut in reversed(cuts)] for cuts in given]
    say.refuse_if([*map(_peak, turned)] == least, "tapered.turned")
    equal = all(max(sizes) - min(sizes) <= 1 for sizes in map(_sizes, given))
    say.refuse_if(equal, "tapered.equal")
    for depth, cuts, peak, best in zip(depths, given, peaks, least, strict=True):
        if peak != best:
            shown = f"{cuts}" if len(cuts) < 9 else f"{cuts[:7]} …"
            peaks_in_b = {"peak": f"{peak / B:g}", "least": f"{best / B:g}"}
            say.wrong("tapered.higher", depth=depth, cuts=shown, **peaks_in_b)
    raise AssertionError("no peak is higher than the least")


def _cuts_of(given: Any, depth: int) -> list[int]:
    """Return the answer as cuts of `depth` layers, or refuse it."""
    listed = hasattr(given, "__iter__")
    say.refuse_if(not listed, "tapered.list", kind=type(given).__name__)
    say.refuse_if(isinstance(given, set | frozenset), "tapered.set")
    try:
        cuts = [float(cut) for cut in given]
    except (TypeError, ValueError):
        cuts = [math.nan]
    shown = f"{given}"[:60]
    say.refuse_if(sum(cuts) == depth and cuts[1:] != [depth], "tapered.sizes", cuts=shown)
    whole = all(cut.is_integer() for cut in cuts)
    say.refuse_if(not whole, "tapered.whole_numbers", cuts=shown)
    ends = len(cuts) > 1 and cuts[0] == 0 and cuts[-1] == depth
    say.refuse_if(not ends, "tapered.ends", depth=depth, cuts=shown)
    increasing = all(start < end for start, end in pairwise(cuts))
    say.refuse_if(not increasing, "tapered.increasing", cuts=shown)
    return [int(cut) for cut in cuts]
