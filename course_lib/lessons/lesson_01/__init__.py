"""Lesson 01: its claims, checks and figures, and the meter compared with the CUDA allocator.

The comparison with the allocator needs about 7 GB of GPU memory.
"""

from collections.abc import Sequence

from course_lib.memory import Measurement, MemoryMeter
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .allocator import (
    ALLOCATOR_CLAIMS,
    allocator_claims,
    draw_in_the_viewer,
    four_orders,
    orders_on,
    replay_trace,
    reserved_after,
)
from .exercises import (
    WEIGHTS,
    check_adapter_bytes,
    check_largest_batch,
    check_layer_formula,
    check_llama_formula,
    check_meter,
    check_new_storages,
    check_training_state,
    check_whole_peak,
)
from .figures import (
    MixedAdam,
    activation_playground,
    draw_activation_bytes,
    draw_around_the_peak,
    draw_lengths,
    parts_of_the_peak,
    peak_and_sum,
    rows_of_the_formula,
    sum_of_kinds,
    under_autocast,
    with_adapters,
    with_factor_dropout,
)
from .gpu import attention_sequence, decoder_step, korthikanti, monitor
from .meters import storages

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
    "check_llama_formula",
    "check_meter",
    "check_new_storages",
    "check_training_state",
    "check_whole_peak",
    "decoder_step",
    "draw_activation_bytes",
    "draw_around_the_peak",
    "draw_in_the_viewer",
    "draw_lengths",
    "figures_of_claims",
    "four_orders",
    "korthikanti",
    "monitor",
    "older_claims",
    "orders_on",
    "parts_of_the_peak",
    "peak_and_sum",
    "replay_trace",
    "reserved_after",
    "rows_of_the_formula",
    "storages",
    "under_autocast",
    "with_adapters",
    "with_factor_dropout",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Memory is weights + gradients + optimizer state + activations.",
        "the decoder's step, section 1.3",
        "Partly: the sum leaves out temporaries, and adds gradients and activations that are never"
        " in memory together. It is 4% too high here, and 28% too low with 32768 words (section"
        " 1.7).",
        outcome="partly",
        source="EleutherAI, Transformer Math 101, 2023",
    ),
    Claim(
        "16-bit precision cuts memory by half.",
        "the same step under autocast in bf16",
        "Partly: the peak is 22% lower here. Weights, gradients, optimizer state and some"
        " activations stay in fp32.",
        outcome="partly",
        source="PyTorch Lightning documentation, older edition (now of true 16-bit only)",
    ),
    Claim(
        "Mixed precision with AdamW takes 18 bytes per parameter.",
        "the same step under autocast: weights, gradients and state when it ends",
        "Partly: 16 bytes stay. The other 2 are copies of the weights in bf16, which exist only"
        " during forward and backward.",
        outcome="partly",
        source="Hugging Face documentation, GPU memory usage (6 + 8 + 4)",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Memory after the forward pass is the peak.",
        "the decoder's step, section 1.3",
        "No. Backward begins by making two more tensors of the logits' size.",
        outcome="fails",
    ),
    Claim(
        "Run plain first, then the other, and compare the growth.",
        "the same MLP twice",
        "No. The first run also creates Adam's state.",
        outcome="fails",
    ),
    Claim(
        "Standard attention keeps Q, K, V, S and P.",
        "12 heads, 512 tokens, d = 64, fp32",
        "No. S is not kept, because the gradient of softmax needs only P.",
        outcome="fails",
    ),
    Claim(
        "Each of L layers keeps one activation.",
        "20 × (Linear + GELU)",
        "No. Linear and GELU each keep their own input.",
        outcome="fails",
    ),
)


def figures_of_claims(meter: MemoryMeter, autocast: Measurement, stays: int) -> list[str]:
    """Return the figures measured for each of `CLAIMS`.

    Args:
        meter: A meter after the baseline's step.
        autocast: The step under autocast.
        stays: Bytes of weights, gradients and optimizer state after the step under autocast.
    """
    added = sum_of_kinds(meter)
    peak = f"{meter.peak_bytes / 1e6:.1f} MB"
    return [
        text("{sum} against {peak}", sum=f"{added / 1e6:.1f} MB", peak=peak),
        f"{peak} → {autocast.peak_bytes / 1e6:.1f} MB",
        text("{count} bytes per parameter", count=f"{stays / WEIGHTS:.1f}"),
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
