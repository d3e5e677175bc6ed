"""Answers to the exercises of lesson 03: right ones, and wrong ones with what they are told."""

import itertools
import math
from functools import cache, partial

import numpy
import torch

from course_lib.lessons.lesson_03.exercises import five_stages
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


five = five_stages()


def actions_of(words):
    """Return actions from words such as "0i" for Forward(0, "input"), and "B0" for Backward(0)."""
    keeps = {"i": "input", "n": "nothing", "a": "all"}
    return [
        Backward(int(word[1])) if word[0] == "B" else Forward(int(word[0]), keeps[word[1]])
        for word in words.split()
    ]


EARLY = actions_of("0i 1i 2n 3n 4a B4 1n 2a 3a B3 B2 0a 1a B1 B0")
LATE = [*optimal(five, 13)][:12] + actions_of("0i 1a B1 0a B0")


def sizes_of(cuts):
    return [end - start for start, end in itertools.pairwise(cuts)]


def segment_peak(cuts):
    sizes = sizes_of(cuts)
    return 100_000 * (1 + max(j + 1 + 2 * size for j, size in enumerate(sizes)))


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


@cache
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
    return [depth * j // count for j in range(count + 1)]


def turned(depth):
    return [depth - cut for cut in reversed(taper(depth))]


def recurrence(stages, room, slip=None):
    """Over numbers of stages, not slices; with a slip, what somebody writes who makes it."""

    def least(i, n, m):  # of stages i to n - 1
        if i >= n:
            return 0
        stage, ways = stages[i], [math.inf]
        taken = stage.saved_bytes + (slip != "no gradient") * stage.output_bytes
        if taken <= m or slip == "all fits":
            rest = least(i + 1, n, m - stage.saved_bytes)
            ways.append(stage.forward_time + rest + stage.backward_time)
        ends = {
            "keeps only": (),
            "halves": [i + (n - i) // 2] if n > i + 1 else (),
            "from itself": range(i, n),
        }
        for e in ends.get(slip, range(i + 1, n)):
            output = stages[e - 1].output_bytes
            kept = {
                "of one": 1,
                "its own": stages[e].output_bytes,
                "of the first": stages[i].output_bytes,
                "of all": sum(each.output_bytes for each in stages[i:e]),
                "all of it": stages[e - 1].saved_bytes,
                "input is free": 0,
                "other way round": 0,
            }.get(slip, output)
            passed = {
                "no time": (),
                "past e": stages[i : e + 1],
                "from the next": stages[i + 1 : e],
                "to the next": stages[i : i + 1],
                "of e": stages[e : e + 1],
                "twice": stages[i:e] * 2,
            }.get(slip, stages[i:e])
            ahead = e - i if slip == "a unit each" else sum(each.forward_time for each in passed)
            if slip == "and back":
                ahead += sum(each.backward_time for each in passed)
            later = kept_whole if slip == "later kept" else least
            earlier = kept_whole if slip == "earlier kept" else least
            right = later(e + (slip == "without e"), n, m - kept)
            left = earlier(i, e, m - (slip in ("stays", "other way round")) * output)
            both = max(right, left) if slip == "at once" else right + left
            ways.append(ahead + (right if slip == "left out" else both))
        return min(ways)

    def kept_whole(i, n, m):
        saved = itertools.accumulate(stage.saved_bytes for stage in stages[i:n])
        needed = [bytes_ + stages[j].output_bytes for j, bytes_ in enumerate(saved, i)]
        times = sum(stage.forward_time + stage.backward_time for stage in stages[i:n])
        return times if max(needed) <= m else math.inf

    return least(0, len(stages), room)


@cache
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
    again = partial(plan, slip=slip)
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
    "of one": "1 byte",
    "its own": "the output of the stage before it",
    "of the first": "the output of `stages[0]`",
    "of all": "Only one is kept",
    "all of it": "took `saved_bytes`",
    "input is free": "the later stages all of `room`",
    "other way round": "exchanged the bytes",
    "stays": "the earlier stages too little",
    "no time": "time of running on",
    **dict.fromkeys(("past e", "from the next", "to the next", "of e"), "exactly `stages[:e]`"),
    "twice": "has their second run",
    "and back": "runs forwards only",
    "left out": "These stages still have",
    "without e": "left out stage `e` itself",
    "at once": "so add them",
    "keeps only": "Not answered",
    **dict.fromkeys(
        ("halves", "later kept", "earlier kept", "all fits", "no gradient"),
        "for 4 stages",
    ),
    "a unit each": "5 stages",
    "from itself": "e must begin at 1",
}


def with_room_of_forwards(stages, room):
    """Right too: also asks whether each forward that is passed has room, as the library does."""

    @cache
    def least(i, n, m):
        if i == n:
            return 0
        stage, waits = stages[i], stages[n - 1].output_bytes * (n < len(stages))
        ways = [math.inf]
        if stage.saved_bytes + max(stage.output_bytes, waits) <= m:
            rest = least(i + 1, n, m - stage.saved_bytes)
            ways.append(stage.forward_time + rest + stage.backward_time)
        for e in range(i + 1, n):
            outputs = [0, *(each.output_bytes for each in stages[i:e])]
            if max(map(sum, itertools.pairwise(outputs))) + waits <= m:
                ahead = sum(each.forward_time for each in stages[i:e])
                ways.append(ahead + least(e, n, m - outputs[-1]) + least(i, e, m))
        return min(ways)

    return least(0, len(stages), room)


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "predicted_peak": (
        [segment_peak, lambda cuts: float(segment_peak(cuts)), peak_with_a_loop],
        [
            (lambda cuts: segment_peak(cuts) / 1e6, "in MB. Give bytes"),
            (
                lambda cuts: 3_100_000,
                "for the cuts [0, 40, 70, 90, 100] the peak is 8,200,000 bytes, but you return 3,100,000",
            ),
            (lambda cuts: [3_100_000], "got a `list`"),
            (lambda cuts: None, "Not answered"),
            31,
        ],
    ),
    "best_count": (
        [
            lambda L, A, B: round((L * A / B) ** 0.5),
            best_whole,
            on_a_grid,
            lambda L, A, B: min(L, math.sqrt(L * A / B)),
            lambda L, A, B: numpy.sqrt(numpy.float32(L * A / B)),
            lambda L, A, B: numpy.int64(best_whole(L, A, B)),
        ],
        [
            (
                lambda L, A, B: 14.14,
                "with L = 64, A = 4 and B = 1 you return 14.14, but the sum is smallest for k = 16",
            ),
            (lambda L, A, B: (L * A // B) ** 0.5, "with L = 25, A = 3 and B = 2 you return"),
            (
                lambda L, A, B: min(
                    (k for k in range(1, L + 1) if L % k == 0), key=lambda k: k * B + L / k * A
                ),
                "you return 10, but the sum is smallest for k = 14.14",
            ),
            (lambda L, A, B: "14", "got a `str`"),
            (lambda L, A, B: None, "Not answered"),
            (14, "Expected a function, got a `int`"),
        ],
    ),
    "tapered": (
        [
            taper,
            by_search,
            lambda depth: tuple(taper(depth)),
            lambda depth: numpy.array(taper(depth)),
            lambda depth: torch.tensor(taper(depth)),
            lambda depth: [float(cut) for cut in taper(depth)],
        ],
        [
            (equal_cuts, "only the last one reaches the peak"),
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
            (lambda depth: [0, depth], "Not answered"),
            (lambda depth: taper(depth) if depth < 9 else None, "returns None for depth = 9"),
            (lambda depth: None, "Not answered"),
            [0, 100],
        ],
    ),
    "recurrence": (
        [
            recurrence,
            lambda stages, room: float(recurrence(stages, room)),
            lambda stages, room: ways_of(stages, room)[0],
            with_room_of_forwards,
        ],
        [
            *(
                (partial(recurrence, slip=slip), reason)
                for slip, reason in RECURRENCE_SLIPS.items()
            ),
            (lambda stages, room: None, "Not answered"),
            (
                lambda stages, room: sum(s.forward_time + s.backward_time for s in stages),
                "4 stages and room = 1",
            ),
            (lambda stages, room: 12, "4 stages and room = 1"),
            (lambda stages, room: f"{recurrence(stages, room)}", "got a `str`"),
            (
                lambda stages, room: recurrence(stages, room) + (len(stages) == 5),
                "5 stages and room = 8",
            ),
        ],
    ),
    "drawn_schedule": (
        [list(segments(six, 4)), tuple(segments(six, 4)), segments(six, 4)],
        [
            ([], "Not answered"),
            ([Forward(0, "input"), ...], "Not answered"),
            (store_all(six), "exceeds a limit"),
            (segments(six, 3), "exceeds a limit"),
            (optimal(six, 6), "its peak is 6, and it has 14 forwards"),
            ([Backward(5)], "nothing that it needs of stage 5 is kept"),
            ([Backward(4)], "`Backward(5)` must come next"),
            (
                [Forward(1, "all")],
                "refuses `Forward(stage=1, keep='all')`, action 0 of the list, counted from 0: its input x_1 is not in memory",
            ),
            (list(segments(six, 4))[:-1], "the list ends before `Backward(0)`"),
            ([*[*store_all(six)][:7], Forward(5, "all")], "the backward of its stage is done"),
            ([Forward(9, "all")], "last stage of this chain is stage `5`"),
            [3],
        ],
    ),
    "gives_up_early": (
        [EARLY, tuple(EARLY), Schedule(EARLY)],
        [
            (optimal(five, 13), "Not answered"),
            (store_all(five), "above 13"),
            (LATE, "takes 90"),
            (EARLY[:6] + EARLY[7:], "x_2"),
            (EARLY[:-1], "the list ends before `Backward(0)`"),
            ([], "Not answered"),
            (3, "cannot be simulated"),
        ],
    ),
    "plan": (
        [plan, lambda *given: tuple(plan(*given)), lambda *given: Schedule(plan(*given))],
        [
            (lambda first, stages, room: [], "Not answered"),
            (lambda first, stages, room: None, "Not answered"),
            (lambda first, stages, room: ..., "Not answered"),
            (lambda first, stages, room: list(segment_schedule([0, len(stages)])), "bytes besides"),
            (partial(plan, slip="from 0"), "refuses"),
            (partial(plan, slip="no inputs"), "refuses"),
            (partial(plan, slip="earlier first"), "`Backward(3)` must come next"),
            (partial(plan, slip="keeps each"), "bytes besides"),
            (partial(plan, slip="never whole"), "least time"),
            (partial(plan, slip="no backward"), "refuses"),
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
