"""Right and wrong answers to the exercises of lesson 03, with the expected messages."""

import itertools
import math
from functools import cache, partial

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.lessons.lesson_03.exercises import _KEPT, _OTHERS, _fastest, five_stages, say
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


def taper(depth, kept=2, room=3):
    """The fewest units of room that all layers fit into, found from below."""
    cuts = [0]
    while cuts[-1] < depth and (size := (room - len(cuts)) // kept) > 0:
        cuts.append(min(depth, cuts[-1] + size))
    return cuts if cuts[-1] == depth else taper(depth, kept, room + 1)


def equal_cuts(depth, kept=2):
    count = round((kept * depth) ** 0.5)
    return [depth * j // count for j in range(count + 1)]


OPTIONS = {"use_reentrant": False, "preserve_rng_state": False}


def plain_layers(layers, x):
    return layers(x)


def kept_linears(layers, x, **options):
    """Each GELU with the next Linear in a checkpoint, so that a layer keeps what its Linear returns."""
    first, *others, last = itertools.chain(*layers)
    x = first(x)
    for pair in zip(others[::2], others[1::2], strict=True):
        x = checkpoint(nn.Sequential(*pair), x, **(OPTIONS | options))
    return last(x)


def hidden_from_the_meter(layers, x):
    """Keeps every saved tensor as Python bytes, which no meter of tensors counts."""
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: (saved.detach().numpy().tobytes(), saved.shape),
        lambda kept: torch.frombuffer(bytearray(kept[0]), dtype=torch.float32).view(kept[1]),
    ):
        return layers(x)


def kept_inputs(layers, x):
    for layer in layers:
        x = checkpoint(layer, x, **OPTIONS)
    return x


def in_tapered(inside, kept=1):
    """A function that runs layers in tapered segments, with `inside` in each of them."""

    def run(layers, x):
        cuts = taper(len(layers), kept)
        for start, end in itertools.pairwise(cuts[:-1]):
            x = checkpoint(inside, layers[start:end], x, **OPTIONS)
        return inside(layers[cuts[-2] :], x)

    return run


@cache
def best_choice(stages, room, mistake=None):
    """The least time, and the best way: 0 keeps all of the first stage, e runs on to stage e.

    With a mistake that is in no table, as learners write it."""
    if not stages:
        return 0, 0
    solve, first, ways = partial(best_choice, mistake=mistake), stages[0], [(math.inf, 0)]
    if first.saved_bytes + first.output_bytes <= room:
        rest, _ = solve(stages[1:], room - first.saved_bytes)
        ways.append((first.forward_time + rest + first.backward_time, 0))
    ends = range(0 if mistake == "from itself" else 1, len(stages))
    for e in ends[len(stages) // 2 - 1 :][:1] if mistake == "halves" else ends:
        ahead = e if mistake == "unit times" else sum(stage.forward_time for stage in stages[:e])
        later, _ = solve(stages[e:], room - stages[e - 1].output_bytes)
        ways.append((ahead + later + solve(stages[:e], room)[0], e))
    return min(ways)


def least_time(stages, room, mistake=None):
    return best_choice(stages, room, mistake)[0]


def plan(first, stages, room, mistake=None):
    """A list that takes the least time; with a mistake, as learners write it."""
    if not stages:
        return []
    solve = partial(plan, mistake=mistake)
    _, e = best_choice(stages, room)
    if mistake == "never whole" and len(stages) > 1:
        e = e or 1
    if e == 0:
        rest = solve(first + 1, stages[1:], room - stages[0].saved_bytes)
        last = [] if mistake == "no backward" else [Backward(first)]
        return [Forward(first, "all"), *rest, *last]
    ahead = [Forward(first, "input"), *(Forward(first + i, "nothing") for i in range(1, e))]
    number = e if mistake == "from 0" else first + e
    later = solve(number, stages[e:], room - stages[e - 1].output_bytes)
    earlier = solve(first, stages[:e], room)
    return ahead + (earlier + later if mistake == "earlier first" else later + earlier)


#: check -> right answers
RIGHT = {
    "predicted_peak": [peak_with_a_loop],
    "best_count": [best_whole, lambda L, A, B: numpy.sqrt(numpy.float32(L * A / B))],
    "tapered": [taper, lambda *chain: torch.tensor(taper(*chain), dtype=torch.float32)],
    "recurrence": [least_time],
    "nested": [in_tapered(kept_linears)],
    "drawn_schedule": [list(segments(six, 4)), segments(six, 4)],
    "gives_up_early": [EARLY, Schedule(EARLY)],
    "plan": [plan, lambda *given: Schedule(plan(*given))],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "predicted_peak": [
        (lambda cuts: 3_100_000, "the peak is 8,200,000 bytes, but you return 3,100,000")
    ],
    "best_count": [
        (lambda L, A, B: 14.14, "you return 14.14, but the sum is smallest for k = 16"),
        (best_divisor, "you return 10, but the sum is smallest for k = 14.14"),
    ],
    "tapered": [
        (equal_cuts, "only the last one reaches the peak"),
        (
            lambda depth, kept=2: [depth - cut for cut in reversed(taper(depth, kept))],
            "the wrong way round",
        ),
        (lambda depth, kept=2: taper(depth), "they do not depend on `kept`"),
        (lambda depth, kept=2: taper(depth, 1), "with kept = 2, 2 layers with the cuts"),
        (lambda *chain: sizes_of(taper(*chain)), "sizes of the segments"),
        (lambda *chain: taper(*chain)[1:], "must begin with 0 and end with 2"),
        (lambda depth, kept=2: [0, depth / 3, depth], "whole number"),
        (lambda *chain: [*itertools.pairwise(taper(*chain))], "whole number"),
        (lambda *chain: set(taper(*chain)), "no order"),
        (lambda *chain: [0, *sizes_of(taper(*chain))], "sizes of the segments"),
        (lambda *chain: sorted([*taper(*chain), chain[0]]), "so the cuts must increase"),
        (lambda depth, kept=2: [0, depth - 1, depth], "layers with the cuts"),
        (lambda depth, kept=2: 22, "got a `int`"),
        (lambda depth, kept=2: [0, depth], "Not answered"),
        (
            lambda depth, kept=2: taper(depth, kept) if depth < 9 else None,
            "returns None for depth = 9, kept = 2",
        ),
        lambda depth: taper(depth),
        [0, 100],
    ],
    "recurrence": [
        *(
            (partial(_fastest, mistake=mistake), say(f"recurrence.{mistake}"))
            for mistake in (*_KEPT, *_OTHERS)
        ),
        (partial(least_time, mistake="halves"), "for 4 stages"),
        (partial(least_time, mistake="unit times"), "5 stages"),
        (partial(least_time, mistake="from itself"), "e must begin at 1"),
        (partial(_fastest, mistake="never runs on"), "Not answered"),
        (lambda stages, room: 12, "4 stages and room = 1"),
        (lambda stages, room: f"{least_time(stages, room)}", "got a `str`"),
    ],
    "nested": [
        (plain_layers, "Not answered"),
        (in_tapered(plain_layers, kept=2), "of section 3.4"),
        (in_tapered(plain_layers), "the peak is 30.00 B for 1.33 times the FLOPs"),
        (in_tapered(kept_inputs), "runs a third time"),
        (kept_linears, "more than 1 B per layer"),
        (in_tapered(partial(kept_linears, preserve_rng_state=True)), "`preserve_rng_state=False`"),
        (hidden_from_the_meter, "hardly any layer runs a second time"),
        (lambda layers, x: in_tapered(kept_linears)(layers[:-1], x), "the gradients differ"),
        (lambda layers, x: in_tapered(kept_linears)(layers, x).detach(), "has no graph"),
        (lambda layers, x: in_tapered(kept_linears)(layers, x).sum(), "must have the shape of `x`"),
        3,
    ],
    "drawn_schedule": [
        ([], "Not answered"),
        (store_all(six), "exceeds a limit"),
        ([Backward(5)], "nothing that it needs of stage 5 is kept"),
        ([Backward(4)], "`Backward(5)` must come next"),
        ([Forward(1, "all")], "`Forward(stage=1, keep='all')`, action 0 of the list"),
        (list(segments(six, 4))[:-1], "the list ends before `Backward(0)`"),
        ([*[*store_all(six)][:7], Forward(5, "all")], "the backward of its stage is done"),
        ([Forward(9, "all")], "its last one is stage `5`"),
        [3],
    ],
    "gives_up_early": [
        (optimal(five, 13), "Not answered"),
        (store_all(five), "above 13"),
        (LATE, "takes 90"),
        (EARLY[:6] + EARLY[7:], "x_2"),
        (EARLY[:-1], "the list ends before `Backward(0)`"),
        (3, "cannot be simulated"),
    ],
    "plan": [
        (lambda first, stages, room: [], "Not answered"),
        (lambda first, stages, room: list(segment_schedule([0, len(stages)])), "bytes besides"),
        (partial(plan, mistake="from 0"), "rejects"),
        (partial(plan, mistake="earlier first"), "`Backward(3)` must come next"),
        (partial(plan, mistake="never whole"), "least time"),
        (partial(plan, mistake="no backward"), "rejects"),
        (lambda first, stages, room: 12, "cannot be simulated"),
        3,
    ],
}

_SIZES = "in `sizes = [(room - inputs) // kept for inputs in range(1, room)]`"
_ROOMS = "in `for room in count(kept + 1):`"
_SEGMENT = "in `x = checkpoint(inside, layers[start:end], x, preserve_rng_state=False, **options)`"
_PAIRS = "in `for gelu, linear in zip(others[::2], others[1::2], strict=True):`"
#: check -> why mutants of its solution are right as well -> the mutants
EQUIVALENT = {
    "tapered": {
        "R counted from another start: the least one into which all layers fit gives the same cuts": [
            "kept + 1 → kept - 1",
            f"1 → 0 {_ROOMS}",
            f"1 → 2 {_ROOMS}",
            f"1 → 0 {_SIZES}",
            f"1 → 2 {_SIZES}",
        ]
    },
    "nested": {
        "the state of the random numbers is kept, too: a few kilobytes": [
            f"False → True {_SEGMENT}"
        ],
        "every GELU has a next Linear": [f"True → False {_PAIRS}"],
    },
}
