"""Lesson 07: claims, checks, figures, stored estimates, smaller weights, recipes on a GPU."""

from collections.abc import Mapping

from course_lib.budget import Estimate
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .exercises import (
    check_break_even,
    check_fifty,
    check_keeps_clipping,
    check_peak_without_memory,
    check_same_flops,
)
from .fewer_bits import Adam8bit, FourBitLinear, in_four_bits, run_in_8_bits
from .figures import (
    FIELDS,
    both_timelines,
    draw_break_even,
    draw_recipes,
    recipe_fields,
    recipes_playground,
    waterfall_picture,
    what_fills,
)
from .gpu import RECIPES, three_recipes
from .grid import stored_estimates
from .smaller import compare_smaller, what_stays_right

__all__ = [
    "CLAIMS",
    "FIELDS",
    "OLDER_CLAIMS",
    "RECIPES",
    "Adam8bit",
    "FourBitLinear",
    "both_timelines",
    "check_break_even",
    "check_fifty",
    "check_keeps_clipping",
    "check_peak_without_memory",
    "check_same_flops",
    "compare_smaller",
    "draw_break_even",
    "draw_recipes",
    "figures_of_claims",
    "in_four_bits",
    "older_claims",
    "recipe_fields",
    "recipes_playground",
    "run_in_8_bits",
    "stored_estimates",
    "three_recipes",
    "waterfall_picture",
    "what_fills",
    "what_stays_right",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Gradient accumulation is often preferable to activation checkpointing, for speed.",
        "peak and FLOPs: 8 micro-batches; one checkpoint per layer",
        (
            "This holds here if the batch can be split: the peak is nearly the same, without 21%"
            " more FLOPs."
        ),
        outcome="holds",
        source="torchtune documentation, Memory Optimization Overview, 0.3",
    ),
    Claim(
        "Training takes 16 bytes per parameter, before any activation.",
        "bytes per parameter at the peak: baseline; this lesson's last recipe",
        (
            "Partly: this holds for the baseline. With the state offloaded and steps in backward,"
            " it is 8.4 bytes, activations included."
        ),
        outcome="partly",
        source="Rajbhandari et al. 2020, ZeRO, section 3.1",
    ),
    Claim(
        "Savings add up.",
        "saved by checkpoints; by offloading activations; by both",
        (
            "No: here each technique saves part of what the other has already saved, and then"
            " something else makes up the peak."
        ),
        outcome="fails",
    ),
    Claim(
        "Activation offloading should be used alongside activation checkpointing.",
        "peak and bytes moved with activations offloaded, then with checkpoints as well",
        (
            "Partly: fewer bytes are moved, but the peak is higher, because the activations of a"
            " whole layer are in memory at once."
        ),
        outcome="partly",
        source="torchtune documentation, Memory Optimization Overview, stable",
    ),
)
#: Claims of the optional sections.
OLDER_CLAIMS = (
    Claim(
        "Accumulation always lowers the peak.",
        "one checkpoint per layer; with two micro-batches as well",
        (
            "No: if activations are already small, the peak can rise, because accumulation keeps a"
            " full set of gradients."
        ),
        outcome="fails",
    ),
    Claim(
        "Training 7 billion parameters with Adam takes 112 GB, 16 bytes per parameter.",
        "peak on the device, with the state on the host and steps in backward",
        (
            "Partly: this holds if one device keeps everything. The state can be kept elsewhere,"
            " but copies take time."
        ),
        outcome="partly",
    ),
    Claim(
        "FlashAttention does fewer FLOPs.",
        "FLOPs with flash relative to the baseline, at 384 and 4096 tokens",
        (
            "Partly: backward computes the scores again. FLOPs are fewer only for long causal"
            " sequences, where fully masked tiles are skipped."
        ),
        outcome="partly",
    ),
)


def figures_of_claims(plain: Estimate, alone: Mapping[str, Estimate], last: Estimate) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        plain: Estimate of the baseline.
        alone: Estimates named "micro_batches", "checkpoints", "offloaded", and "both" for the last
            two together.
        last: Estimate of the recipe that fits.
    """
    peaks = {name: f"{found.peak_bytes / 1e6:.1f}" for name, found in alone.items()}
    flops = [f"{alone[name].flops / plain.flops:.2f}" for name in ("micro_batches", "checkpoints")]
    saved = [
        f"{(plain.peak_bytes - alone[name].peak_bytes) / 1e6:.1f}"
        for name in ("checkpoints", "offloaded", "both")
    ]
    each = 4 / plain.at_peak["parameter"]  # 1 / number of parameters, which have 4 bytes each
    return [
        text(
            "{one} MB, {less} times the FLOPs; {other} MB, {more} times",
            one=peaks["micro_batches"],
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
    """Return the table of claims for the section in depth, with the measured figures."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
