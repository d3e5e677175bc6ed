"""The course's figure style, and its signature figure: the byte timeline of a training step.

matplotlib is imported when the first figure is drawn, not before.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .languages import label, parts, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

try:
    from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES
except ImportError:  # figures can be drawn where torch is missing; these are the same
    CATEGORY_COLORS = {
        "parameter": "#4477AA",
        "buffer": "#66CCEE",
        "gradient": "#EE6677",
        "optimizer": "#AA3377",
        "activation": "#228833",
        "temporary": "#CCBB44",
        "input": "#BBBBBB",
    }
    CATEGORY_HATCHES = {"parameter": "////", "optimizer": "xxxx", "buffer": r"\\\\", "input": "||||"}

#: One colour, one meaning, in every lesson: seven categories of bytes, and `predicted` (a line), `measured` (points).
#: Paul Tol's "bright" scheme and two more. Categories of equal grey differ in their hatching.
COLORS = {**CATEGORY_COLORS, "predicted": "#333333", "measured": "#EE7733"}
HATCHES = {**dict.fromkeys(CATEGORY_COLORS), **CATEGORY_HATCHES}
_HATCH_COLOR = (1.0, 1.0, 1.0, 0.35)
#: Of curves that are given no style of their own: they differ without their colours too.
_LINE_STYLES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))

FONT = "Course Sans SC"
_FONT_FILE = Path(__file__).parent / "fonts" / "CourseSansSC-Regular.otf"
_STYLE = {
    # The CJK font goes first: in a string with math, matplotlib takes everything else from the first font only.
    "font.family": [FONT, "DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "figure.titlesize": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "text.color": "#222222",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    # White in a dark theme too: the colours of the text are for a light ground.
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": "figure",
}

_CATEGORY_NAMES = {
    "parameter": ("parameter", "参数"),
    "buffer": ("buffer", "缓冲区"),
    "gradient": ("gradient", "梯度"),
    "optimizer": ("optimizer state", "优化器状态"),
    "activation": ("activation", "激活值"),
    "temporary": ("temporary", "临时张量"),
    "input": ("input", "输入"),
}
_PHASE_NAMES = {"forward": ("forward", "前向"), "backward": ("backward", "反向"), "optimizer": ("optimizer", "优化器")}
# From the bottom: what stays all the time first, so that what comes and goes draws the outline.
_STACK = ("parameter", "buffer", "optimizer", "gradient", "input", "activation", "temporary")
_PHASE_COLORS = {"forward": "#DCE6F0", "backward": "#F6DFE0", "optimizer": "#EBDDE8"}


def category_label(name: str) -> str:
    """A category of bytes, or a phase, in the current language ("optimizer" is the optimizer state here).

    Raises:
        ValueError: an unknown name.
    """
    return label(_name({**_PHASE_NAMES, **_CATEGORY_NAMES}, name))


def category_look(name: str) -> dict[str, Any]:
    """Colour and hatching of a category of bytes, as arguments of matplotlib's areas, bars and patches."""
    look = {"facecolor": COLORS.get(name, "#777777"), "hatch": HATCHES.get(name)}
    return {**look, "edgecolor": _HATCH_COLOR, "linewidth": 0}


def phase_label(name: str) -> str:
    """A phase of the training step in the current language: forward, backward or optimizer.

    Raises:
        ValueError: an unknown name.
    """
    return label(_name(_PHASE_NAMES, name))


def figure(
    title: tuple[str, str] | str | None = None,
    *,
    rows: int = 1,
    columns: int = 1,
    width: float = 7.2,
    height: float = 3.4,
    sharex: bool = False,
    sharey: bool = False,
    alt: tuple[str, str] | None = None,
) -> "tuple[Figure, Any]":
    """A figure in the course's style, Chinese included.

    The first figure puts the style into matplotlib's `rcParams`, because labels that are set later take their font from
    there; change them after that, and your changes stay.

    Args:
        title: the message of the figure, not its axes; in both languages the English line stands above the Chinese one.
        width, height: inches, at 100 dots an inch.
        alt: what the picture shows, in sentences, for readers who do not see it; the title is said before it. Left out,
            kinds of drawing, axes and labels are said: write one where that is too little.

    Returns:
        The figure, and its axes: one `Axes`, or an array of them if there are several rows or columns.
    """
    pyplot = _pyplot()
    drawn, axes = pyplot.subplots(
        rows, columns, figsize=(width, height), dpi=100, sharex=sharex, sharey=sharey, layout="constrained"
    )
    if title is not None:
        drawn.suptitle(label(title, separator="\n"), x=0.012, ha="left", linespacing=1.35)
    drawn.course_alt = alt
    return drawn, axes


