"""Lesson 05: its claims, checks and figures, training with a wrong divisor, and ranks."""

from collections.abc import Mapping, Sequence

from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .exercises import (
    check_fast_micro_batch,
    check_fp32_sums,
    check_largest_micro_batch,
    check_loop,
    check_peaks,
)
from .figures import (
    draw_order,
    draw_peaks,
    draw_say,
    draw_sums,
    draw_training,
    five_bugs,
)
from .gpu import pieces_of_a_batch
from .mean_of_means import batch, evaluate, load_record, loss_sum, rounded_decoder, small_decoder
from .ranks import on_ranks
from .results import (
    bytes_reduced,
    error,
    errors_of_pairs,
    errors_of_sums,
    gradient_of,
    peak_moments,
    same_weights_as_library,
    training_parts,
)

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "batch",
    "bytes_reduced",
    "check_fast_micro_batch",
    "check_fp32_sums",
    "check_largest_micro_batch",
    "check_loop",
    "check_peaks",
    "draw_order",
    "draw_peaks",
    "draw_say",
    "draw_sums",
    "draw_training",
    "error",
    "errors_of_pairs",
    "errors_of_sums",
    "evaluate",
    "figures_of_claims",
    "five_bugs",
    "gradient_of",
    "load_record",
    "loss_sum",
    "older_claims",
    "on_ranks",
    "peak_moments",
    "pieces_of_a_batch",
    "rounded_decoder",
    "same_weights_as_library",
    "small_decoder",
    "training_parts",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Divide each loss: `loss = loss / gradient_accumulation_steps`.",
        "error of the gradient (8 batches of 16 samples, micro-batches of one sample)",
        (
            "Partly: this is right only if all micro-batches have equal token counts. Add up the"
            " sums and divide once."
        ),
        outcome="partly",
        source="Hugging Face Accelerate documentation, Performing gradient accumulation",
    ),
    Claim(
        "The accuracy difference is very small (typically < 1% gradient norm difference).",
        "the same with micro-batches of eight samples of different lengths",
        (
            "Partly: it depends on how much the token counts differ. Here the error is below 1%"
            " in only one of eight batches."
        ),
        outcome="partly",
        source="leeroopedia.com, Unsloth Gradient Accumulation Accuracy, not Unsloth's own page",
    ),
    Claim(
        "Gradient accumulation is supposed to be mathematically equivalent to full batch training.",
        "error of fp32 gradients, and of bf16 gradients of Linear weights with sums in fp32",
        (
            "Partly: they are equal up to rounding if the losses are summed over samples. The"
            " rounding depends on the dtype of the sums."
        ),
        outcome="partly",
        source="Hugging Face blog, Fixing Gradient Accumulation, October 2024",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Gradient accumulation is not compatible with optimizer in backward.",
        "sum of the second moments, with each micro-batch squared by itself, relative to Adam's",
        (
            "Partly: AdamA combines them. Its first moments equal Adam's, its second moments"
            " differ, and it cannot clip by the norm of all gradients."
        ),
        outcome="partly",
        source="torchtune documentation, Memory Optimization Overview",
    ),
    Claim(
        "The last, partial group can be ignored.",
        "samples whose gradients are never used: 60 samples in micro-batches of 4, `every=4`",
        (
            "Their gradients are lost. If they are never cleared, they enter the next epoch's first"
            " step. Update with them, too."
        ),
        outcome="fails",
    ),
    Claim(
        "Accumulation saves memory in proportion.",
        "peaks of eight sequences at once, and one by one",
        (
            "Partly: activations shrink in proportion. Weights, gradients and optimizer state stay"
            " the same."
        ),
        outcome="partly",
    ),
)


def figures_of_claims(
    off: Mapping[int, Sequence[float]],
    sums: Mapping[str, Mapping[int, Sequence[float]]],
    exact: Sequence[float],
) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        off: Samples in a micro-batch -> errors of the mean of means, one for each batch; 1 and 8
            are among them.
        sums: "fp32" -> number of micro-batches -> errors of Linear weights' gradients, which are in
            bf16 and are added in fp32.
        exact: Errors of the token mean in fp32.
    """
    small = text("fp32: below {bound}; bf16 gradients: below 1%", bound="1e-6")
    large = text(
        "other values: {fp32} and {bf16}",
        fp32=f"{max(exact):.0e}",
        bf16=f"{max(sums['fp32'][256]):.1%}",
    )
    return [
        f"{min(off[1]):.0%} – {max(off[1]):.0%}",
        f"{min(off[8]):.1%} – {max(off[8]):.0%}",
        small if max(exact) < 1e-6 and max(sums["fp32"][256]) < 0.01 else large,
    ]


def older_claims(used: tuple[int, int], peaks: tuple[int, int], second: float) -> Table:
    """Return the table of the claims in depth.

    Args:
        used: Number of samples that reach a step, and of all samples.
        peaks: Peaks in bytes, at once and one by one.
        second: AdamA's second moments relative to Adam's.
    """
    once, single = (f"{peak / 1e6:.1f}" for peak in peaks)
    lost = f"{used[1] - used[0]} / {used[1]}"
    fell = text("{once} → {single} MB", once=once, single=single)
    return what_you_may_have_read(OLDER_CLAIMS, f"{second:.1f}", lost, fell)
