"""Claims that lesson 05 tests."""

from course_lib.teaching import Table, text
from course_lib.teaching.claims import read_claims, what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = read_claims(__file__, "claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")


def older_claims(used: tuple[int, int], peaks: tuple[int, int], second: float) -> Table:
    """Return a table of the optional section's claims, and of the numbers that test them.

    Args:
        used: Number of samples that reach an optimizer step, and number of all samples.
        peaks: Peaks in bytes for all samples at once, and for one sample at a time.
        second: AdamA's second moments divided by Adam's.
    """
    once, single = (f"{peak / 1e6:.1f}" for peak in peaks)
    lost = f"{used[1] - used[0]} / {used[1]}"
    fell = text("{once} → {single} MB", once=once, single=single)
    return what_you_may_have_read(OLDER_CLAIMS, f"{second:.1f}", lost, fell)