def timelines(
    meters: "Mapping[str | tuple[str, str], Any] | None" = None,
    /,
    *,
    title: tuple[str, str] | str | None = None,
    share_x: bool = True,
    width: float = 7.2,
    panel_height: float = 2.2,
    **named: Any,
) -> "Figure":
    """Byte timelines of several training steps, one above the other, on one scale.

    The first one's peak is drawn through the others as a dashed line, so that what is saved can be seen.

    Args:
        meters: label -> `MemoryMeter` after its block; a label is a string or an (English, Chinese) pair.
        title: the message of the figure.
        share_x: one x scale too, so that a step with more operators is longer.
        width, panel_height: inches.
        named: label=meter.

    Returns:
        The figure. In a notebook it is shown as the value of the cell, so let it be the last line.

    Raises:
        ValueError: no meter, or one that recorded nothing.
    """
    arms = {**(meters or {}), **named}
    if not arms:
        raise ValueError('timelines needs at least one meter, as in timelines({"plain": meter})')
    steps = [_Step(name, meter) for name, meter in arms.items()]

    height = panel_height * len(steps) + (0.45 if title is None else 1.0)
    drawn, axes = figure(title, rows=len(steps), width=width, height=height, sharex=share_x, sharey=True)
    axes = [axes] if len(steps) == 1 else list(axes)
    top = max(step.peak for step in steps) * (1.22 if panel_height >= 2 else 1.45)  # room for the figure at the peak
    axes[0].set_ylim(0, top / 1e6)
    for panel, step in zip(axes, steps, strict=True):
        _draw_step(panel, step)
    if share_x:
        axes[0].set_xlim(0, max(step.length for step in steps))
    axes[-1].set_xlabel(text("operators, in the order they ran", "算子（按执行顺序）"))
    drawn.supylabel(f"{text('live bytes', '存活字节')} (MB)", fontsize=9.5, color="#333333")

    drawn.draw_without_rendering()  # settles the layout: the labels below need to know their size in data units
    named_somewhere = set().union(*(_label_areas(panel, step) for panel, step in zip(axes, steps, strict=True)))
    for panel, step in zip(axes, steps, strict=True):
        _mark_peak(panel, step, None if step is steps[0] else steps[0])
    _name_the_rest(drawn, steps, named_somewhere)

    said = [step.in_words() for step in steps]
    drawn.course_alt = (
        f"Live bytes, stacked by category, over the operators of a step. {' '.join(en for en, _ in said)}",
        f"一步之中的存活字节，按类别堆叠，横轴是算子的执行顺序。{''.join(zh for _, zh in said)}",
    )
    return shown_once(drawn)


