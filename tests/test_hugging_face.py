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
    TEXT,
    WORDS,
    made,
    padded,
    text,
)
from measured import assert_measured
from test_matrix import assert_plain, plain_gradients
from torch.utils.flop_counter import FlopCounterMode

from course_lib.budget import InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.extrapolate import BlockExtrapolator
from course_lib.checkpoint import checkpoint_blocks

transformers = pytest.importorskip(
    "transformers", reason="transformers comes with the extras `models` and `test`"
)
SGD = Recipe(optimizer="sgd")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "and decoder" in name])
def test_layers_that_share_more_than_what_they_hand_on_are_no_chain(name):
    recipe = Recipe(checkpoint="segments", segments=2, micro_batches=2)
    for attempt in (estimate, run):
        with pytest.raises(ValueError, match=r"^the (result of a block|first argument of) .*must"):
            attempt(*ARCHITECTURES[name], recipe)


def test_an_encoder_and_a_decoder_of_any_lengths_are_both_checkpointed():
    bart = made("Bart:BartForConditionalGeneration", **{**PAIR, **SPECIAL, "decoder_layers": 3})
    named = ("model.encoder.layers.*", "model.decoder.layers.*")
    found, expected = (
        estimate(bart, partial(text, answer=12), Recipe(checkpoint="layers", blocks=blocks))
        for blocks in (None, named)
    )
    assert found.peak_bytes == expected.peak_bytes and found.flops == expected.flops


