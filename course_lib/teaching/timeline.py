"""The course's main plot: live bytes by category after each operator of a training step."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.labels import Label, join_labels, text

from .figures import CATEGORY_NAMES, PHASE_NAMES, category_label, category_look, figure, shown_once
from .marks import category_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From bottom to top: constant categories first, so that changing ones form the outline.
STACK = ("parameter", "buffer", "optimizer", "gradient", "input", "activation", "temporary")
_PHASE_COLORS = {"forward": "#DCE6F0", "backward": "#F6DFE0", "optimizer": "#EBDDE8"}


def timelines(
    meters: "Mapping[str, Any] | None" = None,
    /,
    *,
    title: str | None = None,
    share_x: bool = True,
    width: float = 7.2,
    panel_height: float | None = None,
    **named: Any,
) -> "Figure":
    """Draw the live bytes of training steps over time, one panel per step, all on the same scale.

    In each panel except the first, a dashed line shows the peak of the first step, so that the
    saving is visible.

    Args:
        meters: Dict from a label to the `MemoryMeter` that measured the step.
        title: Message of the figure.
        share_x: Whether all panels have the same x axis, so that a step with more operators is
            drawn wider.
        width: Width of the figure in inches.
        panel_height: Height of a panel in inches. The default is 2.2 for one step and 1.85 for
            several, so that two panels fit on a laptop's screen.
        named: More meters as keyword arguments, `label=meter`.

    Returns:
        The figure. A notebook shows it if the call is the last line of a cell.

    Raises:
        ValueError: No meter is passed, or a meter has recorded no operator.
    """
    variants = {**(meters or {}), **named}
    if not variants:
        raise ValueError('timelines needs at least one meter, as in timelines({"plain": meter})')
    steps = [_Step(name, meter) for name, meter in variants.items()]

    if panel_height is None:
        panel_height = 2.2 if len(steps) == 1 else 1.85
    height = panel_height * len(steps) + (0.45 if title is None else 0.75)
    drawn, axes = figure(
        title, rows=len(steps), width=width, height=height, sharex=share_x, sharey=True
    )
    axes = [axes] if len(steps) == 1 else list(axes)
    # space above the peak for its label
    top = max(step.peak for step in steps) * (1.22 if panel_height >= 2 else 1.45)
    axes[0].set_ylim(0, top / 1e6)
    for panel, step in zip(axes, steps, strict=True):
        _draw_step(panel, step)
    if share_x:
        axes[0].set_xlim(0, max(step.length for step in steps))
    axes[-1].set_xlabel(text("operators, in the order they ran"))
    drawn.supylabel(text("live bytes (MB)"), fontsize=9.5, color="#333333")

    # computes the layout, because the size of labels in data units depends on it
    drawn.draw_without_rendering()
    labeled = set().union(
        *(_label_areas(panel, step) for panel, step in zip(axes, steps, strict=True))
    )
    for panel, step in zip(axes, steps, strict=True):
        _mark_peak(panel, step, None if step is steps[0] else steps[0])
    _add_legend(drawn, steps, labeled)

    drawn.course_alt = text(
        "Live bytes, stacked by category, over the operators of a step. {steps}",
        steps=join_labels([step.describe() for step in steps], " "),
    )
    return shown_once(drawn)


class _Step:
    """One training step to draw, as arrays with one entry per operator, from a meter's trace."""

    def __init__(self, name: str, meter: Any) -> None:
        self.name, self.meter = name, meter
        series = meter.series()
        self.phases: list[str] = list(meter.phases())
        self.length = len(self.phases)
        if self.length == 0:
            raise ValueError(
                f"the meter of {str(self.name)!r} recorded no operator: run a step inside its"
                " `with` block"
            )
        known = [category for category in STACK if category in series]
        self.bytes = {
            category: series[category]
            for category in [*known, *(other for other in series if other not in STACK)]
            if series[category].any()
        }
        self.total = sum(self.bytes.values())
        self.peak: int = meter.peak_bytes
        self.peak_at = int(self.total.argmax()) + 0.5  # the middle of the operator

    def runs(self) -> list[tuple[str, int, int]]:
        """Return (phase, start, stop) for each uninterrupted run of operators of one phase.

        The run consists of the operators `start` to `stop - 1`.

        Optimizer updates between two runs of backward count as backward. Otherwise an optimizer
        that updates each parameter during backward would be drawn as thin stripes.
        """
        names = [(phase, len(list(stretch))) for phase, stretch in itertools.groupby(self.phases)]
        around = zip([("", 0), *names], names, [*names[1:], ("", 0)], strict=False)
        within = [
            ("backward" if (before, after) == ("backward", "backward") else phase, count)
            for (before, _), (phase, count), (after, _) in around
        ]
        found, start = [], 0
        for phase, stretch in itertools.groupby(within, key=lambda each: each[0]):
            stop = start + sum(count for _, count in stretch)
            found.append((phase, start, stop))
            start = stop
        return found

    def describe(self) -> Label:
        """Return a sentence on the peak: its size, its phase, and its visible categories.

        The categories are listed from the largest to the smallest.
        """
        at = int(self.total.argmax())
        held = sorted(
            ((int(series[at]), category) for category, series in self.bytes.items()), reverse=True
        )
        visible = [
            text(
                "{category} {size} MB",
                category=CATEGORY_NAMES.get(name, name),
                size=f"{count / 1e6:,.1f}",
            )
            for count, name in held
            if count > self.peak / 200
        ]
        return text(
            "{name}: peak {peak} MB in the {phase} phase, of it {held}.",
            name=self.name,
            peak=f"{self.peak / 1e6:,.1f}",
            phase=_phase_name(self.phases[at]),
            held=join_labels(visible),
        )

    def layers(self) -> list[tuple[str, Any, Any]]:
        """Return (category, lower edge, upper edge) of stacked areas in MB, from bottom to top."""
        found, below = [], self.total * 0.0
        for category, held in self.bytes.items():
            above = below + held / 1e6
            found.append((category, below, above))
            below = above
        return found


