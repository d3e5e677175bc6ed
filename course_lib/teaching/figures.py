"""The course's figure style: one font, and one meaning for each color in all lessons.

matplotlib is imported only when the first figure is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib import labels
from course_lib.labels.drawing import FAMILY, FONT, add_font
from course_lib.memory import CATEGORY_COLORS, CATEGORY_HATCHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: One color has one meaning in every lesson: one of seven categories of bytes, `predicted` (a line)
#: or `measured` (points). The colors are Paul Tol's "bright" scheme and two more. Categories whose
#: colors look alike in gray differ in their hatching.
COLORS = {**CATEGORY_COLORS, "predicted": "#333333", "measured": "#EE7733"}
HATCHES = {**dict.fromkeys(CATEGORY_COLORS), **CATEGORY_HATCHES}
_HATCH_COLOR = (1.0, 1.0, 1.0, 0.35)
#: Default line styles of curves, which differ even without colors.
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
    # The background is white in a dark theme too, because the text colors are dark.
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": "figure",
}

CATEGORY_NAMES = {**{name: name for name in CATEGORY_COLORS}, "optimizer": "optimizer state"}
PHASE_NAMES = {name: name for name in ("forward", "backward", "optimizer")}


def category_label(name: str) -> labels.Label:
    """Return the label of a category of bytes or of a phase of a training step.

    For the name "optimizer", which is both a category and a phase, the result is the label of the
    category, "optimizer state".

    Args:
        name: A category, such as "gradient", or a phase, such as "forward".

    Raises:
        ValueError: The name is unknown.
    """
    return _label({**PHASE_NAMES, **CATEGORY_NAMES}, name)


def category_look(name: str) -> dict[str, Any]:
    """Return the color and the hatching of a category of bytes, such as "gradient".

    Returns:
        Dict of keyword arguments for matplotlib's patches, such as bars.
    """
    look = {"facecolor": COLORS.get(name, "#777777"), "hatch": HATCHES.get(name)}
    return {**look, "edgecolor": _HATCH_COLOR, "linewidth": 0}


def phase_label(name: str) -> labels.Label:
    """Return the label of a phase of a training step.

    Args:
        name: "forward", "backward" or "optimizer".

    Raises:
        ValueError: The name is unknown.
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
    """Create a matplotlib figure in the course's style.

    All words in the figure must be in English. A notebook shows the figure once per language. In
    the second picture, it replaces the words by their Chinese translations.

    The first call sets the course's style in matplotlib's `rcParams`, because labels that are added
    later take their font from there. Later calls keep your own changes to `rcParams`.

    Args:
        title: The figure's message, as a full sentence, not the names of its axes.
        rows, columns: Number of rows and columns of panels.
        width, height: Size in inches, at 100 dots per inch.
        sharex, sharey: Whether the panels have the same x axis or y axis.
        alt: Sentences that describe the picture for people who cannot see it, without the title. By
            default, a description is generated from the kinds of drawing, the axes and the labels.

    Returns:
        The figure, and its axes: one `Axes`, or an array of them if there are several panels.
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
    # largest factor by which `pictures.enlarge` enlarges letters; figures whose letters must fit
    # into boxes set a smaller factor
    drawn.course_larger = 1.6
    return drawn, axes


def shown_once(drawn: "Figure") -> "Figure":
    """Close a figure, and return it as the value of a notebook cell.

    A notebook would show an open figure a second time. Outside of notebooks, the figure stays open.
    """
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
    """Draw a prediction as a line, and measurements as points of the same color with a label.

    The alt text of the figure contains the first and the last measurement. Therefore use this
    function for measurements that are the same on every machine, such as bytes or FLOPs.

    Args:
        ax: Axes to draw on.
        x: Positions of the points.
        predicted: Values of the line at the positions `x`, or a function of x, which is drawn as a
            smooth line. None draws points only.
        measured: Values of the points, in the unit of the prediction.
        name: Words that are written next to the last point, as a label.
        color: Color of the points. The default is the course's color for measurements. The line has
            a lighter shade of this color.
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
        raise ValueError(f"name must be one of {', '.join(names)}, got {name!r}")
    return labels.text(names[name])


def _pyplot() -> Any:
    """Return matplotlib.pyplot after setting the course's font and style."""
    import matplotlib
    from matplotlib import cycler, pyplot

    add_font()
    # the first figure, or the first figure after `rcParams` were reset
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
