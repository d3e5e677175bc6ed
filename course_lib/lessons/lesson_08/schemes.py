"""The share of each rank in several kinds of parallelism, as the papers describe them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.teaching import Table, category_label, figure, table, text
from course_lib.teaching.figures import category_look, shown_once

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
    """Draw what each of four ranks holds under DDP and ZeRO's stages: whole bars, or quarters."""
    drawn, axes = figure(
        "DDP stores everything on each of four ranks; each stage of ZeRO shards one more part",
        columns=4,
        width=8.6,
    )
    for ax, (stage, cut) in zip(axes, CUT.items(), strict=True):
        ax.set_title(stage, loc="center")
        for rank in range(RANKS):
            start = 0.0
            for category, width in WIDTHS.items():
                ax.barh(
                    rank,
                    width,
                    left=start,
                    height=0.62,
                    facecolor="none",
                    edgecolor="#BBBBBB",
                    linewidth=0.8,
                )
                part = width / RANKS if category in cut else width
                first = start + rank * part if category in cut else start
                ax.barh(rank, part, left=first, height=0.62, **category_look(category))
                start += width + 0.5
        _hide_axes(ax)
        ax.set_yticks(range(RANKS), [str(rank) for rank in range(RANKS)])
        ax.invert_yaxis()
    axes[0].set_ylabel(text("rank"))
    from matplotlib.patches import Patch

    handles = [Patch(label=category_label(name), **category_look(name)) for name in WIDTHS]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3)
    drawn.course_alt = text(
        "Four ranks under DDP and three stages of ZeRO. With DDP each rank holds all weights,"
        " gradients and Adam's state. With ZeRO 1 each holds a quarter of the state, with ZeRO"
        " 2 also a quarter of the gradients, and with ZeRO 3 a quarter of all three."
    )
    return shown_once(drawn)


def draw_collectives() -> "Figure":
    """Draw a reduce-scatter and an all-gather of four ranks' tensors, cut into four shards each."""
    drawn, axes = figure(
        "A reduce-scatter followed by an all-gather makes an all-reduce", columns=3, width=8.6
    )
    everywhere = [set(range(RANKS))] * RANKS
    own = [{rank} for rank in range(RANKS)]
    names = ("before", "after the reduce-scatter", "after the all-gather")
    for ax, name, shards, summed in zip(
        axes, names, (everywhere, own, everywhere), (False, True, True), strict=True
    ):
        ax.set_title(text(name), loc="center")
        _draw_shards(ax, shards, summed)
    axes[0].set_ylabel(text("rank"))
    drawn.course_alt = text(
        "Four ranks with four shards each. Before: each rank has its own numbers in all shards."
        " After the reduce-scatter: rank r has only the sum of all r-th shards. After the"
        " all-gather: each rank has all four sums."
    )
    return shown_once(drawn)


def _draw_shards(ax: "Axes", shards: Sequence[set[int]], summed: bool) -> None:
    for rank, own in enumerate(shards):
        for shard in range(RANKS):
            full = shard in own
            look = (
                {"color": _SHADES[shard]} if full else {"facecolor": "none", "edgecolor": "#BBBBBB"}
            )
            ax.barh(
                rank, 0.94, left=shard, height=0.7, alpha=1 if summed or not full else 0.45, **look
            )
            if full:
                description = "Σ" if summed else f"{rank}"
                ax.annotate(
                    description,
                    (shard + 0.47, rank),
                    ha="center",
                    va="center",
                    color="white" if summed else "#222222",
                )
    _hide_axes(ax)
    ax.set_yticks(range(RANKS), [str(rank) for rank in range(RANKS)])
    ax.invert_yaxis()


def _hide_axes(ax: "Axes") -> None:
    ax.grid(visible=False)
    ax.set_xticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)


_NO = "–"
# without line breaks inside
_BY_N, _BY_T, _BY_P, _BY_E = "÷\u00a0N", "÷\u00a0t", "÷\u00a0p", "experts ÷\u00a0e"
_MATRICES = "matrices ÷\u00a0t"  # norms, and biases of matrices that are cut by rows, stay whole
_SHARE = "÷\u00a0N for a fixed batch"
#: (kind; what a rank holds of weights, gradients, Adam's state and activations; collectives per
#: step; source).
PARALLELISMS = (
    (
        "data (DP): DDP",
        _NO,
        _NO,
        _NO,
        _SHARE,
        "all-reduce of gradients",
        "Li et al. 2020, arXiv:2006.15704",
    ),
    (
        "ZeRO 1",
        _NO,
        _NO,
        _BY_N,
        _SHARE,
        "reduce-scatter of gradients, all-gather of weights",
        "Rajbhandari et al. 2020, arXiv:1910.02054",
    ),
    (
        "ZeRO 2",
        _NO,
        _BY_N,
        _BY_N,
        _SHARE,
        "same as ZeRO 1",
        "Rajbhandari et al. 2020, arXiv:1910.02054",
    ),
    (
        "ZeRO 3 (FSDP2)",
        _BY_N,
        _BY_N,
        _BY_N,
        _SHARE,
        "two all-gathers, one reduce-scatter",
        "Zhao et al. 2023, arXiv:2304.11277",
    ),
    (
        "tensor (TP), t",
        _MATRICES,
        _MATRICES,
        _MATRICES,
        "activations inside attention and MLP ÷\u00a0t",
        "four all-reduces per layer",
        "Shoeybi et al. 2019, arXiv:1909.08053",
    ),
    (
        "tensor and sequence (TP, SP), t",
        _MATRICES,
        _MATRICES,
        _MATRICES,
        _BY_T,
        "four all-gathers and four reduce-scatters per layer",
        "Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    (
        "context (CP), c",
        _NO,
        _NO,
        _NO,
        "÷\u00a0c, along the sequence",
        "keys and values passed around a ring",
        "Liu et al. 2023, arXiv:2310.01889",
    ),
    (
        "pipeline (PP), p",
        _BY_P,
        _BY_P,
        _BY_P,
        "÷\u00a0p, times the micro-batches in flight",
        "activations sent to the next stage",
        "Huang et al. 2018, arXiv:1811.06965",
    ),
    (
        "expert (EP), e",
        _BY_E,
        _BY_E,
        _BY_E,
        "share of the tokens",
        "two all-to-alls per layer in forward, two in backward",
        "Lepikhin et al. 2020, arXiv:2006.16668",
    ),
)


def parallelisms() -> Table:
    """Show what each kind of parallelism divides, and by which collective."""
    columns = [
        "kind",
        "weights",
        "gradients",
        "Adam's state",
        "activations",
        "communicated per step",
        "source",
    ]
    return table(columns, PARALLELISMS)
