"""course_lib.budget: every recipe's gradient is the plain one's, estimates are what is measured,
and what fits fits."""

import copy
import dataclasses
import gc
import inspect
import itertools
import math
import pickle
import resource
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from measured import assert_measured
from pairwise import rows
from properties import given, settings, st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib._torch import is_symbolic
from course_lib.budget import (
    RATES,
    InfeasibleBudget,
    Rates,
    Recipe,
    build,
    estimate,
    fit,
    knowledge,
    run,
    train_step,
)
from course_lib.budget.bounds import floor_bytes, least_seconds
from course_lib.budget.candidates import Search
from course_lib.budget.knowledge import EstimateCache
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.refine import refine
from course_lib.budget.show import added_techniques, steps_to
from course_lib.budget.techniques import APPLIED, TECHNIQUES, Technique
from course_lib.budget.techniques.attention import ATTENTIONS
from course_lib.budget.techniques.checkpoints import CHECKPOINTS
from course_lib.budget.techniques.micro_batches import counts_allowed
from course_lib.budget.techniques.technique import choice
from course_lib.labels import chinese
from course_lib.memory import MemoryBudgetExceeded, symbolic
from course_lib.models import Attention, Decoder, DecoderLayer, random_tokens
from course_lib.offload import DiskStore, SymbolicStore, Traffic
from course_lib.offload.device import Cuda, Device
from course_lib.schedule import Chain

TINY = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 3, "sequence": 24}


def tiny(**options):
    return Decoder(**{**TINY, **options})


def tiny_batch(samples=5, seed=0):
    return random_tokens(samples, TINY["sequence"], TINY["vocabulary"], seed=seed)


