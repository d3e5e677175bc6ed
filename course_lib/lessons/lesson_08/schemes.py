"""Plots and a table of the tensors that ranks hold in several kinds of parallelism."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from course_lib.teaching import Table, category_look, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import category_legend, name_rows, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS = 4
WIDTHS = {"parameter": 4, "gradient": 4, "optimizer": 8}  # bytes per weight
CUT = {
    "DDP": (),
    "ZeRO 1": ("optimizer",),
    "ZeRO 2": ("gradient", "optimizer"),
    "ZeRO 3": tuple(WIDTHS),
}
_SHADES = ("#4477AA", "#66CCEE", "#CCBB44", "#AA3377")  # one color per rank, for the shards


def draw_stages() -> "Figure":
    """Draw the training state that four ranks store under DDP and under each stage of ZeRO.

    A tensor that a rank stores completely is a whole bar. A sharded tensor is a quarter of a bar.
    """
    title = "DDP stores everything on each of four ranks; each stage of ZeRO shards one more part"
    drawn, axes = figure(title, columns=4, width=8.6)
    outline = {"facecolor": "none", "edgecolor": "#BBBBBB", "linewidth": 0.8}
    for ax, (stage, cut) in zip(axes, CUT.items(), strict=True):
        ax.set_title(stage, loc="center")
        for rank in range(RANKS):
            start = 0.0
            for category, width in WIDTHS.items():
                ax.barh(rank, width, left=start, height=0.62, **outline)
                part = width / RANKS if category in cut else width
                first = start + rank * part if category in cut else start
                ax.barh(rank, part, left=first, height=0.62, **category_look(category))
                start += width + 0.5
    _name_ranks(axes)
    category_legend(drawn, WIDTHS)
    drawn.course_alt = text(
        "Four ranks under DDP and three stages of ZeRO. With DDP each rank holds all weights,"
        " gradients and Adam's state. With ZeRO 1 each holds a quarter of the state, with ZeRO"
        " 2 also a quarter of the gradients, and with ZeRO 3 a quarter of all three."
    )
    return shown_once(drawn)


def draw_collectives() -> "Figure":
    """Draw a reduce-scatter and an all-gather on four ranks, with tensors cut into four shards."""
    title = "A reduce-scatter followed by an all-gather makes an all-reduce"
    drawn, axes = figure(title, columns=3, width=8.6)
    names = ("before", "after the reduce-scatter", "after the all-gather")
    for number, (ax, name) in enumerate(zip(axes, names, strict=True)):
        ax.set_title(text(name), loc="center")
        for rank, shard in product(range(RANKS), repeat=2):
            look = {"color": _SHADES[shard], "alpha": 1 if number else 0.45}
            if number == 1 and shard != rank:
                look = {"facecolor": "none", "edgecolor": "#BBBBBB"}
            else:
                color = "white" if number else "#222222"
                write(ax, shard + 0.47, rank, "Σ" if number else f"{rank}", color=color)
            ax.barh(rank, 0.94, left=shard, height=0.7, **look)
    _name_ranks(axes)
    drawn.course_alt = text(
        "Four ranks with four shards each. Before: each rank has its own numbers in all shards."
        " After the reduce-scatter: rank r has only the sum of all r-th shards. After the"
        " all-gather: each rank has all four sums."
    )
    return shown_once(drawn)


def _name_ranks(axes: "Sequence[Axes]") -> None:
    """Label the rows of each panel by rank, and hide all other parts of the axes."""
    for ax in axes:
        name_rows(ax, [str(rank) for rank in range(RANKS)])
        ax.set_xticks([])
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(length=0)
    axes[0].set_ylabel(text("rank"))


_NO = "–"
# the words must not be broken across lines
_BY_N, _BY_T, _BY_P, _BY_E = "÷\u00a0N", "÷\u00a0t", "÷\u00a0p", "experts ÷\u00a0e"
_MATRICES = "matrices ÷\u00a0t"  # norms, and biases of matrices that are cut by rows, stay whole
_SHARE = "÷\u00a0N for a fixed batch"
#: (kind, what a rank holds of weights, gradients, Adam's state and activations, collectives per
#: step, source).
PARALLELISMS = (
    (
        "data (DP): DDP",
        (_NO, _NO, _NO, _SHARE),
        "all-reduce of gradients",
        "Li et al. 2020, arXiv:2006.15704",
    ),
    (
        "ZeRO 1",
        (_NO, _NO, _BY_N, _SHARE),
        "reduce-scatter of gradients, all-gather of weights",
        "Rajbhandari et al. 2020, arXiv:1910.02054",
    ),
    (
        "ZeRO 2",
        (_NO, _BY_N, _BY_N, _SHARE),
        "same as ZeRO 1",
        "Rajbhandari et al. 2020, arXiv:1910.02054",
    ),
    (
        "ZeRO 3 (FSDP2)",
        (_BY_N, _BY_N, _BY_N, _SHARE),
        "two all-gathers, one reduce-scatter",
        "Zhao et al. 2023, arXiv:2304.11277",
    ),
    (
        "tensor (TP), t",
        (_MATRICES, _MATRICES, _MATRICES, "activations inside attention and MLP ÷\u00a0t"),
        "four all-reduces per layer",
        "Shoeybi et al. 2019, arXiv:1909.08053",
    ),
    (
        "tensor and sequence (TP, SP), t",
        (_MATRICES, _MATRICES, _MATRICES, _BY_T),
        "four all-gathers and four reduce-scatters per layer",
        "Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    (
        "context (CP), c",
        (_NO, _NO, _NO, "÷\u00a0c, along the sequence"),
        "keys and values passed around a ring",
        "Liu et al. 2023, arXiv:2310.01889",
    ),
    (
        "pipeline (PP), p",
        (_BY_P, _BY_P, _BY_P, "÷\u00a0p, times the micro-batches in flight"),
        "activations sent to the next stage",
        "Huang et al. 2018, arXiv:1811.06965",
    ),
    (
        "expert (EP), e",
        (_BY_E, _BY_E, _BY_E, "share of the tokens"),
        "two all-to-alls per layer in forward, two in backward",
        "Lepikhin et al. 2020, arXiv:2006.16668",
    ),
)


def parallelisms() -> Table:
    """Return a table of kinds of parallelism.

    The columns are the tensors that each kind divides, its communication per step, and a source.
    """
    columns = [
        "kind",
        "weights",
        "gradients",
        "Adam's state",
        "activations",
        "communicated per step",
        "source",
    ]
    rows = [(kind, *shares, *rest) for kind, shares, *rest in PARALLELISMS]
    return table(columns, rows)
