"""course_lib.budget on Hugging Face models, made from configurations: what is estimated is what the
run takes."""

import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hugging_face_models import (
    ARCHITECTURES,
    IGNORED,
    PAIR,
    SHARED,
    SIZES,
    SPECIAL,
    T5,
    TEXT,
    WORDS,
    made,
    padded,
    text,
)
from measured import assert_measured
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

from course_lib.budget import InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.extrapolate import BlockExtrapolator
from course_lib.checkpoint import checkpoint_blocks

transformers = pytest.importorskip(
    "transformers", reason="transformers comes with the extras `models` and `test`"
)

CHAINS = {
    name: case for name, case in ARCHITECTURES.items() if not name.startswith("encoder and decoder")
}
SEGMENTS = Recipe(checkpoint="segments", segments=2, micro_batches=2)
OPTIMAL = Recipe(optimizer="sgd", checkpoint="optimal", schedule_bytes=220_000)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in CHAINS])
def test_layers_that_share_more_than_what_they_hand_on_are_no_chain(name):
    for attempt in (estimate, run):
        with pytest.raises(
            ValueError,
            match=r"^the (result of a block|first argument of \S+) must .+, got .+$",
        ):
            attempt(*ARCHITECTURES[name], SEGMENTS)


@pytest.mark.parametrize(("layers", "checkpoint"), [((3, 3), "layers"), ((2, 3), "selective")])
def test_an_encoder_and_a_decoder_of_any_lengths_are_both_checkpointed(layers, checkpoint):
    options = {**PAIR, **SPECIAL, "encoder_layers": layers[0], "decoder_layers": layers[1]}
    of = made("Bart:BartForConditionalGeneration", **options), partial(text, answer=12)
    found = Recipe(checkpoint=checkpoint, offload_optimizer=1.0, in_backward=True)
    named = replace(found, blocks=("model.encoder.layers.*", "model.decoder.layers.*"))
    assert estimate(*of, found).peak_bytes == estimate(*of, named).peak_bytes


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


