"""Tables and figures of lesson 08, and measurements in the lesson's own process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.distributed import RankUsage, Trainer, last_complete, load, predict, task_of
from course_lib.labels import join_labels, verbatim
from course_lib.memory import CATEGORIES, MemoryMeter
from course_lib.teaching import COLORS, category_label, figure, text
from course_lib.teaching.figures import category_look, shown_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGE_OF = {
    "ddp": "DDP",
    "zero1": "ZeRO 1",
    "fsdp-keep": "ZeRO 2",
    "fsdp": "ZeRO 3",
    "fsdp-checkpoint": "ZeRO 3",
}
_COLORS = {
    "DDP": "#222222",
    "ZeRO 1": COLORS["parameter"],
    "ZeRO 2": "#888888",
    "ZeRO 3": COLORS["measured"],
}


def held_by(run: Mapping[str, Any]) -> int:
    """Return the bytes that the fullest rank of a run holds when its optimizer steps.

    They are weights, gradients and state. For `fsdp-keep`, the gathered weights are added, which it
    holds between forward and backward.
    """
    held = max(map(sum, zip(*run["measured"].values(), strict=True)))
    return held + (run["taken"][0]["at_peak"]["gathered"] if run["mode"] == "fsdp-keep" else 0)


def draw_ranks(
    lines: Mapping[int, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]
) -> "Figure":
    """Draw bytes that a rank holds, and bytes that it communicates per step, over the ranks.

    Args:
        lines: Ranks -> stage -> bytes held, by the reader's formulas.
        runs: Lines of `launch`.
    """
    title = "Sharded bytes fall to 1/n per rank, but the communication volume stays the same"
    drawn, (left, right) = figure(title, columns=2, width=8.6, height=3.7)
    for stage, color in _COLORS.items():
        own = sorted((run["ranks"], held_by(run)) for run in runs if STAGE_OF[run["mode"]] == stage)
        ranks, counts = list(lines), [line[stage] / 1e6 for line in lines.values()]
        left.plot(
            ranks, counts, color=color, alpha=0.55, linestyle="--" if stage == "ZeRO 2" else "-"
        )
        filled = "none" if stage == "ZeRO 2" else color
        left.plot(
            [n for n, _ in own],
            [count / 1e6 for _, count in own],
            "o",
            color=color,
            markerfacecolor=filled,
        )
        left.annotate(
            stage,
            (ranks[-1], counts[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    left.set(
        xlim=(0.7, 8),
        ylim=(0, 122),
        xlabel=text("ranks"),
        ylabel=text("held per rank (MB)"),
        xticks=[1, 2, 4, 8],
    )
    _draw_sent(right, runs)
    drawn.get_layout_engine().set(wspace=0.06)  # room for the names at the ends of the lines
    drawn.course_alt = _alt_text(lines, runs)
    return shown_once(drawn)


def _draw_sent(ax: "Axes", runs: Sequence[Mapping[str, Any]]) -> None:
    for (stage, color), above in zip(_COLORS.items(), (-8, 7, 7, -7), strict=True):
        own = [
            (run["ranks"], run["communicated"]) for run in runs if STAGE_OF[run["mode"]] == stage
        ]
        if own:
            predicted = own[0][1]["predicted"] / 1e6
            ax.plot([2, 8], [predicted] * 2, "-", color=color, alpha=0.55)
            ax.plot(
                [n for n, _ in own],
                [counts["measured"] / 1e6 for _, counts in own],
                "o",
                color=color,
            )
            place = {
                "xytext": (0, above),
                "textcoords": "offset points",
                "va": "center",
                "ha": "right",
            }
            ax.annotate(
                text("{stage} {sent} MB", stage=stage, sent=f"{predicted:.1f}"),
                (8, predicted),
                **place,
                color=color,
            )
    ax.set(xlim=(1.5, 8), ylim=(0, 122), xlabel=text("ranks"), xticks=[2, 4, 8])
    ax.set_ylabel(text("communicated per step (MB)"))


def _alt_text(lines: Mapping[int, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]) -> str:
    def ends(stage: str) -> str:
        first, last = (f"{lines[n][stage] / 1e6:.1f}" for n in (min(lines), max(lines)))
        return text("{stage} from {first} to {last} MB", stage=stage, first=first, last=last)

    sent = {STAGE_OF[run["mode"]]: f"{run['communicated']['measured'] / 1e6:.1f}" for run in runs}
    return text(
        "Bytes held per rank, from 1 to 8 ranks: {held}. Bytes communicated per step, for any"
        " number of ranks: {sent}.",
        held=join_labels([ends(stage) for stage in _COLORS]),
        sent=join_labels(
            [text("{stage} {sent} MB", stage=stage, sent=count) for stage, count in sent.items()]
        ),
    )


def draw_peaks(variants: Mapping[str, Mapping[str, int]], title: str) -> "Figure":
    """Draw what is live at the peak of each variant, as stacked bars.

    Args:
        variants: Label -> category -> bytes. "gathered" is added to the parameters, and its number
            is written next to them.
    """
    drawn, ax = figure(title, height=0.9 + 0.46 * len(variants), width=8.2)
    description = []
    for place, (name, parts) in enumerate(variants.items()):
        start, peak = 0.0, sum(parts.values()) / 1e6
        for category in ("parameter", "optimizer", "gradient", "activation", "temporary", "input"):
            count = (
                parts[category] + (parts.get("gathered", 0) if category == "parameter" else 0)
            ) / 1e6
            ax.barh(place, count, left=start, height=0.66, **category_look(category))
            start += count
        ax.annotate(
            f"{peak:.1f}", (start, place), xytext=(5, 0), textcoords="offset points", va="center"
        )
        description.append(text("{name}: {peak} MB", name=name, peak=f"{peak:.1f}"))
    ax.set_yticks(range(len(variants)), [text(name) for name in variants])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlim=(0, 305), xlabel=text("live at the peak (MB)"))
    _legend(drawn, variants)
    drawn.course_alt = text(
        "Bytes that are live at the peak of a step. {variants}.",
        variants=join_labels(description, "; "),
    )
    return shown_once(drawn)


def _legend(drawn: "Figure", variants: Mapping[str, Mapping[str, int]]) -> None:
    from matplotlib.patches import Patch

    shown = [
        name for name in CATEGORIES if max(parts.get(name, 0) for parts in variants.values()) > 1e6
    ]
    handles = [Patch(label=category_label(name), **category_look(name)) for name in shown]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5)


def draw_budgets(alone: Any, run: Mapping[str, Any], device_bytes: int) -> "Figure":
    """Draw one device that stops at its budget next to ranks that keep within theirs.

    Args:
        alone: The `MemoryBudgetExceeded` of the device.
        run: A line of `launch` under a budget.
        device_bytes: Budget of the device.
    """
    peaks = [taken["peak_bytes"] for taken in run["taken"]]
    drawn, ax = figure(
        "One device runs out of memory, but four smaller ones process the whole batch",
        height=2.9,
        width=8.2,
    )
    wanted = (alone.live_bytes + alone.wanted_bytes) / 1e6
    ax.barh(0, alone.live_bytes / 1e6, height=0.6, color="#999999")
    ax.barh(
        0,
        alone.wanted_bytes / 1e6,
        left=alone.live_bytes / 1e6,
        height=0.6,
        facecolor="none",
        edgecolor="#CC3311",
    )
    ax.annotate(
        text("needs {wanted} MB", wanted=f"{wanted:.1f}"),
        (device_bytes / 1e6, -0.32),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color="#CC3311",
        fontsize=8.5,
    )
    for rank, peak in enumerate(peaks, 1):
        ax.barh(rank, peak / 1e6, height=0.6, color=COLORS["measured"])
        ax.annotate(
            f"{peak / 1e6:.1f}", (1, rank), xytext=(4, 0), textcoords="offset points", va="center"
        )
    for budget, first, last in (
        (device_bytes, -0.5, 0.5),
        (run["budget_bytes"], 0.5, len(peaks) + 0.5),
    ):
        ax.plot([budget / 1e6] * 2, [first, last], color="#222222", linewidth=1.8)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        description = text("budget {budget} MB", budget=f"{budget / 1e6:.0f}")
        ax.annotate(
            description,
            (budget / 1e6, (first + last) / 2 + (0.32 if last == 0.5 else 0)),
            **place,
            fontsize=8.5,
        )
    names = [
        "one device, 1 sequence",
        *(text("rank {rank}, 2 sequences", rank=rank) for rank in range(len(peaks))),
    ]
    ax.set_yticks(range(len(names)), [text(names[0]), *names[1:]])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set(xlim=(0, 76), xlabel=text("live at the peak (MB)"))
    drawn.course_alt = text(
        "One device of {device} MB is stopped when it needs {wanted} MB. With a budget of"
        " {budget} MB each, the ranks peak at {peaks} MB.",
        device=f"{device_bytes / 1e6:.0f}",
        wanted=f"{wanted:.1f}",
        budget=f"{run['budget_bytes'] / 1e6:.0f}",
        peaks=join_labels([f"{peak / 1e6:.1f}" for peak in peaks]),
    )
    return shown_once(drawn)


def draw_seconds(traffic: Mapping[str, float], compute_a_token: float, least: float) -> "Figure":
    """Draw seconds of a step's compute over the tokens of a rank, and seconds of its traffic.

    The traffic does not depend on the number of tokens.

    Args:
        traffic: Label -> seconds.
        compute_a_token: Seconds per token.
        least: Tokens from which the first traffic takes no longer than the compute.
    """
    drawn, ax = figure(
        "Compute grows with the tokens per rank and communication does not, so long steps hide it",
        width=8.2,
    )
    most = 1.4 * least or 1.0  # if nothing is solved yet, axes of some width
    ax.plot([0, most], [0, most * compute_a_token], color=COLORS["predicted"])
    place = {"xytext": (-18, 0), "textcoords": "offset points"}
    ax.annotate(text("compute"), (most, most * compute_a_token), **place, ha="right", va="center")
    for (name, seconds), shade in zip(
        traffic.items(), (COLORS["measured"], "#AA3377", "#4477AA"), strict=False
    ):
        ax.plot([0, most], [seconds] * 2, color=shade, linestyle="--")
        description = text("{name}: {seconds} s", name=verbatim(name), seconds=f"{seconds:.1f}")
        ax.annotate(
            description, (0, seconds), xytext=(6, 4), textcoords="offset points", color=shade
        )
    ax.plot([least], [least * compute_a_token], "o", color=COLORS["measured"])
    ax.set(
        xlim=(0, most),
        ylim=(0, None),
        xlabel=text("tokens per rank and step"),
        ylabel=text("seconds"),
    )
    drawn.course_alt = text(
        "Communication: {traffic}. From {tokens} tokens on, compute takes at least as long as"
        " the first of them.",
        traffic=join_labels(
            [
                text("{name}: {seconds} s", name=verbatim(n), seconds=f"{s:.1f}")
                for n, s in traffic.items()
            ]
        ),
        tokens=f"{least:,.0f}",
    )
    return shown_once(drawn)


# Measured here
# --------------------------------------------------------------------------------------------------


def symbolic_rank(mode: str, ranks: int) -> RankUsage:
    """Measure the course's step on one of several ranks, without starting them."""
    task = task_of()
    return predict(task.make_model, lambda: task.part(0, ranks, 0), task.loss_sum, mode, ranks)


