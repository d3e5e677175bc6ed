"""Tables and figures of lesson 08, and measurements in the notebook's process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.distributed import task_of
from course_lib.labels import join_labels
from course_lib.memory import CATEGORIES, MemoryMeter
from course_lib.teaching import COLORS, Table, claims, figure, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import (
    category_legend,
    label_axes,
    name_rows,
    note,
    points,
    stacked_bars,
    write,
)

from .claims import CLAIMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGE_OF = {
    "ddp": "DDP",
    "zero1": "ZeRO 1",
    "fsdp-keep": "ZeRO 2",
    "fsdp": "ZeRO 3",
    "fsdp-bf16": "ZeRO 3",
    "fsdp-checkpoint": "ZeRO 3",
}
_COLORS = {
    "DDP": "#222222",
    "ZeRO 1": COLORS["parameter"],
    "ZeRO 2": "#888888",
    "ZeRO 3": COLORS["measured"],
}


def held_by(run: Mapping[str, Any]) -> int:
    """Return the most bytes of training state that one rank stores during the optimizer step.

    The training state consists of weights, gradients and optimizer state. In the mode "fsdp-keep",
    a rank keeps gathered weights between forward and backward. In this mode, the bytes of these
    weights are added.

    Args:
        run: Result of `course_lib.distributed.launch`.
    """
    held = max(map(sum, zip(*run["measured"].values(), strict=True)))
    return held + (run["taken"][0]["at_peak"]["gathered"] if run["mode"] == "fsdp-keep" else 0)


def draw_ranks(
    lines: Mapping[int, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]
) -> "Figure":
    """Draw a rank's stored bytes and communicated bytes against the number of ranks.

    Lines are predictions, and points are measured.

    Args:
        lines: Dict from the number of ranks to an inner dict, which maps the name of a ZeRO stage
            to the stored bytes. The bytes are computed by the learner's formulas.
        runs: Results of `course_lib.distributed.launch` for several modes and numbers of ranks.
    """
    title = "Sharded bytes fall to 1/n per rank, but the communication volume stays the same"
    drawn, (left, right) = figure(title, columns=2, width=8.6, height=3.7)
    held, sent = [], {}
    for (stage, color), above in zip(_COLORS.items(), (7, 7, -8, -8), strict=True):
        own = [run for run in runs if STAGE_OF[run["mode"]] == stage]
        line = {n: counts[stage] for n, counts in lines.items()}
        style, filled = ("--", "none") if stage == "ZeRO 2" else ("-", color)
        points(left, line, style, unit=1e6, color=color, alpha=0.55)
        for run in own:
            look = {"color": color, "markerfacecolor": filled}
            points(left, {run["ranks"]: held_by(run)}, unit=1e6, **look)
        most = max(line)
        note(left, stage, (most, line[most] / 1e6), (6, 0), color=color)
        ends = {"first": f"{line[min(line)] / 1e6:.1f}", "last": f"{line[most] / 1e6:.1f}"}
        held.append(text("{stage} from {first} to {last} MB", stage=stage, **ends))
        if own:
            predicted = own[0]["communicated"]["predicted"]
            points(right, dict.fromkeys((2, 8), predicted), "-", unit=1e6, color=color, alpha=0.55)
            counts = [run["communicated"]["measured"] / 1e6 for run in own]
            right.plot([run["ranks"] for run in own], counts, "o", color=color)
            words = text("{stage} {sent} MB", stage=stage, sent=f"{predicted / 1e6:.1f}")
            note(right, words, (8, predicted / 1e6), (0, above), ha="right", color=color)
    for run in runs:
        sent[STAGE_OF[run["mode"]]] = f"{run['communicated']['measured'] / 1e6:.1f}"
    label_axes(left, "ranks", "held per rank (MB)", xlim=(0.7, 8), ylim=(0, 122))
    label_axes(right, "ranks", "communicated per step (MB)", xlim=(1.5, 8), ylim=(0, 122))
    left.set_xticks([1, 2, 4, 8])
    right.set_xticks([2, 4, 8])
    drawn.get_layout_engine().set(wspace=0.06)  # room for the names at the ends of the lines
    drawn.course_alt = text(
        "Bytes held per rank, from 1 to 8 ranks: {held}. Bytes communicated per step, for any"
        " number of ranks: {sent}.",
        held=join_labels(held),
        sent=join_labels([text("{stage} {sent} MB", stage=s, sent=sent[s]) for s in sent]),
    )
    return shown_once(drawn)


_STACK = ("parameter", "optimizer", "gradient", "activation", "temporary", "input")


def draw_peaks(variants: Mapping[str, Mapping[str, int]], title: str) -> "Figure":
    """Draw the live bytes at the peak of several training steps as stacked bars by category.

    Args:
        variants: Dict from a label to a dict from the category to bytes at the peak. The category
            "gathered" is drawn as part of the parameters.
        title: Title of the figure.
    """
    drawn, ax = figure(title, height=0.9 + 0.46 * len(variants), width=8.2)
    bars = {
        place: {**parts, "parameter": parts["parameter"] + parts.get("gathered", 0)}
        for place, parts in enumerate(variants.values())
    }
    peaks = [f"{sum(parts.values()) / 1e6:.1f}" for parts in variants.values()]
    for place, end in enumerate(stacked_bars(ax, bars, _STACK, 0.66)):
        note(ax, peaks[place], (end, place), (5, 0))
    name_rows(ax, list(variants))
    label_axes(ax, "live at the peak (MB)", xlim=(0, 305))
    large = [c for c in CATEGORIES if max(parts.get(c, 0) for parts in variants.values()) > 1e6]
    category_legend(drawn, large, fontsize=8.5)
    words = [
        text("{name}: {peak} MB", name=n, peak=p) for n, p in zip(variants, peaks, strict=True)
    ]
    drawn.course_alt = text(
        "Bytes that are live at the peak of a step. {variants}.", variants=join_labels(words, "; ")
    )
    return shown_once(drawn)


def draw_budgets(alone: Any, run: Mapping[str, Any], device_bytes: int) -> "Figure":
    """Draw one device that exceeds its memory budget, and several ranks that stay within theirs.

    Args:
        alone: Error `MemoryBudgetExceeded` of the step on one device.
        run: Result of `course_lib.distributed.launch` with a budget per rank.
        device_bytes: Memory budget of the one device in bytes.
    """
    title = "One device runs out of memory, but four smaller ones process the whole batch"
    drawn, ax = figure(title, height=2.9, width=8.2)
    held, more = alone.live_bytes / 1e6, alone.wanted_bytes / 1e6
    device, budget = device_bytes / 1e6, run["budget_bytes"] / 1e6
    peaks = [taken["peak_bytes"] / 1e6 for taken in run["taken"]]
    wanted = f"{(alone.live_bytes + alone.wanted_bytes) / 1e6:.1f}"
    ax.barh(0, held, height=0.6, color="#999999")
    ax.barh(0, more, left=held, height=0.6, facecolor="none", edgecolor="#CC3311")
    needs = text("needs {wanted} MB", wanted=wanted)
    note(ax, needs, (device, -0.32), color="#CC3311", fontsize=8.5)
    for rank, peak in enumerate(peaks, 1):
        ax.barh(rank, peak, height=0.6, color=COLORS["measured"])
        write(ax, 1.5, rank, f"{peak:.1f}", ha="left")
    last = len(peaks) + 0.5
    for limit, ends, y in ((device, (-0.5, 0.5), 0.32), (budget, (0.5, last), (0.5 + last) / 2)):
        ax.plot([limit] * 2, ends, color="#222222", linewidth=1.8)
        note(ax, text("budget {budget} MB", budget=f"{limit:.0f}"), (limit, y), fontsize=8.5)
    ranks = [text("rank {rank}, 2 sequences", rank=rank) for rank in range(len(peaks))]
    name_rows(ax, [text("one device, 1 sequence"), *ranks])
    label_axes(ax, "live at the peak (MB)", xlim=(0, 76))
    drawn.course_alt = text(
        "One device of {device} MB is stopped when it needs {wanted} MB. With a budget of"
        " {budget} MB each, the ranks peak at {peaks} MB.",
        device=f"{device:.0f}",
        wanted=wanted,
        budget=f"{budget:.0f}",
        peaks=join_labels([f"{peak:.1f}" for peak in peaks]),
    )
    return shown_once(drawn)


@contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp_peak(tokens: int, *, view: bool) -> int:
    """Return the peak in bytes of a training step with DDP, for 2 sequences on one rank.

    The third step is measured, because DDP rebuilds its buckets in the second one.

    Args:
        tokens: Number of tokens per sequence.
        view: Value of DDP's option `gradient_as_bucket_view`.
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


