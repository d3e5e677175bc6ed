"""Draw step.en.svg and step.zh.svg for the README: the course's training step, plain and
checkpointed, measured.

    python -m course_lib.teaching.editions.images.step

The bytes are the same on every machine, and the text is drawn as outlines, so the Chinese shows
where there is no Chinese font. The same versions of torch and matplotlib give the same file.
"""

import re
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.path import Path as Outline
from torch.utils.checkpoint import checkpoint

from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import timelines
from course_lib.teaching.pictures import LANGUAGES, drawn_in

matplotlib.use("Agg")
DRAWN = (Outline.MOVETO, Outline.LINETO)


class Checkpointed(torch.nn.Module):
    """A layer that keeps its input only and runs again in backward."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def step(*, checkpointed: bool) -> tuple[MemoryMeter, list[torch.Tensor | None]]:
    """The second training step with Adam of the course's decoder: its meter, and the gradients."""
    model = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
    if checkpointed:
        model.layers = torch.nn.ModuleList(map(Checkpointed, model.layers))
    optimizer = torch.optim.Adam(model.parameters())
    tokens = random_tokens(8, 128, 2048)
    for _ in range(2):  # the first step makes the optimizer's state
        optimizer.zero_grad()
        with MemoryMeter(model, optimizer) as meter:
            model.loss(tokens).backward()
            optimizer.step()
    return meter, [parameter.grad for parameter in model.parameters()]


def save_small(drawn: Figure, path: Path) -> None:
    """Save as SVG, without the points and digits of the areas' outlines that nobody can see."""
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
    """Save as the script's name with .en.svg and .zh.svg."""
    for language in LANGUAGES:
        path = script.with_suffix(f".{language}.svg")
        with drawn_in(drawn, language):
            save_small(drawn, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def main() -> None:
    (plain, gradients), (checkpointed, same_gradients) = (
        step(checkpointed=False),
        step(checkpointed=True),
    )
    assert all(map(torch.equal, gradients, same_gradients))
    arms = {"plain": plain, "every layer checkpointed": checkpointed}
    for name, meter in arms.items():
        print(f"{name}: {meter}")
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "step"})
    title = "The same step, the same gradients: forget activations, compute them again"
    save_in_each_language(timelines(arms, title=title), Path(__file__))


if __name__ == "__main__":
    main()