FUNNEL = {
    "vocab_size": WORDS,
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 48,
    "block_sizes": [2, 2],
}
SEEING = {**SIZES, "image_size": 16, "patch_size": 8}
LISTS = {
    "lists in a list": (
        made("Funnel:FunnelForMaskedLM", **FUNNEL),
        ["funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"],
    ),
    "embeddings in a list": (
        made(
            "Sam:SamModel",
            vision_config=SEEING,
            mask_decoder_config={"hidden_size": 32, "mlp_dim": 48},
        ),
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


def test_a_search_finds_schedules_for_the_micro_batch_that_takes_the_most():
    model, make_batch = made("GPTNeoX:GPTNeoXForCausalLM", **TEXT), partial(padded, 1)
    budget = 42 * estimate(model, make_batch, SGD).peak_bytes // 100
    found = fit(model, make_batch, budget, base=SGD, progress=False)
    assert {"optimal", "segments"} & {e.recipe.checkpoint for e in found}
    for e in found:
        assert run(model, make_batch, e.recipe).meter.peak_bytes == e.peak_bytes <= budget


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


def flops_and_warnings(model):
    with (
        warnings.catch_warnings(record=True) as heard,
        FlopCounterMode(display=False) as counter,
    ):
        warnings.simplefilter("always")
        model(**text(), use_cache=False).loss.backward()
    return counter.get_total_flops(), any("policy keeps" in f"{each.message}" for each in heard)


def test_linears_of_a_llama_call_mm_so_that_a_list_of_addmm_keeps_nothing_and_says_so():
    plain, _ = flops_and_warnings(LLAMA())
    found = {}
    for policy in (None, "addmm", "mm"):
        model = LLAMA()
        operators = policy and [getattr(torch.ops.aten, policy).default]
        checkpoint_blocks(model, "model.layers.*", policy=operators)
        found[policy] = flops_and_warnings(model)
    assert found["addmm"] == (found[None][0], True) and found[None][0] > 1.1 * plain
    assert found["mm"] == (plain, False)


@pytest.mark.parametrize(
    ("name", "is_older"),
    [("gradient_checkpointing_enable", True), ("activation_checkpointing_enable", False)],
)
def test_the_names_that_lesson_02_gives_for_checkpoints_are_current(name, is_older):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(LLAMA(), name)()
    assert any(each.category is FutureWarning for each in caught) == is_older


@pytest.mark.filterwarnings("ignore:.*checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_flash_attention_is_there_too_where_the_model_checkpoints_its_own_layers(use_reentrant):
    def checkpointing():
        model = LLAMA()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    batch, losses = text(), []
    for recipe in (
        Recipe(attention=None),
        Recipe(attention="flash"),
        Recipe(attention="flash", in_backward=True),
    ):
        torch.manual_seed(1)
        model, optimizer = build(checkpointing, recipe, lr=1e-2)
        losses.append([train_step(model, optimizer, batch, recipe).loss for _ in range(3)])
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


# ---- losses that are no methods


def series(observations=4):
    values = {
        "past_values": torch.rand(observations, 19),
        "future_values": torch.rand(observations, 8),
    }
    times = {
        "past_time_features": torch.rand(observations, 19, 1),
        "future_time_features": torch.rand(observations, 8, 1),
    }
    return {**values, **times, "past_observed_mask": torch.ones(observations, 19)}


@pytest.fixture
def unchecked():
    """Distributions that do not look at the values of what they are given."""
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(__debug__)


TIMES = {
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
TRANSFORMER = made("TimeSeriesTransformer:TimeSeriesTransformerForPrediction", **TIMES)


def test_a_loss_function_that_a_model_keeps_for_itself_is_not_called_with_the_batch(unchecked):
    model, batch = TRANSFORMER(), series()
    assert callable(model.loss)
    assert_measured(TRANSFORMER, series, Recipe())
    step = train_step(*build(lambda: model, Recipe(), lr=0.0), batch, Recipe())
    assert step.loss == pytest.approx(model(**batch).loss.item())


def test_distributions_that_look_at_their_arguments_are_refused_with_the_way_out():
    way = r"^the step reads values .* at transformers/.*set_default_validate_args\(False\)$"
    with pytest.raises(ValueError, match=way):
        estimate(TRANSFORMER, series, Recipe())


def nll(outputs, targets):
    return -outputs.log_prob(targets)


def by_name(batch):
    return batch.labels


def put_on(loss):
    model = torch.nn.Linear(4, 4)
    model.loss = loss
    return model


@pytest.mark.parametrize("take", [estimate, run])
def test_a_function_put_on_any_other_model_is_named_where_it_fails(take):
    batch = partial(torch.ones, 2, 4)
    for loss, its in ((nll, r"function .*\(outputs, targets\)"), (torch.nn.MSELoss(), "MSELoss")):
        with pytest.raises(TypeError, match=rf"^Linear\.loss must .* \(batch\), .*, got a {its}"):
            take(partial(put_on, loss), batch, Recipe())
    with pytest.raises(AttributeError) as raised:
        take(partial(put_on, by_name), batch, Recipe())
    assert "raised in Linear.loss, which is a function" in raised.value.__notes__[0]


def with_lora(make, task_type=None):
    def adapted():
        peft = pytest.importorskip("peft", reason="peft is not installed")
        options = {"target_modules": ["q_proj", "v_proj"], "task_type": task_type}
        options |= {"r": 2, "init_lora_weights": False}
        return peft.get_peft_model(make(), peft.LoraConfig(**options))

    return adapted


ADAPTED = {
    "no task": with_lora(LLAMA),
    "a task": with_lora(LLAMA, "CAUSAL_LM"),
    "compiled": lambda: torch.compile(with_lora(LLAMA)(), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("name", ADAPTED)
def test_a_model_with_adapters_is_weighed_by_the_labels_of_its_base(name):
    def make():
        torch.manual_seed(0)
        return ADAPTED[name]()

    batch = text()
    batch["labels"][:2, :12] = IGNORED  # the micro-batches have different numbers of labels
    expected = plain_gradients(make, batch, lambda model, batch: (model(**batch).loss, 1))
    assert_plain(make, batch, Recipe(micro_batches=2), expected)


def test_peft_estimates_of_micro_batches_are_what_the_run_takes_to_the_byte():
    assert_measured(with_lora(LLAMA), text, Recipe(micro_batches=2))


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
