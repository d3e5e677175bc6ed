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
from course_lib.teaching import COLORS, Table, claims, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import arrow, label_axes, note, points

from .claims import CLAIMS
from .exercises import A, B

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
    """Draw a network's predicted and measured peaks against its number of checkpointed segments.

    Predictions are computed by the formula k·B + (L/k)·A + B, in which k is the number of segments
    and L the number of layers. A layer saves A bytes for backward, and its input has B bytes.

    Args:
        depth: Number of layers, L.
        measured: Dict from the number of segments to the peak in bytes.
        marked: Two numbers of segments whose points are labeled and connected by an arrow.
    """
    peaks = {k: text("k = {k}: {peak} B", k=k, peak=f"{p / B:.0f}") for k, p in measured.items()}
    alt = text(
        "Measured peaks by the number of segments: {peaks}.", peaks=join_labels(peaks.values())
    )
    drawn, ax = figure("From 50 to 51 segments the peak nearly triples", height=3.6, alt=alt)
    rule = {k: (k * B + depth / k * A + B) / B for k in range(1, depth + 1)}
    look = {"color": COLORS["predicted"], "alpha": 0.6}
    points(ax, rule, "-", label=text("the rule, k·B + (L/k)·A + B"), **look)
    points(ax, measured, ".", unit=B, label=text("measured"))
    before, after = ((k, measured[k] / B) for k in marked)
    arrow(ax, before, after)
    note(ax, peaks[marked[0]], before, (9, -9))
    note(ax, peaks[marked[1]], after, (9, 0))
    label_axes(ax, "segments k", "peak (units of B)", xlim=(0, depth + 1), ylim=(0, 2.1 * depth))
    ax.legend()
    drawn.course_larger = 1.15  # the words at k = 51 are next to the legend
    return shown_once(drawn)


def draw_sweeps(
    sweeps: Mapping[int, Mapping[int, int]], predicted: Callable[[int, int], int]
) -> "Figure":
    """Draw predicted and measured peaks against the number of segments, for several depths.

    There is one panel per depth, which is the number of layers.

    Args:
        sweeps: Dict from the number of layers to a dict from the number of checkpointed segments to
            the measured peak in bytes.
        predicted: Function of the number of layers and the number of segments that returns the peak
            in bytes.
    """
    title = "The zigzag is the same at every depth, as predicted"
    drawn, axes = figure(title, columns=len(sweeps), width=8.2, height=3.2)
    look = {"color": COLORS["predicted"], "alpha": 0.6, "markersize": 3}
    for ax, (depth, measured) in zip(axes, sweeps.items(), strict=True):
        peaks = {k: predicted(depth, k) for k in range(1, depth + 1)}
        points(ax, peaks, ".", unit=B, label=text("predicted"), **look)
        points(ax, measured, ".", unit=B, label=text("measured"))
        label_axes(ax, "segments k", title=f"L = {depth}", xlim=(0, depth + 1), ylim=(0, None))
    axes[0].set_ylabel(text("peak (units of B)"))
    axes[0].legend()
    return shown_once(drawn)


