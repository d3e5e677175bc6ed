"""Claims that lesson 05 tests."""

from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

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


def older_claims(used: tuple[int, int], peaks: tuple[int, int], second: float) -> Table:
    """Return the table of the claims of the optional section.

    Args:
        used: Number of samples that reach an optimizer step, and of all samples.
        peaks: Peaks in bytes for all samples at once, and for one at a time.
        second: AdamA's second moments divided by Adam's.
    """
    once, single = (f"{peak / 1e6:.1f}" for peak in peaks)
    lost = f"{used[1] - used[0]} / {used[1]}"
    fell = text("{once} → {single} MB", once=once, single=single)
    return what_you_may_have_read(OLDER_CLAIMS, f"{second:.1f}", lost, fell)
