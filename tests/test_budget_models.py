"""course_lib.budget on models that this course did not write: plain gradients, and estimates that
are measured."""

import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from foreign_models import (
    IGNORED,
    KINDS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Decoder,
    Encoder,
    Pictures,
    Tiny,
    TinyForCausalLM,
    Tower,
    Translator,
    averaged,
    cube,
    labelled,
    pictures,
    point,
    sentences,
)
from measured import assert_measured, feasible
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from course_lib._torch import tensors_in
from course_lib.budget import Rates, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.kinds import on_kind
from course_lib.budget.optimizers import OPTIMIZERS, class_and_settings
from course_lib.memory import MemoryMeter, cast, symbolic
from course_lib.models import seed_generators

# ---- the same gradient


def gradients_of(make, batch, recipe, **options):
    """What the optimizer saw, and the mean loss."""
    model, optimizer = build(make, replace(recipe, optimizer="sgd"), lr=0.0)
    names, seen = {p: name for name, p in model.named_parameters()}, {}

    def look(opt, *_):
        found = {
            names[p]: p.grad.clone()
            for g in opt.param_groups
            for p in g["params"]
            if p.grad is not None
        }
        assert not found.keys() & seen.keys()
        seen.update(found)

    optimizer.register_step_pre_hook(look)
    return seen, train_step(model, optimizer, batch, replace(recipe, optimizer="sgd"), **options)


def expected_of(make, batch, loss_sum=None):
    """The same by autograd alone, in float64."""
    model = make().double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    total, weight = loss_sum(model, batch) if loss_sum else model.loss_sum(batch)
    (total / weight).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, (
        total / weight
    ).item()


def assert_plain(make, batch, recipe, expected=None, **options):
    gradients, loss = expected or expected_of(make, batch)
    seen, result = gradients_of(make, batch, recipe, **options)
    assert seen.keys() == gradients.keys()
    for name, gradient in seen.items():
        assert_close(gradient.double(), gradients[name], rtol=2e-4, atol=1e-6)
    assert result.loss == pytest.approx(loss, rel=1e-5)


class Checkpointing(Decoder):
    """Its own checkpoint is around each block."""

    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for block in self.body["blocks"]:
            state = torch.utils.checkpoint.checkpoint(block, state, scale=0.3, use_reentrant=False)
        return state[0]


def compiled():
    model = Decoder()
    model.body["blocks"] = nn.ModuleList(
        torch.compile(block, backend="eager") for block in model.body["blocks"]
    )
    return model


SEGMENTS = Recipe(checkpoint="segments", segments=3)
OPTIMAL = Recipe(checkpoint="optimal", schedule_bytes=10**9)
DOWN = {"offload_activations": True, "min_bytes": 1000}