class Regression(nn.Module):
    """No decoder: all that it has is a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = 3  # a name that a decoder uses otherwise
        self.net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1))

    def loss(self, batch):
        return F.mse_loss(self.net(batch["x"]).squeeze(-1), batch["y"])


def squares(model, batch):
    return (model.net(batch["x"]).squeeze(-1) - batch["y"]).square().sum(), len(batch["y"])


class Summing(Regression):
    loss_sum = squares


def points():
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in (("x", (6, 8)), ("y", (6,)))
    }


def symbolic_points():
    return {"x": torch.randn(6, 8), "y": torch.randn(6)}


# ---- recipes


def consistent(fields):
    """Fields that go together, from any."""
    fields["segments"] = fields["segments"] if fields["checkpoint"] == "segments" else None
    fields["schedule_bytes"] = (
        fields["schedule_bytes"] if fields["checkpoint"] == "optimal" else None
    )
    fields["offload_activations"] &= fields["checkpoint"] not in ("selective", "optimal")
    fields["in_backward"] &= fields["micro_batches"] == 1
    if fields["checkpoint"] not in ("layers", "selective"):
        fields["blocks"] = fields["first_blocks"] = None
    fields["accumulate"] = None if fields["in_backward"] else fields["accumulate"]
    row = OPTIMIZERS[fields["optimizer"]]
    fields["update"] = fields["update"] if fields["update"] in row.updates else "loop"
    fields["offload_optimizer"] = fields["offload_optimizer"] if row.can_offload_state else 0
    return fields


any_recipe = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["fp32", "bf16", None]),
        "optimizer": st.sampled_from(list(OPTIMIZERS)),
        "update": st.sampled_from(["loop", "foreach", "fused"]),
        "offload_optimizer": st.one_of(st.floats(0, 1), st.integers(0, 1)),
        "attention": st.sampled_from(["standard", "flash", "eager", "sdpa", None]),
        "checkpoint": st.sampled_from(CHECKPOINTS),
        "blocks": st.sampled_from([None, "layers.*", ("encoder.*", "decoder.*")]),
        "first_blocks": st.one_of(st.none(), st.integers(1, 99)),
        "segments": st.integers(1, 99),
        "schedule_bytes": st.integers(1, 10**12),
        "offload_activations": st.booleans(),
        "min_bytes": st.integers(0, 10**9),
        "prefetch": st.one_of(st.none(), st.integers(0, 99)),
        "in_flight": st.one_of(st.none(), st.integers(0, 99)),
        "page_bytes": st.integers(1, 10**9),
        "head_chunk": st.one_of(st.none(), st.integers(1, 9999)),
        "in_backward": st.booleans(),
        "accumulate": st.sampled_from([None, "fp32"]),
        "micro_batches": st.integers(1, 64),
    }
).map(consistent)


@settings(max_examples=50, deadline=None)
@given(fields=any_recipe)
def test_the_repr_of_a_recipe_makes_it_again_and_names_only_what_is_not_plain(fields):
    recipe = Recipe(**fields)
    assert eval(repr(recipe)) == recipe and hash(eval(repr(recipe))) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert {
        name: value for name, value in fields.items() if value != getattr(Recipe(), name)
    } == recipe.changed_fields()
    assert repr(recipe).count("=") == len(recipe.changed_fields())


def test_every_field_of_a_recipe_belongs_to_one_technique_which_needs_no_more_than_five_methods():
    owned = [name for technique in TECHNIQUES for name in technique.fields]
    assert sorted(owned) == sorted(field.name for field in dataclasses.fields(Recipe))
    for technique in TECHNIQUES:
        methods = [
            name for name, value in vars(type(technique)).items() if inspect.isfunction(value)
        ]
        five = {"conflict", "refuse", "apply", "words", "candidates"}
        assert {*five, "is_used"} >= set(methods)
    without = Recipe(attention=None)
    assert not any(technique.is_used(without) for technique in TECHNIQUES)
    # A technique that changes a model must say where it comes in the order.
    for technique in TECHNIQUES:
        assert technique in APPLIED or "apply" not in vars(type(technique))


class SavedDtype(Technique):
    """A second technique with hooks around the forward pass, for the test below."""

    fields = MappingProxyType({"saved_dtype": choice(None, "bf16")})
    around = "forward"
    hooks_saved_tensors = True


@dataclasses.dataclass(frozen=True, repr=False)
class RecipeWithSavedDtype(Recipe):
    saved_dtype: str | None = None


def test_recipe_refuses_two_techniques_with_saved_tensor_hooks(monkeypatch):
    monkeypatch.setattr("course_lib.budget.recipe.TECHNIQUES", (*TECHNIQUES, SavedDtype()))
    for alone in ({"saved_dtype": "bf16"}, {"offload_activations": True}):
        RecipeWithSavedDtype(**alone, checkpoint="layers")  # its hooks are inside the pass
    with pytest.raises(ValueError, match="offload_activations cannot be combined with saved_dtype"):
        RecipeWithSavedDtype(saved_dtype="bf16", offload_activations=True)


def test_pytorch_runs_only_the_innermost_saved_tensor_hooks():
    seen = []
    hooks = [partial(lambda name, x: seen.append(name) or x, name) for name in ("outer", "inner")]
    x = torch.ones(3, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(hooks[0], hooks[0]),
        torch.autograd.graph.saved_tensors_hooks(hooks[1], hooks[1]),
    ):
        y = x.exp()
    y.sum().backward()
    assert set(seen) == {"inner"}


def test_a_recipe_is_a_frozen_value_whose_default_is_the_plain_step():
    assert repr(Recipe()) == "Recipe()" and Recipe().changed_fields() == {}
    assert len({Recipe(), Recipe(optimizer="adam"), Recipe(optimizer="sgd")}) == 2
    with pytest.raises(FrozenInstanceError):
        Recipe().micro_batches = 2


def test_the_words_of_a_recipe_name_pages_and_copies_that_are_not_the_usual_ones():
    copies = {"prefetch": 2, "in_flight": 1}
    recipe = Recipe(offload_optimizer=1.0, page_bytes=4 << 20, offload_activations=True, **copies)
    usual = "fp32, adam, optimizer offloaded, pages of 4 MiB, activations offloaded"
    assert str(recipe) == f"{usual}, 2 fetched ahead, 1 in flight"
    assert (
        chinese(str(recipe))
        == "fp32、adam、优化器卸载、每页 4 MiB、激活值卸载、预取 2 份、同时卸载 1 份"
    )
    assert str(replace(recipe, prefetch=None, in_flight=None)) == usual
    idle = replace(recipe, offload_optimizer=0.0, offload_activations=False)
    assert str(idle) == "fp32, adam" and "pages of 1,000 bytes" in str(
        Recipe(precision="bf16", page_bytes=1000)
    )
    assert [added_techniques(a, b) for a, b in itertools.pairwise(steps_to(recipe))] == [
        "optimizer offloaded, pages of 4 MiB",
        "activations offloaded, 2 fetched ahead, 1 in flight",
    ]


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 200))
def test_micro_batches_are_allowed_where_all_but_the_last_are_equal(samples):
    cuts = {len(torch.empty(samples).split(size)) for size in range(1, samples + 1)}
    assert counts_allowed(samples) == sorted(cuts)


# ---- the same gradient

KEEPS = [
    {},
    {"checkpoint": "layers"},
    {"checkpoint": "selective"},
    {"checkpoint": "segments", "segments": 3},
    {"checkpoint": "optimal", "schedule_bytes": 450_000},
    {"offload_activations": True, "min_bytes": 1000},
    {"checkpoint": "layers", "offload_activations": True, "min_bytes": 1000},
    {"checkpoint": "segments", "segments": 2, "offload_activations": True, "min_bytes": 1000},
]
ENDS = [
    {},
    {"head_chunk": 7},
    {"in_backward": True},
    {"head_chunk": 16, "in_backward": True},
    {"micro_batches": 3},
]
# Every way to keep activations with each attention, and with one end or another; then all of them
# with some.
EQUAL = [
    Recipe(attention=attention, **keep, **ENDS[(i + j) % len(ENDS)])
    for i, keep in enumerate(KEEPS)
    for j, attention in enumerate(("standard", "flash"))
] + [Recipe(attention="flash", **keep, **end) for keep in KEEPS[4:5] for end in ENDS]
EQUAL = list(dict.fromkeys(EQUAL))


def stepped(make_model, recipe, batches, lr=1.0, eps=None):
    """The model after a step on each batch; every gradient that the optimizer saw, and the
    losses."""
    model, optimizer = build(make_model, recipe, lr=lr)
    for group in optimizer.param_groups:
        if eps:
            group["eps"] = eps
    names = {p: name for name, p in model.named_parameters()}
    seen, losses = [], []

    def look(opt, *_):
        seen.extend(
            (names[p], p.grad.clone())
            for g in opt.param_groups
            for p in g["params"]
            if p.grad is not None
        )

    optimizer.register_step_pre_hook(look)
    for batch in batches:
        result = train_step(model, optimizer, batch, recipe)
        assert result.stepped and result.weight == (
            len(batch["y"]) if isinstance(batch, dict) else batch[:, 1:].numel()
        )
        assert all(p.grad is None for p in model.parameters())
        losses.append(result.loss)
    return model, seen, losses


def in_float64(model, batches, optimizer=torch.optim.SGD, **options):
    """The same by autograd alone, in float64."""
    model = copy.deepcopy(model).double()
    optimizer = optimizer(model.parameters(), **options)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        losses.append(loss.item())
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return model, gradients, losses


def distance(found, gradients):
    difference = sum((found[name].double() - gradients[name]).square().sum() for name in gradients)
    return (difference / sum(g.square().sum() for g in gradients.values())).sqrt().item()


@pytest.mark.parametrize("recipe", EQUAL[::5], ids=repr)
def test_in_bf16_the_gradient_is_as_near_as_the_plain_one_in_bf16(recipe):
    plain = Recipe(precision="bf16", optimizer="sgd")
    _, gradients, losses = in_float64(tiny().bfloat16(), [tiny_batch()], lr=1.0)
    _, seen, _ = stepped(tiny, plain, [tiny_batch()])
    error = distance(dict(seen), gradients)
    assert 1e-4 < error < 0.05
    model, seen, found = stepped(
        tiny, replace(recipe, precision="bf16", optimizer="sgd"), [tiny_batch()]
    )
    assert len(seen) == len(gradients) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert distance(dict(seen), gradients) < 3 * error
    assert found == pytest.approx(losses, rel=0.01)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", [Recipe(), *EQUAL[3::14]], ids=repr)
def test_two_steps_of_adam_are_those_of_the_plain_adamw(recipe, fraction):
    batches = [tiny_batch(seed=seed) for seed in (0, 1)]
    # small gradients, such as those of keys' biases, which are zero, stay small
    options = {"lr": 1e-2, "eps": 1e-3}
    expected, _, losses = in_float64(tiny(), batches, torch.optim.AdamW, **options)
    model, _, found = stepped(tiny, replace(recipe, offload_optimizer=fraction), batches, **options)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p.double(), q, rtol=1e-5, atol=2e-6)
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_with_dropout_a_checkpoint_draws_the_same_numbers_again(keep):
    def seen(recipe):
        torch.manual_seed(3)
        return dict(
            stepped(partial(tiny, dropout=0.2), replace(recipe, optimizer="sgd"), [tiny_batch()])[1]
        )

    expected, found = seen(Recipe()), seen(Recipe(**keep))
    for name in expected:
        assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(optimizer="sgd"),
        Recipe(optimizer="sgd", micro_batches=3),
        Recipe(optimizer="sgd", in_backward=True),
        Recipe(optimizer="sgd", offload_activations=True, min_bytes=1000, micro_batches=2),
    ],
    ids=repr,
)
def test_a_module_that_has_only_a_loss_does_all_that_takes_no_decoder(recipe):
    _, gradients, losses = in_float64(
        Regression(), [{name: x.double() for name, x in points().items()}], lr=0.1
    )
    make = Summing if recipe.micro_batches > 1 else Regression
    _, seen, found = stepped(make, recipe, [points()], lr=0.1)
    for name, gradient in seen:
        assert_close(gradient.double(), gradients[name], rtol=1e-4, atol=1e-7)
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "recipe", "name"),
    [
        (Regression, Recipe(checkpoint="layers"), "blocks"),
        (Regression, Recipe(checkpoint="optimal", schedule_bytes=9), "blocks"),
        (tiny, Recipe(checkpoint="segments", segments=2, blocks="blocks.*"), "blocks"),
        (tiny, Recipe(checkpoint="layers", blocks="blocks.*"), "blocks"),
        (tiny, Recipe(checkpoint="layers", blocks="*"), "blocks"),
        (tiny, Recipe(checkpoint="layers", first_blocks=4), "first_blocks"),
        (partial(nn.Embedding, 3, 3), Recipe(head_chunk=8), "head_chunk"),
        (Regression, Recipe(attention="sdpa"), "attention"),
        (tiny, Recipe(attention="eager"), "attention"),
        (Regression, Recipe(micro_batches=2), "micro_batches"),
        (tiny, Recipe(checkpoint="segments", segments=5), "segments"),
        (partial(tiny, dropout=0.1), Recipe(attention="flash"), "attention"),
        (lambda: nn.Linear(2, 2), Recipe(), "model"),
        (lambda: 3, Recipe(), "model"),
        (lambda: tiny().requires_grad_(False), Recipe(), "model"),
    ],
)
def test_a_recipe_that_does_not_go_with_the_model_is_refused_before_anything_runs(
    make, recipe, name
):
    model, optimizer = make(), torch.optim.SGD([torch.zeros(1)])
    for attempt in (
        lambda: train_step(model, optimizer, tiny_batch(), recipe),
        lambda: estimate(make, tiny_batch, recipe),
        lambda: estimate(make, tiny_batch, replace(recipe, offload_optimizer=1.0), tier="host"),
        lambda: run(make, tiny_batch, recipe),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=rf"^{name} (must|cannot be combined with) [^\n]+$"
        ):
            attempt()


def altered(change):
    model = tiny(fused=True)
    if change == "layers.1 has norm_first=False":
        model.layers[1] = DecoderLayer(model.layers[1].norm1.weight.numel(), 2, norm_first=False)
    elif change == "loss is its own":
        model.loss = lambda tokens, loss=model.loss: 3 * loss(tokens)
    else:
        model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


@pytest.mark.parametrize(
    "change",
    ["layers.1 has norm_first=False", "loss is its own", "DecoderLayer has forward hooks"],
)  # fmt: skip
def test_a_decoder_that_was_altered_keeps_its_own_loss_in_every_recipe(change):
    model = altered(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for recipe in (
        Recipe(attention="flash"),
        Recipe(micro_batches=2),
        Recipe(checkpoint="layers"),
        Recipe(checkpoint="selective", first_blocks=2),
        Recipe(head_chunk=8),
        Recipe(checkpoint="segments", segments=2),
        Recipe(checkpoint="optimal", schedule_bytes=10**9, head_chunk=8),
    ):
        # over what it goes is not known then
        if recipe.micro_batches > 1 and change == "loss is its own":
            with pytest.raises(ValueError, match=r"^micro_batches must be 1 for a \w+, got \d"):
                train_step(model, optimizer, tiny_batch(), recipe)
            continue
        found = train_step(model, optimizer, tiny_batch(), recipe).loss
        assert found == pytest.approx(model.loss(tiny_batch()).item(), rel=1e-5)


def test_gradients_that_lie_about_are_not_stepped():
    for recipe in (Recipe(), Recipe(in_backward=True)):
        model, aside = tiny(), nn.Parameter(torch.ones(3))
        frozen = model.positions.weight.requires_grad_(False)
        for p in (frozen, aside):
            p.grad = torch.ones_like(p)
        before = frozen.clone()
        train_step(
            model, torch.optim.SGD([*model.parameters(), aside], lr=0.1), tiny_batch(), recipe
        )
        assert torch.equal(frozen, before) and torch.equal(aside, torch.ones(3))
        assert all(p.grad is None for p in (*model.parameters(), aside))


def detached(model, batch):
    loss, weight = model.loss_sum(batch)
    return loss.detach(), weight


@pytest.mark.parametrize(
    ("changes", "recipe", "error", "name"),
    [
        ({}, Recipe(precision="bf16"), ValueError, "precision"),
        ({}, Recipe(micro_batches=4), ValueError, "micro_batches"),
        ({"batch": tiny_batch()[:0]}, Recipe(), ValueError, "batch"),
        ({"batch": "tokens"}, Recipe(), TypeError, "batch"),
        ({}, {}, TypeError, "recipe"),
        ({"loss_sum": 3}, Recipe(), TypeError, "loss_sum"),
        ({"loss_sum": Decoder.loss_sum}, Recipe(checkpoint="optimal", schedule_bytes=9),
         ValueError, "loss_sum"),
        *(({"loss_sum": detached}, recipe, TypeError, "[^:]*: the sum of losses")
          for recipe in (Recipe(), Recipe(in_backward=True))),
        ({"max_norm": 1.0}, Recipe(in_backward=True), ValueError, "max_norm"),
        *(({"optimizer": wrong}, recipe, error, name)
          for recipe in (Recipe(), Recipe(in_backward=True))
          for wrong, error, name in (
              (lambda p: None, TypeError, "optimizer"),
              (lambda p: torch.optim.SGD([torch.zeros(1)]), RuntimeError,
               "no parameter of the optimizer"),
          )),
    ],
)  # fmt: skip
def test_a_step_that_does_not_go_with_its_recipe_is_refused(changes, recipe, error, name):
    model, _ = build(tiny, Recipe())
    options = {"optimizer": torch.optim.SGD, "batch": tiny_batch(), **changes}
    optimizer = options.pop("optimizer")(model.parameters())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(error, match=rf"^{name} [^\n]*must [^\n]+$"):
        train_step(model, optimizer, options.pop("batch"), recipe, **options)
    assert all(map(torch.equal, before, model.parameters()))


# ---- what the loss is a mean over

PAD = -100


class Tagger(nn.Module):
    """As a model of Hugging Face: its loss is a mean over the labels that are not -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, batch):
        return (
            self.head(self.embedding(batch["input_ids"])).flatten(0, 1),
            batch["labels"].flatten(),
        )

    def loss(self, batch):
        return F.cross_entropy(*self(batch), ignore_index=PAD)


