"""Lesson 01: its claims, checks, pictures, and the meter beside the CUDA allocator, which takes about 7 GB."""

from collections.abc import Sequence

from course_lib.memory import Measurement, MemoryMeter
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.said import what_you_may_have_read

from .checks import (
    check_adapter_bytes,
    check_largest_batch,
    check_layer_formula,
    check_swiglu_bytes,
    check_training_state,
    check_whole_peak,
)
from .gpu import attention_sequence, decoder_step, korthikanti, monitor
from .shown import (
    Giant,
    activation_playground,
    draw_activation_bytes,
    draw_lengths,
    mixed_precision_step,
    parts_of_the_peak,
    rows_of_the_formula,
    with_adapters,
)

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "Giant",
    "activation_playground",
    "attention_sequence",
    "check_adapter_bytes",
    "check_largest_batch",
    "check_layer_formula",
    "check_swiglu_bytes",
    "check_training_state",
    "check_whole_peak",
    "decoder_step",
    "draw_activation_bytes",
    "draw_lengths",
    "figures_of_claims",
    "korthikanti",
    "mixed_precision_step",
    "monitor",
    "older_claims",
    "parts_of_the_peak",
    "rows_of_the_formula",
    "with_adapters",
]

#: What learners may have read.
CLAIMS = (
    Claim(
        "Memory is weights + gradients + optimizer state + activations.",
        "the decoder's step, section 1.3",
        "Partly: an upper bound: they are not all there at once. 4% too much here, 16% with one sequence.",
        outcome="partly",
        source="EleutherAI, Transformer Math 101, 2023",
    ),
    Claim(
        "16-bit precision cuts memory by half.",
        "the same step under autocast in bf16",
        "Partly: 22% less here. Weights, gradients and states stay in fp32, and so do some activations.",
        outcome="partly",
        source="PyTorch Lightning documentation, older edition (now of true 16-bit only)",
    ),
    Claim(
        "Memory after the forward pass is the peak.",
        "the decoder's step, section 1.3",
        "No. Backward starts with two more tensors of the logits' size.",
        outcome="fails",
    ),
)
#: Those that only the teaching documents say, from which the course grew; in depth.
OLDER_CLAIMS = (
    Claim(
        "Run plain first, then the other, and compare the growth.",
        "the same MLP twice",
        "No. The first run pays for Adam's state.",
        outcome="fails",
    ),
    Claim(
        "Standard attention keeps Q, K, V, S and P.",
        "12 heads, 512 tokens, d = 64, fp32",
        "No: S is not kept. Softmax's gradient needs P only.",
        outcome="fails",
    ),
    Claim(
        "Each of L layers keeps one activation.",
        "20 × (Linear + GELU)",
        "No. Linear keeps its input, GELU keeps its own.",
        outcome="fails",
    ),
)


def figures_of_claims(meter: MemoryMeter, added: int, autocast: Measurement, after_forward: int) -> list[str]:
    """What was measured for each of `CLAIMS`: all in bytes."""
    peak = f"{meter.peak_bytes / 1e6:.1f} MB"
    return [
        text("{sum} against {peak}", sum=f"{added / 1e6:.1f} MB", peak=peak),
        f"{peak} → {autocast.peak_bytes / 1e6:.1f} MB",
        f"{after_forward / 1e6:.1f} MB < {peak}",
    ]


def older_claims(growth: Sequence[int], attention_bytes: int, activations: float) -> Table:
    """The table of the claims in depth: growth of two runs, what attention kept, activations of the MLP."""
    with_scores = attention_bytes + 4 * 12 * 512 * 512
    return what_you_may_have_read(
        OLDER_CLAIMS,
        f"{growth[0] / 1e6:.1f} MB → {growth[1] / 1e6:.1f} MB",
        text("{kept} MB, not {all} MB", kept=f"{attention_bytes / 1e6:.1f}", all=f"{with_scores / 1e6:.1f}"),
        f"{activations:g} = 2 × 20",
    )
