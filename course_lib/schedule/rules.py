"""Schedules that follow a simple rule, from keeping everything to the fewest forwards."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from course_lib._check import kind, whole

from .actions import Action, Backward, Forward, Schedule
from .chain import Chain

MANY = 1 << 60  # bytes, as infinity


def store_all(chain: Chain) -> Schedule:
    """Keep everything: run each forward once, then each backward. No schedule is faster.

    Args:
        chain: L stages.
    """
    return Schedule(_keep_all(0, _length(chain)))


def segments(chain: Chain, count: int) -> Schedule:
    """Cut the chain into `count` segments, keep the input of each, and keep all of one at a time.

    If all stages are equal, the sizes of the segments differ by at most one, and the larger ones
    come first, because fewer inputs are kept when they are recomputed. Otherwise the cuts are those
    with the least simulated peak.

    Args:
        chain: L stages.
        count: Number of segments, from 1 (the same as `store_all`) to L.

    Returns:
        A schedule with one extra forward per stage that is not in the last segment.

    Raises:
        TypeError, ValueError: `count` is not a whole number from 1 to L.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4. The cuts of unequal stages are found by
    dynamic programming.
    """
    length = _length(chain)
    whole("count", count, 1, length)
    if len(set(chain.stages)) > 1:
        return segmented(_best_cuts(chain, count))
    size, larger = divmod(length, count)
    return segmented(list(accumulate([size + (j < larger) for j in range(count)], initial=0)))


def sqrt_segments(chain: Chain) -> Schedule:
    """Cut the chain into k* segments and keep only the input of each.

    With s bytes saved per stage and b bytes at a boundary, holding k boundaries and one segment of
    L/k stages costs k*b + (L/k)*s bytes, which is least at k* = sqrt(L*s/b). The
    whole number next to k* with the lower cost is used.

    Args:
        chain: L stages; s and b are the means of their `saved_bytes` and `output_bytes`.

    Returns:
        A schedule with one extra forward per stage that is not in the last segment.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4, for s = b.

    Example:
        >>> simulate(sqrt_segments(Chain.uniform(64)), Chain.uniform(64)).peak_bytes
        17
    """
    length = _length(chain)
    s = sum(stage.saved_bytes for stage in chain.stages) / length
    b = sum(stage.output_bytes for stage in chain.stages) / length
    best = math.sqrt(length * s / b)
    counts = {min(max(1, count), length) for count in (math.floor(best), math.ceil(best))}
    return segments(chain, min(sorted(counts), key=lambda k: k * b + length / k * s))


def recursive(chain: Chain) -> Schedule:
    """Halve the chain recursively: keep the input of the second half and run that half first.

    At most ceil(log2 L) + 1 inputs and one stage's saved bytes are live at once. The price is about
    (L/2) * log2 L extra forwards.

    Args:
        chain: L stages.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.4.
    """
    actions: list[Action] = []
    waiting = [(0, _length(chain))]  # a stack: the right half runs before the left one
    while waiting:
        start, end = waiting.pop()
        if end - start == 1:
            actions += _keep_all(start, end)
            continue
        middle = (start + end) // 2
        actions += advance(start, middle)
        waiting += [(start, middle), (middle, end)]
    return Schedule(actions)


def binomial(length: int, slots: int) -> Schedule:
    """Use the fewest forwards for equal stages if at most `slots` inputs, including x_0, are kept.

    The forward of a stage that keeps everything runs directly before its backward. There are r*L -
    C(s+r, s+1) forwards in addition to these L, with s slots and the least r for which C(s+r, s) >=
    L.

    Args:
        length: L, the number of stages.
        slots: s, at least 1; more than L - 1 slots change nothing.

    Raises:
        TypeError, ValueError: An argument is not a positive whole number.

    Source: Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1).

    Example:
        >>> simulate(binomial(10, 3), Chain.uniform(10)).forward_steps
        25
    """
    whole("length", length, 1)
    whole("slots", slots, 1)
    passing = [Forward(i, "nothing") for i in range(length)]
    actions: list[Action] = []
    waiting = [(0, length, slots)]
    while waiting:
        start, length, slots = waiting.pop()
        if length == 1:
            actions += _keep_all(start, start + 1)
            continue
        split = _binomial_split(length, min(slots, length - 1))
        actions.append(Forward(start, "input"))
        actions += passing[start + 1 : start + split]
        waiting += [(start, split, slots), (start + split, length - split, slots - 1)]
    return Schedule(actions)


@lru_cache(maxsize=1 << 16)
def _binomial_split(length: int, slots: int) -> int:
    """Return how far to run before the next input is kept.

    It is the largest distance for which no stage of either part runs ahead more than r times.
    """
    if slots == 1:
        return length - 1
    r, reach = 0, 1
    while reach < length:  # the least r with C(s+r, s) >= L: no stage runs ahead more than r times
        r += 1
        reach = reach * (slots + r) // r
    return min(math.comb(slots + r - 1, slots), length - math.comb(slots + r - 2, slots - 1))


def _length(chain: Chain) -> int:
    return len(kind("chain", chain, Chain, "a Chain"))


def _keep_all(start: int, end: int) -> list[Action]:
    return [Forward(i, "all") for i in range(start, end)] + [
        Backward(i) for i in reversed(range(start, end))
    ]


def advance(start: int, end: int) -> list[Action]:
    """Return the forwards from x_start to x_end, which keep x_start."""
    return [Forward(start, "input"), *(Forward(i, "nothing") for i in range(start + 1, end))]


def segmented(cuts: list[int]) -> Schedule:
    """Return the schedule with segments from each cut to the next."""
    pairs = list(pairwise(cuts))
    actions: list[Action] = []
    for start, end in pairs[:-1]:
        actions += advance(start, end)
    for start, end in reversed(pairs):
        actions += _keep_all(start, end)
    return Schedule(actions)


class Sizes:
    """The bytes and times of a chain, as arrays.

    A part of the chain is stages s to t, both included. Its input x_s is kept elsewhere and is not
    counted. The gradient of x_{t+1} is counted if it is live already, that is unless t = L-1, whose
    gradient is created at the start of its backward.
    """

    def __init__(self, chain: Chain):
        stages = kind("chain", chain, Chain, "a Chain").stages
        length = len(chain)
        self.length = length
        self.values = np.array(
            [chain.input_bytes, *(stage.output_bytes for stage in stages)], dtype=np.int64
        )
        self.saved = np.array([stage.saved_bytes for stage in stages], dtype=np.int64)
        self.forward = self.saved + [stage.forward_overhead_bytes for stage in stages]
        self.backward = (
            self.saved + self.values[1:] + [stage.backward_overhead_bytes for stage in stages]
        )
        # gradient[t]: bytes of the gradient of x_{t+1} during the forwards of stages up to t
        self.gradient = np.append(self.values[1:length], 0)
        # through[s, e]: bytes needed to run from x_s to x_e if only x_s is kept on the way
        self.through = np.zeros((length, length + 1), dtype=np.int64)
        for s in range(length):
            running = self.forward[s:].copy()
            running[1:] += self.values[s + 1 : length]
            self.through[s, s + 1 :] = np.maximum.accumulate(running)
        self.own_time = np.array(
            [float(stage.forward_time + stage.backward_time) for stage in stages]
        )
        self.elapsed = np.cumsum([0.0, *(stage.forward_time for stage in stages)])


def _best_cuts(chain: Chain, count: int) -> list[int]:
    """Return the boundaries 0 = c_0 < ... < c_count = L with the least peak of `segmented`.

    need[a] is the least number of bytes that stages a and later need, beyond x_a and what is kept
    before it, for a given number of segments. The first of the segments ends at some b. It needs
    its own bytes, or the rest needs x_b and need[b].
    """
    sizes = Sizes(chain)
    length = len(chain)
    own = np.full((length, length + 1), MANY, dtype=np.int64)  # bytes that segment a..b-1 needs
    for a in range(length):
        before = np.cumsum(sizes.saved[a:]) - sizes.saved[a:]
        forward = np.maximum.accumulate(before + sizes.forward[a:])
        backward = np.maximum.accumulate(before + sizes.backward[a:])
        own[a, a + 1 :] = np.maximum(forward + sizes.gradient[a:], backward)
        own[a, a + 1 : length] = np.maximum(
            own[a, a + 1 : length], sizes.through[a, a + 1 : length]
        )
    need = own[:, length]
    chosen = []
    for _ in range(count - 1):
        taken = np.maximum(own[:, :length], (sizes.values[:length] + need)[None, :])
        chosen.append(taken.argmin(axis=1))
        need = taken.min(axis=1)
    cuts = [0]
    for ends in reversed(chosen):
        cuts.append(int(ends[cuts[-1]]))
    return [*cuts, length]
