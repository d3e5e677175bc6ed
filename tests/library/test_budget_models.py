"""Recipes with models from outside the course: gradients, optimizers and rejected techniques.

Gradients are compared with autograd's in float64, and optimizers with their PyTorch classes."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from estimate_checks import feasible
from hugging_face_models import ARCHITECTURES, T5, images, maker, text
from test_budget_combinations import (
    OFFLOAD,
    assert_plain,
    decoder,
    gradients_of,
    plain_gradients,
    tokens,
)
from third_party_models import (
    IGNORED,
    KINDS,
    VOCABULARY,
    Decoder,
    Encoder,
    Pictures,
    Tiny,
    TinyForCausalLM,
    Tower,
    Translator,
    labelled,
    pictures,
    sentences,
)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.budget import Recipe, build, estimate, run, train_step
from course_lib.memory import MemoryMeter
from course_lib.models import seed_generators

LAYERS, SELECTIVE = Recipe(checkpoint="layers"), Recipe(checkpoint="selective")
SEGMENTS = Recipe(checkpoint="segments", segments=3)
OPTIMAL = Recipe(checkpoint="optimal", schedule_bytes=10**9)


# ---- optimizers

ADAM8BIT = Recipe(optimizer="adam8bit")


class Wide(nn.Sequential):
    def __init__(self):
        layers = nn.Linear(128, 100, bias=False), nn.Linear(100, 1), nn.Linear(1, 4100)
        super().__init__(*layers)

    def loss_sum(self, batch):
        return self(batch).square().sum(), len(batch)


def rows():
    return torch.randn(4, 128)


def test_estimated_adam8bit_state_bytes_equal_formula():
    guess = estimate(Wide, rows, ADAM8BIT)
    large, tables = 2 * (12_800 + 4 * 50) + 2 * 2 * (4_100 + 4 * 17), 2 * 256 * 4
    assert guess.at_peak["optimizer"] == large + tables + 8 * 101 and "by a formula" in str(guess)


class Tagger(nn.Module):
    """An embedding of bitsandbytes, and a layer with registered settings."""

    def __init__(self, kind, **settings):
        super().__init__()
        bitsandbytes = pytest.importorskip("bitsandbytes")
        self.table, self.layer = getattr(bitsandbytes.nn, kind)(1000, 100), nn.Linear(100, 100)
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(self.layer, "weight", settings)

    def loss_sum(self, rows):
        return self.layer(self.table(rows.long().abs())).square().sum(), len(rows)


@pytest.fixture
def own_registrations(monkeypatch):
    """Remove registrations with bitsandbytes after a test; they are global to the process."""
    optim = pytest.importorskip("bitsandbytes").optim
    manager = optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "module_weight_config_triple", [])
    monkeypatch.setattr(manager, "index2config", {})
    monkeypatch.setattr(manager, "pid2config", {})


@pytest.mark.usefixtures("own_registrations")
@pytest.mark.parametrize(
    ("make_model", "fields"),
    [
        (Wide, {"micro_batches": 2}),
        (Wide, {"in_backward": True, "precision": "bf16"}),
        (partial(Tagger, "StableEmbedding"), {}),
        (partial(Tagger, "Embedding", optim_bits=32), {"in_backward": True}),
        (partial(Tagger, "Embedding", min_8bit_size=10_001), {}),
    ],
    ids=str,
)
def test_estimate_with_adam8bit_equals_measurement(make_model, fields):
    """Embeddings of bitsandbytes keep their moments in fp32."""
    step = make_model, rows, replace(ADAM8BIT, **fields)
    found, meter = estimate(*step), run(*step).meter
    assert (meter.peak_bytes, meter.at_peak()) == (found.peak_bytes, found.at_peak)


def test_adam8bit_requires_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    for attempt in (partial(run, Wide, rows), partial(build, Wide)):
        with pytest.raises(ValueError, match=r"^optimizer 'adam8bit' needs .*pip install"):
            attempt(ADAM8BIT)


UPDATES = [
    Recipe(),
    Recipe(optimizer="sgd", update="foreach"),
    Recipe(optimizer="momentum", update="fused"),
    Recipe(optimizer="adafactor"),
    ADAM8BIT,
    Recipe(offload_optimizer=0.5, checkpoint="layers", micro_batches=2),
    Recipe(offload_optimizer=0.5, in_backward=True),
    Recipe(offload_optimizer=1.0, **OFFLOAD),
]


# gradients that are only rounding errors, such as those of keys' biases, stay small
SMALL_STEPS = {"eps": 1e-3}
PYTORCHS = {
    "adam": partial(torch.optim.AdamW, **SMALL_STEPS),
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("recipe", UPDATES, ids=str)
def test_each_optimizer_updates_like_its_pytorch_class(recipe):
    """Compare adam8bit with the class of bitsandbytes."""
    base = PYTORCHS.get(recipe.optimizer)
    if recipe.optimizer == "adam8bit":
        base = partial(pytest.importorskip("bitsandbytes").optim.AdamW8bit, **SMALL_STEPS)
    # bitsandbytes stores small parameters in fp32, so its row needs a wide model
    make, batch = (Wide, rows()) if recipe.optimizer == "adam8bit" else (Encoder, sentences())
    (model, optimizer), expected = build(make, recipe, lr=1e-2), make()
    expected.load_state_dict(model.state_dict())
    plain = base(expected.parameters(), lr=1e-2)
    for group in optimizer.param_groups:
        group.update(SMALL_STEPS if recipe.optimizer in ("adam", "adam8bit") else {})
    for _ in range(3):
        plain.zero_grad()
        total, weight = expected.loss_sum(batch)
        (total / weight).backward()
        plain.step()
        train_step(model, optimizer, batch, recipe)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_train_step_clips_the_gradient_of_all_micro_batches():
    expected, _ = plain_gradients(Decoder, sentences())
    norm = sum(g.square().sum() for g in expected.values()).sqrt()
    recipe = Recipe(micro_batches=3, checkpoint="layers")
    found, result, _ = gradients_of(Decoder, sentences(), recipe, max_norm=0.1)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, g in found.items():
        assert_close(g.double(), expected[name] * 0.1 / norm, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("inside", [False, True])
def test_train_step_uses_learning_rate_of_each_parameter_group(inside):
    model = Decoder()
    head, *rest = model.head.weight, *(p for p in model.parameters() if p is not model.head.weight)
    before = [p.detach().clone() for p in (head, *rest)]
    groups = [{"params": rest, "lr": 0.0}, {"params": [head], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    train_step(model, optimizer, sentences(), Recipe(in_backward=inside))
    assert not torch.equal(head, before[0]) and all(map(torch.equal, rest, before[1:]))


# ---- models with a config, and batches that are dicts with labels


def loss_of_model(model, batch):
    """Return the loss that the model computes, which is a mean."""
    model.config.use_cache = False
    return model(**batch)["loss"], 1


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.args[0])
def test_micro_batch_losses_are_weighted_by_number_of_labels(make):
    batch = labelled(make)
    recipes = [
        Recipe(),
        Recipe(micro_batches=6),
        Recipe(micro_batches=2, checkpoint="layers"),
        Recipe(in_backward=True),
    ]
    if make.args != ("classes",):
        batch["labels"][2] = IGNORED  # one of six micro-batches has no labels that count
        recipes += [Recipe(head_chunk=n, micro_batches=m) for n, m in ((1, 2), (16, 1), (1000, 2))]
    expected = plain_gradients(make, batch, loss_of_model)
    for recipe in recipes:
        assert_plain(make, batch, recipe, expected)


def confident():
    model = decoder(tied=False)
    model.head.weight.data *= 100  # rounding such logits changes the loss
    return model


@pytest.mark.parametrize(
    ("make", "make_batch", "precision"),
    # the course's decoder computes its loss after `forward` has returned
    [(Decoder, sentences, "bf16"), (confident, tokens, "autocast")],
)
def test_chunked_head_computes_loss_in_logits_dtype_of_model(make, make_batch, precision):
    plain, chunked = (
        gradients_of(make, make_batch(), Recipe(precision, head_chunk=n))[1].loss for n in (None, 7)
    )
    assert chunked == pytest.approx(plain, rel=1e-5)


def test_train_step_restores_attention_cache_setting_and_forward_after_error():
    model, optimizer = build(KINDS[0], Recipe())
    head, block = model.decoder.head, model.decoder.body["blocks"][0]
    recipe = Recipe(attention="flash", checkpoint="layers", head_chunk=8, micro_batches=2)
    batch = labelled(KINDS[0])
    assert train_step(model, optimizer, batch, recipe).stepped
    with pytest.raises(IndexError):
        wrong = {**batch, "input_ids": batch["input_ids"] + VOCABULARY}
        train_step(model, optimizer, wrong, recipe)
    assert model.config.use_cache and model.config._attn_implementation == "eager"
    assert "forward" not in vars(head) and "forward" not in vars(block)
    assert not torch.overrides._get_current_function_mode_stack()


# ---- a model's own chain

CHAINS = [
    # `feasible` gives more bytes
    Recipe(checkpoint="optimal", schedule_bytes=1, head_chunk=9, micro_batches=2),
    Recipe(checkpoint="segments", segments=3, **OFFLOAD),
    Recipe(head_chunk=9),
]


@pytest.mark.parametrize("recipe", CHAINS, ids=str)
def test_recipes_preserve_gradients_and_lower_peak_for_custom_stages(recipe):
    recipe = feasible(Tower, sentences, recipe)
    assert_plain(Tower, sentences(), recipe, plain_gradients(Tower, sentences()))
    guess = estimate(Tower, sentences, recipe)
    plain = Recipe(in_backward=recipe.in_backward, micro_batches=recipe.micro_batches)
    assert guess.peak_bytes < estimate(Tower, sentences, plain).peak_bytes


class Doubled(Tower):
    """Tower that overrides its loss, but not its stages."""

    def loss_sum(self, batch):
        total, weight = super().loss_sum(batch)
        return 2 * total, weight


def tower(**attributes):
    model = Tower()
    vars(model).update(attributes)
    return model


def hooked():
    model = Tower()
    model.register_forward_hook(lambda module, inputs, output: output)
    return model


# ---- models and techniques that cannot be combined


class Calling(Decoder):
    """Calls its blocks by `call` and in the given order, with a scale that may be trained."""

    def __init__(self, call=nn.Module.__call__, order=(0, 1, 2), trained=False):
        super().__init__()
        self.call, self.order = call, order
        self.scale = nn.Parameter(torch.tensor(0.3)) if trained else 0.3

    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for place in self.order:
            state = self.call(self.body["blocks"][place], state, scale=self.scale)
        return state[0]


def bypass_call(block, state, scale):
    """Call the forward of the class instead of the module."""
    return type(block).forward(block, state, scale=scale)


checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
without_gradients = torch.no_grad()(nn.Module.__call__)


class Residual(Calling):
    """Uses the result of its first block also after the last one."""

    def hidden(self, tokens):
        first = self.body["blocks"][0]((self.embedding(tokens), 0), scale=0.3)
        state = self.body["blocks"][1](first, scale=0.3)
        return self.body["blocks"][2](state, scale=0.3)[0] + first[0]


class Dropping(Decoder):
    def hidden(self, tokens):
        x = self.embedding(tokens)[:, None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)[:, 0]


class Smoothed(Decoder):
    def loss_sum(self, batch):
        logits, labels = self.logits(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1), 1


class OtherLoss(Decoder):
    def loss_sum(self, batch):
        self.logits(batch["tokens"])
        return self.hidden(batch["tokens"]).square().sum(), 1


LINEAR = nn.Linear(3, 3)
FLASH, TWO = Recipe(attention="flash"), Recipe(micro_batches=2)
NOT_CALLED = r"none of the checkpointed blocks \('body.blocks.0'"
REJECTED = [
    # stages that do not compute the loss of the model, or that do not form a chain
    *(
        (make, SEGMENTS, "blocks must be one or several names .*, got None")
        for make in (Doubled, hooked, partial(tower, loss_sum=print), partial(tower, stages=4))
    ),
    (partial(tower, stages=lambda: 0), SEGMENTS, r"Tower.stages must be callable with \(batch\)"),
    (partial(tower, stages=lambda batch: []), SEGMENTS, "the number of stages must .* got 0"),
    (partial(tower, stages=lambda batch: [LINEAR, 7]), SEGMENTS, "stage 1 must be .*, got 7"),
    (partial(tower, stages=lambda batch: [LINEAR]), SEGMENTS, "segments must be at most 0, got 3"),
    # blocks that do not form a chain
    (Pictures, SEGMENTS, "the first argument of stages.1 must be the result of stages.0"),
    (Residual, SEGMENTS, "only the next block may use the result of body.blocks.0"),
    (partial(Calling, order=[0]), SEGMENTS, "body.blocks.1 was not called"),
    (partial(Calling, order=[2, 1, 0]), SEGMENTS, "body.blocks.2 must .* after body.blocks.1"),
    (partial(Calling, trained=True), SEGMENTS, "scale must not require gradients"),
    (Decoder, replace(SEGMENTS, segments=4), "segments must be between 1 and 3, .*, got 4"),
    (Decoder, replace(SEGMENTS, offload_activations=True), "offload_activations cannot"),
    (partial(Calling, checkpointed), OPTIMAL, "schedule must be a Schedule, .* body.blocks.0"),
    (Dropping, FLASH, "dropout_p of .* must be 0.0 .*, got 0.1"),
    (Pictures, FLASH, "attention must be 'standard' for a Pictures"),
    (partial(decoder, dropout=0.1), FLASH, "attention must"),
    (Decoder, Recipe(attention="sdpa"), "attention must be .* for a Decoder .*, got 'sdpa'"),
    (partial(TinyForCausalLM, "capped"), Recipe(head_chunk=8), "head_chunk must .* applies div"),
    (Smoothed, Recipe(head_chunk=8), "head_chunk must be None .* sets label_smoothing"),
    (OtherLoss, Recipe(head_chunk=8), "head_chunk must be None .* does not pass its logits"),
    (partial(nn.Embedding, 3, 3), Recipe(head_chunk=8), "head_chunk must"),
    (partial(TinyForCausalLM, "more"), TWO, "micro_batches must be 1 .* the loss"),
    (partial(Tiny, "causal"), TWO, "micro_batches must be 1 for a Tiny, got 2"),
    (Pictures, TWO, "micro_batches must be 1 .* BatchNorm .*, got 2"),
    (Decoder, replace(LAYERS, blocks="layers.*"), r"blocks must match .*, got 'layers.\*'"),
    (
        Decoder,
        replace(LAYERS, blocks="*"),
        ".* in blocks matches modules of several types: .*Embedding",
    ),
    (Decoder, replace(LAYERS, first_blocks=4), "first_blocks must be between 1 and 3, .*, got 4"),
    (partial(nn.Linear, 2, 2), LAYERS, "blocks must"),
    (partial(Calling, without_gradients), LAYERS, NOT_CALLED),
    (partial(Calling, bypass_call), replace(SELECTIVE, micro_batches=2), NOT_CALLED),
    (partial(nn.Linear, 2, 2), Recipe(), "model must have a loss"),
    (lambda: 3, Recipe(), "model must"),
    (lambda: Decoder().requires_grad_(False), Recipe(), "model must"),
]


@pytest.mark.parametrize(("make", "recipe", "message"), REJECTED)
def test_unsuitable_model_raises_one_line_error_for_each_technique(make, recipe, message):
    make_batch = pictures if make is Pictures else sentences
    if getattr(make, "func", None) in (Tiny, TinyForCausalLM):
        make_batch = partial(labelled, make)
    model, optimizer = make(), torch.optim.SGD([torch.zeros(1)])
    for attempt in (
        lambda: train_step(model, optimizer, make_batch(), recipe),
        lambda: estimate(make, make_batch, recipe),
        lambda: run(make, make_batch, recipe),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{message}[^\n]*$"):
            attempt()


def test_estimate_rejects_nn_transformer_mask_and_suggests_is_causal():
    make = partial(Translator, lambda n: torch.randn(n, n))
    line = Translator.loss.__code__.co_firstlineno + 2
    message = rf"^the step reads the .*third_party_models.py, line {line}, .* pass is_causal="
    with pytest.raises(ValueError, match=message):
        estimate(make, lambda: torch.randn(2, 6, 16), Recipe())


# ---- Hugging Face models


def without_dropout(make):
    with seed_generators(6):
        model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


HUGGING_FACE = {
    name: partial(without_dropout, ARCHITECTURES[name][0])
    for name in ("decoder, tied head", "encoder", "vision")
}
T5_MODEL = maker("T5:T5ForConditionalGeneration", **T5, dropout_rate=0.0)
HUGGING_FACE["encoder and decoder"] = partial(without_dropout, T5_MODEL)


def batch_for(name, kind):
    return images() if name == "vision" else text(kind)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_recipes_preserve_gradients_of_hugging_face_models(name):
    make, batch = HUGGING_FACE[name], batch_for(name, "padded")
    expected = plain_gradients(make, batch, loss_of_model)
    recipes = [
        Recipe(micro_batches=4, checkpoint="selective", first_blocks=1),
        Recipe(attention="eager", in_backward=True, checkpoint="layers"),
        Recipe(**OFFLOAD),
    ]
    if name != "encoder and decoder":
        recipes.append(Recipe(checkpoint="segments", segments=2, micro_batches=2))
    if name != "vision":
        recipes.append(Recipe(head_chunk=7, checkpoint="layers", micro_batches=2))
    for recipe in recipes:
        assert_plain(make, batch, recipe, expected)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_flash_attention_rejects_masks_of_hugging_face_models(name):
    make = HUGGING_FACE[name]
    has_bias = name == "encoder and decoder"  # a bias counts as a mask
    if not has_bias:
        batch = batch_for(name, "none")
        recipe = replace(FLASH, checkpoint="layers", micro_batches=2)
        assert_plain(make, batch, recipe, plain_gradients(make, batch, loss_of_model))
    if name != "vision":
        with pytest.raises(ValueError, match=r"^attn_mask of \S+ must be None"):
            gradients_of(make, batch_for(name, "none" if has_bias else "padded"), FLASH)


# ---- FLOPs


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(8, 8, True), (5, 9, True), (9, 5, True), (5, 9, False)]
)
def test_meter_counts_flops_only_of_unmasked_attention_scores(queries, keys, causal):
    batch, heads, width = 2, 3, 16
    scores = torch.ones(queries, keys)
    unmasked = int((scores.tril() if causal else scores).sum())
    q = torch.randn(batch, heads, queries, width, requires_grad=True)
    k = torch.randn(batch, heads, keys, width, requires_grad=True)
    with MemoryMeter() as meter:
        F.scaled_dot_product_attention(q, k, k, is_causal=causal).sum().backward()
    # two matrix products in forward and five in backward, each with 2 * width FLOPs per score
    assert meter.flops == batch * heads * 7 * 2 * width * unmasked


def test_compiled_blocks_allow_segments_and_reject_optimal_schedule():
    model, optimizer = build(Decoder, Recipe())
    blocks = [torch.compile(block, backend="eager") for block in model.body["blocks"]]
    model.body["blocks"] = nn.ModuleList(blocks)
    assert train_step(model, optimizer, sentences(), SEGMENTS).stepped
    with pytest.raises(ValueError, match=r"^body\.blocks\.0 must keep the method forward"):
        train_step(model, optimizer, sentences(), OPTIMAL)


def test_estimate_rejects_unknown_kind_of_device():
    with pytest.raises(ValueError, match="kind must be 'cpu' or 'cuda', got 'gpu'"):
        estimate(Encoder, sentences, Recipe(), kind="gpu")
