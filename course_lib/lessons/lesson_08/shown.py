"""What lesson 08 shows, and what it measures in the lesson's own process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.distributed import Taken, Trainer, last_complete, load, predict, task_of
from course_lib.labels import listed
from course_lib.memory import CATEGORIES, MemoryMeter
from course_lib.teaching import COLORS, category_label, figure, text
from course_lib.teaching.figures import category_look, shown_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGE_OF = {"ddp": "DDP", "zero1": "ZeRO 1", "fsdp-keep": "ZeRO 2", "fsdp": "ZeRO 3", "fsdp-checkpoint": "ZeRO 3"}
_COLORS = {"DDP": "#222222", "ZeRO 1": COLORS["parameter"], "ZeRO 2": "#888888", "ZeRO 3": COLORS["measured"]}


def held_by(run: Mapping[str, Any]) -> int:
    """What the fullest rank of a run holds when its optimizer steps: weights, gradients and state, in bytes.

    Of `fsdp-keep` it is what it holds between forward and backward: the gathered weights come on top.
    """
    held = max(map(sum, zip(*run["measured"].values(), strict=True)))
    return held + (run["taken"][0]["at_peak"]["gathered"] if run["mode"] == "fsdp-keep" else 0)


def draw_ranks(lines: Mapping[int, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Bytes that a rank holds, and bytes that it communicates in a step, over the number of ranks.

    Args:
        lines: ranks -> stage -> bytes held, by the reader's formulas.
        runs: lines of `launch`.
    """
    title = "What is cut falls to an n-th; a rank's traffic stays the same"
    drawn, (left, right) = figure(title, columns=2, width=8.6, height=3.7)
    for stage, color in _COLORS.items():
        own = sorted((run["ranks"], held_by(run)) for run in runs if STAGE_OF[run["mode"]] == stage)
        ranks, counts = list(lines), [line[stage] / 1e6 for line in lines.values()]
        left.plot(ranks, counts, color=color, alpha=0.55, linestyle="--" if stage == "ZeRO 2" else "-")
        filled = "none" if stage == "ZeRO 2" else color
        left.plot([n for n, _ in own], [count / 1e6 for _, count in own], "o", color=color, markerfacecolor=filled)
        left.annotate(
            stage, (ranks[-1], counts[-1]), xytext=(6, 0), textcoords="offset points", va="center", color=color
        )
    left.set(xlim=(0.7, 8), ylim=(0, 122), xlabel=text("ranks"), ylabel=text("held by a rank, MB"), xticks=[1, 2, 4, 8])
    _draw_sent(right, runs)
    drawn.get_layout_engine().set(wspace=0.06)  # room for the names at the ends of the lines
    drawn.course_alt = _alt(lines, runs)
    return shown_once(drawn)


def _draw_sent(ax: "Axes", runs: Sequence[Mapping[str, Any]]) -> None:
    for (stage, color), above in zip(_COLORS.items(), (-8, 7, 7, -7), strict=True):
        own = [(run["ranks"], run["communicated"]) for run in runs if STAGE_OF[run["mode"]] == stage]
        if own:
            predicted = own[0][1]["predicted"] / 1e6
            ax.plot([2, 8], [predicted] * 2, "-", color=color, alpha=0.55)
            ax.plot([n for n, _ in own], [counts["measured"] / 1e6 for _, counts in own], "o", color=color)
            place = {"xytext": (0, above), "textcoords": "offset points", "va": "center", "ha": "right"}
            ax.annotate(
                text("{stage} {sent} MB", stage=stage, sent=f"{predicted:.1f}"), (8, predicted), **place, color=color
            )
    ax.set(xlim=(1.5, 8), ylim=(0, 122), xlabel=text("ranks"), xticks=[2, 4, 8])
    ax.set_ylabel(text("communicated in a step, MB"))


def _alt(lines: Mapping[int, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]) -> str:
    def ends(stage: str) -> str:
        first, last = (f"{lines[n][stage] / 1e6:.1f}" for n in (min(lines), max(lines)))
        return text("{stage} from {first} to {last} MB", stage=stage, first=first, last=last)

    sent = {STAGE_OF[run["mode"]]: f"{run['communicated']['measured'] / 1e6:.1f}" for run in runs}
    return text(
        "Held by a rank, from 1 to 8 ranks: {held}. Communicated in a step, on any number of them: {sent}.",
        held=listed([ends(stage) for stage in _COLORS]),
        sent=listed([text("{stage} {sent} MB", stage=stage, sent=count) for stage, count in sent.items()]),
    )


def draw_peaks(arms: Mapping[str, Mapping[str, int]], title: str) -> "Figure":
    """What is live at the peak of each arm, as bars of the categories.

    Args:
        arms: label -> category -> bytes; "gathered" counts with the parameters, and is written beside them.
    """
    drawn, ax = figure(title, height=0.9 + 0.46 * len(arms), width=8.2)
    said = []
    for place, (name, parts) in enumerate(arms.items()):
        start, peak = 0.0, sum(parts.values()) / 1e6
        for category in ("parameter", "optimizer", "gradient", "activation", "temporary", "input"):
            count = (parts[category] + (parts.get("gathered", 0) if category == "parameter" else 0)) / 1e6
            ax.barh(place, count, left=start, height=0.66, **category_look(category))
            start += count
        ax.annotate(f"{peak:.1f}", (start, place), xytext=(5, 0), textcoords="offset points", va="center")
        said.append(text("{name}: {peak} MB", name=name, peak=f"{peak:.1f}"))
    ax.set_yticks(range(len(arms)), [text(name) for name in arms])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlim=(0, 305), xlabel=text("live at the peak, MB"))
    _legend(drawn, arms)
    drawn.course_alt = text("What is live at the peak of a step. {arms}.", arms=listed(said, "; "))
    return shown_once(drawn)


def _legend(drawn: "Figure", arms: Mapping[str, Mapping[str, int]]) -> None:
    from matplotlib.patches import Patch

    there = [name for name in CATEGORIES if max(parts.get(name, 0) for parts in arms.values()) > 1e6]
    handles = [Patch(label=category_label(name), **category_look(name)) for name in there]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5)


# Measured here --------------------------------------------------------------------------------------------------------


def symbolic_rank(mode: str, ranks: int) -> Taken:
    """What the course's step takes on one rank of so many, none of which is started."""
    task = task_of()
    return predict(task.make_model, lambda: task.part(0, ranks, 0), task.loss_sum, mode, ranks)


@contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resumed_alone(folder: str) -> list[float]:
    """The loss of a step that goes on, by DDP on one rank, from what other ranks have saved by any mode."""
    task = task_of()
    with _one_rank():
        trainer = Trainer("ddp", task.make_model(), task.loss_sum)
        return [trainer(task.make_batch(load(last_complete(folder), trainer)))]


def ddp_peak(tokens: int, *, view: bool) -> int:
    """The peak of the third step of DDP on 2 sequences, with and without `gradient_as_bucket_view`; on one rank."""
    task = task_of(batch=2, sequence=tokens)
    with _one_rank():
        model = task.make_model()
        with MemoryMeter(model) as meter:
            run = DistributedDataParallel(model, gradient_as_bucket_view=view)
            adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for step in range(3):  # buckets are made anew in the second
                adam.zero_grad()
                began, batch = len(meter.phases()), task.make_batch(step)
                loss, count = task.loss_sum(run, batch)
                (loss / count).backward()
                adam.step()
            return int(sum(meter.series().values())[began:].max())
