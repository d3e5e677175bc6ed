"""The display of GPU figures in a lesson, with a line that states where they were measured.

The figures themselves come from `recordings`.
"""

from collections.abc import Sequence

from course_lib.labels import Label, markup, say, text, verbatim

from .experiments import Experiment
from .recordings import Figures
from .tables import NumberText, Table


class GpuFigures:
    """Display of GPU experiments: titles, figures, and where the figures were measured.

    Attributes:
        figures: Name of an experiment -> its `course_lib.teaching.recordings.Figures`, for further
            computations of a lesson.
    """

    def __init__(self, parts: Sequence[tuple[Experiment, Figures]]) -> None:
        self.figures = {item.name: found for item, found in parts}
        self._parts = parts

    def __repr__(self) -> str:
        texts = []
        for titles, item, found in self._blocks():
            lines = [*map(say, titles), *(say(line, separator="\n") for line in _origin(found))]
            texts.append("\n".join([*lines, repr(_table(item, found))] if found.values else lines))
        return "\n\n".join(texts)

    def _repr_html_(self) -> str | None:
        texts = []
        for titles, item, found in self._blocks():
            table = _table(item, found)._repr_html_() if found.values else ""
            if table is None:
                return None  # without pandas the text is shown instead
            heads = "".join(f"<div><strong>{markup(title)}</strong></div>" for title in titles)
            origin = "".join(f"<div>{markup(line)}</div>" for line in _origin(found))
            texts.append(f'<div style="margin: 0.6em 0">{heads}{origin}{table}</div>')
        return f'<div class="course-gpu">{"".join(texts)}</div>'

    def _blocks(self) -> list[tuple[list[str], Experiment, Figures]]:
        """Return one block per experiment, or per run of those that lack figures for one reason."""
        blocks: list[tuple[list[str], Experiment, Figures]] = []
        for item, found in self._parts:
            if blocks and not found.values and blocks[-1][2] == found:
                blocks[-1][0].append(item.title)
            else:
                blocks.append(([item.title], item, found))
        return blocks


def _origin(found: Figures) -> list[Label]:
    """Return the lines that state where and how the figures were measured."""
    lines = []
    measured = {"gpu": verbatim(found.gpu), "torch": found.torch, "date": found.date}
    if found.problem is not None:
        lines.append(
            text("The GPU here could not run it ({problem}).", problem=verbatim(found.problem))
        )
    if found.source == "live":
        lines.append(text("Measured now on {gpu}, torch {torch}, {date}.", **measured))
    elif found.source == "recorded":
        lines.append(
            text(
                "Recorded on {gpu}, torch {torch}, {date}; not measured on this machine.",
                **measured,
            )
        )
    else:
        lines.append(text("No recording yet: run `make gpu` on a machine with a GPU."))
    if found.smaller:
        sizes = ", ".join(f"{name} {value}" for name, value in found.smaller.items())
        lines.append(text("Sizes reduced to fit into memory: {sizes}.", sizes=verbatim(sizes)))
    if found.notes:
        notes = ", ".join(f"{name}: {value}" for name, value in found.notes.items())
        lines.append(text("Implementations that ran: {notes}.", notes=verbatim(notes)))
    return lines


def _table(item: Experiment, found: Figures) -> Table:
    columns = ["figure", "value", "bytes"]
    rows = [
        (item.label_of(name), *map(NumberText, _cells(name, value)))
        for name, value in found.values.items()
    ]
    values = [
        (name, value, value if name.endswith("bytes") else None)
        for name, value in found.values.items()
    ]
    return Table(columns, rows, values=values)


def _cells(name: str, value: float) -> tuple[str, str]:
    """Return (value in its unit, exact bytes) as text; 1 MB = 10**6 bytes."""
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return (f"{value:,} B" if abs(value) < 1000 else f"{value / 1e6:,.3f} MB"), f"{value:,}"
    if unit == "seconds":
        return f"{value * 1e3:,.2f} ms", "–"
    if unit == "flops":
        return f"{value / 1e9:,.3f} GFLOPs", "–"
    return (f"{value:,.2f} %" if unit == "percent" else f"{value:,}"), "–"
