"""Display bytes as text, tables as text or HTML, and timelines as plots."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from course_lib.labels import Label

CATEGORY_COLORS = {  # Paul Tol's "bright" scheme, which color-blind readers can distinguish
    "parameter": "#4477AA",
    "buffer": "#66CCEE",
    "gradient": "#EE6677",
    "optimizer": "#AA3377",
    "activation": "#228833",
    "temporary": "#CCBB44",
    "input": "#BBBBBB",
}
# Hatches distinguish the categories whose colors look alike in grayscale.
CATEGORY_HATCHES = {"parameter": "////", "optimizer": "xxxx", "buffer": r"\\\\", "input": "||||"}


def _labels() -> ModuleType:
    """Return the module `course_lib.labels`.

    It is imported only when a result is displayed, so that a copy of the meter works without it.
    """
    from course_lib import labels

    return labels


def bytes_text(count: int) -> Label:
    """Return a number of bytes as text, such as "1,234,567 bytes (1.23 MB)".

    1 MB is 10**6 bytes. Numbers below 10,000 are shown without MB. The result is a `Label`, whose
    text is displayed in the current language, English or Chinese.
    """
    text = _labels().text
    if abs(count) < 10_000:
        return text("{count:,} bytes", count=count)
    return text("{count:,} bytes ({megabytes:,.2f} MB)", count=count, megabytes=count / 1e6)


def bytes_in_english(count: int) -> str:
    """Return a number of bytes as an English string, such as "1,234,567 bytes (1.23 MB)".

    Error messages use this function instead of `bytes_text`, because this function does not import
    `course_lib.labels`. The text is the same as the English text of `bytes_text`.
    """
    megabytes = "" if abs(count) < 10_000 else f" ({count / 1e6:,.2f} MB)"
    return f"{count:,} bytes{megabytes}"


def decimal(value: float) -> str:
    """Return a number as text with three decimals, or with three significant digits if small.

    Three significant digits are used if the absolute value is below 0.01 and not 0.

    Example:
        >>> decimal(158.94), decimal(0.0000123), decimal(0)
        ('158.940', '0.0000123', '0.000')
    """
    if value == 0 or abs(value) >= 0.01:
        return f"{value:,.3f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


class Table:
    """Base class of results that are displayed as a table: as text, or as HTML in a notebook.

    A subclass sets `columns`, defines `rows`, and may define `caption`. The column names and the
    caption are displayed in the current language, English or Chinese. A cell is translated only if
    it is a label that `course_lib.labels.text` has made. Other cells are displayed unchanged.

    Attributes:
        columns: Names of the columns.
    """

    columns: Sequence[str] = ()

    def rows(self) -> list[Sequence]:
        """Return the rows of the table. Each row is a sequence with one cell per column."""
        raise NotImplementedError

    def caption(self) -> str:
        """Return the text below the table. An empty string means that there is no caption."""
        return ""

    def __str__(self) -> str:
        say = _labels().say
        cells = [[*map(say, self.columns)]] + [
            [_cell_text(value) for value in row] for row in self.rows()
        ]
        widths = [max(map(_display_width, column)) for column in zip(*cells, strict=True)]
        numbers = [_all_numeric(row[i] for row in cells[1:]) for i in range(len(widths))]
        lines = ["  ".join(map(_pad, row, widths, numbers)) for row in cells]
        return "\n".join([*map(str.rstrip, lines), say(self.caption())]).rstrip()

    __repr__ = __str__

    def frame(self):
        """Return the table as a `pandas.DataFrame`."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=list(self.columns), dtype=object)

    def _repr_html_(self) -> str:
        markup = _labels().markup
        lines = [[*map(_html_cell, row)] for row in self.rows()]
        sides = [
            "right" if _all_numeric(line[i] for line in lines) else "left"
            for i in range(len(self.columns))
        ]
        head = _html_row("th", map(markup, self.columns), sides)
        body = "\n".join(_html_row("td", line, sides) for line in lines)
        table = f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>"
        return f'<table class="dataframe">\n{table}\n</table><p>{markup(self.caption())}</p>'


def _cell_text(value) -> str:
    """Return a cell as plain text."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    labels = _labels()
    return labels.say(value) if isinstance(value, labels.Label) else str(value)


def _html_cell(value) -> str:
    """Return the content of a cell as HTML, without the enclosing `<td>` tag."""
    labels = _labels()
    return (
        labels.markup(value) if isinstance(value, labels.Label) else html.escape(_cell_text(value))
    )


def _html_row(tag: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    """Return a row of an HTML table.

    Each cell sets its own alignment, because the style sheets of notebooks align tables otherwise.

    Args:
        tag: "th" or "td".
        cells: Cells as HTML.
        sides: "left" or "right" for each cell.
    """
    written = (
        f'<{tag} style="text-align: {side}">{cell}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(written)}</tr>"


def _all_numeric(cells: Iterable[str]) -> bool:
    """Return whether each cell of a column is a number or empty. Such a column is right-aligned."""
    return all(re.fullmatch(r"[\d.,–-]*", cell) for cell in cells)


def _pad(cell: str, width: int, right: bool) -> str:
    """Return a cell padded to a width in terminal columns, aligned right or left."""
    space = " " * (width - _display_width(cell))
    return space + cell if right else cell + space


def _display_width(words: str) -> int:
    """Return the width of a text in terminal columns; a Chinese character takes two columns."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in words)


def draw_timeline(history: Mapping[str, np.ndarray], peak_index: int, ax=None):
    """Draw the live megabytes of all categories as a stacked area plot, and mark the peak.

    The horizontal axis counts operators. 1 MB is 10**6 bytes.

    Args:
        history: Dict from each of `CATEGORIES` to an array of its live bytes. Element 0 is the
            state on entry, and each further element is the state after one operator.
        peak_index: Index of the peak in these arrays.
        ax: Matplotlib axes to draw on; None creates new axes.

    Returns:
        The axes.
    """
    if ax is None:
        from course_lib.labels.drawing import pyplot

        ax = pyplot().subplots(figsize=(7.2, 3.2), layout="constrained")[1]
    series = {name: values / 1e6 for name, values in history.items() if values.any()}
    steps = np.arange(len(history["parameter"]))
    ax.stackplot(
        steps,
        *series.values(),
        labels=series.keys(),
        colors=[CATEGORY_COLORS[name] for name in series],
        hatch=[CATEGORY_HATCHES.get(name) for name in series] or None,
        edgecolor=(1, 1, 1, 0.35),
        step="post",
        linewidth=0,
    )
    peak = sum(int(values[peak_index]) for values in history.values()) / 1e6
    ax.plot(peak_index, peak, "kv", markersize=5)
    ax.annotate(
        f"{peak:,.2f} MB",
        (peak_index, peak),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
    )
    ax.set(
        xlabel="operators", ylabel="live MB", xlim=(0, len(steps)), ylim=(0, max(peak * 1.15, 1e-6))
    )
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax
