"""Measurements and figures of lesson 03: sweeps of segments, and schedules."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from course_lib.labels import join_labels
from course_lib.memory import MemoryMeter, symbolic
from course_lib.schedule import COLORS as KEEP_COLORS
from course_lib.schedule import Chain, Schedule, simulate, store_all
from course_lib.schedule.actions import Simulation
from course_lib.teaching import COLORS, figure, text
from course_lib.teaching.figures import shown_once

from .cuts import A, B

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    "all": "runs and keeps all",
    "input": "keeps its input",
    "nothing": "keeps nothing",
    "backward": "runs backward",
}


def draw_sweep(depth: int, measured: Mapping[int, int], marked: Sequence[int]) -> "Figure":
    """Draw the smooth rule and the measured peaks over the number of segments.

    Args:
        depth: L.
        measured: Number of segments -> peak in bytes.
        marked: Two numbers of segments to label, before and after the jump.
    """
    description = [
        text("k = {k}: {peak} B", k=k, peak=f"{peak / B:.0f}") for k, peak in measured.items()
    ]
    alt = text("Measured peaks by the number of segments: {peaks}.", peaks=join_labels(description))
    drawn, ax = figure("From 50 to 51 segments the peak nearly triples", height=3.6, alt=alt)
    _sweep(ax, depth, measured)
    before, after = marked
    ax.annotate(
        "", (after, measured[after] / B), xytext=(before, measured[before] / B),
        arrowprops={"arrowstyle": "->", "color": "#222222"},
    )  # fmt: skip
    for k, lower in ((before, -9), (after, 0)):
        ax.annotate(
            text("k = {k}: {peak} B", k=k, peak=f"{measured[k] / B:.0f}"), (k, measured[k] / B),
            xytext=(9, lower), textcoords="offset points", va="center",
        )  # fmt: skip
    ax.legend()
    drawn.course_larger = 1.15  # the words at k = 51 are next to the legend
    return shown_once(drawn)


def draw_sweeps(
    sweeps: Mapping[int, Mapping[int, int]], predicted: Callable[[int, int], int]
) -> "Figure":
    """Draw the same for several depths, with the reader's prediction for each k as a dot."""
    title = "The zigzag is the same at every depth, as predicted"
    drawn, axes = figure(title, columns=len(sweeps), width=8.2, height=3.2)
    for ax, (depth, measured) in zip(axes, sweeps.items(), strict=True):
        ks = range(1, depth + 1)
        peaks = [predicted(depth, k) / B for k in ks]
        ax.plot(
            ks,
            peaks,
            ".",
            color=COLORS["predicted"],
            alpha=0.6,
            markersize=3,
            label=text("predicted"),
        )
        _points(ax, measured)
        ax.set(title=f"L = {depth}", xlim=(0, depth + 1), ylim=(0, None), xlabel=text("segments k"))
    axes[0].set_ylabel(text("peak (units of B)"))
    axes[0].legend()
    return shown_once(drawn)


def _sweep(ax: "Axes", depth: int, measured: Mapping[int, int]) -> None:
    ks = range(1, depth + 1)
    rule = [(k * B + depth / k * A + B) / B for k in ks]
    ax.plot(
        ks, rule, color=COLORS["predicted"], alpha=0.6, label=text("the rule, k·B + (L/k)·A + B")
    )
    _points(ax, measured)
    ax.set(
        xlim=(0, depth + 1),
        ylim=(0, 2.1 * depth),
        xlabel=text("segments k"),
        ylabel=text("peak (units of B)"),
    )


def _points(ax: "Axes", measured: Mapping[int, int]) -> None:
    ax.plot(
        list(measured),
        [peak / B for peak in measured.values()],
        ".",
        color=COLORS["measured"],
        label=text("measured"),
    )


def peak_and_flops(
    run: Callable[[nn.Module, Any, Tensor], Tensor], layers: nn.Module, how: Any
) -> tuple[int, int]:
    """Return (peak in bytes, FLOPs) of `run(layers, how, x)` and its backward.

    The convention is that of section 3.1: the gradients of the weights exist from the start, and x,
    1000 x 25 numbers, is created under the meter and counts. The output is weighted unevenly, so
    that its gradient is a full tensor and not a single expanded number.
    """
    weights = torch.linspace(-1, 2, 25_000).view(1000, 25)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryMeter() as meter:
        x = torch.linspace(-1, 1, 25_000).view(1000, 25)
        (run(layers, how, x) * weights).sum().backward()
    return meter.peak_bytes, meter.flops


def gradients(
    run: Callable[[nn.Module, Any, Tensor], Tensor], layers: nn.Module, how: Any, x: Tensor
) -> list[Tensor | None]:
    """Return the gradients of `run(layers, how, x)`, with an output that is weighted unevenly."""
    layers.zero_grad()
    output = run(layers, how, x)
    weights = torch.linspace(-1, 2, output.numel()).view_as(output)
    (output * weights).sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


def equal_gradients(
    layers: nn.Module, x: Tensor, first: tuple[Callable, Any], second: tuple[Callable, Any]
) -> bool:
    """Return whether two ways, each `(run, how)` of `gradients`, give exactly the same ones."""
    one, other = (gradients(run, layers, how, x) for run, how in (first, second))
    return all(map(torch.equal, one, other))


def cost_of(
    make: Callable[..., tuple[nn.Module, Tensor]],
    run: Callable[..., Tensor],
    how: Any,
    **changes: Any,
) -> tuple[int, int]:
    """Return (peak in bytes, FLOPs) of `run(stages, how, x)` and its backward, on symbolic tensors.

    Gradients exist from the start, and x counts.

    Args:
        make: Function that returns stages that end in a loss, and their input x.
        run: Function that runs the stages according to `how`.
        how: Cuts or a schedule, for example.
        changes: Arguments of `make`.
    """
    with symbolic():
        stages, x = make(**changes)
        for parameter in stages.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with MemoryMeter() as meter:
            run(stages, how, x).backward()
    return meter.peak_bytes + x.nbytes, meter.flops


