"""Options of recipes for "torch", and how their scripts are run and compared with the estimates.

A script runs two steps, and the estimate is that of a step whose optimizer state exists. The peaks
differ by at most `ALLOWED` bytes: the loss of a script is live while the optimizer updates the
parameters, and the estimated step keeps a weight next to its loss.
"""

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from typing import Any, NamedTuple

import all_pairs
from script_models import WORKLOADS, run_script

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


class Peaks(NamedTuple):
    """Peak of a recipe's script, and of its estimate."""

    measured: int
    predicted: int


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


def run(model: str, recipe: Recipe) -> Peaks:
    """Run the script for "torch"."""
    workload = WORKLOADS[model]
    with redirect_stdout(StringIO()):
        meter, _ = run_script(FRAMEWORKS["torch"].script(recipe, workload))
    functions = workload.make_model, workload.make_batch
    predicted = estimate(*functions, recipe, loss_sum=workload.loss_sum).peak_bytes
    return Peaks(meter.peak_bytes, predicted)


def all_values() -> list[tuple[str, Recipe]]:
    """Return (model, recipe) with each pair of values in `OPTIONS` that each model supports."""
    return [
        (model, recipe_of(row))
        for model in WORKLOADS
        for row in all_pairs.rows(OPTIONS, lambda row, model=model: suits(model, recipe_of(row)))
    ]
