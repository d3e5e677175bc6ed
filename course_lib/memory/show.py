"""Bytes and tables as text; tables as HTML where pandas is installed."""

from __future__ import annotations

from collections.abc import Sequence


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
        right = [all(isinstance(row[i], int | float | None) for row in self.rows()) for i in range(len(widths))]
        lines = [
            "  ".join(
                cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([*lines, self.caption()]).rstrip()

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
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