def claims_table(
    runs: Mapping[str, Mapping[str, Any]],
    alone: Mapping[str, int],
    saved: tuple[int, int],
) -> Table:
    """Return a table of claims about data parallelism, each with the measured number that tests it.

    Args:
        runs: Dict from a mode, such as "ddp", to the result of `course_lib.distributed.launch` on 2
            ranks.
        alone: Bytes at the peak of one device with 4 sequences, as a dict from category to bytes.
        saved: Bytes by which DDP's option `gradient_as_bucket_view` lowers the peak, first with 128
            and then with 16 tokens per sequence.
    """
    sent = [runs[mode]["communicated"]["measured"] for mode in ("ddp", "zero1")]
    whole, part = held_by(runs["ddp"]), held_by(runs["fsdp"])
    peaks = sum(alone.values()), runs["fsdp"]["taken"][0]["peak_bytes"]
    return claims.claims_table(
        CLAIMS,
        f"{sent[0] / 1e6:.1f} → {sent[1] / 1e6:.1f} MB",
        text(
            "held {times}, peak {fewer}",
            times=f"÷ {whole / part:.1f}",
            fewer=f"÷ {peaks[0] / peaks[1]:.1f}",
        ),
        f"{saved[0] / 1e6:.1f} / {saved[1] / 1e6:.1f} MB",
    )