@pytest.mark.parametrize(
    "make", [partial(Encoder, dropout=0.2), partial(Decoder, dropout=0.2)], ids=["module", "F"]
)
def test_with_dropout_a_block_draws_the_same_numbers_again(make):
    def seen(recipe):
        torch.manual_seed(7)
        return gradients_of(make, sentences(), recipe)[0]

    plain = seen(Recipe())
    segments = {"checkpoint": "segments", "segments": 2}
    for keep in (
        {"checkpoint": "layers"},
        {"checkpoint": "selective"},
        segments,
        DOWN,
        {"head_chunk": 9},
    ):
        for name, gradient in seen(Recipe(**keep)).items():
            assert_close(gradient, plain[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_running_statistics_change_once_a_step(checkpoint):
    def stepped(recipe):
        model, optimizer = build(Pictures, recipe)
        for _ in range(2):
            train_step(model, optimizer, pictures(), recipe)
        return dict(model.named_buffers())

    plain, found = stepped(Recipe()), stepped(Recipe(checkpoint=checkpoint))
    for name, value in plain.items():
        assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert_plain(Pictures, pictures(), Recipe(checkpoint=checkpoint))


@pytest.mark.parametrize("kind", ["spectral norm", "average", "batch norm"])
def test_blocks_that_change_their_buffers_are_repeated_with_those_of_the_first_run_or_refused(kind):
    make, options, buffers = partial(averaged, kind), {"loss_sum": cube}, {}
    expected = expected_of(make, point(), cube)
    for recipe in (Recipe(), SEGMENTS, replace(SEGMENTS, segments=4, in_backward=True)):
        assert_plain(make, point(), recipe, expected, **options)
        model, optimizer = build(make, recipe)
        train_step(model, optimizer, point(), recipe, **options)
        assert_close(
            buffers.setdefault("plain", dict(model.named_buffers())), dict(model.named_buffers())
        )
    for keep in ("layers", "selective"):
        if kind == "batch norm":
            assert_plain(make, point(), Recipe(checkpoint=keep), expected, **options)
        else:
            with pytest.raises(
                ValueError,
                match=rf"^checkpoint must be 'none', [^\n]* buffer \(0\.[^\n]*, got '{keep}'$",
            ):
                gradients_of(make, point(), Recipe(checkpoint=keep), **options)


# ---- estimates


OF_PYTORCH = [
    Recipe(optimizer=name, update=update)
    for name in ("adam", "sgd", "momentum", "adafactor")
    for update in ("loop", "foreach", "fused")
    if (name, update) != ("adafactor", "fused")
]


def wide():
    return nn.Sequential(nn.Linear(128, 100, bias=False), nn.Linear(100, 1), nn.Linear(1, 4100))


def square(model, batch):
    return model(batch).square().sum(), len(batch)


ADAM8BIT = Recipe(optimizer="adam8bit")


def test_the_state_of_adam_in_8_bits_is_estimated_by_a_formula():
    guess = estimate(wide, partial(torch.ones, 4, 128), ADAM8BIT, loss_sum=square)
    large, tables = 2 * (12_800 + 4 * 50) + 2 * 2 * (4_100 + 4 * 17), 2 * 256 * 4
    assert guess.at_peak["optimizer"] == large + tables + 8 * 101 and "by a formula" in str(guess)


def test_a_step_of_adam_in_8_bits_is_that_of_bitsandbytes():
    classes = pytest.importorskip("bitsandbytes").optim
    expected, (model, optimizer) = wide(), build(wide, ADAM8BIT)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        p.data.copy_(q.data)
    plain, batch = classes.AdamW8bit(expected.parameters(), lr=1e-3), torch.randn(4, 128)
    for _ in range(3):
        plain.zero_grad()
        total, weight = square(expected, batch)
        (total / weight).backward()
        plain.step()
        train_step(model, optimizer, batch, ADAM8BIT, loss_sum=square)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize(
    "fields", [{}, {"in_backward": True}, {"micro_batches": 2}, {"precision": "bf16"}], ids=str
)
def test_bytes_of_adam_in_8_bits_are_those_that_are_measured(fields):
    pytest.importorskip("bitsandbytes")
    recipe, make_batch = replace(ADAM8BIT, **fields), partial(torch.ones, 4, 128)
    for step, options in (
        ((wide, make_batch, recipe), {"loss_sum": square}),
        ((Encoder, sentences, recipe), {}),
    ):
        guess, done = (f(*step, **options) for f in (estimate, run))
        assert (done.meter.peak_bytes, done.meter.at_peak()) == (guess.peak_bytes, guess.at_peak)


class Tagger(nn.Module):
    """A table by one of the classes of bitsandbytes, and a layer whose moments have 8 bits."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.layer = kind(1000, 100), nn.Linear(100, 100)

    def loss_sum(self, tokens):
        return self.layer(self.table(tokens)).square().sum(), len(tokens)


@pytest.fixture
def own_registrations(monkeypatch):
    """Keep registrations with bitsandbytes, which last as long as the process, from other tests."""
    optim = pytest.importorskip("bitsandbytes").optim
    manager = optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "module_weight_config_triple", [])
    monkeypatch.setattr(manager, "index2config", {})
    monkeypatch.setattr(manager, "pid2config", {})


@pytest.mark.parametrize("fields", [{}, {"in_backward": True}], ids=str)
@pytest.mark.parametrize("kind", ["StableEmbedding", "Embedding"])
def test_tables_of_bitsandbytes_keep_their_moments_in_fp32(kind, fields, own_registrations):
    make_model = partial(Tagger, getattr(pytest.importorskip("bitsandbytes").nn, kind))
    step = make_model, lambda: torch.arange(40).view(4, 10), replace(ADAM8BIT, **fields)
    guess, done = estimate(*step), run(*step)
    assert (done.meter.peak_bytes, done.meter.at_peak()) == (guess.peak_bytes, guess.at_peak)
    assert guess.at_peak["optimizer"] > 2 * 4 * 100_000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optim_bits": 32}, 8 * 5000),
        ({"min_8bit_size": 5001}, 8 * 5000),
        ({}, 2 * (5000 + 4 * 20)),
    ],
    ids=str,
)
def test_registered_weights_are_estimated_as_registered(settings, expected, monkeypatch):
    registered = []
    manager = types.SimpleNamespace(module_weight_config_triple=registered)
    stand_in = types.SimpleNamespace(get_instance=lambda: manager)
    monkeypatch.setitem(
        sys.modules, "bitsandbytes.optim", types.SimpleNamespace(GlobalOptimManager=stand_in)
    )

    def make_model():
        model = nn.Linear(50, 100, bias=False)
        registered.append((model, "weight", settings))
        return model

    guess = estimate(make_model, partial(torch.ones, 4, 50), ADAM8BIT, loss_sum=square)
    tables = 0 if settings else 2 * 256 * 4
    assert guess.at_peak["optimizer"] == expected + tables


def test_adam_in_8_bits_is_not_run_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    make_batch = partial(torch.ones, 4, 128)
    for attempt in (
        lambda: run(wide, make_batch, ADAM8BIT, loss_sum=square),
        lambda: build(wide, ADAM8BIT),
    ):
        with pytest.raises(
            ValueError, match=r"^optimizer must not be 'adam8bit' [^\n]*; pip install [^\n]+$"
        ):
            attempt()


@pytest.mark.parametrize("recipe", OF_PYTORCH, ids=str)
def test_each_optimizer_steps_as_pytorchs_does(recipe):
    classes = {"adam": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    options = {"momentum": 0.9} if recipe.optimizer == "momentum" else {}
    expected = Encoder()
    plain = classes.get(recipe.optimizer, torch.optim.SGD)(
        expected.parameters(), lr=1e-2, **options
    )
    model, optimizer = build(Encoder, recipe, lr=1e-2)
    for group in (*plain.param_groups, *optimizer.param_groups):
        if recipe.optimizer == "adam":
            # gradients that are zero but for rounding, such as those of keys' biases, stay small
            group["eps"] = 1e-3
    for _ in range(3):
        plain.zero_grad()
        total, weight = expected.loss_sum(sentences())
        (total / weight).backward()
        plain.step()
        train_step(model, optimizer, sentences(), recipe)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_updating_all_at_once_takes_temporaries_and_sums_in_fp32_take_four_bytes_a_parameter():
    loop, foreach = (
        estimate(Encoder, partial(sentences, 1), Recipe(update=way)) for way in ("loop", "foreach")
    )
    size = sum(p.nbytes for p in Encoder().parameters())
    assert foreach.phase_peaks["optimizer"] >= loop.phase_peaks["optimizer"] + 0.5 * size
    half = Recipe(precision="bf16", optimizer="sgd", micro_batches=2)
    plain, summed = (
        estimate(Encoder, partial(sentences, 2), replace(half, accumulate=way))
        for way in (None, "fp32")
    )
    # 4 bytes in place of 2
    assert summed.phase_peaks["backward"] - plain.phase_peaks["backward"] == size // 2


def test_a_model_left_as_it_is_has_no_master_weights():
    def make():
        return cast(Decoder(), torch.bfloat16)

    recipe = Recipe(precision=None)
    model, optimizer = build(make, recipe, state=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and type(
        optimizer
    ) is torch.optim.AdamW
    plain, mastered = (
        estimate(make, sentences, each) for each in (recipe, replace(recipe, precision="bf16"))
    )
    assert plain.peak_bytes < mastered.peak_bytes


# ---- models that are known by what they have: a config, and dicts with labels


def mean_of(make, batch):
    """What the plain step's loss and gradients are."""
    model = make().double()
    model.config.use_cache = False
    loss = model(**batch)["loss"]
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.args[0])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(micro_batches=6),
        Recipe(micro_batches=2, checkpoint="layers"),
        Recipe(in_backward=True),
    ],
)
def test_labels_are_weighed_as_the_model_counts_them(make, recipe):
    batch = labelled(make)
    if make.args != ("classes",) and recipe.micro_batches == 6:
        batch["labels"][2] = IGNORED  # a micro-batch in which nothing counts
    assert_plain(make, batch, recipe, mean_of(make, batch))


