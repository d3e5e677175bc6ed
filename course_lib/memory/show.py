"""How results show themselves: bytes and tables as text, tables as HTML where pandas is installed, timelines drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CATEGORY_COLORS = {  # Paul Tol's "bright" scheme: colour-blind readers can tell them apart
    "parameter": "#4477AA",
    "buffer": "#66CCEE",
    "gradient": "#EE6677",
    "optimizer": "#AA3377",
    "activation": "#228833",
    "temporary": "#CCBB44",
    "input": "#BBBBBB",
}
# Of the categories that a grey print would show alike.
CATEGORY_HATCHES = {"parameter": "////", "optimizer": "xxxx", "buffer": r"\\\\", "input": "||||"}


def bytes_text(count: int) -> str:
    """1234567 -> "1,234,567 bytes (1.23 MB)"; 1 MB = 10**6 bytes."""
    return f"{count:,} bytes" + (f" ({count / 1e6:,.2f} MB)" if abs(count) >= 10_000 else "")


class Table:
    """Base of the results that show themselves: a subclass gives `columns`, `rows()` and a `caption()`."""

    columns: Sequence[str] = ()

    def rows(self) -> list[Sequence]:
        raise NotImplementedError

    def caption(self) -> str:
        return ""

    def __str__(self) -> str:
        cells = [list(self.columns)] + [[_cell(value) for value in row] for row in self.rows()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numbers = [all(isinstance(row[i], int | float | None) for row in self.rows()) for i in range(len(widths))]
        puts = [str.rjust if number else str.ljust for number in numbers]
        lines = ["  ".join(put(cell, w) for put, cell, w in zip(puts, row, widths, strict=True)) for row in cells]
        return "\n".join([*map(str.rstrip, lines), self.caption()]).rstrip()

    __repr__ = __str__

    def frame(self):
        """The rows as a `pandas.DataFrame`."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=list(self.columns), dtype=object)

    def _repr_html_(self) -> str | None:
        try:
            html = self.frame().map(_cell).to_html(index=False, border=0)
        except ImportError:
            return None  # the notebook falls back to the text
        # A section, because the course's language switch hides paragraphs and divs: this table is in English only.
        return f'<section lang="en">{html}<p>{self.caption()}</p></section>'


def _cell(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw_timeline(history: Mapping[str, np.ndarray], peak_index: int, ax=None):
    """Live MB (10**6 bytes) of each category, stacked, over operators; the peak is marked.

    Args:
        history: category -> live bytes on entry and after each operator.
        peak_index: where the peak is.
        ax: matplotlib axes; without them, new ones.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    ax = ax if ax is not None else plt.subplots(figsize=(7.2, 3.2), layout="constrained")[1]
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
    ax.annotate(f"{peak:,.2f} MB", (peak_index, peak), xytext=(0, 6), textcoords="offset points", ha="center")
    ax.set(xlabel="operators", ylabel="live MB", xlim=(0, len(steps)), ylim=(0, max(peak * 1.15, 1e-6)))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax
