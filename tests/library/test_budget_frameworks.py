"""Recipes as arguments of Hugging Face's Trainer and as lines for FSDP2, which are run as printed.

`test_budget_scripts_trainer` measures the Trainer's peak with these arguments."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hugging_face_models import LLAMA, text
from test_budget_answer import outputs_of
from test_configs import GPT_2, LLAMA_3_8B, small

from course_lib.budget import Recipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

SAMPLES, LENGTH = 8, 32


def arguments_of(recipe, folder, **more):
    lines = recipe.as_training_arguments(SAMPLES)
    return transformers.TrainingArguments(folder, use_cpu=True, **lines.arguments, **more)


LAYERS = Recipe(checkpoint="layers")
OFFLOADED = Recipe(checkpoint="layers", offload_activations=True)
SPLIT = Recipe(None, micro_batches=2)
DDP = Recipe(ranks=2, shard="ddp")
# Field -> a recipe, the recipe with another value of the field, and words of the sentence about the
# difference between the recipe and the Trainer, or "" if there is none.
CHANGED = {
    "precision": (Recipe(), Recipe("bf16"), "bf16 copies"),
    "optimizer": (Recipe(), Recipe(optimizer="lion"), "bitsandbytes"),
    "update": (Recipe(), Recipe(update="loop"), "between loop, foreach and fused"),
    "offload_optimizer": (Recipe(), Recipe(offload_optimizer=0.5), "state stays on the GPU"),
    "attention": (Recipe(attention="flash"), Recipe(attention="eager"), '_implementation="eager"'),
    "checkpoint": (Recipe(), Recipe(checkpoint="selective"), "checkpoints every block"),
    "blocks": (LAYERS, replace(LAYERS, blocks="a"), "checkpoints every block"),
    "first_blocks": (LAYERS, replace(LAYERS, first_blocks=1), "checkpoints every block"),
    "offload_activations": (Recipe(), Recipe(offload_activations=True), "activation_offloading="),
    "min_bytes": (OFFLOADED, replace(OFFLOADED, min_bytes=1), "offload has no `min_bytes`"),
    "prefetch": (OFFLOADED, replace(OFFLOADED, prefetch=3), "offload has no `min_bytes`"),
    "in_flight": (OFFLOADED, replace(OFFLOADED, in_flight=3), "offload has no `min_bytes`"),
    "head_chunk": (Recipe(), Recipe(head_chunk=7), "use_liger_kernel"),
    "in_backward": (Recipe(), Recipe(in_backward=True), "all gradients are live"),
    "accumulate": (SPLIT, replace(SPLIT, accumulate="fp32"), "in the dtype of the parameters"),
    "micro_batches": (Recipe(), Recipe(micro_batches=3), "9 samples instead of 8"),
    "ranks": (Recipe(), DDP, ""),
    "shard": (DDP, replace(DDP, shard="zero1"), "`stage: 1`"),
}
# These fields only change techniques that the Trainer lacks.
OF_UNSUPPORTED = {"segments", "schedule_bytes", "page_bytes"}


@pytest.mark.parametrize("field", CHANGED)
def test_each_recipe_field_changes_trainer_arguments_or_listed_differences(field, tmp_path):
    original, recipe, words = CHANGED[field]
    before, lines = (each.as_training_arguments(SAMPLES) for each in (original, recipe))
    assert (before.arguments, before.differences) != (lines.arguments, lines.differences)
    assert [words in sentence for sentence in lines.differences] == [True] * bool(words)
    assert words in str(lines)
    assert arguments_of(recipe, tmp_path).optim == lines.arguments["optim"]


def test_trainer_test_table_covers_every_recipe_field():
    assert CHANGED.keys() | OF_UNSUPPORTED == Recipe.__dataclass_fields__.keys()


def test_trainer_recipe_omits_fields_that_trainer_does_not_support():
    for recipe in (Recipe(), Recipe("autocast", checkpoint="layers", micro_batches=2)):
        lines = recipe.as_training_arguments(SAMPLES)
        assert lines.recipe == recipe and lines.differences == ()
    assert Recipe("bf16").as_training_arguments(SAMPLES).recipe == Recipe("autocast")
    recipe = replace(
        OFFLOADED, optimizer="sgd", update="fused", first_blocks=2, prefetch=3, min_bytes=1
    )
    assert recipe.as_training_arguments(SAMPLES).recipe == replace(OFFLOADED, optimizer="sgd")
    named = replace(LAYERS, blocks="a", first_blocks=1)
    assert named.as_training_arguments(SAMPLES).recipe == replace(LAYERS, blocks="a")


def test_trainer_batch_size_divides_samples_among_ranks():
    lines = Recipe(ranks=2, shard="ddp", micro_batches=2).as_training_arguments(SAMPLES)
    assert lines.arguments["per_device_train_batch_size"] == 2


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_sharded_recipe_sets_trainer_fsdp_and_fsdp_checkpoint_arguments(shard, tmp_path):
    recipe = Recipe("bf16", checkpoint="layers", ranks=2, shard=shard)
    arguments = arguments_of(recipe, tmp_path)
    assert arguments.fsdp and not arguments.activation_checkpointing
    assert arguments.fsdp_config["reshard_after_forward"] == (shard == "zero3")
    assert arguments.fsdp_config["activation_checkpointing"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generated_fsdp2_code_trains_with_same_loss_as_unsharded_model(precision, one_process):
    recipe = Recipe(precision, checkpoint="layers", ranks=2, shard="zero3")
    model, batch, losses = LLAMA(), text(), []
    plain = copy.deepcopy(model)
    code = recipe.as_fsdp2(["model.layers.0", "model.layers.1"])
    exec(code, {"model": model})
    assert code.count("fully_shard(") == 2 and "reshard_after_forward=True" in code
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            loss = each(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "fp32" else 0.05)


def test_generated_fsdp2_code_lists_unsupported_fields_and_rejects_ddp():
    recipe = Recipe(ranks=2, shard="zero2", checkpoint="selective", micro_batches=4)
    last = recipe.as_fsdp2(["layers.0"]).splitlines()[-1]
    assert last.endswith(": update='fused', checkpoint='selective', micro_batches=4")
    with pytest.raises(ValueError, match="shard must be 'zero2' or 'zero3'"):
        Recipe(ranks=2, shard="ddp").as_fsdp2(["layers.0"])


@pytest.fixture
def answer(config_file):
    """A function that returns what the command prints for a config: JSON and text."""

    def run(config, *more):
        size = [
            "--config",
            str(config_file(config)),
            "--sequence",
            str(LENGTH),
            "--batch",
            str(SAMPLES),
        ]
        device = ["--device", "A100", "--count", "tensors", "--quick"]
        return outputs_of(*size, *device, "--details", *more)

    return run


def test_command_prints_valid_training_arguments(answer):
    names = {"TrainingArguments": partial(transformers.TrainingArguments, use_cpu=True)}
    result, code = answer(small(LLAMA_3_8B))
    call = code[code.index("\nTrainingArguments(") :].partition("\n)")
    arguments = eval("".join(call[:2]), names)
    assert arguments.bf16 and arguments.per_device_train_batch_size == SAMPLES
    expected = result["training_arguments"]
    assert {name: getattr(arguments, name) for name in expected} == expected


def test_command_prints_fsdp2_code_with_block_names(answer):
    gpt2, llama = small(GPT_2), small(LLAMA_3_8B)
    for config, blocks in ((llama, "model.model.layers"), (gpt2, "model.transformer.h")):
        _, code = answer(config, "--ranks", "2", "--shard", "zero3")
        assert f"blocks = {blocks}\n" in code and "fully_shard(model, **options)" in code
