"""Lesson 03: its claims, checks, figures of schedules, and schedules of a decoder on a GPU."""

from collections.abc import Callable, Sequence

from course_lib.teaching import Claim, Table
from course_lib.teaching.claims import what_you_may_have_read

from .cuts import B, check_best_count, check_predicted_peak, check_tapered
from .exercises import (
    check_drawn_schedule,
    check_gives_up_early,
    check_plan,
    check_recurrence,
    every_schedule,
    five_stages,
    pyramid,
)
from .figures import (
    cost_of,
    draw_rooms,
    draw_sweep,
    equal_gradients,
    gradients,
    peak_and_flops,
    schedule_pictures,
)
from .frontiers import best_cuts, draw_cuts, draw_frontier, frontier_with_early_stop
from .gpu import scheduled_decoder
from .in_depth import compare_cuts, draw_other_depths, figures_of_older_claims
from .own_model import (
    budget_table,
    decision_table,
    llama_layer_bytes,
    with_chunked_loss,
)

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "best_cuts",
    "budget_table",
    "check_best_count",
    "check_drawn_schedule",
    "check_gives_up_early",
    "check_plan",
    "check_predicted_peak",
    "check_recurrence",
    "check_tapered",
    "compare_cuts",
    "cost_of",
    "decision_table",
    "draw_cuts",
    "draw_frontier",
    "draw_other_depths",
    "draw_rooms",
    "draw_sweep",
    "equal_gradients",
    "every_schedule",
    "figures_of_claims",
    "figures_of_older_claims",
    "five_stages",
    "frontier_with_early_stop",
    "gradients",
    "llama_layer_bytes",
    "older_claims",
    "peak_and_flops",
    "pyramid",
    "schedule_pictures",
    "scheduled_decoder",
    "with_chunked_loss",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "O(√n) memory for n layers costs one extra forward pass.",
        "tapered segments, 25 and 100 layers",
        "Holds: with the number of layers quadrupled, the peak does not even double.",
        outcome="holds",
        source="arXiv:1604.06174",
    ),
    Claim(
        "Marking every √n-th node as a checkpoint is optimal.",
        "100 layers: 10 segments, then tapered",
        "Partly: the order of growth is right. But the best number depends on A/B, and equal"
        " segments are not the best ones.",
        outcome="partly",
        source="`gradient-checkpointing`",
    ),
    Claim(
        "Larger groups (`--recompute-num-layers`) need less memory.",
        "the decoder's activations at the peak, groups of 1 and 2",
        "Partly: a group is recomputed as a whole. Groups of two layers pay off only if L is"
        " above 2·A/B.",
        outcome="partly",
        source="`Megatron-LM`",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "√L segments save 1 − √L/L of the memory: 90% for 100 layers.",
        "100 × (Linear + Tanh), 10 segments",
        "No: the formula leaves out the segment that is being recomputed. With equal"
        " segments, 1 − 2/√L is saved.",
        outcome="fails",
    ),
    Claim(
        "√L segments cost 2√L/L of extra compute: 20%.",
        "FLOPs of the same network",
        "No: all segments except the last run forward again, which is nearly a third of a step.",
        outcome="fails",
    ),
    Claim(
        "Recomputing doubles the compute.",
        "FLOPs of a step, tapered segments",
        "No: it adds one forward, and a backward costs as much as two forwards.",
        outcome="fails",
    ),
    Claim(
        "Detach each segment's output and set `requires_grad`.",
        "four segments: layers that get gradients",
        "No: this cuts the graph, so only the last segment trains.",
        outcome="fails",
    ),
)


def figures_of_claims(
    peak: Callable[[Sequence[int]], int], tapered: Callable[[int], list[int]], groups: Sequence[int]
) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        peak: Function of cuts that returns the measured peak in bytes.
        tapered: Function of the depth that returns cuts.
        groups: Peaks in bytes of groups of one and of two layers.
    """
    shorter, equal, longer = (
        peak(cuts) // B for cuts in (tapered(25), range(0, 101, 10), tapered(100))
    )
    measured = " → ".join(f"{count / 1e6:.1f}" for count in groups)
    return [f"{shorter} B → {longer} B", f"{equal} B → {longer} B", f"{measured} MB"]


def older_claims(*measured: str) -> Table:
    """Return the table of the claims in depth, with the figure measured for each."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