def schedule_pictures(
    schedules: Mapping[Any, Any],
    chain: Any,
    *,
    title: tuple[str, str] | str | None = None,
    unit: str = "MB",
    scale: float = 1e6,
    panel_height: float = 1.25,
) -> "Figure":
    """Schedules for one chain, one below the other on one scale: time to the right, stages upwards.

    Args:
        schedules: name -> `course_lib.schedule.Schedule`.
        chain: what they are for; times are drawn in units of its `store_all`.
        unit, scale: of the peak, and how many bytes make one.

    Returns:
        The figure; each panel is headed by the name, the peak and the time.
    """
    from matplotlib.patches import Patch

    from course_lib.schedule import COLORS as KEEP_COLORS
    from course_lib.schedule import simulate, store_all

    fastest = simulate(store_all(chain), chain).time
    costs = {name: simulate(schedule, chain) for name, schedule in schedules.items()}
    longest = max(cost.time for cost in costs.values())
    drawn, axes = figure(
        title, rows=len(schedules), height=1.3 + panel_height * len(schedules), sharex=True, sharey=True
    )
    panels = [axes] if len(schedules) == 1 else list(axes)
    for ax, (name, schedule) in zip(panels, schedules.items(), strict=True):
        schedule.plot(ax, chain=chain)
        ax.get_legend().remove()
        cost = costs[name]
        ax.set_title(f"{label(name)} · {cost.peak_bytes / scale:.4g} {unit} · {cost.time / fastest:.2f} ×", fontsize=9)
        ax.set(xlabel="", ylabel=text("stage", "级"), xlim=(0, longest))
        ax.grid(False)
    ticks = [fastest * i / 2 for i in range(int(2 * longest / fastest) + 1)]
    panels[-1].set_xticks(ticks, [f"{tick / fastest:g}" for tick in ticks])
    panels[-1].set_xlabel(text("time, in steps that store all", "时间，以全部保留的一步为单位"))
    names = {
        "all": ("forward, keeps all", "前向，全留"),
        "input": ("keeps its input", "只留输入"),
        "nothing": ("keeps nothing", "什么也不留"),
        "backward": ("backward", "反向"),
    }
    heads = [parts(ax.get_title("left")) for ax in panels]
    drawn.course_alt = (
        f"What runs and what is kept, over time and stages. Peak and time of each: {'; '.join(en for en, _ in heads)}.",
        f"横轴是时间，纵轴是级，画出运行的和留着的。各调度的峰值与时间：{'；'.join(zh for _, zh in heads)}。",
    )
    handles = [Patch(color=KEEP_COLORS[kind], label=label(words)) for kind, words in names.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return shown_once(drawn)


def waterfall_picture(
    names: Sequence[str | tuple[str, str]],
    estimates: Sequence[Any],
    measured: Sequence[int],
    budget_bytes: int,
    *,
    title: tuple[str, str] | str,
) -> "Figure":
    """From the plain step to a recipe: predicted peaks as stacked bars with their price, measured ones as points.

    Args:
        names: of the steps.
        estimates: a `course_lib.budget.Estimate` of each.
        measured: peak of each, bytes.
        budget_bytes: drawn as a line.
    """
    from course_lib.budget import waterfall

    drawn, ax = figure(title, height=4.6)
    labels = {name: label(words) for name, words in _CATEGORY_NAMES.items()}
    labels |= {"measured": text("measured", "实测"), "budget": text("budget", "预算")}
    shown = [label(name, separator="\n") for name in names]
    waterfall(estimates, measured=measured, budget_bytes=budget_bytes, names=shown, labels=labels, ax=ax)
    ax.grid(False)
    peaks = [f"{estimate.peak_bytes / 1e6:,.0f}" for estimate in estimates]
    pairs = [(name, name) if isinstance(name, str) else name for name in names]
    drawn.course_alt = (
        "Predicted peaks in MB: "
        + ", ".join(f"{en} {peak}" for (en, _), peak in zip(pairs, peaks, strict=True))
        + f"; the budget is {budget_bytes / 1e6:,.0f}.",
        "各步的峰值（MB，预测值）："
        + "，".join(f"{zh} {peak}" for (_, zh), peak in zip(pairs, peaks, strict=True))
        + f"；预算为 {budget_bytes / 1e6:,.0f}。",
    )
    return shown_once(drawn)


def shown_once(drawn: "Figure") -> "Figure":
    """Close a figure in a notebook, which else shows it twice: as the value of the cell and as an open figure."""
    import matplotlib

    if "inline" in matplotlib.get_backend():
        _pyplot().close(drawn)
    return drawn


def predicted_and_measured(
    ax: "Axes",
    x: Sequence[float],
    predicted: Callable[[int], float] | Sequence[float] | None,
    measured: Sequence[float],
    name: str | tuple[str, str],
    *,
    color: str | None = None,
) -> None:
    """Draw a prediction as a line and measurements as points, in one colour, with the name at the end of the line.

    The alt text says the first and the last measurement, so measure what is the same everywhere: bytes, FLOPs.

    Args:
        ax: where to draw.
        x: positions of the points.
        predicted: values of the line, or the formula itself for a smooth one; None to draw the points only.
        measured: values of the points, in the same unit.
        name: English, or an (English, Chinese) pair.
        color: instead of the course's colour for measurements; the line is the same, lighter.
    """
    color = color or COLORS["measured"]
    line_x = x
    if callable(predicted):
        line_x = [round(x[0] + (x[-1] - x[0]) * i / 100) for i in range(101)]
        predicted = [predicted(position) for position in line_x]
    if predicted is not None:
        ax.plot(line_x, predicted, "-", color=color, alpha=0.55, zorder=2)
    ax.plot(x, measured, "o", color=color, zorder=3)
    end = (x[-1], measured[-1])
    written = ax.annotate(
        label(name), end, xytext=(8, 0), textcoords="offset points", va="center", color=color, annotation_clip=False
    )
    written.course_ends = (f"{measured[0]:,.4g}", f"{measured[-1]:,.4g}")


class _Step:
    """What a meter recorded, as arrays."""

    def __init__(self, name: "str | tuple[str, str]", meter: Any) -> None:
        self.name, self.meter = name, meter
        series = meter.series()
        self.phases: list[str] = list(meter.phases())
        self.length = len(self.phases)
        if self.length == 0:
            raise ValueError(f"the meter of {label(name)!r} recorded no operator: run a step inside its `with` block")
        known = [category for category in _STACK if category in series]
        self.bytes = {
            category: series[category]
            for category in [*known, *(other for other in series if other not in _STACK)]
            if series[category].any()
        }
        self.total = sum(self.bytes.values())
        self.peak: int = meter.peak_bytes
        self.peak_at = int(self.total.argmax()) + 0.5  # the middle of the operator

    def runs(self) -> list[tuple[str, int, int]]:
        """(phase, first operator, one past the last) for each stretch of one phase."""
        found, start = [], 0
        for phase, stretch in itertools.groupby(self.phases):
            stop = start + len(list(stretch))
            found.append((phase, start, stop))
            start = stop
        return found

    def in_words(self) -> tuple[str, str]:
        """(English, Chinese): the peak, its phase, and the categories that can be seen there, the largest first."""
        at = int(self.total.argmax())
        held = sorted(((int(series[at]), category) for category, series in self.bytes.items()), reverse=True)
        seen = [(_CATEGORY_NAMES[name], f"{count / 1e6:,.1f} MB") for count, name in held if count > self.peak / 200]
        en = ", ".join(f"{words[0]} {size}" for words, size in seen)
        zh = "、".join(f"{words[1]} {size}" for words, size in seen)
        name, phase, peak = parts(label(self.name)), _phase_names(self.phases[at]), f"{self.peak / 1e6:,.1f} MB"
        return (
            f"{name[0]}: peak {peak} in the {phase[0]} phase, of it {en}.",
            f"{name[1]}：峰值 {peak}，出现在{phase[1]}阶段，其中{zh}。",
        )

    def layers(self) -> list[tuple[str, Any, Any]]:
        """(category, lower edge, upper edge) in MB, from the bottom up."""
        found, below = [], self.total * 0.0
        for category, held in self.bytes.items():
            above = below + held / 1e6
            found.append((category, below, above))
            below = above
        return found


def _draw_step(panel: "Axes", step: _Step) -> None:
    edges = range(step.length + 1)
    for category, below, above in step.layers():
        # The last value is repeated, so that the last operator has a width. Without antialiasing no seams show.
        panel.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post",
            antialiased=False, **category_look(category),
        )  # fmt: skip
    # An area narrower than a pixel may be skipped, a line never is: the outline keeps a peak of one operator visible.
    panel.stairs(step.total / 1e6, edges, baseline=None, color="#444444", linewidth=0.5)
    panel.set_xlim(0, step.length)
    panel.set_title(label(step.name), pad=17, color="#222222")
    panel.grid(visible=False)
    panel.tick_params(length=3)

    # Phases: a band above the panel, and a thin line down through it where one ends.
    across = panel.get_xaxis_transform()  # x in operators, y from 0 to 1 over the panel
    from matplotlib.patches import Rectangle

    for phase, start, stop in step.runs():
        band = Rectangle(
            (start, 1.0), stop - start, 0.095, transform=across, clip_on=False, linewidth=0,
            facecolor=_PHASE_COLORS.get(phase, "#EEEEEE"),
        )  # fmt: skip
        panel.add_patch(band)
        if start:
            panel.plot([start, start], [1, 1.095], transform=across, clip_on=False, color="white", linewidth=1.2)
            panel.plot([start, start], [0, 1], transform=across, color="#999999", linewidth=0.6, linestyle=(0, (1, 2)))
            panel.vlines(start, 0, step.total[start] / 1e6, color="white", linewidth=0.9, alpha=0.7)