def _draw_step(panel: "Axes", step: _Step) -> None:
    edges = range(step.length + 1)
    for category, below, above in step.layers():
        # The last value is repeated, so that the last operator has a width. Without antialiasing
        # there are no visible seams.
        panel.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post",
            antialiased=False, **category_look(category),
        )  # fmt: skip
    # An area narrower than a pixel may be skipped, but a line never is. The outline keeps a peak of
    # a single operator visible.
    panel.stairs(step.total / 1e6, edges, baseline=None, color="#444444", linewidth=0.5)
    panel.set_xlim(0, step.length)
    panel.set_title(step.name, pad=17, color="#222222")
    panel.grid(visible=False)
    panel.tick_params(length=3)

    # A phase is a band above the panel, and a thin line through the panel where it ends.
    across = panel.get_xaxis_transform()  # x in operators, y from 0 to 1 over the panel
    from matplotlib.patches import Rectangle

    for phase, start, stop in step.runs():
        band = Rectangle(
            (start, 1.0), stop - start, 0.095, transform=across, clip_on=False, linewidth=0,
            facecolor=_PHASE_COLORS.get(phase, "#EEEEEE"),
        )  # fmt: skip
        panel.add_patch(band)
        if start:
            panel.plot(
                [start, start],
                [1, 1.095],
                transform=across,
                clip_on=False,
                color="white",
                linewidth=1.2,
            )
            panel.plot(
                [start, start],
                [0, 1],
                transform=across,
                color="#999999",
                linewidth=0.6,
                linestyle=(0, (1, 2)),
            )
            panel.vlines(start, 0, step.total[start] / 1e6, color="white", linewidth=0.9, alpha=0.7)


