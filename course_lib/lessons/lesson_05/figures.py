"""The figures of lesson 05, and a table of the bugs in its exercise."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from course_lib.labels import join_labels
from course_lib.teaching import COLORS, Table, claims, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import box, clauses, label_axes, note, points, stacked_bars, write

from .bugs import PLANTED
from .claims import CLAIMS
from .exercises import FIVE, samples_used
from .mean_of_means import load_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OTHER = "#888888"  # color of the measurement with which others are compared
_PARTS = ("parameter", "optimizer", "gradient", "activation", "temporary")


def draw_peaks(meters: Mapping[int, Any], line: Callable[[int], float]) -> "Figure":
    """Draw a step's live bytes at the peak against the number of sequences per micro-batch.

    The bars are measured, and the line is computed by the learner's formula.

    Args:
        meters: Dict from the number of sequences per micro-batch to the meter that measured the
            step.
        line: Function that takes the number of sequences per micro-batch and returns the predicted
            peak in bytes. It returns None if the learner has not written the formula yet.
    """
    peaks = {m: meter.peak_bytes / 1e6 for m, meter in meters.items()}
    rows = [{"m": m, "peak": f"{peak:.1f}"} for m, peak in sorted(peaks.items())]
    title = "Activations shrink with the micro-batch, and 110 MB stay"
    drawn, ax = figure(title, height=3.6, alt=clauses("m = {m}: {peak} MB", rows))
    bars = {m: meter.at_peak() for m, meter in meters.items()}
    for m, end in zip(bars, stacked_bars(ax, bars, _PARTS, 0.5, upright=True), strict=True):
        x, above, side = (m, 9, "center") if m < 8 else (m - 0.35, -12, "right")
        write(ax, x, end + above, f"{end:.1f}", ha=side, va="baseline", fontsize=9)
    if (ends := (line(2), line(4))) != (None, None):  # None if the learner has no formula yet
        at = [(ends[0] + (m - 2) * (ends[1] - ends[0]) / 2) / 1e6 for m in (0, 4, 8)]
        ax.plot([0, 4], at[:2], color=COLORS["predicted"], linewidth=1.4)
        ax.plot([4, 8], at[1:], color=COLORS["predicted"], linewidth=1.2, linestyle=":")
        write(ax, 3, at[1] - 52, "your line", va="baseline", fontsize=9)
    if 8 in bars:
        missing = bars[8]["parameter"] / 1e6
        look = {"facecolor": "none", "edgecolor": COLORS["gradient"], "linestyle": "--"}
        ax.bar(8, missing, bottom=peaks[8], width=0.5, **look)
        write(ax, 8.4, peaks[8] + missing / 2, "no gradients yet", ha="left", fontsize=9)
    label_axes(ax, "sequences per micro-batch (of 8)", "peak (MB)", ticks=[0, *meters])
    ax.set(xlim=(-0.2, 10.6), ylim=(0, 325))
    ax.legend(fontsize=9, loc="center right")
    drawn.course_larger = 1.0  # a larger legend would cover the last bar
    return shown_once(drawn)


def draw_say(tokens: Sequence[int], errors: Mapping[int, Sequence[float]]) -> "Figure":
    """Draw two effects of averaging the mean losses of micro-batches, in two panels.

    The left panel has the weight of one character in the loss against the length of its sample. The
    right panel has the error of the gradient against the number of samples per micro-batch.

    Args:
        tokens: Number of tokens (characters) of each sample in a batch, for the left panel. In that
            panel each micro-batch has one sample.
        errors: Dict from the number of samples per micro-batch to relative errors of the gradient,
            one per batch.
    """
    say = [sum(tokens) / (len(tokens) * each) for each in tokens]
    ranges = [f"{size}: {min(each):.0%} – {max(each):.0%}" for size, each in errors.items()]
    alt = text(
        "A token has {least} to {most} times its fair weight. Error of the gradient by samples"
        " per micro-batch: {points}.",
        least=f"{min(say):.2f}",
        most=f"{max(say):.1f}",
        points=join_labels(ranges, "; "),
    )
    title = "A token of a short sample has a larger weight"
    drawn, (left, right) = figure(title, columns=2, height=3.2, alt=alt)
    left.plot(tokens, say, "o", color=COLORS["measured"], alpha=0.8)
    left.axhline(1, color=COLORS["predicted"], linewidth=1.2)
    left.set(xscale="log", yscale="log")
    label_axes(left, "characters in the sample", "weight of one character", ticks=[16, 32, 64, 128])
    left.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    left.minorticks_off()
    for size, found in errors.items():
        percent = [100 * each for each in found]
        right.plot([size] * len(found), percent, "o", color=COLORS["measured"], alpha=0.6)
    right.set(xscale="log", ylim=(0, None))
    label_axes(right, "samples per micro-batch (of 16)", "gradient error (%)", ticks=errors)
    right.minorticks_off()
    return shown_once(drawn)


_ONCE = (
    "unscale",
    "÷ tokens",
    "clip",
    "optimizer step",
    "scaler update",
    "scheduler",
    "clear",
)


def draw_order() -> "Figure":
    """Draw the operations of two optimizer steps with gradient accumulation, in their order.

    Some operations run once per micro-batch, the others once per step. The steps have four and
    three micro-batches.
    """
    alt = (
        "Four micro-batches run one after the other. These operations follow once: {once}. Then"
        " the three remaining micro-batches run, and the same operations follow once more."
    )
    title = "Each micro-batch adds to the gradients; all other work is done once per step"
    drawn, ax = figure(title, height=2.6, alt=text(alt, once=join_labels(_ONCE)))
    at, edge = 0.0, {"edgecolor": "#888888", "linewidth": 0.8}
    for count in (4, 3):
        for _ in range(count):
            box(ax, (at, 0), 1.15, 1, facecolor="#EEEEEE", **edge)
            write(ax, at + 0.575, 0.5, "forward\nbackward", fontsize=8)
            at += 1.25
        box(ax, (at, 0), 2.4, 1, facecolor="#FBE0CC", **edge)
        for place, name in enumerate(_ONCE):
            write(ax, at + 1.2, 0.91 - 0.137 * place, name, fontsize=8.5)
        at += 2.9
    ax.set(xlim=(-0.1, at), ylim=(-0.05, 1.05))
    ax.axis("off")
    drawn.course_larger = 1.0  # larger words would not fit into the boxes
    return shown_once(drawn)


def draw_training() -> "Figure":
    """Draw recorded differences between the losses of two models against the training step.

    One model is trained with the average of the micro-batches' mean losses, the other model with
    the mean over all tokens. There is one line per seed, and one panel each for short and for long
    samples.
    """
    made = load_record()
    every = made["every"]
    # for each seed and evaluation, the differences on short and on long samples
    found = [np.subtract(run["mean of means"], run["token mean"]) for run in made["runs"].values()]
    short, long = zip(*(each[-1] for each in found), strict=True)
    alt = text(
        "After {steps} steps, the loss of the mean of means is lower on short samples for"
        " {below} of {n} seeds, and higher on long samples for {above}.",
        steps=made["steps"],
        below=sum(x < 0 for x in short),
        above=sum(x > 0 for x in long),
        n=len(found),
    )
    title = "The mean of means is mostly better on short samples and worse on long ones"
    drawn, panels = figure(title, columns=2, height=3.2, sharey=True, alt=alt)
    for place, name in enumerate(("on lines of code", "on paragraphs")):
        for pairs in found:
            line = pairs[:, place]
            steps = [every * i for i in range(len(line))]
            panels[place].plot(steps, line, color=COLORS["measured"], alpha=0.35, linewidth=1.2)
            points(panels[place], {steps[-1]: line[-1]}, markersize=4.5)
        panels[place].axhline(0, color=COLORS["predicted"], linewidth=1.2)
        panels[place].set_title(text(name))
        label_axes(panels[place], "step", xlim=(0, 126))
    panels[0].set_ylabel(text("difference in loss"))
    return shown_once(drawn)


#: dtype of the sums -> color, style, name, and color of the name.
_SUMS = {
    "bf16": (COLORS["measured"], "o-", "sums in bf16", "#A84B0C"),
    "fp32": (_OTHER, "s--", "sums in fp32", "#555555"),
}


def draw_sums(errors: Mapping[str, Mapping[int, Sequence[float]]]) -> "Figure":
    """Draw gradient errors against the number of micro-batches, for sums in bf16 and in fp32.

    Args:
        errors: Dict from the dtype of the sums, "bf16" or "fp32", to an inner dict. The inner dict
            maps the number of micro-batches to relative errors, one for each seed. The errors are
            those of the gradients of linear layers' weights.
    """
    title = "With more micro-batches, sums in bf16 become less exact, but sums in fp32 do not"
    alt = (
        "With sums in bf16, the error rises from 1 micro-batch to 256 to about three times its"
        " first value. With sums in fp32 it stays low."
    )
    drawn, ax = figure(title, height=3.2, alt=alt)
    for kind, each in errors.items():
        color, style, name, dark = _SUMS[kind]
        means = {n: 100 * mean(found) for n, found in each.items()}
        points(ax, means, style, color=color)
        for n, found in each.items():
            percent = [100 * one for one in found]
            ax.plot([n] * len(found), percent, ".", color=color, alpha=0.5, markersize=4)
        note(ax, name, list(means.items())[-1], color=dark)
    ax.set(xscale="log", ylim=(0, None), xlim=(0.8, 900))
    label_axes(ax, "micro-batches", "gradient error (%)", ticks=errors["bf16"])
    ax.minorticks_off()
    return shown_once(drawn)


def five_bugs() -> Table:
    """Return a table of five training loops, each with one bug in its gradient accumulation.

    Each row has the message of the check that looks for this bug, and how many of the checks for
    the other four bugs fail.
    """
    rows = []
    for name, loop in PLANTED.items():
        seen = {other: check(loop) for other, check in FIVE.items()}
        others = sum(symptom is not None for other, symptom in seen.items() if other != name)
        rows.append((name, seen[name] or "–", others))
    return table(["the only bug", "report of the check for it", "other checks that fail"], rows)


def claims_table(
    off: Mapping[int, Sequence[float]],
    sums: Mapping[str, Mapping[int, Sequence[float]]],
    exact: Sequence[float],
    meters: Mapping[int, Any],
) -> Table:
    """Return a table of claims about gradient accumulation, each with the number that tests it.

    Args:
        off: Relative errors of the gradient if the mean losses of micro-batches are averaged. This
            is a dict from the number of samples per micro-batch to a list with one error per batch.
            The keys 1 and 8 are required.
        sums: Relative errors of bf16 gradients, as for `draw_sums`. Only `sums["fp32"]` is used, a
            dict from the number of micro-batches to a list with one error per seed.
        exact: Relative gradient errors of the mean over all tokens, in fp32.
        meters: Dict from the number of sequences per micro-batch to the meter that measured the
            step. The keys 1 and 8 are required.
    """
    right = max(exact) < 1e-6 and max(sums["fp32"][256]) < 0.01
    bounds = text("fp32: below {bound}; bf16 gradients: below 1%", bound="1e-6")
    used, _ = samples_used(PLANTED["remainder dropped"], 60, 4, 4)
    peaks = {m: f"{meter.peak_bytes / 1e6:.1f}" for m, meter in meters.items()}
    return claims.claims_table(
        CLAIMS,
        f"{min(off[1]):.0%} – {max(off[1]):.0%}",
        f"{min(off[8]):.1%} – {max(off[8]):.0%}",
        bounds if right else "–",
        f"{60 - used} / 60",
        text("{once} → {single} MB", once=peaks[8], single=peaks[1]),
    )
