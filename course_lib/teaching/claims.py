"""Claims that learners may have read, each with the experiment that tests it and the outcome.

The claims of a lesson are in its `claims.toml`, in English and Chinese. The lesson measures one
value per claim and passes the values to `claims_table`. A test repeats every experiment.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.labels import LabelError, pair, verbatim

from .tables import Table

#: Outcomes of a claim. A claim holds partly if it is right only in some cases, or if it does not
#: mention a cost.
OUTCOMES = ("fails", "partly", "holds")


@dataclass(frozen=True)
class Claim:
    """A claim from another source, with the experiment that tests it, and the outcome.

    All attributes except `outcome` are labels, which can be translated into Chinese.

    Attributes:
        claim: The claim, as it is stated in the source.
        experiment: Description of the experiment.
        verdict: One sentence on whether and when the claim is right.
        outcome: "fails", "partly" or "holds".
        source: Citation of the source. By default, the teaching documents from which the course was
            developed.

    Raises:
        ValueError: `outcome` is not one of these three words.
    """

    claim: str
    experiment: str
    verdict: str
    outcome: str
    source: str = "teaching documents"

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {self.outcome!r}")


def read_claims(file: str, table: str) -> tuple[Claim, ...]:
    """Read claims from the file `claims.toml` in a module's folder.

    The file has one table `[[claims]]` per claim. The keys of the table are the attributes of
    `Claim`. A text is given in both languages, such as `claim.en` and `claim.zh`. It is a single
    string if it is the same in both languages.

    Args:
        file: The module's `__file__`.
        table: Name of the tables to read, such as "claims" for `[[claims]]`.

    Raises:
        LabelError: A text is missing in one language.
    """
    path = Path(file).with_name("claims.toml")

    def label(words: str | Mapping[str, str]) -> str:
        if isinstance(words, str):
            return verbatim(words)
        if set(words) != {"en", "zh"} or not all(words.values()):
            raise LabelError(
                f"each text in {path.parent.name}/{path.name} must have the entries en (English)"
                f" and zh (Chinese), got {words}"
            )
        return pair(words["en"], words["zh"])

    rows = tomllib.loads(path.read_text("utf-8"))[table]
    return tuple(
        Claim(outcome=row.pop("outcome"), **{name: label(words) for name, words in row.items()})
        for row in rows
    )


def claims_table(claims: Sequence[Claim], *measured: str) -> Table:
    """Return a table of claims, each with its source, experiment, measured value and verdict.

    Args:
        claims: The claims.
        measured: One label per claim, with the measured value.

    Raises:
        ValueError: The number of measured values is not the number of claims.
    """
    if len(measured) != len(claims):
        raise ValueError(
            f"measured must have one value for each of the {len(claims)} claims, got"
            f" {len(measured)} values"
        )
    columns = ["claim", "source", "experiment", "measured", "verdict"]
    rows = [
        (each.claim, each.source, each.experiment, figure, each.verdict)
        for each, figure in zip(claims, measured, strict=True)
    ]
    return Table(columns, rows)
