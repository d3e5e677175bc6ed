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
    SHARED,
    SIZES,
    WORDS,
    maker,
    text,
)
from test_budget_combinations import assert_plain, plain_gradients
from test_budget_estimate_equals_run import checkpointing

from course_lib._check import InfeasibleBudget
from course_lib.budget import Recipe, build, estimate, fit, run, train_step
from course_lib.budget.search.extrapolation import BlockExtrapolator
from course_lib.checkpoint import checkpoint_blocks

transformers = pytest.importorskip(
    "transformers", reason="transformers comes with the extras `models` and `test`"
)
SGD, FLASH = Recipe(optimizer="sgd"), Recipe(attention="flash")
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
MASK_DECODER = {"hidden_size": 32, "mlp_dim": 48}


@pytest.mark.parametrize(
    ("make", "lists"),
    [
        # embeddings in a list
        (
            maker("Sam:SamModel", vision_config=VISION, mask_decoder_config=MASK_DECODER),
            [
                "vision_encoder.layers",
                "mask_decoder.transformer.layers",
                "mask_decoder.output_hypernetworks_mlps",
            ],
        ),
        # pictures and text
        (
            lambda: maker(
                "Llava:LlavaForConditionalGeneration",
                vision_config=transformers.CLIPVisionConfig(**VISION),
                text_config=transformers.LlamaConfig(**{**SHARED, "num_hidden_layers": 3}),
            )(),
            ["model.vision_tower.encoder.layers", "model.language_model.layers"],
        ),
    ],
)
def test_default_blocks_of_hugging_face_model_are_its_layer_lists(make, lists):
    with torch.device("meta"):
        names = checkpoint_blocks(make(), None).names
    assert list(dict.fromkeys(block.rpartition(".")[0] for block in names)) == lists


def test_least_schedule_bytes_suffice_for_every_micro_batch():
    recipe = Recipe(optimizer="sgd", checkpoint="optimal", schedule_bytes=1, micro_batches=4)
    make_batch = partial(text, "padded")
    extrapolator = BlockExtrapolator(LLAMA, make_batch, recipe, loss_sum=None, tier="file")
    with pytest.raises(InfeasibleBudget) as least:
        extrapolator.schedule_cost(recipe)
    recipe = replace(recipe, schedule_bytes=least.value.least_bytes)
    assert extrapolator.schedule_cost(recipe).peak_bytes <= recipe.schedule_bytes
    assert_measured(LLAMA, make_batch, recipe)


def test_estimate_with_existing_batch_equals_measurement():
    for kind in ("ones", "padded"):
        batch = text(kind)
        assert_measured(LLAMA, lambda batch=batch: batch, Recipe())


@pytest.mark.parametrize(
    ("own", "share", "expected"),
    [("eager", 1 / 2, {"sdpa", "standard"}), ("sdpa", 3 / 4, {"standard"})],
)
def test_search_tries_sdpa_unless_model_already_uses_it(own, share, expected):
    make_model = maker("Llama:LlamaForCausalLM", **SHARED, attn_implementation=own)
    make_batch = partial(text, "ones", 2, 128)
    budget = int(estimate(make_model, make_batch, SGD).peak_bytes * share)
    found = fit(make_model, make_batch, budget, base=SGD, quick=own == "sdpa", progress=False)
    attentions = {e.recipe.attention for e in found}
    assert found.rates and attentions <= expected and ("sdpa" in attentions) == (own == "eager")


@pytest.mark.parametrize(
    ("make", "cache", "limit"),
    [
        (LLAMA, "StaticCache", {"max_cache_len": 64}),
        (maker("Mistral:MistralForCausalLM", **SHARED, sliding_window=4), "DynamicCache", {}),
    ],
)
def test_checkpoint_error_of_cached_keys_suggests_use_cache_false(make, cache, limit):
    model = make()
    message = r"recomputation of model\.layers\.1 .*use_cache=False"
    for options in ({}, {"preserve_module_state": True}):
        values = getattr(transformers, cache)(config=model.config, **limit)
        with checkpoint_blocks(model, None, **options):
            with pytest.raises(RuntimeError, match=message):
                model(**text(), past_key_values=values).loss.backward()
            model(**text(), use_cache=False).loss.backward()


@pytest.mark.parametrize(("call", "checkpoint"), [(estimate, "layers"), (run, "selective")])
def test_checkpoint_error_of_prefix_tuning_suggests_checkpoint_none(call, checkpoint):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make_model():
        options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(LLAMA(), options)

    recipe = Recipe(optimizer="sgd", checkpoint=checkpoint)
    message = r"model\.layers\.1 did not .* raised .*checkpoint=.none."
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
        with pytest.raises(TypeError, match=rf"^Linear\.loss must .* \(batch\), got an? {name}"):
            function(partial(with_loss, loss), batch, Recipe())
    with pytest.raises(AttributeError) as raised:
        function(partial(with_loss, lambda batch: batch.labels), batch, Recipe())
    assert "raised in Linear.loss, a function" in raised.value.__notes__[0]


def with_lora(task_type=None):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "r": 2, "init_lora_weights": False}
    return peft.get_peft_model(LLAMA(), peft.LoraConfig(**options, task_type=task_type))


@pytest.mark.parametrize(
    "make",
    [with_lora, partial(with_lora, "CAUSAL_LM"), lambda: torch.compile(with_lora())],
    ids=["no task", "a task", "compiled"],
)
def test_micro_batches_of_adapter_model_are_weighted_by_labels(make):
    batch, recipe = text(), Recipe(micro_batches=2)
    batch["labels"][:2, :12] = IGNORED  # the micro-batches have different numbers of labels
    with torch.compiler.set_stance("force_eager"):
        expected = plain_gradients(make, batch, lambda model, batch: (model(**batch).loss, 1))
        assert_plain(make, batch, recipe, expected)
    if make is with_lora:
        assert_measured(make, text, recipe)


BLOOM = maker("Bloom:BloomForCausalLM", vocab_size=WORDS, hidden_size=32, n_layer=1, n_head=2)


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("make", [BLOOM, ARCHITECTURES["state space"][0]], ids=["BLOOM", "Mamba"])
def test_error_for_unsupported_attention_uses_recipe_value(make, attention):
    with pytest.raises(ValueError, match=rf"^attention must .*, got '{attention}'$") as caught:
        estimate(make, text, Recipe(attention=attention))
    assert {"flash", "sdpa"} & set(re.findall(r"\w+", str(caught.value))) == {attention}
