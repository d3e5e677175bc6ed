"""The exercises of lesson 03."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from course_lib.schedule import (
    Backward,
    Chain,
    Cost,
    Forward,
    IllegalSchedule,
    Schedule,
    Stage,
    simulate,
    sqrt_segments,
)
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong

B, A = 100_000, 200_000  # bytes of a boundary, and what a layer keeps, in sections 3.1 to 3.3

# Segments -------------------------------------------------------------------------------------------------------------


def _peak(cuts: Sequence[int], slip: str | None = None) -> float:
    """The peak of segments; with a slip, what somebody gets who makes it."""
    sizes = [end - start for start, end in pairwise(cuts)]
    if slip == "mean":
        sizes = [sum(sizes) / len(sizes)] * len(sizes)
    if slip == "all boundaries":
        return len(sizes) * B + max(sizes) * A + B
    if slip == "last":
        return len(sizes) * B + sizes[-1] * A + B
    gradient = 0 if slip == "gradient" else B
    peak = max((j + 1) * B + size * A for j, size in enumerate(sizes)) + gradient
    return peak / B if slip == "units" else peak


_PEAK_SLIPS = {
    "units": "Those are activations. Give bytes.",
    "gradient": "One B is missing: the chain's own input counts, and so does the gradient that is handed on.",
    "all boundaries": "While an early segment is worked on, the inputs of the later ones are gone.",
    "last": "Any segment may be the largest: take the greatest of all.",
    "mean": "Segments differ: take each one's own number of layers.",
}


@exercise(
    hint="Segment j, counted from 0: how many inputs are kept then, its own among them, and how many layers has it?"
)
def check_predicted_peak(answer: Any) -> Verdict:
    """A function of cuts that gives the peak of segments in bytes, tried on cuts that tell the slips apart."""
    tried = [[0, 40, 70, 90, 100], [0, 1, 2, 9], [0, 100], range(0, 101, 10), [*range(51), 100]]
    given = [answer(cuts) for cuts in tried]
    if not any(given):
        return not_answered()
    if all(map(_same, given, map(_peak, tried))):
        return right("Right, for equal segments and for others.")
    for slip, reason in _PEAK_SLIPS.items():
        if all(_same(one, _peak(cuts, slip)) for one, cuts in zip(given, tried, strict=True)):
            return wrong(text("Not yet. {reason}", reason=text(reason)))
    one, cuts = next((one, cuts) for one, cuts in zip(given, tried, strict=True) if not _same(one, _peak(cuts)))
    shown = f"{list(cuts)}" if len(cuts) < 6 else f"{list(cuts)[:4]} …"
    values = {"cuts": shown, "wanted": f"{_peak(cuts):,}", "given": f"{float(one):,.0f}"}
    return wrong(text("Not yet: for the cuts {cuts} it is {wanted}, not {given}.", **values))


@exercise(hint="The peak is k·B + (L/k)·A + B. One part grows with k, one falls: where are they equal?")
def check_best_count(answer: Any) -> Verdict:
    """A function of L, A and B that gives the best number of equal segments; a rounded one is right as well."""
    tried = [(100, 2, 1), (64, 4, 1), (50, 200, 100), (60, 3, 5), (7, 30, 2)]
    given = [answer(*sizes) for sizes in tried]
    if None in given:
        return not_answered()
    wanted = [math.sqrt(layers * kept / boundary) for layers, kept, boundary in tried]
    if all(_same(one, k) or one in (math.floor(k), math.ceil(k)) for one, k in zip(given, wanted, strict=True)):
        return right("Right: both parts are √(L·A·B) there. 100 layers that keep 2 B each: 14.")
    slips = {
        "That is √L, right only where a layer keeps as much as one boundary.": [math.sqrt(size[0]) for size in tried],
        "Take the square root.": [k * k for k in wanted],
        "A and B are the wrong way round: so many layers has a segment.": [
            math.sqrt(layers * b / a) for layers, a, b in tried
        ],
        "That is the peak there, not the number of segments.": [2 * math.sqrt(n * a * b) for n, a, b in tried],
    }
    for reason, numbers in slips.items():
        if all(map(_same, given, numbers)):
            return wrong(text("Not yet. {reason}", reason=text(reason)))
    return wrong(text("Not yet: with L = 100, A = 2 and B = 1 it gives {number}.", number=f"{float(given[0]):.4g}"))


def _same(given: Any, wanted: float) -> bool:
    try:
        return math.isclose(float(given), wanted, rel_tol=1e-9)
    except TypeError:
        raise Refused(text("One number is wanted; this is a `{kind}`.", kind=type(given).__name__)) from None


# The recurrence -------------------------------------------------------------------------------------------------------


def every_schedule(first: int, last: int) -> Iterator[list]:
    """All schedules of stages `first` to `last` that keep what they keep until its backward, as lists of actions.

    There are 1, 2, 6, 22, 90, 394 for one to six stages (the large Schröder numbers).
    """
    if first > last:
        yield []
        return
    for rest in every_schedule(first + 1, last):
        yield [Forward(first, "all"), *rest, Backward(first)]
    for end in range(first + 1, last + 1):
        ahead = [Forward(first, "input"), *(Forward(i, "nothing") for i in range(first + 1, end))]
        for later in every_schedule(end, last):
            for earlier in every_schedule(first, end - 1):
                yield [*ahead, *later, *earlier]


def _uneven(*sizes: tuple[float, float, int]) -> Chain:
    """Stages of (forward time, backward time, bytes kept) with boundaries of one byte."""
    return Chain(tuple(Stage(forward, backward, 1, kept) for forward, backward, kept in sizes), 1)


_CHAINS = (
    Chain.uniform(4, saved_bytes=2),
    _uneven((1, 2, 3), (5, 9, 1), (2, 4, 6), (1, 1, 2), (4, 8, 2)),
    _uneven((3, 6, 2), (1, 2, 5), (6, 12, 1), (2, 4, 4), (1, 2, 3)),
)


@cache
def _least_times() -> list[list[float]]:
    """For each chain, the least time with 1, 2, ... bytes beyond its input, by the referee's word on every schedule."""
    found = []
    for chain in _CHAINS:
        costs = [simulate(actions, chain) for actions in every_schedule(0, len(chain) - 1)]
        most = max(cost.peak_bytes for cost in costs)
        budgets = range(chain.input_bytes + 1, most + 3)
        found.append([min((c.time for c in costs if c.peak_bytes <= budget), default=math.inf) for budget in budgets])
    return found


