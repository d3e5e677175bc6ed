"""Random chains of stages, and the cheapest schedules of a small chain by exhaustive search.

`test_schedule.py` and `fuzz.py` compare the solvers of `course_lib.schedule` with them.
"""

import heapq
import itertools
import math
import random
from functools import lru_cache

from course_lib.schedule import Chain, Stage


def random_chain(length: int, seed: int, most: int = 4) -> Chain:
    """Return a random chain whose times and bytes are small whole numbers."""
    draw = random.Random(seed)
    stages = []
    for _ in range(length):
        output = draw.randint(1, most)
        stages.append(
            Stage(
                draw.randint(1, 5),
                draw.randint(1, 5),
                output,
                output + draw.randint(0, most),
                draw.choice([0, 0, draw.randint(1, most)]),
                draw.choice([0, 0, draw.randint(1, most)]),
            )
        )
    return Chain(tuple(stages), draw.randint(1, most))


@lru_cache
def cheapest_by_search(chain: Chain) -> list[tuple[int, float]]:
    """Return all non-dominated (peak, time), found by trying every persistent schedule.

    The search counts bytes without the library's code. Its state is (set of kept inputs x_i, input
    that is passed on without being kept, set of saved S_i, stage of the next backward). Kept values
    stay until their backward; only the passed input may be dropped earlier.
    """
    stages, length = chain.stages, len(chain)
    size = [chain.input_bytes] + [stage.output_bytes for stage in stages]

    def live(kept, passing, saved, due):
        here = kept | ({passing} if passing is not None else set())
        gradient = size[due + 1] if due < length - 1 else 0
        return sum(size[i] for i in here) + sum(stages[i].saved_bytes for i in saved) + gradient

    def moves(kept, passing, saved, due):
        for i in range(due + 1):
            by_itself = i in kept or i == passing
            if not by_itself and i - 1 not in saved:
                continue
            stage, before = stages[i], live(kept, passing, saved, due)
            # This action uses the passed input, or drops it.
            fixed = kept | ({i} if i == passing else set())
            peak = before + stage.saved_bytes + stage.forward_overhead_bytes
            if i not in saved:
                yield peak, stage.forward_time, (fixed - {i + 1}, None, saved | {i}, due)
            if i + 1 not in kept and i + 1 <= due:
                yield peak, stage.forward_time, (fixed, i + 1, saved, due)
                if i == passing:
                    yield peak, stage.forward_time, (kept, i + 1, saved, due)
        if due in saved and (due in kept or due == passing or due - 1 in saved):
            peak = live(kept, passing, saved, due) + stages[due].backward_overhead_bytes
            peak += size[length] if due == length - 1 else 0
            rest = None if passing in (due, due + 1) else passing
            yield (
                peak,
                stages[due].backward_time,
                (kept - {due, due + 1}, rest, saved - {due}, due - 1),
            )

    start = (frozenset({0}), None, frozenset(), length - 1)
    queue, number, best, found = [(0, chain.input_bytes, 0, start)], itertools.count(1), {}, []
    while queue:  # in order of time; a state reached again matters only with a lower peak
        seconds, peak, _, state = heapq.heappop(queue)
        if best.get(state, math.inf) <= peak or (found and found[-1][0] <= peak):
            continue
        best[state] = peak
        if state[3] < 0:
            found.append((peak, seconds))
            continue
        for needed, time, (kept, passing, saved, due) in moves(*state):
            after = (frozenset(kept), passing, frozenset(saved), due)
            heapq.heappush(queue, (seconds + time, max(peak, needed), next(number), after))
    return found[::-1]