@contextmanager
def as_rank_of(ranks: int) -> Iterator[None]:
    """Run this process as rank 0 of `ranks`, with collectives that return at once.

    Bytes are right, but values are not.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resumed_alone(folder: str) -> list[float]:
    """Return the loss of a step by DDP on one rank, after loading what other ranks have saved.

    They may have saved it in any mode.
    """
    task = task_of()
    with _one_rank():
        trainer = Trainer("ddp", task.make_model(), task.loss_sum)
        return [trainer(task.make_batch(load(last_complete(folder), trainer)))]


def ddp_peak(tokens: int, *, view: bool) -> int:
    """Return the peak of DDP's third step on 2 sequences on one rank.

    Args:
        view: Whether to use `gradient_as_bucket_view`.
    """
    task = task_of(batch=2, sequence=tokens)
    with _one_rank():
        model = task.make_model()
        with MemoryMeter(model) as meter:
            run = DistributedDataParallel(model, gradient_as_bucket_view=view)
            adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for step in range(3):  # the second step rebuilds buckets
                adam.zero_grad()
                began, batch = len(meter.phases()), task.make_batch(step)
                loss, count = task.loss_sum(run, batch)
                (loss / count).backward()
                adam.step()
            return int(sum(meter.series().values())[began:].max())
