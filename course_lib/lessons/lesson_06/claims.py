"""Claims that lesson 06 tests."""

from course_lib.teaching import Claim, Table
from course_lib.teaching.claims import what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "FlashAttention takes memory from O(N²) to O(N).",
        "twice the tokens: bytes kept / FLOPs",
        "This holds for bytes. FLOPs stay quadratic.",
        outcome="holds",
        source="Dao et al. 2022, section 3.1",
    ),
    Claim(
        "The backward pass is not deterministic because we use atomic adds.",
        "products of backward: with one pass; with two, as here",
        (
            "This holds for their default. Two passes add in a fixed order, at the cost of two more"
            " products. One pass can fix the order of its additions, at the cost of waiting."
        ),
        outcome="holds",
        source="FlashAttention's issue 414",
    ),
    Claim(
        "Backward is 2.5 times the FLOPs of forward.",
        "FLOPs of backward divided by those of forward: flash attention; the Triton kernels",
        "Partly: this holds for the algorithm. Kernels with two passes take 3.5 times the FLOPs.",
        outcome="partly",
        source="FlashAttention's benchmark script",
    ),
)

#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Flash keeps the maximum m and the sum l of each row.",
        "saved vectors with one number per row",
        (
            "Partly: the first paper's algorithm keeps both. One number is enough, the log-sum-exp"
            " of both."
        ),
        outcome="partly",
    ),
    Claim(
        "In half precision everything takes two bytes.",
        "dtype of that vector for bf16 inputs",
        "Partly: the log-sum-exp is fp32, with four bytes per row.",
        outcome="partly",
    ),
    Claim(
        "Checkpointed attention saves 50 to 80 %.",
        "share of the peak saved with 1 / 3 / 6 layers, one checkpoint each",
        (
            "Partly: it depends on the number of layers. With one layer nothing is saved (lesson"
            " 02)."
        ),
        outcome="partly",
    ),
    Claim(
        "FlashAttention takes linear time.",
        "twice the tokens: bytes kept / FLOPs",
        "No: its memory is linear, but its FLOPs stay quadratic.",
        outcome="fails",
    ),
)


def older_claims(*measured: str) -> Table:
    """Return the table of the claims of the optional section, with the measured value of each."""
    return what_you_may_have_read(OLDER_CLAIMS, *measured)
