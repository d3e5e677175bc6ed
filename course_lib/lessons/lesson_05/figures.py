"""The figures of lesson 05, and its table of bugs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from course_lib.labels import join_labels
from course_lib.teaching import COLORS, Table, category_label, figure, table, text
from course_lib.teaching.figures import category_look, shown_once

from .bugs import PLANTED
from .exercises import FIVE
from .mean_of_means import load_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OTHER = "#888888"  # color of the measurement with which others are compared
_PARTS = ("parameter", "optimizer", "gradient", "activation", "temporary")


def draw_peaks(meters: Mapping[int, Any], line: Callable[[int], float]) -> "Figure":
    """Draw what is live at the peak over the sequences in a micro-batch, and the reader's line.

    Args:
        meters: Sequences in a micro-batch -> a meter of the step.
        line: Function of m that returns predicted bytes; drawn from 0 to 4.
    """
    description = [
        text("m = {m}: {peak} MB", m=m, peak=f"{meters[m].peak_bytes / 1e6:.1f}")
        for m in sorted(meters)
    ]
    title = "Activations shrink with the micro-batch, and 110 MB stay"
    drawn, ax = figure(
        title, height=3.6, alt=text("{points}.", points=join_labels(description, "; "))
    )
    for m, meter in meters.items():
        bottom = 0.0
        for part in _PARTS:
            here = meter.at_peak()[part] / 1e6
            label = category_label(part) if m == min(meters) else None
            ax.bar(m, here, bottom=bottom, width=0.5, label=label, **category_look(part))
            bottom += here
        above, side = (9, "center") if m < 8 else (-12, "right")
        ax.text(m - (0.35 if m == 8 else 0), bottom + above, f"{bottom:.1f}", ha=side, fontsize=9)
    if (ends := (line(2), line(4))) != (None, None):  # None if the reader has no formula yet
        at = [(ends[0] + (m - 2) * (ends[1] - ends[0]) / 2) / 1e6 for m in (0, 4, 8)]
        ax.plot([0, 4], at[:2], color=COLORS["predicted"], linewidth=1.4)
        ax.plot([4, 8], at[1:], color=COLORS["predicted"], linewidth=1.2, linestyle=":")
        ax.text(3, at[1] - 52, text("your line"), ha="center", fontsize=9)
    if single := meters.get(8):
        top, missing = single.peak_bytes / 1e6, single.at_peak()["parameter"] / 1e6
        look = {"facecolor": "none", "edgecolor": COLORS["gradient"], "linestyle": "--"}
        ax.bar(8, missing, bottom=top, width=0.5, **look)
        ax.text(8.4, top + missing / 2, text("no gradients yet"), va="center", fontsize=9)
    ax.set(
        xlabel=text("sequences per micro-batch (of 8)"),
        ylabel=text("peak (MB)"),
        xlim=(-0.2, 10.6),
        ylim=(0, 325),
    )
    ax.set_xticks([0, *meters])
    ax.legend(fontsize=9, loc="center right")
    drawn.course_larger = 1.0  # a larger legend would cover the last bar
    return shown_once(drawn)


def draw_say(tokens: Sequence[int], errors: Mapping[int, Sequence[float]]) -> "Figure":
    """Draw the weight of one token under the mean of means, and the error of the gradient.

    Args:
        tokens: Tokens of the samples of a batch, in micro-batches of one sample.
        errors: Samples in a micro-batch -> relative errors of the gradient, one per batch.
    """
    say = [sum(tokens) / (len(tokens) * each) for each in tokens]
    alt = text(
        "A token has {least} to {most} times its fair weight. Error of the gradient by samples"
        " per micro-batch: {points}.",
        least=f"{min(say):.2f}",
        most=f"{max(say):.1f}",
        points=join_labels(
            [f"{size}: {min(each):.0%} – {max(each):.0%}" for size, each in errors.items()], "; "
        ),
    )
    title = "A token of a short sample has a larger weight"
    drawn, (left, right) = figure(title, columns=2, height=3.2, alt=alt)
    left.plot(tokens, say, "o", color=COLORS["measured"], alpha=0.8)
    left.axhline(1, color=COLORS["predicted"], linewidth=1.2)
    left.set(
        xscale="log",
        yscale="log",
        xlabel=text("characters in the sample"),
        ylabel=text("weight of one character"),
    )
    left.set_xticks([16, 32, 64, 128], ["16", "32", "64", "128"])
    left.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    left.minorticks_off()
    for size, found in errors.items():
        right.plot(
            [size] * len(found),
            [100 * each for each in found],
            "o",
            color=COLORS["measured"],
            alpha=0.6,
        )
    right.set(
        xscale="log",
        xlabel=text("samples per micro-batch (of 16)"),
        ylabel=text("gradient error (%)"),
        ylim=(0, None),
    )
    right.set_xticks(list(errors), [str(size) for size in errors])
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
    """Draw seven micro-batches in groups of four: what happens for each, and once per step."""
    alt = (
        "Four micro-batches run one after the other. These operations follow once: {once}. Then"
        " the three remaining micro-batches run, and the same operations follow once more."
    )
    title = "Each micro-batch adds to the gradients; all other work is done once per step"
    words = join_labels([text(name) for name in _ONCE])
    drawn, ax = figure(title, height=2.6, alt=text(alt, once=words))
    at = 0.0
    for count in (4, 3):
        for _ in range(count):
            ax.add_patch(_box(at, 1.25, "#EEEEEE"))
            ax.text(
                at + 0.575,
                0.5,
                text("forward\nbackward"),
                ha="center",
                va="center",
                fontsize=8,
            )
            at += 1.25
        ax.add_patch(_box(at, 2.5, "#FBE0CC"))
        for place, name in enumerate(_ONCE):
            ax.text(
                at + 1.2, 0.91 - 0.137 * place, text(name), ha="center", va="center", fontsize=8.5
            )
        at += 2.9
    ax.set(xlim=(-0.1, at), ylim=(-0.05, 1.05))
    ax.axis("off")
    drawn.course_larger = 1.0  # larger words would not fit into the boxes
    return shown_once(drawn)


def _box(left: float, width: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, 0), width - 0.1, 1, facecolor=color, edgecolor="#888888", linewidth=0.8)


def differences(runs: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return seed -> the mean of means' losses minus the token mean's, on short and long samples.

    There is one pair for each evaluation.
    """
    return {
        seed: [
            (short - own_short, long - own_long)
            for (short, long), (own_short, own_long) in zip(
                run["mean of means"], run["token mean"], strict=True
            )
        ]
        for seed, run in runs.items()
    }


