"""Figures of lesson 04: memory tiers, timelines, copies, pages and thresholds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.labels import join_labels
from course_lib.lessons.ledger import PARAMETERS
from course_lib.simulated import SimulatedDevice
from course_lib.simulated.lanes import LANE_COLORS, LANE_NAMES
from course_lib.teaching import COLORS, Table, claims, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import (
    arrow,
    clauses,
    label_axes,
    name_rows,
    note,
    outline,
    points,
    write,
)

from .claims import CLAIMS, OLDER_CLAIMS
from .gpu import recorded_on_h200
from .simulation import RECORDED, copies_without_waits

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
    """Draw four memory tiers as boxes, from small and fast to large and slow, with their links."""
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


def draw_recorded() -> "Figure":
    """Draw recorded times of a decoder's forward and backward pass on an H200.

    There are three bars: without offload, with `offload_activations`, and with PyTorch's
    `save_on_cpu`.
    """
    found, rows = recorded_on_h200(), []
    names = {"plain": "plain", "offload_activations": "offloaded", "save_on_cpu": "save_on_cpu"}
    drawn, ax = figure("On an H200 the same step takes longer with offload", height=2.0)
    for row, (name, key) in enumerate(names.items()):
        time, longer = (found[f"{key}_seconds"] / each for each in (1, found["plain_seconds"]))
        label = f"{time:.2f} s" + (f" (+{longer - 1:.0%})" if row else "")
        rows.append({"name": text(name), "time": label})
        ax.barh(row, time, height=0.6, color=LANE_COLORS["down" if row else "compute"])
        write(ax, time + 0.01, row, label, ha="left", fontsize=10)
    drawn.course_alt = clauses("{name}: {time}", rows)
    name_rows(ax, [*names])
    label_axes(ax, "time of forward and backward (s)", xlim=(0, 1.15))
    return shown_once(drawn)


#: Values of p -> title of the figure of the steps in which p storages are fetched ahead.
_STEPS = {
    (0,): "p = 0: compute waits for every fetch, and the step takes {ms0} ms",
    (1, 2): "The step takes {ms1} ms with p = 1 and {ms2} ms with p = 2, which hides the fetches",
}
Step = tuple[SimulatedDevice, float, int]


def draw_steps(runs: Mapping[int, Step], plain: float) -> "Figure":
    """Draw timelines of steps with offload: computation, and copies in both directions.

    If there is only one step, a second panel shows its live bytes, minus those that were live
    before the step.

    Args:
        runs: Dict from p, the number of storages that are fetched ahead, to a tuple. It has the
            simulated device after the step, the time in seconds at which the step began, and the
            live bytes at that time.
        plain: Seconds of the step without copies, which are marked by a line.
    """
    took = {p: f"{1000 * (device.seconds - began):.2f}" for p, (device, began, _) in runs.items()}
    title = text(_STEPS[tuple(runs)], **{f"ms{p}": ms for p, ms in took.items()})
    alt = text(
        "Three lanes: compute, copies to the host, copies to the GPU. Without copies: {ms} ms.",
        ms=f"{1000 * plain:.2f}",
    )
    drawn, axes = figure(title, rows=2, height=3.0 if len(runs) == 1 else 3.4, sharex=True, alt=alt)
    for ax, (p, (device, began, _)) in zip(axes, runs.items(), strict=False):
        device.plot(ax, since=began)
        ax.axvline(plain, color="#222222", linewidth=1.0, linestyle="--")
        ax.set(xlabel="", xlim=(0, 1.36 * plain))
        if len(runs) > 1:
            ax.set_title(text("p = {p}", p=p), fontsize=9, loc="left", pad=2)
    if len(runs) == 1:
        ((device, began, held),) = runs.values()
        device.plot_bytes(axes[1], since=began)
        low, high = held / 1e6, device.peak_bytes / 1e6
        axes[1].set(ylim=(low, low + 1.1 * (high - low)), ylabel=text("live bytes (MB)"))
        axes[1].set_yticks([low, low + 5, low + 10], ["0", "5", "10"])
    else:
        axes[1].set_xlabel(text("simulated seconds"))
    look = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "baseline"}
    note(axes[0], "without copies", (plain, 1.0), (0, 3), fontsize=9, **look)
    return shown_once(drawn)


def draw_layers(step: Step) -> "Figure":
    """Draw computation and copies to the host during a decoder's first two layers.

    Args:
        step: Result of `small_decoder`. All times in this simulation are 1/256 of the times of a
            large decoder on a GPU. The axis shows the times of the large decoder.
    """
    alt = text(
        "Two lanes during the first layers of forward: compute, and copies to the host. Twice per"
        " layer, compute waits until a copy of several milliseconds is complete."
    )
    title = "Two copies in flight: compute waits while the largest storages are copied"
    drawn, ax = figure(title, height=1.8, alt=alt)
    step[0].plot(ax, since=step[1])
    ax.set_xticks([tick / 256e3 for tick in range(0, 61, 10)], map(str, range(0, 61, 10)))
    label_axes(ax, "simulated time (ms)", xlim=(0, 61 / 256e3), ylim=(1.5, -0.5))
    return shown_once(drawn)


def draw_taken(taken: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw how many outputs of layers take memory, after the host has started each layer.

    Args:
        taken: Dict from the label of a line to a list. For each layer, the list has the number of
            outputs that take memory when the host has started this layer.
    """
    rows = [{"name": text(name), "most": max(counts)} for name, counts in taken.items()]
    title = "With record_stream, each layer that the host runs ahead takes one more block"
    drawn, ax = figure(title, height=3.0, alt=clauses("{name}: at most {most}", rows))
    for (name, counts), style in zip(taken.items(), ("-", "--", "-.", ":"), strict=True):
        color, width = ("#004488", 2.4) if style == ":" else ("#994455", 1.5)
        line = dict(enumerate(counts, start=1))
        points(ax, line, style, color=color, linewidth=width, label=text(name))
    label_axes(ax, "layers that the host has started", "outputs that take memory")
    ax.set(xlim=(0, 25), ylim=(0, 20), yticks=range(0, 21, 5))
    ax.legend(loc="upper left", fontsize=9)
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
    """Draw the operations on one offloaded storage over time, with an arrow for each wait."""
    alt = text(
        "The operations on one storage, with arrows. “Make” points to the copy to the host."
        " This copy points to “release”, “read” on the host and the copy to the GPU. The copy to"
        " the GPU points to “use”."
    )
    title = "Each arrow is a wait. Without it, nothing determines which of the two comes first"
    drawn, ax = figure(title, height=2.7, alt=alt)
    _draw_boxes(ax, _BOXES, _LANES)
    for before, after in ((0, 1), (1, 2), (1, 5), (1, 3), (3, 4)):
        (lane, start, length, _), (to, begin, *_) = _BOXES[before], _BOXES[after]
        arrow(ax, (start + length, lane), (begin, to), linewidth=1.3)
    ax.set_yticks(range(4), [LANE_NAMES[lane] for lane in _LANES])
    label_axes(ax, "time", xlim=(-0.2, 12.9), ylim=(3.6, -0.6), xticks=[])
    return shown_once(drawn)