def _fastest(stages: tuple[Stage, ...], room: int, slip: str) -> float:
    """The recurrence with one slip in it."""
    if not stages:
        return 0
    first, best = stages[0], math.inf
    taken = first.saved_bytes + (0 if slip == "gradient" else first.output_bytes)
    if (taken <= room or slip == "fits") and (slip != "one at a time" or len(stages) == 1):
        left = room if slip == "kept" else room - first.saved_bytes
        best = first.forward_time + _fastest(stages[1:], left, slip) + first.backward_time
    for end in range(1, len(stages)) if slip != "never runs on" else ():
        ahead = 0 if slip == "time" else sum(stage.forward_time for stage in stages[:end])
        left = room if slip == "input" else room - stages[end - 1].output_bytes
        earlier = room - stages[end - 1].output_bytes if slip == "gone" else room
        again = 0 if slip == "earlier" else _fastest(stages[:end], earlier, slip)
        best = min(best, ahead + _fastest(stages[end:], left, slip) + again)
    return best


_SLIPS = {
    "gradient": "A backward needs room for the gradient that comes in, too: `saved_bytes + output_bytes`.",
    "fits": "It never runs out of room: does what the first stage keeps fit?",
    "kept": "What the first stage keeps is there while the others are done: they have `saved_bytes` less.",
    "input": "The input that is kept takes room while the later stages are done.",
    "gone": "When the earlier stages are done, the input that was kept is gone: they have all of the room.",
    "time": "Running on takes the forward times of the stages that are passed.",
    "earlier": "The stages that were passed are still to be done.",
    "never runs on": "It only ever keeps everything. Let it also run on and keep a later input.",
    "one at a time": "It keeps all of a stage only where it is the last one left. Keeping more than one may be faster.",
}


