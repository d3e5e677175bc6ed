"""Schedules that follow a fixed rule, such as keeping everything or only segment boundaries.

Unlike the schedules of the module `planner`, these schedules do not depend on a budget in bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from course_lib._check import kind, whole

from .actions import Action, Backward, Forward, Schedule
from .chain import Chain

INFINITE_BYTES = 1 << 60  # stands for infinity in arrays of whole numbers


def store_all(chain: Chain) -> Schedule:
    """Return the schedule that keeps everything: it runs each forward once, then each backward.

    No schedule is faster. This is training without checkpoints.

    Args:
        chain: A chain of L stages.
    """
    return Schedule(_keep_all(0, _length(chain)))


def segments(chain: Chain, count: int) -> Schedule:
    """Return the schedule that cuts the chain into segments and recomputes one segment at a time.

    Only the inputs of the segments are kept. If all stages are equal, the lengths of the segments
    differ by at most one. The longer segments come first, because backward recomputes the first
    segments last, when the fewest inputs of other segments are still kept. If the stages are not
    equal, the cuts with the least simulated peak are used.

    Args:
        chain: A chain of L stages.
        count: Number of segments, from 1 (the same as `store_all`) to L.

    Returns:
        A schedule with one extra forward for each stage that is not in the last segment.

    Raises:
        TypeError, ValueError: `count` is not a whole number from 1 to L.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4. The cuts of unequal stages are found by
    dynamic programming.
    """
    length = _length(chain)
    whole("count", count, 1, length)
    if len(set(chain.stages)) > 1:
        return segment_schedule(_best_cuts(chain, count))
    size, larger = divmod(length, count)
    return segment_schedule(
        list(accumulate([size + (j < larger) for j in range(count)], initial=0))
    )


def sqrt_segments(chain: Chain) -> Schedule:
    """Return `segments(chain, k)` for the number of segments k that needs about the least memory.

    Only the input of each segment is kept, and backward recomputes one segment at a time. Let each
    of L stages save s bytes, and let each segment boundary have b bytes. The k boundaries and the
    saved bytes of one segment of L/k stages need k*b + (L/k)*s bytes. This sum is least at k* =
    sqrt(L*s/b). If k* is not a whole number, the better of the two nearest whole numbers is used.

    Args:
        chain: A chain of L stages. The means of their `saved_bytes` and `output_bytes` are used as
            s and b.

    Returns:
        A schedule with one extra forward for each stage that is not in the last segment.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4, for s = b.

    Example:
        >>> simulate(sqrt_segments(Chain.uniform(64)), Chain.uniform(64)).peak_bytes
        17
    """
    length = _length(chain)
    s = sum(stage.saved_bytes for stage in chain.stages) / length
    b = sum(stage.output_bytes for stage in chain.stages) / length
    best = math.sqrt(length * s / b)
    # A stage saves at least its output, so `best` is at least 1.
    counts = {min(count, length) for count in (math.floor(best), math.ceil(best))}
    return segments(chain, min(sorted(counts), key=lambda k: k * b + length / k * s))


def recursive(chain: Chain) -> Schedule:
    """Return the schedule that halves the chain recursively and keeps the input of each half.

    At the beginning, the first half runs forward to compute the input of the second half, and only
    this input is kept. Then the second half runs forward and backward. After that, the first half
    runs forward and backward. Each half is halved in the same way. At most ceil(log2 L) + 1 inputs
    and the saved bytes of one stage are live at the same time. In return, the schedule has about
    (L/2) * log2 L extra forwards.

    Args:
        chain: A chain of L stages.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.4.
    """
    actions: list[Action] = []
    stack = [(0, _length(chain))]  # `pop` removes the last element, so right halves run first
    while stack:
        start, end = stack.pop()
        if end - start == 1:
            actions += _keep_all(start, end)
            continue
        middle = (start + end) // 2
        actions += advance(start, middle)
        stack += [(start, middle), (middle, end)]
    return Schedule(actions)


def binomial(length: int, slots: int) -> Schedule:
    """Return the schedule with the fewest forwards that keeps at most `slots` inputs at a time.

    The schedule is for a chain of L equal stages. The input of the first stage is one of the inputs
    that are kept. Directly before its backward, each stage runs a forward that keeps all tensors
    that the backward needs. In addition to these L forwards, the schedule runs r*L - C(s+r, s+1)
    forwards. Here s is the number of slots, C(n, k) is a binomial coefficient, and r is the least
    number for which C(s+r, s) >= L.

    Args:
        length: L, the number of stages.
        slots: s, the largest number of inputs that are kept at the same time, at least 1. More than
            L - 1 slots give the same schedule as L - 1.

    Raises:
        TypeError, ValueError: An argument is not a positive whole number.

    Source: Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1).

    Example:
        >>> simulate(binomial(10, 3), Chain.uniform(10)).forward_steps
        25
    """
    whole("length", length, 1)
    whole("slots", slots, 1)
    forwards = [Forward(i, "nothing") for i in range(length)]
    actions: list[Action] = []
    stack = [(0, length, slots)]
    while stack:
        start, length, slots = stack.pop()
        if length == 1:
            actions += _keep_all(start, start + 1)
            continue
        split = _binomial_split(length, min(slots, length - 1))
        actions.append(Forward(start, "input"))
        actions += forwards[start + 1 : start + split]
        stack += [(start, split, slots), (start + split, length - split, slots - 1)]
    return Schedule(actions)


@lru_cache(maxsize=1 << 16)
def _binomial_split(length: int, slots: int) -> int:
    """Return the number of stages that `binomial` runs before it keeps the next input.

    Often several numbers lead to a schedule with the fewest forwards. The largest of these numbers
    is returned.
    """
    if slots == 1:
        return length - 1
    r, reach = 0, 1
    while reach < length:  # find the least r with C(s+r, s) >= L, as in `binomial`
        r += 1
        reach = reach * (slots + r) // r
    return min(math.comb(slots + r - 1, slots), length - math.comb(slots + r - 2, slots - 1))


def _length(chain: Chain) -> int:
    return len(kind("chain", chain, Chain, "a Chain"))


def _keep_all(start: int, end: int) -> list[Action]:
    """Return the actions that run the forwards of stages start to end-1, then their backwards."""
    return [Forward(i, "all") for i in range(start, end)] + [
        Backward(i) for i in reversed(range(start, end))
    ]


def advance(start: int, end: int) -> list[Action]:
    """Return forward actions that run stages `start` to end-1 to compute the input of stage `end`.

    Only the inputs of stages `start` and `end` are kept.
    """
    return [Forward(start, "input"), *(Forward(i, "nothing") for i in range(start + 1, end))]


def segment_schedule(cuts: list[int]) -> Schedule:
    """Return the schedule that keeps the inputs of segments and recomputes one segment at a time.

    Args:
        cuts: Boundaries of the segments, 0 = cuts[0] < ... < cuts[-1] = L. A segment consists of
            the stages from one boundary up to, but not including, the next.
    """
    pairs = list(pairwise(cuts))
    actions: list[Action] = []
    for start, end in pairs[:-1]:
        actions += advance(start, end)
    for start, end in reversed(pairs):
        actions += _keep_all(start, end)
    return Schedule(actions)


class Sizes:
    """The bytes and times of a chain of L stages, as arrays for dynamic programming.

    Stage i computes x_{i+1} from x_i. Bytes are computed for parts of the chain: stages s to t,
    both included. They do not include the part's input x_s.

    Attributes:
        length: L, the number of stages.
        values: values[i] is the number of bytes of x_i, for i = 0 to L.
        saved: saved[i] is the number of bytes that stage i saves for its backward.
        forward: forward[i] is the number of bytes that the forward of stage i adds while it runs.
        backward: backward[i] is the number of bytes that are live during the backward of stage i,
            without its input x_i.
        gradient: gradient[t] is the number of bytes of the gradient of x_{t+1}, which is live
            during the forwards of a part that ends with stage t. It is 0 for t = L-1, because the
            gradient of the chain's output exists only from the first backward on.
        through: through[s, e] is the number of bytes needed to run from x_s to x_e if only x_s is
            kept.
        own_time: own_time[i] is the time of the forward and the backward of stage i.
        elapsed: elapsed[i] is the time of the forwards from x_0 to x_i.
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
        self.gradient = np.append(self.values[1:length], 0)
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
    """Return the boundaries of `count` segments for which `segment_schedule` has the least peak.

    The boundaries are 0 = c_0 < ... < c_count = L. In the code, need[a] is the least number of
    bytes for stages a to L-1 in a given number of segments. It does not include the bytes of x_a
    and of the inputs of earlier segments. If the first of these segments ends at b, need[a] is the
    larger of two numbers: the bytes of this segment alone, and the bytes of x_b plus need[b]. This
    need[b] is for one segment less.
    """
    sizes = Sizes(chain)
    length = len(chain)
    # segment_bytes[a, b] is the number of bytes that one segment with the stages a to b-1 needs.
    segment_bytes = np.full((length, length + 1), INFINITE_BYTES, dtype=np.int64)
    for a in range(length):
        saved_before = np.cumsum(sizes.saved[a:]) - sizes.saved[a:]
        forward = np.maximum.accumulate(saved_before + sizes.forward[a:])
        backward = np.maximum.accumulate(saved_before + sizes.backward[a:])
        segment_bytes[a, a + 1 :] = np.maximum(forward + sizes.gradient[a:], backward)
        segment_bytes[a, a + 1 : length] = np.maximum(
            segment_bytes[a, a + 1 : length], sizes.through[a, a + 1 : length]
        )
    need = segment_bytes[:, length]
    chosen = []
    for _ in range(count - 1):
        peaks = np.maximum(segment_bytes[:, :length], (sizes.values[:length] + need)[None, :])
        chosen.append(peaks.argmin(axis=1))
        need = peaks.min(axis=1)
    cuts = [0]
    for ends in reversed(chosen):
        cuts.append(int(ends[cuts[-1]]))
    return [*cuts, length]