def peak_and_flops(
    run: Callable[[nn.Module, Any, Tensor], Tensor], layers: nn.Module, how: Any
) -> tuple[int, int]:
    """Return the peak in bytes and the FLOPs of a forward and backward pass.

    Gradients of the weights are allocated before the forward pass. The input x has the shape (1000,
    25), and its bytes are part of the peak. The gradient of the output is not an expanded scalar,
    so it needs as many bytes as the output.

    Args:
        run: Function that runs the layers, `run(layers, how, x)`.
        layers: The layers.
        how: Argument that is passed to `run`, such as the number of segments.
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
    """Run layers forward and backward, and return the gradients of all parameters.

    The loss is a weighted sum of the output's elements, whose weights all differ.

    Args:
        run: Function that runs the layers, `run(layers, how, x)`.
        layers, how, x: Arguments that are passed to `run`. `how` is, for example, the number of
            segments.
    """
    layers.zero_grad()
    output = run(layers, how, x)
    weights = torch.linspace(-1, 2, output.numel()).view_as(output)
    (output * weights).sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


def equal_gradients(
    layers: nn.Module, x: Tensor, first: tuple[Callable, Any], second: tuple[Callable, Any]
) -> bool:
    """Return whether two ways to run the same layers give exactly the same gradients.

    Args:
        layers, x: Layers and their input.
        first, second: Pairs (run, how), for the two calls `run(layers, how, x)`.
    """
    one, other = (gradients(run, layers, how, x) for run, how in (first, second))
    return all(map(torch.equal, one, other))


def cost_of(
    make: Callable[..., tuple[nn.Module, Tensor]],
    run: Callable[..., Tensor],
    how: Any,
    **changes: Any,
) -> tuple[int, int]:
    """Return the peak in bytes and the FLOPs of a forward and backward pass on symbolic tensors.

    Gradients are allocated before the forward pass. The bytes of the input x are part of the peak.

    Args:
        make: Function that returns a pair: stages that end in a loss, and their input x.
        run: Function that runs the stages, `run(stages, how, x)`.
        how: Argument that is passed to `run`, such as a schedule.
        changes: Arguments of `make`.
    """
    with symbolic():
        stages, x = make(**changes)
        for parameter in stages.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with MemoryMeter() as meter:
            run(stages, how, x).backward()
    return meter.peak_bytes + x.nbytes, meter.flops


def draw_budgets(cuts: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw the tensors that are live while each checkpointed segment runs backward.

    There is one panel for each way to cut the layers into segments, and one column per segment. A
    column has one box for the inputs of segments together with a gradient, and above it one box for
    each layer of the segment.

    Args:
        cuts: Dict from a label to the boundaries of the segments as layer indices, such as
            [0, 40, 70, 100] for 100 layers.
    """
    title = (
        "Each later segment has one more input next to it, so with fewer layers it reaches"
        " the same height"
    )
    drawn, axes = figure(title, columns=len(cuts), height=3.4, sharey=True)
    layer = A / B
    heads = []
    for ax, (name, places) in zip(axes, cuts.items(), strict=True):
        sizes = [end - start for start, end in pairwise(places)]
        peak = max(j + 2 + size * A // B for j, size in enumerate(sizes))
        for j, size in enumerate(sizes):
            names = ("inputs and a gradient", "one layer") if j == 0 else ("_", "_")
            ax.bar(j, j + 2, 0.84, color=COLORS["input"], label=text(names[0]))
            bottoms = [j + 2 + layer * n for n in range(size)]
            look = {"color": COLORS["activation"], "edgecolor": "white", "linewidth": 0.6}
            ax.bar([j] * size, layer, 0.84, bottoms, label=text(names[1]), **look)
        ax.axhline(peak, color=COLORS["predicted"], linewidth=1, linestyle="--")
        heads.append(text("{name}: peak {peak} B", name=name, peak=peak))
        label_axes(ax, "segments, from first to last", title=heads[-1], xticks=[])
    axes[0].set_ylabel(text("live (units of B)"))
    axes[-1].legend(loc="upper right")
    drawn.course_larger = 1.15  # the legend is above the columns
    alt = "One column per segment, one box per layer. {peaks}."
    drawn.course_alt = text(alt, peaks=join_labels(heads, "; "))
    return shown_once(drawn)


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
    """Draw several schedules for the same chain of stages, with time on the x axis.

    The upper panel of each schedule has its actions, with stages on the y axis. The lower panel has
    the live bytes.

    Args:
        schedules: Dict from a label to a schedule.
        chain: Chain of the schedules. Times are drawn relative to the time of a step that stores
            all tensors.
        title: Title of the figure.
        unit, scale: Unit of the bytes, and number of bytes per unit.
        panel_height: Height of the upper panels in inches.
        rows: One letter per stage, which replaces the number of the stage on the y axis.

    Returns:
        The figure. The title of each upper panel has the label, the peak and the time.
    """
    fastest = simulate(store_all(chain), chain).time
    costs = [simulate(schedule, chain) for schedule in schedules.values()]
    longest, most = max(cost.time for cost in costs), max(cost.peak_bytes for cost in costs)
    count = len(schedules)
    wide, height = (7.2 if count < 3 else 8.2), panel_height + 2.0
    drawn, axes = figure(title, rows=2, columns=count, width=wide, height=height, sharex=True)
    axes = axes.reshape(2, count)  # first the schedules, then their bytes
    axes[0, 0].get_gridspec().set_height_ratios([panel_height, 0.6])
    heads = []
    for (name, schedule), cost, (above, below) in zip(
        schedules.items(), costs, axes.T, strict=True
    ):
        schedule.plot(above, chain=chain)
        above.get_legend().remove()
        values = {"peak": f"{cost.peak_bytes / scale:.4g}", "time": f"{cost.time / fastest:.2f}"}
        heads.append(text("{name} · {peak} {unit} · {time} ×", name=name, unit=unit, **values))
        above.set_title(heads[-1], fontsize=9)
        above.set(xlabel="", ylabel="", xlim=(0, longest))
        above.grid(visible=False)
        if rows is not None:
            above.set_yticks(range(len(chain)), rows, fontsize=7)
        _draw_bytes(below, schedule, chain, scale)
        below.set_ylim(0, 1.1 * most / scale)
        below.set_xlabel(text("time (a step that stores all = 1)"), fontsize=8.5)
    axes[0, 0].set_ylabel(text("stage"))
    axes[1, 0].set_ylabel(unit)
    ticks = [fastest * i / 2 for i in range(int(2 * longest / fastest) + 1)]
    axes[-1, -1].set_xticks(ticks, [f"{tick / fastest:g}" for tick in ticks])
    _legend(drawn)
    drawn.course_alt = text(
        "The actions of each schedule, with time on the x axis and stages on the y axis, and"
        " what is kept meanwhile. Under each of them, the live bytes. Peak and time: {costs}.",
        costs=join_labels(heads, "; "),
    )
    return shown_once(drawn)


def live_bytes(schedule: Schedule, chain: Chain) -> list[tuple[float, float, int]]:
    """Simulate a schedule, and return a list of (start time, end time, live bytes) of its actions.

    Times are in the unit of the chain's stages. The largest number of bytes is the `peak_bytes`
    that `simulate` returns.
    """
    simulation = Simulation(chain)
    counts = []
    for action in schedule:
        simulation.run_action(action)
        counts.append(simulation.during_bytes)
    edges = pairwise(accumulate(simulation.times, initial=0.0))
    return [(*edge, count) for edge, count in zip(edges, counts, strict=True)]


def _draw_bytes(ax: "Axes", schedule: Schedule, chain: Chain, scale: float) -> None:
    """Draw the bytes that are live during each action, and mark the peak."""
    spans = live_bytes(schedule, chain)
    edges = [start for start, _, _ in spans] + [spans[-1][1]]
    heights = [count / scale for _, _, count in spans]
    ax.stairs(heights, edges, fill=True, color="#888888", alpha=0.35)
    ax.stairs(heights, edges, baseline=None, color="#444444", linewidth=0.8)
    start, end, peak = max(spans, key=lambda span: span[2])
    ax.plot([(start + end) / 2], [peak / scale], "o", color="#222222", markersize=4, clip_on=False)
    ax.set_yticks([0, round(peak / scale)])


def _legend(drawn: "Figure") -> None:
    """Add a legend for the colors of actions, and for the pale colors of kept tensors."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    kept = (
        {"alpha": 0.25, "color": KEEP_COLORS["all"]},
        {"alpha": 0.35, "color": KEEP_COLORS["input"]},
    )
    pale = zip(to_rgb(KEEP_COLORS["all"]), to_rgb(KEEP_COLORS["input"]), strict=True)
    both = [0.35 * above + 0.65 * (0.25 * under + 0.75) for under, above in pale]
    looks = {
        **{words: {"color": KEEP_COLORS[kind]} for kind, words in _NAMES.items()},
        "all is kept": kept[0],
        "the input is kept": kept[1],
        "both are kept": {"color": both},
    }
    handles = [Patch(label=text(words), **look) for words, look in looks.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def claims_table(
    peak: Callable[[Sequence[int]], int], tapered: Callable[[int], list[int]], groups: Sequence[int]
) -> Table:
    """Return a table of claims about checkpointed segments, each with the number that tests it.

    Args:
        peak: Function that returns the measured peak in bytes. Its argument is the boundaries of
            the segments as layer indices, such as [0, 40, 70, 100] for 100 layers.
        tapered: Function that takes the number of layers, and returns the boundaries of the
            segments with the lowest peak.
        groups: Peaks in bytes of a decoder, first with one layer per checkpoint, then with two.
    """
    shorter, equal, longer = (
        peak(cuts) // B for cuts in (tapered(25), range(0, 101, 10), tapered(100))
    )
    measured = " → ".join(f"{count / 1e6:.1f}" for count in groups)
    return claims.claims_table(
        CLAIMS, f"{shorter} B → {longer} B", f"{equal} B → {longer} B", f"{measured} MB"
    )