def labelled(model, batch):
    weight = (batch["labels"] != PAD).sum()
    return F.cross_entropy(*model(batch), ignore_index=PAD, reduction="sum"), weight


class Counting(Tagger):
    loss_sum = labelled


def padded():
    """8 samples with 1, 3, ..., 15 labels."""
    tokens = torch.arange(8 * 15).reshape(8, 15) % 11
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.arange(15) >= 1 + 2 * torch.arange(8)[:, None], PAD),
    }


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(micro_batches=8), Recipe(micro_batches=3), Recipe(in_backward=True)]
)
@pytest.mark.parametrize(
    ("make", "options"), [(Counting, {}), (Tagger, {"loss_sum": labelled})], ids=["own", "given"]
)
def test_padded_micro_batches_give_the_full_batchs_gradient(make, options, recipe):
    _, gradients, [loss] = in_float64(make(), [padded()], lr=1.0)
    recipe = replace(recipe, optimizer="sgd")
    model, optimizer = build(make, recipe, lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    result = train_step(model, optimizer, padded(), recipe, **options)
    steps = {
        name: old - new for old, (name, new) in zip(before, model.named_parameters(), strict=True)
    }
    assert distance(steps, gradients) < 1e-6
    assert result.loss == pytest.approx(loss, rel=1e-6) and result.weight == 64


def test_micro_batches_of_a_mean_whose_weight_is_not_known_are_refused_and_not_searched():
    model, optimizer = build(Tagger, Recipe())
    assert train_step(model, optimizer, padded(), Recipe()).stepped
    with pytest.raises(
        ValueError,
        match=r"^micro_batches must be 1 for a Tagger, got 8: .*; give the model a method"
        r" loss_sum\(batch\)",
    ):
        train_step(model, optimizer, padded(), Recipe(micro_batches=8))
    plain = estimate(Tagger, padded, Recipe()).peak_bytes
    counts = []
    for options in ({}, {"loss_sum": labelled}):
        found = fit(Tagger, padded, plain - 1, progress=False, **options)
        counts.append(max(e.recipe.micro_batches for e in found))
    assert counts[0] == 1 < counts[1]


def test_a_loss_sum_that_is_older_than_the_loss_is_not_used():
    class Tripled(Counting):
        def loss(self, batch):
            return 3 * super().loss(batch)

    model, optimizer = build(Tripled, Recipe())
    assert train_step(model, optimizer, padded(), Recipe()).loss == pytest.approx(
        model_loss(Tripled), rel=1e-6
    )
    with pytest.raises(ValueError, match=r"^micro_batches must be 1 for a Tripled, got 2"):
        train_step(model, optimizer, padded(), Recipe(micro_batches=2))


def model_loss(make):
    return make().loss(padded()).item()


@pytest.mark.parametrize("samples", [8, 5])
def test_a_schedule_is_found_once_for_all_micro_batches_of_all_steps(monkeypatch, samples):
    profiles, profile = [], Chain.profile
    monkeypatch.setattr(
        Chain, "profile", lambda *args, **kwargs: (profiles.append(1), profile(*args, **kwargs))[1]
    )
    recipe = Recipe(checkpoint="optimal", schedule_bytes=450_000, micro_batches=samples)
    model, optimizer = build(tiny, recipe)
    for seed in range(3):
        train_step(model, optimizer, tiny_batch(samples, seed), recipe)
    assert len(profiles) == 1
    model.layers[0].requires_grad_(False)  # keeps less
    train_step(model, optimizer, tiny_batch(samples), recipe)
    train_step(
        model, optimizer, tiny_batch(1), replace(recipe, micro_batches=1, schedule_bytes=500_000)
    )
    # other bytes for the same chain are another schedule, and no other profile
    assert len(profiles) == 2
    seen = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(in_backward=True), Recipe(micro_batches=2)], ids=repr
)
def test_a_loss_that_is_none_is_refused_and_nothing_is_stepped(recipe):
    for loss in (
        lambda self, batch: 3.0,
        lambda self, batch: self.net(batch["x"]),
        lambda self, batch: torch.tensor(1.0),
        lambda self, batch: Regression.loss(self, batch) * math.nan,
    ):
        summed = (
            {}
            if recipe.micro_batches == 1
            else {"loss_sum": lambda model, batch: (model.loss(batch), 1)}
        )
        model, optimizer = build(type("Odd", (Regression,), {"loss": loss}), recipe)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(
            (TypeError, ValueError, RuntimeError),
            match=r" must |does not require grad",
        ):
            train_step(model, optimizer, points(), recipe, **summed)
        assert all(map(torch.equal, before, model.parameters()))


