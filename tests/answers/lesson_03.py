"""Answers to the exercises of lesson 03: right ones, and wrong ones with what they are told."""

import itertools
import math
from functools import cache, partial

import numpy
import torch

from course_lib.lessons.lesson_03.exercises import (
    _KEPT,
    _OTHERS,
    _PASSED,
    _fastest,
    five_stages,
    say,
)
from course_lib.schedule import Backward, Chain, Forward, Schedule, optimal, segments, store_all
from course_lib.schedule.rules import segment_schedule

six, five = Chain.uniform(6, saved_bytes=2), five_stages()


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


def peak_with_a_loop(cuts):
    most = inputs = 0
    for start, end in itertools.pairwise(cuts):
        inputs += 100_000
        most = numpy.maximum(most, inputs + (end - start) * 200_000)
    return most + 100_000


def best_of(counts):
    """The best of these numbers of segments, a function of the number of layers."""
    return lambda L, A, B: min(counts(L), key=lambda k: k * B + L / k * A)


best_whole = best_of(lambda L: range(1, L + 1))
best_divisor = best_of(lambda L: (k for k in range(1, L + 1) if L % k == 0))
best_hundredth = best_of(lambda L: (n / 100 for n in range(100, 100 * L)))


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


def equal_cuts(depth):
    count = round((2 * depth) ** 0.5)
    return [depth * j // count for j in range(count + 1)]


def recurrence(stages, room, slip=None):
    """The least time; with a slip that is in no table, what somebody writes who makes it."""
    if not stages:
        return 0
    again, first, ways = partial(recurrence, slip=slip), stages[0], [math.inf]
    taken = first.saved_bytes + (slip != "no gradient") * first.output_bytes
    if taken <= room or slip == "all fits":
        rest = again(stages[1:], room - first.saved_bytes)
        ways.append(first.forward_time + rest + first.backward_time)
    ends = range(0 if slip == "from itself" else 1, len(stages))
    for e in ends[len(stages) // 2 - 1 :][:1] if slip == "halves" else ends:
        ahead = e if slip == "a unit each" else sum(stage.forward_time for stage in stages[:e])
        later = kept_whole if slip == "later kept" else again
        earlier = kept_whole if slip == "earlier kept" else again
        behind = later(stages[e:], room - stages[e - 1].output_bytes)
        ways.append(ahead + behind + earlier(stages[:e], room))
    return min(ways)


def kept_whole(stages, room):
    """The time without a second forward, if there is room for it."""
    saved = itertools.accumulate(stage.saved_bytes for stage in stages)
    needed = [kept + stage.output_bytes for kept, stage in zip(saved, stages, strict=True)]
    times = sum(stage.forward_time + stage.backward_time for stage in stages)
    return times if max(needed) <= room else math.inf


def told(mistake):
    """What the table of mistakes says of one."""
    name = f"recurrence.{mistake}"
    return say(name if name in say else "recurrence.other_stages")


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
        later, _ = ways_of(stages[e:], room - stages[e - 1].output_bytes)
        ways.append((ahead + later + ways_of(stages[:e], room)[0], e))
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
    number = e if slip == "from 0" else first + e
    later = again(number, stages[e:], room - stages[e - 1].output_bytes)
    earlier = again(first, stages[:e], room)
    return ahead + (earlier + later if slip == "earlier first" else later + earlier)


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


#: check -> right answers
RIGHT = {
    "predicted_peak": [peak_with_a_loop],
    "best_count": [
        *(best_whole, best_hundredth),
        lambda L, A, B: round((L * A / B) ** 0.5),
        lambda L, A, B: min(L, math.sqrt(L * A / B)),
        lambda L, A, B: numpy.sqrt(numpy.float32(L * A / B)),
        lambda L, A, B: numpy.int64(best_whole(L, A, B)),
    ],
    "tapered": [
        taper,
        lambda depth: [*itertools.accumulate(searched(depth)[1], initial=0)],
        lambda depth: tuple(taper(depth)),
        lambda depth: numpy.array(taper(depth)),
        lambda depth: torch.tensor(taper(depth)),
        lambda depth: [float(cut) for cut in taper(depth)],
    ],
    "recurrence": [
        recurrence,
        lambda stages, room: float(recurrence(stages, room)),
        lambda stages, room: ways_of(stages, room)[0],
        with_room_of_forwards,
    ],
    "drawn_schedule": [list(segments(six, 4)), tuple(segments(six, 4)), segments(six, 4)],
    "gives_up_early": [EARLY, tuple(EARLY), Schedule(EARLY)],
    "plan": [plan, lambda *given: tuple(plan(*given)), lambda *given: Schedule(plan(*given))],
}

#: check -> wrong answers, each alone or with a part of what it is told
WRONG = {
    "predicted_peak": [
        (lambda cuts: 3_100_000, "the peak is 8,200,000 bytes, but you return 3,100,000")
    ],
    "best_count": [
        (lambda L, A, B: 14.14, "you return 14.14, but the sum is smallest for k = 16"),
        (lambda L, A, B: (L * A // B) ** 0.5, "with L = 25, A = 3 and B = 2 you return"),
        (best_divisor, "you return 10, but the sum is smallest for k = 14.14"),
    ],
    "tapered": [
        (equal_cuts, "only the last one reaches the peak"),
        (lambda depth: [depth - cut for cut in reversed(taper(depth))], "the wrong way round"),
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
    "recurrence": [
        *(
            (partial(_fastest, mistake=mistake), told(mistake))
            for mistake in (*_KEPT, *_PASSED, *_OTHERS)
        ),
        *(
            (partial(recurrence, slip=slip), "for 4 stages")
            for slip in ("halves", "later kept", "earlier kept", "all fits", "no gradient")
        ),
        (partial(recurrence, slip="a unit each"), "5 stages"),
        (partial(recurrence, slip="from itself"), "e must begin at 1"),
        (partial(_fastest, mistake="never runs on"), "Not answered"),
        (lambda stages, room: None, "Not answered"),
        (lambda stages, room: 12, "4 stages and room = 1"),
        (lambda stages, room: f"{recurrence(stages, room)}", "got a `str`"),
        (lambda stages, room: recurrence(stages, room) + (len(stages) == 5), "5 stages and room"),
    ],
    "drawn_schedule": [
        ([], "Not answered"),
        ([Forward(0, "input"), ...], "Not answered"),
        (store_all(six), "exceeds a limit"),
        (segments(six, 3), "exceeds a limit"),
        (optimal(six, 6), "its peak is 6, and it has 14 forwards"),
        ([Backward(5)], "nothing that it needs of stage 5 is kept"),
        ([Backward(4)], "`Backward(5)` must come next"),
        ([Forward(1, "all")], "`Forward(stage=1, keep='all')`, action 0 of the list"),
        (list(segments(six, 4))[:-1], "the list ends before `Backward(0)`"),
        ([*[*store_all(six)][:7], Forward(5, "all")], "the backward of its stage is done"),
        ([Forward(9, "all")], "last stage of this chain is stage `5`"),
        [3],
    ],
    "gives_up_early": [
        (optimal(five, 13), "Not answered"),
        (store_all(five), "above 13"),
        (LATE, "takes 90"),
        (EARLY[:6] + EARLY[7:], "x_2"),
        (EARLY[:-1], "the list ends before `Backward(0)`"),
        ([], "Not answered"),
        (3, "cannot be simulated"),
    ],
    "plan": [
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
}

_SIZES = "in `sizes = [(room - inputs * B) // A for inputs in range(1, room // B)]`"
#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "tapered": {
        "R counted from another start: the least one into which all layers fit gives the same cuts": [
            "A + B → A - B",
            f"1 → 0 {_SIZES}",
            f"1 → 2 {_SIZES}",
        ]
    }
}
