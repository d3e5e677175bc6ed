"""Claims that learners may have read: a claim that a lesson tests, with its experiment and what
became of it.

The claims stand with their lessons, and the measured figures are not there: each lesson measures
them and hands them in. A test repeats every experiment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .tables import Table

#: What becomes of a claim. One that is right in some cases, or at a price that it does not name,
#: holds partly.
OUTCOMES = ("fails", "partly", "holds")


@dataclass(frozen=True)
class Claim:
    """One claim; all but the outcome are labels, the source as it is cited: left out, the teaching
    documents that the course grew from.

    Raises:
        ValueError: the outcome is none of `OUTCOMES`.
    """

    claim: str
    experiment: str
    verdict: str
    outcome: str
    source: str = "teaching documents"

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {self.outcome!r}")


def what_you_may_have_read(claims: Sequence[Claim], *measured: str) -> Table:
    """The table of claims, with what has been measured for each, as labels.

    Raises:
        ValueError: there are not as many measured figures as claims.
    """
    if len(measured) != len(claims):
        raise ValueError(
            f"measured must have one figure per claim, {len(claims)} in all, got {len(measured)}"
        )
    columns = ["claim", "source", "experiment", "measured", "verdict"]
    rows = [
        (each.claim, each.source, each.experiment, figure, each.verdict)
        for each, figure in zip(claims, measured, strict=True)
    ]
    return Table(columns, rows)