# ---- after an error


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("recipe", EQUAL[::5], ids=repr)
def test_after_an_error_in_the_middle_all_is_as_before(recipe, where):
    model, optimizer = build(partial(tiny, fused=True), replace(recipe, optimizer="sgd"))
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    attentions[1].standard = own = partial(Attention.standard, attentions[1])
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    copies = [gradient.clone() for gradient in gradients]
    random = torch.get_rng_state()
    failing = model.layers[2].attention.register_forward_hook(stop) if where == "forward" else None
    failing = failing or model.layers[1].feedforward[0].weight.register_hook(stop)
    with pytest.raises(Stop):
        train_step(model, optimizer, tiny_batch(), recipe)
    failing.remove()
    assert all(module.fused for module in attentions)
    assert [vars(module).get("standard") for module in attentions] == [None, own, None]
    assert all(
        p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True)
    )
    assert all(map(torch.equal, gradients, copies))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if where == "forward" or not recipe.in_backward:  # else some parameters have had their step
        expected, _, _ = in_float64(model, [tiny_batch()], lr=1e-3)
        del attentions[1].standard
        train_step(model, optimizer, tiny_batch(), recipe)
        assert all(p.grad is None for p in model.parameters())
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(checkpoint="layers"), Recipe(in_backward=True)], ids=repr
)
def test_after_an_error_the_random_numbers_go_on_as_if_nothing_had_been(recipe):
    model, optimizer = build(partial(tiny, dropout=0.1), recipe)
    model.layers[2].attention.register_forward_hook(stop)
    random = torch.get_rng_state()
    with pytest.raises(Stop):
        train_step(model, optimizer, tiny_batch(), recipe)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_symbolic_step_leaves_dtype_random_numbers_and_modes_as_they_are():
    random, dtype = torch.get_rng_state(), torch.get_default_dtype()
    for recipe in (
        Recipe(precision="bf16"),
        Recipe(precision="bf16", checkpoint="optimal", schedule_bytes=450_000),
    ):
        estimate(partial(tiny, dropout=0.1), tiny_batch, recipe)
        with pytest.raises(Stop):
            estimate(stop, tiny_batch, recipe)
        with pytest.raises(Stop):
            estimate(tiny, stop, recipe)
    assert torch.get_default_dtype() is dtype and torch.equal(torch.get_rng_state(), random)
    assert torch._guards.detect_fake_mode() is None
    assert type(torch.empty(1)) is torch.Tensor


