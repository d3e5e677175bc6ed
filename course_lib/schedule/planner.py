"""The fastest schedule within a budget, and the frontier of all budgets, by dynamic programming."""

from __future__ import annotations

import numpy as np

from course_lib._check import InfeasibleBudget, whole

from .actions import Action, Backward, Cost, Forward, Schedule, simulate
from .chain import Chain
from .rules import MANY, Sizes, advance, store_all

CELLS, LEAST_LEVELS = 8_000_000, 500  # a table of 64 MB, or 160 MB for 200 stages


def optimal(chain: Chain, budget_bytes: int) -> Schedule:
    """Find the fastest persistent schedule with a simulated peak within the budget.

    Persistent means that a kept value stays until its backward. Time[s, t](m) is the least time for
    stages s to t with m bytes beyond x_s. It is the smaller of two options: keep all of stage s and
    run s+1 to t with `saved_bytes` less; or run from x_s to some x_e, keep it, run e to t with
    x_e's bytes less, and then run s to e-1 with m bytes.

    Time is a step function of m, with steps at sums of the chain's sizes. If there are at most as
    many of these sums as the table has levels (8,000,000 / L**2, but at least 500), the result is
    exact. Otherwise the levels are multiples of one size, and m is rounded down to a level at each
    step. The result is then still within the budget, but it may be slower than the best schedule,
    by what that little memory costs.

    Args:
        chain: L stages.
        budget_bytes: Limit of everything that `simulate` counts.

    Raises:
        InfeasibleBudget: No schedule fits; the message gives the smallest feasible budget, exactly.
        TypeError, ValueError: An argument has the wrong type or value.

    Source: Beaumont et al., arXiv:1911.13214, theorem 1.
    """
    fastest = store_all(chain)
    if simulate(fastest, chain).peak_bytes <= whole("budget_bytes", budget_bytes, of="bytes"):
        return fastest
    table = _Table(chain, budget_bytes - chain.input_bytes)
    least_bytes = chain.input_bytes + int(table.need[0, -1])
    if budget_bytes < least_bytes:
        raise InfeasibleBudget(
            budget_bytes, least_bytes, f"this chain needs at least {least_bytes}"
        )
    return table.schedule(budget_bytes - chain.input_bytes)


def frontier(chain: Chain) -> list[Cost]:
    """Find all non-dominated costs of persistent schedules, from the least peak to the least time.

    A cost is non-dominated if no other one is at least as good in both peak and time. The result is
    exact under the same condition as in `optimal`. Otherwise every cost still belongs to a schedule
    and the first still has the least peak, but some costs may be missing.

    Args:
        chain: L stages.

    Returns:
        Costs with rising `peak_bytes` and falling `time`; the last one has the time of `store_all`.
    """
    fastest = simulate(store_all(chain), chain)
    table = _Table(chain, fastest.peak_bytes - chain.input_bytes)
    times = table.time[0, -1, :-1]
    steps = table.levels[times < np.append(np.inf, times[:-1])]
    budgets = [int(table.need[0, -1]), *map(int, steps)]
    costs = {simulate(table.schedule(budget), chain) for budget in budgets} | {fastest}
    found: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (cost.peak_bytes, cost.time, cost.forward_steps)):
        if not found or cost.time < found[-1].time:
            found.append(cost)
    return found


