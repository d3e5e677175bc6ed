"""Claims that lesson 07 tests."""

from course_lib.teaching import Claim, Table
from course_lib.teaching.claims import what_you_may_have_read

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


def older_claims(*measured: str) -> Table:
    """Return the table of claims of the optional section, with the measured values."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
