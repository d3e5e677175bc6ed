"""The exercises of lesson 03: peaks of segments, the recurrence, and hand-written schedules."""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.memory import MemoryMeter
from course_lib.models import deep_mlp
from course_lib.schedule import (
    Backward,
    Chain,
    Cost,
    Forward,
    IllegalSchedule,
    Schedule,
    Stage,
    optimal,
    simulate,
)
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import (
    Messages,
    WrongAnswer,
    cases,
    draw_case,
    exercise,
    not_answered,
    numbers,
    returns_none,
    seed_of,
    throughout,
)
from course_lib.teaching.exercises.probes import is_close

say = Messages(__file__)

B, A = 100_000, 200_000  # bytes of a boundary, and bytes that a layer saves, in sections 3.2 to 3.4

# The peak of segments


def _sizes(cuts: Sequence[int]) -> list[int]:
    """Return the number of layers of each segment between cuts."""
    return [end - start for start, end in pairwise(cuts)]


def _sums(cuts: Sequence[int], layer_bytes: int = A) -> list[int]:
    """Return the bytes of each segment's layers and of the inputs kept while it runs backward."""
    return [(j + 1) * B + size * layer_bytes for j, size in enumerate(_sizes(cuts))]


def _peak(cuts: Sequence[int], layer_bytes: int = A) -> int:
    """Return the peak of segments in bytes: the largest number of `_sums`, plus one gradient."""
    return max(_sums(cuts, layer_bytes)) + B


def _sums_of_largest(cuts: Sequence[int]) -> list[int]:
    """Return the `_sums` of all segments with the most layers; the last sum is the greatest."""
    sizes = _sizes(cuts)
    return [total for total, size in zip(_sums(cuts), sizes, strict=True) if size == max(sizes)]


def _largest_or_last(cuts: Sequence[int]) -> tuple[int, int]:
    """Return two peaks that only consider the last and the largest segment.

    If several segments are the largest, the first result uses the last one of these segments, and
    the second result uses the first one.
    """
    largest, last = _sums_of_largest(cuts), _sums(cuts)[-1]
    return max(largest[-1], last) + B, max(largest[0], last) + B


#: Key of the message on a mistake -> peak with the mistake, which for some cuts is the right peak.
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
# In the first list, the peak is in the last segment, although the first segment is the largest. In
# the second list, the peak is in a segment in the middle.
_CUTS += [[0, 4, 7, 10, 13], [0, 3, 8, 10]]
# In these lists, the segment with the peak is not the largest, the first or the last one.
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
    """Check the learner's formula for the peak of equal layers that run in checkpointed segments.

    Segments are numbered from 0. While segment j runs backward, the live tensors are the inputs of
    segments 0 to j, the saved tensors of all layers in segment j, and one gradient. The decorated
    function computes the right answer in bytes, and the decorator `numbers` turns it into a check.

    Args:
        cuts: Boundaries of the segments as layer indices, such as [0, 40, 70, 100] for 100 layers.
    """
    return _peak(cuts)


# (L, A, B), each with a best number of segments below L. For (70, 5, 1) the best number is 18.7, so
# rounding down is wrong. For (25, 3, 2), L·A/B is not a whole number.
_TRIPLES = ((100, 2, 1), (64, 4, 1), (50, 200, 100), (60, 3, 5), (30, 7, 2), (70, 5, 1), (25, 3, 2))


def _draw_triple(rng: random.Random) -> tuple[int, int, int]:
    """Return random L, A and B with a single best whole number of segments."""
    while True:
        layers, kept, boundary = rng.randint(20, 120), rng.randint(2, 9), rng.randint(1, 4)
        sums = sorted(k * boundary + layers / k * kept for k in range(1, layers + 1))
        if sums[0] + 1e-6 < sums[1]:
            return layers, kept, boundary


#: Key of the message on a mistake -> number of segments that it gives, or a tuple of numbers.
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
    """Return a mistake that gives the numbers of `mistake`, and the same numbers rounded."""

    def ways(L: int, A: int, B: int) -> tuple[float, ...]:
        found = mistake(L, A, B)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *map(round, found)

    return throughout(ways, tolerance=1e-9)