@pytest.mark.parametrize("chunk", [1, 16, 1000])
@pytest.mark.parametrize("make", KINDS[:2], ids=lambda make: make.args[0])
def test_a_chunked_head_keeps_the_loss_that_the_model_computes(make, chunk):
    batch = labelled(make)
    for pieces in (1, 2):
        assert_plain(
            make, batch, Recipe(head_chunk=chunk, micro_batches=pieces), mean_of(make, batch)
        )


def test_a_chunked_head_never_has_all_logits_at_once():
    make, few = KINDS[0], {"vocabulary": 0}
    plain, chunked = (
        estimate(make, partial(labelled, make, 64), Recipe(**o)) for o in ({}, {"head_chunk": 8})
    )
    assert few and plain.peak_bytes - chunked.peak_bytes > 64 * LENGTH * VOCABULARY * 4


class DroppingHead(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


def test_a_chunked_head_draws_the_same_numbers_again():
    def make():
        model = Encoder()
        with seed_generators(9):
            model.head = DroppingHead(WIDTH, VOCABULARY)
        return model

    def seen(recipe):
        torch.manual_seed(7)
        return gradients_of(make, sentences(), recipe)[0]

    plain = seen(Recipe())
    # one chunk, which draws as the whole does
    for name, gradient in seen(Recipe(head_chunk=1000)).items():
        assert_close(gradient, plain[name], rtol=1e-4, atol=1e-7)


def test_a_chunked_head_has_its_loss_in_the_dtype_that_the_model_converts_logits_to():
    half = Recipe(precision="bf16")
    plain, chunked = (
        gradients_of(Decoder, sentences(), replace(half, head_chunk=n))[1].loss for n in (None, 7)
    )
    assert chunked == pytest.approx(plain, rel=1e-5)


def test_the_first_blocks_and_the_products_that_are_kept_take_fewer_flops_and_more_bytes():
    many = partial(sentences, 60)
    keeps = [
        {"checkpoint": "layers"},
        {"checkpoint": "layers", "first_blocks": 2},
        {"checkpoint": "layers", "first_blocks": 1, "blocks": "body.blocks.*"},
        {},
    ]
    found = [estimate(Decoder, many, Recipe(**keep)) for keep in keeps]
    assert [e.flops for e in found] == sorted({e.flops for e in found}, reverse=True)
    saved = found[-1].flops - found[-2].flops, found[0].flops - found[-1].flops
    assert saved[1] == -3 * saved[0]  # one block of three is as good as another
    peaks = [e.phase_peaks["forward"] for e in found]
    assert peaks == sorted(set(peaks))
    selective = estimate(Decoder, many, Recipe(checkpoint="selective"))
    assert (
        selective.flops < found[0].flops and peaks[0] < selective.phase_peaks["forward"] < peaks[-1]
    )


def test_switches_and_caches_are_as_before_afterwards_also_after_an_error():
    model, optimizer = build(KINDS[0], Recipe())
    head, block = model.decoder.head, model.decoder.body["blocks"][0]
    recipe = Recipe(attention="flash", checkpoint="layers", head_chunk=8, micro_batches=2)
    batch = labelled(KINDS[0])
    assert train_step(model, optimizer, batch, recipe).stepped
    for wrong in (
        {**batch, "labels": None},
        {**batch, "input_ids": batch["input_ids"] + VOCABULARY},
    ):
        with pytest.raises((ValueError, IndexError)):
            train_step(model, optimizer, wrong, recipe)
    assert model.config.use_cache and model.config._attn_implementation == "eager"
    assert "forward" not in vars(head) and "forward" not in vars(block)
    assert not torch.overrides._get_current_function_mode_stack()


# ---- a model's own chain


LEAST = {"checkpoint": "optimal", "schedule_bytes": 1}  # `feasible` gives more
CHAINS = {
    "optimal": LEAST,
    "optimal in chunks": LEAST | {"head_chunk": 9},
    "optimal, two micro-batches": LEAST | {"head_chunk": 9, "micro_batches": 2},
    "optimal in backward": LEAST | {"in_backward": True},
    "segments": {"checkpoint": "segments", "segments": 2, "head_chunk": 9},
    "offloaded segments": {"checkpoint": "segments", "segments": 3, **DOWN},
    "no chain": {"head_chunk": 9},
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_model_with_stages_of_its_own_gets_the_plain_gradient_in_fewer_bytes(kind):
    recipe = feasible(Tower, sentences, Recipe(**CHAINS[kind]))
    assert_plain(Tower, sentences(), recipe)
    guess = estimate(Tower, sentences, recipe)
    plain = Recipe(in_backward=recipe.in_backward, micro_batches=recipe.micro_batches)
    assert guess.peak_bytes < estimate(Tower, sentences, plain).peak_bytes


def test_stages_that_run_again_draw_the_same_numbers():
    make, seen = partial(Tower, dropout=0.4), []
    for kind in ("no chain", "optimal", "offloaded segments"):
        recipe = feasible(make, sentences, Recipe(**CHAINS[kind]))
        torch.manual_seed(7)
        seen.append(gradients_of(make, sentences(), recipe)[0])
    for found in seen[1:]:
        assert_close(found, seen[0], rtol=1e-4, atol=1e-7)


def test_a_search_takes_the_stages_that_a_model_gives():
    base, rates = Recipe(in_backward=True), Rates(1e9, 2e9, 1.0)  # moving takes for ever
    recipe = feasible(Tower, sentences, Recipe(**CHAINS["optimal in backward"]))
    budget = estimate(Tower, sentences, recipe).peak_bytes
    found = fit(Tower, sentences, budget, base=base, rates=rates, progress=False)
    own = [each.recipe for each in found if each.recipe.checkpoint in ("optimal", "segments")]
    assert {recipe.checkpoint for recipe in own} == {"optimal", "segments"}
    for each in own:
        assert assert_measured(Tower, sentences, each).peak_bytes <= budget


class Doubled(Tower):
    """Its loss is newer than the stages."""

    def loss_sum(self, batch):
        total, weight = super().loss_sum(batch)
        return 2 * total, weight


def put_on():
    model = Tower()
    model.loss_sum = lambda batch: (2 * Tower.loss_sum(model, batch)[0], 1)
    return model


def hooked():
    model = Tower()
    model.register_forward_hook(lambda module, inputs, output: output)
    return model


def attribute():
    model = Tower()
    model.stages = 4
    return model


@pytest.mark.parametrize(
    "make", [Doubled, put_on, hooked, attribute], ids=lambda make: make.__name__
)
def test_stages_that_are_not_the_models_loss_any_more_are_not_run(make):
    for fields in (CHAINS["segments"], {"checkpoint": "optimal", "schedule_bytes": 10**9}):
        with pytest.raises(
            ValueError,
            match=r"^blocks must be a name or a list of names, with wildcards, for a model"
            r" .*, got None$",
        ):
            gradients_of(make, sentences(), Recipe(**fields))


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            lambda: [],  # noqa: PIE807 (it takes no batch)
            r"^Tower.stages must be callable with \(batch\), .*, got .* with the arguments \(\)$",
        ),
        (lambda batch: [], r"^the number of stages must be a whole number, at least 1, got 0"),
        (lambda batch: [nn.Linear(3, 3), 7], r"^stage 1 must be a module or a function, got 7"),
        (
            lambda batch: [nn.Linear(3, 3)],
            r"^segments must be at most 0, .* Tower.stages returns .*, got 2$",
        ),
    ],
    ids=["without a batch", "none", "a number", "one"],
)
def test_stages_that_are_no_chain_are_refused_in_one_sentence(stages, told):
    model, optimizer = build(Tower, Recipe())
    model.stages = stages
    with pytest.raises((TypeError, ValueError), match=told):
        train_step(model, optimizer, sentences(), Recipe(checkpoint="segments", segments=2))
    with pytest.raises(
        ValueError, match=r"^loss_sum must be None when checkpoint='segments' .*, got a function"
    ):
        segments = Recipe(checkpoint="segments", segments=2)
        train_step(model, optimizer, sentences(), segments, loss_sum=Tower.loss_sum)


