"""Recipes as lines for Hugging Face's Trainer and for FSDP2, run as a reader would paste them."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import distributed

from course_lib.budget import Recipe, estimate
from course_lib.budget import __main__ as command
from course_lib.memory import MemoryMeter

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SAMPLES, LENGTH = 8, 32


def make_model():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**LLAMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def make_batch():
    rows = torch.randint(97, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": rows, "labels": rows.clone()}


def arguments_of(recipe, folder, **more):
    lines = recipe.as_training_arguments(SAMPLES)
    return transformers.TrainingArguments(folder, use_cpu=True, **lines.arguments, **more)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(checkpoint="layers", micro_batches=2),
        Recipe(update="fused"),
        Recipe(optimizer="momentum"),
        Recipe(optimizer="adafactor"),
        Recipe(checkpoint="layers", in_backward=True, offload_optimizer=1.0),
        Recipe("bf16", checkpoint="layers"),
        Recipe("autocast"),
        Recipe("autocast", checkpoint="layers", micro_batches=2),
    ],
    ids=str,
)
def test_two_steps_of_the_trainer_peak_at_the_estimate(recipe, tmp_path):
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    arguments = arguments_of(recipe, tmp_path, max_steps=2, disable_tqdm=True, **quiet)
    batch, model = make_batch(), make_model()
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(SAMPLES)] * 2
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    with MemoryMeter(model) as meter:  # of two steps, since the first makes the optimizer state
        trainer.train()
    lines = recipe.as_training_arguments(SAMPLES)
    more = meter.peak_bytes - estimate(make_model, make_batch, lines.recipe).peak_bytes
    assert (lines.recipe == recipe) == (lines.differences == ())
    # It has the batches of both steps, and a few numbers for its log.
    assert 0 <= more <= 2 * sum(tensor.nbytes for tensor in batch.values()) + 100


LAYERS = Recipe(checkpoint="layers")
OFFLOADED = Recipe(checkpoint="layers", offload_activations=True)
SPLIT = Recipe(None, micro_batches=2)
DDP = Recipe(ranks=2, shard="ddp")
# Field -> a recipe, the same one with another value in the field, and words of what the Trainer
# does otherwise then; without words, it does the same.
OTHERS = {
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
# These only change a technique that the Trainer lacks, and the recipe gets a sentence for that.
OF_MISSING = {"segments", "schedule_bytes", "page_bytes"}


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_of_a_recipe_changes_what_is_said_about_the_trainer(field, tmp_path):
    one, recipe, words = OTHERS[field]
    before, lines = (each.as_training_arguments(SAMPLES) for each in (one, recipe))
    assert (before.arguments, before.differences) != (lines.arguments, lines.differences)
    assert [words in sentence for sentence in lines.differences] == [True] * bool(words)
    assert words in str(lines)
    assert arguments_of(recipe, tmp_path).optim == lines.arguments["optim"]


def test_every_field_of_a_recipe_is_in_the_table_of_the_trainer():
    assert OTHERS.keys() | OF_MISSING == Recipe.__dataclass_fields__.keys()


def test_the_recipe_of_the_trainers_step_has_only_what_the_trainer_has():
    recipe = replace(
        OFFLOADED, optimizer="sgd", update="fused", first_blocks=2, prefetch=3, min_bytes=1
    )
    assert recipe.as_training_arguments(SAMPLES).recipe == replace(OFFLOADED, optimizer="sgd")
    named = replace(LAYERS, blocks="a", first_blocks=1)  # a model's only blocks may have names
    assert named.as_training_arguments(SAMPLES).recipe == replace(LAYERS, blocks="a")


def test_the_trainer_gets_muon_as_an_optimizer_and_its_arguments_name_adamw():
    lines = Recipe(optimizer="muon").as_training_arguments(SAMPLES)
    assert lines.recipe == Recipe() and lines.arguments["optim"] == "adamw_torch"
    assert ["optimizers=(optimizer, None)" in each for each in lines.differences] == [True]


def test_all_ranks_together_take_the_samples_of_the_batch():
    lines = Recipe(ranks=2, shard="ddp", micro_batches=2).as_training_arguments(SAMPLES)
    assert lines.arguments["per_device_train_batch_size"] == 2
    with pytest.raises(ValueError, match="samples"):
        Recipe().as_training_arguments(0)


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_a_sharded_recipe_sets_fsdp_and_its_checkpoints(shard, tmp_path):
    recipe = Recipe("bf16", checkpoint="layers", ranks=2, shard=shard)
    arguments = arguments_of(recipe, tmp_path)
    assert arguments.fsdp and not arguments.activation_checkpointing
    assert arguments.fsdp_config["reshard_after_forward"] == (shard == "zero3")
    assert arguments.fsdp_config["activation_checkpointing"]


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pasted_lines_of_fsdp2_train_like_the_plain_model(precision, one_rank):
    recipe = Recipe(precision, checkpoint="layers", ranks=2, shard="zero3")
    plain, model, losses = make_model(), make_model(), []
    code = recipe.as_fsdp2([f"model.layers.{i}" for i in range(LLAMA["num_hidden_layers"])])
    exec(code, {"model": model})
    assert code.count("fully_shard(") == 2 and "reshard_after_forward=True" in code
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            loss = each(**make_batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "fp32" else 0.05)


def test_lines_of_fsdp2_name_the_fields_that_they_do_not_set_and_need_a_recipe_that_shards():
    recipe = Recipe(ranks=2, shard="zero2", checkpoint="selective", micro_batches=4)
    last = recipe.as_fsdp2(["layers.0"]).splitlines()[-1]
    assert last.endswith(": update='fused', checkpoint='selective', micro_batches=4")
    with pytest.raises(ValueError, match="shard must be 'zero2' or 'zero3'"):
        Recipe(ranks=2, shard="ddp").as_fsdp2(["layers.0"])


@pytest.fixture
def printed(tmp_path, capsys):
    """A function that returns what the command prints for a config."""

    def run(config, *more):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config), "utf-8")
        size = ["--config", str(file), "--sequence", str(LENGTH), "--batch", str(SAMPLES)]
        asked = [*size, "--device", "A100", "--quick", "--details", *more]
        assert command.main(asked) == 0
        return capsys.readouterr().out

    return run


def test_the_command_prints_training_arguments_that_can_be_pasted(printed):
    names = {"TrainingArguments": partial(transformers.TrainingArguments, use_cpu=True)}
    code = printed(LLAMA)
    call = code[code.index("\nTrainingArguments(") :].partition("\n)")
    arguments = eval("".join(call[:2]), names)
    assert arguments.bf16 and arguments.per_device_train_batch_size == SAMPLES
    told = json.loads(printed(LLAMA, "--json"))["training_arguments"]
    assert {name: getattr(arguments, name) for name in told} == told


def test_the_command_prints_lines_of_fsdp2_with_the_blocks_of_the_model(printed):
    sizes = {"vocab_size": 97, "n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4}
    gpt2 = {"model_type": "gpt2"} | sizes
    for config, blocks in ((LLAMA, "model.model.layers"), (gpt2, "model.transformer.h")):
        code = printed(config, "--ranks", "2", "--shard", "zero3")
        assert f"blocks = {blocks}\n" in code and "fully_shard(model, **options)" in code


def test_the_command_says_what_a_step_takes_without_the_missing_techniques(capsys):
    size = "--hidden 64 --layers 4 --heads 2 --vocabulary 97 --sequence 32 --batch 8"
    asked = f"{size} --precision fp32 --device laptop --quick --budget 3MB --details"
    assert command.main(asked.split()) == 0
    assert "with these arguments alone, a step takes about" in capsys.readouterr().out
