"""How a command names a model: one way for both commands."""

import json
import sys
from argparse import Namespace

import pytest
import torch
from measured import assert_measured

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


@pytest.fixture
def file(tmp_path):
    def write(**config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("config", [GEMMA, BERT], ids=lambda config: config["model_type"])
def test_a_kind_that_transformers_alone_knows_is_estimated_as_it_runs(config, file):
    found = model_of_config(file(**config), 16)
    assert config["model_type"] not in KNOWN and not found.plain
    recipe = Recipe(attention=None, checkpoint="layers")
    assert_measured(found.make_model, lambda: found.make_batch(4), recipe)


def test_both_commands_train_the_same_model_of_a_config(file):
    path = file(**GEMMA)
    task, found = task_of(str(path), batch=4, sequence=16, unequal=True), model_of_config(path, 16)
    ours, theirs = task.make_model().state_dict(), found.make_model().state_dict()
    assert {n: p.shape for n, p in ours.items()} == {n: p.shape for n, p in theirs.items()}
    batch, plain = task.make_batch(3), found.make_batch(4, seed=3)
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    kept = (batch["labels"] != -100).sum(1).tolist()
    assert kept == [16, 12, 8, 4]  # later samples are shorter
    total, weight = task.loss_sum(task.make_model(), batch)
    assert int(weight) == sum(kept) - 4  # of each sample, the first token is not predicted
    assert total.requires_grad


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "nothing_of_the_kind"}, "transformers .* knows, got 'nothing_of_the_kind'"),
        ({}, "model_type must be one of .*, got None"),
        ({"model_type": "vit"}, "must have a language model in transformers, got 'vit'"),
        ({**GEMMA, "model_type": "llama", "num_key_value_heads": 3}, "must be a divisor of"),
        ({**GEMMA, "max_position_embeddings": 8}, "sequence must be at most 8 .*, got 16"),
    ],
)
def test_a_config_that_makes_no_language_model_is_refused(config, told, file):
    with pytest.raises(ValueError, match=told):
        model_of_config(file(**config), 16)


def test_without_transformers_it_is_said_that_it_reads_other_kinds(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="got 'gemma'; with transformers installed"):
        model_of_config(file(**GEMMA), 16)


def test_samples_of_a_batch_are_counted_without_memory():
    assert samples_of(lambda: {"x": torch.empty(6, 1 << 40)}) == 6


# ---- Code that makes the model and the batch


class Own:
    """Functions that --model and --batch-from name."""

    @staticmethod
    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    @staticmethod
    def make_batch():
        return torch.ones(6, 4)


Own.make_model.make_batch = Own.make_batch


def make_gemma():
    config = transformers.AutoConfig.for_model(**GEMMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def options(**given):
    names = "config model batch_from sequence batch vocabulary parameters hidden layers heads lora"
    given = dict.fromkeys([*names.split(), "lora_targets", "base"]) | given
    return Namespace(**{"framework": "torch", **given})


def made_by(source):
    """Return the model and the batch that the code of a source makes."""
    names = {}
    exec("\n".join([*source.imports, *source.lines]), names)
    return names["make_model"](), names["make_batch"]()


LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SIZES}
BY_CONFIG = {"config": LLAMA, "sequence": 16, "batch": 4}
BY_SIZES = {"hidden": 32, "layers": 2, "heads": 4, "vocabulary": 97, "sequence": 16, "batch": 4}
OWN = {"model": "test_workload:Own.make_model"}
OWN_BATCH = {"batch_from": "test_workload:Own.make_batch"}
WAYS = {
    "config": BY_CONFIG,
    "config of another family": {**BY_CONFIG, "config": BERT},
    "adapters": {**BY_CONFIG, "lora": 3},
    "some adapters": {**BY_CONFIG, "lora": 3, "base": "fp32", "lora_targets": ["q_proj", "v_proj"]},
    "sizes": BY_SIZES,
    "adapters of sizes": {**BY_SIZES, "lora": 2, "lora_targets": ["all-linear"]},
    "function": OWN,
    "two functions": {**OWN, **OWN_BATCH},
    "function of a model": {"model": "test_workload:make_gemma", **OWN_BATCH},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_source_of_a_workload_makes_its_model_and_batch(way, file):
    given = dict(WAYS[way])
    if "lora" in given:
        pytest.importorskip("peft")
    if "config" in given:
        given["config"] = file(**given["config"])
    found = workload_of(options(**given))
    model, batch = made_by(found.source)
    wanted = {name: (p.shape, p.dtype) for name, p in found.make_model().state_dict().items()}
    assert {name: (p.shape, p.dtype) for name, p in model.state_dict().items()} == wanted
    of_batch = found.make_batch()
    if isinstance(batch, dict):
        assert {n: t.shape for n, t in batch.items()} == {n: t.shape for n, t in of_batch.items()}
    else:
        assert batch.shape == of_batch.shape and batch.dtype == of_batch.dtype
    assert found.source.by_transformers == ("config" in given or "of a model" in way)
    assert workload_of(options(**given, framework=None)).source is None