def draw_training() -> "Figure":
    """Draw the recorded runs: how much worse the mean of means is, with one line per seed.

    Losses on short and on long samples are drawn separately.
    """
    made = load_record()
    found, every = differences(made["runs"]), made["every"]
    last = list(zip(*(each[-1] for each in found.values()), strict=True))
    below, above = sum(x < 0 for x in last[0]), sum(x > 0 for x in last[1])
    description = (
        "After {steps} steps, the loss of the mean of means is lower on short samples for"
        " {below} of {n} seeds, and higher on long samples for {above}."
    )
    alt = text(description, steps=made["steps"], below=below, above=above, n=len(found))
    title = "The mean of means is mostly better on short samples and worse on long ones"
    drawn, panels = figure(title, columns=2, height=3.2, sharey=True, alt=alt)
    for place, (ax, name) in enumerate(
        zip(panels, ("on lines of code", "on paragraphs"), strict=True)
    ):
        for looks in found.values():
            steps = [every * i for i in range(len(looks))]
            ax.plot(
                steps,
                [each[place] for each in looks],
                color=COLORS["measured"],
                alpha=0.35,
                linewidth=1.2,
            )
            ax.plot(steps[-1], looks[-1][place], "o", color=COLORS["measured"], markersize=4.5)
        ax.axhline(0, color=COLORS["predicted"], linewidth=1.2)
        ax.set_title(text(name))
        ax.set(xlabel=text("step"), xlim=(0, 126))
    panels[0].set_ylabel(text("difference in loss"))
    return shown_once(drawn)


def draw_sums(errors: Mapping[str, Mapping[int, Sequence[float]]]) -> "Figure":
    """Draw errors of Linear weights' gradients over micro-batches, for sums in bf16 and fp32.

    Args:
        errors: "bf16" and "fp32" -> number of micro-batches -> relative errors, one for each seed.
    """
    looks = {
        "bf16": (COLORS["measured"], "o-", "sums in bf16"),
        "fp32": (_OTHER, "s--", "sums in fp32"),
    }
    title = "With more micro-batches, sums in bf16 become less exact, but sums in fp32 do not"
    alt = (
        "With sums in bf16, the error rises from 1 micro-batch to 256 to about three times its"
        " first value. With sums in fp32 it stays low."
    )
    drawn, ax = figure(title, height=3.2, alt=alt)
    for kind, each in errors.items():
        color, style, name = looks[kind]
        counts, means = list(each), [100 * mean(found) for found in each.values()]
        ax.plot(counts, means, style, color=color)
        for n, found in each.items():
            ax.plot(
                [n] * len(found),
                [100 * one for one in found],
                ".",
                color=color,
                alpha=0.5,
                markersize=4,
            )
        ax.annotate(
            text(name),
            (counts[-1], means[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color="#A84B0C" if kind == "bf16" else "#555555",
        )
    ax.set(
        xscale="log",
        xlabel=text("micro-batches"),
        ylabel=text("gradient error (%)"),
        ylim=(0, None),
        xlim=(0.8, 900),
    )
    ax.set_xticks(list(errors["bf16"]), [str(n) for n in errors["bf16"]])
    ax.minorticks_off()
    return shown_once(drawn)


def five_bugs() -> Table:
    """Show what each bug's own check detects, and how many other checks detect anything."""
    rows = []
    for name, loop in PLANTED.items():
        seen = {other: check(loop) for other, check in FIVE.items()}
        others = sum(symptom is not None for other, symptom in seen.items() if other != name)
        rows.append((name, seen[name] or "–", others))
    return table(["the only bug", "report of the check for it", "other checks that fail"], rows)