@exercise(
    hint="Two ways: keep all of the first stage and do the rest; or run on to a later input, keep it, do both parts."
)
def check_recurrence(answer: Any) -> Verdict:
    """`fastest(stages, room)`, tried on three chains with every room, against the referee on every schedule."""
    wanted = _least_times()
    given = [_table_of(answer, chain, len(times)) for chain, times in zip(_CHAINS, wanted, strict=True)]
    if any(one is None for times in given for one in times):
        return not_answered()
    if given == wanted:
        number = sum(len(times) for times in wanted)
        return right(text("Right: {number} cases, each as fast as the fastest of all schedules.", number=number))
    for slip, reason in _SLIPS.items():
        if given == [
            _table_of(lambda stages, room, slip=slip: _fastest(stages, room, slip), chain, len(times))
            for chain, times in zip(_CHAINS, wanted, strict=True)
        ]:
            return wrong(text("Not yet. {reason}", reason=text(reason)))
    return _first_difference(given, wanted)


def _table_of(fastest: Callable, chain: Chain, count: int) -> list:
    return [fastest(chain.stages, room) for room in range(1, count + 1)]


def _first_difference(given: list[list], wanted: list[list[float]]) -> Verdict:
    for chain, (times, least) in enumerate(zip(given, wanted, strict=True)):
        for room, (one, best) in enumerate(zip(times, least, strict=True), start=1):
            if one != best:
                values = {"length": len(_CHAINS[chain]), "room": room, "given": f"{one:g}", "best": f"{best:g}"}
                return wrong(text("Not yet: {length} stages with room {room} take {best}, not {given}.", **values))
    raise AssertionError("the tables do not differ")


# Schedules by hand ----------------------------------------------------------------------------------------------------


@exercise(hint="Four segments whose sizes get shorter: keep what enters each, then work from the last to the first.")
def check_drawn_schedule(actions: Any) -> Verdict:
    """A schedule for `Chain.uniform(6, saved_bytes=2)` with a peak of at most 7 and at most 11 forwards."""
    if isinstance(actions, list | tuple) and (... in actions or not actions):
        return not_answered()
    cost = _simulated(actions, Chain.uniform(6, saved_bytes=2))
    found = {"peak": cost.peak_bytes, "forwards": cost.forward_steps}
    if cost.peak_bytes <= 7 and cost.forward_steps <= 11:
        return right(text("Right: a peak of {peak} and {forwards} forwards.", **found))
    return wrong(text("Legal, but too much: a peak of {peak} and {forwards} forwards.", **found))


def pyramid() -> Chain:
    """Twelve stages as in a convolution pyramid: maps shrink while channels grow; the head is small."""
    sizes = [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 1]  # MB of each stage's output
    return Chain(tuple(Stage(4, 8, size * 10**6, 2 * size * 10**6) for size in sizes), 3 * 10**6)


@exercise(hint="Where are the bytes, and where is the time? Keep late stages whole, and forget early ones one by one.")
def check_beats_sqrt(schedule: Any) -> Verdict:
    """A schedule for `pyramid()` with a lower peak than `sqrt_segments`, in no more time."""
    chain = pyramid()
    rule, cost = simulate(sqrt_segments(chain), chain), _simulated(schedule, chain)
    found = {"peak": f"{cost.peak_bytes / 1e6:g}", "time": f"{cost.time:g}"}
    found |= {"rule_peak": f"{rule.peak_bytes / 1e6:g}", "rule_time": f"{rule.time:g}"}
    compared = text("{peak} MB in time {time}, the rule {rule_peak} MB in time {rule_time}", **found)
    if cost.peak_bytes >= rule.peak_bytes:
        return wrong(text("The peak is not lower: {compared}.", compared=compared))
    if cost.time > rule.time:
        return wrong(text("It takes longer: {compared}.", compared=compared))
    return right(text("Right: {compared}.", compared=compared))


def _simulated(actions: Any, chain: Chain) -> Cost:
    try:
        return simulate(Schedule(actions), chain)
    except IllegalSchedule as refused:
        raise Refused(text("The referee says: {problem}.", problem=f"`{refused}`")) from None
    except Exception as error:
        raise Refused(text("It cannot be simulated: {error}.", error=f"`{error!r}`")) from None
