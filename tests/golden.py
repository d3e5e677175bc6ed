"""What estimates and searches gave when this file's table was written, so that a change behind them
is seen.

    PYTHONPATH=. python tests/golden.py           # compare all; about five minutes of one core
    PYTHONPATH=. python tests/golden.py --write   # write them anew: the diff says which cases moved

The cases are the models of `brute_force_fit`, each by recipes that hold every pair of levers, and
ranks; and a search of each model. An estimate is compared as `estimate` makes it, and as a search
composes it. `make test` compares a sample of them.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path

import brute_force_fit
from brute_force_fit import CASES, DECODER, RATES, Case
from pairwise import rows

from course_lib._check import InfeasibleBudget
from course_lib.budget import Estimate, Recipe, estimate, fit
from course_lib.budget.knowledge import EstimateCache
from course_lib.models import Decoder, random_tokens

FILE = Path(__file__).with_name("golden.csv")
SEARCHES = Path(__file__).with_name("golden_searches.csv")
MODELS = {
    **CASES,
    "ranks": Case(partial(Decoder, layers=10, **DECODER), partial(random_tokens, 8, 24, 199)),
}
COMPOSED = ("chain", "deep decoder", "BART")  # two that are composed, and one that is not
LEVERS: dict[str, tuple] = {
    "precision": ("fp32", "bf16", None),
    "optimizer": ("adam", "sgd", "momentum", "adafactor", "adam8bit"),
    "update": (None, "foreach", "fused"),
    "offload_optimizer": (0.0, 0.5, 1.0),
    "page_bytes": (Recipe.page_bytes, 1 << 14),
    "attention": ("standard", "flash", None),
    "checkpoint": ("none", "layers", "first", "selective", "segments", "optimal"),
    "offload_activations": (False, True),
    "prefetch": (None, 0, 2),
    "in_flight": (None, 1),
    "head_chunk": (None, 7),
    "in_backward": (False, True),
    "accumulate": (None, "fp32"),
    "micro_batches": (1, 2, 4),
    "tier": ("file", "host"),
}
OF_RANKS: dict[str, tuple] = {
    "precision": ("fp32", "bf16"),
    "attention": ("standard", "flash"),
    "checkpoint": ("none", "layers", "selective"),
    "micro_batches": (1, 2),
    "ranks": (2, 4),
    "shard": ("ddp", "zero1", "zero2", "zero3"),
    "tier": ("file", "host"),
}
OF_HUGGING_FACE = LEVERS | {"attention": ("standard", "flash", "eager", "sdpa")}
MIN_BYTES, SCHEDULE = 1000, 1.25  # small activations go down; of the least bytes of a schedule


# ---- cases: (model, tier, recipe)


def recipe_of(row: dict, blocks=None, schedule_bytes: int = 1) -> Recipe:
    fields = {name: value for name, value in row.items() if name != "tier"}
    fields |= {"min_bytes": MIN_BYTES} if row.get("offload_activations") else {}
    kind = row["checkpoint"]
    if kind == "first":
        fields |= {"checkpoint": "layers", "first_blocks": 1}
    fields |= {"segments": 2} if kind == "segments" else {}
    fields |= {"schedule_bytes": schedule_bytes} if kind == "optimal" else {}
    fields |= {"blocks": blocks} if kind != "none" else {}
    return Recipe(**fields)


def goes_together(row: dict) -> bool:
    try:
        recipe_of(row)
    except ValueError:
        return False
    down = row.get("offload_activations", True)
    return down or not (row["prefetch"] is not None or row["in_flight"])


def cases() -> Iterator[tuple[str, str, Recipe]]:
    """What a model refuses of a lever's values by itself is a case of its own, and in no other."""
    for number, (name, case) in enumerate(MODELS.items()):
        blocks = (case.options or {}).get("blocks")
        levers = OF_HUGGING_FACE if name in ("GPT-2", "Llama", "BART") else LEVERS
        levers = OF_RANKS if name == "ranks" else levers
        plain = {lever: values[0] for lever, values in levers.items()}
        refused = set()
        for lever, value in (
            (lever, value) for lever, values in levers.items() for value in values
        ):
            row = plain | {lever: value}
            if goes_together(row) and not runs(name, row, recipe_of(row, blocks)):
                refused.add((lever, value))
                yield name, row["tier"], recipe_of(row, blocks)
        levers = {
            lever: tuple(v for v in values if (lever, v) not in refused)
            for lever, values in levers.items()
        }
        for row in rows(levers, goes_together, number):
            recipe = recipe_of(row, blocks)
            if recipe.checkpoint == "optimal":
                try:
                    estimated(name, row["tier"], recipe)
                except InfeasibleBudget as error:
                    recipe = recipe_of(row, blocks, int(SCHEDULE * error.least_bytes))
                except (TypeError, ValueError, RuntimeError):
                    pass  # which is what the case is
            yield name, row["tier"], recipe


