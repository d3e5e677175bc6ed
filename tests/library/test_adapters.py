"""LoRA and QLoRA adapters: estimates equal runs, in Python and with the command's --lora."""

import copy
import importlib
import json
import re
from functools import partial

import pytest
import torch
from torch import nn

from course_lib.adapters import BASES, with_adapters
from course_lib.budget import Recipe, estimate, run
from course_lib.budget.__main__ import arguments, main
from course_lib.workload import model_of_config, with_fused_attention, workload_of

peft = pytest.importorskip("peft", reason="adapters are those of peft")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
pytest.importorskip("bitsandbytes", reason="quantized weights are those of bitsandbytes")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
PLAIN = Recipe(precision=None, attention=None)
LAYERS = Recipe(precision=None, attention=None, checkpoint="layers")


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture(scope="module")
def llama(configured):
    workload = model_of_config(configured, 32, by_transformers=True)
    return workload.make_model, partial(workload.make_batch, 2)


@pytest.mark.parametrize(
    ("base", "rank", "targets", "recipe"),
    [
        *((base, 8, "all-linear", LAYERS) for base in BASES),
        *((base, 1, None, PLAIN) for base in ("fp32", "nf4")),
        *((base, 3, ["down_proj"], PLAIN) for base in ("bf16", "int8")),
    ],
)
def test_estimate_with_adapters_equals_measurement(llama, base, rank, targets, recipe):
    make_model, make_batch = llama
    adapted = with_adapters(make_model, rank, targets=targets, base=base)
    measured = run(adapted, make_batch, recipe).meter
    found = estimate(adapted, make_batch, recipe)
    assert found.peak_bytes == measured.peak_bytes
    assert found.at_peak == measured.at_peak()


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 130}
SMALL |= {"max_position_embeddings": 64, "hidden_size": 48, "intermediate_size": 100}
# T5 casts inputs to the dtype of some of its weights.
SMALL_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 100, "num_layers": 2, "num_heads": 4}
SMALL_T5 |= {"vocab_size": 130, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen3", SMALL | {"num_key_value_heads": 2, "head_dim": 20}), ("t5", SMALL_T5)],
)
def test_estimate_of_other_architectures_with_adapters_equals_measurement(kind, sizes, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | sizes))
    workload = model_of_config(file, 20, by_transformers=True)
    recipe = Recipe(precision=None, attention=None, checkpoint="layers", micro_batches=2)
    adapted = with_adapters(workload.make_model, 2, targets="all-linear", base="nf4-double")
    step = adapted, partial(workload.make_batch, 2), recipe
    assert estimate(*step).peak_bytes == run(*step).meter.peak_bytes


def test_adapters_compute_the_lora_formula():
    layer, x = nn.Sequential(nn.Linear(48, 80)), torch.randn(5, 48)
    adapted = with_adapters(partial(copy.deepcopy, layer), 4, targets=["0"], base="fp32")()
    parameters = dict(adapted.named_parameters())
    a, b = (parameters[f"base_model.model.0.lora_{name}.default.weight"] for name in "AB")
    assert (a.shape, b.shape) == ((4, 48), (80, 4))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == 4 * (48 + 80)
    with torch.no_grad():
        b.normal_()
    torch.testing.assert_close(adapted(x), layer(x) + 2 * (x @ a.T) @ b.T)


@pytest.mark.parametrize("checkpoint", ["none", "layers"])
def test_estimates_of_both_llama_classes_agree_within_1_percent(configured, checkpoint):
    recipe = Recipe(attention=None, checkpoint=checkpoint)
    estimates = []
    for by_transformers in (False, True):
        workload = model_of_config(configured, 32, by_transformers=by_transformers)
        make_model = partial(with_fused_attention, workload.make_model)
        estimates.append(estimate(make_model, partial(workload.make_batch, 2), recipe))
    plain, transformers_own = estimates
    assert plain.at_peak["parameter"] == transformers_own.at_peak["parameter"]
    assert transformers_own.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)


