"""Compare the library on random cases with oracles that share no code with it.

The cases have fixed seeds. A row gives the number of cases, the number of cases that differ by more
than rounding, the largest difference, and the seeds. `case(check, seed)` repeats a single case.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fuzz_cases
import fuzz_recipes
import torch
from scoreboard import Row

ROUNDS = 7  # rounds in which a check runs all its cases


@dataclass(frozen=True)
class Check:
    """A kind of random case.

    Attributes:
        what: Work of the library in a case.
        oracle: Reference that the result is compared with.
        run: Function that runs one case and returns the difference.
        cases: Number of cases at the default number of rounds.
        allowed: Largest difference that rounding, or bytes that only the oracle counts, explains.
        unit: Unit of the difference.
    """

    what: str
    oracle: str
    run: Callable[[random.Random], float]
    cases: int
    allowed: float = 0.0
    unit: str = "bytes"


PLACE = "units in the last place"
CHECKS = (
    # Operators store Python numbers in small tensors of 4 or 8 bytes each.
    Check("meter on random graphs", "the allocator's events", fuzz_cases.meter, 350, 48),
    Check(
        *("checkpoints in random structures", "the plain run", fuzz_cases.checkpoints),
        *(900, 8, PLACE),
    ),
    Check(
        *("frontier and optimal on random chains", "exhaustive search", fuzz_cases.solver_error),
        *(600, 0, "units of time"),
    ),
    Check(
        *("binomial and segments on random chains", "exhaustive search", fuzz_cases.rule_error),
        *(900, 0, "forwards or bytes"),
    ),
    Check(
        *("flash attention, random shapes, strides and masks", "the definition in float64"),
        *(fuzz_cases.flash, 900, 400, PLACE),
    ),
    Check(
        *("accumulation over random splits", "the whole batch in float64"),
        *(fuzz_cases.accumulation, 900, 30, PLACE),
    ),
    Check(
        "estimate of random models and recipes", "the step itself", fuzz_recipes.estimate_error, 25
    ),
    Check(
        *("fit on random models, 4 budgets each", "a grid of 16 recipes", fuzz_recipes.fit_error),
        *(6, 1e-9, "of the cost"),
    ),
)


def case(check: Check, seed: int) -> float:
    """Run one case with a seed, and return the difference; an error of the library is raised."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check.run(random.Random(seed))


def tally(check: Check, cases: int) -> Row:
    """Run a check with the seeds 0, 1, 2, ..., one per case, and return the row of the results."""
    largest, wrong, errors = 0.0, [], []
    for seed in range(cases):
        try:
            difference = case(check, seed)
        except Exception as error:
            wrong.append(seed)
            errors.append(f"seed {seed}: {type(error).__name__}")
            continue
        largest = max(largest, difference)
        if not difference <= check.allowed:
            wrong.append(seed)
    note = f"{cases} cases, {len(wrong)} differences, at most {largest:.3g} {check.unit}"
    note += f", seeds 0 to {cases - 1}"
    if wrong:
        note += f"; different: {', '.join(map(str, wrong[:5]))}"
    return Row(check.what, check.oracle, note="; ".join([note, *errors[:3]]))


def rows(rounds: int) -> Iterator[Row]:
    for check in CHECKS:
        yield tally(check, max(1, check.cases * rounds // ROUNDS))
