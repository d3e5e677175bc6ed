"""The exercises of lesson 03 on segments: their peak, their number, and the best cuts."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    cases,
    exercise,
    not_answered,
    returns_none,
    right,
    wrong,
)

B, A = 100_000, 200_000  # bytes of a boundary, and bytes that a layer saves, in 3.2 to 3.4


def _peak(cuts: Sequence[int], mistake: str | None = None) -> float:
    """Return the peak of segments in bytes.

    While segment j runs backward, j + 1 inputs, its own layers and one gradient are live.

    Args:
        cuts: First layer of each segment, and the number of layers.
        mistake: A key of `_PEAK_MISTAKES` for the result of that mistake, or None.
    """
    sizes = [end - start for start, end in pairwise(cuts)]
    inputs = [*range(1, len(sizes) + 1)]
    if mistake == "mean":
        sizes = [sum(sizes) / len(sizes)] * len(sizes)
    if mistake == "reversed":
        inputs.reverse()
    if mistake == "all boundaries":
        inputs = [len(sizes)] * len(sizes)
    if mistake == "last":
        inputs, sizes = inputs[-1:], sizes[-1:]
    if mistake == "largest":
        largest = max(range(len(sizes)), key=lambda j: (sizes[j], j))
        inputs, sizes = [inputs[largest]], [sizes[largest]]
    if mistake == "ends":
        inputs, sizes = [inputs[0], inputs[-1]], [sizes[0], sizes[-1]]
    if mistake in ("largest or last", "first largest or last"):
        latest = mistake == "largest or last"
        largest = max(range(len(sizes)), key=lambda j: (sizes[j], j if latest else -j))
        inputs, sizes = [inputs[largest], inputs[-1]], [sizes[largest], sizes[-1]]
    kept_by_layer = A + B if mistake == "output twice" else A
    parts = [kept * B + size * kept_by_layer for kept, size in zip(inputs, sizes, strict=True)]
    peak = (sum(parts) if mistake == "sum" else max(parts)) + (0 if mistake == "gradient" else B)
    return {"units": peak / B, "megabytes": peak / 1e6, "loss": peak + 8}.get(mistake, peak)


#: Mistake in the peak -> verdict.
_PEAK_MISTAKES = {
    "units": "You counted in units of B. Return bytes.",
    "megabytes": "That is in MB. Give bytes.",
    "output twice": "You added a B for each layer. A includes everything that a layer keeps.",
    "gradient": (
        "One B is missing. Count the chain's own input, and also the gradient that is passed back."
    ),
    "all boundaries": "You counted all inputs for every segment. By the time an early segment runs"
    " backward, the inputs of the later ones have been released.",
    "last": "You looked at the last segment only. Any segment may have the largest sum.",
    "largest": (
        "You looked at the largest segment only. A later one may be a little shorter, but"
        " more inputs are kept next to it. Take the largest sum of all segments."
    ),
    "ends": (
        "You looked at the first segment and the last. One between them may be the highest."
        " Take the largest sum of all segments."
    ),
    **dict.fromkeys(
        ("largest or last", "first largest or last"),
        "You looked at the largest segment and the last. Another one may be the highest. Take the"
        " largest sum of all segments.",
    ),
    "mean": "You took the mean number of layers for every segment. Take each segment's own number.",
    "sum": "You added up the segments. Only one of them runs backward at a time, so take the"
    " largest.",
    "reversed": (
        "You counted the inputs in the wrong order. While the first segment runs backward,"
        " only its own input is kept. While the last one does, all of them are kept."
    ),
    "loss": (
        "You counted the 8 bytes of the loss and its gradient. Count only the inputs, the"
        " layers and one gradient of B bytes."
    ),
}


@exercise(
    hint=(
        (
            "Take segment j, counted from 0. While it runs backward, how many inputs are"
            " kept, including its own? How many layers does it have?"
        ),
        (
            "Add up the inputs, the layers and one gradient for each segment. Which segment"
            " determines the peak?"
        ),
    )
)
def check_predicted_peak(answer: Any) -> Verdict:
    """Check a function of cuts that returns the peak of segments in bytes.

    Different mistakes give different results on the cuts that are tried.
    """
    tried = [[0, 40, 70, 90, 100], [0, 1, 2, 9], [0, 100], range(0, 101, 10), [*range(51), 100]]
    # The last segment has the peak though the first is the largest; then one in the middle has it.
    tried += [[0, 4, 7, 10, 13], [0, 3, 8, 10]]
    # Here it is neither the largest segment, nor the first, nor the last.
    tried += [[0, 6, 11, 16, 21, 22], [0, 4, 8, 9]]
    tried = cases(tried, _draw_cuts)
    given = [answer(cuts) for cuts in tried]
    if not any(given):
        return not_answered()
    if all(map(_same, given, map(_peak, tried))):
        return right("Right, for equal segments and for unequal ones.")
    for mistake, reason in _PEAK_MISTAKES.items():
        if all(_same(one, _peak(cuts, mistake)) for one, cuts in zip(given, tried, strict=True)):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    one, cuts = next(
        (one, cuts) for one, cuts in zip(given, tried, strict=True) if not _same(one, _peak(cuts))
    )
    values = {
        "cuts": _format_cuts(cuts),
        "wanted": f"{_peak(cuts):,}",
        "given": f"{float(one):,.0f}",
    }
    return wrong(
        text(
            "Not yet: for the cuts {cuts} the peak is {wanted} bytes, but you return {given}.",
            **values,
        )
    )


def _draw_cuts(rng: random.Random) -> list[int]:
    return [0, *itertools.accumulate(rng.randint(1, 9) for _ in range(rng.randint(3, 8)))]


def _format_cuts(cuts: Sequence[int]) -> str:
    """Return the cuts as they appear in a verdict, shortened if they are many."""
    return f"{list(cuts)}" if len(cuts) < 9 else f"{list(cuts)[:7]} …"


# (L, A, B), with a best count below L in each. For (70, 5, 1) it is 18.7: rounding down is wrong.
# For (25, 3, 2), L·A/B is not a whole number.
_SIZES = ((100, 2, 1), (64, 4, 1), (50, 200, 100), (60, 3, 5), (30, 7, 2), (70, 5, 1), (25, 3, 2))


def _draw_sizes(rng: random.Random) -> tuple[int, int, int]:
    """Return sizes for which one whole number of segments is the best."""
    while True:
        layers, kept, boundary = rng.randint(20, 120), rng.randint(2, 9), rng.randint(1, 4)
        sums = [_sum_of_parts(k, layers, kept, boundary) for k in range(1, layers + 1)]
        if min(sums) + 1e-6 < sorted(sums)[1]:
            return layers, kept, boundary


def _sum_of_parts(k: float, layers: int, kept: int, boundary: int) -> float:
    """Return the two terms of the peak that depend on the number of segments, k."""
    return k * boundary + layers / k * kept


def _best_whole(layers: int, kept: int, boundary: int) -> int:
    """Return the whole number of segments with the smallest sum."""
    return min(range(1, layers + 1), key=lambda k: _sum_of_parts(k, layers, kept, boundary))


def _whole_layers(layers: int, kept: int, boundary: int) -> int:
    """Return the best count if a segment has whole layers, which is another question."""
    return min(range(1, layers + 1), key=lambda k: k * boundary + math.ceil(layers / k) * kept)


#: Verdicts, each with the result of a function with that mistake.
_COUNT_MISTAKES: tuple[tuple[str, Callable[[int, int, int], float]], ...] = (
    (
        "You returned √L. This is right only if a layer keeps as much as one boundary, that"
        " is if A = B.",
        lambda n, a, b: math.sqrt(n),
    ),
    ("You returned L·A/B. Take its square root.", lambda n, a, b: n * a / b),
    (
        "You left A/B outside of the root. Take the square root of L·A/B.",
        lambda n, a, b: math.sqrt(n) * a / b,
    ),
    ("You left out B. Divide L·A by B.", lambda n, a, b: math.sqrt(n * a)),
    ("You left out L. The more layers, the more segments.", lambda n, a, b: math.sqrt(a / b)),
    (
        "You added A and B. Set the two terms that depend on k equal: k·B = L·A/k.",
        lambda n, a, b: math.sqrt(n * a / (a + b)),
    ),
    (
        "You swapped A and B. Your formula gives the layers of one segment.",
        lambda n, a, b: math.sqrt(n * b / a),
    ),
    (
        "You returned the peak for the best k. Return k, the number of segments.",
        lambda n, a, b: 2 * math.sqrt(n * a * b),
    ),
    (
        "You returned the peak for the best k. Return k, the number of segments.",
        lambda n, a, b: 2 * math.sqrt(n * a * b) + b,
    ),
    (
        "You used A = 2 B, which is true of this chain only. Write the formula for any A and B.",
        lambda n, a, b: math.sqrt(2 * n),
    ),
    (
        "You looked for the best k with whole layers in each segment. Here L/k may be any number.",
        _whole_layers,
    ),
    (
        "You rounded down. Do not round, or take the whole number with the smallest sum.",
        lambda n, a, b: math.floor(math.sqrt(n * a / b)),
    ),
    (
        "You rounded up. Do not round, or take the whole number with the smallest sum.",
        lambda n, a, b: math.ceil(math.sqrt(n * a / b)),
    ),
    (
        "You rounded the layers of a segment first. The number of segments need not divide L.",
        lambda n, a, b: n // round(math.sqrt(n * b / a)),
    ),
)


@exercise(
    hint=(
        "The peak is k·B + (L/k)·A + B. Which of these terms depend on k?",
        "One term grows with k and one falls. Their product is the same for every k, so their sum"
        " is smallest where they are equal.",
    )
)
def check_best_count(answer: Any) -> Verdict:
    """Check a function of L, A and B that returns the best number of equal segments.

    The best whole number is right, too.
    """
    all_sizes = cases(_SIZES, _draw_sizes)
    given = [answer(*sizes) for sizes in all_sizes]
    if None in given:
        return not_answered()
    wanted = [math.sqrt(layers * kept / boundary) for layers, kept, boundary in all_sizes]
    fit = [
        _same(one, k, 1e-3) or one in (_best_whole(*sizes), round(k))
        for one, k, sizes in zip(given, wanted, all_sizes, strict=True)
    ]
    if all(fit):
        return right(
            "Right: with this k both terms are √(L·A·B). For 100 layers that keep 2 B each, k"
            " is 14."
        )
    for reason, mistake in _COUNT_MISTAKES:
        theirs = [mistake(*sizes) for sizes in all_sizes]
        if all(_same(one, k) or one == round(k) for one, k in zip(given, theirs, strict=True)):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    first = fit.index(False)
    values = dict(zip(("layers", "kept", "boundary"), all_sizes[first], strict=True))
    values |= {"given": f"{float(given[first]):.4g}", "wanted": f"{wanted[first]:.4g}"}
    message = (
        "Not yet: with L = {layers}, A = {kept} and B = {boundary} you return {given}, but"
        " the sum is smallest for k = {wanted}."
    )
    return wrong(text(message, **values))


def _same(given: Any, wanted: float, tolerance: float = 1e-9) -> bool:
    """Return whether a number is the right one, or refuse what is not a number."""
    try:
        return math.isclose(given + 0.0, wanted, rel_tol=tolerance)
    except TypeError:
        raise WrongAnswer(
            text("Expected one number, got a `{kind}`.", kind=type(given).__name__), exact=True
        ) from None


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


def _cuts_of(given: Any, depth: int) -> list[int]:
    """Return the answer as cuts of `depth` layers, or refuse it."""
    shown = f"{given}"[:60]
    if not hasattr(given, "__iter__"):
        kind = type(given).__name__
        raise WrongAnswer(
            text(
                "Expected a list of cuts, such as `[0, 40, 70, 100]`, got a `{kind}`.",
                kind=kind,
            ),
            exact=True,
        )
    if isinstance(given, set | frozenset):
        raise WrongAnswer(text("A set has no order. Return a list of cuts."), exact=True)
    try:
        cuts = [float(cut) for cut in given]
    except (TypeError, ValueError):
        cuts = [math.nan]
    if sum(cuts) == depth and cuts[1:] != [depth]:
        raise WrongAnswer(
            text("You returned the sizes of the segments, {cuts}. Return the cuts.", cuts=shown),
            exact=True,
        )
    if not all(cut.is_integer() for cut in cuts):
        raise WrongAnswer(
            text(
                "A cut lies between two layers, so it must be a whole number. Yours are {cuts}.",
                cuts=shown,
            ),
            exact=True,
        )
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != depth:
        message = (
            "The cuts of {depth} layers must begin with 0 and end with {depth}. Yours are {cuts}."
        )
        raise WrongAnswer(text(message, depth=depth, cuts=shown), exact=True)
    if any(end <= start for start, end in pairwise(cuts)):
        raise WrongAnswer(
            text(
                "Each segment has at least one layer, so the cuts must increase. Yours are {cuts}.",
                cuts=shown,
            ),
            exact=True,
        )
    return [int(cut) for cut in cuts]


@exercise(
    hint=(
        (
            "Give every segment the same R bytes. While segment j runs backward, j + 1 inputs"
            " are kept. How many layers fit next to them?"
        ),
        (
            "For a given R, how many layers do all segments hold together? Which is the smallest R"
            " that is enough?"
        ),
    )
)
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
        count = f"{peaks[-1] / B:g}"
        return right(
            text(
                "Right: no other cuts have a lower peak. With 100 layers it is {count} B.",
                count=count,
            )
        )
    first = next(i for i, (peak, best) in enumerate(zip(peaks, least, strict=True)) if peak != best)
    turned = [[cuts[-1] - cut for cut in reversed(cuts)] for cuts in given]
    if [*map(_peak, turned)] == least:
        message = (
            "Your cuts are the wrong way round. While the first segment runs backward, only"
            " its own input is kept, so it may be the longest."
        )
        return wrong(text("Not yet. {reason}", reason=text(message)), exact=True)
    sizes = [[end - start for start, end in pairwise(cuts)] for cuts in given]
    if all(max(each) - min(each) <= 1 for each in sizes):
        message = (
            "Your segments are equal, so only the last one reaches the peak. Make the early"
            " ones longer."
        )
        return wrong(text("Not yet. {reason}", reason=text(message)), exact=True)
    values = {"depth": depths[first], "cuts": _format_cuts(given[first])}
    values |= {"peak": f"{peaks[first] / B:g}", "least": f"{least[first] / B:g}"}
    return wrong(
        text(
            "Not yet: {depth} layers with the cuts {cuts} have a peak of {peak} B, but other"
            " cuts have one of {least} B.",
            **values,
        )
    )