LIMITS = ["--budget", "10MB", "--device", "laptop", "--quick"]


def options(configured, *more):
    return ["--config", str(configured), "--sequence", "32", "--batch", "2", *LIMITS, *more]


@pytest.mark.parametrize("base", [None, "nf4"])
def test_command_with_lora_option_prints_measured_peak(configured, llama, base, capsys):
    more = ["--lora", "4", *(["--base", base] if base else [])]
    assert main([*options(configured, *more), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    make_model, make_batch = llama
    adapted = with_adapters(make_model, 4, base=base or "bf16")
    assert report["recipes"][0]["recipe"] == {"precision": None, "attention": None}
    measured = run(adapted, make_batch, PLAIN).meter.peak_bytes
    assert report["recipes"][0]["peak_bytes"] == measured


def test_workload_name_states_lora_rank_and_base_precision(configured):
    given = arguments().parse_args(options(configured, "--lora", "4"))
    assert "LoRA of rank 4 on frozen bf16 weights" in workload_of(given).name


def own_llama():
    """Return a peft model for --model."""
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config).bfloat16()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, use_dora=True))


def own_batch():
    tokens = torch.randint(320, (2, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def test_command_with_precision_own_preserves_dtypes_of_user_adapters(capsys):
    names = [f"{__name__}:own_llama", "--batch-from", f"{__name__}:own_batch"]
    assert main(["--model", *names, *LIMITS, "--precision", "own", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["recipe"]["precision"] is None
    recipe = Recipe(precision=None)
    assert found["peak_bytes"] == run(own_llama, own_batch, recipe).meter.peak_bytes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lora-targets", "q_proj"], "--lora-targets cannot be used without --lora"),
        (["--lora", "4", "--lora-targets", "qproj"], "down_proj, gate_proj, .*, got .'qproj'"),
        (["--lora", "0"], "must be .* got '0'"),
        (["--lora", "4", "--base", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_command_rejects_invalid_adapter_options(configured, more, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(options(configured, *more))
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_with_adapters_rejects_make_model_that_returns_same_model_twice():
    model = nn.Sequential(nn.Linear(8, 8))
    adapted = with_adapters(lambda: model, 2, targets="all-linear", base="fp32")
    with pytest.raises(ValueError, match="make_model must make a new model at each call"):
        estimate(adapted, partial(torch.ones, 2, 8), PLAIN)
    assert all(p.requires_grad for p in model.parameters())


LINEAR = partial(nn.Linear, 2, 2)


@pytest.mark.parametrize(
    ("make_model", "options", "message"),
    [
        (nn.Linear(2, 2), {}, "make_model must be a function"),
        (lambda: None, {}, "make_model must return"),
        (LINEAR, {"targets": 5}, "targets must be a str"),
        (LINEAR, {"targets": "("}, "targets must name layers"),
        (LINEAR, {"rank": 0}, "rank must be"),
        (LINEAR, {"base": "int4"}, "base must be"),
        (
            partial(nn.Embedding, 5, 8),
            {"base": "nf4", "targets": [""]},
            "base must be 'fp32' or 'bf16' for a model without",
        ),
    ],
)
def test_with_adapters_rejects_invalid_arguments(make_model, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        with_adapters(make_model, **{"rank": 2, **options})()


@pytest.mark.parametrize(("package", "base"), [("peft", "bf16"), ("bitsandbytes", "nf4")])
def test_missing_adapter_package_raises_with_install_command(llama, package, base, monkeypatch):
    def missing(name):
        if name == package:
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr("course_lib.adapters.import_module", missing)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        with_adapters(llama[0], 4, base=base)()


def test_with_adapters_preserves_make_batch_attribute_of_make_model(llama):
    make_model, make_batch = llama
    own = partial(make_model)
    own.make_batch = make_batch
    assert with_adapters(own, 2).make_batch is make_batch