# ---- what is refused


class Masked(Decoder):
    """Attention as a model with padding calls it."""

    def hidden(self, tokens):
        x = self.embedding(tokens)[:, None]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.0)[:, 0]


class Dropping(Decoder):
    def hidden(self, tokens):
        x = self.embedding(tokens)[:, None]
        return F.scaled_dot_product_attention(x, x, x, None, 0.1, True)[:, 0]


class Smoothed(Decoder):
    def loss_sum(self, batch):
        logits = self.logits(batch["tokens"]).flatten(0, 1)
        return (
            F.cross_entropy(
                logits, batch["tokens"].flatten(), reduction="sum", label_smoothing=0.1
            ),
            1,
        )


class Unseen(Decoder):
    def loss_sum(self, batch):
        self.logits(batch["tokens"])
        return self.hidden(batch["tokens"]).square().sum(), 1


class Branching(Decoder):
    def loss_sum(self, batch):
        total, weight = super().loss_sum(batch)
        return (total * 2 if total > 1 else total), weight


class Looking(Decoder):
    """Something else than the next block uses what a block returns."""

    def hidden(self, tokens):
        first = self.body["blocks"][0]((self.embedding(tokens), 0), scale=0.3)
        state = self.body["blocks"][1](first, scale=0.3)
        return self.body["blocks"][2](state, scale=0.3)[0] + first[0]


