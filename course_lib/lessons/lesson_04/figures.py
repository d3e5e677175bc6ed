"""Figures of lesson 04: memory tiers, timelines, copies, step times, pages and thresholds."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.labels import join_labels
from course_lib.lessons.ledger import PARAMETERS
from course_lib.simulated import SimulatedDevice
from course_lib.simulated.lanes import LANE_COLORS, LANE_NAMES
from course_lib.teaching import COLORS, Table, claims, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import arrow, label_axes, note, points, write

from .claims import CLAIMS
from .simulation import RECORDED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Name, bytes, and bandwidth to the next tier, for an H100 and its server.
_TIERS = (
    ("on the chip", "50 MB", "3350 GB/s"),
    ("device memory", "80 GB", "63 GB/s (PCIe 5)"),
    ("host memory", "about 1000 GB", "7 GB/s (one NVMe drive)"),
    ("disk", "about 10,000 GB", ""),
)


def draw_tiers() -> "Figure":
    """Draw four memory tiers as boxes of increasing width, with the links between the tiers."""
    names = [text("{name}: {size}", name=name, size=size) for name, size, _ in _TIERS]
    alt = text("Four tiers: {tiers}. Between them {links}.", tiers=join_labels(names, "; "),
               links=join_labels([link for *_, link in _TIERS[:-1]], "; "))  # fmt: skip
    title = "Each lower tier holds more, and access to it is slower"
    drawn, ax = figure(title, height=3.1, alt=alt)
    for i, (name, (*_, link)) in enumerate(zip(names, _TIERS, strict=True)):
        half, top = 1.0 + 0.55 * i, -1.3 * i
        ax.fill_between([-half, half], top - 0.7, top, color="#DDE6EE", edgecolor="#004488")
        write(ax, 0, top - 0.35, name, fontsize=10)
        if link:
            look = {"linewidth": 1.4, "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
            arrow(ax, (-0.3, top - 0.72), (-0.3, top - 1.28), "<->", **look)
            write(ax, -0.1, top - 1.0, link, ha="left", fontsize=10)
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
    """Draw timelines of compute and of the copies in both directions, and live bytes below.

    The bytes that were live before the step are subtracted.

    Args:
        p: Number of storages that are fetched ahead.
        run: The simulated device after the step, the time at which the step began, and the live
            bytes at that time.
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
    low, high = held / 1e6, device.peak_bytes / 1e6
    below.set(ylim=(low, low + 1.1 * (high - low)), ylabel=text("MB"))
    below.set_yticks([low, low + 5, low + 10], ["0", "5", "10"])
    lanes.axvline(plain, color="#222222", linewidth=1.0, linestyle="--")
    lanes.set(xlabel="", xlim=(0, 1.36 * plain))
    look = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "baseline"}
    note(lanes, "without copies", (plain, 1.0), (0, 3), fontsize=9, **look)
    return shown_once(drawn)


def draw_forward(run: tuple[SimulatedDevice, float, int], shown: float) -> "Figure":
    """Draw timelines of compute and of the copies to the host in the first layers of forward.

    Args:
        run: The simulated device after the step, the time at which the step began, and the live
            bytes at that time.
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


#: Time without copies of 16 layers with f = 1 and g = 2: 16 f + 16 g - f.
_BASE = 47


def draw_times(typed: Callable[..., float], clock: Mapping[tuple[float, int], float]) -> "Figure":
    """Draw the reader's formula as lines and the simulated clock as points, over the copy time.

    Args:
        typed: The reader's `step_time`, evaluated for 16 layers with f = 1 and g = 2.
        clock: Dict from (c, p) to the simulated time; c and the time are in units of f.
    """
    times = [
        text("c = {c} f, p = {p}: {t}", c=c, p=p, t=f"{t / _BASE:.2f}")
        for (c, p), t in clock.items()
    ]
    alt = "Times relative to the step without copies: {points}."
    title = (
        "Up to the threshold c = f/2, fetching two ahead is almost free, but fetching none is not"
    )
    drawn, ax = figure(title, height=3.6, alt=text(alt, points=join_labels(times, "; ")))
    across = [i / 50 for i in range(1, 106)]
    for p, (style, marker) in enumerate((("-", "o"), ("--", "s"), (":", "D"))):
        line = {c: typed(16, 1.0, 2.0, c, p) for c in across}
        if None not in line.values():  # otherwise the formula is not written yet
            points(ax, line, style, unit=_BASE, color=COLORS["predicted"])
        measured = {c: t for (c, ahead), t in clock.items() if ahead == p}
        points(ax, measured, marker, unit=_BASE, label=text("p = {p}", p=p))
    ax.vlines(0.5, 0, 2.6, color="#888888", linewidth=0.8)  # ends below the legend
    write(ax, 0.52, 0.1, "threshold", ha="left", va="baseline", fontsize=9)
    label_axes(ax, "time of a copy (in units of f)", "time (× baseline)", xlim=(0, 2.1))
    ax.set_ylim(0, 4.9)
    title = text("line: your formula; points: clock")
    ax.legend(loc="upper left", title=title, ncols=3, alignment="left", columnspacing=1.2)
    return shown_once(drawn)


#: Lanes from top to bottom, and (lane, start, length, label) of the operations on one storage.
_LANES = ("compute", "down", "up", "host")
_BOXES = (
    (0, 0.0, 1.6, "make"),
    (1, 1.9, 3.2, "copy"),
    (0, 5.4, 1.9, "release"),
    (2, 7.6, 3.2, "copy"),
    (0, 11.1, 1.6, "use"),
    (3, 5.4, 1.9, "read"),
)


def draw_order() -> "Figure":
    """Draw the operations on one storage on three streams, with an arrow for each wait."""
    alt = text(
        "The operations on one storage, with arrows. “Make” points to the copy to the host."
        " This copy points to “release”, “read” on the host and the copy to the GPU. The copy to"
        " the GPU points to “use”."
    )
    title = "Each arrow is a wait. Without it, nothing determines which of the two comes first"
    drawn, ax = figure(title, height=2.7, alt=alt)
    for lane, start, length, label in _BOXES:
        kind = _LANES[lane]
        ax.broken_barh([(start, length)], (lane - 0.35, 0.7), color=LANE_COLORS[kind])
        color = "black" if kind == "up" else "white"
        write(ax, start + length / 2, lane, label, color=color, fontsize=9)
    for before, after in ((0, 1), (1, 2), (1, 5), (1, 3), (3, 4)):
        (lane, start, length, _), (to, begin, *_) = _BOXES[before], _BOXES[after]
        arrow(ax, (start + length, lane), (begin, to), linewidth=1.3)
    ax.set_yticks(range(4), [LANE_NAMES[lane] for lane in _LANES])
    label_axes(ax, "time", xlim=(-0.2, 12.9), ylim=(3.6, -0.6), xticks=[])
    return shown_once(drawn)


def draw_pages(
    typed: Callable[[int, int], float], peaks: Mapping[int, int], plain: int
) -> "Figure":
    """Draw the peak of an optimizer step over the page size: the reader's formula and measurements.

    Args:
        typed: The reader's `peak_in_step(parameters, page_bytes)`.
        peaks: Dict from the MiB of a page to the peak in bytes.
        plain: Peak in bytes with all the state in memory.
    """
    sizes = [text("{mib} MiB: {peak} MB", mib=m, peak=f"{p / 1e6:.1f}") for m, p in peaks.items()]
    alt = text(
        "Peak of the optimizer step for each page size: {peaks}. With all the state in"
        " memory: {plain} MB.",
        peaks=join_labels(sizes, "; "),
        plain=f"{plain / 1e6:.1f}",
    )
    title = (
        "The page size decides: with 32 MiB all the state is in memory at once, and nothing"
        " is saved"
    )
    drawn, ax = figure(title, height=3.2, alt=alt)
    line = {i / 4: typed(PARAMETERS, int(i / 4 * 2**20)) for i in range(4, 141)}
    if None not in line.values():  # otherwise the formula is not written yet
        label = text("your formula")
        points(ax, line, "-", unit=1e6, color=COLORS["predicted"], label=label)
    points(ax, peaks, unit=1e6, label=text("measured"))
    for height, x, side, name in (
        (55.0, 35, "right", "weights and gradients"),
        (plain / 1e6, 0.4, "left", "all the state in memory"),
    ):
        ax.axhline(height, color="#888888", linewidth=0.9, linestyle="--")
        write(ax, x, height + 2, name, ha=side, va="baseline", fontsize=9)
    label_axes(ax, "page size (MiB)", "peak of the step (MB)", xlim=(0, 35.5), ylim=(0, 130))
    ax.legend(loc="lower right")
    return shown_once(drawn)


def draw_threshold(rate: float, links: Mapping[str, float]) -> "Figure":
    """Draw FLOPs per byte of a causal layer over its width, and the threshold of each link.

    The layer has 4096 tokens.

    Args:
        rate: Compute rate in FLOP/s.
        links: Dict from the name of a link to its bytes per second in one direction.
    """
    widths = [512 * 2 ** (i / 4) for i in range(27)]
    title = "Above a link's line, copies can hide. Checkpointed inputs get there at a smaller h"
    drawn, ax = figure(title, height=3.8)
    ax.set(xscale="log", yscale="log", xlim=(512, 120000), ylim=(500, 2e6))
    label_axes(ax, "hidden size h", "FLOPs per byte")
    ax.set_xticks([1024, 4096, 16384], ["1024", "4096", "16384"])
    variants = {"everything saved, 34 h": (34, "-"), "checkpointed inputs, 2 h": (2, "--")}
    for name, (factor, style) in variants.items():
        line = {h: (24 * h + 2 * 4096) / factor for h in widths}
        points(ax, line, style, color=COLORS["predicted"], label=text(name))
    for name, bandwidth in links.items():
        ax.axhline(rate / bandwidth, color="#888888", linewidth=0.8, linestyle="--")
        place = (50000, rate / bandwidth)  # right of the curves
        note(ax, name, place, (0, 2), va="baseline", fontsize=9)
    ax.legend(loc="upper left", fontsize=9)
    return shown_once(drawn)


def what_you_may_have_read(
    steps: Mapping[tuple[bool, int | None], tuple[Any, int]],
    times: Mapping[tuple[int, int], float],
    read: Sequence[list[float]],
) -> Table:
    """Return a table of the lesson's claims, and of the numbers that test them.

    Args:
        steps: Dict from (checkpointed, p) to a step's meter and the bytes copied to the lower tier.
            Steps with p = 1 are shown.
        times: Dict from (p, copies in flight) to the time at the threshold, relative to the
            baseline. Times with two copies in flight are shown.
        read: Numbers that the host read without a wait, and numbers read after a wait.
    """
    (alone, down), (both, less) = steps[False, 1], steps[True, 1]
    plain = RECORDED[None, 0, False].seconds
    decoder = [
        RECORDED[key].seconds / plain
        for key in ((None, 0, True), (20e9, 2, False), (2e9, 2, False))
    ]
    return claims.what_you_may_have_read(
        CLAIMS,
        text(
            "{alone} / {both} MB; {down} / {less} MB copied to the file",
            alone=f"{alone.peak_bytes / 1e6:.1f}",
            both=f"{both.peak_bytes / 1e6:.1f}",
            down=f"{down / 1e6:.1f}",
            less=f"{less / 1e6:.1f}",
        ),
        " / ".join(f"{times[p, 2]:.2f}" for p in (0, 1, 2)) + "; 1.95",
        " / ".join(f"{each:.2f}" for each in decoder),
        " / ".join(f"{[round(number) for number in numbers]}" for numbers in read),
        text("28 bytes; 2 bytes of gradient, 2 of weight (bf16)"),
    )
