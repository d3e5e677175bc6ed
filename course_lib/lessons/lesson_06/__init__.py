"""Lesson 06: its claims, checks and figures, and attention on a GPU."""

from course_lib.teaching import Claim, Table
from course_lib.teaching.claims import what_you_may_have_read

from .checks import (
    check_backward,
    check_causal_tiles,
    check_flops,
    check_grouped_bytes,
    check_kernel,
    check_log_sum_exp,
    check_probabilities,
)
from .display import (
    draw_causal_tiles,
    draw_errors,
    draw_peaks,
    draw_roofline,
    draw_running,
    draw_saved,
    draw_walks,
    loop_of,
)
from .gpu import attention_forward_and_backward

__all__ = [
    "CLAIMS",
    "OLDER_CLAIMS",
    "attention_forward_and_backward",
    "check_backward",
    "check_causal_tiles",
    "check_flops",
    "check_grouped_bytes",
    "check_kernel",
    "check_log_sum_exp",
    "check_probabilities",
    "draw_causal_tiles",
    "draw_errors",
    "draw_peaks",
    "draw_roofline",
    "draw_running",
    "draw_saved",
    "draw_walks",
    "loop_of",
    "older_claims",
]

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "FlashAttention takes memory from O(N²) to O(N).",
        "twice the tokens: bytes kept / FLOPs",
        "Holds for bytes. FLOPs stay quadratic.",
        outcome="holds",
        source="Dao et al. 2022, section 3.1",
    ),
    Claim(
        "The backward pass is not deterministic because we use atomic adds.",
        "products of backward: one walk; two, as here",
        "Holds for their default. Two walks add in one order, for two products more; one walk can"
        " order its adds, and waits.",
        outcome="holds",
        source="FlashAttention's issue 414",
    ),
    Claim(
        "Backward is 2.5 times the FLOPs of forward.",
        "FLOPs of flash attention, backward against forward; the same for the Triton kernels",
        "Of the algorithm. Kernels with two walks do 3.5 times.",
        outcome="partly",
        source="FlashAttention's benchmark script",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Flash keeps the maximum m and the sum l of each row.",
        "vectors of one number a row among what is saved",
        "The first paper's algorithm did. One is enough: their log-sum-exp.",
        outcome="partly",
    ),
    Claim(
        "In half precision everything takes two bytes.",
        "dtype of that vector for bf16 inputs",
        "Not the statistics: four bytes a row.",
        outcome="partly",
    ),
    Claim(
        "Checkpointed attention saves 50 to 80 %.",
        "share of the peak saved with 1 / 3 / 6 layers, a checkpoint each",
        "It depends on how many layers there are: with one, nothing (lesson 02).",
        outcome="partly",
    ),
    Claim(
        "FlashAttention takes linear time.",
        "twice the tokens: bytes kept / FLOPs",
        "Its memory is. FLOPs stay quadratic.",
        outcome="fails",
    ),
)


def older_claims(*measured: str) -> Table:
    """Return the table of the claims in depth, with the figure measured for each."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