class _Table:
    """Tables of the dynamic program.

    need[s, t] is the least number of bytes beyond x_s for stages s to t, exactly. time[s, t, k] is
    the least time with levels[k] bytes. The last column of `time` is infinite, so index -1 means
    fewer bytes than the first level.
    """

    def __init__(self, chain: Chain, most_bytes: int):
        self.sizes = Sizes(chain)
        length = len(chain)
        self.levels = _levels(self.sizes, most_bytes)
        self.need = np.full((length, length), MANY)
        self.time = np.empty((length, length, len(self.levels) + 1))
        self.room = np.empty((length, len(self.levels) + 1))
        after_value, self.after_saved = (
            np.array([self.at(np.append(self.levels, -1) - size) for size in kind])
            for kind in (self.sizes.values, self.sizes.saved)
        )
        for t in range(length):
            # right[e]: time to run from x_0 to x_e, keep x_e, and run e to t
            right = np.empty_like(self.room)
            for s in reversed(range(t + 1)):
                self.fill(s, t, right)
                np.add(self.time[s, t, after_value[s]], self.sizes.elapsed[s], out=right[s])

    def at(self, count: np.ndarray) -> np.ndarray:
        """Return the index of the largest level that is at most `count` bytes; -1 if none is."""
        return np.searchsorted(self.levels, count, side="right") - 1

    def needs(self, s: int, t: int) -> np.ndarray:
        """Return the least bytes beyond x_s for each way to begin.

        The first is to keep all of stage s; the others are to run on to x_e, for e = s+1 to t.
        """
        sizes = self.sizes
        needed = np.empty(t - s + 1, dtype=np.int64)
        needed[0] = max(sizes.gradient[t] + sizes.forward[s], sizes.backward[s])
        if s < t:
            needed[0] = max(needed[0], sizes.saved[s] + self.need[s + 1, t])
            right = self.need[s + 1 : t + 1, t] + sizes.values[s + 1 : t + 1]
            running = sizes.gradient[t] + sizes.through[s, s + 1 : t + 1]
            needed[1:] = np.maximum(np.maximum(self.need[s, s:t], right), running)
        return needed

    def fill(self, s: int, t: int, right: np.ndarray) -> None:
        needed = self.needs(s, t)
        best = self.time[s, t]
        self.need[s, t] = needed.min()
        if s < t:
            total = np.add(self.time[s, s:t], right[s + 1 : t + 1], out=self.room[: t - s])
            reached = np.maximum(
                self.need[s, s:t], self.need[s + 1 : t + 1, t] + self.sizes.values[s + 1 : t + 1]
            )
            # exclude levels at which running to x_e does not fit, though both parts do
            for e in np.flatnonzero(needed[1:] > reached):
                total[e, : np.searchsorted(self.levels, needed[e + 1])] = np.inf
            np.minimum.reduce(total, axis=0, out=best)
            best -= self.sizes.elapsed[s]
            keep = self.time[s + 1, t, self.after_saved[s]]
            keep += self.sizes.own_time[s]
        else:
            best.fill(np.inf)
            keep = np.full_like(best, self.sizes.own_time[s])
        first = np.searchsorted(self.levels, needed[0])
        np.minimum(best[first:-1], keep[first:-1], out=best[first:-1])

    def schedule(self, budget: int) -> Schedule:
        """Return the schedule that the table holds for `budget` bytes beyond x_0."""
        actions: list[Action] = []
        waiting: list[Backward | tuple[int, int, int]] = [(0, self.sizes.length - 1, budget)]
        while waiting:  # a stack instead of recursion, since chains may be long
            following = waiting.pop()
            if isinstance(following, Backward):
                actions.append(following)
                continue
            s, t, m = following
            e = s + self.choice(s, t, m)
            if e > s:
                actions += advance(s, e)
                waiting += [(s, e - 1, m), (e, t, m - int(self.sizes.values[e]))]
            else:
                actions.append(Forward(s, "all"))
                waiting.append(Backward(s))
                if s < t:
                    waiting.append((s + 1, t, m - int(self.sizes.saved[s])))
        return Schedule(actions)

    def choice(self, s: int, t: int, m: int) -> int:
        """Return how many stages to run ahead with m bytes, or 0 to keep all of stage s."""
        sizes = self.sizes
        needed = self.needs(s, t)
        ends = np.arange(s + 1, t + 1)
        times = np.empty(len(needed))
        times[0] = sizes.own_time[s]
        if s < t:
            times[0] += self.time[s + 1, t, self.at(m - sizes.saved[s])]
            times[1:] = (
                self.time[ends, t, self.at(m - sizes.values[ends])] + self.time[s, s:t, self.at(m)]
            )
            times[1:] += sizes.elapsed[ends] - sizes.elapsed[s]
        times[needed > m] = np.inf
        # The levels may be too coarse to find a finite time, but the choice that needs least always
        # fits.
        return int(times.argmin() if np.isfinite(times.min()) else needed.argmin())


def _levels(sizes: Sizes, most: int) -> np.ndarray:
    """Return all byte counts up to `most` at which a least time may change.

    If there are too many, return equal steps up to `most`.
    """
    limit = max(LEAST_LEVELS, CELLS // sizes.length**2)
    gradients, through = np.unique(sizes.gradient), np.unique(sizes.through[sizes.through > 0])
    ends = np.maximum(sizes.forward[:, None] + gradients, sizes.backward[:, None])
    levels = np.append(ends, through[:, None] + gradients)
    for i in range(sizes.length):
        levels = np.unique(levels[levels <= most])
        if len(levels) > limit:
            least = -(-most // limit)
            kept = np.append(sizes.values, sizes.saved)
            steps = np.linspace(least, 2 * least, 100).astype(np.int64)
            # the step size for which rounding loses least
            step = min(steps, key=lambda step: np.sum(-kept % step))
            return np.arange(most % step, most + 1, step)
        if i > 0:  # x_i may be kept, by itself or as a part of all that stage i-1 saved
            levels = np.concatenate([levels, levels + sizes.values[i], levels + sizes.saved[i - 1]])
    return np.unique(levels[levels <= most])
