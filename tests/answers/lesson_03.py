"""Answers to the exercises of lesson 03: right ones, and wrong ones with what they are told."""

import functools
import itertools
import math

from course_lib.lessons import lesson_03
from course_lib.schedule import Backward, Chain, Forward, optimal, segments, sqrt_segments, store_all

six = Chain.uniform(6, saved_bytes=2)


pyramid = lesson_03.pyramid()


def max_layers(cuts):
    return max(end - start for start, end in itertools.pairwise(cuts))


def segment_peak(cuts):
    return 100_000 + max((j + 1 + 2 * (cuts[j + 1] - cuts[j])) * 100_000 for j in range(len(cuts) - 1))


def recurrence(stages, room, slip=None):
    """Over numbers of stages, not slices; with a slip, what somebody writes who makes it."""

    def least(i, n, m):  # of stages i to n - 1
        if i == n:
            return 0
        stage, ways = stages[i], [math.inf]
        if slip == "all fits" or stage.saved_bytes + (slip != "no gradient") * stage.output_bytes <= m:
            if slip != "one alone" or n == i + 1:
                rest = least(i + 1, n, m - (slip != "all is free") * stage.saved_bytes)
                ways.append(stage.forward_time + stage.backward_time + rest)
        for e in range(i + 1, n) if slip != "keeps only" else ():
            kept = stages[e - 1].output_bytes
            right = least(e, n, m - (slip != "input is free") * kept)
            left = 0 if slip == "left out" else least(i, e, m - (slip == "stays") * kept)
            ahead = 0 if slip == "no time" else sum(stage.forward_time for stage in stages[i:e])
            ways.append(ahead + right + left)
        return min(ways)

    return least(0, len(stages), room)


RECURRENCE_SLIPS = {
    "no gradient": "gradient that comes in",
    "all fits": "never runs out of room",
    "all is free": "`saved_bytes` less",
    "input is free": "takes room",
    "stays": "is gone",
    "no time": "takes the forward times",
    "left out": "still to be done",
    "keeps only": "only ever keeps everything",
    "one alone": "last one left",
}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "predicted_peak": (
        [segment_peak, lambda cuts: float(segment_peak(cuts))],
        [
            (lambda cuts: segment_peak(cuts) / 100_000, "Give bytes"),
            (lambda cuts: segment_peak(cuts) - 100_000, "One B is missing"),
            (lambda cuts: (len(cuts) + 2 * max_layers(cuts)) * 100_000, "the later ones are gone"),
            (lambda cuts: (len(cuts) + 2 * (cuts[-1] - cuts[-2])) * 100_000, "Any segment"),
            (lambda cuts: (len(cuts) + 2 * cuts[-1] / (len(cuts) - 1)) * 100_000, "Segments differ"),
            (lambda cuts: 3_100_000, "for the cuts [0, 40, 70, 90, 100] it is 8,200,000, not 3,100,000"),
            *((lambda cuts: [3_100_000], "is a `list`"), (lambda cuts: None, "Not answered"), 31),
        ],
    ),
    "best_count": (
        [lambda L, A, B: (L * A / B) ** 0.5, lambda L, A, B: round((L * A / B) ** 0.5)],
        [
            *((lambda L, A, B: L**0.5, "√L"), (lambda L, A, B: L * A / B, "square root")),
            *((lambda L, A, B: (L * B / A) ** 0.5, "wrong way round"), (lambda L, A, B: 14, "it gives 14")),
            *((lambda L, A, B: 2 * (L * A * B) ** 0.5, "the peak there"), (lambda L, A, B: None, "Not answered"), 14),
        ],
    ),
    "recurrence": (
        [recurrence, lambda stages, room: float(recurrence(stages, room))],
        [
            *((functools.partial(recurrence, slip=slip), reason) for slip, reason in RECURRENCE_SLIPS.items()),
            (lambda stages, room: None, "Not answered"),
            (lambda stages, room: sum(s.forward_time + s.backward_time for s in stages), "never runs out"),
            (lambda stages, room: 12, "4 stages with room 1"),
            (lambda stages, room: recurrence(stages, room) + (len(stages) == 5), "5 stages with room 8"),
        ],
    ),
    "drawn_schedule": (
        [list(segments(six, 4))],
        [
            *(([], "Not answered"), ([Forward(0, "input"), ...], "Not answered")),
            *((schedule, "too much") for schedule in (store_all(six), segments(six, 3), segments(six, 5))),
            *(([Backward(5)], "referee"), ([Forward(1, "all")], "x_1"), [3]),
        ],
    ),
    "beats_sqrt": (
        [optimal(pyramid, 150_000_000)],
        [
            *((sqrt_segments(pyramid), "not lower"), (optimal(pyramid, 131_000_000), "longer")),
            *(store_all(pyramid), (store_all(six), "referee"), (3, "cannot be simulated")),
        ],
    ),
}

_ALIKE = "all boundaries of the check's chains have one byte: to be told apart"
#: check -> mutants of its solution that are right as well, and why.
EQUIVALENT = {
    "recurrence": {
        "1 → 2 in `later = fastest(stages[e:], room - stages[e - 1].output_bytes)`": _ALIKE,
        "1 → 0 in `later = fastest(stages[e:], room - stages[e - 1].output_bytes)`": _ALIKE,
    },
}
