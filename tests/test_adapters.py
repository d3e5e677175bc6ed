"""`course_lib.adapters`: LoRA and QLoRA, in Python and by the command's --lora."""

import copy
import importlib
import json
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.adapters import BASES, with_adapters
from course_lib.budget import Recipe, build, estimate, run, train_step
from course_lib.budget.__main__ import main
from course_lib.workload import model_of_config, with_fused_attention

peft = pytest.importorskip("peft", reason="adapters are those of peft")
transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
pytest.importorskip("bitsandbytes", reason="quantized weights are those of bitsandbytes")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
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
    made = model_of_config(configured, 32, by_transformers=True)
    return made.make_model, partial(made.make_batch, 2)


@pytest.mark.parametrize(
    ("rank", "targets", "recipe"),
    [(1, None, PLAIN), (8, "all-linear", LAYERS), (3, ["down_proj"], PLAIN)],
)
@pytest.mark.parametrize("base", BASES)
def test_a_model_with_adapters_takes_what_is_estimated(llama, base, rank, targets, recipe):
    make_model, make_batch = llama
    adapted = with_adapters(make_model, rank, targets=targets, base=base)
    measured = run(adapted, make_batch, recipe).meter
    found = estimate(adapted, make_batch, recipe)
    assert found.peak_bytes == measured.peak_bytes
    assert found.at_peak == measured.at_peak()


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 130}
SMALL |= {"max_position_embeddings": 64, "hidden_size": 48, "intermediate_size": 100}
SMALL_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 100, "num_layers": 2, "num_heads": 4}
SMALL_T5 |= {"vocab_size": 130, "decoder_start_token_id": 0}
ARCHITECTURES = {
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 20},
    "bert": SMALL,
    "t5": SMALL_T5,  # casts inputs to the dtype of some of its weights
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_architectures_take_what_is_estimated(kind, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | ARCHITECTURES[kind]))
    made = model_of_config(file, 20, by_transformers=True)
    recipe = Recipe(precision=None, attention=None, checkpoint="layers", micro_batches=3)
    adapted = with_adapters(made.make_model, 2, targets="all-linear", base="nf4-double")
    step = adapted, partial(made.make_batch, 3), recipe
    assert estimate(*step).peak_bytes == run(*step).meter.peak_bytes


def test_a_model_without_linear_layers_is_not_quantized():
    made = with_adapters(partial(nn.Embedding, 5, 8), 2, base="nf4", targets=[""])
    with pytest.raises(ValueError, match="base must be 'fp32' or 'bf16' for a model without"):
        made()


def test_adapters_compute_the_formula_and_have_its_bytes():
    layer, x = nn.Sequential(nn.Linear(48, 80)), torch.randn(5, 48)
    made = with_adapters(partial(copy.deepcopy, layer), 4, targets=["0"], base="fp32")()
    trained = dict(made.named_parameters())
    a, b = (trained[f"base_model.model.0.lora_{name}.default.weight"] for name in "AB")
    assert (a.shape, b.shape) == ((4, 48), (80, 4))
    assert sum(p.numel() for p in made.parameters() if p.requires_grad) == 4 * (48 + 80)
    with torch.no_grad():
        b.normal_()
    torch.testing.assert_close(made(x), layer(x) + 2 * (x @ a.T) @ b.T)


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_gradients_reach_adapters_under_checkpoints(llama, base):
    make_model, make_batch = llama
    batch, adapted = make_batch(), with_adapters(make_model, 4, base=base)
    after = []
    for recipe in (PLAIN, LAYERS):
        torch.manual_seed(0)
        model, optimizer = build(adapted, recipe)
        train_step(model, optimizer, batch, recipe)
        after.append([p.detach() for p in model.parameters() if p.requires_grad])
    torch.manual_seed(0)
    before = [p.detach() for p in adapted().parameters() if p.requires_grad]
    # The first step changes every B, which is 0 at first.
    assert all(not torch.equal(*pair) for pair in zip(before[1::2], after[0][1::2], strict=True))
    assert all(map(torch.equal, *after))


def reentrant(forward, x, **options):
    return checkpoint(partial(forward, **options), x, use_reentrant=True)


def test_reentrant_checkpoints_need_inputs_with_gradients(llama):
    make_model, make_batch = llama
    found = []
    for enable in (False, True):
        model = with_adapters(make_model, 4)()
        for layer in model.base_model.model.model.layers:
            layer.forward = partial(reentrant, layer.forward)
        if enable:
            model.enable_input_require_grads()
        loss = model(**make_batch(), use_cache=False).loss
        if loss.requires_grad:
            loss.backward()
        found.append([p.grad is not None for p in model.parameters() if p.requires_grad])
    assert not any(found[0]) and all(found[1])


