"""Printed scripts run unchanged, and their peaks are those of the estimates.

`COURSE_SCRIPTS=all pytest tests/library/test_budget_scripts.py` runs scripts with all values.
"""

import os
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import all_pairs
import check_torch_scripts
import pytest
import torch
from check_torch_scripts import ALLOWED, OPTIONS, fields, recipe_of, run, suits
from script_models import WORKLOADS, Mixer, run_on_ranks, run_script
from torch import nn
from torch.nn import functional as F

from course_lib.budget import Recipe, chunked_head, estimate
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.budget.scripts.plain import CLASSES
from course_lib.checkpoint import checkpoint_blocks
from course_lib.models import Decoder, random_tokens

pytest.importorskip("transformers", reason="one of the models is of transformers")

# Two values per option, because all of them take minutes.
OPTION_PAIRS = {name: (values[0], values[1]) for name, values in OPTIONS.items()} | {
    "optimizer": (fields(), fields(optimizer="lion")),
    "attention": (fields(attention=None), fields(attention="flash")),
    "checkpoint": OPTIONS["checkpoint"][2:],
    "micro_batches": (fields(), fields(in_backward=True), fields(micro_batches=2)),
}


def models_of(row):
    """Return the models that support the options of a row."""
    return [model for model in ("llama", "mixer", "decoder") if suits(model, recipe_of(row))]


ROWS = [
    (models_of(row)[i % len(models_of(row))], recipe_of(row))
    for i, row in enumerate(all_pairs.rows(OPTION_PAIRS, models_of))
]
ROWS.append(("llama", Recipe(attention="eager")))
if os.environ.get("COURSE_SCRIPTS") == "all":
    ROWS = check_torch_scripts.all_values()


@pytest.mark.parametrize(("model", "recipe"), ROWS, ids=str)
def test_measured_peak_of_generated_script_equals_estimate(model, recipe):
    row = run(model, recipe)
    # The loss is live while the optimizer updates the parameters.
    assert abs(row.measured - row.predicted) <= ALLOWED


def test_chunked_head_finds_output_head_of_checkpointed_model():
    sizes = {"vocabulary": 10, "hidden": 32, "layers": 2, "heads": 2, "sequence": 8}
    decoder = Decoder(**sizes)  # the layers in its blocks are wider than its head
    checkpoint_blocks(decoder, "layers.*")
    calls = []
    decoder.head.register_forward_hook(lambda *_: calls.append("head"))
    with chunked_head(decoder, 4):
        decoder.loss(random_tokens(2, 8, 10)).backward()
    assert calls == ["head"]


# ---- losses


def losses_of(script: str) -> list[float]:
    """Run three steps of a script on seeded random numbers, and return their losses."""
    torch.manual_seed(0)
    with redirect_stdout(StringIO()) as out:
        run_script(script.replace("range(2)", "range(3)"))
    return losses_in(out.getvalue())


def losses_in(printed: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in printed.splitlines()]


