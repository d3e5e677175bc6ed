"""Lesson 07: its claims, checks and figures, stored estimates, and three recipes on a GPU."""

from collections.abc import Mapping

from course_lib.budget import Estimate
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .checks import (
    check_break_even,
    check_fifty,
    check_keeps_clipping,
    check_peak_without_memory,
    check_same_flops,
)
from .display import (
    FIELDS,
    draw_break_even,
    draw_recipes,
    recipe_fields,
    recipes_playground,
    waterfall_picture,
    what_fills,
)
from .gpu import RECIPES, three_recipes
from .grid import stored_estimates

__all__ = [
    "CLAIMS",
    "FIELDS",
    "OLDER_CLAIMS",
    "RECIPES",
    "check_break_even",
    "check_fifty",
    "check_keeps_clipping",
    "check_peak_without_memory",
    "check_same_flops",
    "draw_break_even",
    "draw_recipes",
    "figures_of_claims",
    "older_claims",
    "recipe_fields",
    "recipes_playground",
    "stored_estimates",
    "three_recipes",
    "waterfall_picture",
    "what_fills",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Gradient accumulation is often preferable to activation checkpointing, for speed.",
        "peak and FLOPs, 8 micro-batches; a checkpoint a layer",
        "Holds here: nearly the same peak without the 21% of FLOPs, where the batch can be split.",
        outcome="holds",
        source="torchtune documentation, Memory Optimization Overview, 0.3",
    ),
    Claim(
        "Training takes 16 bytes a parameter, before any activation.",
        "bytes a parameter at the peak: plain; the story's last recipe",
        "Partly: of a plain step. State below and steps in backward leave 8.4, activations"
        " included.",
        outcome="partly",
        source="Rajbhandari et al. 2020, ZeRO, section 3.1",
    ),
    Claim(
        "Savings add up.",
        "saved alone: checkpoints, activations offloaded; by both",
        "No: both save what the other has saved already, and then something else is the peak.",
        outcome="fails",
    ),
    Claim(
        "Activation offloading should be used alongside activation checkpointing.",
        "peak and bytes moved: activations offloaded; and checkpoints on top",
        "Partly: fewer bytes move, but the peak is higher, since whole layers come back.",
        outcome="partly",
        source="torchtune documentation, Memory Optimization Overview, stable",
    ),
)
#: Claims of the optional sections.
OLDER_CLAIMS = (
    Claim(
        "Accumulation always lowers the peak.",
        "checkpointed layers, then two micro-batches on top",
        "Not where activations are small already: it keeps a full set of gradients.",
        outcome="fails",
    ),
    Claim(
        "Training 7 billion parameters with Adam takes 112 GB, 16 bytes a parameter.",
        "peak on the device, state on the host, steps in backward",
        "On one device, all at once. Somewhere the state must be, and copies take their time.",
        outcome="partly",
    ),
    Claim(
        "FlashAttention does fewer FLOPs.",
        "FLOPs of the step with flash over plain, 384 and 4096 tokens",
        "Backward computes the scores again. Fewer only where long causal sequences skip wholly"
        " masked tiles.",
        outcome="partly",
    ),
)


def figures_of_claims(plain: Estimate, alone: Mapping[str, Estimate], last: Estimate) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        plain: Estimate of the baseline.
        alone: Estimates named "pieces", "checkpoints", "offloaded", and "both" for the last two
            together.
        last: Estimate of the recipe that fits.
    """
    peaks = {name: f"{found.peak_bytes / 1e6:.1f}" for name, found in alone.items()}
    flops = [f"{alone[name].flops / plain.flops:.2f}" for name in ("pieces", "checkpoints")]
    saved = [
        f"{(plain.peak_bytes - alone[name].peak_bytes) / 1e6:.1f}"
        for name in ("checkpoints", "offloaded", "both")
    ]
    each = 4 / plain.at_peak["parameter"]  # 1 / number of parameters, which have 4 bytes each
    return [
        text(
            "{one} MB, {less} of the FLOPs; {other} MB, {more}",
            one=peaks["pieces"],
            less=flops[0],
            other=peaks["checkpoints"],
            more=flops[1],
        ),
        f"{plain.peak_bytes * each:.1f}; {last.peak_bytes * each:.1f}",
        f"{saved[0]}; {saved[1]}; {saved[2]} MB",
        text(
            "{peaks} MB; {moved} MB moved",
            peaks=f"{peaks['offloaded']} → {peaks['both']}",
            moved=" → ".join(
                f"{alone[name].moved_bytes / 1e6:.1f}" for name in ("offloaded", "both")
            ),
        ),
    ]


def older_claims(*measured: str) -> Table:
    """Return the table of the claims in depth, with the figure measured for each."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
