"""GPU figures in a lesson: measured now where there is a GPU, else recorded ones labelled as such, else none."""

from collections.abc import Sequence

from .experiments import Experiment
from .languages import label, label_html
from .recorded import Figures
from .tables import NumberText, Table

Pair = tuple[str, str]


class GpuFigures:
    """Experiments with their titles, where the figures are from, and the figures; it shows itself.

    Attributes:
        figures: experiment -> `course_lib.teaching.recorded.Figures`, for what a lesson does with the numbers.
    """

    def __init__(self, parts: Sequence[tuple[Experiment, Figures]]) -> None:
        self.figures = {item.name: found for item, found in parts}
        self._parts = parts

    def __repr__(self) -> str:
        texts = []
        for titles, item, found in self._blocks():
            lines = [*map(label, titles), *(label(line, separator="\n") for line in _origin(found))]
            texts.append("\n".join([*lines, repr(_table(item, found))] if found.values else lines))
        return "\n\n".join(texts)

    def _repr_html_(self) -> str | None:
        texts = []
        for titles, item, found in self._blocks():
            table = _table(item, found)._repr_html_() if found.values else ""
            if table is None:
                return None  # no pandas here: the text is shown instead
            heads = "".join(f"<div><strong>{label_html(title)}</strong></div>" for title in titles)
            origin = "".join(f"<div>{label_html(line)}</div>" for line in _origin(found))
            texts.append(f'<div style="margin: 0.6em 0">{heads}{origin}{table}</div>')
        return f'<div class="course-gpu">{"".join(texts)}</div>'

    def _blocks(self) -> list[tuple[list[Pair], Experiment, Figures]]:
        """Each experiment by itself; those without figures for the same reason together."""
        blocks: list[tuple[list[Pair], Experiment, Figures]] = []
        for item, found in self._parts:
            if blocks and not found.values and blocks[-1][2] == found:
                blocks[-1][0].append(item.title)
            else:
                blocks.append(([item.title], item, found))
        return blocks


def _origin(found: Figures) -> list[Pair]:
    """Where the figures are from."""
    lines: list[Pair] = []
    if found.problem is not None:
        lines.append(
            (f"The GPU here could not run it ({found.problem}).", f"本机的 GPU 无法运行这项实验（{found.problem}）。")
        )
    if found.source == "live":
        en = f"Measured now on {found.gpu}, torch {found.torch}, {found.date}."
        zh = f"刚刚在 {found.gpu} 上测得，torch {found.torch}，{found.date}。"
    elif found.source == "recorded":
        en = f"Recorded on {found.gpu}, torch {found.torch}, {found.date}; not measured on this machine."
        zh = f"{found.gpu} 上的记录，torch {found.torch}，{found.date}；不是在本机上测得的。"
    else:
        en = "No recording yet: run `make gpu` on a machine with a GPU."
        zh = "还没有记录：请在有 GPU 的机器上运行 `make gpu`。"
    return [*lines, (en, zh)]


def _table(item: Experiment, found: Figures) -> Table:
    columns = [("figure", "项目"), ("value", "数值"), ("bytes", "字节")]
    rows = [(item.label_of(name), *map(NumberText, _cells(name, value))) for name, value in found.values.items()]
    values = [(name, value, value if name.endswith("bytes") else None) for name, value in found.values.items()]
    return Table(columns, rows, values=values)


def _cells(name: str, value: float) -> tuple[str, str]:
    """(value in its unit, exact bytes) as text; 1 MB = 10**6 bytes."""
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return (f"{value:,} B" if abs(value) < 1000 else f"{value / 1e6:,.3f} MB"), f"{value:,}"
    if unit == "seconds":
        return f"{value * 1e3:,.2f} ms", "–"
    if unit == "flops":
        return f"{value / 1e9:,.3f} GFLOPs", "–"
    return (f"{value:,.2f} %" if unit == "percent" else f"{value:,}"), "–"
