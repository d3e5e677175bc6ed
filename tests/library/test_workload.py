"""Models that a command line names: by a config, by sizes or by a function."""

import sys
from argparse import Namespace

import pytest
import torch
from estimate_checks import assert_measured

from course_lib.budget import Recipe
from course_lib.configs import KNOWN
from course_lib.distributed import task_of
from course_lib.workload import model_of_config, samples_of, workload_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GEMMA = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, **SIZES}
BERT = {
    "model_type": "bert",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **SIZES,
}


@pytest.mark.parametrize("config", [GEMMA, BERT], ids=lambda config: config["model_type"])
def test_estimate_of_transformers_only_architectures_equals_measurement(config, config_file):
    found = model_of_config(config_file(config), 16)
    assert config["model_type"] not in KNOWN and not found.plain
    recipe = Recipe(attention=None, checkpoint="layers")
    assert_measured(found.make_model, lambda: found.make_batch(4), recipe)


def test_budget_and_distributed_commands_build_same_workload_from_config(config_file):
    path = config_file(GEMMA)
    task, found = task_of(str(path), batch=4, sequence=16, unequal=True), model_of_config(path, 16)
    ours, theirs = task.make_model().state_dict(), found.make_model().state_dict()
    assert {n: p.shape for n, p in ours.items()} == {n: p.shape for n, p in theirs.items()}
    batch, plain = task.make_batch(3), found.make_batch(4, seed=3)
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    kept = (batch["labels"] != -100).sum(1).tolist()
    assert kept == [16, 12, 8, 4]  # later samples are shorter
    total, weight = task.loss_sum(task.make_model(), batch)
    assert int(weight) == sum(kept) - 4  # the first token of each sample is not predicted
    assert total.requires_grad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nothing_of_the_kind"}, "transformers .* knows, got 'nothing_of_the_kind'"),
        ({}, "model_type must be one of .*, got None"),
        ({"model_type": "vit"}, "must be a type for which .* got 'vit'"),
        ({**GEMMA, "max_position_embeddings": 8}, "sequence must be at most 8 .*, got 16"),
    ],
)
def test_config_without_language_model_is_rejected(config, message, config_file):
    with pytest.raises(ValueError, match=message):
        model_of_config(config_file(config), 16)


def test_config_without_transformers_raises_and_recommends_installing_it(config_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="got 'gemma'; with transformers installed"):
        model_of_config(config_file(GEMMA), 16)


def test_counting_samples_of_huge_batch_allocates_no_memory():
    assert samples_of(lambda: {"x": torch.empty(6, 1 << 40)}) == 6


# ---- code that creates the model and the batch


class UserFunctions:
    @staticmethod
    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    @staticmethod
    def make_batch():
        return torch.ones(6, 4)


UserFunctions.make_model.make_batch = UserFunctions.make_batch


def make_gemma():
    config = transformers.AutoConfig.for_model(**GEMMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def options(**given):
    names = "config model batch_from sequence batch vocabulary parameters hidden layers heads lora"
    given = dict.fromkeys([*names.split(), "lora_targets", "base"]) | given
    return Namespace(**{"framework": "torch", **given})


def made_by(source):
    """Run the code of a source, and return its model and its batch."""
    names = {}
    exec("\n".join([*source.imports, *source.lines]), names)
    return names["make_model"](), names["make_batch"]()


LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SIZES}
BY_CONFIG = {"config": LLAMA, "sequence": 16, "batch": 4}
BY_SIZES = {"hidden": 32, "layers": 2, "heads": 4, "vocabulary": 97, "sequence": 16, "batch": 4}
BY_FUNCTION = {"model": "test_workload:UserFunctions.make_model"}
BATCH_FUNCTION = {"batch_from": "test_workload:UserFunctions.make_batch"}
SOURCES = {
    "config": BY_CONFIG,
    "config of another family": {**BY_CONFIG, "config": BERT},
    "adapters": {**BY_CONFIG, "lora": 3},
    "some adapters": {**BY_CONFIG, "lora": 3, "base": "fp32", "lora_targets": ["q_proj", "v_proj"]},
    "sizes": BY_SIZES,
    "adapters of sizes": {**BY_SIZES, "lora": 2, "lora_targets": ["all-linear"]},
    "function": BY_FUNCTION,
    "two functions": {**BY_FUNCTION, **BATCH_FUNCTION},
    "function of a model": {"model": "test_workload:make_gemma", **BATCH_FUNCTION},
}


@pytest.mark.parametrize("name", SOURCES)
def test_generated_source_code_of_workload_creates_same_model_and_batch(name, config_file):
    given = dict(SOURCES[name])
    if "lora" in given:
        pytest.importorskip("peft")
    if "config" in given:
        given["config"] = config_file(given["config"])
    found = workload_of(options(**given))
    model, batch = made_by(found.source)
    wanted = {name: (p.shape, p.dtype) for name, p in found.make_model().state_dict().items()}
    assert {name: (p.shape, p.dtype) for name, p in model.state_dict().items()} == wanted
    expected = found.make_batch()
    if isinstance(batch, dict):
        assert {n: t.shape for n, t in batch.items()} == {n: t.shape for n, t in expected.items()}
    else:
        assert batch.shape == expected.shape and batch.dtype == expected.dtype
    assert found.source.by_transformers == ("config" in given or "of a model" in name)
    assert workload_of(options(**given, framework=None)).source is None