MASKED = {
    "Llama": (made("Llama:LlamaForCausalLM", **{**SHARED, "num_hidden_layers": 1}), text),
    "BART": (
        made(
            "Bart:BartForConditionalGeneration",
            **{**PAIR, **SPECIAL, "encoder_layers": 1, "decoder_layers": 1},
        ),
        partial(text, answer=12),
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_an_attention_mask_of_ones_is_dropped_and_one_with_zeros_is_kept(name):
    make_model, make_batch = MASKED[name]
    found = {}
    for kind in ("none", "ones", "padded"):
        batch = partial(make_batch, kind, samples=3, length=50)
        found[kind] = estimate(make_model, batch, Recipe(optimizer="sgd")).peak_bytes
    mask_bytes = 3 * 50 * 8
    assert found["ones"] <= found["none"] + 2 * mask_bytes
    if name == "Llama":  # keys and values are repeated for a mask, not without one
        assert found["padded"] > found["ones"] + 2 * mask_bytes


def test_a_search_finds_schedules_for_the_micro_batch_that_takes_the_most():
    model = made("GPTNeoX:GPTNeoXForCausalLM", **{**TEXT, "num_hidden_layers": 2})
    make_batch, base = partial(padded, 1), Recipe(optimizer="sgd")
    budget = 42 * estimate(model, make_batch, base).peak_bytes // 100
    found = fit(model, make_batch, budget, base=base, progress=False)
    assert {"optimal", "segments"} & {e.recipe.checkpoint for e in found}
    for e in found:
        assert run(model, make_batch, e.recipe).meter.peak_bytes == e.peak_bytes <= budget


def test_the_least_that_a_schedule_takes_is_enough_for_every_micro_batch():
    (model, _), recipe = CHAINS["decoder, grouped queries"], replace(OPTIMAL, micro_batches=4)
    composer = BlockExtrapolator(model, partial(padded, 1), recipe, loss_sum=None, tier="file")
    with pytest.raises(InfeasibleBudget) as least:
        composer.schedule_cost(replace(recipe, schedule_bytes=1))
    enough = replace(recipe, schedule_bytes=least.value.least_bytes)
    assert composer.schedule_cost(enough).peak_bytes <= enough.schedule_bytes
    assert_measured(model, partial(padded, 1), enough)


def test_a_batch_that_is_there_is_looked_at_as_it_is():
    make_model = MASKED["Llama"][0]
    for kind in ("ones", "padded"):
        batch = text(kind)
        assert_measured(make_model, lambda batch=batch: batch, Recipe())


def test_experts_that_look_where_tokens_go_are_refused_by_the_name_of_the_operator():
    make = made(
        "Mixtral:MixtralForCausalLM", **SHARED, num_local_experts=4, experts_implementation="eager"
    )
    with pytest.raises(
        ValueError,
        match=r"^the step reads values of its data \(aten\.nonzero\.default\).*no values are read",
    ):
        estimate(make, text, Recipe())
    assert run(make, text, Recipe()).result.stepped


def test_a_search_switches_a_model_that_keeps_its_scores_to_sdpa():
    make_model = made("Llama:LlamaForCausalLM", **SHARED, attn_implementation="eager")
    make_batch = partial(text, "ones", 2, 128)
    plain = estimate(make_model, make_batch, Recipe(optimizer="sgd"))
    found = fit(
        make_model, make_batch, plain.peak_bytes // 2, base=Recipe(optimizer="sgd"), progress=False
    )
    assert {"sdpa"} <= {e.recipe.attention for e in found} <= {"sdpa", "standard"}
    assert all(
        e.peak_bytes == run(make_model, make_batch, e.recipe).meter.peak_bytes for e in found
    )


def test_a_search_leaves_the_attention_of_a_model_that_calls_sdpa_as_it_is():
    make_model = made("Llama:LlamaForCausalLM", **SHARED, attn_implementation="sdpa")
    make_batch = partial(text, "ones", 2, 128)
    base = Recipe(optimizer="sgd")
    plain = estimate(make_model, make_batch, base)
    options = {"base": base, "quick": True, "progress": False}
    found = fit(make_model, make_batch, plain.peak_bytes * 3 // 4, **options)
    assert found.rates and {e.recipe.attention for e in found} == {"standard"}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def flops_and_warnings(model):
    with (
        warnings.catch_warnings(record=True) as heard,
        FlopCounterMode(display=False) as counter,
    ):
        warnings.simplefilter("always")
        model(**text(), use_cache=False).loss.backward()
    return counter.get_total_flops(), [f"{each.message}" for each in heard]


def test_linears_of_a_llama_call_mm_so_that_a_list_of_addmm_keeps_nothing_and_says_so():
    plain, _ = flops_and_warnings(llama())
    found = {}
    for policy in (None, "addmm", "mm"):
        model = llama()
        operators = policy and [getattr(torch.ops.aten, policy).default]
        checkpoint_blocks(model, "model.layers.*", policy=operators)
        flops, heard = flops_and_warnings(model)
        found[policy] = flops / plain, any("policy keeps" in each for each in heard)
    assert found["addmm"] == (found[None][0], True) and found[None][0] > 1.1
    assert found["mm"] == (1.0, False)


def test_the_names_that_lesson_02_gives_for_checkpoints_are_current():
    """The older name warns, and both give the gradients of the plain model."""
    gradients, heard = {}, {}
    for name in (None, "gradient_checkpointing_enable", "activation_checkpointing_enable"):
        model = llama().train()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if name is not None:
                getattr(model, name)()
        heard[name] = [each.category for each in caught]
        torch.manual_seed(1)
        model(**text(), use_cache=False).loss.backward()
        gradients[name] = [parameter.grad for parameter in model.parameters()]
    assert FutureWarning in heard["gradient_checkpointing_enable"]
    assert heard["activation_checkpointing_enable"] == []
    for found in gradients.values():
        assert all(map(torch.equal, gradients[None], found))


@pytest.mark.parametrize("cached", [True, False])
def test_a_cache_that_a_decoder_fills_twice_is_an_error_and_none_is_none(cached):
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).train()
    checkpoint_blocks(model, ["encoder.block.*", "decoder.block.*"])
    loss = model(**text(), use_cache=cached).loss
    if cached:
        with pytest.raises(CheckpointError):
            loss.backward()
    else:
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_flash_attention_is_there_too_where_the_model_checkpoints_its_own_layers(use_reentrant):
    def checkpointing():
        model = made("Llama:LlamaForCausalLM", **SHARED)()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    torch.manual_seed(0)
    batch, losses = text(), []
    for recipe in (
        Recipe(attention=None),
        Recipe(attention="flash"),
        Recipe(attention="flash", in_backward=True),
    ):
        torch.manual_seed(1)
        model, optimizer = build(checkpointing, recipe, lr=1e-2)
        losses.append([train_step(model, optimizer, batch, recipe).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(
        losses[0], rel=1e-5
    )


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
}
TIMES |= {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout": 0.0,
}
TIMES |= {"attention_dropout": 0.0, "activation_dropout": 0.0}


def test_a_loss_function_that_a_model_keeps_for_itself_is_not_called_with_the_batch(unchecked):
    make = made("TimeSeriesTransformer:TimeSeriesTransformerForPrediction", **TIMES)
    assert callable(make().loss)
    assert_measured(make, series, Recipe())
    model, batch = make(), series()
    step = train_step(*build(lambda: model, Recipe(), lr=0.0), batch, Recipe())
    assert step.loss == pytest.approx(model(**batch).loss.item())


def test_distributions_that_look_at_their_arguments_are_refused_with_the_way_out():
    make = made("TimeSeriesTransformer:TimeSeriesTransformerForPrediction", **TIMES)
    way = r"Change .* Call torch\.distributions\.Distribution\.set_default_validate_args\(False\)$"
    with pytest.raises(
        ValueError, match=rf"^the step reads values [^\n]* at transformers/[^\n]* {way}"
    ):
        estimate(make, series, Recipe())


def put_on(loss):
    def make():
        model = torch.nn.Linear(4, 4)
        model.loss = partial(loss, model) if loss is squares else loss
        return model

    return make


def squares(model, batch):
    return model(batch).square().mean()


def nll(outputs, targets):
    return -outputs.log_prob(targets)


def by_name(batch):
    return batch.labels


@pytest.mark.parametrize("take", [estimate, run])
def test_a_function_put_on_any_other_model_is_called_and_named_where_it_fails(take):
    batch = partial(torch.ones, 2, 4)
    assert take(put_on(squares), batch, Recipe())
    for loss, its in (
        (nll, r"function with the arguments \(outputs, targets\)"),
        (torch.nn.MSELoss(), "MSELoss with"),
    ):
        with pytest.raises(
            TypeError, match=rf"^Linear\.loss must be callable with \(batch\), .*, got a {its}"
        ):
            take(put_on(loss), batch, Recipe())
    with pytest.raises(AttributeError) as raised:
        take(put_on(by_name), batch, Recipe())
    assert (
        "raised in Linear.loss, which is a function that was assigned to the model"
        in raised.value.__notes__[0]
    )


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(optimizer="sgd", micro_batches=2)], ids=str)
def test_a_compiled_model_has_the_loss_of_the_one_inside(recipe):
    plain = made("Llama:LlamaForCausalLM", **SHARED)
    as_written = estimate(lambda: torch.compile(plain(), backend="eager"), text, recipe)
    assert as_written == estimate(plain, text, recipe)
    model, batch = plain(), text()
    step = train_step(
        *build(lambda: torch.compile(model, backend="eager"), recipe, lr=0.0), batch, recipe
    )
    assert step.loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)