def _draw_boxes(
    ax: Any, boxes: Iterable[tuple[int, float, float, str]], lanes: Sequence[str]
) -> None:
    """Draw operations as labeled boxes: tuples of lane, start, length and label."""
    for lane, start, length, label in boxes:
        kind = lanes[lane]
        ax.broken_barh([(start, length)], (lane - 0.35, 0.7), color=LANE_COLORS[kind])
        color = "black" if kind == "up" else "white"
        write(ax, start + length / 2, lane, label, color=color, fontsize=9)


#: Mode -> title of its panel, and the starts of "make", "copy", "reuse" and "read".
_MODES = {
    "normal": ("normal: in the order of the program", (0.0, 1.8, 5.2, 5.2)),
    "late": ("late: the copy runs as late as possible", (0.0, 3.8, 1.8, 1.8)),
    "early": ("early: copy and read run as early as possible", (0.0, 0.0, 1.8, 0.0)),
}


def draw_modes() -> "Figure":
    """Draw three possible orders of a copy to the host without waits, and their results."""
    title = "Without waits, each of these orders of one copy is possible"
    drawn, axes = figure(title, rows=3, height=4.2, sharex=True)
    kinds, sentences = ("compute", "down", "host"), []
    found = copies_without_waits()
    for ax, (name, (heading, starts)) in zip(axes, _MODES.items(), strict=True):
        make, copy, reuse, read = starts
        boxes = (0, make, 1.6, "make"), (1, copy, 3.2, "copy"), (0, reuse, 1.6, "reuse")
        _draw_boxes(ax, [*boxes, (2, read, 1.6, "read")], kinds)
        results = text("the host reads {n}", n=f"{found[name][0]:.0f}")
        write(ax, 7.3, 2, results, ha="left", fontsize=9)
        write(
            ax, 7.3, 1, text("the copy holds {n}", n=f"{found[name][1]:.0f}"), ha="left", fontsize=9
        )
        sentences.append(text("{name}: {result}", name=text(name), result=results))
        ax.set_title(text(heading), fontsize=9, loc="left", pad=2)
        ax.grid(visible=False)
        ax.set_yticks(range(3), [LANE_NAMES[kind] for kind in kinds])
        ax.set(xlim=(-0.1, 9.9), ylim=(2.6, -0.6), xticks=[])
    alt = "A copy without any wait, in three modes: {results}."
    drawn.course_alt = text(alt, results=join_labels(sentences, "; "))
    label_axes(axes[-1], "time")
    return shown_once(drawn)


