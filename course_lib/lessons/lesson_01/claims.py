"""Claims that lesson 01 tests."""

from collections.abc import Sequence

from course_lib.teaching import Table, text
from course_lib.teaching.claims import claims_table, read_claims

#: Claims that learners may have read elsewhere, and that this lesson tests.
CLAIMS = read_claims(__file__, "claims")
#: Claims about reserved memory that learners may have read; an optional section tests them.
ALLOCATOR_CLAIMS = read_claims(__file__, "allocator_claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")


def older_claims(
    growth: Sequence[int],
    fair: Sequence[int],
    attention_bytes: int,
    activations: float,
    step: tuple[int, int],
) -> Table:
    """Return a table of claims from older teaching documents, each with the number that tests it.

    Args:
        growth: Peak minus live bytes at the start, in bytes, for two runs of an MLP's training
            step, one after the other.
        fair: Peaks of two runs of this step in bytes, measured by `measure`, which starts both runs
            in the same state.
        attention_bytes: Bytes that standard attention saves for backward, with 12 heads and 512
            tokens.
        activations: Bytes that an MLP saves for backward, divided by the bytes of its input.
        step: Live bytes after the forward pass of the decoder's training step, and the peak of this
            step in bytes.
    """
    with_scores = attention_bytes + 4 * 12 * 512 * 512
    return claims_table(
        OLDER_CLAIMS,
        " < ".join(f"{count / 1e6:.1f} MB" for count in step),
        text(
            "{growth} by growth, {fair} by `measure`",
            growth=" → ".join(f"{count / 1e6:.1f} MB" for count in growth),
            fair=" → ".join(f"{count / 1e6:.1f} MB" for count in fair),
        ),
        text(
            "{kept} MB, not {all} MB",
            kept=f"{attention_bytes / 1e6:.1f}",
            all=f"{with_scores / 1e6:.1f}",
        ),
        f"{activations:g} = 2 × 20",
    )
