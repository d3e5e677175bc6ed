"""Time of the cheapest schedule of a chain, by the recurrence of the rotor paper in NumPy."""

import numpy as np

from course_lib.schedule import Chain


def plain_dynamic_program(chain: Chain, budget: int) -> float:
    """Return the least time; the recurrence loops over stages, and is vectorized over slots."""
    stages, length = chain.stages, len(chain)
    value = [chain.input_bytes] + [stage.output_bytes for stage in stages]
    elapsed = np.cumsum([0.0] + [stage.forward_time for stage in stages])
    units = budget - chain.input_bytes
    cost = np.full((length, length, units + 1), np.inf)
    for t in range(length):
        gradient = value[t + 1] if t < length - 1 else 0
        for s in reversed(range(t + 1)):
            stage, best, passing = stages[s], cost[s, t], 0
            own, saved = stage.forward_time + stage.backward_time, stage.saved_bytes
            needed = saved + max(gradient, value[s + 1])
            if s == t:
                best[needed:] = own
            elif needed <= units:
                best[needed:] = cost[s + 1, t, needed - saved : units + 1 - saved] + own
            for e in range(s + 1, t + 1):
                passed = stages[e - 1].saved_bytes + (value[e - 1] if e - 1 > s else 0)
                passing = max(passing, passed)
                low = max(value[e], gradient + passing)
                if low <= units:
                    split = cost[e, t, low - value[e] : units + 1 - value[e]] + cost[s, e - 1, low:]
                    np.minimum(best[low:], split + (elapsed[e] - elapsed[s]), out=best[low:])
    return float(cost[0, -1, -1])
