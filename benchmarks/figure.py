"""A figure of the scoreboard, one panel for each group with comparisons and one for the growth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from scoreboard import Row

from course_lib.labels.drawing import course_font

HEADS = {
    "en": ("time, course / peer, with quartiles", "bytes, course / peer", "size", "CPU time (ms)"),
    "zh": ("时间，本课程 / 对方（含四分位数）", "字节，本课程 / 对方", "规模", "CPU 时间（毫秒）"),
}
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)
NO_DATE = {"Date": None}  # without a date, equal rows give equal files


def bytes_ratio(row: Row) -> float | None:
    """Return the course's bytes divided by the peer's, or None if a number is missing."""
    return row.course_bytes / row.peer_bytes if row.course_bytes and row.peer_bytes else None


def draw_point(ax: Axes, ratio: float, place: int, **style: str) -> None:
    """Draw a ratio as a point. A ratio outside the axis is drawn at its end, with its value."""
    shown = min(max(ratio, TICKS[0]), TICKS[-1])
    ax.plot(shown, place, clip_on=False, ls="", **style)
    if shown != ratio:
        text = f"{ratio:.2g}" if ratio < 1 else f"{ratio:.0f}"
        side = 1 if ratio < 1 else -1
        align = "left" if side > 0 else "right"
        ax.annotate(text, (shown, place), (8 * side, -3), textcoords="offset points", ha=align)


def draw_ratios(ax: Axes, rows: Sequence[Row], said: Callable[[str], str], names: Sequence) -> None:
    """Draw a line of text with up to two points for each row, on a logarithmic axis."""
    for place, row in enumerate(rows):
        if row.ratio is not None:
            ax.plot([row.low, row.high], [place, place], color="C0", lw=4, alpha=0.4)
            draw_point(ax, row.ratio, place, marker="o", color="C0", label=names[0])
        if (ratio := bytes_ratio(row)) is not None:
            draw_point(ax, ratio, place, marker="s", color="C1", label=names[1])
    ax.axvline(1, color="0.5", lw=1)
    ax.set(xscale="log", xlim=(TICKS[0], TICKS[-1]), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), [said(row.work) + " · " + said(row.peer) for row in rows])


def draw_growth(ax: Axes, rows: Sequence[Row], said: Callable[[str], str], names: Sequence) -> None:
    """Draw CPU time against size, one line per tool, on logarithmic axes."""
    for row in rows:
        sizes, seconds = zip(*row.points, strict=True)
        ax.loglog(sizes, [1e3 * each for each in seconds], "o-", ms=3, label=said(row.work))
    ax.set(xlabel=names[2], ylabel=names[3])
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))


def draw(
    found: Mapping[str, Sequence[Row]],
    titles: Mapping[str, str],
    said: Callable[[str], str],
    language: str,
    path: Path,
) -> None:
    """Save the figure as SVG.

    Args:
        found: Dict from group to rows. A group without comparisons has no panel.
        titles: Dict from group to the title of its panel.
        said: Function that translates a text of a row.
        language: `en` or `zh`.
        path: Path of the SVG file.
    """
    shown = {
        group: kept
        for group, rows in found.items()
        if (kept := [r for r in rows if r.points or r.ratio is not None or bytes_ratio(r)])
        and group != "ranks"  # every ratio is 1
    }
    if not shown:
        return
    heights = [3.5 if rows[0].points else 0.7 + 0.27 * len(rows) for rows in shown.values()]
    options = {"svg.fonttype": "none", "svg.hashsalt": "scoreboard", "font.size": 9}
    with course_font(), plt.rc_context(options):
        figure, _ = plt.subplots(
            len(shown), figsize=(11, sum(heights)), height_ratios=heights, layout="constrained"
        )
        for ax, (group, rows) in zip(figure.axes, shown.items(), strict=True):
            ax.set_title(titles[group], loc="left", fontsize="medium")
            (draw_growth if rows[0].points else draw_ratios)(ax, rows, said, HEADS[language])
        labels = {
            label: handle
            for ax in figure.axes
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
            if label in HEADS[language]
        }
        figure.legend(labels.values(), labels.keys(), loc="outside upper right", ncols=2)
        figure.savefig(path, metadata=NO_DATE, bbox_inches="tight", pad_inches=0.5)
        plt.close(figure)
