"""Answers to the exercises of lesson 03: right ones, and wrong ones with what they are told."""

import functools
import itertools
import math

import numpy
import torch

from course_lib.lessons import lesson_03
from course_lib.schedule import (
    Backward,
    Chain,
    Forward,
    Schedule,
    optimal,
    segments,
    store_all,
)
from course_lib.schedule.rules import segment_schedule

six = Chain.uniform(6, saved_bytes=2)


five = lesson_03.five_stages()
EARLY = [
    Forward(0, "input"),
    Forward(1, "input"),
    Forward(2, "nothing"),
    Forward(3, "nothing"),
    Forward(4, "all"),
]
EARLY += [
    Backward(4),
    Forward(1, "nothing"),
    Forward(2, "all"),
    Forward(3, "all"),
    Backward(3),
    Backward(2),
]
EARLY += [Forward(0, "all"), Forward(1, "all"), Backward(1), Backward(0)]

LATE = [
    *[*optimal(five, 13)][:12],
    Forward(0, "input"),
    Forward(1, "all"),
    Backward(1),
    Forward(0, "all"),
    Backward(0),
]


def sizes_of(cuts):
    return [end - start for start, end in itertools.pairwise(cuts)]


def max_layers(cuts):
    return max(sizes_of(cuts))


def segment_peak(cuts):
    return 100_000 + max(
        (j + 1 + 2 * (cuts[j + 1] - cuts[j])) * 100_000 for j in range(len(cuts) - 1)
    )


def peak_of(cuts, *chosen):
    """The peak of the chosen segments only."""
    sizes = sizes_of(cuts)
    return 100_000 * (1 + max(j % len(sizes) + 1 + 2 * sizes[j] for j in chosen))


def peak_of_the_largest(cuts):
    sizes = sizes_of(cuts)
    return peak_of(cuts, max(range(len(sizes)), key=lambda j: (sizes[j], j)))


def peak_with_a_loop(cuts):
    most = inputs = 0
    for start, end in itertools.pairwise(cuts):
        inputs += 100_000
        most = numpy.maximum(most, inputs + (end - start) * 200_000)
    return most + 100_000


def best_whole(L, A, B):
    return min(range(1, L + 1), key=lambda k: k * B + L / k * A)


def on_a_grid(L, A, B):
    return min((n / 100 for n in range(100, 100 * L)), key=lambda k: k * B + L / k * A)


