"""Recipes with small Hugging Face models: their blocks, caches, adapters, losses and attention.

`test_budget_estimate_equals_run` compares estimates of these models with runs."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from estimate_checks import assert_measured
from hugging_face_models import (
    ARCHITECTURES,
    IGNORED,
    LLAMA,
    PAIR,
    SHARED,
    SIZES,
    SPECIAL,
    WORDS,
    maker,
    padded,
    text,
)
from test_budget_combinations import assert_plain, plain_gradients
from test_budget_estimate_equals_run import checkpointing

from course_lib.budget import InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.search.extrapolation import BlockExtrapolator
from course_lib.checkpoint import checkpoint_blocks

transformers = pytest.importorskip(
    "transformers", reason="transformers comes with the extras `models` and `test`"
)
SGD, FLASH = Recipe(optimizer="sgd"), Recipe(attention="flash")
FUNNEL = {"vocab_size": WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
MASK_DECODER = {"hidden_size": 32, "mlp_dim": 48}
LISTS = {
    "encoder and decoder of two lengths": (
        maker("Bart:BartForConditionalGeneration", **{**PAIR, **SPECIAL, "decoder_layers": 3}),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
    "lists in a list": (
        maker("Funnel:FunnelForMaskedLM", **FUNNEL, block_sizes=[2, 2]),
        ["funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"],
    ),
    "embeddings in a list": (
        maker("Sam:SamModel", vision_config=VISION, mask_decoder_config=MASK_DECODER),
        [
            "vision_encoder.layers",
            "mask_decoder.transformer.layers",
            "mask_decoder.output_hypernetworks_mlps",
        ],
    ),
    "pictures and text": (
        lambda: maker(
            "Llava:LlavaForConditionalGeneration",
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=transformers.LlamaConfig(**{**SHARED, "num_hidden_layers": 3}),
        )(),
        ["model.vision_tower.encoder.layers", "model.language_model.layers"],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_default_blocks_of_hugging_face_model_are_its_layer_lists(name):
    make, lists = LISTS[name]
    with torch.device("meta"):
        names = checkpoint_blocks(make(), None).names
    assert list(dict.fromkeys(block.rpartition(".")[0] for block in names)) == lists


def test_least_schedule_bytes_suffice_for_every_micro_batch():
    recipe = Recipe(optimizer="sgd", checkpoint="optimal", schedule_bytes=1, micro_batches=4)
    extrapolator = BlockExtrapolator(LLAMA, partial(padded, 1), recipe, loss_sum=None, tier="file")
    with pytest.raises(InfeasibleBudget) as least:
        extrapolator.schedule_cost(recipe)
    recipe = replace(recipe, schedule_bytes=least.value.least_bytes)
    assert extrapolator.schedule_cost(recipe).peak_bytes <= recipe.schedule_bytes
    assert_measured(LLAMA, partial(padded, 1), recipe)


def test_estimate_with_existing_batch_equals_measurement():
    for kind in ("ones", "padded"):
        batch = text(kind)
        assert_measured(LLAMA, lambda batch=batch: batch, Recipe())


@pytest.mark.parametrize(
    ("own", "share", "expected"),
    [("eager", 1 / 2, {"sdpa", "standard"}), ("sdpa", 3 / 4, {"standard"})],
)
def test_search_tries_sdpa_only_for_model_with_other_attention(own, share, expected):
    make_model = maker("Llama:LlamaForCausalLM", **SHARED, attn_implementation=own)
    make_batch = partial(text, "ones", 2, 128)
    budget = int(estimate(make_model, make_batch, SGD).peak_bytes * share)
    found = fit(make_model, make_batch, budget, base=SGD, quick=own == "sdpa", progress=False)
    attentions = {e.recipe.attention for e in found}
    assert found.rates and attentions <= expected and ("sdpa" in attentions) == (own == "eager")


SLIDING = {**SHARED, "sliding_window": 4}
# name -> (model, options, attention, class of the cache)
CACHES = {
    "static": ("Llama:LlamaForCausalLM", SHARED, "sdpa", "StaticCache"),
    "growing": ("Llama:LlamaForCausalLM", SHARED, "eager", "DynamicCache"),
    "growing, sliding window": ("Mistral:MistralForCausalLM", SLIDING, "eager", "DynamicCache"),
}


@pytest.mark.parametrize("name", CACHES)
def test_checkpoint_error_names_cache_argument_and_suggests_use_cache_false(name):
    architecture, options, attention, cache = CACHES[name]
    model = maker(architecture, **options, attn_implementation=attention)()
    batch = text("ones")
    limit = {"max_cache_len": 64} if cache == "StaticCache" else {}

    def backward(cached):
        values = getattr(transformers, cache)(config=model.config, **limit)
        arguments = {"past_key_values": values} if cached else {"use_cache": False}
        model(**batch, **arguments).loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    expected = backward(cached=True)
    message = rf"of model\.layers\.1 .* past_key_values \({cache}\) .*use_cache=False"
    for options in ({}, {"preserve_module_state": True}):
        with checkpoint_blocks(model, None, **options):
            with pytest.raises(RuntimeError, match=message):
                backward(cached=True)
            model.zero_grad()
            torch.testing.assert_close(backward(cached=False), expected)


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
@pytest.mark.parametrize("call", [estimate, run])
def test_checkpoint_error_names_past_key_values_of_prefix_tuning(checkpoint, call):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make_model():
        options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(LLAMA(), options)

    recipe = Recipe(optimizer="sgd", checkpoint=checkpoint)
    message = r'model\.layers\.1 raised .* past_key_values \(DynamicCache\) .*checkpoint="none"'
    with pytest.raises(RuntimeError, match=message):
        call(make_model, partial(text, "ones"), recipe)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_flash_attention_with_hugging_face_gradient_checkpointing_preserves_loss(use_reentrant):
    losses, batch = [], text()
    for recipe in (Recipe(attention=None), FLASH, replace(FLASH, in_backward=True)):
        torch.manual_seed(1)
        model, optimizer = build(partial(checkpointing, use_reentrant), recipe, lr=1e-2)
        losses.append([train_step(model, optimizer, batch, recipe).loss for _ in range(3)])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 2


# ---- losses that are attributes


def test_estimate_ignores_loss_attribute_of_transformers_model():
    """Some models of transformers keep a function with other arguments as `loss`."""

    def make_model():
        model = LLAMA()
        model.loss = lambda outputs, targets: None
        return model

    assert assert_measured(make_model, text, SGD) == estimate(LLAMA, text, SGD)


@pytest.mark.parametrize("validates", [False, True])
def test_estimate_rejects_distribution_with_argument_validation_and_names_remedy(
    validates, monkeypatch
):
    """torch.compile changes the default for the whole process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", validates)

    def loss_sum(model, x):
        return -torch.distributions.Normal(model(x), 1.0).log_prob(x).sum(), len(x)

    step = partial(torch.nn.Linear, 4, 4), partial(torch.ones, 2, 4), SGD
    if not validates:
        assert estimate(*step, loss_sum=loss_sum).peak_bytes > 0
        return
    message = r"^the step reads values .*set_default_validate_args\(False\)$"
    with pytest.raises(ValueError, match=message):
        estimate(*step, loss_sum=loss_sum)