@pytest.mark.parametrize("checkpoint", ["none", "layers"])
def test_transformers_and_the_plain_classes_take_the_same_within_1_percent(configured, checkpoint):
    recipe = Recipe(attention=None, checkpoint=checkpoint)
    found = []
    for by_transformers in (False, True):
        made = model_of_config(configured, 32, by_transformers=by_transformers)
        make_model = partial(with_fused_attention, made.make_model)
        found.append(estimate(make_model, partial(made.make_batch, 2), recipe))
    plain, theirs = found
    assert plain.at_peak["parameter"] == theirs.at_peak["parameter"]
    assert theirs.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)


def options(configured, *more):
    sizes = ["--sequence", "32", "--batch", "2", "--budget", "10MB", "--device", "laptop"]
    return ["--config", str(configured), *sizes, "--quick", *more]


@pytest.mark.parametrize("base", [None, "nf4"])
def test_the_command_estimates_adapters(configured, llama, base, capsys):
    more = ["--lora", "4", *(["--base", base] if base else [])]
    assert main([*options(configured, *more), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    make_model, make_batch = llama
    adapted = with_adapters(make_model, 4, base=base or "bf16")
    assert report["recipes"][0]["recipe"] == {"precision": None, "attention": None}
    measured = run(adapted, make_batch, PLAIN).meter.peak_bytes
    assert report["recipes"][0]["peak_bytes"] == measured
    main(options(configured, *more))
    shown = capsys.readouterr().out
    count = sum(p.numel() for p in make_model().parameters())
    count += sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert f"LoRA of rank 4 on frozen {base or 'bf16'} weights: {count:,} parameters" in shown


def own_llama():
    """Return a peft model of the user's own, for --model."""
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config).bfloat16()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, use_dora=True))


def own_batch():
    tokens = torch.randint(320, (2, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def test_the_command_keeps_the_dtypes_of_the_users_own_adapters(capsys):
    names = [f"{__name__}:own_llama", "--batch-from", f"{__name__}:own_batch"]
    limits = ["--budget", "10MB", "--device", "laptop", "--quick", "--precision", "own", "--json"]
    assert main(["--model", *names, *limits]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["recipe"]["precision"] is None
    recipe = Recipe(precision=None)
    assert found["peak_bytes"] == run(own_llama, own_batch, recipe).meter.peak_bytes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--base", "nf4"], "--base cannot be used without --lora"),
        (["--lora-targets", "q_proj"], "--lora-targets cannot be used without --lora"),
        (["--lora", "4", "--precision", "bf16"], "--precision bf16 cannot be combined with --lora"),
        (["--lora", "4", "--lora-targets", "qproj"], "down_proj, gate_proj, .*, got .'qproj'"),
        (["--lora", "4", "--ranks", "2"], "--ranks 2 cannot be combined with --lora"),
        (["--lora", "0"], "must be .* got '0'"),
        (["--lora", "4", "--base", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_the_command_says_what_is_wrong_with_adapters(configured, more, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(options(configured, *more))
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("rank", "base", "name"), [(0, "bf16", "rank"), (2, "int4", "base")])
def test_ranks_and_bases_are_checked(llama, rank, base, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        with_adapters(llama[0], rank, base=base)


def test_models_that_exist_are_not_frozen_by_an_estimate():
    model = nn.Sequential(nn.Linear(8, 8))
    adapted = with_adapters(lambda: model, 2, targets="all-linear", base="fp32")
    with pytest.raises(ValueError, match="make_model must make a new model at each call"):
        estimate(adapted, partial(torch.ones, 2, 8), PLAIN)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("make_model", "targets", "error", "message"),
    [
        (nn.Linear(2, 2), None, TypeError, "make_model must be a function"),
        (partial(nn.Linear, 2, 2), 5, TypeError, "targets must be a str"),
        (partial(nn.Linear, 2, 2), "(", ValueError, "targets must name layers"),
        (lambda: None, None, TypeError, "make_model must return"),
    ],
)
def test_arguments_of_adapters_are_checked(make_model, targets, error, message):
    with pytest.raises(error, match=message):
        with_adapters(make_model, 2, targets=targets)()


@pytest.mark.parametrize(("package", "base"), [("peft", "bf16"), ("bitsandbytes", "nf4")])
def test_a_missing_package_is_named(llama, package, base, monkeypatch):
    def missing(name):
        if name == package:
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr("course_lib.adapters.import_module", missing)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        with_adapters(llama[0], 4, base=base)()


def test_attributes_of_the_function_are_kept(llama):
    make_model, make_batch = llama
    own = partial(make_model)
    own.make_batch = make_batch
    assert with_adapters(own, 2).make_batch is make_batch
