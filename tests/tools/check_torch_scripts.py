"""Run scripts for "torch" and compare their peaks with the estimates, for many recipes.

    python tests/tools/check_torch_scripts.py                pairs of options, for each model
    python tests/tools/check_torch_scripts.py --fsdp2        all combinations for "fsdp2"

A script runs two steps, and the estimate is that of a step whose optimizer state exists. The
program prints a row for each recipe whose peak differs, and a summary. It fails if a peak differs
by more than `ALLOWED` bytes: the loss of a script is live while the optimizer updates the
parameters, and the estimated step keeps a weight next to its loss.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import all_pairs
from script_models import WORKLOADS, run_on_ranks, run_script

from course_lib.budget import Recipe, estimate
from course_lib.budget.scripts import FRAMEWORKS

ALLOWED = 16
Fields = tuple[tuple[str, Any], ...]


def fields(**values: Any) -> Fields:
    """Return some fields of a recipe as a value that can be hashed."""
    return tuple(values.items())


OPTIONS: Mapping[str, tuple[Fields, ...]] = {
    "precision": (fields(), fields(precision="bf16"), fields(precision=None)),
    "optimizer": (
        fields(),
        fields(optimizer="sgd", update="foreach"),
        fields(optimizer="momentum", update="loop"),
        fields(update="fused"),
        fields(optimizer="adafactor"),
        fields(optimizer="lion"),
        fields(optimizer="muon"),
        fields(optimizer="muon", update="loop"),
    ),
    "offload_optimizer": (
        fields(),
        fields(offload_optimizer=0.5, page_bytes=1 << 20),
        fields(offload_optimizer=1.0),
    ),
    "attention": (fields(attention=None), fields(attention="standard"), fields(attention="flash")),
    "checkpoint": (
        fields(),
        fields(checkpoint="layers"),
        fields(checkpoint="layers", first_blocks=2),
        fields(checkpoint="selective"),
        fields(checkpoint="segments", segments=2),
    ),
    "offload_activations": (
        fields(),
        fields(offload_activations=True, min_bytes=4096),
        fields(offload_activations=True, min_bytes=1024, prefetch=3, in_flight=2),
    ),
    "head_chunk": (fields(), fields(head_chunk=20)),
    "micro_batches": (
        fields(),
        fields(in_backward=True),
        fields(micro_batches=4),
        fields(micro_batches=2, accumulate="fp32"),
    ),
}


@dataclass(frozen=True)
class Row:
    """Peak of a recipe's script, and the estimate.

    Attributes:
        model: Name in `WORKLOADS`.
    """

    model: str
    recipe: Recipe
    predicted: int
    measured: int

    def __str__(self) -> str:
        more = self.measured - self.predicted
        return (
            f"{self.model:8} {self.predicted:>12,} {self.measured:>12,} {more:>+8,}  {self.recipe}"
        )


def recipe_of(row: Mapping[str, Fields]) -> Recipe | None:
    """Return the recipe with these fields, or None if they cannot be combined."""
    try:
        return Recipe(**dict(chain.from_iterable(row.values())))
    except ValueError:
        return None


def suits(model: str, recipe: Recipe | None) -> bool:
    """Return whether the model supports the recipe."""
    if recipe is None:
        return False
    is_decoder = model in ("decoder", "fused")
    if recipe.attention in ("standard", "flash") and not is_decoder:
        return False
    if recipe.attention == "standard" and model == "decoder":
        return False  # the same as None
    if recipe.offload_activations and recipe.checkpoint == "segments" and not is_decoder:
        return False
    return recipe.head_chunk is None or model != "mixer"


def run(model: str, recipe: Recipe) -> Row:
    """Run the script for "torch"."""
    script = FRAMEWORKS["torch"].script(recipe, WORKLOADS[model])
    with redirect_stdout(StringIO()):
        meter, _ = run_script(script)
    return Row(model, recipe, predicted(model, recipe), meter.peak_bytes)


def predicted(model: str, recipe: Recipe) -> int:
    """Return the peak of the estimate."""
    workload = WORKLOADS[model]
    functions = workload.make_model, workload.make_batch
    return estimate(*functions, recipe, loss_sum=workload.loss_sum).peak_bytes


def pairs(model: str) -> list[Recipe]:
    """Return recipes that contain each pair of options that the model supports."""
    chosen = all_pairs.rows(OPTIONS, lambda row: suits(model, recipe_of(row)))
    return [recipe_of(row) for row in chosen]


def on_ranks(models: Sequence[str]) -> Iterator[Row]:
    """Run every script for "fsdp2" on two ranks, and yield the rows of the rank with more bytes."""
    choices = [("zero2", "zero3"), ("fp32", "bf16"), ("none", "selective", "layers"), (1, 2)]
    names = "shard", "precision", "checkpoint", "micro_batches"
    cases = [
        (model, Recipe(attention=None, ranks=2, **dict(zip(names, values, strict=True))))
        for model in models
        for values in product(*choices)
    ]
    scripts = [FRAMEWORKS["fsdp2"].script(recipe, WORKLOADS[model]) for model, recipe in cases]
    with TemporaryDirectory() as folder:
        found = run_on_ranks(scripts, Path(folder))
    for (model, recipe), (peaks, _) in zip(cases, found, strict=True):
        yield Row(model, recipe, predicted(model, recipe), max(peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fsdp2", action="store_true")
    given = parser.parse_args()
    cases = ((model, recipe) for model in WORKLOADS for recipe in pairs(model))
    rows = on_ranks([*WORKLOADS]) if given.fsdp2 else (run(*case) for case in cases)
    differences: Counter[int] = Counter()
    for row in rows:
        differences[row.measured - row.predicted] += 1
        if row.measured != row.predicted:
            print(row, flush=True)
    print(f"{sum(differences.values())} recipes; difference in bytes -> recipes:", end=" ")
    print(", ".join(f"{more:+,} -> {count}" for more, count in sorted(differences.items())))

    if any(abs(more) > ALLOWED for more in differences):
        sys.exit("a peak differs by more than the loss and its weight")


if __name__ == "__main__":
    main()