def _right_if_whole(L: int, A: int, B: int) -> tuple[int, int]:
    """Return the whole number of segments with the lowest peak, and the rounded square root.

    An answer may be either number.
    """
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
    """Check the learner's formula for the number of equal segments with the lowest peak.

    Both the exact minimum and the best whole number are accepted. The decorated function computes
    the right answer, and the decorator `numbers` turns it into a check.

    Args:
        L: Number of layers.
        A: Bytes that a layer saves for backward.
        B: Bytes of a layer's input.
    """
    return math.sqrt(L * A / B)


@cache
def least_peak(depth: int, layer_bytes: int = A) -> int:
    """Return the lowest peak in bytes that equal layers can have in checkpointed segments.

    Segments may have different lengths.

    Args:
        depth: Number of layers.
        layer_bytes: Bytes that a layer saves for backward.
    """

    @cache
    def peak_of_rest(layers: int, inputs: int) -> int:  # `inputs`: number of inputs kept so far
        if layers == 0:
            return 0
        sizes = range(1, layers + 1)
        return min(
            max((inputs + 1) * B + size * layer_bytes, peak_of_rest(layers - size, inputs + 1))
            for size in sizes
        )

    return peak_of_rest(depth, 0) + B


@exercise()
def check_tapered(answer: Any) -> Verdict:
    """Check the learner's function that cuts equal layers into segments so that the peak is lowest.

    The function is called for many numbers of layers, from 2 to 100.

    Args:
        answer: Function that is called as `answer(depth, kept)`, or as `answer(depth)` if `kept` is
            2. `depth` is the number of layers, and `kept` is the ratio of the bytes that a layer
            saves to the bytes of its input. The function returns the boundaries of the segments as
            layer indices, such as [0, 40, 70, 100] for 100 layers.
    """
    depths = [*range(2, 20), *cases([25, 50, 64], lambda rng: rng.randint(20, 90)), 100]
    tried = [(depth, 2) for depth in depths] + [(20, 1), (55, 1), (40, 3)]
    raw = [answer(depth) if kept == 2 else answer(depth, kept) for depth, kept in tried]
    if all(given is None for given in raw) or all(
        hasattr(given, "__len__") and [*given] == [0, depth]
        for given, (depth, _) in zip(raw, tried, strict=True)
    ):
        return not_answered()
    for given, (depth, kept) in zip(raw, tried, strict=True):
        if given is None:
            return returns_none(f"depth = {depth}, kept = {kept}")
    given = [_cuts_of(one, depth) for one, (depth, _) in zip(raw, tried, strict=True)]
    least = [least_peak(depth, kept * B) for depth, kept in tried]

    def peaks_of(all_cuts: list[list[int]]) -> list[int]:
        return [_peak(cuts, kept * B) for cuts, (_, kept) in zip(all_cuts, tried, strict=True)]

    peaks, twos = peaks_of(given), len(depths)
    if peaks == least:
        return say.right("tapered.right", count=f"{peaks[twos - 1] / B:g}")
    turned = [[cuts[-1] - cut for cut in reversed(cuts)] for cuts in given]
    say.reject_if(peaks_of(turned) == least, "tapered.turned")
    equal = all(max(sizes) - min(sizes) <= 1 for sizes in map(_sizes, given))
    say.reject_if(equal, "tapered.equal")
    say.reject_if(peaks[:twos] == least[:twos], "tapered.kept")
    for (depth, kept), cuts, peak, best in zip(tried, given, peaks, least, strict=True):
        if peak != best:
            shown = f"{cuts}" if len(cuts) < 9 else f"{cuts[:7]} …"
            peaks_in_b = {"peak": f"{peak / B:g}", "least": f"{best / B:g}"}
            say.wrong("tapered.higher", depth=depth, kept=kept, cuts=shown, **peaks_in_b)
    raise AssertionError(
        "this check is wrong, not the answer: it rejects an answer with the lowest peaks"
    )


