"""LoRA and QLoRA adapters: estimates equal runs, in Python and with the command's --lora."""

import copy
import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from estimate_checks import assert_measured
from hugging_face_models import LLAMA, text
from test_configs import LLAMA_3_8B, small
from torch import nn

from course_lib.adapters import BASES, with_adapters
from course_lib.budget import Recipe, estimate, run
from course_lib.budget.__main__ import main
from course_lib.workload import model_of_config

peft = pytest.importorskip("peft", reason="adapters are those of peft")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
pytest.importorskip("bitsandbytes", reason="quantized weights are those of bitsandbytes")

PLAIN = Recipe(precision=None, attention=None)
LAYERS = replace(PLAIN, checkpoint="layers")


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(json.dumps(small(LLAMA_3_8B)))
    return file


@pytest.fixture(scope="module")
def llama(configured):
    workload = model_of_config(configured, 32, by_transformers=True)
    return workload.make_model, partial(workload.make_batch, 2)


@pytest.mark.parametrize(
    ("base", "targets", "recipe"),
    [*((base, "all-linear", LAYERS) for base in BASES), ("int8", ["down_proj"], PLAIN)],
)
def test_estimate_with_adapters_equals_measurement(llama, base, targets, recipe):
    make_model, make_batch = llama
    assert_measured(with_adapters(make_model, 3, targets=targets, base=base), make_batch, recipe)


# T5 casts inputs to the dtype of some of its weights.
SMALL_T5 = {
    "model_type": "t5",
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 100,
    "num_layers": 2,
    "num_heads": 4,
}
SMALL_T5 |= {"vocab_size": 130, "decoder_start_token_id": 0}


def test_estimate_of_t5_with_adapters_equals_measurement(config_file):
    workload = model_of_config(config_file(SMALL_T5), 20, by_transformers=True)
    adapted = with_adapters(workload.make_model, 2, targets="all-linear", base="nf4-double")
    assert_measured(adapted, partial(workload.make_batch, 2), replace(LAYERS, micro_batches=2))


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


def own_llama():
    return peft.get_peft_model(LLAMA().bfloat16(), peft.LoraConfig(r=4, use_dora=True))


own_llama.make_batch = text


def test_command_with_precision_own_preserves_dtypes_of_user_adapters(capsys):
    assert main(["--model", f"{__name__}:own_llama", *LIMITS, "--precision", "own", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["recipe"]["precision"] is None
    measured = run(own_llama, text, Recipe(precision=None)).meter.peak_bytes
    assert found["peak_bytes"] == measured


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
        (LINEAR, {"targets": "("}, "targets must be 'all-linear', a list of names"),
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
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        with_adapters(llama[0], 4, base=base)()


def test_with_adapters_preserves_make_batch_attribute_of_make_model(llama):
    make_model, make_batch = llama
    own = partial(make_model)
    own.make_batch = make_batch
    assert with_adapters(own, 2).make_batch is make_batch
