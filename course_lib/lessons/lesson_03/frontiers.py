"""Pareto frontiers of lesson 03 and their plots: measured points, all cuts, and early stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from course_lib.labels import join_labels
from course_lib.schedule import Chain, Cost, frontier, simulate
from course_lib.schedule.rules import Sizes, segment_schedule
from course_lib.teaching import COLORS, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import background, clauses, label_axes, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EARLY = "#AA3377"  # color of lines and points with early stop


def best_cuts(chain: Chain) -> list[Cost]:
    """Return the costs of the best ways to cut a chain of stages into checkpointed segments.

    The last segment runs forward once, and the other segments run forward twice. The start of the
    last segment therefore determines the time.

    Returns:
        One cost for each possible start of the last segment. The other segments are chosen so that
        the peak is lowest.
    """
    sizes, length = Sizes(chain), len(chain)

    @cache
    def own_bytes(start: int, end: int) -> int:  # bytes that a segment needs beyond its input
        most, before = (sizes.through[start, end] if end < length else 0), 0
        for i in range(start, end):
            forward = before + sizes.forward[i] + sizes.gradient[end - 1]
            most, before = max(most, forward, before + sizes.backward[i]), before + sizes.saved[i]
        return most

    @cache
    def least(start: int, last: int) -> tuple[int, tuple[int, ...]]:
        if start == last:
            return own_bytes(start, length), (length,)
        ways = []
        for end in range(start + 1, last + 1):
            rest, cuts = least(end, last)
            ways.append((max(own_bytes(start, end), sizes.values[end] + rest), (end, *cuts)))
        return min(ways)

    return [simulate(segment_schedule([0, *least(0, last)[1]]), chain) for last in range(length)]


def frontier_with_early_stop(
    chain: Chain, left_out: Sequence[float], step_bytes: int = 1 << 19
) -> list[Cost]:
    """Return the Pareto frontier of peak and time if recomputations stop early, as in PyTorch.

    A recomputation stops before the last matrix product of its segment, because backward does not
    need the result. When stages i to j are recomputed, stage j takes `left_out[j]` less time, and
    its output is not created.

    Args:
        chain: Chain of stages.
        left_out: Time that stopping early saves, per stage. It is 0 for a stage that does not end
            with a matrix product.
        step_bytes: Distance in bytes between the budgets that are tried. The first budget is the
            lowest peak without early stop.

    Returns:
        One cost for each budget at which a schedule is faster than at all smaller budgets. The last
        cost has the time of a step that stores all tensors. In each cost, `peak_bytes` is the
        budget, and `forward_steps` is 0, because forward steps are not counted.
    """
    stopped = [
        replace(
            stage,
            forward_time=stage.forward_time - time,
            saved_bytes=max(
                stage.saved_bytes - (time > 0) * stage.output_bytes, stage.output_bytes
            ),
        )
        for stage, time in zip(chain.stages, left_out, strict=True)
    ]
    whole = frontier(chain)
    budgets = [*range(whole[0].peak_bytes, whole[-1].peak_bytes, step_bytes), whole[-1].peak_bytes]
    stages, end, sizes = chain.stages, len(chain) - 1, Sizes(chain)

    @cache
    def fastest(i: int, j: int, room: int) -> float:
        first = stopped[i] if i == j < end else stages[i]
        gradient, best = int(sizes.gradient[j]), math.inf
        forward = first.saved_bytes + first.forward_overhead_bytes + gradient
        backward = first.saved_bytes + first.output_bytes + first.backward_overhead_bytes
        if max(forward, backward) <= room:
            later = fastest(i + 1, j, room - first.saved_bytes) if i < j else 0
            best = first.forward_time + later + first.backward_time
        ahead = 0.0
        for e in range(i + 1, j + 1):
            ahead += stages[e - 1].forward_time
            if sizes.through[i, e] + gradient <= room:
                later = fastest(e, j, room - stages[e - 1].output_bytes)
                best = min(best, ahead + later + fastest(i, e - 1, room))
        return best

    found: list[Cost] = []
    for budget in budgets:
        time = fastest(0, end, budget - chain.input_bytes)
        if time < (found[-1].time if found else math.inf):
            found.append(Cost(budget, time, 0))
    return found


def draw_cuts(chains: Mapping[str, Chain]) -> "Figure":
    """Draw the best ways to cut a chain into segments, and the chain's Pareto frontier.

    There is one panel per chain, with peaks on the x axis and times on the y axis.

    Args:
        chains: Dict from a label to a chain of stages.
    """
    title = "Good cuts come close to the frontier of the decoder, but not of the pyramid"
    drawn, axes = figure(title, columns=len(chains), width=8.2, height=3.6, sharey=True)
    rows = []
    for ax, (name, chain) in zip(axes, chains.items(), strict=True):
        line = frontier(chain)
        (across, up), (peaks, times) = (
            _peaks_and_times(each, line[-1]) for each in (line, best_cuts(chain))
        )
        ax.step(across, up, where="post", color=COLORS["predicted"], label=text("frontier"))
        ax.plot(peaks, times, "s", color="#4477AA", markersize=4, label=text("best cuts"))
        label_axes(ax, "peak (MB)", xlim=(0, None), ylim=(0.98, 1.36))
        ax.set_title(text(name), fontsize=9)
        row = {"least": f"{min(peaks):.1f}", "line": f"{across[0]:.1f}", "times": f"{up[0]:.2f}"}
        rows.append({"name": name, **row})
    axes[0].set_ylabel(text("time (× baseline)"))
    axes[0].legend()
    alt = "{name}: cuts reach {least} MB, the frontier {line} MB at {times} times the time"
    drawn.course_alt = clauses(alt, rows)
    return shown_once(drawn)


def _peaks_and_times(
    points: Sequence[Cost], baseline: Cost
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the points' peaks in MB, and their times relative to the baseline's time."""
    costs = ((point.peak_bytes / 1e6, point.time / baseline.time) for point in points)
    across, up = zip(*costs, strict=True)
    return across, up