def plain_losses(model: str, compute) -> list[float]:
    """Return the losses of three plain steps with AdamW on the whole batch."""
    torch.manual_seed(0)
    trained, losses = WORKLOADS[model].make_model(), []
    batch = WORKLOADS[model].make_batch()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    for _ in range(3):
        loss = compute(trained, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def padded_loss(model, batch):
    """Return the mean over all labels that count, computed without the loss of transformers."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


PLAIN_LOSSES = {
    "decoder": lambda model, tokens: F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    ),
    "padded": padded_loss,
    "mixer": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("padded", {"micro_batches": 4, "checkpoint": "layers", "head_chunk": 7}),
        ("decoder", {"in_backward": True, "checkpoint": "segments", "segments": 2}),
        ("mixer", {"micro_batches": 3, "checkpoint": "selective", "offload_optimizer": 1.0}),
    ],
)
def test_generated_script_has_same_losses_as_baseline_steps(model, options):
    script = FRAMEWORKS["torch"].script(Recipe(attention=None, **options), WORKLOADS[model])
    one_sample_each = options.get("micro_batches") == WORKLOADS[model].samples
    assert ("split(batch, 1)" in script) == one_sample_each
    assert losses_of(script) == pytest.approx(plain_losses(model, PLAIN_LOSSES[model]), abs=2e-4)


# ---- FSDP2

SHARDED = {
    "model": ("decoder", "padded"),
    "shard": ("zero2", "zero3"),
    "precision": ("fp32", "bf16"),
    "checkpoint": ("layers", "selective"),
    "micro_batches": (1, 2),
}


def sharded(model, **options):
    return model, Recipe(attention=None, ranks=2, **options)


ON_RANKS = [sharded(**row) for row in all_pairs.rows(SHARDED, lambda row: True)]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Start torchrun once, and return (peaks of the ranks, what rank 0 printed) of each script."""
    written = [FRAMEWORKS["fsdp2"].script(recipe, WORKLOADS[model]) for model, recipe in ON_RANKS]
    return run_on_ranks(written, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize(
    "case", range(len(ON_RANKS)), ids=lambda case: "-".join(map(str, ON_RANKS[case]))
)
def test_measured_peak_of_sharded_script_equals_estimate(case, on_ranks):
    model, recipe = ON_RANKS[case]
    workload = WORKLOADS[model]
    functions = workload.make_model, workload.make_batch
    predicted = estimate(*functions, recipe, loss_sum=workload.loss_sum).peak_bytes
    peaks, printed = on_ranks[case]
    assert peaks == [predicted] * recipe.ranks
    if recipe.precision == "fp32":
        expected = plain_losses(model, PLAIN_LOSSES[model])[:2]
        assert losses_in(printed) == pytest.approx(expected, abs=2e-4)


# ---- unsupported recipes and workloads

# Fields that a script writes: those whose values are run as printed, and names of blocks.
WRITTEN = {name for values in OPTIONS.values() for each in values for name, _ in each} | {"blocks"}
# Fields that change only a technique that the framework does not support.
OF_UNSUPPORTED = {"min_bytes", "prefetch", "in_flight", "page_bytes", "segments", "schedule_bytes"}


@pytest.mark.parametrize(
    ("framework", "others"),
    [("torch", WRITTEN | {"schedule_bytes"}), ("trainer", OF_UNSUPPORTED | {"micro_batches"})],
)
def test_framework_restricts_or_writes_every_recipe_field(framework, others):
    """A framework allows all values of a field that it does not limit."""
    assert {*FRAMEWORKS[framework].only} | others == Recipe.__dataclass_fields__.keys()


def test_pytorch_script_has_optimizer_class_for_every_optimizer():
    assert CLASSES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("framework", "recipe", "message"),
    [
        ("torch", Recipe(ranks=2), "^ranks must be 1 .*, got 2; framework='fsdp2' can"),
        ("torch", Recipe(checkpoint="optimal", schedule_bytes=9), "^checkpoint must be "),
        ("fsdp2", Recipe(), "^ranks must be at least 2 .*got 1; framework='torch' and"),
        ("fsdp2", Recipe(ranks=2, shard="ddp"), "^shard must be .*got 'ddp'; course_lib.distrib"),
        ("fsdp2", Recipe(ranks=2, shard="zero1"), "^shard must be .*'zero3' .*got 'zero1'"),
    ],
)
def test_framework_conflict_message_names_unsupported_recipe_field(framework, recipe, message):
    found = FRAMEWORKS[framework].conflict(recipe)
    assert re.search(message, found), found
    fields_of = {name: getattr(recipe, name) for name in ("checkpoint", "ranks", "shard")}
    assert not FRAMEWORKS[framework].allows(fields_of)


class Normed(Mixer):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(16)


@pytest.mark.parametrize(
    ("model", "changes", "recipe", "message"),
    [
        ("llama", {}, {"attention": "flash"}, "attention must be .* script for .*, got 'flash'"),
        ("mixer", {}, {"attention": "sdpa"}, "attention must be .* or None for a Mixer"),
        ("mixer", {"make_model": Normed}, {"checkpoint": "layers"}, "BatchNorm in its blocks"),
        ("mixer", {"make_batch": lambda: object()}, {}, "make_batch must return a tensor, or"),
        ("mixer", {"source": None}, {}, "workload.source must be"),
    ],
)
def test_script_generation_rejects_unsupported_workload(model, changes, recipe, message):
    workload = replace(WORKLOADS[model], **changes)
    with pytest.raises(ValueError, match=message):
        FRAMEWORKS["torch"].script(Recipe(**{"attention": None, **recipe}), workload)
