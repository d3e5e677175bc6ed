"""Display of results: bytes and tables as text, tables also as HTML, and timelines as figures."""

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
# Hatches for the categories whose colors look alike in a gray print.
CATEGORY_HATCHES = {"parameter": "////", "optimizer": "xxxx", "buffer": r"\\\\", "input": "||||"}


def _labels() -> ModuleType:
    """Return the module of labels, which only what is shown needs, and not who copies the meter."""
    from course_lib import labels

    return labels


def bytes_text(count: int) -> Label:
    """Return bytes as text: 1234567 gives "1,234,567 bytes (1.23 MB)", where 1 MB is 10**6
    bytes."""
    text = _labels().text
    if abs(count) < 10_000:
        return text("{count:,} bytes", count=count)
    return text("{count:,} bytes ({megabytes:,.2f} MB)", count=count, megabytes=count / 1e6)


def bytes_in_english(count: int) -> str:
    """Return the English of `bytes_text`, without loading the labels."""
    megabytes = "" if abs(count) < 10_000 else f" ({count / 1e6:,.2f} MB)"
    return f"{count:,} bytes{megabytes}"


def decimal(value: float) -> str:
    """Return a number with three decimals, or with three significant digits if it is small.

    Example:
        >>> decimal(158.94), decimal(0.0000123), decimal(0)
        ('158.940', '0.0000123', '0.000')
    """
    if value == 0 or abs(value) >= 0.01:
        return f"{value:,.3f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


class Table:
    """Base class of results that are displayed as a table. A subclass defines `columns`, `rows()`
    and `caption()`.

    Columns and caption are labels. Cells are labels if `text` has made them, and otherwise code or
    numbers.
    """

    columns: Sequence[str] = ()

    def rows(self) -> list[Sequence]:
        raise NotImplementedError

    def caption(self) -> str:
        return ""

    def __str__(self) -> str:
        say = _labels().say
        cells = [[*map(say, self.columns)]] + [
            [_cell(value) for value in row] for row in self.rows()
        ]
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        numbers = [_numeric(row[i] for row in cells[1:]) for i in range(len(widths))]
        lines = ["  ".join(map(_pad, row, widths, numbers)) for row in cells]
        return "\n".join([*map(str.rstrip, lines), say(self.caption())]).rstrip()

    __repr__ = __str__

    def frame(self):
        """Return the rows as a `pandas.DataFrame`."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=list(self.columns), dtype=object)

    def _repr_html_(self) -> str:
        markup = _labels().markup
        lines = [[*map(_html, row)] for row in self.rows()]
        sides = [
            "right" if _numeric(line[i] for line in lines) else "left"
            for i in range(len(self.columns))
        ]
        head = _line("th", map(markup, self.columns), sides)
        body = "\n".join(_line("td", line, sides) for line in lines)
        table = f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>"
        return f'<table class="dataframe">\n{table}\n</table><p>{markup(self.caption())}</p>'


def _cell(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    labels = _labels()
    return labels.say(value) if isinstance(value, labels.Label) else str(value)


def _html(value) -> str:
    labels = _labels()
    return labels.markup(value) if isinstance(value, labels.Label) else html.escape(_cell(value))


def _line(tag: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    """Return a row as HTML. Each cell sets its alignment, because notebooks have their own
    alignment for tables."""
    written = (
        f'<{tag} style="text-align: {side}">{cell}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(written)}</tr>"


def _numeric(cells: Iterable[str]) -> bool:
    return all(re.fullmatch(r"[\d.,–-]*", cell) for cell in cells)


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _width(words: str) -> int:
    """Return how many terminal columns the words take. A Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in words)


def draw_timeline(history: Mapping[str, np.ndarray], peak_index: int, ax=None):
    """Draw the live MB (10**6 bytes) of each category, stacked, over the operators, and mark the
    peak.

    Args:
        history: Dict from category to the live bytes on entry and after each operator.
        peak_index: Index of the peak.
        ax: Matplotlib axes; None for new ones.

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
