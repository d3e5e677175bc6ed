"""The exercises of lesson 03 on segments: their peak, their number, and the best cuts."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong

B, A = 100_000, 200_000  # bytes of a boundary, and bytes that a layer saves, in 3.1 to 3.3


def _peak(cuts: Sequence[int], mistake: str | None = None) -> float:
    """Return the peak of segments, or the result of a given mistake."""
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
    parts = [kept * B + size * A for kept, size in zip(inputs, sizes, strict=True)]
    peak = (sum(parts) if mistake == "sum" else max(parts)) + (0 if mistake == "gradient" else B)
    return {"units": peak / B, "loss": peak + 8}.get(mistake, peak)


_PEAK_MISTAKES = {
    "units": "Those are activations. Give bytes.",
    "gradient": (
        "One B is missing: the chain's own input counts, and so does the gradient that is"
        " handed on."
    ),
    "all boundaries": "While an early segment is worked on, the inputs of the later ones are gone.",
    "last": "Any segment may be the largest: take the greatest of all.",
    "largest": (
        "You looked at the largest segment only. A later one that is a little shorter has more"
        " inputs next to it: take the greatest of all sums."
    ),
    "ends": (
        "You looked at the first segment and the last. One between them may be the highest: take"
        " the greatest of all sums."
    ),
    "mean": "Segments differ: take each one's own number of layers.",
    "sum": "Only one segment is worked on at a time: take the greatest, not the sum.",
    "reversed": (
        "The first segment has only its own input, the last has all of them: yours is the other way"
        " round."
    ),
    "loss": (
        "The 8 bytes of the loss and its gradient are not asked for: inputs, layers and one"
        " gradient are."
    ),
}


@exercise(
    hint=(
        (
            "Segment j, counted from 0: how many inputs are kept then, its own among them, and how"
            " many layers has it?"
        ),
        (
            "(j + 1)·B of inputs, A for each of its layers, and one gradient, B: the greatest over"
            " all segments."
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
    given = [answer(cuts) for cuts in tried]
    if not any(given):
        return not_answered()
    if all(map(_same, given, map(_peak, tried))):
        return right("Right, for equal segments and for others.")
    for mistake, reason in _PEAK_MISTAKES.items():
        if all(_same(one, _peak(cuts, mistake)) for one, cuts in zip(given, tried, strict=True)):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    one, cuts = next(
        (one, cuts) for one, cuts in zip(given, tried, strict=True) if not _same(one, _peak(cuts))
    )
    values = {"cuts": _shown(cuts), "wanted": f"{_peak(cuts):,}", "given": f"{float(one):,.0f}"}
    return wrong(text("Not yet: for the cuts {cuts} it is {wanted}, not {given}.", **values))


def _shown(cuts: Sequence[int]) -> str:
    return f"{list(cuts)}" if len(cuts) < 9 else f"{list(cuts)[:7]} …"


# (L, A, B), with a best count below L in each. The last one is 18.7, so rounding down is wrong.
_SIZES = ((100, 2, 1), (64, 4, 1), (50, 200, 100), (60, 3, 5), (30, 7, 2), (70, 5, 1))


def _sum_of_parts(k: float, layers: int, kept: int, boundary: int) -> float:
    return k * boundary + layers / k * kept


def _best_whole(layers: int, kept: int, boundary: int) -> int:
    return min(range(1, layers + 1), key=lambda k: _sum_of_parts(k, layers, kept, boundary))


def _whole_layers(layers: int, kept: int, boundary: int) -> int:
    """Return the best count if a segment has whole layers, which is another question."""
    return min(range(1, layers + 1), key=lambda k: k * boundary + math.ceil(layers / k) * kept)


# Reason -> result of a function with that mistake.
_COUNT_MISTAKES: tuple[tuple[str, Callable[[int, int, int], float]], ...] = (
    (
        "That is √L, right only where a layer keeps as much as one boundary.",
        lambda n, a, b: math.sqrt(n),
    ),
    ("Take the square root.", lambda n, a, b: n * a / b),
    (
        "A and B are the wrong way round: so many layers has a segment.",
        lambda n, a, b: math.sqrt(n * b / a),
    ),
    (
        "That is the peak there, not the number of segments.",
        lambda n, a, b: 2 * math.sqrt(n * a * b),
    ),
    (
        "That is the peak there, not the number of segments.",
        lambda n, a, b: 2 * math.sqrt(n * a * b) + b,
    ),
    ("A is 2 B in this chain only; write it for any A and B.", lambda n, a, b: math.sqrt(2 * n)),
    (
        "That is best where each segment has whole layers. Here L/k may be any number.",
        _whole_layers,
    ),
    (
        "You rounded down. Leave the number as it is, or take the whole number with the least sum.",
        lambda n, a, b: math.floor(math.sqrt(n * a / b)),
    ),
    (
        "You rounded up. Leave the number as it is, or take the whole number with the least sum.",
        lambda n, a, b: math.ceil(math.sqrt(n * a / b)),
    ),
    (
        "You rounded the layers of a segment first. The number of segments need not divide L.",
        lambda n, a, b: n // round(math.sqrt(n * b / a)),
    ),
)


@exercise(
    hint=(
        "The peak is k·B + (L/k)·A + B. One part grows with k, one falls: where are they equal?",
        "k·B = L·A/k. Solve it for k.",
    )
)
def check_best_count(answer: Any) -> Verdict:
    """Check a function of L, A and B that returns the best number of equal segments.

    The best whole number is right, too.
    """
    given = [answer(*sizes) for sizes in _SIZES]
    if None in given:
        return not_answered()
    wanted = [math.sqrt(layers * kept / boundary) for layers, kept, boundary in _SIZES]
    fit = [
        _same(one, k, 1e-3) or one in (_best_whole(*sizes), round(k))
        for one, k, sizes in zip(given, wanted, _SIZES, strict=True)
    ]
    if all(fit):
        return right("Right: both parts are √(L·A·B) there. 100 layers that keep 2 B each: 14.")
    for reason, mistake in _COUNT_MISTAKES:
        theirs = [mistake(*sizes) for sizes in _SIZES]
        if all(_same(one, k) or one == round(k) for one, k in zip(given, theirs, strict=True)):
            return wrong(text("Not yet. {reason}", reason=text(reason)), exact=True)
    first = fit.index(False)
    values = dict(zip(("layers", "kept", "boundary"), _SIZES[first], strict=True))
    values |= {"given": f"{float(given[first]):.4g}", "wanted": f"{wanted[first]:.4g}"}
    message = (
        "Not yet: with L = {layers}, A = {kept} and B = {boundary} it gives {given}; the sum is"
        " least at {wanted}."
    )
    return wrong(text(message, **values))


def _same(given: Any, wanted: float, tolerance: float = 1e-9) -> bool:
    try:
        return math.isclose(given + 0.0, wanted, rel_tol=tolerance)
    except TypeError:
        raise Refused(
            text("Expected one number, got a `{kind}`.", kind=type(given).__name__), exact=True
        ) from None


@cache
def least_peak(depth: int) -> int:
    """Return the least peak, in bytes, of all cuts of `depth` equal layers."""

    @cache
    def rest(layers: int, inputs: int) -> int:  # `inputs`: number of inputs kept before
        if layers == 0:
            return 0
        sizes = range(1, layers + 1)
        return min(
            max((inputs + 1) * B + size * A, rest(layers - size, inputs + 1)) for size in sizes
        )

    return rest(depth, 0) + B


def _cuts_of(given: Any, depth: int) -> list[int]:
    """Return the answer as cuts of `depth` layers, or refuse it."""
    shown = f"{given}"[:60]
    if not hasattr(given, "__iter__"):
        kind = type(given).__name__
        raise Refused(
            text(
                "A list of cuts is wanted, such as `[0, 40, 70, 100]`; this is a `{kind}`.",
                kind=kind,
            )
        )
    cuts = [float(cut) for cut in given]
    if sum(cuts) == depth and cuts[:1] != [0]:
        raise Refused(
            text("Those are the sizes of the segments; give the cuts: {cuts}.", cuts=shown),
            exact=True,
        )
    if any(cut != int(cut) for cut in cuts):
        raise Refused(
            text("A cut falls between two layers, so it is a whole number: {cuts}.", cuts=shown),
            exact=True,
        )
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != depth:
        message = "The cuts of {depth} layers begin with 0 and end with {depth}: {cuts}."
        raise Refused(text(message, depth=depth, cuts=shown), exact=True)
    if any(end <= start for start, end in pairwise(cuts)):
        raise Refused(
            text("Each segment has a layer at least, so cuts increase: {cuts}.", cuts=shown),
            exact=True,
        )
    return [int(cut) for cut in cuts]


@exercise(
    hint=(
        (
            "Give all segments the same room R. With segment j there are j + 1 inputs: how many"
            " layers fit beside them?"
        ),
        (
            "Try R = A + B, then a B more, and so on, until all layers fit: segment j, from 0, has"
            " (R - (j + 1)·B) // A."
        ),
    )
)
def check_tapered(answer: Any) -> Verdict:
    """Check a function depth -> cuts, whose peak must be the least one of all cuts.

    Some of the depths divide evenly and some do not.
    """
    depths = [*range(2, 20), 25, 50, 64, 100]
    raw = [answer(depth) for depth in depths]
    if any(given is None for given in raw) or all(
        hasattr(given, "__len__") and [*given] == [0, depth]
        for given, depth in zip(raw, depths, strict=True)
    ):
        return not_answered()
    given = [_cuts_of(one, depth) for one, depth in zip(raw, depths, strict=True)]
    peaks, least = [*map(_peak, given)], [*map(least_peak, depths)]
    if peaks == least:
        count = f"{peaks[-1] / B:g}"
        return right(
            text(
                "Right: of all the cuts there are, none peaks lower. 100 layers: {count} B.",
                count=count,
            )
        )
    first = next(i for i, (peak, best) in enumerate(zip(peaks, least, strict=True)) if peak != best)
    turned = [[cuts[-1] - cut for cut in reversed(cuts)] for cuts in given]
    if [*map(_peak, turned)] == least:
        message = (
            "The other way round: with the first segment only its own input is there, so it may be"
            " the longest."
        )
        return wrong(text("Not yet. {reason}", reason=text(message)), exact=True)
    sizes = [[end - start for start, end in pairwise(cuts)] for cuts in given]
    if all(max(each) - min(each) <= 1 for each in sizes):
        message = (
            "Equal segments reach the peak only at the last one: let the early ones be longer."
        )
        return wrong(text("Not yet. {reason}", reason=text(message)), exact=True)
    values = {"depth": depths[first], "cuts": _shown(given[first])}
    values |= {"peak": f"{peaks[first] / B:g}", "least": f"{least[first] / B:g}"}
    return wrong(
        text(
            "Not yet: {depth} layers cut at {cuts} peak at {peak} B; other cuts at {least} B.",
            **values,
        )
    )