def draw_frontier(
    title: str,
    lines: Mapping[str, Sequence[Cost]],
    variants: Mapping[str, tuple[Mapping, str, str]],
    *,
    xlim: tuple[float, float],
) -> "Figure":
    """Draw Pareto frontiers as lines and measured steps as points.

    Peaks are on the x axis and FLOPs on the y axis.

    Args:
        title: Title of the figure.
        lines: Dict from a label to the costs on a frontier, in which `time` is in FLOPs. The last
            cost of the first frontier is the baseline.
        variants: Dict from a label to (points, marker, color). `points` is a dict from a name to
            (peak in bytes, FLOPs). If the name is a string, it is written next to the point.
        xlim: Limits of the x axis in MB.
    """
    baseline = next(iter(lines.values()))[-1]
    drawn, ax = figure(title, height=4.0)
    alt = []
    for (name, line), color in zip(lines.items(), (COLORS["predicted"], EARLY), strict=False):
        across, up = _peaks_and_times(line, baseline)
        ax.step(across, up, where="post", color=color, label=text(name))
        ends = {"least": f"{across[0]:.1f}", "times": f"{up[0]:.2f}", "most": f"{across[-1]:.1f}"}
        words = "{name}: from {least} MB at {times} times the FLOPs to {most} MB at 1"
        alt.append(text(words, name=name, **ends))
    runs = [
        (name, word, color, (peak / 1e6, flops / baseline.time))
        for name, (costs, _, color) in variants.items()
        for word, (peak, flops) in costs.items()
    ]
    for name, (_, marker, color) in variants.items():
        across, up = zip(*(point for of, *_, point in runs if of == name), strict=True)
        ax.plot(across, up, marker, color=color, label=text(name))
    for name, word, color, (x, y) in runs:
        named = isinstance(word, str)
        values = {"peak": f"{x:.1f}", "times": f"{y:.3f}"}
        called = join_labels([name, word]) if named else name
        alt.append(text("{name}: {peak} MB, {times} times the FLOPs", name=called, **values))
        if named:
            crowded = any(0 < a - x < 10 and abs(b - y) < 0.05 for *_, (a, b) in runs)
            offset, side = ((-4, -12), "right") if crowded else ((6, 4), "left")
            look = {"ha": side, "va": "baseline", "fontsize": 8, "color": color}
            note(ax, word, (x, y), offset, bbox=background("white", 0.5) | {"alpha": 0.8}, **look)
    label_axes(ax, "peak (MB)", "FLOPs (× baseline)", xlim=xlim, ylim=(0.98, 1.72))
    ax.legend()
    drawn.course_alt = text("{points}.", points=join_labels(alt, "; "))
    return shown_once(drawn)
