"""Claims that lesson 01 tests."""

from collections.abc import Sequence

from course_lib.teaching import Table, text
from course_lib.teaching.claims import read_claims, what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = read_claims(__file__, "claims")
#: Claims about reserved memory that learners may have read; an optional section tests them.
ALLOCATOR_CLAIMS = read_claims(__file__, "allocator_claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")


def older_claims(
    growth: Sequence[int],
    attention_bytes: int,
    activations: float,
    after_forward: int,
    peak_bytes: int,
) -> Table:
    """Return a table of the optional section's claims, and of the numbers that test them.

    Args:
        growth: Bytes by which memory grew, for two runs.
        attention_bytes: Bytes that attention kept.
        activations: Bytes of the MLP's activations divided by the bytes of its input.
        after_forward: Live bytes after the decoder's forward pass.
        peak_bytes: Peak of the decoder's step.
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
