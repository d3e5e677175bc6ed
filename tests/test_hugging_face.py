"""course_lib.budget on Hugging Face models, made from configurations: what it finds in them, and
what it refuses. `test_estimate_equals_run` runs them."""

import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hugging_face_models import (
    ARCHITECTURES,
    IGNORED,
    LLAMA,
    PAIR,
    SHARED,
    SIZES,
    SPECIAL,
    WORDS,
    made,
    padded,
    text,
)
from measured import assert_measured
from test_estimate_equals_run import checkpointing
from test_matrix import assert_plain, plain_gradients

from course_lib.budget import InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.search.extrapolation import BlockExtrapolator
from course_lib.checkpoint import checkpoint_blocks

transformers = pytest.importorskip(
    "transformers", reason="transformers comes with the extras `models` and `test`"
)
SGD, FLASH = Recipe(optimizer="sgd"), Recipe(attention="flash")
FUNNEL = {"vocab_size": WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
SEEING = {**SIZES, "image_size": 16, "patch_size": 8}
DRAWING = {"hidden_size": 32, "mlp_dim": 48}
LISTS = {
    "encoder and decoder of two lengths": (
        made("Bart:BartForConditionalGeneration", **{**PAIR, **SPECIAL, "decoder_layers": 3}),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
    "lists in a list": (
        made("Funnel:FunnelForMaskedLM", **FUNNEL, block_sizes=[2, 2]),
        ["funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"],
    ),
    "embeddings in a list": (
        made("Sam:SamModel", vision_config=SEEING, mask_decoder_config=DRAWING),
        [
            "vision_encoder.layers",
            "mask_decoder.transformer.layers",
            "mask_decoder.output_hypernetworks_mlps",
        ],
    ),
    "pictures and text": (
        lambda: made(
            "Llava:LlavaForConditionalGeneration",
            vision_config=transformers.CLIPVisionConfig(**SEEING),
            text_config=transformers.LlamaConfig(**{**SHARED, "num_hidden_layers": 3}),
        )(),
        ["model.vision_tower.encoder.layers", "model.language_model.layers"],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_called_in_lists_of_like_modules_are_the_blocks_of_a_model(name):
    make, lists = LISTS[name]
    with torch.device("meta"):
        names = checkpoint_blocks(make(), None).names
    assert list(dict.fromkeys(block.rpartition(".")[0] for block in names)) == lists


def test_the_least_that_a_schedule_takes_is_enough_for_every_micro_batch():
    recipe = Recipe(optimizer="sgd", checkpoint="optimal", schedule_bytes=1, micro_batches=4)
    composer = BlockExtrapolator(LLAMA, partial(padded, 1), recipe, loss_sum=None, tier="file")
    with pytest.raises(InfeasibleBudget) as least:
        composer.schedule_cost(recipe)
    enough = replace(recipe, schedule_bytes=least.value.least_bytes)
    assert composer.schedule_cost(enough).peak_bytes <= enough.schedule_bytes
    assert_measured(LLAMA, partial(padded, 1), enough)


def test_estimate_reads_values_of_an_existing_batch():
    for kind in ("ones", "padded"):
        batch = text(kind)
        assert_measured(LLAMA, lambda batch=batch: batch, Recipe())


@pytest.mark.parametrize(
    ("own", "share", "expected"),
    [("eager", 1 / 2, {"sdpa", "standard"}), ("sdpa", 3 / 4, {"standard"})],
)
def test_a_search_switches_a_model_to_sdpa_unless_it_has_it(own, share, expected):
    make_model = made("Llama:LlamaForCausalLM", **SHARED, attn_implementation=own)
    make_batch = partial(text, "ones", 2, 128)
    budget = int(estimate(make_model, make_batch, SGD).peak_bytes * share)
    found = fit(make_model, make_batch, budget, base=SGD, quick=own == "sdpa", progress=False)
    attentions = {e.recipe.attention for e in found}
    assert found.rates and attentions <= expected and ("sdpa" in attentions) == (own == "eager")


SLIDING = {**SHARED, "sliding_window": 4}
# name -> (model, its attention, the cache that is made from the model's configuration)
CACHES = {
    "static": ("Llama:LlamaForCausalLM", SHARED, "sdpa", "StaticCache"),
    "static, eager": ("Llama:LlamaForCausalLM", SHARED, "eager", "StaticCache"),
    "growing": ("Llama:LlamaForCausalLM", SHARED, "eager", "DynamicCache"),
    "static, sliding window": ("Mistral:MistralForCausalLM", SLIDING, "sdpa", "StaticCache"),
    "growing, sliding window": ("Mistral:MistralForCausalLM", SLIDING, "eager", "DynamicCache"),
}


@pytest.mark.parametrize("name", CACHES)
def test_cache_among_the_arguments_is_named_and_its_removal_helps(name):
    architecture, options, attention, cache = CACHES[name]
    model = made(architecture, **options, attn_implementation=attention)()
    batch = text("ones")
    limit = {"max_cache_len": 64} if cache == "StaticCache" else {}

    def backward(cached):
        kept = getattr(transformers, cache)(config=model.config, **limit)
        arguments = {"past_key_values": kept} if cached else {"use_cache": False}
        model(**batch, **arguments).loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    plain = backward(cached=True)
    for options in ({}, {"preserve_module_state": True}):
        with checkpoint_blocks(model, None, **options):
            message = rf"of model\.layers\.1 .* past_key_values \({cache}\) .*use_cache=False"
            with pytest.raises(RuntimeError, match=message):
                backward(cached=True)
            model.zero_grad()
            for found, expected in zip(backward(cached=False), plain, strict=True):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
@pytest.mark.parametrize("call", [estimate, run])
def test_prefix_of_an_adapter_is_named_by_recipes_with_checkpoints(checkpoint, call):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make_model():
        options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(LLAMA(), options)

    recipe = Recipe(optimizer="sgd", checkpoint=checkpoint)
    message = r'model\.layers\.1 raised .* past_key_values \(DynamicCache\) .*checkpoint="none"'
    with pytest.raises(RuntimeError, match=message):
        call(make_model, partial(text, "ones"), recipe)


def test_the_names_that_lesson_02_gives_for_checkpoints_are_current():
    with pytest.warns(FutureWarning):
        LLAMA().gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        LLAMA().activation_checkpointing_enable()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_flash_attention_is_there_too_where_the_model_checkpoints_its_own_layers(use_reentrant):
    losses, batch = [], text()
    for recipe in (Recipe(attention=None), FLASH, replace(FLASH, in_backward=True)):
        torch.manual_seed(1)
        model, optimizer = build(partial(checkpointing, use_reentrant), recipe, lr=1e-2)
        losses.append([train_step(model, optimizer, batch, recipe).loss for _ in range(3)])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 2


# ---- losses that are no methods


def series():
    drawn = partial(torch.rand, 4)
    return {
        "past_values": drawn(19),
        "future_values": drawn(8),
        "past_time_features": drawn(19, 1),
        "future_time_features": drawn(8, 1),
        "past_observed_mask": torch.ones(4, 19),
    }


TIMES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3]}
TIMES |= {"num_time_features": 1, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
TIMES |= dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0)
TIMES |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
TRANSFORMER = made("TimeSeriesTransformer:TimeSeriesTransformerForPrediction", **TIMES)


def test_a_loss_function_that_a_model_keeps_for_itself_is_not_called_with_the_batch(monkeypatch):
    # as `set_default_validate_args(False)` does: distributions do not look at their arguments
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    model, batch = TRANSFORMER(), series()
    assert callable(model.loss)
    assert_measured(TRANSFORMER, series, Recipe())
    step = train_step(*build(lambda: model, Recipe(), lr=0.0), batch, Recipe())
    assert step.loss == pytest.approx(model(**batch).loss.item())


def test_distributions_that_look_at_their_arguments_are_refused_with_the_way_out(monkeypatch):
    # the default, which torch.compile changes for the whole process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    way = r"^the step reads values .* at transformers/.*set_default_validate_args\(False\)$"
    with pytest.raises(ValueError, match=way):
        estimate(TRANSFORMER, series, Recipe())


def put_on(loss):
    model = torch.nn.Linear(4, 4)
    model.loss = loss
    return model


@pytest.mark.parametrize("take", [estimate, run])
def test_a_function_put_on_any_other_model_is_named_where_it_fails(take):
    batch = partial(torch.ones, 2, 4)
    for loss, its in (
        (lambda outputs, targets: None, r"function .*\(outputs, targets\)"),
        (torch.nn.MSELoss(), "MSELoss"),
    ):
        with pytest.raises(TypeError, match=rf"^Linear\.loss must .* \(batch\), .*, got a {its}"):
            take(partial(put_on, loss), batch, Recipe())
    with pytest.raises(AttributeError) as raised:
        take(partial(put_on, lambda batch: batch.labels), batch, Recipe())
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
def test_a_model_with_adapters_is_weighed_by_the_labels_of_its_base(name):
    make, batch, recipe = ADAPTED[name], text(), Recipe(micro_batches=2)
    batch["labels"][:2, :12] = IGNORED  # the micro-batches have different numbers of labels
    expected = plain_gradients(make, batch, lambda model, batch: (model(**batch).loss, 1))
    assert_plain(make, batch, recipe, expected)
    if name == "no task":
        assert_measured(make, text, recipe)


OWN_ATTENTION = {
    "BLOOM": made("Bloom:BloomForCausalLM", vocab_size=WORDS, hidden_size=32, n_layer=1, n_head=2),
    "XLNet": made(
        "XLNet:XLNetLMHeadModel", vocab_size=WORDS, d_model=32, d_inner=48, n_layer=1, n_head=2
    ),
    "Mamba": ARCHITECTURES["state space"][0],
}


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("make", OWN_ATTENTION.values(), ids=OWN_ATTENTION)
def test_attention_that_a_model_cannot_have_is_refused_in_the_words_of_the_recipe(make, attention):
    with pytest.raises(ValueError, match=rf"^attention must .*, got '{attention}'$") as told:
        estimate(make, text, Recipe(attention=attention))
    assert {"flash", "sdpa"} & set(re.findall(r"\w+", str(told.value))) == {attention}