def _label_areas(panel: "Axes", step: _Step) -> set[str]:
    """Write the names of phases and categories where they fit.

    Return the set of categories whose names were written.
    """
    per_point = panel.figure.dpi / 72
    box = panel.get_window_extent()
    operators_per_pixel = (panel.get_xlim()[1] - panel.get_xlim()[0]) / box.width
    mb_per_pixel = panel.get_ylim()[1] / box.height

    def space_for(words: str, size: float) -> tuple[float, float]:
        """Return the size of words in data units of the axes: operators (x) and MB (y)."""
        width = _width_of(panel, words, size) + 6 * per_point
        return width * operators_per_pixel, (size * 1.15 + 1) * per_point * mb_per_pixel

    across = panel.get_xaxis_transform()
    look: dict[str, Any] = {
        "transform": across,
        "fontsize": 8,
        "color": "#444444",
        "va": "center_baseline",
    }
    unnamed: dict[str, int] = {}
    for phase, start, stop in step.runs():
        words = _phase_name(phase)
        if space_for(words, 8)[0] <= stop - start:
            panel.text((start + stop) / 2, 1.045, words, ha="center", **look)
            unnamed[phase] = -1
        else:
            unnamed.setdefault(phase, stop)
    occupied = space_for(step.name, 10)[0]  # the panel's own title is at the left
    for phase, stop in unnamed.items():
        words = _phase_name(phase)
        if stop >= 0 and stop - space_for(words, 8)[0] > occupied:
            # the band is too narrow for the name, which is written above it once per phase
            panel.text(stop, 1.155, words, ha="right", **look)
            occupied = stop

    found = set()
    for category, below, above in step.layers():
        words, size = category_label(category) if category in CATEGORY_NAMES else category, 9
        width, height = space_for(words, size)
        place = _highest_box(below, above, max(1, round(width)))
        if place is not None and place[2] >= height:
            x, y, _ = place
            panel.text(
                x,
                y,
                words,
                fontsize=size,
                ha="center",
                va="center_baseline",
                color=(
                    "white" if category in ("parameter", "optimizer", "activation") else "#222222"
                ),
                zorder=7,
                # no hatching behind the words, so that they are legible
                bbox={"boxstyle": "square,pad=0.12", **category_look(category), "hatch": None},
            )
            found.add(category)
    return found


def _phase_name(phase: str) -> str:
    return text(PHASE_NAMES.get(phase, phase))


def _width_of(panel: "Axes", words: str, size: float) -> float:
    """Return the width of words in pixels."""
    trial = panel.text(0, 0, words, fontsize=size)
    width = trial.get_window_extent().width
    trial.remove()
    return width


def _highest_box(below: Any, above: Any, width: int) -> tuple[float, float, float] | None:
    """Return (center x, center y, height) of the tallest box of this width inside a layer, or None.

    `width` is a number of operators. A layer is the area of one category in the plot, and `below`
    and `above` are its edges.
    """
    from numpy.lib.stride_tricks import sliding_window_view

    if width > len(below):
        return None
    floor = sliding_window_view(below, width).max(axis=1)
    ceiling = sliding_window_view(above, width).min(axis=1)
    height = ceiling - floor
    if height.max() <= 0:
        return None
    # The middle one of equally high places is used, so the name of a constant layer is in the
    # middle of the figure.
    high = (height >= 0.98 * height.max()).nonzero()[0]
    best = high[len(high) // 2]
    return best + width / 2, (ceiling[best] + floor[best]) / 2, height[best]


def _mark_peak(panel: "Axes", step: _Step, first: _Step | None) -> None:
    peak = step.peak / 1e6
    words = text("peak {size} MB", size=f"{peak:,.1f}")
    if first is not None and first.peak > 0:
        panel.axhline(first.peak / 1e6, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)))
        left = step.peak_at > panel.get_xlim()[1] / 2  # the peak's own label is at the right
        panel.annotate(
            text("peak in the top panel"),
            (0.005 if left else 0.995, first.peak / 1e6),
            xytext=(0, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="left" if left else "right",
            va="bottom",
            fontsize=8.5,
            color="#444444",
        )
        if step.peak != first.peak:
            change = f"{(step.peak / first.peak - 1) * 100:+.0f}%".replace("-", "−")
            words = text("{peak}  ({change})", peak=words, change=change)
    panel.plot(
        [step.peak_at], [peak], "o", color="#222222", markersize=4.5, clip_on=False, zorder=8
    )
    left = step.peak_at > 0.55 * panel.get_xlim()[1]
    panel.annotate(
        words,
        (step.peak_at, peak),
        xytext=(5 if left else -4, 5),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        fontsize=9.5,
        color="#222222",
        zorder=8,
        bbox={
            "boxstyle": "square,pad=0.1",
            "facecolor": "white",
            "edgecolor": "none",
            "alpha": 0.85,
        },
    )


def _add_legend(drawn: "Figure", steps: "Sequence[_Step]", named: set[str]) -> None:
    """Add a legend below the figure for the categories whose areas are too thin to write in."""
    visible = {
        c for step in steps for c, held in step.bytes.items() if held.max() > step.peak / 200
    }
    rest = [category for category in STACK if category in visible - named]
    if rest:
        category_legend(
            drawn, rest, loc="outside lower right", fontsize=8.5,
            handlelength=0.9, handleheight=0.9, handletextpad=0.5, columnspacing=1.4,
        )  # fmt: skip