# ---- estimates


def small():
    return Decoder(vocabulary=211, hidden=48, heads=4, layers=4, sequence=24)


def small_batch():
    return random_tokens(8, 24, 211)


few, few_batch = tiny, partial(tiny_batch, 16)

SGD = Recipe(optimizer="sgd")
DOWN = {"offload_activations": True, "min_bytes": 1000}


class TestEstimatesOfASmallDecoder:
    def test_micro_batches_cost_nothing_but_time_for_each_that_is_run(self):
        runs = []

        def make():
            decoder = tiny()
            decoder.tokens.register_forward_pre_hook(lambda *_: runs.append(1))
            return decoder

        estimate(make, partial(tiny_batch, 64), Recipe(micro_batches=64))
        assert len(runs) == 1 + 2  # and one to see whether the model looks at values

    def test_what_is_offloaded_is_not_on_the_device_where_the_tier_is_the_host(
        self, small=few, small_batch=few_batch
    ):
        for precision, size in (("fp32", 4), ("bf16", 2)):
            base = Recipe(precision=precision)
            masters = 4 if precision == "bf16" else 0
            count = sum(p.numel() for p in small().parameters())
            plain = estimate(small, small_batch, base, tier="host")
            assert plain.moved_bytes == 0
            # Adam counts its steps in one number for each parameter
            steps = 4 * len(list(small().parameters()))
            assert plain.at_peak["optimizer"] == (8 + masters) * count + steps
            all_below = estimate(
                small, small_batch, replace(base, offload_optimizer=1.0), tier="host"
            )
            assert all_below.at_peak["optimizer"] == 0
            assert all_below.bytes_down == all_below.bytes_up == size * count
            assert all_below.tier == "host"
            assert all_below.peak_bytes == plain.peak_bytes - plain.at_peak["optimizer"]
            in_file = estimate(small, small_batch, replace(base, offload_optimizer=1.0))
            assert in_file.bytes_down == in_file.bytes_up == (8 + masters) * count
            half = estimate(small, small_batch, replace(base, offload_optimizer=0.5), tier="host")
            below = half.bytes_down // size
            assert count / 2 <= below < 0.6 * count and half.bytes_up == half.bytes_down
            assert 0 <= half.at_peak["optimizer"] - (8 + masters) * (count - below) <= steps
            inside = estimate(
                small,
                small_batch,
                replace(base, offload_optimizer=0.5, in_backward=True),
                tier="host",
            )
            assert (inside.bytes_down, inside.bytes_up) == (half.bytes_down, half.bytes_up)

    def test_more_ahead_and_in_flight_hold_more_and_move_as_many_bytes(self):
        held, moved = [], set()
        for prefetch, in_flight in ((0, 0), (0, 1), (0, 2), (1, 2), (2, 2)):
            recipe = Recipe(**DOWN, prefetch=prefetch, in_flight=in_flight)
            found = estimate(few, few_batch, recipe)
            held.append(found.peak_bytes)
            moved.add(found.bytes_up - found.bytes_down)
        assert held == sorted(held) and len(set(held)) > 2 and moved == {0}

    @pytest.mark.parametrize(("tier", "copies"), [("file", 1), ("host", 2)])
    def test_copies_that_are_not_named_are_those_of_the_device_with_such_a_tier(self, tier, copies):
        device = {"file": Device, "host": Cuda}[tier]
        assert device.ahead == copies
        named, others = ({"prefetch": count, "in_flight": count} for count in (copies, 3 - copies))
        left_out, named, others = (
            estimate(few, few_batch, Recipe(**DOWN, **fields), tier=tier)
            for fields in ({}, named, others)
        )
        assert left_out.peak_bytes != others.peak_bytes
        assert (
            left_out == replace(named, recipe=left_out.recipe) and left_out.recipe.in_flight is None
        )

    def test_smaller_pages_hold_less_in_the_optimizers_step_and_move_as_much(self):
        pages = [
            Recipe(offload_optimizer=1.0, page_bytes=count) for count in (1 << 20, 1 << 18, 1 << 16)
        ]
        found = [estimate(small, small_batch, recipe) for recipe in pages]
        steps = [e.phase_peaks["optimizer"] for e in found]
        assert steps == sorted(set(steps), reverse=True)
        assert (
            len({(e.bytes_down, e.bytes_up, e.flops, e.phase_peaks["backward"]) for e in found})
            == 1
        )

    def test_an_estimate_is_a_value_that_shows_itself(self):
        guess, same = (estimate(tiny, tiny_batch, Recipe(attention="flash")) for _ in range(2))
        assert guess == same and len({guess, same}) == 1
        assert f"{guess.peak_bytes:,} bytes" in str(guess) and guess.operator in str(guess)
        kinds = {name for name, count in guess.at_peak.items() if count}
        assert {row[0] for row in guess.rows()} == kinds - {"optimizer"} | {"optimizer state"}


