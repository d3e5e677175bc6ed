"""The course's figure style: one font, and one meaning for each colour in all lessons.

matplotlib is imported when the first figure is drawn, not before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib import labels
from course_lib.labels.drawing import FAMILY, FONT, add_font
from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: One colour, one meaning, in every lesson: seven categories of bytes, and `predicted` (a line),
#: `measured` (points). Paul Tol's "bright" scheme and two more. Categories of equal grey differ in
#: their hatching.
COLORS = {**CATEGORY_COLORS, "predicted": "#333333", "measured": "#EE7733"}
HATCHES = {**dict.fromkeys(CATEGORY_COLORS), **CATEGORY_HATCHES}
_HATCH_COLOR = (1.0, 1.0, 1.0, 0.35)
#: Of curves that are given no style of their own: they differ without their colours too.
_LINE_STYLES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))

_STYLE = {
    "font.family": FAMILY,
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

CATEGORY_NAMES = {**{name: name for name in CATEGORY_COLORS}, "optimizer": "optimizer state"}
PHASE_NAMES = {name: name for name in ("forward", "backward", "optimizer")}


def category_label(name: str) -> labels.Label:
    """The label of a category of bytes, or of a phase ("optimizer" is the optimizer state here).

    Raises:
        ValueError: an unknown name.
    """
    return _label({**PHASE_NAMES, **CATEGORY_NAMES}, name)


def category_look(name: str) -> dict[str, Any]:
    """Colour and hatching of a category of bytes, as arguments of matplotlib's areas, bars and
    patches."""
    look = {"facecolor": COLORS.get(name, "#777777"), "hatch": HATCHES.get(name)}
    return {**look, "edgecolor": _HATCH_COLOR, "linewidth": 0}


def phase_label(name: str) -> labels.Label:
    """The label of a phase of the training step: forward, backward or optimizer.

    Raises:
        ValueError: an unknown name.
    """
    return _label(PHASE_NAMES, name)


def figure(
    title: str | None = None,
    *,
    rows: int = 1,
    columns: int = 1,
    width: float = 7.2,
    height: float = 3.4,
    sharex: bool = False,
    sharey: bool = False,
    alt: str | None = None,
) -> "tuple[Figure, Any]":
    """A figure in the course's style, which a notebook shows once in each language.

    It is drawn with English labels; those in Chinese are put in their places when it is shown.

    The first figure puts the style into matplotlib's `rcParams`, because labels that are set later
    take their font from there; change them after that, and your changes stay.

    Args:
        title: the message of the figure, not its axes.
        width, height: inches, at 100 dots an inch.
        alt: what the picture shows, in sentences, for readers who do not see it; the title is said
            before it. Left out, kinds of drawing, axes and labels are said: write one where that is
            too little.

    Returns:
        The figure, and its axes: one `Axes`, or an array of them if there are several rows or
        columns.
    """
    pyplot = _pyplot()
    drawn, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(width, height),
        dpi=100,
        sharex=sharex,
        sharey=sharey,
        layout="constrained",
    )
    if title is not None:
        drawn.suptitle(title, x=0.012, ha="left", linespacing=1.35)
    drawn.course_alt = alt
    # letters on a slide at most: `pictures.enlarged`; a figure with boxes sets less
    drawn.course_larger = 1.6
    return drawn, axes


def shown_once(drawn: "Figure") -> "Figure":
    """Close a figure in a notebook, which else shows it twice: as the value of the cell and as an
    open figure."""
    import matplotlib

    if "inline" in matplotlib.get_backend():
        _pyplot().close(drawn)
    return drawn


def predicted_and_measured(
    ax: "Axes",
    x: Sequence[float],
    predicted: Callable[[int], float] | Sequence[float] | None,
    measured: Sequence[float],
    name: str,
    *,
    color: str | None = None,
) -> None:
    """Draw a prediction as a line and measurements as points, in one colour, with the name at the
    end of the line.

    The alt text says the first and the last measurement, so measure what is the same everywhere:
    bytes, FLOPs.

    Args:
        ax: where to draw.
        x: positions of the points.
        predicted: values of the line, or the formula itself for a smooth one; None to draw the
            points only.
        measured: values of the points, in the same unit.
        name: the label of the points.
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
        name,
        end,
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=color,
        annotation_clip=False,
    )
    written.course_ends = (f"{measured[0]:,.4g}", f"{measured[-1]:,.4g}")


def _label(names: Mapping[str, str], name: str) -> labels.Label:
    if name not in names:
        raise ValueError(f"the name must be one of {', '.join(names)}, got {name!r}")
    return labels.text(names[name])


def _pyplot() -> Any:
    """matplotlib.pyplot, with the course's font and style in force."""
    import matplotlib
    from matplotlib import cycler, pyplot

    add_font()
    # the first figure, or the first after a reset
    if FONT not in matplotlib.rcParams["font.family"]:
        matplotlib.rcParams.update(_STYLE)
        colors = [
            COLORS[name]
            for name in ("parameter", "gradient", "activation", "optimizer", "buffer", "predicted")
        ]
        matplotlib.rcParams["axes.prop_cycle"] = cycler(color=colors) + cycler(
            linestyle=_LINE_STYLES
        )
    return pyplot