class Adapted(torch.nn.Module):
    """What peft's `PeftModel` without a `task_type` is to the library: a class whose name says
    nothing of the loss, with a configuration, around a model that has the loss."""

    def __init__(self, base):
        super().__init__()
        self.base, self.peft_config, self.config = base, {}, base.config

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


def with_lora(make, task_type=None):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type=task_type, init_lora_weights=False
    )
    return lambda: peft.get_peft_model(make(), config)


LLAMA = made("Llama:LlamaForCausalLM", **SHARED)
ADAPTED = {
    "wrapper": lambda: lambda: Adapted(LLAMA()),
    "wrapper, compiled": lambda: lambda: torch.compile(Adapted(LLAMA()), backend="eager"),
    "peft without a task": lambda: with_lora(LLAMA),
    "peft with a task": lambda: with_lora(LLAMA, "CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("name", ADAPTED)
def test_a_model_with_adapters_is_weighed_by_the_labels_of_its_base(name):
    make = ADAPTED[name]()
    recipe = Recipe(optimizer="sgd", micro_batches=2)
    torch.manual_seed(0)
    batch = text()
    batch["labels"][:2, :12] = IGNORED  # the micro-batches have different numbers of labels
    model, optimizer = build(make, recipe, lr=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    model(**batch).loss.backward()  # the whole batch at once
    expected = [(p - p.grad).detach() for p in trained]
    model.zero_grad()
    result = train_step(model, optimizer, batch, recipe)
    assert result.weight == (batch["labels"][:, 1:] != IGNORED).sum()
    torch.testing.assert_close(trained, expected, check_layout=False)


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
    with pytest.raises(
        ValueError, match=rf"^attention must be '[^\n]* for a [^\n]*, got '{attention}'$"
    ) as told:
        estimate(make, text, Recipe(attention=attention))
    assert {"flash", "sdpa"} & set(re.findall(r"\w+", str(told.value))) == {attention}