def draw_rooms(cuts: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw what is live while each segment is worked on.

    There is one panel per cut, one column per segment, and one box per layer, on top of the inputs.

    Args:
        cuts: Label -> cuts of equal layers that save A bytes each, with B bytes at a boundary.
    """
    title = (
        "Each later segment has one more input next to it, so with fewer layers it reaches"
        " the same height"
    )
    drawn, axes = figure(title, columns=len(cuts), height=3.4, sharey=True)
    description = []
    for ax, (name, places) in zip(axes, cuts.items(), strict=True):
        sizes = [end - start for start, end in pairwise(places)]
        peak = max(j + 2 + size * A // B for j, size in enumerate(sizes))
        for j, size in enumerate(sizes):
            layers = range(size)
            ax.bar(
                j,
                j + 2,
                0.84,
                color=COLORS["input"],
                label=text("inputs and a gradient") if j == 0 else None,
            )
            ax.bar(
                [j] * size,
                A / B,
                0.84,
                [j + 2 + A / B * layer for layer in layers],
                color=COLORS["activation"],
                edgecolor="white",
                linewidth=0.6,
                label=text("one layer") if j == 0 else None,
            )
        ax.axhline(peak, color=COLORS["predicted"], linewidth=1, linestyle="--")
        head = text("{name}: peak {peak} B", name=text(name), peak=peak)
        description.append(head)
        ax.set_title(head)
        ax.set(xticks=[], xlabel=text("segments, from first to last"))
    axes[0].set_ylabel(text("live (units of B)"))
    axes[-1].legend(loc="upper right")
    drawn.course_larger = 1.15  # the legend is above the columns
    drawn.course_alt = text(
        "One column per segment, one box per layer. {peaks}.", peaks=join_labels(description, "; ")
    )
    return shown_once(drawn)


# Schedules
# --------------------------------------------------------------------------------------------------


def schedule_pictures(
    schedules: Mapping[str, Schedule],
    chain: Chain,
    *,
    title: str | None = None,
    unit: str = "MB",
    scale: float = 1e6,
    panel_height: float = 1.6,
    rows: Sequence[str] | None = None,
) -> "Figure":
    """Draw schedules for one chain next to each other on one scale, with their bytes below.

    Time is on the x axis and stages are on the y axis.

    Args:
        schedules: Label -> schedule.
        chain: Chain of the schedules; times are drawn in units of its `store_all`.
        unit, scale: Unit of the bytes, and number of bytes per unit.
        rows: One letter per stage, written at its row.

    Returns:
        The figure; each pair of panels has the label, the peak and the time as its title.
    """
    fastest = simulate(store_all(chain), chain).time
    costs = {name: simulate(schedule, chain) for name, schedule in schedules.items()}
    longest, most = (
        max(cost.time for cost in costs.values()),
        max(cost.peak_bytes for cost in costs.values()),
    )
    count = len(schedules)
    wide, height = (7.2 if count < 3 else 8.2), panel_height + 2.0
    drawn, _ = figure(title, rows=2, columns=count, width=wide, height=height, sharex=True)
    axes = drawn.axes  # first the schedules, then their bytes
    axes[0].get_gridspec().set_height_ratios([panel_height, 0.6])
    description = []
    for (name, schedule), above, below in zip(
        schedules.items(), axes[:count], axes[count:], strict=True
    ):
        schedule.plot(above, chain=chain)
        above.get_legend().remove()
        cost = costs[name]
        values = {
            "peak": f"{cost.peak_bytes / scale:.4g}",
            "unit": unit,
            "time": f"{cost.time / fastest:.2f}",
        }
        head = text("{name} · {peak} {unit} · {time} ×", name=text(name), **values)
        description.append(head)
        above.set_title(head, fontsize=9)
        above.set(xlabel="", ylabel=text("stage") if above is axes[0] else "", xlim=(0, longest))
        above.grid(visible=False)
        if rows is not None:
            above.set_yticks(range(len(chain)), rows, fontsize=7)
        _draw_bytes(below, schedule, chain, most, scale)
        below.set_xlabel(text("time (a step that stores all = 1)"), fontsize=8.5)
    axes[count].set_ylabel(unit)
    ticks = [fastest * i / 2 for i in range(int(2 * longest / fastest) + 1)]
    axes[-1].set_xticks(ticks, [f"{tick / fastest:g}" for tick in ticks])
    _legend(drawn)
    drawn.course_alt = text(
        "The actions of each schedule, with time on the x axis and stages on the y axis, and"
        " what is kept meanwhile. Under each of them, the live bytes. Peak and time: {costs}.",
        costs=join_labels(description, "; "),
    )
    return shown_once(drawn)


def live_bytes(schedule: Schedule, chain: Chain) -> list[tuple[float, float, int]]:
    """Return (start, end, live bytes) for each action of a schedule.

    Times are in the chain's unit. The largest number of bytes is the `peak_bytes` of `simulate`.
    """
    simulation = Simulation(chain)
    counts = []
    for action in schedule:
        simulation.run_action(action)
        counts.append(simulation.during_bytes)
    edges = pairwise(accumulate(simulation.times, initial=0.0))
    return [(*edge, count) for edge, count in zip(edges, counts, strict=True)]


def _draw_bytes(ax: "Axes", schedule: Schedule, chain: Chain, most: int, scale: float) -> None:
    """Draw the bytes that are live during each action, with the peak marked."""
    spans = live_bytes(schedule, chain)
    edges = [start for start, _, _ in spans] + [spans[-1][1]]
    heights = [count / scale for _, _, count in spans]
    ax.stairs(heights, edges, fill=True, color="#888888", alpha=0.35)
    ax.stairs(heights, edges, baseline=None, color="#444444", linewidth=0.8)
    start, end, peak = max(spans, key=lambda span: span[2])
    ax.plot([(start + end) / 2], [peak / scale], "o", color="#222222", markersize=4, clip_on=False)
    ax.set(ylim=(0, 1.1 * most / scale))
    ax.set_yticks([0, round(peak / scale)])


def _legend(drawn: "Figure") -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=KEEP_COLORS[kind], label=text(words)) for kind, words in _NAMES.items()]
    handles += [Patch(color=KEEP_COLORS["all"], alpha=0.25, label=text("all is kept"))]
    handles += [Patch(color=KEEP_COLORS["input"], alpha=0.35, label=text("the input is kept"))]
    handles += [
        Patch(
            color=_blend(KEEP_COLORS["input"], 0.35, _blend(KEEP_COLORS["all"], 0.25)),
            label=text("both are kept"),
        )
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def _blend(color: str, alpha: float, below: Sequence[float] = (1, 1, 1)) -> tuple[float, ...]:
    """Return a transparent color on top of another one, by default white."""
    from matplotlib.colors import to_rgb

    return tuple(
        alpha * above + (1 - alpha) * under
        for above, under in zip(to_rgb(color), below, strict=True)
    )