def _label_areas(panel: "Axes", step: _Step) -> set[str]:
    """Write phases and categories where there is room for them, and say which categories found room."""
    per_point = panel.figure.dpi / 72
    box = panel.get_window_extent()
    operators_per_pixel = (panel.get_xlim()[1] - panel.get_xlim()[0]) / box.width
    mb_per_pixel = panel.get_ylim()[1] / box.height

    def room(words: str, size: float) -> tuple[float, float]:
        """Width in operators and height in MB that the words need."""
        width = _width_of(panel, words, size) + 6 * per_point
        return width * operators_per_pixel, (size * 1.15 + 1) * per_point * mb_per_pixel

    across = panel.get_xaxis_transform()
    look: dict[str, Any] = {"transform": across, "fontsize": 8, "color": "#444444", "va": "center_baseline"}
    unnamed: dict[str, int] = {}
    for phase, start, stop in step.runs():
        for words in _short_forms(phase):
            if room(words, 8)[0] <= stop - start:
                panel.text((start + stop) / 2, 1.045, words, ha="center", **look)
                unnamed[phase] = -1
                break
        else:
            unnamed.setdefault(phase, stop)
    taken = room(label(step.name), 10)[0]  # the panel's own title stands at the left
    for phase, stop in unnamed.items():
        words = _short_forms(phase)[0]
        if stop >= 0 and stop - room(words, 8)[0] > taken:
            panel.text(stop, 1.155, words, ha="right", **look)  # too narrow to write in: name it above, once
            taken = stop

    found = set()
    for category, below, above in step.layers():
        words, size = category_label(category) if category in _CATEGORY_NAMES else category, 9
        width, height = room(words, size)
        place = _roomiest(below, above, max(1, round(width)))
        if place is not None and place[2] >= height:
            x, y, _ = place
            panel.text(
                x, y, words, fontsize=size, ha="center", va="center_baseline",
                color="white" if category in ("parameter", "optimizer", "activation") else "#222222", zorder=7,
                bbox={"boxstyle": "square,pad=0.12", **category_look(category), "hatch": None},  # legible over hatching
            )  # fmt: skip
            found.add(category)
    return found


