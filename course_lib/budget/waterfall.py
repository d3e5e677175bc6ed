"""Table and figure of the memory and FLOPs of a training step as techniques are added to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from course_lib.labels import join_labels, text
from course_lib.labels.drawing import pyplot
from course_lib.memory import CATEGORIES, CATEGORY_COLORS, CATEGORY_HATCHES
from course_lib.memory.show import Table, decimal

from .estimate import Estimate
from .recipe import Recipe, technique_labels
from .techniques import APPLIED
from .techniques.micro_batches import MicroBatches

# Fields of `Recipe` that belong to each technique. The techniques are in the order in which
# `steps_to` adds them. Cheap techniques come first.
TECHNIQUE_FIELDS = tuple(tuple(technique.fields) for technique in APPLIED)
# Smallest change of the peak that is visible in the table, which shows tenths of a megabyte.
VISIBLE_BYTES = 10**5


def steps_to(recipe: Recipe) -> list[Recipe]:
    """Return a list of recipes from the baseline to the given recipe, each with one more technique.

    A recipe is a set of memory-saving techniques for a training step. The first recipe in the list
    is the baseline. It uses no technique, but has the precision, the optimizer, the variant of the
    optimizer update (field `update`) and the number of ranks of the given recipe. With several
    ranks, the baseline has shard="ddp", which shards no tensors.
    """
    base: dict = {
        "precision": recipe.precision,
        "optimizer": recipe.optimizer,
        "update": recipe.update,
    }
    if recipe.attention is None:
        # attention=None leaves the model unchanged, so it is not a technique to be added.
        base["attention"] = None
    base |= {"ranks": recipe.ranks, "shard": "ddp"} if recipe.ranks > 1 else {}
    steps = [Recipe(**base)]
    changed = recipe.changed_fields()
    # Micro-batches are added before a schedule, because with the whole batch the schedule may not
    # fit its limit `schedule_bytes`.
    first = [tuple(MicroBatches.fields)] if recipe.checkpoint == "optimal" else []
    if recipe.shard not in (None, "ddp"):
        steps.append(replace(steps[-1], shard=recipe.shard))
    for names in dict.fromkeys([*first, *TECHNIQUE_FIELDS]):
        values = {name: changed[name] for name in names if name in changed and name not in base}
        if values:
            steps.append(replace(steps[-1], **values))
    return steps


def added_techniques(before: Recipe, after: Recipe) -> str:
    """Return a label of the techniques that the recipe `after` uses in addition to `before`."""
    had = technique_labels(before)
    return join_labels([word for word in technique_labels(after) if word not in had])


class TechniqueSteps(Table, list):
    """List of estimated training steps, each with one more technique than the previous one.

    The first step is the baseline, which has only the precision, the optimizer and the ranks of the
    last step. The list prints as a table of peaks, FLOPs relative to the first step, and bytes
    moved.

    Args:
        estimates: Estimates of the steps, the baseline first.
    """

    columns = ("step", "peak (MB)", "× FLOPs", "GB moved")

    def __init__(self, estimates: Iterable[Estimate]):
        list.__init__(self, estimates)

    def rows(self) -> list[Sequence]:
        raises, other = "+ {added} (raises the peak)", "+ {added}"
        more = [
            text(
                raises if b.peak_bytes - a.peak_bytes > VISIBLE_BYTES else other,
                added=added_techniques(a.recipe, b.recipe),
            )
            for a, b in pairwise(self)
        ]
        names = [str(self[0].recipe), *more]
        return [
            (
                name,
                f"{e.peak_bytes / 1e6:,.1f}",
                f"{e.flops / self[0].flops:.2f}",
                decimal(e.moved_bytes / 1e9),
            )
            for name, e in zip(names, self, strict=True)
        ]

    __repr__ = Table.__str__


def waterfall(
    estimates: Sequence[Estimate],
    *,
    measured: Sequence[int | None] = (),
    budget_bytes: int | None = None,
    names: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    ax=None,
):
    """Draw a bar chart of the estimated peak memory as techniques are added one by one.

    Each bar is an estimated training step, and its height is the peak, stacked by category of
    memory. The text above each bar gives the peak, the FLOPs relative to the first step, and the
    bytes moved by offloading and communication.

    Args:
        estimates: Estimates of training steps, each with one more technique than the previous one.
        measured: Measured peak of each step in bytes, or None for a step that was not run. The
            measured peaks are drawn as points.
        budget_bytes: Memory budget in bytes, drawn as a horizontal line. If the budget is above the
            top of the axes, its value and an arrow are written at the top instead. None draws no
            budget.
        names: Names of the bars. By default, the first bar is labeled with the recipe of its step,
            and each later bar with the added techniques.
        labels: Mapping to labels for the legend and the budget line. Each key is "measured",
            "budget" or a category of memory, such as "activation". If a key is missing, the key
            itself is the label.
        ax: Matplotlib axes to draw on. By default, new axes are created.

    Returns:
        The axes.
    """
    ax = ax if ax is not None else pyplot().subplots(figsize=(9, 4.2), layout="constrained")[1]
    unit, name = (1e9, "GB") if estimates[0].peak_bytes > 2e10 else (1e6, "MB")
    steps = range(len(estimates))
    heights = [0.0] * len(estimates)
    labels = labels or {}
    for category in CATEGORIES:
        values = [estimate.at_peak.get(category, 0) / unit for estimate in estimates]
        if any(values):
            look: dict[str, Any] = {
                "facecolor": CATEGORY_COLORS[category],
                "hatch": CATEGORY_HATCHES.get(category),
                # Matplotlib draws the hatching in the color of the edges.
                "edgecolor": (1.0, 1.0, 1.0, 0.35),
            }
            ax.bar(
                steps,
                values,
                0.62,
                heights,
                label=labels.get(category, category),
                linewidth=0,
                **look,
            )
            heights = [a + b for a, b in zip(heights, values, strict=True)]
    shown = [(i, count / unit) for i, count in enumerate(measured) if count is not None]
    if shown:
        ax.plot(
            *zip(*shown, strict=True), "kD", markersize=5, label=labels.get("measured", "measured")
        )
    for i, (estimate, height) in enumerate(zip(estimates, heights, strict=True)):
        price = _bar_text(estimate, estimates[0], height, unit, name)
        # A white background keeps the line of the budget from crossing the text.
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.annotate(
            price,
            (i, height),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            bbox=ground,
        )
    top = max(heights) * 1.25
    if budget_bytes is not None:
        line = budget_bytes / unit
        if line <= top:
            ax.axhline(line, color="black", linewidth=1, linestyle="--")
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        arrow = "" if line <= top else "↑ "
        text = (
            f"{arrow}{labels.get('budget', 'budget')}\n{line:,.{1 if unit == 1e9 else 0}f} {name}"
        )
        ax.annotate(text, (1, min(line, top)), (4, 0), ha="left", va="center", fontsize=8, **where)
    names = names or [name for name, *_ in TechniqueSteps(estimates).rows()]
    ax.set_xticks(
        list(steps), ["\n".join(map(_wrap, str(each).split("\n"))) for each in names], fontsize=8
    )
    ax.set_ylim(0, top)
    if len(estimates) == 1:
        ax.set_xlim(-0.5, 1.5)  # leaves room for the legend
    ax.set_ylabel(name)
    ax.legend(frameon=False, fontsize=8, loc="upper right")
    return ax


def _bar_text(estimate: Estimate, first: Estimate, height: float, unit: float, name: str) -> str:
    """Return the text above a bar: peak, relative FLOPs, and bytes moved (unless they are 0).

    Args:
        estimate: Estimate of the training step that the bar shows.
        first: Estimate of the step of the first bar, whose FLOPs count as 1.
        height: Peak memory of the step, in MB or GB as `name` says.
        unit: Number of bytes in one MB or GB, 1e6 or 1e9.
        name: Name of the unit, "MB" or "GB".
    """
    price = [
        f"{height:,.{2 if unit == 1e9 else 0}f} {name}",
        f"{estimate.flops / first.flops:.2f} × FLOPs",
    ]
    if estimate.moved_bytes:
        price.append(f"{estimate.moved_bytes / unit:,.1f} {name} ↕")
    return "\n".join(price)


def _wrap(text: str, width: int = 16) -> str:
    """Wrap a text at spaces into lines of at most `width` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