def _cuts_of(given: Any, depth: int) -> list[int]:
    """Return `given` as cuts of `depth` layers, or reject the answer."""
    listed = hasattr(given, "__iter__")
    say.reject_if(not listed, "tapered.list", kind=type(given).__name__)
    say.reject_if(isinstance(given, set | frozenset), "tapered.set")
    try:
        cuts = [float(cut) for cut in given]
    except (TypeError, ValueError):
        cuts = [math.nan]
    shown = f"{given}"[:60]
    say.reject_if(sum(cuts) == depth and cuts[1:] != [depth], "tapered.sizes", cuts=shown)
    whole = all(cut.is_integer() for cut in cuts)
    say.reject_if(not whole, "tapered.whole_numbers", cuts=shown)
    ends = len(cuts) > 1 and cuts[0] == 0 and cuts[-1] == depth
    say.reject_if(not ends, "tapered.ends", depth=depth, cuts=shown)
    increasing = all(start < end for start, end in pairwise(cuts))
    say.reject_if(not increasing, "tapered.increasing", cuts=shown)
    return [int(cut) for cut in cuts]


def every_schedule(first: int, last: int) -> Iterator[list]:
    """Yield all persistent schedules of stages `first` to `last`, as lists of actions.

    In a persistent schedule, each kept tensor stays in memory until backward uses it. For one to
    six stages, there are 1, 2, 6, 22, 90 and 394 such schedules (the large Schröder numbers).
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


def _uneven_chain(*sizes: tuple[float, float, int, int], input_bytes: int = 1) -> Chain:
    """Return a chain from tuples (forward time, backward time, output bytes, saved bytes)."""
    return Chain(tuple(Stage(*each) for each in sizes), input_bytes)


# In each chain no output is larger than the one before it, as the lesson assumes. Otherwise the
# recurrence would also have to count the bytes of the forwards that run ahead.
_CHAINS = (
    Chain.uniform(4, saved_bytes=2),
    _uneven_chain((1, 2, 1, 3), (5, 9, 1, 1), (2, 4, 1, 6), (1, 1, 1, 2), (4, 8, 1, 2)),
    _uneven_chain((3, 6, 1, 2), (1, 2, 1, 5), (6, 12, 1, 1), (2, 4, 1, 4), (1, 2, 1, 3)),
    _uneven_chain(
        (1, 2, 4, 5), (3, 6, 3, 3), (3, 6, 3, 7), (4, 8, 2, 6), (2, 4, 1, 3), input_bytes=2
    ),
)


def _draw_chain(rng: random.Random) -> Chain:
    outputs = sorted((rng.randint(1, 3) for _ in range(4)), reverse=True)
    forwards = [rng.randint(1, 6) for _ in outputs]
    return _uneven_chain(
        *(
            (time, 2 * time, output, output + rng.randint(0, 4))
            for time, output in zip(forwards, outputs, strict=True)
        ),
        input_bytes=outputs[0],
    )


@cache
def _least_times(chains: tuple[Chain, ...]) -> list[tuple[Chain, int, float]]:
    """Return a list of (chain, budget, least time) for each chain and each of its budgets.

    The budget is in bytes and excludes the chain's input. The least times are found by simulating
    every schedule.
    """
    found = []
    for chain in chains:
        costs = [simulate(actions, chain) for actions in every_schedule(0, len(chain) - 1)]
        most = max(cost.peak_bytes for cost in costs)
        for budget in range(chain.input_bytes + 1, most + 3):
            times = (cost.time for cost in costs if cost.peak_bytes <= budget)
            found.append((chain, budget - chain.input_bytes, min(times, default=math.inf)))
    return found


#: Mistake -> bytes that are subtracted from `room` for the kept input while later stages run.
_KEPT: dict[str, Callable[[tuple[Stage, ...], int], int]] = {
    "all_of_room": lambda stages, e: 0,
    "one_byte": lambda stages, e: 1,
    "output_of_e": lambda stages, e: stages[e].output_bytes,
    "output_of_first": lambda stages, e: stages[0].output_bytes,
    "saved_bytes": lambda stages, e: stages[e - 1].saved_bytes,
    "all_outputs": lambda stages, e: sum(stage.output_bytes for stage in stages[:e]),
    "exchanged": lambda stages, e: 0,
}
_OTHERS = ("earlier_too_little", "no_earlier", "no_e")


@cache
def _fastest(stages: tuple[Stage, ...], room: int, mistake: str) -> float:
    """Return the least time of the stages, computed by the recurrence with one mistake.

    Args:
        stages: The stages that have not run yet.
        room: Budget in bytes, without the input of the first stage.
        mistake: A mistake of `_KEPT` or `_OTHERS`, or "never runs on".
    """
    if not stages:
        return 0
    first, ends = stages[0], range(1, len(stages))
    times = [_run_on(stages, e, room, mistake) for e in ends if mistake != "never runs on"]
    if first.saved_bytes + first.output_bytes <= room:
        later = _fastest(stages[1:], room - first.saved_bytes, mistake)
        times.append(first.forward_time + later + first.backward_time)
    return min(times, default=math.inf)


def _run_on(stages: tuple[Stage, ...], e: int, room: int, mistake: str) -> float:
    """Return the wrong time of `mistake` if forward runs to stage e without saving."""
    output = stages[e - 1].output_bytes
    kept = _KEPT[mistake](stages, e) if mistake in _KEPT else output
    ahead = sum(stage.forward_time for stage in stages[:e])
    later = _fastest(stages[e + (mistake == "no_e") :], room - kept, mistake)
    if mistake == "no_earlier":
        return ahead + later
    earlier_room = room - output if mistake in ("earlier_too_little", "exchanged") else room
    return ahead + later + _fastest(stages[:e], earlier_room, mistake)


@exercise(errors={"maximum recursion depth": "recurrence.endless"})
def check_recurrence(answer: Any) -> Verdict:
    """Check the learner's recurrence for the least time of a training step within a memory budget.

    The step runs a chain of stages. The learner's function is tried on four chains, each with many
    budgets. It must return the least time of all persistent schedules that fit into the budget (see
    `every_schedule`), or infinity if no schedule fits.

    Args:
        answer: Function that is called as `answer(stages, room)`, and returns the least time of
            these stages. `room` is the number of bytes that remain of the budget when the input of
            the first stage is in memory.
    """
    tried = _least_times(tuple(cases(_CHAINS, _draw_chain)))

    def times_with(mistake: str) -> list[float]:
        return [_fastest(chain.stages, room, mistake) for chain, room, _ in tried]

    given = [answer(chain.stages, room) for chain, room, _ in tried]
    if any(time is None for time in given) or given == times_with("never runs on"):
        return not_answered()
    if given == [least for *_, least in tried]:
        return say.right("recurrence.right", number=len(tried))
    for mistake in (*_KEPT, *_OTHERS):
        say.reject_if(given == times_with(mistake), f"recurrence.{mistake}")
    for (chain, room, least), time in zip(tried, given, strict=True):
        if time != least:
            numbers = {"best": f"{least:g}", "given": f"{_number(time):g}"}
            say.wrong("recurrence.longer_time", length=len(chain), room=room, **numbers)
    raise AssertionError(
        "this check is wrong, not the answer: it rejects an answer with the lowest times"
    )


def _number(given: Any) -> float:
    """Return an answer as a float, or reject it if it is not a number."""
    try:
        return float(given + 0.0)
    except TypeError:
        kind = type(given).__name__
        raise WrongAnswer(
            text("Expected one number, got a `{kind}`.", kind=kind), exact=True
        ) from None


def _run_layers(
    run: Callable, depth: int, width: int, rows: int, seed: int
) -> tuple[float, int, list[Tensor | None]]:
    """Return the peak, the FLOPs and the gradients of `run(layers, x)` followed by backward.

    The layers are pairs of Linear and GELU, initialized with `seed`. The gradients of the weights
    are allocated before the run, and the peak includes the input. Its unit is the size of one
    boundary.
    """
    layers = nn.Sequential(*(deep_mlp(depth=1, width=width, seed=seed + i) for i in range(depth)))
    parameters = [*layers.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    weights = torch.linspace(-1, 2, rows * width).view(rows, width)
    with MemoryMeter() as meter:
        x = torch.linspace(-1, 1, rows * width).view(rows, width)
        output = run(layers, x)
        if output is None or output is ...:
            raise NotImplementedError
        of_layers = isinstance(output, Tensor) and output.shape == x.shape
        say.reject_if(not of_layers, "nested.output", kind=type(output).__name__)
        say.reject_if(not output.requires_grad, "nested.no_graph")
        loss = (output * weights).sum()
        del output  # otherwise the output would be live during backward
        loss.backward()
    gradients = [parameter.grad for parameter in parameters]
    return meter.peak_bytes / (4 * rows * width), meter.flops, gradients


@cache
def _run_without_checkpoints(
    depth: int, width: int, rows: int, seed: int
) -> tuple[float, int, list[Tensor | None]]:
    """Return the results of `_run_layers` without checkpoints, which are the same at each try."""
    return _run_layers(lambda layers, x: layers(x), depth, width, rows, seed)


@exercise()
def check_nested(answer: Any) -> Verdict:
    """Check the learner's function that runs layers in nested checkpoints.

    The gradients must be those of the layers without checkpoints. Each linear layer may run forward
    at most twice. With nested checkpoints, each layer of a segment saves only its input. The limit
    of the peak is the lowest peak that segments of such layers can have, plus 2.5 times the bytes
    of an input.

    Args:
        answer: Function that is called as `answer(layers, x)`, and returns the output of the
            layers.
    """
    shown = {}
    chains = [
        (100, 25, 1000),
        *draw_case([(40, 16, 500)], lambda rng: [(rng.randint(30, 60), 16, 500)]),
    ]
    for depth, width, rows in chains:
        sizes = depth, width, rows, seed_of(0)
        baseline, once, wanted = _run_without_checkpoints(*sizes)
        peak, flops, found = _run_layers(answer, *sizes)
        if (peak, flops) == (baseline, once):
            return not_answered()
        depths, peaks = {"depth": depth}, {"peak": f"{peak:.2f}"}
        times = {"times": f"{flops / once:.2f}"}
        shown = shown or peaks | times
        say.reject_if(not all(map(is_close, found, wanted)), "nested.gradients", **depths)
        many = flops > once + 2 * rows * width**2 * depth
        say.reject_if(many, "nested.flops", **depths, **times)
        # While a GELU is recomputed, its output is also live.
        least, of_layers = least_peak(depth, B) / B + 1, least_peak(depth) / B
        moved = peak <= least + 1.5 and flops < 1.1 * once
        say.reject_if(moved, "nested.moved", **depths, **peaks)
        if peak > least + 1.5:
            say.reject_if(peak > depth, "nested.one_segment", **depths, **peaks)
            say.reject_if(round(peak, 1) == of_layers, "nested.tapered", **depths, **peaks)
            states = 5056 * depth / (4 * rows * width)  # one generator state per inner checkpoint
            say.reject_if(peak - states <= least + 1.5, "nested.random_state", **depths, **peaks)
            say.wrong("nested.peak", **depths, **peaks, **times, least=f"{least:g}")
    return say.right("nested.right", **shown)


@exercise()
def check_drawn_schedule(actions: Any) -> Verdict:
    """Check a schedule for six equal stages that save 2 bytes each.

    The schedule may have a peak of at most 7 bytes, and at most 11 forward runs of stages in total.

    Args:
        actions: Actions of the schedule for `Chain.uniform(6, saved_bytes=2)`.
    """
    if isinstance(actions, list | tuple) and (... in actions or not actions):
        return not_answered()
    cost = _simulate(actions, Chain.uniform(6, saved_bytes=2))
    found = {"peak": cost.peak_bytes, "forwards": cost.forward_steps}
    if cost.peak_bytes > 7 or cost.forward_steps > 11:
        say.wrong("drawn_schedule.limit", **found)
    return say.right("drawn_schedule.right", **found)


def five_stages() -> Chain:
    """Return a chain of five stages whose fastest schedule within 13 bytes is not persistent.

    In a persistent schedule, each kept tensor stays in memory until backward uses it.
    """
    # (forward time, output bytes, saved bytes)
    sizes = [(10, 2, 3), (5, 4, 4), (5, 4, 4), (5, 1, 1), (10, 4, 4)]
    return Chain(tuple(Stage(forward, 1, output, kept) for forward, output, kept in sizes), 1)


@exercise()
def check_gives_up_early(actions: Any) -> Verdict:
    """Check a schedule that releases a kept tensor before backward uses it.

    The schedule must fit into 13 bytes. It must be faster than all schedules that keep each tensor
    until backward uses it.

    Args:
        actions: Actions of the schedule for `five_stages()`.
    """
    if isinstance(actions, Sequence) and [*actions] in ([], [*optimal(five_stages(), 13)]):
        return not_answered()
    cost = _simulate(actions, five_stages())
    found = {"peak": cost.peak_bytes, "time": f"{cost.time:g}"}
    if cost.peak_bytes > 13:
        say.wrong("gives_up_early.peak", peak=found["peak"])
    if cost.time >= 80:
        say.wrong("gives_up_early.time", time=found["time"])
    return say.right("gives_up_early.right", **found)


def pyramid() -> Chain:
    """Return a chain of twelve stages whose outputs shrink from 32 MB to 1 MB, as in a pyramid."""
    sizes = [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 1]  # MB of each stage's output
    return Chain(tuple(Stage(4, 8, size * 10**6, 2 * size * 10**6) for size in sizes), 3 * 10**6)


@exercise()
def check_plan(answer: Any) -> Verdict:
    """Check the learner's function that returns the fastest schedule within a memory budget.

    The function is tried on four small chains with every sufficient budget, and on `pyramid()` with
    a budget of 150 MB.

    Args:
        answer: Function that is called as `answer(first, stages, room)`. `stages` is the list of
            the stages that are still to be run. `first` is the position in the whole chain of the
            first of these stages. `room` is the part of the budget, in bytes, that remains when the
            input of that first stage is in memory. The function returns a list of actions.
    """
    of_chains = _least_times(tuple(cases(_CHAINS, _draw_chain)))
    tried = [(chain, room, least) for chain, room, least in of_chains if least < math.inf]
    chain, budget = pyramid(), 150_000_000
    least = simulate(optimal(chain, budget), chain).time
    tried.append((chain, budget - chain.input_bytes, least))
    for chain, room, least in tried:
        actions = answer(0, chain.stages, room)
        unset = actions is None or actions is ...
        if unset or (isinstance(actions, list | tuple) and not actions):
            return not_answered()
        cost = _simulate(actions, chain)
        peak = cost.peak_bytes - chain.input_bytes
        case = {"length": len(chain), "room": f"{room:,}"}
        if peak > room:
            say.wrong("plan.bytes", **case, peak=f"{peak:,}")
        if cost.time > least:
            say.wrong("plan.time", **case, time=f"{cost.time:g}", least=f"{least:g}")
    return say.right("plan.right", number=len(tried))


#: Pattern in an error of `simulate` -> key of a message in both languages.
_VIOLATIONS = {
    r"needs its input (x_\d+), which is not live": "common.no_input",
    r"the stage's input (x_\d+), which is not live": "common.no_input_of_stage",
    r"saves \(S_(\d+)\), which are not live": "common.nothing_kept",
    r"first, and (Backward\(\d+\)) is next": "common.another_backward",
    r"(again) after its backward": "common.backward_done",
    r"and (Backward\(\d+\)) has not run": "common.ends_early",
    r"has only the stages 0 to (\d+)": "common.last_stage",
}


def _explanation(error: IllegalSchedule) -> str:
    """Return the message on an illegal schedule, which states the rule that was violated."""
    message = f"{error}"
    action = re.search(r"action (\d+), (\w+\(.*?\))", message)
    for pattern, name in _VIOLATIONS.items():
        if found := re.search(pattern, message):
            reason = say.fill(name, what=found[1])
            if action is None:
                return say("common.rejects", reason=reason)
            values = {"number": action[1], "action": f"`{action[2]}`"}
            return say("common.rejects_action", reason=reason, **values)
    return say("common.rejects_otherwise", problem=f"`{message}`")


def _simulate(actions: Any, chain: Chain) -> Cost:
    """Return the cost of the learner's schedule, or reject the schedule with the reason."""
    try:
        return simulate(Schedule(actions), chain)
    except IllegalSchedule as error:
        raise WrongAnswer(_explanation(error)) from None
    except Exception as error:
        say.wrong("common.cannot_simulate", error=f"`{error!r}`")