class Skipping(Decoder):
    def hidden(self, tokens):
        return self.body["blocks"][0]((self.embedding(tokens), 0), scale=0.3)[0]


class Reversed(Decoder):
    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for block in reversed(self.body["blocks"]):
            state = block(state, scale=0.3)
        return state[0]


class Inside(torch.autograd.Function):
    """Runs a block without gradients, and by hand once more in backward."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.x = block, x.detach()
        return block((x, 0), scale=0.3)[0]

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            state = ctx.block.forward_of_all((x, 0), scale=0.3)
        torch.autograd.backward(state[0], gradient)
        return None, x.grad


class Reversible(Decoder):
    """Its blocks keep nothing anyway, whatever is put around them."""

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for block in self.body["blocks"]:
            block.forward_of_all = partial(type(block).forward, block)
            x = Inside.apply(block, x)
        return x


class Apart(Decoder):
    """Does not run its blocks by calling them."""

    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for block in self.body["blocks"]:
            state = type(block).forward(block, state, scale=0.3)
        return state[0]


class Scaled(Decoder):
    """The blocks' scale is trained."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for block in self.body["blocks"]:
            state = block(state, scale=self.scale)
        return state[0]


@pytest.mark.parametrize(
    ("make", "recipe", "told"),
    [
        (
            Pictures,
            SEGMENTS,
            "the first argument of stages.1 must be the result of stages.0, got another tensor",
        ),
        (Looking, SEGMENTS, "only the next block may use the result of body.blocks.0"),
        (Skipping, SEGMENTS, "body.blocks.1 was not called"),
        (Reversed, SEGMENTS, "body.blocks.2 must be called once, directly after body.blocks.1"),
        (Scaled, SEGMENTS, "scale must not require gradients, got a .* that does"),
        (Decoder, replace(SEGMENTS, segments=4), "segments must be between 1 and 3, .*, got 4"),
        (
            Checkpointing,
            OPTIMAL,
            "schedule must be a Schedule for .*, got a function, .*body.blocks.0 runs inside them",
        ),
        (
            Decoder,
            replace(SEGMENTS, offload_activations=True),
            "offload_activations cannot be combined with checkpoint='segments'",
        ),
        (
            Masked,
            Recipe(attention="flash"),
            (
                r"attn_mask of F.scaled_dot_product_attention must be None .* Tensor of"
                r" shape \(12, 12\)"
            ),
        ),
        (
            Dropping,
            Recipe(attention="flash"),
            r"dropout_p of F.scaled_dot_product_attention must be 0.0 .*, got 0.1",
        ),
        (
            Pictures,
            Recipe(attention="flash"),
            (
                r"attention must be 'standard' for a Pictures"
                r" .*scaled_dot_product_attention, got 'flash'"
            ),
        ),
        (partial(TinyForCausalLM, "causal"), Recipe(attention="eager"), None),
        (
            Decoder,
            Recipe(attention="sdpa"),
            "attention must be 'standard', .* or None for a Decoder .*, got 'sdpa'",
        ),
        (
            partial(TinyForCausalLM, "capped"),
            Recipe(head_chunk=8),
            "head_chunk must be None .*, got 8 for a .*, which applies .*div",
        ),
        (Smoothed, Recipe(head_chunk=8), "head_chunk must be None .*, got 8 .* label_smoothing"),
        (
            Unseen,
            Recipe(head_chunk=8),
            "head_chunk must be None for a model that does not pass its logits .*, got 8",
        ),
        (
            partial(TinyForCausalLM, "more"),
            Recipe(micro_batches=2),
            "micro_batches must be 1, because the loss of TinyForCausalLM .*, got 2",
        ),
        (
            partial(Tiny, "causal"),
            Recipe(micro_batches=2),
            "micro_batches must be 1 for a Tiny, got 2",
        ),
        (Pictures, Recipe(micro_batches=2), "micro_batches must be 1 .* BatchNorm .*, got 2"),
        (
            Decoder,
            Recipe(checkpoint="layers", blocks="layers.*"),
            "blocks must match .*, got 'layers.\\*'",
        ),
        (
            Decoder,
            Recipe(checkpoint="layers", blocks="*"),
            "blocks must match modules of one type .*, got '\\*', which matches Embedding, Linear",
        ),
        (
            Decoder,
            Recipe(checkpoint="layers", first_blocks=4),
            "first_blocks must be between 1 and 3, .*, got 4",
        ),
        (
            Reversible,
            Recipe(checkpoint="layers"),
            (
                r"none of the checkpointed blocks \(body.blocks.0 to body.blocks.2\)"
                r" ran with gradients"
            ),
        ),
        (
            Apart,
            Recipe(checkpoint="selective", micro_batches=2),
            (
                r"none of the checkpointed blocks \(body.blocks.0 to body.blocks.2\)"
                r" ran with gradients"
            ),
        ),
        (
            Apart,
            Recipe(checkpoint="layers", first_blocks=1, in_backward=True),
            r"none of the checkpointed blocks \(body.blocks.0\) ran with gradients",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_model_is_said_in_one_sentence(make, recipe, told):
    make_batch = {Pictures: pictures}.get(make, sentences)
    make_batch = partial(labelled, make) if getattr(make, "args", None) else make_batch
    model, optimizer = build(
        make,
        replace(
            recipe,
            attention=None,
            checkpoint="none",
            blocks=None,
            first_blocks=None,
            head_chunk=None,
            segments=None,
            schedule_bytes=None,
        ),
    )
    before = [p.clone() for p in model.parameters()]
    for attempt in (
        lambda: train_step(model, optimizer, make_batch(), recipe),
        lambda: estimate(make, make_batch, recipe),
        lambda: run(make, make_batch, recipe),
    ):
        if told is None:
            assert attempt()
        else:
            with pytest.raises(ValueError, match=rf"^{told}[^\n]*$"):
                attempt()
            assert all(map(torch.equal, before, model.parameters()))


def test_control_flow_that_looks_at_data_is_said_with_its_operator():
    with pytest.raises(
        ValueError, match=r"^the step reads values of its data \(aten._local_scalar_dense"
    ):
        estimate(Branching, sentences, Recipe())
    assert run(Branching, sentences, Recipe()).result.stepped


def test_a_mask_that_pytorchs_transformer_cannot_ask_is_refused_with_the_way_out():
    def make():
        return Translator(lambda n: torch.randn(n, n))

    line = Translator.loss.__code__.co_firstlineno + 2
    where = f"foreign_models.py, line {line}, in loss,"
    told = rf"^the step reads values [^\n]*{where.rstrip(',')},[^\n]* Pass is_causal \("
    with pytest.raises(ValueError, match=told):
        estimate(make, lambda: torch.randn(2, 6, 16), Recipe())


class Buffered(nn.Linear):
    def loss(self, x):
        return (self(x) * torch.frombuffer(bytearray(4 * x.shape[1]), dtype=x.dtype)).mean()


def test_a_tensor_of_other_memory_is_not_said_to_have_been_there_before_alone():
    with pytest.raises(
        ValueError, match=r"without an operator \(as by torch.frombuffer\) at [^\n]* in loss"
    ):
        estimate(partial(Buffered, 4, 4), lambda: torch.randn(2, 4), Recipe())


def test_frozen_batch_norm_takes_micro_batches():
    class Frozen(Pictures):
        def train(self, mode=True):
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            return self

    def make():
        return Frozen().train()

    assert_plain(make, pictures(), Recipe(micro_batches=3, checkpoint="layers"))


# ---- the step


def test_gradients_are_clipped_once_over_all_micro_batches():
    expected, _ = expected_of(Decoder, sentences())
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    recipe = Recipe(micro_batches=3, checkpoint="layers")
    seen, result = gradients_of(Decoder, sentences(), recipe, max_norm=0.1)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, gradient in seen.items():
        assert_close(gradient.double(), expected[name] * 0.1 / norm, rtol=1e-3, atol=1e-7)
    with pytest.raises(
        ValueError, match=r"^max_norm must be None when in_backward is True, [^\n]*, got 0\.1$"
    ):
        gradients_of(Decoder, sentences(), Recipe(in_backward=True), max_norm=0.1)


@pytest.mark.parametrize(
    "recipe", [Recipe(micro_batches=2), Recipe(in_backward=True, checkpoint="layers")], ids=str
)
def test_parameter_groups_and_schedulers_keep_their_rates(recipe):
    def make():
        model = Decoder()
        head, rest = (
            model.head.weight,
            [p for p in model.parameters() if p is not model.head.weight],
        )
        optimizer = torch.optim.AdamW(
            [{"params": rest, "lr": 1e-2}, {"params": [head], "weight_decay": 0.0}], eps=1e-3
        )
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        )

    plain, optimizer, scheduler = make()
    model, own, own_scheduler = make()
    for _ in range(3):
        total, weight = plain.loss_sum(sentences())
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        train_step(model, own, sentences(), recipe)
        own_scheduler.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-5)


# ---- Hugging Face models, from configurations


def config_of(name, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    small = {"vocab_size": VOCABULARY, **sizes}
    kinds = {
        "LlamaForCausalLM": {**small, "num_key_value_heads": 2},
        "GPT2LMHeadModel": {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "BertForMaskedLM": {
            **small,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "T5ForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "ViTForImageClassification": {
            **sizes,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    }
    made = getattr(transformers, name)
    return made, made.config_class(**kinds[name], **options)


def hugging_face(name, **options):
    made, config = config_of(name, **options)
    with seed_generators(6):
        return made(config).train()


def arguments(name, padded=True):
    if name.startswith("ViT"):
        return {
            "pixel_values": torch.linspace(-1, 1, 6 * 3 * 16 * 16).view(6, 3, 16, 16),
            "labels": torch.arange(6) % 5,
        }
    batch = sentences()
    labels = torch.where(
        batch["labels"] == IGNORED, IGNORED, (7 * batch["tokens"] + 3) % VOCABULARY
    )
    mask = {"attention_mask": (batch["labels"] != IGNORED).long()} if padded else {}
    return {"input_ids": batch["tokens"], "labels": labels, **mask}


HUGGING_FACE = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
]


def plain_of(name, batch):
    model = hugging_face(name).double()
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_have_the_plain_gradient_in_every_recipe(name):
    batch = arguments(name)
    expected = plain_of(name, batch)
    recipes = [
        Recipe(),
        Recipe(micro_batches=3, checkpoint="layers"),
        Recipe(micro_batches=6, checkpoint="selective", first_blocks=1),
        Recipe(attention="eager", in_backward=True),
        Recipe(**DOWN),
        *(
            []
            if name.startswith("T5")
            else [Recipe(checkpoint="segments", segments=2, micro_batches=2)]
        ),
    ]
    if not name.startswith("ViT"):
        recipes += [
            Recipe(head_chunk=16, micro_batches=2),
            Recipe(head_chunk=7, checkpoint="layers"),
        ]
    for recipe in recipes:
        assert_plain(partial(hugging_face, name), batch, recipe, expected)


@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if not name.startswith("T5")])
def test_hugging_face_models_take_flash_attention_without_masks_and_refuse_it_with_them(name):
    make, batch = partial(hugging_face, name), arguments(name, padded=False)
    assert_plain(
        make,
        batch,
        Recipe(attention="flash", checkpoint="layers", micro_batches=2),
        plain_of(name, batch),
    )
    if "input_ids" in batch:
        with pytest.raises(
            ValueError,
            match=r"^attn_mask of F\.scaled_dot_product_attention must be None [^\n]*, got ",
        ):
            gradients_of(make, arguments(name), Recipe(attention="flash"))


def test_a_switch_that_refuses_is_named():
    make = partial(hugging_face, "T5ForConditionalGeneration")
    blocks = ("encoder.block.*", "decoder.block.*")
    assert gradients_of(make, arguments("T5"), Recipe(checkpoint="layers", blocks=blocks))[
        1
    ].stepped
    # a bias as its mask
    with pytest.raises(
        ValueError, match=r"^attn_mask of \S+ must be None when attention is 'flash', got"
    ):
        gradients_of(make, arguments("T5", padded=False), Recipe(attention="flash"))


class OneAttention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused

    def loss_sum(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        explicit = (q @ k.mT / 8**0.5).softmax(-1) @ v if not self.fused else None
        return (
            F.scaled_dot_product_attention(q, k, v) if self.fused else explicit
        ).square().sum(), len(x)


def test_fused_attention_counts_its_products_on_a_cpu_too():
    def points():
        return torch.randn(3, LENGTH, WIDTH)

    fused, explicit = (
        estimate(partial(OneAttention, fused), points, Recipe()).flops for fused in (True, False)
    )
    with FlopCounterMode(display=False) as counter:
        OneAttention(False).loss_sum(points())[0].backward()
    assert explicit == counter.get_total_flops()
    assert fused - explicit == 2 * 3 * WIDTH * LENGTH**2  # its backward makes the scores again


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (5, 9), (9, 5)])
@pytest.mark.parametrize("symbolically", [False, True])
def test_causal_attention_counts_the_scores_that_its_queries_see(queries, keys, symbolically):
    batch, heads, width = 2, 3, 16
    seen = int(torch.ones(queries, keys).tril().sum())
    with symbolic() if symbolically else nullcontext():
        q = torch.randn(batch, heads, queries, width, requires_grad=True)
        k = torch.randn(batch, heads, keys, width, requires_grad=True)
        with MemoryMeter() as meter:
            F.scaled_dot_product_attention(q, k, k, is_causal=True).sum().backward()
    # Two products in forward and five in backward, each of which has 2 * width FLOPs per score.
    assert meter.flops == batch * heads * 7 * 2 * width * seen


