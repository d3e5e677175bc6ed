"""Draw step.en.svg and step.zh.svg for the README: a measured step and lesson 00's question.

    python -m publish.images.step

The measured bytes are the same on every machine. The text is drawn as outlines, so the Chinese
shows without a Chinese font. The same versions of torch and matplotlib give the same file.
"""

import re
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline

from course_lib.labels import text
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import timelines
from course_lib.teaching.pictures import LANGUAGES, drawn_in

matplotlib.use("Agg")
DRAWN = (Outline.MOVETO, Outline.LINETO)


def step() -> MemoryMeter:
    """Return the meter of the second training step (Adam) of the course's decoder."""
    model = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
    optimizer = torch.optim.Adam(model.parameters())
    tokens = random_tokens(8, 128, 2048)
    for _ in range(2):  # the first step makes the optimizer's state
        optimizer.zero_grad()
        with MemoryMeter(model, optimizer) as meter:
            model.loss(tokens).backward()
            optimizer.step()
    return meter


def question(meter: MemoryMeter) -> Figure:
    """Draw the timeline of a step, and next to it an empty panel for the learner's guess."""
    title = "The same gradients with every layer checkpointed: how high is the peak?"
    drawn = timelines({"plain": meter}, title=title, panel_height=1.7)
    grid = drawn.add_gridspec(1, 2)
    measured = drawn.axes[0]
    measured.set_subplotspec(grid[0])
    hidden = drawn.add_subplot(grid[1], sharey=measured)
    hidden.set_title(text("every layer checkpointed"), pad=17, color="#222222")
    hidden.text(0.5, 0.45, "?", transform=hidden.transAxes, ha="center", va="center", fontsize=34)
    hidden.set_xticks([])
    hidden.grid(visible=False)
    return drawn


def save_small(drawn: Figure, path: Path) -> None:
    """Save a figure as a small SVG.

    Points and digits of the areas' outlines that are too fine to be seen are left out.
    """
    drawn.draw_without_rendering()
    for areas in drawn.findobj(PolyCollection):
        to_pixels = areas.get_transform()
        outlines = [outline.cleaned(to_pixels, simplify=True) for outline in areas.get_paths()]
        areas.set_verts(
            [to_pixels.inverted().transform(o.vertices[np.isin(o.codes, DRAWN)]) for o in outlines]
        )
    drawn.savefig(path, metadata={"Date": None, "Creator": None})
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(
        r' d="[^"]*"', lambda d: re.sub(r"(\.\d)\d+", r"\1", d[0]).replace(" \n", "\n"), svg
    )
    path.write_text("\n".join(line.strip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def save_in_each_language(drawn: Figure, script: Path) -> None:
    """Save a figure in English and in Chinese, next to the script that draws it.

    The files have the name of the script, with .en.svg and .zh.svg instead of .py.
    """
    for language in LANGUAGES:
        path = script.with_suffix(f".{language}.svg")
        with drawn_in(drawn, language):
            save_small(drawn, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def main() -> None:
    meter = step()
    print(meter)
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "step"})
    save_in_each_language(question(meter), Path(__file__))


if __name__ == "__main__":
    main()