STATM = Path("/proc/self/statm")  # what this process takes, first in pages of its addresses


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
def test_a_7_b_estimate_takes_no_memory_to_speak_of():
    sizes = {"hidden": 8192, "layers": 8, "heads": 32, "sequence": 4096, "vocabulary": 32000}
    batch = partial(random_tokens, 8, 4096, 32000)
    recipe = Recipe(precision="bf16", attention="flash", checkpoint="layers", micro_batches=8)
    now = int(STATM.read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 10**9, limits[1]))
    try:
        found = estimate(partial(Decoder, **sizes), batch, recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    # parameters, gradients, masters and moments of seven billion
    assert found.peak_bytes > 16 * 6.5e9


# ---- the meter's budget


@pytest.mark.parametrize(
    "recipe", [Recipe(in_backward=True), Recipe(**DOWN, micro_batches=2)], ids=repr
)
def test_a_step_over_the_budget_is_stopped_at_the_operator_and_the_model_trains_on(recipe):
    recipe = replace(recipe, optimizer="sgd")
    guess, model = estimate(tiny, tiny_batch, recipe), tiny()
    assert (
        run(tiny, tiny_batch, recipe, budget_bytes=guess.peak_bytes).meter.peak_bytes
        == guess.peak_bytes
    )
    with pytest.raises(MemoryBudgetExceeded) as caught:
        run(lambda: model, tiny_batch, recipe, budget_bytes=guess.peak_bytes - 1)
    assert caught.value.operator == guess.operator and guess.operator in str(caught.value)
    assert caught.value.live_bytes + caught.value.wanted_bytes == guess.peak_bytes
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    expected, _, _ = in_float64(model, [tiny_batch()], lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, tiny_batch(), recipe)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


def test_what_runs_found_keeps_no_model_alive():
    models = []

    def make():
        models.append(weakref.ref(model := tiny()))
        return model

    found = [
        run(make, tiny_batch, recipe)
        for recipe in (Recipe(), Recipe(in_backward=True), Recipe(precision="bf16"))
    ]
    gc.collect()
    assert [model() for model in models] == [None] * 3
    assert all(each.meter.peak_bytes > 0 for each in found)


def test_activations_go_down_from_min_bytes_on_and_a_search_does_not_warn_of_what_is_too_small():
    sizes = {}
    for least in (0, 40_000, 10**9):
        recipe = Recipe(offload_activations=True, min_bytes=least)
        with (
            pytest.warns(UserWarning, match="no activation was moved")
            if least == 10**9
            else nullcontext()
        ):
            sizes[least] = run(tiny, tiny_batch, recipe).traffic.bytes_down
    assert sizes[0] > sizes[40_000] > sizes[10**9] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(
            tiny,
            tiny_batch,
            10**9,
            recipes=[Recipe(offload_activations=True, min_bytes=10**9)],
            progress=False,
        )


def test_a_store_that_is_given_stays_open_and_one_that_is_not_is_closed(monkeypatch):
    closed, close = [], DiskStore.close
    monkeypatch.setattr(DiskStore, "close", lambda self: (closed.append(self), close(self))[1])
    store = DiskStore()
    recipe = Recipe(offload_optimizer=1.0)
    first, second = (run(tiny, tiny_batch, recipe, store=store).traffic for _ in range(2))
    assert first == second and not closed
    assert run(tiny, tiny_batch, recipe).traffic == first and len(closed) == 1
    with pytest.raises(MemoryBudgetExceeded):
        run(tiny, tiny_batch, recipe, budget_bytes=1000)
    assert len(closed) == 2


# ---- what fits


def searched(layers=2):
    return Decoder(vocabulary=200, hidden=32, heads=4, layers=layers, sequence=32)


def searched_batch():
    return random_tokens(2, 32, 200)


RATE = Rates(1e9, 2e9, 1e9)
FILE = {"loss_sum": None, "tier": "file", "max_norm": None}


@cache
def remembered(make_model, make_batch, recipe, tier="file"):
    try:
        return estimate(make_model, make_batch, recipe, tier=tier)
    except InfeasibleBudget as error:
        return error


@pytest.fixture
def quick(monkeypatch):
    """The search with chunks that suit a short sequence, each estimate made once in all tests."""

    def once(make_model, make_batch, recipe, *, tier, loss_sum=None):
        found = remembered(make_model, make_batch, recipe, tier)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("course_lib.budget.techniques.head.HEAD_CHUNK", 32)
    monkeypatch.setattr(knowledge, "estimate", once)


def cost(found):
    return RATE.seconds(found)


CHOICES = {
    "attention": ("standard", "flash"),
    "checkpoint": ("none", "selective", "layers"),
    "offload_activations": (False, True),
    "head_chunk": (None, 32),
    "in_backward": (False, True),
    "micro_batches": (1, 2),
}


def goes_together(row):
    return (row["micro_batches"] == 1 or not row["in_backward"]) and (
        row["checkpoint"] != "selective" or not row["offload_activations"]
    )


SOME = [replace(SGD, **row) for row in rows(CHOICES, goes_together, seed=0, draws=200)]


def every(recipes=SOME):
    found = {recipe: remembered(searched, searched_batch, recipe) for recipe in recipes}
    return {recipe: e for recipe, e in found.items() if not isinstance(e, Exception)}


@pytest.mark.usefixtures("quick")
class TestSearch:
    def test_nothing_is_cheaper_than_what_is_found(self):
        budget = int(0.75 * remembered(searched, searched_batch, SGD).peak_bytes)
        fitting = [e for e in every().values() if e.peak_bytes <= budget]
        found = fit(
            searched, searched_batch, budget, base=SGD, rates=RATE, tier="file", progress=False
        )
        assert all(e.peak_bytes <= budget for e in found)
        assert cost(found[0]) <= min(map(cost, fitting))
        assert [cost(e) for e in found] == sorted(cost(e) for e in found) and len(
            {e.recipe for e in found}
        ) == len(found)
        estimated = int(found.title.split("; ")[1].split(" ")[0])
        assert estimated < math.prod(map(len, CHOICES.values())) and str(found).count("\n") >= len(
            found
        )
        # Of each combination of techniques that cannot do with fewer, the number of micro-batches
        # is the least.
        for e in found:
            if e.recipe.checkpoint != "optimal":
                fewer = [f for f in counts_allowed(2) if f < e.recipe.micro_batches]
                trials = [
                    remembered(searched, searched_batch, replace(e.recipe, micro_batches=f))
                    for f in fewer
                ]
                assert all(trial.peak_bytes > budget for trial in trials)

    def test_among_given_recipes_all_that_fit_are_found_in_order(self):
        recipes = SOME[::2]
        known = every(recipes)
        peaks = sorted(e.peak_bytes for e in known.values())
        for budget in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
            found = fit(
                searched,
                searched_batch,
                budget,
                recipes=iter(recipes + recipes),
                rates=RATE,
                tier="file",
                progress=False,
            )
            expected = [e for e in known.values() if e.peak_bytes <= budget]
            assert {e.recipe for e in found} == {e.recipe for e in expected}
            order = [(cost(e), e.recipe.micro_batches, e.peak_bytes) for e in found]
            assert order == sorted(order)
        with pytest.raises(InfeasibleBudget) as caught:
            fit(
                searched,
                searched_batch,
                peaks[0] - 1,
                recipes=recipes,
                rates=RATE,
                tier="file",
                progress=False,
            )
        assert caught.value.least.peak_bytes == peaks[0] and caught.value.least.recipe in recipes
        # takes more than the plain step, which was not asked about
        inside = Recipe(in_backward=True)
        with pytest.raises(InfeasibleBudget) as caught:
            fit(searched, searched_batch, 1000, recipes=[inside], tier="file", progress=False)
        assert caught.value.least.recipe == inside

    def test_a_budget_below_the_least_names_the_least_and_its_recipe(self):
        base, asked = SGD, (partial(searched, layers=1), partial(random_tokens, 2, 8, 200))
        with pytest.raises(InfeasibleBudget) as caught:
            fit(*asked, 1000, base=base, tier="file", progress=False)
        error = caught.value
        assert estimate(*asked, error.least.recipe).peak_bytes == error.least.peak_bytes
        assert f"{error.least.peak_bytes:,} bytes" in str(error) and repr(
            error.least.recipe
        ) in str(error)
        assert "\n" not in str(error) and str(error).startswith("budget_bytes is ")
        assert error.budget_bytes == 1000 and error.least_bytes == error.least.peak_bytes
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        found = fit(*asked, error.least.peak_bytes, base=base, tier="file", progress=False)
        assert found[0].peak_bytes <= error.least.peak_bytes


def test_what_is_found_among_recipes_does_not_depend_on_their_order():
    make, batch = (
        partial(Decoder, vocabulary=200, hidden=64, heads=4, layers=2, sequence=8),
        partial(random_tokens, 1, 8, 200),
    )
    recipes = [Recipe(precision="bf16", offload_optimizer=1.0), Recipe(precision="bf16")]
    budget = max(estimate(make, batch, recipe).peak_bytes for recipe in recipes)
    for order in (recipes, recipes[::-1]):
        found = fit(make, batch, budget, recipes=order, tier="file", progress=False)
        assert {e.recipe for e in found} == set(recipes)


def test_standard_attention_is_looked_at_where_flash_takes_more():
    def make():
        # a tile in fp32 is larger
        return Decoder(vocabulary=10, hidden=16, heads=4, layers=1, sequence=64)

    base = Recipe(precision="bf16")
    facts = EstimateCache(make, partial(random_tokens, 2, 64, 10), base, **FILE)
    least = replace(base, checkpoint="layers", micro_batches=2)
    standard, flash = (
        facts.estimate(replace(least, attention=name)).peak_bytes for name in ATTENTIONS
    )
    assert standard < flash and set(Search(facts, 1, RATE).values("attention")) == set(ATTENTIONS)


@pytest.mark.parametrize("tier", ["file", "host"])
def test_what_is_passed_over_could_not_have_fitted_or_been_cheaper(tier):
    facts, rates = (
        EstimateCache(searched, searched_batch, Recipe(min_bytes=1000), **{**FILE, "tier": tier}),
        RATE,
    )
    facts.estimate(Recipe(attention="flash", min_bytes=1000))  # whose FLOPs are then known
    pieces = [{}, {"in_backward": True}, {"micro_batches": 2}]
    for keep, fraction, count in itertools.product(
        ({}, {"checkpoint": "layers"}, {"checkpoint": "layers", "head_chunk": 32}),
        (0.0, 0.5, 1.0),
        pieces,
    ):
        for down in (False, True):
            fields = {**keep, **count, "offload_activations": down, "offload_optimizer": fraction}
            recipe = replace(facts.base, attention="flash", **fields)
            floor, seconds = floor_bytes(facts, recipe), least_seconds(facts, recipe, rates)
            found = facts.estimate(recipe)
            assert 0 < floor <= found.peak_bytes and 0 < seconds <= rates.seconds(found)


@pytest.mark.usefixtures("quick")
def test_segments_are_as_few_as_fit():
    make, family = (
        partial(tiny, layers=9),
        Recipe(checkpoint="segments", segments=2, in_backward=True),
    )
    found = {
        count: remembered(make, tiny_batch, replace(family, segments=count)) for count in (2, 3, 9)
    }
    peaks = {count: e.peak_bytes for count, e in found.items()}
    assert peaks[9] < peaks[3] < peaks[2]
    assert found[2].flops < found[3].flops < found[9].flops
    facts = EstimateCache(make, tiny_batch, Recipe(), **FILE)
    for budget, count in (
        (peaks[2], 2),
        (peaks[2] - 1, 3),
        (peaks[3], 3),
        (peaks[3] - 1, 9),
        (peaks[9] - 1, None),
    ):
        best = refine(Search(facts, budget, RATE), family)
        assert best == (count and replace(family, segments=count))


def test_a_module_that_is_no_decoder_is_searched_among_what_it_can_do():
    plain = estimate(Regression, symbolic_points, Recipe()).peak_bytes
    found = fit(Regression, symbolic_points, plain - 1000, progress=False)
    assert found and all(e.peak_bytes < plain for e in found)
    assert {name for e in found for name in e.recipe.changed_fields()} <= {
        "offload_activations", "in_backward", "micro_batches", "offload_optimizer"
    }  # fmt: skip


def test_seconds_are_flops_and_bytes_at_the_rates():
    guess = estimate(tiny, tiny_batch, Recipe(offload_optimizer=1.0))
    half = estimate(tiny, tiny_batch, Recipe(precision="bf16", offload_optimizer=1.0))
    rates = Rates(3e9, 7e9, 1e8)
    assert rates.seconds(guess) == guess.flops / 3e9 + (guess.bytes_down + guess.bytes_up) / 1e8
    assert rates.seconds(half) == half.flops / 7e9 + half.moved_bytes / 1e8
    assert all(r.source for r in RATES.values())


def test_the_tier_is_a_file_for_a_laptop_and_the_host_for_other_machines():
    one, recipes = partial(tiny, layers=1), [Recipe(offload_optimizer=1.0)]
    for rates, tier in (("laptop", "file"), (RATE, "host")):
        assert (
            fit(one, tiny_batch, 10**9, recipes=recipes, rates=rates, progress=False)[0].tier
            == tier
        )
    assert (
        fit(one, tiny_batch, 10**9, recipes=recipes, rates="H100", tier="file", progress=False)[
            0
        ].tier
        == "file"
    )


# ---- bad input


class Item(Regression):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss * 2 if loss.item() > 1 else loss


class Nonzero(Regression):
    def loss(self, batch):
        return super().loss(batch) + len(batch["y"].nonzero())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_stepped_but_not_estimated(kind):
    def make():
        return kind(7, 3, sparse=True)

    def batch():
        return torch.arange(6).view(3, 2)

    recipe, options = (
        Recipe(optimizer="sgd"),
        {"loss_sum": lambda model, batch: (model(batch).square().sum() * torch.ones(()), 3)},
    )
    with pytest.raises(
        ValueError,
        match=r"^the step makes a sparse gradient[^\n]*; pass sparse=False to the embedding$",
    ):
        estimate(make, batch, recipe, **options)
    assert run(make, batch, recipe, **options).result.stepped


def test_symbolic_store_returns_the_values_that_are_known():
    with symbolic():
        known, unknown, store = torch.tensor([3, 1]), torch.tensor([3, 1]), SymbolicStore()
        unknown.copy_(torch.randn(2))
        rooms = [store.put(known), store.put(unknown)]
        known.zero_()
        back = [room.get()() for room in rooms]
    assert back[0].tolist() == [3, 1]
    assert is_symbolic(back[1]) and store.stats == Traffic(32, 32)


@pytest.mark.parametrize("kind", [Item, Nonzero])
def test_a_loss_that_looks_at_data_runs_but_cannot_be_estimated(kind):
    for ask in (
        partial(estimate, recipe=Recipe()),
        partial(fit, budget_bytes=10**9, progress=False),
    ):
        with pytest.raises(
            ValueError,
            match=r"^the step reads values of its data .* symbolic .*no values are read(\.|$)",
        ):
            ask(kind, symbolic_points)
    assert run(kind, points, Recipe()).result.stepped


class Rotated(Regression):
    """Complex weights, and a complex table."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.ones(3)))
        self.register_buffer("table", torch.polar(torch.ones(3), torch.ones(3)))

    def loss(self, batch):
        return super().loss(batch) * (self.turn * self.table).imag.sum()


def test_complex_parameters_and_buffers_keep_their_imaginary_parts():
    for precision in ("fp32", None):
        model, optimizer = build(Rotated, Recipe(precision=precision))
        assert all(map(torch.equal, (model.turn, model.table), (Rotated().turn, Rotated().table)))
        assert train_step(model, optimizer, points(), Recipe(precision=precision)).stepped
        assert_measured(Rotated, points, Recipe(precision=precision))
    for function in (estimate, run):
        with pytest.raises(
            TypeError,
            match=r"^a parameter [^\n]*must be real and dense, got a complex tensor [^\n]+$",
        ):
            function(Rotated, points, Recipe(precision="bf16"))


def test_what_was_there_before_cannot_be_estimated():
    batch, model = points(), tiny()
    for make, of in ((Regression, lambda: batch), (lambda: model, tiny_batch)):
        with pytest.raises(
            ValueError,
            match=r"^make_model and make_batch must create all their tensors with operators[^\n]*$",
        ):
            estimate(make, of, Recipe())


def test_a_step_that_meets_what_an_estimate_has_left_in_a_cache_says_so():
    table = lru_cache(lambda: torch.linspace(0, 1, 9).sum())

    class Cached(Regression):
        def loss(self, batch):
            return super().loss(batch) * table()

    estimate(Cached, symbolic_points, Recipe())
    with pytest.raises(
        ValueError,
        match=r"^the model's code has kept a symbolic tensor [^\n]*; clear that cache, [^\n]+$",
    ):
        run(Cached, points, Recipe())
    table.cache_clear()
    assert run(Cached, points, Recipe()).result.stepped


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(8, 16, batch_first=True)

    def loss(self, batch):
        return self.cells(batch)[0].square().mean()


def test_an_operator_whose_memory_does_not_show_is_refused():
    batch = partial(torch.ones, 4, 5, 8)
    if torch.backends.mkldnn.is_available():
        with pytest.raises(
            ValueError, match=r"^the step runs aten.mkldnn_rnn_layer[^\n]*mkldnn.flags"
        ):
            estimate(Recurrent, batch, Recipe())
    with torch.backends.mkldnn.flags(enabled=False):
        assert_measured(Recurrent, batch, Recipe())


def test_a_recipe_that_cannot_be_does_not_stop_the_others():
    impossible = Recipe(checkpoint="optimal", schedule_bytes=1)
    [found] = fit(tiny, tiny_batch, 10**9, recipes=[impossible, Recipe()], progress=False)
    assert found.recipe == Recipe()
    with pytest.raises(InfeasibleBudget) as caught:
        fit(tiny, tiny_batch, 10**9, recipes=[impossible], progress=False)
    assert caught.value.least is None and caught.value.least_bytes is None


def test_the_way_to_a_schedule_is_one_that_can_be_gone():
    recipe = Recipe(
        checkpoint="optimal", schedule_bytes=200_000, micro_batches=5, offload_optimizer=1.0
    )
    with pytest.raises(InfeasibleBudget):
        estimate(tiny, tiny_batch, replace(recipe, micro_batches=1))
    steps = steps_to(recipe)
    assert steps[0] == Recipe() and steps[-1] == recipe and len(steps) == 4
    assert all(estimate(tiny, tiny_batch, step) for step in steps)


class Turned(nn.Module):
    """Its buffer is read in backward, by a method that is no call of the module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("rotation", torch.linalg.qr(torch.randn(64, 64))[0])

    def loss_sum(self, batch):
        return (self.layer(batch) @ self.rotation).square().sum(), len(batch)


def test_a_buffer_stays_while_activations_go_down():
    recipe = Recipe(offload_activations=True, min_bytes=64 * 64 * 4)
    with pytest.warns(UserWarning, match="no activation was moved"):
        guess = estimate(Turned, partial(torch.ones, 8, 64), recipe)
    assert guess.moved_bytes == 0
