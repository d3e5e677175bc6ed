"""Tables and figures of lesson 07: fields of a recipe, contents of each peak, and a playground."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING

from course_lib.budget import RATES, Estimate, Recipe, waterfall
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.labels import join_labels, verbatim
from course_lib.memory import CATEGORIES
from course_lib.teaching import (
    COLORS,
    Table,
    category_label,
    figure,
    phase_label,
    playground,
    table,
    text,
)
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import label_axes, note

from .exercises import peak_phase
from .grid import RecipeCosts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Field of a recipe -> its meaning.
FIELDS = {
    "precision": "dtype of the step; `bf16` keeps fp32 master weights",
    "optimizer": text(
        "{optimizers}; running `adam8bit` needs bitsandbytes",
        optimizers=join_labels(
            [verbatim(f"`{name}`") for name, row in OPTIMIZERS.items() if row.load_base is None]
        ),
    ),
    "update": (
        "whether parameters are updated one by one (`loop`), together (`foreach`) or in one"
        " operator (`fused`); with `None` PyTorch decides"
    ),
    "offload_optimizer": "fraction of the optimizer state that is kept in the lower tier",
    "attention": "`standard` keeps the softmax of the scores, `flash` only one number per row",
    "checkpoint": "kind of activation checkpointing: `layers`, `selective`, `segments`, `optimal`",
    "blocks": "names of the blocks that are checkpointed; with `None` they are found",
    "first_blocks": (
        "number of blocks, from the first one on, that are checkpointed; `None` means all"
    ),
    "segments": "number of segments, only for `segments`",
    "schedule_bytes": "limit for the activations in bytes, only for `optimal`",
    "offload_activations": "whether tensors saved for backward are offloaded to the lower tier",
    "min_bytes": "size of the smallest storage that is offloaded (bytes)",
    "prefetch": (
        "number of storages that backward fetches ahead; `None` means 1 on a CPU and 2 on CUDA"
    ),
    "in_flight": (
        "number of copies to the lower tier that may be in flight at once; `None` means the"
        " same numbers"
    ),
    "page_bytes": "bytes of offloaded state that are updated at once",
    "head_chunk": "tokens that the output head and the loss process at a time",
    "in_backward": (
        "whether each parameter is updated as soon as its gradient is ready, after which the"
        " gradient is released"
    ),
    "accumulate": "`fp32` adds up 16-bit gradients in fp32",
    "micro_batches": "number of micro-batches",
    "ranks": "number of processes that share the batch (lesson 08)",
    "shard": "how the processes share everything else: `ddp`, `zero1`, `zero2`, `zero3`",
}


# Fields that the main part of this lesson changes. An optional section shows the other fields.
_CHANGED_HERE = (
    "attention",
    "checkpoint",
    "first_blocks",
    "head_chunk",
    "micro_batches",
    "in_backward",
    "offload_optimizer",
    "page_bytes",
    "offload_activations",
)


def recipe_fields(others: bool = False) -> Table:
    """Return a table of the fields of `Recipe`, the class for a training step's techniques.

    Each row has the name of a field, its default and its meaning.

    Args:
        others: True for the fields that the main part of the lesson does not use, False for the
            fields that it uses.
    """
    shown = [field for field in fields(Recipe) if (field.name in _CHANGED_HERE) != others]
    rows = [(f"`{field.name}={field.default!r}`", FIELDS[field.name]) for field in shown]
    return table(["field", "meaning"], rows)


def what_fills(
    names: Iterable[str],
    estimates: Iterable[Estimate],
    *,
    guesses: Sequence[float | None] | None = None,
) -> Table:
    """Return a table of the peaks of training steps, by category of bytes, in MB.

    The last column is the phase of the step in which the peak occurs.

    Args:
        names: Label of each step.
        estimates: Estimate of each step.
        guesses: The learner's guesses of the peaks in MB, in the order of `names`. There may be
            fewer guesses than names, and None is a missing guess. By default, the table has no
            column for guesses.
    """
    estimates = list(estimates)
    shown = [
        name for name in CATEGORIES if any(found.at_peak.get(name, 0) > 5e5 for found in estimates)
    ]
    rows = []
    for name, found, guess in zip_longest(names, estimates, guesses or ()):
        counts = [f"{found.at_peak.get(category, 0) / 1e6:.1f}" for category in shown]
        guessed = [] if guesses is None else ["–" if guess is None else f"{float(guess):.1f}"]
        peak = f"{found.peak_bytes / 1e6:.1f}"
        rows.append((name, *guessed, peak, *counts, phase_label(peak_phase(found))))
    guessed = [] if guesses is None else ["your guess (MB)"]
    parts = map(category_label, shown)
    return table(["step", *guessed, "peak (MB)", *parts, "phase"], rows)


_IN_LINES = {  # names that are too wide for a bar, with line breaks
    "+ checkpoints": "+ check-\npoints",
    "+ 8 micro-batches": "+ 8\nmicro-\nbatches",
    "+ state offloaded": "+ state\noffloaded",
    "+ small pages": "+ small\npages",
    "in backward, whole batch": "in back-\nward,\nwhole\nbatch",
    "+ activations offloaded": "+ activa-\ntions\noffloaded",
}


def waterfall_picture(
    names: Sequence[str],
    estimates: Sequence[Estimate],
    measured: Sequence[int],
    budget_bytes: int,
    *,
    title: str,
) -> "Figure":
    """Draw predicted and measured peaks of training steps to which techniques are added one by one.

    Predicted peaks are stacked bars. The text above a bar has the peak, the FLOPs relative to the
    baseline, and the moved bytes. Measured peaks are points.

    Args:
        names: Label of each step. The first step is the baseline.
        estimates: Estimate of each step.
        measured: Measured peak of each step in bytes.
        budget_bytes: Memory budget, drawn as a line.
        title: Title of the figure.
    """
    sizes = [f"{found.peak_bytes / 1e6:,.0f}" for found in estimates]
    peaks = [text("{name} {peak}", name=n, peak=p) for n, p in zip(names, sizes, strict=True)]
    budget = f"{budget_bytes / 1e6:,.0f}"
    alt = "Predicted peaks (MB): {peaks}. The budget is {budget} MB."
    alt = text(alt, peaks=join_labels(peaks, "; "), budget=budget)
    drawn, ax = figure(title, height=4.6, alt=alt)
    shown = [_IN_LINES.get(name, name) for name in names]
    labels = {name: category_label(name) for name in CATEGORIES}
    labels |= {"measured": text("measured"), "budget": text("budget")}
    options = {"measured": measured, "budget_bytes": budget_bytes, "names": shown}
    waterfall(estimates, **options, labels=labels, ax=ax)
    ax.grid(False)
    return shown_once(drawn)


def draw_break_even(first: Estimate, second: Estimate, names: Sequence[str]) -> "Figure":
    """Draw the times of two training steps against the ratio of compute rate to link bandwidth.

    The ratio is in FLOP per byte. The two times are equal at one ratio, which is marked.

    Args:
        first, second: Estimates of the two steps. The estimate with more FLOPs must have fewer
            moved bytes.
        names: Labels of the two steps.
    """
    equal = (first.flops - second.flops) / (second.moved_bytes - first.moved_bytes)
    ratios, least = [10 * 1.06**n for n in range(60)], min(first.flops, second.flops)
    alt = text("The two lines cross at {equal} FLOP per byte.", equal=f"{equal:.1f}")
    title = "The machine decides which of the two recipes is faster"
    drawn, ax = figure(title, height=2.9, alt=alt)
    colors = (COLORS["predicted"], COLORS["measured"])
    for found, name, color in zip((first, second), names, colors, strict=True):
        times = [(found.flops + ratio * found.moved_bytes) / least for ratio in ratios]
        ax.plot(ratios, times, color=color)
        note(ax, name, (ratios[-1], times[-1]), (4, 0), color=color)
    ax.axvline(equal, color="black", linestyle="--", linewidth=1)
    note(ax, f"{equal:.1f}", (equal, 0.15), (4, 0), va="baseline")
    ax.set(xscale="log", xlim=(10, 700), ylim=(0, 5))
    words = "FLOP per byte (rate / link)", "time (× baseline)"
    label_axes(ax, *words, ticks=[10, 30, 100, 300])
    return shown_once(drawn)


# The price of a lower peak -> a marker.
_MARKERS = {
    (False, False): ("o", "neither"),
    (True, False): ("s", "checkpoints"),
    (False, True): ("^", "activations offloaded"),
    (True, True): ("D", "both"),
}


def draw_recipes(points: Sequence[RecipeCosts], budget: int = 60, intensity: int = 100) -> "Figure":
    """Draw the times and peaks of many training steps with different recipes as points.

    A recipe is a choice of memory-saving techniques. The budget is a vertical line, and the recipes
    to its left fit into the budget. The figure names the fastest of these recipes.

    Args:
        points: Costs of the recipes, as `stored_estimates` returns them.
        budget: Memory budget in MB.
        intensity: Compute rate divided by link bandwidth, in FLOP per byte. The compute rate is 100
            GFLOP/s.

    Raises:
        ValueError: `points` is empty.
    """
    if not points:
        raise ValueError("points must contain at least one estimate, got none")
    rate = RATES["laptop"].fp32_flops
    seconds = {point: (point.flops + intensity * point.moved_bytes) / rate for point in points}
    fitting = [p for p in points if p.peak_bytes <= budget * 1e6]
    best = min(fitting, key=lambda p: (seconds[p], p.peak_bytes), default=None)
    if best:
        title = text(
            "{budget} MB, {intensity} FLOP per byte: {count} recipes fit, the fastest takes"
            " {seconds} s",
            budget=budget,
            intensity=intensity,
            count=len(fitting),
            seconds=f"{seconds[best]:.3f}",
        )
    else:
        least = min(p.peak_bytes for p in points) / 1e6
        title = "No recipe fits into {budget} MB, the smallest needs {least:.1f} MB"
        title = text(title, budget=budget, least=least)
    drawn, ax = figure(title, height=3.4)
    for kind, (marker, name) in _MARKERS.items():
        for inside in (True, False):
            here = [
                (p.peak_bytes / 1e6, seconds[p])
                for p in points
                if (p.recipe.checkpoint != "none", p.recipe.offload_activations) == kind
                and (p.peak_bytes <= budget * 1e6) == inside
            ]
            color, label = (COLORS["measured"], name) if inside else (COLORS["input"], "_")
            across, up = zip(*here, strict=True) if here else ((), ())
            ax.plot(across, up, marker, color=color, label=text(label))
    if best:
        ax.set_title(text("recipe: {recipe}", recipe=str(best.recipe)), loc="left", fontsize=9)
        look = {"markersize": 14, "markerfacecolor": "none", "markeredgecolor": "black"}
        ax.plot(best.peak_bytes / 1e6, seconds[best], "o", **look)
    ax.axvline(budget, color="black", linestyle="--", linewidth=1)
    words = "peak (MB)", "time at 100 GFLOP/s (s)"
    label_axes(ax, *words, xlim=(0, 300), ylim=(0, None))
    ax.legend(loc="upper right")
    drawn.course_larger = 1.0  # the points leave no corner for a larger legend
    return shown_once(drawn)


def recipes_playground(points: Sequence[RecipeCosts]) -> None:
    """Show `draw_recipes` with one slider for the memory budget, and one for FLOP per byte.

    Args:
        points: Costs of the recipes, as `stored_estimates` returns them.
    """
    steady = {"continuous_update": False}
    playground(
        lambda budget, intensity: draw_recipes(points, budget, intensity),
        lambda widgets: {
            "budget": widgets.IntSlider(60, 40, 300, 1, description="MB", **steady),
            "intensity": widgets.IntSlider(100, 5, 200, 5, description="FLOP/byte", **steady),
        },
    )
