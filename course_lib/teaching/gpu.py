"""Display of GPU measurements in a lesson, each with its GPU, PyTorch version and date.

The measurements come from the module `recordings`.
"""

from collections.abc import Sequence

from course_lib.labels import Label, markup, say, text, verbatim

from .experiments import Experiment
from .recordings import RecordedResults
from .tables import NumberText, Table


class GpuResults:
    """Results of GPU experiments, which a notebook displays as tables.

    Above each table are the title of the experiment, and the GPUs on which it was measured.

    Args:
        parts: Pairs (experiment, results). The results are a sequence with one item per GPU, as
            `course_lib.teaching.recordings.results_of_gpus` returns it.

    Attributes:
        figures: Dict from the name of an experiment to its results on the first GPU, for further
            computations in a lesson.
    """

    def __init__(self, parts: Sequence[tuple[Experiment, Sequence[RecordedResults]]]) -> None:
        self.figures = {item.name: found[0] for item, found in parts}
        self._parts = parts

    def __repr__(self) -> str:
        texts = []
        for titles, item, found in self._blocks():
            lines = [*map(say, titles), *(say(line, separator="\n") for line in _origins(found))]
            table = [repr(_table(item, found))] if found[0].values else []
            texts.append("\n".join([*lines, *table]))
        return "\n\n".join(texts)

    def _repr_html_(self) -> str | None:
        texts = []
        for titles, item, found in self._blocks():
            table = _table(item, found)._repr_html_() if found[0].values else ""
            if table is None:
                return None  # without pandas the text is shown instead
            heads = "".join(f"<div><strong>{markup(title)}</strong></div>" for title in titles)
            origin = "".join(f"<div>{markup(line)}</div>" for line in _origins(found))
            texts.append(f'<div style="margin: 0.6em 0">{heads}{origin}{table}</div>')
        return f'<div class="course-gpu">{"".join(texts)}</div>'

    def _blocks(self) -> list[tuple[list[str], Experiment, Sequence[RecordedResults]]]:
        """Return the blocks of the display, as tuples (titles, experiment, results).

        Each experiment with results is a block. Consecutive experiments that lack results for the
        same reason share one block.
        """
        blocks: list[tuple[list[str], Experiment, Sequence[RecordedResults]]] = []
        for item, found in self._parts:
            if blocks and not found[0].values and blocks[-1][2] == found:
                blocks[-1][0].append(item.title)
            else:
                blocks.append(([item.title], item, found))
        return blocks


def _origins(found: Sequence[RecordedResults]) -> list[Label]:
    return [line for each in found for line in _origin(each)]


def _origin(found: RecordedResults) -> list[Label]:
    """Return the lines that state where and how the results were measured."""
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


def _table(item: Experiment, found: Sequence[RecordedResults]) -> Table:
    """Return a table of the results, with one column per GPU and a last column of exact bytes.

    If the bytes differ between GPUs, the last cell lists them in the order of the columns.
    """
    names = list(dict.fromkeys(name for each in found for name in each.values))
    several = len(found) > 1
    heads = [verbatim(str(each.gpu)) for each in found] if several else ["value"]
    rows, values = [], []
    for name in names:
        here = [each.values.get(name) for each in found]
        exact = [value for value in here if value is not None] if name.endswith("bytes") else []
        if len(set(exact)) == 1:
            exact = exact[:1]
        rows.append(
            (
                item.label_of(name),
                *(NumberText("–" if value is None else _cell(name, value)) for value in here),
                NumberText(" / ".join(f"{value:,}" for value in exact) or "–"),
            )
        )
        values.append((name, *here, exact[0] if len(exact) == 1 else None))
    return Table(["figure", *heads, "bytes"], rows, values=values)


def _cell(name: str, value: float) -> str:
    """Return a value as text with its unit, where 1 MB is 10**6 bytes."""
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        return f"{value:,} B" if abs(value) < 1000 else f"{value / 1e6:,.3f} MB"
    if unit == "seconds":
        return f"{value * 1e3:,.2f} ms"
    if unit == "flops":
        return f"{value / 1e9:,.3f} GFLOPs"
    return f"{value:,.2f} %" if unit == "percent" else f"{value:,}"
