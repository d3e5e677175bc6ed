"""Figures of lesson 09: contents of each peak, and memory that a large model needs on a GPU."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.budget import Estimate
from course_lib.budget.device import host_state_bytes
from course_lib.labels import join_labels
from course_lib.memory import CATEGORIES
from course_lib.teaching import Table, claims, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import background, label_axes, name_rows, note, stacked_bars

from .claims import CLAIMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_techniques(found: Mapping[str, Estimate], budget_bytes: int) -> "Figure":
    """Draw estimated peaks of training steps as stacked bars, and a memory budget as a line.

    Args:
        found: Dict from a label to an estimate.
        budget_bytes: Budget in bytes.
    """
    title = "Alone, no technique fits the budget, but the three together do"
    peaks = {name: each.peak_bytes / 1e6 for name, each in found.items()}
    words = [text("{name} {peak} MB", name=name, peak=f"{p:.1f}") for name, p in peaks.items()]
    alt = text("Peaks: {peaks}.", peaks=join_labels(words, "; "))
    drawn, ax = figure(title, height=0.9 + 0.42 * len(found), alt=alt)
    bars = {place: each.at_peak for place, each in enumerate(found.values())}
    least = max(peaks.values()) * 1e6 / 500
    visible = [c for c in CATEGORIES if max(bar.get(c, 0) for bar in bars.values()) > least]
    stacked_bars(ax, bars, visible, 0.62)
    for place, peak in enumerate(peaks.values()):
        # the background covers the budget's line
        note(ax, f"{peak:.1f}", (peak, place), (4, 0), bbox=background("white"))
    budget = budget_bytes / 1e6
    ax.axvline(budget, color="black", linestyle="--", linewidth=1, zorder=1.5)
    note(ax, "budget", (budget, len(found) - 1), (22, 0))  # next to the last bar's number
    name_rows(ax, list(found))
    label_axes(ax, "live at the peak (MB)", xlim=(0, 1.14 * max(peaks.values())))
    drawn.legend(loc="outside lower center", ncols=5, frameon=False)
    return shown_once(drawn)


def on_a_card(found: Mapping[str, Estimate]) -> Table:
    """Return a table of training steps: their GPU memory, host memory and moved bytes, in GB.

    Args:
        found: Dict from a label to an estimate of a step that offloads to host memory.
    """
    rows = []
    for name, each in found.items():
        offloaded = each.bytes_down if each.recipe.offload_activations else 0
        counts = each.peak_bytes, host_state_bytes(each) + offloaded, each.moved_bytes
        rows.append((name, *(f"{count / 1e9:.1f}" for count in counts)))
    columns = ["", "tensors on the card (GB)", "host memory, at most (GB)", "moved (GB)"]
    return table(columns, rows)


def claims_table(plain: Estimate, kept: Estimate, flash: Estimate) -> Table:
    """Return a table of claims about training memory, each with the estimated number that tests it.

    Args:
        plain: Estimate of the baseline.
        kept: Estimate with checkpoints.
        flash: Estimate with checkpoints and the course's flash attention.
    """
    return claims.claims_table(
        CLAIMS,
        f"{kept.flops / plain.flops:.2f} ×",
        f"{plain.peak_bytes / plain.at_peak['parameter']:.2f} ×",
        f"{kept.peak_bytes / 1e6:.1f}; {flash.peak_bytes / 1e6:.1f}",
    )
