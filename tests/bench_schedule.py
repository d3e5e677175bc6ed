"""Solver times: `optimal` beside a plain NumPy dynamic program over the same bytes, and `binomial`
for a long chain.

Run as a script: `python tests/bench_schedule.py`. Ratios of times taken in one run, in turns, carry
over to other machines; costs are exact.
"""

from __future__ import annotations

import random
import time

import numpy as np

from course_lib.schedule import Chain, Forward, Stage, binomial, optimal, simulate, store_all

RATIO_BAR, BINOMIAL_BAR, REVOLVE_BAR = 2.0, 1.0, 100.0
SLOTS, ROUNDS = 500, 3


def uneven_chain(length: int) -> Chain:
    """Whole sizes, so that 500 slots of one byte are exact for both solvers."""
    draw = random.Random(length)
    stages = []
    for _ in range(length):
        output = draw.randint(1, 3)
        stages.append(
            Stage(draw.randint(1, 9), draw.randint(1, 9), output, output + draw.randint(1, 5))
        )
    return Chain(tuple(stages), 2)


def plain_dynamic_program(chain: Chain, budget: int) -> float:
    """The least time: the recurrence as it stands in the paper, vectorised over slots only."""
    stages, length = chain.stages, len(chain)
    value = [chain.input_bytes] + [stage.output_bytes for stage in stages]
    elapsed = np.concatenate([[0.0], np.cumsum([stage.forward_time for stage in stages])])
    units = budget - chain.input_bytes
    cost = np.full((length, length, units + 1), np.inf)
    for t in range(length):
        gradient = value[t + 1] if t < length - 1 else 0
        for s in reversed(range(t + 1)):
            stage, best = stages[s], cost[s, t]
            own, saved = stage.forward_time + stage.backward_time, stage.saved_bytes
            needed = saved + max(gradient, value[s + 1])
            if s == t:
                best[needed:] = own
            elif needed <= units:
                best[needed:] = cost[s + 1, t, needed - saved : units + 1 - saved] + own
            passing = 0
            for e in range(s + 1, t + 1):
                passing = max(
                    passing, stages[e - 1].saved_bytes + (value[e - 1] if e - 1 > s else 0)
                )
                low = max(value[e], gradient + passing)
                if low <= units:
                    split = cost[e, t, low - value[e] : units + 1 - value[e]] + cost[s, e - 1, low:]
                    np.minimum(best[low:], split + (elapsed[e] - elapsed[s]), out=best[low:])
    return float(cost[0, -1, -1])


def revolve_steps(length: int, slots: int) -> int:
    """How many stages the `checkpoint-schedules` package runs forward, adjoint preparation
    included."""
    import checkpoint_schedules as peer

    steps = 0
    for action in peer.Revolve(length, slots):
        if isinstance(action, peer.Forward):
            steps += action.n1 - action.n0
        elif isinstance(action, peer.EndReverse):
            break
    return steps


def binomial_steps(length: int, slots: int) -> int:
    return sum(isinstance(action, Forward) for action in binomial(length, slots))


def timed(function, *args) -> tuple[float, object]:
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main() -> None:
    print(f"optimal, {SLOTS} slots, best of {ROUNDS} in turns")
    print(f"{'stages':>6} {'optimal':>10} {'plain':>10} {'ratio':>6}  same cost")
    for length in (50, 100, 200):
        chain, ours, plain = uneven_chain(length), [], []
        budget = SLOTS if simulate(store_all(chain), chain).peak_bytes > SLOTS else SLOTS // 2
        for _ in range(ROUNDS):
            ours.append(timed(optimal, chain, budget))
            plain.append(timed(plain_dynamic_program, chain, budget))
        same = simulate(ours[0][1], chain).time == plain[0][1]
        seconds = [min(taken for taken, _ in arm) for arm in (ours, plain)]
        ratio = seconds[1] / seconds[0]
        verdict = (
            ""
            if length < 200
            else f"  bar {RATIO_BAR}: {'met' if ratio >= RATIO_BAR else 'MISSED'}"
        )
        print(f"{length:6} {seconds[0]:8.3f} s {seconds[1]:8.3f} s {ratio:6.2f}  {same}{verdict}")
    seconds, steps = timed(lambda: len(binomial(100_000, 300)))
    verdict = "met" if seconds <= BINOMIAL_BAR else "MISSED"
    print(
        f"binomial(100000, 300): {steps} actions in {seconds:.3f} s  bar {BINOMIAL_BAR} s:"
        f" {verdict}"
    )
    ours = min(timed(binomial_steps, 1000, 32) for _ in range(ROUNDS))
    peer = timed(revolve_steps, 1000, 32)
    ratio = peer[0] / ours[0]
    verdict = "met" if ratio >= REVOLVE_BAR and ours[1] == peer[1] else "MISSED"
    print(
        f"forward steps, 1000 stages, 32 slots: {ours[1]} in {ours[0]:.4f} s; checkpoint-schedules'"
        f" Revolve: {peer[1]} in {peer[0]:.2f} s; ratio {ratio:.0f}  bar {REVOLVE_BAR:.0f}:"
        f" {verdict}"
    )


if __name__ == "__main__":
    main()
