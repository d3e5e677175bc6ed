"""Lesson 01: its claims, checks and figures, and the meter compared with the CUDA allocator.

The comparison with the allocator needs about 7 GB of GPU memory.
"""

from collections.abc import Sequence

from course_lib.memory import Measurement, MemoryMeter
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .allocator import ALLOCATOR_CLAIMS, allocator_claims, draw_in_the_viewer, replayed
from .checks import (
    WEIGHTS,
    check_adapter_bytes,
    check_largest_batch,
    check_layer_formula,
    check_meter,
    check_swiglu_bytes,
    check_training_state,
    check_whole_peak,
)
from .display import (
    MixedAdam,
    activation_playground,
    draw_activation_bytes,
    draw_around_the_peak,
    draw_lengths,
    parts_of_the_peak,
    rows_of_the_formula,
    with_adapters,
)
from .gpu import attention_sequence, decoder_step, korthikanti, monitor

__all__ = [
    "ALLOCATOR_CLAIMS",
    "CLAIMS",
    "OLDER_CLAIMS",
    "MixedAdam",
    "activation_playground",
    "allocator_claims",
    "attention_sequence",
    "check_adapter_bytes",
    "check_largest_batch",
    "check_layer_formula",
    "check_meter",
    "check_swiglu_bytes",
    "check_training_state",
    "check_whole_peak",
    "decoder_step",
    "draw_activation_bytes",
    "draw_around_the_peak",
    "draw_in_the_viewer",
    "draw_lengths",
    "figures_of_claims",
    "korthikanti",
    "monitor",
    "older_claims",
    "parts_of_the_peak",
    "replayed",
    "rows_of_the_formula",
    "with_adapters",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Memory is weights + gradients + optimizer state + activations.",
        "the decoder's step, section 1.3",
        "Partly: it leaves out temporaries and adds kinds that never meet. 4% too much here, 28%"
        " too little with 32768 words (section 1.6).",
        outcome="partly",
        source="EleutherAI, Transformer Math 101, 2023",
    ),
    Claim(
        "16-bit precision cuts memory by half.",
        "the same step under autocast in bf16",
        "Partly: 22% less here. Weights, gradients and states stay in fp32, and so do some"
        " activations.",
        outcome="partly",
        source="PyTorch Lightning documentation, older edition (now of true 16-bit only)",
    ),
    Claim(
        "Mixed precision with AdamW takes 18 bytes a parameter.",
        "the same step under autocast: weights, gradients and state when it ends",
        "Partly: 16 stay. The other 2, copies of the weights in bf16, come in forward and go in"
        " backward.",
        outcome="partly",
        source="Hugging Face documentation, GPU memory usage (6 + 8 + 4)",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Memory after the forward pass is the peak.",
        "the decoder's step, section 1.3",
        "No. Backward starts with two more tensors of the logits' size.",
        outcome="fails",
    ),
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


def figures_of_claims(
    meter: MemoryMeter, added: int, autocast: Measurement, stays: int
) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    All numbers are bytes; `stays` is what is left after the step under autocast.
    """
    peak = f"{meter.peak_bytes / 1e6:.1f} MB"
    return [
        text("{sum} against {peak}", sum=f"{added / 1e6:.1f} MB", peak=peak),
        f"{peak} → {autocast.peak_bytes / 1e6:.1f} MB",
        text("{count} bytes a parameter", count=f"{stays / WEIGHTS:.1f}"),
    ]


def older_claims(
    growth: Sequence[int],
    attention_bytes: int,
    activations: float,
    after_forward: int,
    peak_bytes: int,
) -> Table:
    """Return the table of the claims in depth.

    Args:
        growth: Growth in bytes of two runs.
        attention_bytes: Bytes that attention kept.
        activations: Activations of the MLP, in units of its input.
        after_forward, peak_bytes: Bytes of the decoder's step.
    """
    with_scores = attention_bytes + 4 * 12 * 512 * 512
    return what_you_may_have_read(
        OLDER_CLAIMS,
        f"{after_forward / 1e6:.1f} MB < {peak_bytes / 1e6:.1f} MB",
        f"{growth[0] / 1e6:.1f} MB → {growth[1] / 1e6:.1f} MB",
        text(
            "{kept} MB, not {all} MB",
            kept=f"{attention_bytes / 1e6:.1f}",
            all=f"{with_scores / 1e6:.1f}",
        ),
        f"{activations:g} = 2 × 20",
    )
