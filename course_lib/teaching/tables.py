"""Tables of results in both languages, laid out by pandas."""

import html
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from course_lib.labels import markup, say, text
from course_lib.memory import show

_UNITS = {
    "bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    "FLOPs": 1, "MFLOPs": 10**6, "GFLOPs": 10**9, "TFLOPs": 10**12,
}  # fmt: skip

#: A number, perhaps with commas or a power of ten, and perhaps a unit.
_PREDICTION = re.compile(r"([+-]?[\d,]*\d(?:\.\d*)?(?:[eE][+-]?\d+)?) *([A-Za-z]+)?")
#: A number that a lesson has formatted itself, such as 1,024, 0.50 or 12%, or a dash for a missing
#: value.
_WRITTEN_NUMBER = re.compile(r"[+−-]?(?!0\d)[\d,]+(\.\d+)?( ?[%×])?|–")


class Table(show.Table):
    """A table that displays itself in the language of the page.

    In a notebook the table is HTML. Outside a notebook it is text with aligned columns.

    Args:
        columns: Headings, as labels.
        rows: Cells to show: labels or numbers.
        values: Cells with unrounded numbers, which `data` and `rows()` return. By default, these
            are the cells in `rows`.

    Raises:
        ValueError: A row does not have one cell per column.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        values: Iterable[Sequence[Any]] | None = None,
    ) -> None:
        self._headings = list(columns)
        self._shown = [list(row) for row in rows]
        self._values = self._shown if values is None else [list(row) for row in values]
        for row in [*self._shown, *self._values]:
            if len(row) != len(self._headings):
                raise ValueError(
                    f"a row must have {len(self._headings)} cells, one per column, got {len(row)}:"
                    f" {row!r}"
                )
        self.columns = [str(heading) for heading in self._headings]

    def rows(self) -> list[Sequence]:
        """Return each row's cells: unrounded numbers, and labels in the current language."""
        return [
            [say(cell) if isinstance(cell, str) else cell for cell in row] for row in self._values
        ]

    @property
    def data(self) -> Any:
        """The cells with unrounded numbers, as a pandas DataFrame with English column names."""
        return self.frame()

    def __str__(self) -> str:
        headings = [say(heading) for heading in self._headings]
        rows = [[_cell_text(cell) for cell in row] for row in self._shown]
        # rows with long sentences are printed as blocks, with one cell below the other
        if any(len(cell) > 60 for row in rows for cell in row):
            items = (
                "\n".join(f"{name}: {cell}" for name, cell in zip(headings, row, strict=True))
                for row in rows
            )
            return "\n\n".join(items)
        try:
            import pandas
        except ImportError:
            return "\n".join("\t".join(row) for row in [headings, *rows])
        # Chinese characters are two columns wide in a terminal. The other options keep pandas from
        # cutting long cells and wide tables.
        options = (
            "display.unicode.east_asian_width",
            True,
            "display.max_colwidth",
            None,
            "display.width",
            None,
        )
        with pandas.option_context(*options):
            return pandas.DataFrame(rows, columns=headings).to_string(index=False)

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        try:
            import pandas
        except ImportError:
            return None  # without pandas the text is shown instead
        numeric = [
            any(map(_is_number, cells)) and all(_is_number(cell) or cell == "" for cell in cells)
            for cells in ([row[n] for row in self._shown] for n in range(len(self._headings)))
        ]
        headings = [
            _cell(heading, right) for heading, right in zip(self._headings, numeric, strict=True)
        ]
        rows = [
            [_cell(cell, right) for cell, right in zip(row, numeric, strict=True)]
            for row in self._shown
        ]
        frame = pandas.DataFrame(rows, columns=headings)
        with pandas.option_context("display.max_colwidth", None):
            return frame.to_html(index=False, escape=False, border=0, classes="course-table")


