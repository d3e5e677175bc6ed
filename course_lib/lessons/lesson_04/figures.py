"""Figures of lesson 04: tiers, lanes, the order of copies, times, pages and the threshold."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from course_lib.labels import join_labels
from course_lib.lessons.ledger import PARAMETERS
from course_lib.simulated import SimulatedDevice
from course_lib.simulated.lanes import LANE_COLORS
from course_lib.teaching import COLORS, figure, text
from course_lib.teaching.figures import shown_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Name, bytes, and bandwidth to the next tier, for an H100 and its server.
_TIERS = (
    ("on the chip", "50 MB", "3350 GB/s"),
    ("device memory", "80 GB", "63 GB/s (PCIe 5)"),
    ("host memory", "about 1000 GB", "7 GB/s (one NVMe drive)"),
    ("disk", "about 10,000 GB", ""),
)


def draw_tiers() -> "Figure":
    """Draw four tiers as boxes of increasing width, with arrows between them, from data sheets."""
    description = [
        text("{name}: {size}", name=text(name), size=text(size)) for name, size, _ in _TIERS
    ]
    alt = text("Four tiers: {tiers}. Between them {links}.", tiers=join_labels(description, "; "),
               links=join_labels([text(link) for *_, link in _TIERS[:-1]], "; "))  # fmt: skip
    drawn, ax = figure(
        "Each lower tier holds more, and access to it is slower", height=3.1, alt=alt
    )
    for i, (name, size, link) in enumerate(_TIERS):
        half, top = 1.0 + 0.55 * i, -1.3 * i
        ax.fill_between([-half, half], top - 0.7, top, color="#DDE6EE", edgecolor="#004488")
        label = text("{name}: {size}", name=text(name), size=text(size))
        ax.text(0, top - 0.35, label, ha="center", va="center", fontsize=10)
        if link:
            arrow = {"arrowstyle": "<->", "color": "#222222", "linewidth": 1.4}
            arrow |= {"mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}  # heads do not grow
            ax.annotate("", (-0.3, top - 1.28), xytext=(-0.3, top - 0.72), arrowprops=arrow)
            ax.text(-0.1, top - 1.0, text(link), va="center", fontsize=10)
    ax.set(xlim=(-3.2, 3.2), ylim=(-4.75, 0.1))
    ax.axis("off")
    return shown_once(drawn)


#: p -> title of the step in which p storages are fetched ahead.
_STEPS = {
    0: "p = 0: compute waits for every fetch, and the step takes {ms} ms",
    1: "p = 1: compute waits for one fetch of two, and the step takes {ms} ms",
    2: "p = 2: compute hardly waits in backward, and the step takes {ms} ms",
}


def draw_step(p: int, run: tuple[SimulatedDevice, float, int], plain: float) -> "Figure":
    """Draw the lanes of compute and of copies both ways, with the live bytes below.

    Args:
        p: Number of storages that are fetched ahead.
        run: The device after its block, when the step began, and live bytes at that time.
        plain: Seconds of the step without copies, marked by a line.
    """
    device, began, held = run
    title = text(_STEPS[p], ms=f"{1000 * (device.seconds - began):.2f}")
    alt = text(
        "Three lanes: compute, copies to the host, copies to the GPU. Under them, the live"
        " bytes. Without copies: {ms} ms.",
        ms=f"{1000 * plain:.2f}",
    )
    drawn, (lanes, below) = figure(title, rows=2, height=3.0, sharex=True, alt=alt)
    device.plot(lanes, since=began)
    device.plot_bytes(below, since=began)
    _above(below, held, (device.peak_bytes - held) / 1e6)
    lanes.axvline(plain, color="#222222", linewidth=1.0, linestyle="--")
    lanes.set(xlabel="", xlim=(0, 1.36 * plain))
    lanes.annotate(
        text("without copies"),
        (plain, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    return shown_once(drawn)


def draw_forward(run: tuple[SimulatedDevice, float, int], shown: float) -> "Figure":
    """Draw the lanes of compute and of copies to the host during the first layers of forward.

    Args:
        run: The device after its block, when the step began, and live bytes at that time.
        shown: Seconds from the start of the step that are drawn.
    """
    device, began, _ = run
    alt = text(
        "Two lanes during the first layers of forward: compute, and copies to the host. Between"
        " the products of two layers, compute waits as long as one copy takes."
    )
    title = "One copy in flight: compute waits for the first copy of every layer"
    drawn, ax = figure(title, height=1.7, alt=alt)
    device.plot(ax, since=began)
    ax.set(xlim=(0, shown), ylim=(1.5, -0.5))
    return shown_once(drawn)


def _above(ax: "Axes", held: int, top: float) -> None:
    """Show bytes relative to those that were live before the step."""
    ax.set_ylim(held / 1e6, held / 1e6 + 1.1 * top)
    ax.set_yticks([held / 1e6, held / 1e6 + 5, held / 1e6 + 10], ["0", "5", "10"])
    ax.set_ylabel(text("MB"))


_STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "D")
#: Time without copies of 16 layers with f = 1 and g = 2: 16 f + 16 g - f.
_BASE = 47


def draw_times(typed: Callable[..., float], clock: Mapping[tuple[float, int], float]) -> "Figure":
    """Draw the reader's formula as lines and the simulated clock as points, over the copy time.

    Args:
        typed: The reader's `step_time`, evaluated for 16 layers with f = 1 and g = 2.
        clock: (c, p) -> simulated time; both in units of f.
    """
    description = [
        text("c = {c} f, p = {p}: {t}", c=c, p=p, t=f"{t / _BASE:.2f}")
        for (c, p), t in clock.items()
    ]
    alt = text(
        "Times relative to the step without copies: {points}.",
        points=join_labels(description, "; "),
    )
    title = (
        "Up to the threshold c = f/2, fetching two ahead is almost free, but fetching none is not"
    )
    drawn, ax = figure(title, height=3.6, alt=alt)
    across = [i / 50 for i in range(1, 106)]
    for p, style, marker in zip((0, 1, 2), _STYLES, _MARKERS, strict=True):
        line = [typed(16, 1.0, 2.0, c, p) for c in across]
        if None not in line:  # otherwise the formula is not written yet
            ax.plot(
                across,
                [seconds / _BASE for seconds in line],
                style,
                color=COLORS["predicted"],
            )
        points = {c: t / _BASE for (c, ahead), t in clock.items() if ahead == p}
        ax.plot(
            list(points),
            list(points.values()),
            marker,
            color=COLORS["measured"],
            label=text("p = {p}", p=p),
        )
    ax.vlines(0.5, 0, 2.6, color="#888888", linewidth=0.8)  # ends below the legend
    ax.text(0.52, 0.1, text("threshold"), fontsize=9)
    ax.set(
        xlim=(0, 2.1),
        ylim=(0, 4.9),
        xlabel=text("time of a copy (in units of f)"),
        ylabel=text("time (× baseline)"),
    )
    title = text("line: your formula; points: clock")
    ax.legend(loc="upper left", title=title, ncols=3, alignment="left", columnspacing=1.2)
    return shown_once(drawn)


#: (lane, start, length, label) of the operations on one storage.
_BOXES = (
    (0, 0.0, 1.6, "make"),
    (1, 1.9, 3.2, "copy"),
    (0, 5.4, 1.9, "release"),
    (2, 7.6, 3.2, "copy"),
    (0, 11.1, 1.6, "use"),
)
_HOST = (3, 5.4, 1.9, "read")


def draw_order() -> "Figure":
    """Draw what happens to one storage on the three streams, with an arrow for each wait."""
    alt = text(
        "The operations on one storage, with arrows. “Make” points to the copy to the host."
        " This copy points to “release”, “read” on the host and the copy to the GPU. The copy to"
        " the GPU points to “use”."
    )
    drawn, ax = figure(
        "Each arrow is a wait. Without it, nothing determines which of the two comes first",
        height=2.7,
        alt=alt,
    )
    kinds = ("compute", "down", "up", "host")
    for lane, start, length, label in (*_BOXES, _HOST):
        light = kinds[lane] == "up"
        ax.broken_barh([(start, length)], (-lane - 0.35, 0.7), color=LANE_COLORS[kinds[lane]])
        color = "black" if light else "white"
        ax.text(
            start + length / 2,
            -lane,
            text(label),
            ha="center",
            va="center",
            color=color,
            fontsize=9,
        )
    boxes = (*_BOXES, _HOST)
    for before, after in ((0, 1), (1, 2), (1, 5), (1, 3), (3, 4)):
        (lane, start, length, _), (to, begin, *_) = boxes[before], boxes[after]
        arrow = {"arrowstyle": "->", "color": "#222222", "linewidth": 1.3}
        ax.annotate("", (begin, -to), xytext=(start + length, -lane), arrowprops=arrow)
    ax.set_yticks(
        [0, -1, -2, -3],
        [text(name) for name in ("compute", "to the host (D2H)", "to the GPU (H2D)", "host")],
    )
    ax.set(xlim=(-0.2, 12.9), ylim=(-3.6, 0.6), xticks=[], xlabel=text("time"))
    return shown_once(drawn)


def draw_pages(
    typed: Callable[[int, int], float], peaks: Mapping[int, int], plain: int
) -> "Figure":
    """Draw the peak of an optimizer step over the page size: the reader's formula and measurements.

    Args:
        typed: The reader's `peak_in_step(parameters, page_bytes)`.
        peaks: MiB of a page -> bytes.
        plain: Peak in bytes with all the state in memory.
    """
    description = [
        text("{mib} MiB: {peak} MB", mib=mib, peak=f"{peak / 1e6:.1f}")
        for mib, peak in peaks.items()
    ]
    alt = text(
        "Peak of the optimizer step for each page size: {peaks}. With all the state in"
        " memory: {plain} MB.",
        peaks=join_labels(description, "; "),
        plain=f"{plain / 1e6:.1f}",
    )
    title = (
        "The page size decides: with 32 MiB all the state is in memory at once, and nothing"
        " is saved"
    )
    drawn, ax = figure(title, height=3.2, alt=alt)
    across = [i / 4 for i in range(4, 141)]
    line = [typed(PARAMETERS, int(mib * 2**20)) for mib in across]
    if None not in line:  # otherwise the formula is not written yet
        ax.plot(
            across,
            [peak / 1e6 for peak in line],
            color=COLORS["predicted"],
            label=text("your formula"),
        )
    heights = [peak / 1e6 for peak in peaks.values()]
    ax.plot(list(peaks), heights, "o", color=COLORS["measured"], label=text("measured"))
    lines = (
        (55.0, 35, "right", "weights and gradients"),
        (plain / 1e6, 0.4, "left", "all the state in memory"),
    )
    for height, x, side, name in lines:
        ax.axhline(height, color="#888888", linewidth=0.9, linestyle="--")
        ax.text(x, height + 2, text(name), ha=side, fontsize=9)
    ax.set(
        xlim=(0, 35.5),
        ylim=(0, 130),
        xlabel=text("page size (MiB)"),
        ylabel=text("peak of the step (MB)"),
    )
    ax.legend(loc="lower right")
    return shown_once(drawn)


def draw_threshold(rate: float, links: Mapping[str, float]) -> "Figure":
    """Draw FLOPs per byte of a causal layer over its width, and the thresholds of links.

    The layer has 4096 tokens.

    Args:
        rate: FLOP/s.
        links: Name -> bytes per second, one way.
    """
    widths = [512 * 2 ** (i / 4) for i in range(27)]
    title = "Above a link's line, copies can hide. Checkpointed inputs get there at a smaller h"
    drawn, ax = figure(title, height=3.8)
    ticks = [1024, 4096, 16384]
    ax.set(xscale="log", yscale="log", xlim=(512, 120000), ylim=(500, 2e6))
    ax.set(xlabel=text("hidden size h"), ylabel=text("FLOPs per byte"))
    ax.set(xticks=ticks, xticklabels=[str(tick) for tick in ticks])
    variants = {"everything saved, 34 h": (34, "-"), "checkpointed inputs, 2 h": (2, "--")}
    for name, (factor, style) in variants.items():
        intensity = [(24 * h + 2 * 4096) / factor for h in widths]
        ax.plot(widths, intensity, style, color=COLORS["predicted"], label=text(name))
    for name, bandwidth in links.items():
        ax.axhline(rate / bandwidth, color="#888888", linewidth=0.8, linestyle="--")
        place = (50000, rate / bandwidth)  # right of the curves
        ax.annotate(name, place, xytext=(0, 2), textcoords="offset points", fontsize=9)
    ax.legend(loc="upper left", fontsize=9)
    return shown_once(drawn)
