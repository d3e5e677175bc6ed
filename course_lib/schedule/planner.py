"""Find the fastest schedule within a budget, and the Pareto frontier over all budgets.

This module computes schedules from the costs of all stages, by dynamic programming. In contrast,
the schedules in the module `rules` follow fixed rules.
"""

from __future__ import annotations

import numpy as np

from course_lib._check import InfeasibleBudget, whole

from .actions import Action, Backward, Cost, Forward, Schedule, simulate
from .chain import Chain
from .rules import INFINITE_BYTES, Sizes, advance, store_all

# The planner's table of times has one float64 for each pair of stages and each memory level (number
# of free bytes). The number of levels is limited so that there are at most about CELLS entries
# (64 MB). LEAST_LEVELS levels are always allowed, so a table for 200 stages may need 160 MB.
CELLS, LEAST_LEVELS = 8_000_000, 500


def optimal(chain: Chain, budget_bytes: int) -> Schedule:
    """Find the fastest persistent schedule with a simulated peak within the budget.

    A schedule is persistent if each value that it keeps stays in memory until the backward that
    needs this value has run. The method is dynamic programming. Stage i computes x_{i+1} from x_i.
    Let Time[s,t](m) be the least time in which the forwards and backwards of stages s to t can run
    with m bytes in addition to their input x_s. Time[s,t](m) is the time of the faster of two
    options:

    - Run the forward of stage s and keep everything that its backward needs. Then run stages s+1 to
      t with the remaining bytes, which are m minus the `saved_bytes` of stage s. Then run the
      backward of stage s.
    - Run the forwards from x_s to some x_e and keep x_e. Then run the forwards and backwards of
      stages e to t with the remaining bytes, which are m minus the bytes of x_e. Then run the
      forwards and backwards of stages s to e-1 with m bytes.

    As a function of m, Time changes only where m is a sum of sizes (in bytes) in the chain. A table
    stores Time for a limited number of values of m (levels): 8,000,000 / L**2, but at least 500. If
    all these sums are in the table, the result is exact. Otherwise the levels are evenly spaced,
    and m is rounded down to a level in each recursion. The result is then still within the budget,
    but it may be slower than the best schedule, because it does not use the bytes lost by rounding.

    Args:
        chain: A chain of L stages, with their times and bytes.
        budget_bytes: Largest `peak_bytes` that the schedule may have in `simulate`.

    Raises:
        InfeasibleBudget: No persistent schedule fits into the budget. The message gives the
            smallest budget for which there is a persistent schedule. This number is exact.
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
            budget_bytes, least_bytes, f"this chain needs at least {least_bytes} bytes"
        )
    return table.schedule(budget_bytes - chain.input_bytes)


def frontier(chain: Chain) -> list[Cost]:
    """Find the Pareto frontier of persistent schedules, from the least peak to the least time.

    A schedule is persistent if each value that it keeps stays in memory until the backward that
    needs this value has run. The cost of a schedule is on the frontier if every schedule with a
    lower peak takes more time, and every faster schedule has a higher peak.

    The result is exact if the table that `optimal` describes has room for all sums of sizes in the
    chain. Otherwise some costs may be missing. Every returned cost is that of an actual schedule,
    and the first cost has the least possible peak.

    Args:
        chain: A chain of L stages, with their times and bytes.

    Returns:
        Costs with increasing `peak_bytes` and decreasing `time`. The last one has the time of
        `store_all`.
    """
    fastest = simulate(store_all(chain), chain)
    table = _Table(chain, fastest.peak_bytes - chain.input_bytes)
    times = table.time[0, -1, :-1]
    steps = table.levels[times < np.append(np.inf, times[:-1])]
    budgets = [int(table.need[0, -1]), *map(int, steps)]
    costs = {simulate(table.schedule(budget), chain) for budget in budgets} | {fastest}
    costs_found: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (cost.peak_bytes, cost.time, cost.forward_steps)):
        if not costs_found or cost.time < costs_found[-1].time:
            costs_found.append(cost)
    return costs_found


class _Table:
    """Tables of the dynamic program that `optimal` describes.

    Args:
        chain: A chain of L stages.
        most_bytes: Largest budget, in addition to x_0, for which the table has a schedule.

    Attributes:
        levels: Numbers of bytes, in increasing order, for which times are stored.
        need: need[s, t] is the least number of bytes, in addition to x_s, with which stages s to t
            can run. It is exact.
        time: time[s, t, k] is the least time of stages s to t with levels[k] bytes in addition to
            x_s. time[s, t, -1] is infinite: index -1 stands for fewer bytes than the first level.
        after_saved: after_saved[s][k] is the index of the largest level that is at most levels[k]
            minus the bytes that stage s saves, or -1 if there is none.
    """

    def __init__(self, chain: Chain, most_bytes: int):
        self.sizes = Sizes(chain)
        length = len(chain)
        self.levels = _levels(self.sizes, most_bytes)
        self.need = np.full((length, length), INFINITE_BYTES)
        self.time = np.empty((length, length, len(self.levels) + 1))
        self.workspace = np.empty((length, len(self.levels) + 1))
        # after_value[s][k] is computed like after_saved[s][k], but subtracts the bytes of x_s
        # instead of the bytes that stage s saves.
        after_value, self.after_saved = (
            np.array([self.level_index(np.append(self.levels, -1) - size) for size in kind])
            for kind in (self.sizes.values, self.sizes.saved)
        )
        for t in range(length):
            # right[e] is the time of the forwards from x_0 to x_e, plus the least time of stages e
            # to t with x_e kept. The forwards start at x_0 instead of x_s, so that all s share
            # these sums. `fill_entry` subtracts the time from x_0 to x_s.
            right = np.empty_like(self.workspace)
            for s in reversed(range(t + 1)):
                self.fill_entry(s, t, right)
                np.add(self.time[s, t, after_value[s]], self.sizes.elapsed[s], out=right[s])

    def level_index(self, count: np.ndarray) -> np.ndarray:
        """For each number n in `count`, return the index of the largest level that is at most n.

        The index is -1 if all levels are larger than n.
        """
        return np.searchsorted(self.levels, count, side="right") - 1

    def least_bytes_per_option(self, s: int, t: int) -> np.ndarray:
        """Return how many bytes stages s to t need with each option, in addition to x_s.

        Option 0 is to keep everything that the backward of stage s needs. Option k is to run the
        forwards from x_s to x_{s+k} first, and keep x_{s+k}.
        """
        sizes = self.sizes
        option_bytes = np.empty(t - s + 1, dtype=np.int64)
        option_bytes[0] = max(sizes.gradient[t] + sizes.forward[s], sizes.backward[s])
        if s < t:
            option_bytes[0] = max(option_bytes[0], sizes.saved[s] + self.need[s + 1, t])
            right = self.need[s + 1 : t + 1, t] + sizes.values[s + 1 : t + 1]
            running = sizes.gradient[t] + sizes.through[s, s + 1 : t + 1]
            option_bytes[1:] = np.maximum(np.maximum(self.need[s, s:t], right), running)
        return option_bytes

    def fill_entry(self, s: int, t: int, right: np.ndarray) -> None:
        """Fill need[s, t] and time[s, t] from the entries of all shorter parts of the chain.

        Args:
            s, t: First and last stage of the part.
            right: right[e] has one time for each level (number of free bytes). It is the time of
                the forwards from x_0 to x_e, plus the least time of stages e to t with x_e kept.
        """
        option_bytes = self.least_bytes_per_option(s, t)
        best = self.time[s, t]
        self.need[s, t] = option_bytes.min()
        if s < t:
            total = np.add(self.time[s, s:t], right[s + 1 : t + 1], out=self.workspace[: t - s])
            parts_bytes = np.maximum(
                self.need[s, s:t], self.need[s + 1 : t + 1, t] + self.sizes.values[s + 1 : t + 1]
            )
            # Exclude levels with enough bytes for both parts, but too few for the forwards to x_e.
            for e in np.flatnonzero(option_bytes[1:] > parts_bytes):
                total[e, : np.searchsorted(self.levels, option_bytes[e + 1])] = np.inf
            np.minimum.reduce(total, axis=0, out=best)
            best -= self.sizes.elapsed[s]
            keep_all_time = self.time[s + 1, t, self.after_saved[s]]
            keep_all_time += self.sizes.own_time[s]
        else:
            best.fill(np.inf)
            keep_all_time = np.full_like(best, self.sizes.own_time[s])
        first_level = np.searchsorted(self.levels, option_bytes[0])
        np.minimum(best[first_level:-1], keep_all_time[first_level:-1], out=best[first_level:-1])

    def schedule(self, budget: int) -> Schedule:
        """Return the fastest schedule in the table for `budget` bytes in addition to x_0."""
        actions: list[Action] = []
        stack: list[Backward | tuple[int, int, int]] = [(0, self.sizes.length - 1, budget)]
        while stack:  # a stack replaces recursion, whose depth is limited
            item = stack.pop()
            if isinstance(item, Backward):
                actions.append(item)
                continue
            s, t, m = item
            e = s + self.best_option(s, t, m)
            if e > s:
                actions += advance(s, e)
                stack += [(s, e - 1, m), (e, t, m - int(self.sizes.values[e]))]
            else:
                actions.append(Forward(s, "all"))
                stack.append(Backward(s))
                if s < t:
                    stack.append((s + 1, t, m - int(self.sizes.saved[s])))
        return Schedule(actions)

    def best_option(self, s: int, t: int, m: int) -> int:
        """Return the number of the fastest option for stages s to t with m bytes.

        Options are numbered as in `least_bytes_per_option`.
        """
        sizes = self.sizes
        option_bytes = self.least_bytes_per_option(s, t)
        ends = np.arange(s + 1, t + 1)
        times = np.empty(len(option_bytes))
        times[0] = sizes.own_time[s]
        if s < t:
            times[0] += self.time[s + 1, t, self.level_index(m - sizes.saved[s])]
            times[1:] = (
                self.time[ends, t, self.level_index(m - sizes.values[ends])]
                + self.time[s, s:t, self.level_index(m)]
            )
            times[1:] += sizes.elapsed[ends] - sizes.elapsed[s]
        times[option_bytes > m] = np.inf
        # If the levels are too coarse, all times may be infinite. Then choose the option with the
        # least bytes, which always fits.
        return int(times.argmin() if np.isfinite(times.min()) else option_bytes.argmin())


def _levels(sizes: Sizes, most: int) -> np.ndarray:
    """Return the levels of the table: all numbers of bytes at which a least time may change.

    No level is larger than `most`. If there are too many such levels, evenly spaced levels are
    returned instead. The largest of them is `most`.
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
            # Choose the step size that loses the fewest bytes by rounding.
            step = min(steps, key=lambda step: np.sum(-kept % step))
            return np.arange(most % step, most + 1, step)
        if i > 0:  # x_i may be kept by itself, or as a part of what stage i-1 saved
            levels = np.concatenate([levels, levels + sizes.values[i], levels + sizes.saved[i - 1]])
    return np.unique(levels[levels <= most])