def _short_forms(phase: str) -> list[str]:
    """A phase's label, then shorter ones for a narrow stretch."""
    words = _phase_names(phase)
    return [label(words), words[1] if label(words) != words[0] else words[0]]


def _phase_names(phase: str) -> tuple[str, str]:
    return _PHASE_NAMES.get(phase, (phase, phase))


def _width_of(panel: "Axes", words: str, size: float) -> float:
    """Pixels."""
    trial = panel.text(0, 0, words, fontsize=size)
    width = trial.get_window_extent().width
    trial.remove()
    return width


def _roomiest(below: Any, above: Any, width: int) -> tuple[float, float, float] | None:
    """(centre x, centre y, height) of the highest box, `width` operators wide, that lies within a layer."""
    from numpy.lib.stride_tricks import sliding_window_view

    if width > len(below):
        return None
    floor = sliding_window_view(below, width).max(axis=1)
    ceiling = sliding_window_view(above, width).min(axis=1)
    height = ceiling - floor
    if height.max() <= 0:
        return None
    # Of equally high places take the middle one: a layer that never changes is named in the middle of the figure.
    high = (height >= 0.98 * height.max()).nonzero()[0]
    best = high[len(high) // 2]
    return best + width / 2, (ceiling[best] + floor[best]) / 2, height[best]


def _mark_peak(panel: "Axes", step: _Step, first: _Step | None) -> None:
    peak = step.peak / 1e6
    words = f"{text('peak', '峰值')} {peak:,.1f} MB"
    if first is not None and first.peak > 0:
        panel.axhline(first.peak / 1e6, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)))
        if step.peak != first.peak:
            words += f"  ({(step.peak / first.peak - 1) * 100:+.0f} %)".replace("-", "−")
    panel.plot([step.peak_at], [peak], "o", color="#222222", markersize=4.5, clip_on=False, zorder=8)
    left = step.peak_at > 0.55 * panel.get_xlim()[1]
    panel.annotate(
        words, (step.peak_at, peak), xytext=(5 if left else -4, 5), textcoords="offset points",
        ha="right" if left else "left", va="bottom", fontsize=9.5, color="#222222", zorder=8,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


def _name_the_rest(drawn: "Figure", steps: "Sequence[_Step]", named: set[str]) -> None:
    """A line of swatches below the figure for the categories whose areas are too thin to write in."""
    from matplotlib.patches import Patch

    visible = {c for step in steps for c, held in step.bytes.items() if held.max() > step.peak / 200}
    rest = [category for category in _STACK if category in visible - named]
    if rest:
        patches = [Patch(label=category_label(category), **category_look(category)) for category in rest]
        drawn.legend(
            handles=patches, loc="outside lower right", ncols=len(rest), fontsize=8.5,
            handlelength=0.9, handleheight=0.9, handletextpad=0.5, columnspacing=1.4,
        )  # fmt: skip


def _name(names: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return names[name]


def _pyplot() -> Any:
    """matplotlib.pyplot, with the course's font and style in force."""
    import matplotlib
    from matplotlib import cycler, font_manager, pyplot

    if not any(entry.fname == str(_FONT_FILE) for entry in font_manager.fontManager.ttflist):
        font_manager.fontManager.addfont(_FONT_FILE)
    if FONT not in matplotlib.rcParams["font.family"]:  # the first figure, or the first after a reset
        matplotlib.rcParams.update(_STYLE)
        colors = [COLORS[name] for name in ("parameter", "gradient", "activation", "optimizer", "buffer", "predicted")]
        matplotlib.rcParams["axes.prop_cycle"] = cycler(color=colors) + cycler(linestyle=_LINE_STYLES)
    return pyplot
