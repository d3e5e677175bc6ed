"""Compare estimates with those in `recorded_estimates.csv`.

    PYTHONPATH=. python tests/tools/recorded_estimates.py          # compare all; three minutes
    PYTHONPATH=. python tests/tools/recorded_estimates.py --write  # store all

The cases are the models of `brute_force_fit` with recipes that contain every pair of options, and
recipes for ranks. To add a case, write a row with a model, a recipe and a tier; `--write` adds the
rest. `make test` compares a row of each of four models. `estimate_checks.py` compares estimates
with runs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import csv_tables
from brute_force_fit import CASES, DECODER, Case

from course_lib.budget import Recipe, estimate
from course_lib.models import Decoder, random_tokens

FILE = Path(__file__).with_name("recorded_estimates.csv")
MODELS = {
    **CASES,
    "ranks": Case(partial(Decoder, layers=10, **DECODER), partial(random_tokens, 8, 24, 199)),
}
Row = dict[str, str]


def current(row: Row) -> Row:
    """Return the row with its current estimate, or with the type of the error."""
    case = MODELS[row["model"]]
    options = {"loss_sum": (case.options or {}).get("loss_sum"), "tier": row["tier"]}
    recipe = eval(row["recipe"], {"Recipe": Recipe})
    now = {name: row[name] for name in ("model", "recipe", "tier")}
    try:
        values = asdict(estimate(case.make_model, case.make_batch, recipe, **options))
    except (TypeError, ValueError, RuntimeError) as error:  # an InfeasibleBudget is one
        return {**now, "refused": type(error).__name__}
    del values["recipe"], values["tier"], values["kind"], values["optimizer"]
    for name in ("at_peak", "phase_peaks"):
        values[name] = " ".join(f"{key} {n}" for key, n in values[name].items() if n)
    return now | {name: str(value) for name, value in values.items() if value != ""}


def read() -> list[Row]:
    rows = csv_tables.read(FILE)
    return [{key: value for key, value in row.items() if value} for row in rows]


def differences_of(table: Iterable[Row]) -> list[str]:
    """Return a line for each recorded value that differs from the current one."""
    return [
        f"{', '.join([*row.values()][:3])}: {key} was {row.get(key)}, is {now.get(key)}"
        for row, now in ((row, current(row)) for row in table)
        for key in dict.fromkeys([*row, *now])
        if row.get(key) != now.get(key)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    table = read()
    if given.write:
        csv_tables.write(FILE, [*map(current, table)])
        return 0
    differences = differences_of(table)
    print("\n".join([*differences, f"{len(table)} cases, {len(differences)} differences"]))
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
