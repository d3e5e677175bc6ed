"""Claims that learners may have read, each with the experiment that tests it and the outcome.

The claims are in the modules of their lessons. Each lesson measures the values and passes them to
`what_you_may_have_read`. A test repeats every experiment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .tables import Table

#: Outcomes of a claim. A claim holds partly if it is right only in some cases, or if it does not
#: mention a cost.
OUTCOMES = ("fails", "partly", "holds")


@dataclass(frozen=True)
class Claim:
    """A claim with its experiment and outcome. All attributes except the outcome are labels.

    Attributes:
        claim: The claim, as it is stated in the source.
        experiment: Description of the experiment.
        verdict: One sentence on whether and when the claim is right.
        outcome: One of `OUTCOMES`.
        source: Where the claim is from, as it is cited; by default the teaching documents from
            which the course was developed.

    Raises:
        ValueError: The outcome is not one of `OUTCOMES`.
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
    """Return the table of claims, with the measured value of each.

    Args:
        claims: The claims.
        measured: One label per claim, which states the measured value.

    Raises:
        ValueError: The numbers of measured values and of claims differ.
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