class NumberText(str):
    """Text of a number, such as "1,024" or "12%". Tables align it at the right, like a number."""


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Create a table of labels and numbers.

    Text in `backquotes` is shown as code, True as ✓, and False as ✗. A notebook displays the table
    in the language of the page.

    Example:
        >>> rows = table(["`recipe`", "MB"], [["`plain`", 277.7], ["`checkpointed`", 134.0]])
        >>> print(str(rows).splitlines()[-1].strip())
        `checkpointed` 134.0
    """
    rows = [list(row) for row in rows]
    decimals = [_decimals(column) for column in zip(*rows, strict=False)]
    shown = (
        [_plain_number(cell, n) for cell, n in zip(row, decimals, strict=False)] for row in rows
    )
    return Table(columns, shown, values=rows)


def compare(
    measurements: Mapping[str, Any] | None = None,
    /,
    *,
    seconds: bool = False,
    workspace: bool = False,
    **named: Any,
) -> Table:
    """Compare the peaks and FLOPs of several measurements in a table.

    Args:
        measurements: Dict from a label to a result of `measure`.
        seconds: Whether to add columns for the time and the device. Their values differ between
            runs, so the notebook cell needs the tag `nbval-ignore-output`.
        workspace: Whether to add two columns: the bytes that the operators' workspaces add to the
            peak, and the peak in the CUDA allocator. Their values differ between machines.
        named: More measurements as keyword arguments, `label=measurement`.

    Returns:
        Table with one row per measurement. It has columns for the peak in MB (10^6 bytes) and for
        the GFLOPs (10^9 FLOPs). Next to each of them is a column with the ratio to the first row.

    Raises:
        ValueError: No measurement is passed.
    """
    variants = {**(measurements or {}), **named}
    if not variants:
        raise ValueError(
            "compare needs at least one measurement, as in compare(plain=measure(step))"
        )
    first = next(iter(variants.values()))
    columns: list[str] = ["", "peak (MB)", "vs first", "GFLOPs", "FLOPs vs first"]
    if workspace:
        columns += ["workspace (MB)", "allocator's peak (MB)"]
    if seconds:
        columns += ["seconds", "device"]

    shown, values = [], []
    for name, variant in variants.items():
        peak_ratio, flops_ratio = (
            _ratio(variant.peak_bytes, first.peak_bytes),
            _ratio(variant.flops, first.flops),
        )
        row = [(name, name), _scale(variant.peak_bytes, 10**6), (peak_ratio, _times(peak_ratio))]
        row += [_scale(variant.flops, 10**9), (flops_ratio, _times(flops_ratio))]
        if workspace:
            row += [
                _scale(variant.workspace_bytes, 10**6),
                _scale(variant.allocator_peak_bytes, 10**6),
            ]
        if seconds:
            row += [
                (variant.seconds, NumberText(f"{variant.seconds:.4f}")),
                (variant.device, str(variant.device)),
            ]
        values.append([value for value, _ in row])
        shown.append([cell for _, cell in row])
    return Table(columns, shown, values=values)


def predictions(
    rows: Iterable[tuple[str, float | str | None, float | None]],
    unit: str = "MB",
    *,
    scale: float | None = None,
) -> Table:
    """Compare predictions with measurements in a table.

    The last column shows the error of the prediction in percent of the measurement.

    Args:
        rows: Tuples (label, predicted, measured), with both values in bytes or FLOPs. None means
            that a value is unknown. A prediction may be text with a unit, such as "300 MB".
        unit: Unit of the columns. With "bytes" or "FLOPs", whole numbers are shown. With "kB",
            "MB", "GB" (powers of 10), "KiB", "MiB", "GiB" (powers of 2), "MFLOPs", "GFLOPs" or
            "TFLOPs", numbers have three decimals.
        scale: Number of bytes or FLOPs per unit, for a `unit` that is not one of these.

    Raises:
        ValueError: The unit is unknown and `scale` is None, or a prediction is neither a number nor
            text with a number.
    """
    if scale is None:
        if unit not in _UNITS:
            raise ValueError(
                f"unit must be one of {', '.join(_UNITS)} if scale is None, got {unit!r};"
                " for another unit, also pass scale"
            )
        scale = _UNITS[unit]
    columns: list[str] = [
        "",
        text("predicted ({unit})", unit=unit),
        text("measured ({unit})", unit=unit),
        "error (%)",
    ]
    shown, values = [], []
    for name, prediction, measured in rows:
        predicted = _as_number(prediction)
        error = _error_percent(predicted, measured)
        cells = [
            (name, name),
            _scale(predicted, scale),
            _scale(measured, scale),
            (error, _percent(error)),
        ]
        values.append([value for value, _ in cells])
        shown.append([cell for _, cell in cells])
    return Table(columns, shown, values=values)


def _as_number(prediction: Any) -> float | None:
    """Return a prediction, such as 3e8, "300 MB" or a tensor with one element, as a number.

    The result is None if the prediction is None.
    """
    number = prediction.item() if hasattr(prediction, "item") else prediction
    if number is None or _is_real(number):
        return number
    if (
        isinstance(number, str)
        and (found := _PREDICTION.fullmatch(number.strip()))
        and (found[2] or "bytes") in _UNITS
    ):
        return float(found[1].replace(",", "")) * _UNITS[found[2] or "bytes"]
    raise ValueError(
        f'a prediction must be a number of bytes or FLOPs, such as 300e6 or "300 MB", got'
        f" {prediction!r}"
    )


def _scale(value: float | None, scale: float) -> tuple[float | None, str]:
    """Return a value divided by the scale, and the text that shows it.

    If the scale is 1, a whole number is shown to the last digit. Any other number is shown with
    three decimals.
    """
    if value is None or not math.isfinite(value):
        return None, NumberText("–")
    if scale == 1 and value == int(value):
        return int(value), NumberText(f"{int(value):,}")
    return value / scale, NumberText(f"{value / scale:,.3f}")


def _ratio(value: float, first: float) -> float | None:
    return value / first if first else None


def _times(ratio: float | None) -> str:
    return NumberText("–" if ratio is None else f"{ratio:.3f}×")


def _error_percent(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None:
        return None
    if predicted == measured:
        return 0.0
    return (predicted - measured) / measured * 100 if measured else None


def _percent(error: float | None) -> str:
    if error is None or not math.isfinite(error):
        return NumberText("–")
    if error == 0:
        return NumberText("0")  # exactly equal; any other error is shown with nonzero digits
    digits = max(2, -math.floor(math.log10(abs(error))))
    return NumberText(f"{error:+.{digits}f}".replace("-", "−"))


def _decimals(column: Sequence[Any]) -> int | None:
    """Return the largest number of decimals in a column.

    The result is None if a number of the column needs an exponent, as 1e-7 does.
    """
    written = [
        f"{float(cell):g}"
        for cell in column
        if _is_real(cell) and not isinstance(cell, numbers.Integral)
    ]
    if any("e" in each for each in written):
        return None
    return max((len(each.partition(".")[2]) for each in written), default=0)


def _plain_number(cell: Any, decimals: int | None) -> Any:
    if isinstance(cell, bool):
        return "✓" if cell else "✗"
    if not _is_real(cell):
        return (
            NumberText(cell) if isinstance(cell, str) and _WRITTEN_NUMBER.fullmatch(cell) else cell
        )
    if decimals is None:
        return NumberText(
            f"{int(cell):,}" if isinstance(cell, numbers.Integral) else f"{float(cell):g}"
        )
    return NumberText(f"{cell:,.{decimals}f}")


def _is_real(cell: Any) -> bool:
    return isinstance(cell, numbers.Real) and not isinstance(cell, bool)


def _is_number(cell: Any) -> bool:
    return isinstance(cell, NumberText) or _is_real(cell)


def _cell_text(cell: Any) -> str:
    return str(cell) if isinstance(cell, NumberText) else say(cell)


def _cell(cell: Any, right: bool) -> str:
    """Return a table cell as HTML, with its alignment in a <div>, because pandas sets none."""
    look = (
        "text-align: right; white-space: nowrap" if right else "text-align: left; max-width: 28em"
    )
    words = html.escape(cell) if isinstance(cell, NumberText) else markup(cell)
    # no line break before a unit
    words = re.sub(r"(?<=\d) (?=[kMG]?i?B\b|×(?! [\w(]))", "\u00a0", words)
    return f'<div style="{look}">{words}</div>'