def draw_pages(
    typed: Callable[[int, int], float], peaks: Mapping[int, int], plain: int
) -> "Figure":
    """Draw the peak of an optimizer step with offloaded state against the page size.

    A line is computed by the learner's formula. Points are measured.

    Args:
        typed: The learner's `peak_in_step(parameters, page_bytes)`. It returns None if the learner
            has not written it yet.
        peaks: Dict from the size of a page in MiB to the measured peak in bytes.
        plain: Peak in bytes if the whole state stays in memory.
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
        write(ax, x, height + 2, name, ha=side, va="baseline", fontsize=9, **outline())
    label_axes(ax, "page size (MiB)", "peak of the step (MB)", xlim=(0, 35.5), ylim=(0, 130))
    ax.legend(loc="lower right")
    return shown_once(drawn)


def draw_threshold(rate: float, links: Mapping[str, float]) -> "Figure":
    """Draw a layer's FLOPs per offloaded byte against its hidden size, with a threshold per link.

    Above the threshold of a link, copies take less time than computation. The layer has causal
    attention over 4096 tokens.

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


def claims_table(
    steps: Mapping[tuple[bool, int | None], tuple[Any, int]],
    times: Mapping[tuple[int, int], float],
) -> Table:
    """Return a table of claims about offload, each with the number that tests it.

    Args:
        steps: Dict from (checkpointed, p) to (meter, copied bytes) of a training step.
            `checkpointed` is whether each layer has a checkpoint, and p is the number of storages
            that are fetched ahead. Only the steps with p = 1 are shown.
        times: Dict from (p, copies in flight) to the time of a step, relative to the step without
            offload. Only the times with two copies in flight are shown.
    """
    (alone, down), (both, less) = steps[False, 1], steps[True, 1]
    plain, gpu = RECORDED[None, 0, False], recorded_on_h200()
    recorded = gpu["save_on_cpu_seconds"] / gpu["plain_seconds"]
    decoder = [
        RECORDED[key] / plain for key in ((None, 0, True), (20e9, 2, False), (2e9, 2, False))
    ]
    return claims.claims_table(
        CLAIMS,
        text(
            "{alone} / {both} MB; {down} / {less} MB copied to the file",
            alone=f"{alone.peak_bytes / 1e6:.1f}",
            both=f"{both.peak_bytes / 1e6:.1f}",
            down=f"{down / 1e6:.1f}",
            less=f"{less / 1e6:.1f}",
        ),
        " / ".join(f"{times[p, 2]:.2f}" for p in (0, 1, 2)) + f"; {recorded:.2f}",
        " / ".join(f"{each:.2f}" for each in decoder),
        " / ".join(f"{copies_without_waits()[mode][0]:.0f}" for mode in ("late", "normal")),
        text("28 bytes; 2 bytes of gradient, 2 of weight (bf16)"),
    )


def older_claims(
    ratio: float, kept: Sequence[int], unmoved: Sequence[bool], error: str, peaks: Sequence[int]
) -> Table:
    """Return a table of claims from older teaching documents, each with the number that tests it.

    Args:
        ratio: Gradient that code from these documents gives, divided by the right gradient.
        kept: Bytes that the graph saves, first without and then with the function `Offload` from
            these documents.
        unmoved: One bool per state tensor of the optimizer. True if the offloading code of these
            documents left the tensor at the same address, so that it was not offloaded.
        error: Name of an attribute that a prefetcher from these documents uses before it exists.
        peaks: Peaks in bytes of two ways to make an attention mask. The first creates a new
            `nn.Transformer` for it, the second does not.
    """
    return claims.claims_table(
        OLDER_CLAIMS,
        text("{ratio:.1f} ×; {before} → {after} bytes", ratio=ratio, before=kept[0], after=kept[1]),
        text("{unmoved} of {count} have not moved", unmoved=sum(unmoved), count=len(unmoved)),
        text("{kind}: there is no {missing} yet", kind="`AttributeError`", missing=f"`{error}`"),
        " : ".join(f"{peak / 1e6:.0f} MB" for peak in peaks),
    )
