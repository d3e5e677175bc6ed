"""Solvers of schedules: `optimal` and a plain NumPy dynamic program over the same bytes (the
recurrence of rotor, as the paper states it), and `binomial` and `checkpoint-schedules`."""

import random
from collections.abc import Iterator

import numpy as np
from scoreboard import COURSE, Row, compare, installed, missing

from course_lib.schedule import Chain, Forward, Stage, binomial, optimal, simulate

SLOTS = 500


def uneven_chain(length: int) -> Chain:
    """Return a chain with whole sizes, so that 500 slots of one byte are exact for both solvers."""
    draw, stages = random.Random(length).randint, []
    for _ in range(length):
        output = draw(1, 3)
        stages.append(Stage(draw(1, 9), draw(1, 9), output, output + draw(1, 5)))
    return Chain(tuple(stages), 2)


def plain_dynamic_program(chain: Chain, budget: int) -> float:
    """Return the least time: the recurrence, with only the slots in a vector."""
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


def rows(rounds: int) -> Iterator[Row]:
    chain, peer = uneven_chain(200), "NumPy, rotor's recurrence"
    arms = {
        COURSE: lambda: optimal(chain, SLOTS),
        peer: lambda: plain_dynamic_program(chain, SLOTS),
    }
    same = simulate(arms[COURSE](), chain).time == arms[peer]()
    notes = {peer: f"same cost: {same}"}
    yield from compare("optimal, 200 stages, 500 slots", arms, min(rounds, 3), notes=notes)
    work = "binomial, 1,000 stages, 32 slots"
    if not installed("checkpoint_schedules"):
        yield missing(work, "checkpoint-schedules")
        return
    from checkpoint_schedules import Revolve

    arms = {
        COURSE: lambda: [a for a in binomial(1000, 32) if isinstance(a, Forward)],
        "checkpoint-schedules": lambda: [
            a for a, _ in zip(Revolve(1000, 32), range(9000), strict=False)
        ],
    }
    yield from compare(work, arms, min(rounds, 3))
