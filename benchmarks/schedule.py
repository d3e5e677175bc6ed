"""Compare solvers of schedules: `optimal` with a plain NumPy dynamic program for the same bytes,
and `binomial` with `checkpoint-schedules`."""

import random
from collections.abc import Iterator

from rotor import plain_dynamic_program
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