def taper(depth, room=None):
    """The fewest units of room that all layers fit into, found from below."""
    room, cuts = room or 3, [0]
    while cuts[-1] < depth and (size := (room - len(cuts)) // 2) > 0:
        cuts.append(min(depth, cuts[-1] + size))
    return cuts if cuts[-1] == depth else taper(depth, room + 1)


@functools.cache
def searched(layers, inputs=0):
    """The least peak, and sizes that have it, by trying every size of each segment."""
    if layers == 0:
        return 0, ()
    ways = [(size, *searched(layers - size, inputs + 1)) for size in range(1, layers + 1)]
    return min((max(inputs + 1 + 2 * size, rest), (size, *sizes)) for size, rest, sizes in ways)


def by_search(depth):
    return list(itertools.accumulate(searched(depth)[1], initial=0))


def equal_cuts(depth):
    count = round((2 * depth) ** 0.5)
    return list(
        itertools.accumulate(
            (depth // count + (j < depth % count) for j in range(count)), initial=0
        )
    )


def turned(depth):
    return [depth - cut for cut in reversed(taper(depth))]


def with_other_room(depth):
    """Counts its own input apart: R is a B less, and the cuts are the same."""
    for room in itertools.count(2):
        sizes = [(room - j) // 2 for j in range(room)]
        if sum(sizes) >= depth:
            return sorted({min(depth, cut) for cut in itertools.accumulate(sizes, initial=0)})


def recurrence(stages, room, slip=None):
    """Over numbers of stages, not slices; with a slip, what somebody writes who makes it."""

    def least(i, n, m):  # of stages i to n - 1
        if i == n:
            return 0
        stage, ways = stages[i], [math.inf]
        taken = stage.saved_bytes + (slip != "no gradient") * stage.output_bytes
        if slip == "all fits" or taken < m or (taken == m and slip != "to the byte"):
            if slip != "one alone" or n == i + 1:
                left = (
                    m - taken
                    if slip == "gradient stays"
                    else m - (slip != "all is free") * stage.saved_bytes
                )
                rest = least(i + 1, n, left)
                ways.append(
                    (slip != "never forward") * stage.forward_time
                    + (slip != "never back") * stage.backward_time
                    + rest
                )
        if slip == "greedy" and min(ways) < math.inf:
            return min(ways)
        for e in (
            range(i + 1, i + 2 if slip == "a step" and n > i + 1 else n)
            if slip != "keeps only"
            else ()
        ):
            kept = stages[e - 1].output_bytes
            kept = {
                "of one": 1,
                "its own": stages[e].output_bytes,
                "all of it": stages[e - 1].saved_bytes,
            }.get(slip, kept)
            right = least(e, n, m - (slip != "input is free") * kept)
            left = 0 if slip == "left out" else least(i, e, m - (slip == "stays") * kept)
            passed = {
                "no time": (),
                "past e": stages[i : e + 1],
                "from the next": stages[i + 1 : e],
            }
            passed = {**passed, "to the next": stages[i : i + 1]}.get(slip, stages[i:e])
            ways.append(sum(stage.forward_time for stage in passed) + right + left)
            ways = ways[-1:] if slip == "the last way" else ways
        return min(ways)

    return least(0, len(stages), room)


def shortened(stages, room, slip):
    """The recurrence of somebody who takes a short cut: one place to run on to, or parts that are
    kept whole."""
    if not stages:
        return 0

    def kept_whole(part, room):
        most = max(
            sum(stage.saved_bytes for stage in part[: i + 1]) + part[i].output_bytes
            for i in range(len(part))
        )
        times = sum(stage.forward_time + stage.backward_time for stage in part)
        return times if most <= room else math.inf

    first, ways = stages[0], [math.inf]
    if first.saved_bytes + first.output_bytes <= room:
        rest = shortened(stages[1:], room - first.saved_bytes, slip)
        ways.append(first.forward_time + rest + first.backward_time)
    middle = [len(stages) // 2] if len(stages) > 1 else []
    for e in middle if slip == "halves" else range(1, len(stages)):
        ahead = e if slip == "a unit each" else sum(stage.forward_time for stage in stages[:e])
        later, earlier = (
            kept_whole if slip == side else functools.partial(shortened, slip=slip)
            for side in ("later kept", "earlier kept")
        )
        left = room - stages[e - 1].output_bytes
        ways.append(ahead + later(stages[e:], left) + earlier(stages[:e], room))
    return min(ways)


def without_end(stages, room, first=0, last=0):
    """Runs on from where it is, or to the end."""
    if not stages:
        return 0
    return min(
        (
            without_end(stages[e:], room - stages[e - 1].output_bytes, first, last)
            + without_end(stages[:e], room, first, last)
            for e in range(first, len(stages) + last)
        ),
        default=1,
    )


@functools.cache
def ways_of(stages, room):
    """The least time, and the best way: 0 keeps all of the first stage, e runs on to stage e."""
    if not stages:
        return 0, 0
    first, ways = stages[0], [(math.inf, 0)]
    if first.saved_bytes + first.output_bytes <= room:
        rest, _ = ways_of(stages[1:], room - first.saved_bytes)
        ways.append((first.forward_time + rest + first.backward_time, 0))
    for e in range(1, len(stages)):
        ahead = sum(stage.forward_time for stage in stages[:e])
        later, earlier = (
            ways_of(stages[e:], room - stages[e - 1].output_bytes),
            ways_of(stages[:e], room),
        )
        ways.append((ahead + later[0] + earlier[0], e))
    return min(ways)


def plan(first, stages, room, slip=None):
    """A list that takes the least time; with a slip, what somebody writes who makes it."""
    if not stages:
        return []
    again = functools.partial(plan, slip=slip)
    _, e = ways_of(stages, room)
    if slip == "never whole" and len(stages) > 1:
        e = e or 1
    if e == 0:
        rest = again(first + 1, stages[1:], room - stages[0].saved_bytes)
        return [Forward(first, "all"), *rest, *([] if slip == "no backward" else [Backward(first)])]
    keep = {"no inputs": "nothing"}.get(slip, "input")
    between = "input" if slip == "keeps each" else "nothing"
    ahead = [Forward(first, keep), *(Forward(first + i, between) for i in range(1, e))]
    later = again(
        e if slip == "from 0" else first + e, stages[e:], room - stages[e - 1].output_bytes
    )
    earlier = again(first, stages[:e], room)
    return ahead + (earlier + later if slip == "earlier first" else later + earlier)


RECURRENCE_SLIPS = {
    "never back": "left out the `backward_time`",
    "greedy": "compare both ways",
    "a step": "one stage only",
    "of one": "1 byte",
    "its own": "the output of the stage before it",
    "all of it": "took `saved_bytes`",
    "no gradient": "gradient that comes in",
    "all fits": "never compares bytes",
    "all is free": "the other stages all of `room`",
    "input is free": "the later stages all of `room`",
    "stays": "the earlier stages too little",
    "no time": "time of running on",
    **dict.fromkeys(("past e", "from the next", "to the next"), "exactly `stages[:e]`"),
    "to the byte": "You wrote `<`",
    "gradient stays": "subtracted the gradient",
    "never forward": "left out the `forward_time`",
    "the last way": "the last way that you tried",
    "left out": "These stages still have",
    "keeps only": "Not answered",
    "one alone": "last one left",
}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "predicted_peak": (
        [segment_peak, lambda cuts: float(segment_peak(cuts)), peak_with_a_loop],
        [
            (lambda cuts: segment_peak(cuts) / 100_000, "Return bytes"),
            (lambda cuts: segment_peak(cuts) - 100_000, "One B is missing"),
            (lambda cuts: segment_peak(cuts) / 1e6, "in MB. Give bytes"),
            (
                lambda cuts: (
                    100_000 * (1 + max(j + 1 + 3 * n for j, n in enumerate(sizes_of(cuts))))
                ),
                "added a B for each layer",
            ),
            (
                lambda cuts: (len(cuts) + 2 * max_layers(cuts)) * 100_000,
                "inputs of the later ones have been released",
            ),
            (lambda cuts: (len(cuts) + 2 * (cuts[-1] - cuts[-2])) * 100_000, "Any segment"),
            (
                lambda cuts: (len(cuts) + 2 * cuts[-1] / (len(cuts) - 1)) * 100_000,
                "mean number of layers",
            ),
            (
                lambda cuts: 3_100_000,
                "for the cuts [0, 40, 70, 90, 100] the peak is 8,200,000 bytes, but you return 3,100,000",
            ),
            (
                lambda cuts: 2 * len(cuts) * 100_000 + 2 * cuts[-1] * 100_000,
                "for the cuts [0, 40, 70, 90, 100] the peak is",
            ),
            (
                lambda cuts: (
                    100_000 * (sum(j + 1 + 2 * n for j, n in enumerate(sizes_of(cuts))) + 1)
                ),
                "added up the segments",
            ),
            (
                lambda cuts: (
                    100_000 * (1 + max(j + 1 + 2 * n for j, n in enumerate(sizes_of(cuts)[::-1])))
                ),
                "wrong order",
            ),
            (lambda cuts: segment_peak(cuts) + 8, "the 8 bytes"),
            (peak_of_the_largest, "the largest segment only"),
            (lambda cuts: peak_of(cuts, 0, -1), "the first segment and the last"),
            *((lambda cuts: [3_100_000], "got a `list`"), (lambda cuts: None, "Not answered"), 31),
        ],
    ),
    "best_count": (
        [
            lambda L, A, B: (L * A / B) ** 0.5,
            lambda L, A, B: round((L * A / B) ** 0.5),
            best_whole,
            on_a_grid,
            lambda L, A, B: min(L, math.sqrt(L * A / B)),
            lambda L, A, B: torch.tensor(L * A / B).sqrt(),
            lambda L, A, B: numpy.sqrt(numpy.float32(L * A / B)),
            lambda L, A, B: numpy.int64(best_whole(L, A, B)),
        ],
        [
            *((lambda L, A, B: L**0.5, "√L"), (lambda L, A, B: L * A / B, "square root")),
            (lambda L, A, B: round(L**0.5), "√L"),
            (lambda L, A, B: (L * A) ** 0.5, "left out B"),
            (lambda L, A, B: (A / B) ** 0.5, "left out L"),
            (lambda L, A, B: (L * A / (A + B)) ** 0.5, "added A and B"),
            (lambda L, A, B: (L * B / A) ** 0.5, "swapped A and B"),
            (
                lambda L, A, B: 14,
                "with L = 64, A = 4 and B = 1 you return 14, but the sum is smallest for k = 16",
            ),
            (
                lambda L, A, B: 14.14,
                "with L = 64, A = 4 and B = 1 you return 14.14, but the sum is smallest for k = 16",
            ),
            (lambda L, A, B: (2 * L) ** 0.5, "any A and B"),
            (
                lambda L, A, B: math.ceil((L * A / B) ** 0.5),
                "You rounded up",
            ),
            (lambda L, A, B: int((L * A / B) ** 0.5), "You rounded down"),
            (lambda L, A, B: (L * A // B) ** 0.5, "with L = 25, A = 3 and B = 2 you return"),
            (lambda L, A, B: L // round((L * B / A) ** 0.5), "layers of a segment first"),
            (
                lambda L, A, B: min(
                    (k for k in range(1, L + 1) if L % k == 0), key=lambda k: k * B + L / k * A
                ),
                "you return 10, but the sum is smallest for k = 14.14",
            ),
            (
                lambda L, A, B: min(range(1, L + 1), key=lambda k: k * B + -(-L // k) * A),
                "whole layers",
            ),
            (lambda L, A, B: 2 * (L * A * B) ** 0.5 + B, "the peak for the best k"),
            *((lambda L, A, B: "14", "got a `str`"), (lambda L, A, B: [14], "got a `list`")),
            *(
                (lambda L, A, B: 2 * (L * A * B) ** 0.5, "the peak for the best k"),
                (lambda L, A, B: None, "Not answered"),
            ),
            (14, "Expected a function, got a `int`"),
        ],
    ),
    "tapered": (
        [
            taper,
            by_search,
            with_other_room,
            lambda depth: tuple(taper(depth)),
            lambda depth: numpy.array(taper(depth)),
            lambda depth: torch.tensor(taper(depth)),
            lambda depth: [float(cut) for cut in taper(depth)],
        ],
        [
            (equal_cuts, "only the last one reaches the peak"),
            (lambda depth: list(range(depth + 1)), "Your segments are equal"),
            (turned, "the wrong way round"),
            (lambda depth: sizes_of(taper(depth)), "sizes of the segments"),
            (lambda depth: taper(depth)[1:], "must begin with 0 and end with 2"),
            (lambda depth: taper(depth)[:-1], "must begin with 0"),
            (lambda depth: [0, depth / 3, depth], "whole number"),
            (lambda depth: [*itertools.pairwise(taper(depth))], "whole number"),
            (lambda depth: [0, math.inf, depth], "whole number"),
            (lambda depth: set(taper(depth)), "no order"),
            (lambda depth: [0, *sizes_of(taper(depth))], "sizes of the segments"),
            (lambda depth: sorted([*taper(depth), depth]), "so the cuts must increase"),
            (lambda depth: [0, depth - 1, depth], "layers with the cuts"),
            (lambda depth: 22, "got a `int`"),
            *(
                (lambda depth: [0, depth], "Not answered"),
                (lambda depth: None, "Not answered"),
                [0, 100],
            ),
        ],
    ),
    "recurrence": (
        [
            recurrence,
            lambda stages, room: float(recurrence(stages, room)),
            functools.partial(shortened, slip=None),
        ],
        [
            *(
                (functools.partial(recurrence, slip=slip), reason)
                for slip, reason in RECURRENCE_SLIPS.items()
            ),
            *(
                (functools.partial(shortened, slip=slip), "for 4 stages" if e else "5 stages")
                for slip, e in {
                    "halves": 1,
                    "later kept": 1,
                    "earlier kept": 1,
                    "a unit each": 0,
                }.items()
            ),
            (lambda stages, room: None, "Not answered"),
            (
                lambda stages, room: sum(s.forward_time + s.backward_time for s in stages),
                "never compares bytes",
            ),
            (functools.partial(without_end), "e must begin at 1"),
            (functools.partial(without_end, first=1, last=1), "e must begin at 1"),
            (lambda stages, room: 12, "4 stages and room = 1"),
            (lambda stages, room: f"{recurrence(stages, room)}", "got a `str`"),
            (lambda stages, room: [recurrence(stages, room)], "got a `list`"),
            (
                lambda stages, room: recurrence(stages, room) + (len(stages) == 5),
                "5 stages and room = 8",
            ),
        ],
    ),
    "drawn_schedule": (
        [list(segments(six, 4)), tuple(segments(six, 4)), segments(six, 4)],
        [
            *(([], "Not answered"), ([Forward(0, "input"), ...], "Not answered")),
            *(
                (schedule, "exceeds a limit")
                for schedule in (store_all(six), segments(six, 3), segments(six, 5))
            ),
            ([Backward(5)], "nothing that it needs of stage 5 is kept"),
            ([Backward(4)], "`Backward(5)` must come next"),
            (
                [Forward(1, "all")],
                "refuses `Forward(stage=1, keep='all')`, action 0 of the list, counted from 0: its input x_1 is not in memory",
            ),
            (
                [Forward(0, "nothing"), Forward(1, "all"), Forward(0, "all")],
                "its input x_0 is not in memory",
            ),
            (list(segments(six, 4))[:-1], "the list ends before `Backward(0)`"),
            ([*[*store_all(six)][:7], Forward(5, "all")], "the backward of its stage is done"),
            *(([Forward(9, "all")], "last stage of this chain is stage `5`"), [3]),
        ],
    ),
    "gives_up_early": (
        [EARLY, tuple(EARLY), Schedule(EARLY)],
        [
            (optimal(five, 13), "Not answered"),
            (store_all(five), "above 13"),
            (LATE, "takes 90"),
            (EARLY[:6] + EARLY[7:], "x_2"),
            *(
                (EARLY[:-1], "the list ends before `Backward(0)`"),
                ([], "Not answered"),
                (3, "cannot be simulated"),
            ),
        ],
    ),
    "plan": (
        [plan, lambda *given: tuple(plan(*given)), lambda *given: Schedule(plan(*given))],
        [
            (lambda first, stages, room: [], "Not answered"),
            (lambda first, stages, room: None, "Not answered"),
            (lambda first, stages, room: ..., "Not answered"),
            (lambda first, stages, room: list(segment_schedule([0, len(stages)])), "bytes besides"),
            (functools.partial(plan, slip="from 0"), "refuses"),
            (functools.partial(plan, slip="no inputs"), "refuses"),
            (functools.partial(plan, slip="earlier first"), "`Backward(3)` must come next"),
            (functools.partial(plan, slip="keeps each"), "bytes besides"),
            (functools.partial(plan, slip="never whole"), "least time"),
            (functools.partial(plan, slip="no backward"), "refuses"),
            (lambda first, stages, room: 12, "cannot be simulated"),
            (lambda first, stages, room: recurrence(stages, room), "cannot be simulated"),
            3,
        ],
    ),
}

#: check -> mutants of its solution that are right as well, and why.
_ROOM = "R counted from another start: the least one into which all layers fit gives the same cuts"
_SIZES = "in `sizes = [(room - inputs * B) // A for inputs in range(1, room // B)]`"
EQUIVALENT = {
    "tapered": {"A + B → A - B": _ROOM, f"1 → 0 {_SIZES}": _ROOM, f"1 → 2 {_SIZES}": _ROOM}
}