def with_loss(loss):
    model = torch.nn.Linear(4, 4)
    model.loss = loss
    return model


@pytest.mark.parametrize("function", [estimate, run])
def test_error_in_loss_attribute_names_assigned_function(function):
    batch = partial(torch.ones, 2, 4)
    for loss, name in (
        (lambda outputs, targets: None, r"function .*\(outputs, targets\)"),
        (torch.nn.MSELoss(), "MSELoss"),
    ):
        with pytest.raises(TypeError, match=rf"^Linear\.loss must .* \(batch\), .*, got a {name}"):
            function(partial(with_loss, loss), batch, Recipe())
    with pytest.raises(AttributeError) as raised:
        function(partial(with_loss, lambda batch: batch.labels), batch, Recipe())
    assert "raised in Linear.loss, which is a function" in raised.value.__notes__[0]


def with_lora(task_type=None):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "r": 2, "init_lora_weights": False}
    return peft.get_peft_model(LLAMA(), peft.LoraConfig(**options, task_type=task_type))


ADAPTED = {
    "no task": with_lora,
    "a task": partial(with_lora, "CAUSAL_LM"),
    "compiled": lambda: torch.compile(with_lora(), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("name", ADAPTED)
def test_micro_batches_of_adapter_model_are_weighted_by_labels(name):
    make, batch, recipe = ADAPTED[name], text(), Recipe(micro_batches=2)
    batch["labels"][:2, :12] = IGNORED  # the micro-batches have different numbers of labels
    expected = plain_gradients(make, batch, lambda model, batch: (model(**batch).loss, 1))
    assert_plain(make, batch, recipe, expected)
    if name == "no task":
        assert_measured(make, text, recipe)


OWN_ATTENTION = {
    "BLOOM": maker("Bloom:BloomForCausalLM", vocab_size=WORDS, hidden_size=32, n_layer=1, n_head=2),
    "XLNet": maker(
        "XLNet:XLNetLMHeadModel", vocab_size=WORDS, d_model=32, d_inner=48, n_layer=1, n_head=2
    ),
    "Mamba": ARCHITECTURES["state space"][0],
}


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("make", OWN_ATTENTION.values(), ids=OWN_ATTENTION)
def test_error_for_unsupported_attention_uses_recipe_value(make, attention):
    with pytest.raises(ValueError, match=rf"^attention must .*, got '{attention}'$") as caught:
        estimate(make, text, Recipe(attention=attention))
    assert {"flash", "sdpa"} & set(re.findall(r"\w+", str(caught.value))) == {attention}