def runs(name: str, row: dict, recipe: Recipe) -> bool:
    try:
        estimated(name, row["tier"], recipe)
    except InfeasibleBudget:  # of a schedule, which gets more bytes then
        return True
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


# ---- results


def estimated(name: str, tier: str, recipe: Recipe) -> Estimate:
    case = MODELS[name]
    loss_sum = (case.options or {}).get("loss_sum")
    return estimate(case.make_model, case.make_batch, recipe, loss_sum=loss_sum, tier=tier)


def composed(name: str, tier: str, recipe: Recipe) -> Estimate:
    case = MODELS[name]
    key = name, tier, recipe.precision, recipe.min_bytes
    if key not in _known:
        options = {"loss_sum": (case.options or {}).get("loss_sum"), "tier": tier, "max_norm": None}
        base = Recipe(precision=recipe.precision, min_bytes=recipe.min_bytes)
        _known[key] = EstimateCache(case.make_model, case.make_batch, base, **options)
    return _known[key].estimate(recipe)


_known: dict[tuple, EstimateCache] = {}


def told(name: str, tier: str, recipe: Recipe, made=estimated) -> dict[str, str]:
    """A row of the table."""
    row = {"model": name, "recipe": repr(recipe), "tier": tier}
    try:
        values = asdict(made(name, tier, recipe))
    except (TypeError, ValueError, RuntimeError) as error:  # an InfeasibleBudget is one
        return {**row, "refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    for value in ("recipe", "tier", "kind"):
        del values[value]
    for value in ("at_peak", "phase_peaks"):
        values[value] = " ".join(f"{key} {n}" for key, n in values[value].items() if n)
    return {**row, **{key: str(value) for key, value in values.items()}}


def searched(name: str, share: float) -> dict[str, str]:
    """What `fit` finds in this share of what the plain step takes."""
    case = MODELS[name]
    ranks = {"ranks": 4} if name == "ranks" else {}
    base = Recipe(**case.base.changed_fields(), **ranks)
    first = estimated(name, case.tier, Recipe(**case.base.changed_fields())).peak_bytes
    row = {"model": name, "budget": str(int(share * first))}
    try:
        found = fit(
            case.make_model,
            case.make_batch,
            int(row["budget"]),
            base=base,
            rates=RATES[1],
            tier=case.tier,
            progress=False,
            **(case.options or {}),
        )
    except InfeasibleBudget as error:
        return {**row, "title": str(error)}
    recipes = {f"{i}": f"{e.peak_bytes} {e.recipe!r}" for i, e in enumerate(found[:4])}
    return {**row, "title": found.title, **recipes}


# ---- the table


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def write(path: Path, table: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(key for row in table for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def sample(count: int) -> list[dict[str, str]]:
    """So many rows of the table that hold the most pairs of a model and what its recipe has."""
    table, found, seen = read(FILE), [], set()

    def parts(row: dict) -> set:
        fields = eval(row["recipe"], {"Recipe": Recipe}).changed_fields()
        kinds = [f"{name}={value}" for name, value in fields.items() if "_bytes" not in name]
        return set(combinations([row["model"], row["tier"], *kinds], 2))

    known = {i: parts(row) for i, row in enumerate(table) if "refused" not in row}
    models = set(MODELS)
    for _ in range(count):  # each model first
        left = [i for i in known if table[i]["model"] in models] or list(known)
        best = max(left, key=lambda i: (len(known[i] - seen), -i))
        models.discard(table[best]["model"])
        seen |= known.pop(best)
        found.append(table[best])
    return found


def moved(expected: Iterable[dict[str, str]], made=estimated) -> list[str]:
    """The differences, each a line: what it was, and what it is."""
    found = []
    for row in expected:
        recipe = eval(row["recipe"], {"Recipe": Recipe})
        now = told(row["model"], row["tier"], recipe, made)
        now = {key: value for key, value in now.items() if value}
        for key in dict.fromkeys([*row, *now]):
            if row.get(key) != now.get(key):
                where = f"{row['model']}, {row['tier']}, {row['recipe']}"
                found.append(f"{where}: {key} was {row.get(key)}, is {now.get(key)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    searches = [(name, share) for name in MODELS for share in (0.5, 0.8)]
    with brute_force_fit.small_pages():
        found = [searched(*each) for each in searches]
    if given.write:
        write(FILE, [told(*case) for case in cases()])
        write(SEARCHES, found)
        return 0
    table = read(FILE)
    differences = [f"{a} was {b}" for a, b in zip(found, read(SEARCHES), strict=True) if a != b]
    for made in (estimated, composed):
        expected = [row for row in table if made is estimated or row["model"] in COMPOSED]
        differences += [f"{made.__name__}: {line}" for line in moved(expected, made)]
    print("\n".join([*differences, f"{len(table)} cases, {len(differences)} differences"]))
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
