"""Elements that plots of several lessons share: words, boxes, arrows, points, bars and axes.

All words are labels (texts with a Chinese translation). A plot of `course_lib.teaching.figures`
shows them in the language of the page.
Keyword arguments `**look` are passed to matplotlib.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.labels import Label, join_labels, text

from .figures import COLORS, category_label, category_look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def label_axes(
    ax: "Axes", x: str = "", y: str = "", *, ticks: Iterable[float] | None = None, **look: Any
) -> None:
    """Label the x and the y axis of a panel.

    Args:
        ax: The panel.
        x, y: Labels of the axes, with their units.
        ticks: Positions on the x axis where a number is written. Other ticks are removed. By
            default, matplotlib chooses the positions.
        look: Other properties for `ax.set`, such as `xlim` or `yscale`.
    """
    ax.set(xlabel=text(x), ylabel=text(y), **look)
    if ticks is not None:
        ax.set_xticks([*ticks], [str(tick) for tick in ticks])
        ax.xaxis.set_minor_formatter("")


def note(
    ax: "Axes", words: str, point: tuple[float, float], offset: Any = (8, 0), **look: Any
) -> None:
    """Write words next to a point, by default to its right.

    Args:
        ax: Axes to write on.
        words: The words, as a label (text with a Chinese translation).
        point: The point, in data coordinates.
        offset: Distance of the words from the point, as a pair (to the right, upwards) in units of
            1/72 inch.
        look: Other arguments of `ax.annotate`.
    """
    look = {"textcoords": "offset points", "va": "center", **outline(), **look}
    ax.annotate(text(words), point, offset, **look)


def write(ax: "Axes", x: float, y: float, words: str, **look: Any) -> None:
    """Write words that are centered at a point in data coordinates.

    Args:
        ax: Axes to write on.
        x, y: The point.
        words: The words, as a label (text with a Chinese translation).
        look: Other arguments of `ax.text`.
    """
    ax.text(x, y, text(words), **{"ha": "center", "va": "center", **look})


def outline() -> dict[str, Any]:
    """Return arguments that outline words in white, so that no line crosses the letters."""
    from matplotlib.patheffects import withStroke

    return {"path_effects": [withStroke(linewidth=2.5, foreground="white")]}


def background(color: str, pad: float = 1) -> dict[str, Any]:
    """Return the argument `bbox` for words with a colored background.

    Args:
        color: Color of the background.
        pad: Width of the margin around the words, in units of 1/72 inch.
    """
    return {"facecolor": color, "edgecolor": "none", "pad": pad}


def box(ax: "Axes", corner: tuple[float, float], width: float, height: float, **look: Any) -> None:
    """Draw a rectangle.

    Args:
        ax: Axes to draw on.
        corner: Lower left corner, in data coordinates.
        width, height: Size, in data coordinates.
        look: Other arguments of matplotlib's `Rectangle`.
    """
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle(corner, width, height, **look))


def arrow(
    ax: "Axes", start: tuple[float, float], end: tuple[float, float], style: str = "->", **look: Any
) -> None:
    """Draw an arrow between two points in data coordinates.

    Args:
        ax: Axes to draw on.
        start, end: The points.
        style: Arrow style of matplotlib.
        look: Other properties of the arrow, such as `color`.
    """
    look = {"arrowstyle": style, "color": "#222222", **look}
    ax.annotate("", end, start, arrowprops=look)


def points(
    ax: "Axes", values: Mapping[Any, float], style: str = "o", *, unit: float = 1, **look: Any
) -> None:
    """Draw values as points or as a line, by default in the course's color for measurements.

    Args:
        ax: Axes to draw on.
        values: Dict from x coordinate to value.
        style: matplotlib's marker and line style, such as "o" or "s--".
        unit: Number by which the values are divided, such as 1e6 for MB.
        look: Other arguments of `ax.plot`.
    """
    heights = [value / unit for value in values.values()]
    ax.plot([*values], heights, style, **{"color": COLORS["measured"], **look})


def stacked_bars(
    ax: "Axes",
    bars: Mapping[Any, Mapping[str, float]],
    categories: Sequence[str],
    width: float,
    *,
    upright: bool = False,
) -> list[float]:
    """Draw one stacked bar per position, and return the total of each bar in MB.

    A bar has one part per category of bytes. Bytes are drawn in MB.

    Args:
        ax: Axes to draw on.
        bars: Dict from the position of a bar to a dict from category to bytes. A missing category
            has 0 bytes.
        categories: Categories to draw and to add to the legend, in this order.
        width: Width of a bar, in data coordinates.
        upright: Whether the bars are vertical instead of horizontal.
    """
    draw, first = (ax.bar, "bottom") if upright else (ax.barh, "left")
    ends = [0.0] * len(bars)
    for category in categories:
        sizes = [parts.get(category, 0) / 1e6 for parts in bars.values()]
        look = {"label": category_label(category), **category_look(category)}
        draw([*bars], sizes, width, **{first: ends}, **look)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    return ends


def name_rows(ax: "Axes", names: Sequence[str]) -> None:
    """Write the names of rows on the y axis, from top to bottom, and remove the grid.

    The first name is at y = 0, the second name at y = 1, and so on.
    """
    ax.set_yticks(range(len(names)), [text(name) for name in names])
    ax.invert_yaxis()
    ax.grid(visible=False)


def category_legend(drawn: "Figure", names: Iterable[str], **look: Any) -> None:
    """Add a legend of categories of bytes below a figure.

    Args:
        drawn: The figure.
        names: Names of the categories, such as "gradient".
        look: Other arguments of matplotlib's `Figure.legend`.
    """
    from matplotlib.patches import Patch

    handles = [Patch(label=category_label(name), **category_look(name)) for name in names]
    drawn.legend(handles=handles, **{"loc": "outside lower center", "ncols": len(handles), **look})


def clauses(pattern: str, rows: Iterable[Mapping[str, object]]) -> Label:
    """Fill a pattern once per item, and join the results with semicolons to one sentence.

    The sentence is for the alt text of a figure.

    Args:
        pattern: English text with placeholders, such as "{name}: {peak} MB".
        rows: One dict per item, which maps each placeholder to its value, such as {"name": "plain",
            "peak": 12}.
    """
    return text("{points}.", points=join_labels([text(pattern, **row) for row in rows], "; "))