class Chained(nn.Module):
    """Equal blocks between others; a chain, but for where `reach` uses what the first returned."""

    def __init__(self, reach=False):
        super().__init__()
        self.first, self.last, self.reach = nn.Linear(8, 8), nn.Linear(8, 8), reach
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(5)
        )

    def loss(self, x):  # a mean, so that it takes one micro-batch
        x = first = self.blocks[0](self.first(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.last(x + first if self.reach else x).square().mean()


def test_a_schedule_is_found_for_blocks_that_form_a_chain_and_for_no_others():
    def points():
        return torch.randn(300, 8)

    base, rates = Recipe(optimizer="sgd"), Rates(1e9, 2e9, 1.0)  # moving takes for ever
    known = {
        keep: estimate(Chained, points, replace(base, checkpoint=keep))
        for keep in ("none", "layers")
    }
    budget = (known["none"].peak_bytes + known["layers"].peak_bytes) // 2
    options = {"base": base, "rates": rates, "tier": "file", "progress": False}
    found = {e.recipe.checkpoint: e for e in fit(Chained, points, budget, **options)}
    best = found["optimal"]
    assert best.peak_bytes <= budget and best.flops > known["none"].flops
    assert best == estimate(Chained, points, best.recipe)
    assert run(Chained, points, best.recipe).meter.peak_bytes == best.peak_bytes
    reaching = partial(Chained, True)
    with pytest.raises(ValueError, match="form a chain"):
        estimate(reaching, points, replace(base, checkpoint="optimal", schedule_bytes=10**9))
    found = fit(reaching, points, budget, **options)
    assert "optimal" not in {e.recipe.checkpoint for e in found}


def test_compiled_blocks_take_segments_and_no_schedule_that_is_found_by_a_copy():
    model, optimizer = build(compiled, Recipe())
    assert train_step(model, optimizer, sentences(), SEGMENTS).stepped
    with pytest.raises(
        ValueError, match=r"^body\.blocks\.0 must run the forward of its class, got [^\n]+$"
    ):
        train_step(model, optimizer, sentences(), OPTIMAL)


def test_on_cuda_the_update_is_foreach_where_nobody_says_otherwise():
    def taken(kind, **fields):
        found = estimate(Encoder, partial(sentences, 1), Recipe(**fields), kind=kind)
        assert found.recipe == Recipe(**fields) and found.kind == kind
        return found.phase_peaks

    for fields in ({}, {"precision": "bf16"}, {"in_backward": True}):
        assert taken("cpu", **fields) == taken("cpu", update="loop", **fields)
        assert taken("cuda", **fields) == taken("cuda", update="foreach", **fields)
        assert taken("cuda", update="loop", **fields) != taken("cuda", **fields)
    assert taken("cuda")["optimizer"] > taken("cpu")["optimizer"]
    found = estimate(Encoder, partial(sentences, 1), Recipe(), kind="cuda")
    assert found.trace().phase_peaks() == found.phase_peaks
    # PyTorch itself updates these one after the other
    adafactor = {"optimizer": "adafactor"}
    assert taken("cuda", **adafactor) == taken("cuda", update="loop", **adafactor)
    with pytest.raises(ValueError, match="kind must be 'cpu' or 'cuda', got 'gpu'"):
        estimate(Encoder, partial(sentences, 1), Recipe(), kind="gpu")


@pytest.mark.parametrize(
    "optimizer", [name for name, row in OPTIMIZERS.items() if row.load_base is None]
)
def test_what_pytorch_updates_all_at_once_on_cuda_is_what_its_own_rule_says(optimizer, monkeypatch):
    """The rule asks for the device of the parameters, and is told that any is CUDA."""
    base, settings = class_and_settings(optimizer, None)
    rule = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(rule, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    ran = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.randn(3, requires_grad=True)
    weight.grad = torch.ones(3)
    with Watch():
        base([weight], lr=1e-3, **settings).step()
    together = any("_foreach_" in name for name in ran)
    assert together == (on_kind(Recipe(optimizer=optimizer), "cuda").update == "foreach")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_and_layer_norm_keep_on_cuda_what_the_table_says(dtype):
    """Symbolic tensors of CUDA go PyTorch's own way there, as far as no gradient is asked for."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(t.dtype for t in tensors_in(result))
            return result

    dtypes = {}
    for device in ("cpu", "cuda"):
        with symbolic(), torch.no_grad():
            x = torch.empty(4, 8, device=device, dtype=dtype)
            for operator in (lambda x=x: F.dropout(x, 0.1), lambda x=x: F.layer_norm(x, (8,))):
                made: list = []
                with Watch():
                    operator()
                dtypes[device, len(dtypes) % 2] = made
    assert torch.bool in dtypes["cuda", 0] and torch.bool not in dtypes["cpu", 0]
    assert dtypes["cpu", 1][-1] == dtype and dtypes["cuda", 1][-1] == torch.float32
