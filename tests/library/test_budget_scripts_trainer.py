"""Scripts for Hugging Face's Trainer peak at the prediction, and `fit` searches their recipes.

`COURSE_SCRIPTS=all pytest tests/library/test_budget_scripts_trainer.py` runs all of them.
"""

import gc
import os
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import product

import all_pairs
import pytest
from hugging_face_models import LLAMA, SHARED, maker, text

from course_lib._check import InfeasibleBudget
from course_lib.budget import RATES, Recipe, estimate, fit
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.models import Decoder, random_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

import check_trainer_scripts as scripts  # noqa: E402  (it imports transformers)

TRAINER = FRAMEWORKS["trainer"]
FEW_CHOICES = {
    "model": ("plain", "frozen layers", "LoRA on int8"),
    "optimizer": ("adam", "adafactor", "adam8bit"),
}
ROWS = all_pairs.rows({**scripts.CHOICES, **FEW_CHOICES}, scripts.valid)
if os.environ.get("COURSE_SCRIPTS") == "all":
    ROWS = list(scripts.all_rows())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of the scripts and of the config.json that they read."""
    for name in ("transformers.trainer", "transformers.models.llama.modeling_llama"):
        import_module(name)
    gc.freeze()  # the Trainer collects garbage before each training
    return tmp_path_factory.mktemp("scripts")


@cache
def predicted(model):
    """Return the predicted peaks of all rows with this model, by recipe."""
    return scripts.predicted_bytes(
        model, [scripts.recipe_of(row) for row in ROWS if row["model"] == model]
    )


@pytest.mark.filterwarnings("ignore")  # of the Trainer and bitsandbytes about a CPU
@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row.values())))
def test_measured_peak_of_trainer_script_equals_prediction(row, folder, monkeypatch):
    if "LoRA" in row["model"]:
        pytest.importorskip("peft", reason="adapters need peft")
    if row["optimizer"] == "adam8bit" or "int8" in row["model"]:
        pytest.importorskip("bitsandbytes", reason="8-bit layers and states need bitsandbytes")
    monkeypatch.chdir(folder)
    recipe, workload = scripts.recipe_of(row), scripts.workload(row["model"])
    script = TRAINER.script(recipe, workload)
    assert 10 <= len([line for line in script.splitlines() if line]) <= 21
    more = scripts.measured_bytes(script) - predicted(row["model"])[recipe]
    assert abs(more) <= scripts.NUMBERS


# ---- The search


SAMPLES = 5  # only one or five micro-batches are equal
make_batch = partial(text, "none", SAMPLES)
make_eager = maker("Llama:LlamaForCausalLM", **SHARED, attn_implementation="eager")


def search(budget, make=LLAMA, **options):
    return fit(make, make_batch, budget, framework="trainer", progress=False, **options)


def test_search_finds_cheapest_recipe_that_trainer_supports():
    """Compare with all recipes of the Trainer, which this test lists without the search."""
    every = [
        Recipe("autocast", attention=attention, checkpoint=checkpoint, micro_batches=count)
        for attention, checkpoint, count in product(
            ("standard", "sdpa"), ("none", "layers"), (1, SAMPLES)
        )
    ]
    make = TRAINER.model_maker(make_eager)
    found = {recipe: estimate(make, make_batch, recipe, max_norm=1.0) for recipe in every}
    rates = RATES["laptop"]
    listed = search(10**9, make_eager, base=Recipe("autocast"))
    for budget in sorted({e.peak_bytes for e in found.values()}):
        listed = listed.within(budget)
        assert [TRAINER.conflict(e.recipe) for e in listed] == [None] * len(listed)
        assert all(e == found[e.recipe] for e in listed)
        fitting = [rates.seconds(e) for e in found.values() if e.peak_bytes <= budget]
        assert rates.seconds(listed[0]) == pytest.approx(min(fitting), rel=1e-9)


def test_infeasible_trainer_search_suggests_only_trainer_techniques():
    with pytest.raises(InfeasibleBudget) as caught:
        search(100_000)
    recipe = Recipe(checkpoint="layers", micro_batches=SAMPLES)
    assert caught.value.least.recipe == recipe
    assert {*caught.value.additions} == {"optimizer", "precision"}


def test_trainer_rejects_checkpoints_if_model_does_not_support_them(monkeypatch):
    base = Recipe(checkpoint="layers")
    assert search(10**9, base=base)[0].recipe.checkpoint == "layers"
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="checkpoint must be 'none' when framework is 'trainer'"):
        search(10**9, base=base)


# ---- unsupported recipes and arguments


plain_decoder = partial(Decoder, vocabulary=97, hidden=32, layers=1, heads=2, sequence=24)
LAYERS = Recipe(checkpoint="layers")
REJECTED = [
    (Recipe("bf16"), "precision must be .*'autocast', 'bf16-only'.*got 'bf16'; framework='torch'"),
    (Recipe(optimizer="muon"), "optimizer must be .*got 'muon'; framework='torch'"),
    (Recipe(update="foreach"), "update must be None or 'fused' .*framework='torch'"),
    (Recipe(optimizer="sgd", update="fused"), "update must be None for 'sgd' .*framework='torch'"),
    (Recipe(attention="flash"), "attention must be .*framework='torch'"),
    (Recipe(checkpoint="selective"), "checkpoint must be 'none' or 'layers' .*framework='torch'"),
    (replace(LAYERS, blocks="model.layers.*"), "blocks must be None .*framework='torch'"),
    (Recipe(head_chunk=8), "head_chunk must be None .*framework='torch'"),
    (Recipe(None, micro_batches=SAMPLES, accumulate="fp32"), "accumulate must be None .*'torch'"),
    (Recipe(micro_batches=2), "micro_batches must be a divisor of the batch's 5 samples .*got 2"),
    (Recipe(ranks=2, shard="zero3"), "ranks must be 1 .*got 2; framework='fsdp2'"),
]


@pytest.mark.parametrize(("recipe", "message"), REJECTED, ids=lambda each: str(each)[:40])
def test_trainer_rejects_unsupported_recipe(recipe, message):
    for given in ({"base": recipe}, {"recipes": [Recipe(), recipe]}):
        with pytest.raises(ValueError, match=message):
            search(10**9, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make_model": plain_decoder}, "model must be .*, got a Decoder.*framework='torch'"),
        ({"make_batch": partial(random_tokens, 2, 24, 97)}, "make_batch must return a dict of ten"),
        ({"framework": "trainer?"}, "framework must be .*'trainer'.*, got 'trainer\\?'"),
        ({"framework": 7}, "framework must be .*, got 7"),
        ({"blocks": "model.layers.*"}, "blocks must be None .*framework='torch' can"),
        ({"loss_sum": lambda model, batch: (model(**batch).loss, 1)}, "loss_sum must be None"),
        ({"split": lambda batch, parts: [batch] * parts}, "split must be None"),
    ],
)
def test_trainer_search_rejects_unsupported_argument(options, message):
    functions = {"make_model": LLAMA, "make_batch": make_batch}
    options = functions | {"framework": "trainer", "progress": False} | options
    with pytest.raises(ValueError, match=message):
        fit(budget_bytes=10**9, **options)
