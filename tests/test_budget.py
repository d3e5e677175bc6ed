"""course_lib.budget: what a recipe is, what its step leaves behind, and what `estimate`, `run` and
`fit` promise. `test_matrix` compares gradients, and `test_estimate_equals_run` bytes."""

import copy
import dataclasses
import gc
import inspect
import itertools
import math
import pickle
import re
import weakref
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from measured import assert_measured
from pairwise import rows
from test_matrix import DOWN, TABLE, assert_plain, plain_gradients
from torch import nn
from torch.nn import functional as F

from course_lib.budget import (
    InfeasibleBudget,
    Rates,
    Recipe,
    build,
    estimate,
    fit,
    run,
    train_step,
)
from course_lib.budget.search.best_numbers import best_of
from course_lib.budget.search.candidates import Search
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.lower_bounds import floor_bytes, least_seconds
from course_lib.budget.techniques import APPLIED, TECHNIQUES
from course_lib.budget.techniques.attention import ATTENTIONS
from course_lib.budget.techniques.head import ChunkedHead
from course_lib.budget.techniques.micro_batches import counts_allowed
from course_lib.budget.waterfall import added_techniques, steps_to
from course_lib.labels import chinese
from course_lib.memory import MemoryBudgetExceeded
from course_lib.models import Attention, Decoder, DecoderLayer, random_tokens
from course_lib.offload import DiskStore
from course_lib.offload.device import Cuda, Device
from course_lib.schedule import Chain

SGD = Recipe(optimizer="sgd")
INSIDE = Recipe(in_backward=True)
SCHEDULE = Recipe(checkpoint="optimal", schedule_bytes=450_000)


def tiny(**options):
    sizes = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 3, "sequence": 24}
    return Decoder(**{**sizes, **options})


def tiny_batch(samples=5, seed=0):
    return random_tokens(samples, 24, 61, seed=seed)


class Regression(nn.Module):
    """No decoder: all that it has is a loss, a mean."""

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
    return {"x": torch.randn(6, 8), "y": torch.randn(6)}


# ---- recipes


def test_the_repr_of_a_recipe_makes_it_again_and_names_only_what_is_not_plain():
    assert repr(Recipe()) == "Recipe()"
    blocks = Recipe(checkpoint="layers", blocks=("encoder.*", "decoder.*"), ranks=2, shard="ddp")
    for recipe in (*(each for _, each in TABLE), blocks):
        again = eval(repr(recipe))
        assert again == recipe and hash(again) == hash(recipe)
        assert pickle.loads(pickle.dumps(recipe)) == recipe
        changed = recipe.changed_fields()
        assert repr(recipe).count("=") == len(changed) and Recipe(**changed) == recipe
        assert not changed.items() & Recipe().__dict__.items()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().micro_batches = 2


def test_every_field_of_a_recipe_belongs_to_one_technique_and_the_plain_step_uses_none():
    owned = [name for technique in TECHNIQUES for name in technique.fields]
    names = [field.name for field in dataclasses.fields(Recipe)]
    assert [name for name in names if name not in owned] == [], "fields without a technique"
    assert [name for name in owned if owned.count(name) > 1 or name not in names] == []
    documented = re.findall(r"^ {4}(\w+): ", inspect.cleandoc(Recipe.__doc__), re.MULTILINE)
    assert [name for name in names if name not in documented] == [], "missing in the docstring"
    assert not any(technique.is_used(Recipe(attention=None)) for technique in TECHNIQUES)
    # A technique that changes a model must say where it comes in the order.
    for technique in TECHNIQUES:
        assert technique in APPLIED or "apply" not in vars(type(technique))


def test_recipe_refuses_two_techniques_with_saved_tensor_hooks(monkeypatch):
    monkeypatch.setattr(ChunkedHead, "hooks_saved_tensors", True)
    for alone in ({"head_chunk": 8}, {"offload_activations": True}):
        Recipe(**alone, checkpoint="layers")  # its hooks are inside the pass
    with pytest.raises(ValueError, match="offload_activations cannot be combined with head_chunk"):
        Recipe(head_chunk=8, offload_activations=True)


def test_the_words_of_a_recipe_name_pages_and_copies_that_are_not_the_usual_ones():
    down = Recipe(offload_optimizer=1.0, page_bytes=4 << 20, offload_activations=True)
    recipe = replace(down, prefetch=2, in_flight=1)
    assert str(recipe) == f"{down}, 2 fetched ahead, 1 in flight"
    assert "每页 4 MiB、激活值卸载、预取 2 份、同时卸载 1 份" in chinese(str(recipe))
    idle = replace(recipe, offload_optimizer=0.0, offload_activations=False)
    assert str(idle) == "fp32, adam"
    assert [added_techniques(a, b) for a, b in itertools.pairwise(steps_to(recipe))] == [
        "optimizer offloaded, pages of 4 MiB",
        "activations offloaded, 2 fetched ahead, 1 in flight",
    ]


def test_micro_batches_are_allowed_where_all_but_the_last_are_equal():
    for samples in range(1, 70):
        cuts = {len(torch.empty(samples).split(size)) for size in range(1, samples + 1)}
        assert counts_allowed(samples) == sorted(cuts)


# ---- the step


def mean(model, batch):
    return model.loss(batch), 1


def assert_plain_step(model, recipe, batch, **options):
    """Assert that a step has the gradients that autograd alone gives in float64."""
    expected = plain_gradients(lambda: copy.deepcopy(model), batch, mean)
    assert_plain(lambda: model, batch, recipe, expected, **options)


def test_a_sum_of_losses_is_a_method_of_the_model_or_an_argument():
    several = replace(SGD, micro_batches=3)
    assert_plain_step(Summing(), several, points())
    assert_plain_step(Regression(), several, points(), loss_sum=squares)


def test_micro_batches_of_a_mean_whose_weight_is_not_known_are_refused_and_not_searched():
    class Tripled(Summing):
        """Its loss is newer than its `loss_sum`."""

        def loss(self, batch):
            return 3 * super().loss(batch)

    for make in (Regression, Tripled):
        assert_plain_step(make(), Recipe(), points())
        with pytest.raises(ValueError, match=r"^micro_batches must be 1 .*got 2: .* loss_sum"):
            estimate(make, points, Recipe(micro_batches=2))
    counts = []
    for loss_sum in (None, squares):
        facts = EstimateCache(Regression, points, SGD, **{**FILE, "loss_sum": loss_sum})
        counts.append(Search(facts, 1, RATE).counts)
    assert counts == [(1,), (1, 2, 3, 6)]


ALTERED = {
    "a block": lambda model: setattr(model.layers, "1", DecoderLayer(32, 2, norm_first=False)),
    "the loss": lambda model: setattr(model, "loss", lambda x, loss=model.loss: 3 * loss(x)),
    "a hook": lambda model: model.layers[0].register_forward_hook(lambda module, x, y: 2 * y),
}


@pytest.mark.parametrize("change", ALTERED)
def test_a_decoder_that_was_altered_keeps_its_own_loss_in_every_recipe(change):
    model = tiny(fused=True)
    ALTERED[change](model)
    recipes = [
        Recipe(attention="flash"),
        Recipe(checkpoint="selective", first_blocks=2),
        Recipe(head_chunk=8),
        Recipe(checkpoint="segments", segments=2),
        Recipe(checkpoint="optimal", schedule_bytes=10**9, head_chunk=8),
    ]
    if change != "the loss":  # the number of samples in its mean is unknown
        recipes.append(Recipe(micro_batches=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for recipe in recipes:
        found = train_step(model, optimizer, tiny_batch(), recipe).loss
        assert found == pytest.approx(model.loss(tiny_batch()).item(), rel=1e-5)


def test_gradients_that_lie_about_are_not_stepped():
    for recipe in (Recipe(), INSIDE):
        model, aside = tiny(), nn.Parameter(torch.ones(3))
        frozen = model.positions.weight.requires_grad_(False)
        for p in (frozen, aside):
            p.grad = torch.ones_like(p)
        before = frozen.clone()
        optimizer = torch.optim.SGD([*model.parameters(), aside], lr=0.1)
        result = train_step(model, optimizer, tiny_batch(), recipe)
        assert result.weight == tiny_batch()[:, 1:].numel()
        assert torch.equal(frozen, before) and torch.equal(aside, torch.ones(3))
        assert all(p.grad is None for p in (*model.parameters(), aside))


def another_optimizer(parameters):
    return torch.optim.SGD([torch.zeros(1)])


def loss_as(function):
    """Return a `loss_sum` that applies `function` to the loss."""
    return lambda model, batch: (function(model.loss(batch)), 1)


@pytest.mark.parametrize(
    ("changes", "recipe", "name"),
    [
        ({}, Recipe(precision="bf16"), "precision"),
        ({}, Recipe(micro_batches=4), "micro_batches"),
        ({"batch": tiny_batch()[:0]}, Recipe(), "batch"),
        ({"batch": "tokens"}, Recipe(micro_batches=2), "batch"),
        ({}, {}, "recipe"),
        ({"loss_sum": 3}, Recipe(), "loss_sum"),
        ({"loss_sum": Decoder.loss_sum}, SCHEDULE, "loss_sum"),
        ({"max_norm": 1.0}, INSIDE, "max_norm"),
        *(
            (changes, recipe, name)
            for recipe in (Recipe(), INSIDE)
            for changes, name in (
                ({"loss_sum": loss_as(torch.Tensor.detach)}, "[^:]*: the sum of losses"),
                ({"loss_sum": loss_as(lambda loss: loss * math.nan)}, "[^:]*:? ?the loss"),
                ({"optimizer": lambda p: None}, "optimizer"),
                ({"optimizer": another_optimizer}, "no parameter of the optimizer"),
            )
        ),
    ],
)
def test_a_step_that_does_not_go_with_its_recipe_is_refused(changes, recipe, name):
    model, _ = build(tiny, Recipe())
    options = {"optimizer": torch.optim.SGD, "batch": tiny_batch(), **changes}
    optimizer = options.pop("optimizer")(model.parameters())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"^{name}[^\n]* must "):
        train_step(model, optimizer, options.pop("batch"), recipe, **options)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_schedule_is_found_once_for_all_micro_batches_of_all_steps(monkeypatch):
    profiles, profile = [], Chain.profile
    monkeypatch.setattr(
        Chain, "profile", lambda *args, **kwargs: (profiles.append(1), profile(*args, **kwargs))[1]
    )
    recipe = replace(SCHEDULE, micro_batches=5)
    model, optimizer = build(tiny, recipe)
    # other bytes for the same chain are another schedule, and no other profile
    for each in (recipe, recipe, replace(recipe, schedule_bytes=500_000)):
        train_step(model, optimizer, tiny_batch(), each)
    assert len(profiles) == 1
    model.layers[0].requires_grad_(False)  # keeps less
    train_step(model, optimizer, tiny_batch(), recipe)
    assert len(profiles) == 2
    seen = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("loss", [3.0, torch.ones(2, requires_grad=True)], ids=str)
def test_a_loss_of_a_model_is_a_scalar(loss):
    model = Regression()
    model.loss = lambda batch: loss
    with pytest.raises(TypeError, match=r"^Regression\.loss must return a scalar"):
        train_step(model, torch.optim.SGD(model.parameters()), points(), SGD)


# ---- after an error


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(attention="flash", micro_batches=3),
        replace(SCHEDULE, head_chunk=7),
        Recipe(checkpoint="layers", in_backward=True),
        Recipe(**DOWN),
    ],
    ids=repr,
)
def test_after_an_error_in_the_middle_all_is_as_before(recipe, where):
    dropout = 0.0 if recipe.attention == "flash" else 0.1
    model = tiny(fused=True, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    attentions[1].standard = own = partial(Attention.standard, attentions[1])
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    copies, random = copy.deepcopy(gradients), torch.get_rng_state()
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
    del attentions[1].standard
    for p in model.parameters():
        p.grad = None
    assert_plain_step(model.eval(), recipe, tiny_batch())


def test_a_symbolic_step_leaves_dtype_random_numbers_and_modes_as_they_are():
    random, dtype, recipe = torch.get_rng_state(), torch.get_default_dtype(), SCHEDULE
    make = partial(tiny, dropout=0.1)
    estimate(make, tiny_batch, replace(recipe, precision="bf16"))
    for functions in ((stop, tiny_batch), (make, stop)):
        with pytest.raises(Stop):
            estimate(*functions, Recipe("bf16"))
    assert torch.get_default_dtype() is dtype and torch.equal(torch.get_rng_state(), random)
    assert torch._guards.detect_fake_mode() is None
    assert type(torch.empty(1)) is torch.Tensor


# ---- estimates

few_batch = partial(tiny_batch, 16)


def test_micro_batches_cost_nothing_but_time_for_each_that_is_run():
    runs = []

    def make():
        decoder = tiny()
        decoder.tokens.register_forward_pre_hook(lambda *_: runs.append(1))
        return decoder

    estimate(make, partial(tiny_batch, 64), Recipe(micro_batches=64))
    assert len(runs) == 1 + 2  # one more run checks whether the model reads values


@pytest.mark.parametrize(("precision", "size", "state"), [("fp32", 4, 8), ("bf16", 2, 12)])
def test_what_is_offloaded_is_not_on_the_device_where_the_tier_is_the_host(precision, size, state):
    plain, below, half, inside = (
        estimate(tiny, few_batch, Recipe(precision, **fields), tier="host")
        for fields in (
            {},
            {"offload_optimizer": 1.0},
            {"offload_optimizer": 0.5},
            {"offload_optimizer": 0.5, "in_backward": True},
        )
    )
    count = sum(p.numel() for p in tiny().parameters())
    # Adam counts its steps in one number for each parameter
    steps = 4 * len(list(tiny().parameters()))
    assert plain.moved_bytes == 0 and plain.at_peak["optimizer"] == state * count + steps
    assert below.at_peak["optimizer"] == 0 and below.tier == "host"
    assert below.bytes_down == below.bytes_up == size * count
    assert below.peak_bytes == plain.peak_bytes - plain.at_peak["optimizer"]
    moved = half.bytes_down // size
    assert count / 2 <= moved < 0.6 * count
    assert 0 <= half.at_peak["optimizer"] - state * (count - moved) <= steps
    assert half.bytes_down == half.bytes_up == inside.bytes_down == inside.bytes_up


@pytest.mark.parametrize(("tier", "copies"), [("file", 1), ("host", 2)])
def test_copies_that_are_not_named_are_those_of_the_device_with_such_a_tier(tier, copies):
    assert {"file": Device, "host": Cuda}[tier].ahead == copies
    left_out, named, others = (
        estimate(tiny, few_batch, Recipe(**DOWN, prefetch=n, in_flight=n), tier=tier)
        for n in (None, copies, 3 - copies)
    )
    assert left_out.peak_bytes != others.peak_bytes
    assert left_out == replace(named, recipe=left_out.recipe) and left_out.recipe.in_flight is None


def test_an_estimate_is_a_value_that_shows_itself():
    guess, same = (estimate(tiny, tiny_batch, Recipe(attention="flash")) for _ in range(2))
    assert guess == same and len({guess, same}) == 1
    assert f"{guess.peak_bytes:,} bytes" in str(guess) and guess.operator in str(guess)
    kinds = {name for name, count in guess.at_peak.items() if count}
    assert {row[0] for row in guess.rows()} == kinds - {"optimizer"} | {"optimizer state"}


# ---- runs


@pytest.mark.parametrize("recipe", [INSIDE, Recipe(**DOWN, micro_batches=2)], ids=repr)
def test_a_step_over_the_budget_is_stopped_at_the_operator_and_the_model_trains_on(recipe):
    recipe = replace(recipe, optimizer="sgd")
    guess, model = estimate(tiny, tiny_batch, recipe), tiny()
    done = run(tiny, tiny_batch, recipe, budget_bytes=guess.peak_bytes)
    assert done.meter.peak_bytes == guess.peak_bytes
    with pytest.raises(MemoryBudgetExceeded) as caught:
        run(lambda: model, tiny_batch, recipe, budget_bytes=guess.peak_bytes - 1)
    assert caught.value.operator == guess.operator and guess.operator in str(caught.value)
    assert caught.value.live_bytes + caught.value.wanted_bytes == guess.peak_bytes
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert_plain_step(model, recipe, tiny_batch())


def test_what_runs_found_keeps_no_model_alive():
    models = []

    def make():
        models.append(weakref.ref(model := tiny()))
        return model

    found = [run(make, tiny_batch, recipe) for recipe in (Recipe(), INSIDE, Recipe("bf16"))]
    gc.collect()
    assert [model() for model in models] == [None] * len(found)


@pytest.mark.filterwarnings("error")
def test_activations_go_down_from_min_bytes_on_and_a_search_does_not_warn_of_what_is_too_small():
    none = Recipe(offload_activations=True, min_bytes=10**9)
    few, more = replace(none, min_bytes=40_000), replace(none, min_bytes=0)
    down = [run(tiny, tiny_batch, recipe).traffic.bytes_down for recipe in (few, more)]
    assert 0 < down[0] < down[1]
    with pytest.warns(UserWarning, match="no activation was moved"):
        assert run(tiny, tiny_batch, none).traffic.bytes_down == 0
    fit(tiny, tiny_batch, 10**9, recipes=[none], progress=False)


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


RATE = Rates(1e9, 2e9, 1e9)
FILE = {"loss_sum": None, "tier": "file", "max_norm": None}
ASK = {"rates": RATE, "tier": "file", "progress": False}


def test_among_given_recipes_all_that_fit_are_found_in_order():
    make = partial(tiny, layers=2)
    recipes = [recipe for name, recipe in TABLE if name == "decoder"][:3]
    recipes += [Recipe("bf16", offload_optimizer=1.0), Recipe("bf16"), Recipe(), SGD, INSIDE]
    known = {recipe: estimate(make, tiny_batch, recipe) for recipe in recipes}
    budget = sorted(e.peak_bytes for e in known.values())[-2]
    for given in (iter(recipes + recipes), recipes[::-1]):
        found = fit(make, tiny_batch, budget, recipes=given, **ASK)
        assert set(found) == {e for e in known.values() if e.peak_bytes <= budget}
        order = [(RATE.seconds(e), e.recipe.micro_batches) for e in found]
        assert order == sorted(order) and len(found) == len(set(found)) > 5
    # The last takes more than the plain step, which was not asked about.
    for given in (recipes, [INSIDE]):
        least = min((known[recipe] for recipe in given), key=lambda e: e.peak_bytes)
        with pytest.raises(InfeasibleBudget) as caught:
            fit(make, tiny_batch, least.peak_bytes - 1, recipes=given, **ASK)
        assert caught.value.least == least


def test_a_budget_below_the_least_names_the_least_and_its_recipe():
    asked = partial(tiny, layers=1), partial(random_tokens, 2, 8, 61)
    with pytest.raises(InfeasibleBudget) as caught:
        fit(*asked, 1000, base=SGD, quick=True, **ASK)
    error, least = caught.value, caught.value.least
    assert estimate(*asked, least.recipe).peak_bytes == least.peak_bytes == error.least_bytes
    assert f"{least.peak_bytes:,} bytes" in str(error) and repr(least.recipe) in str(error)
    assert "\n" not in str(error) and error.budget_bytes == 1000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    found = fit(*asked, least.peak_bytes, base=SGD, quick=True, **ASK)
    assert found[0].peak_bytes <= least.peak_bytes


def test_standard_attention_is_looked_at_where_flash_takes_more():
    # a tile in fp32 is larger
    make = partial(Decoder, vocabulary=10, hidden=16, heads=4, layers=1, sequence=64)
    base = Recipe(precision="bf16")
    facts = EstimateCache(make, partial(random_tokens, 2, 64, 10), base, **FILE)
    least = replace(base, checkpoint="layers", micro_batches=2)
    standard, flash = (
        facts.estimate(replace(least, attention=name)).peak_bytes for name in ATTENTIONS
    )
    assert standard < flash and set(Search(facts, 1, RATE).values("attention")) == set(ATTENTIONS)


@pytest.mark.parametrize("tier", ["file", "host"])
def test_what_is_passed_over_could_not_have_fitted_or_been_cheaper(tier):
    base = Recipe(attention="flash", min_bytes=1000)
    facts = EstimateCache(tiny, tiny_batch, base, **{**FILE, "tier": tier})
    facts.estimate(base)  # whose FLOPs are then known
    choices = {
        "keep": ("none", "layers"),
        "head_chunk": (None, 32),
        "offload_optimizer": (0.0, 0.5, 1.0),
        "offload_activations": (False, True),
        "pieces": ((False, 1), (True, 1), (False, 2)),
    }
    for row in rows(choices, lambda row: True, draws=200):
        inside, count = row.pop("pieces")
        fields = {"checkpoint": row.pop("keep"), "in_backward": inside, "micro_batches": count}
        recipe = replace(base, **fields, **row)
        floor, seconds = floor_bytes(facts, recipe), least_seconds(facts, recipe, RATE)
        found = facts.estimate(recipe)
        assert 0 < floor <= found.peak_bytes and 0 < seconds <= RATE.seconds(found)


def test_segments_are_as_few_as_fit():
    make, family = partial(tiny, layers=9), replace(INSIDE, checkpoint="segments", segments=2)
    found = [estimate(make, tiny_batch, replace(family, segments=n)) for n in (2, 3, 9)]
    two, three, nine = (e.peak_bytes for e in found)
    assert nine < three < two and found[0].flops < found[1].flops < found[2].flops
    facts = EstimateCache(make, tiny_batch, Recipe(), **FILE)
    for budget, count in ((two, 2), (two - 1, 3), (three, 3), (three - 1, 9), (nine - 1, None)):
        best = best_of(Search(facts, budget, RATE), family)
        assert best == (count and replace(family, segments=count))


@pytest.mark.parametrize(
    ("options", "tier"),
    [({}, "file"), ({"rates": RATE}, "host"), ({"rates": "H100", "tier": "file"}, "file")],
)
def test_the_tier_is_a_file_for_a_laptop_and_the_host_for_other_machines(options, tier):
    make, recipes = partial(tiny, layers=1), [Recipe(offload_optimizer=1.0)]
    [found] = fit(make, tiny_batch, 10**9, recipes=recipes, progress=False, **options)
    assert found.tier == tier


# ---- what cannot be estimated


def looking(model, batch):
    total, weight = squares(model, batch)
    return total * 2 if total > 1 else total, weight


def of_table(model, batch):
    return model(batch).square().sum() * torch.ones(()), 3


places = partial(torch.ones, 3, 2, dtype=torch.long)
NOT_ESTIMATED = [
    (partial(nn.Embedding, 7, 3, sparse=True), places, of_table, "makes a sparse gradient.* pass"),
    (partial(nn.EmbeddingBag, 7, 3, sparse=True), places, of_table, "makes a sparse gradient"),
    (Regression, points, looking, "reads values of its data .*symbolic"),
]


@pytest.mark.parametrize(("make", "batch", "loss_sum", "message"), NOT_ESTIMATED)
def test_what_depends_on_values_runs_but_cannot_be_estimated(make, batch, loss_sum, message):
    for ask in (partial(estimate, recipe=SGD), partial(fit, budget_bytes=10**9, progress=False)):
        with pytest.raises(ValueError, match=f"^the step {message}"):
            ask(make, batch, loss_sum=loss_sum)
    assert run(make, batch, SGD, loss_sum=loss_sum).result.stepped


class Rotated(Regression):
    """Complex weights, and a complex table."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.ones(3)))
        self.register_buffer("table", torch.polar(torch.ones(3), torch.ones(3)))

    def loss(self, batch):
        return super().loss(batch) * (self.turn * self.table).imag.sum()


def test_complex_parameters_and_buffers_keep_their_imaginary_parts():
    for recipe in (Recipe(), Recipe(precision=None)):
        model, _ = build(Rotated, recipe)
        assert all(map(torch.equal, (model.turn, model.table), (Rotated().turn, Rotated().table)))
        assert_measured(Rotated, points, recipe)
    for function in (estimate, run):
        with pytest.raises(TypeError, match=r"^a parameter .*must be real and dense"):
            function(Rotated, points, Recipe("bf16"))


def test_what_was_there_before_cannot_be_estimated():
    batch, model = points(), tiny()
    for make, of in ((Regression, lambda: batch), (lambda: model, tiny_batch)):
        with pytest.raises(ValueError, match=r"^make_model and make_batch must"):
            estimate(make, of, Recipe())


def test_a_step_that_meets_what_an_estimate_has_left_in_a_cache_says_so():
    table = lru_cache(lambda: torch.linspace(0, 1, 9).sum())
    step = Regression, points, SGD
    options = {"loss_sum": lambda model, batch: (model.loss(batch) * table(), 1)}
    estimate(*step, **options)
    with pytest.raises(ValueError, match=r"kept a symbolic tensor .* clear that cache"):
        run(*step, **options)
    table.cache_clear()
    assert run(*step, **options).result.stepped


def test_an_operator_whose_memory_does_not_show_is_refused():
    step = partial(nn.LSTM, 8, 16, batch_first=True), partial(torch.ones, 4, 5, 8), SGD
    options = {"loss_sum": lambda model, batch: (model(batch)[0].square().sum(), 4)}
    if torch.backends.mkldnn.is_available():
        with pytest.raises(ValueError, match=r"aten.mkldnn_rnn_layer.*mkldnn.flags"):
            estimate(*step, **options)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_measured(*step, **options)


def test_a_recipe_that_cannot_be_does_not_stop_the_others():
    impossible = replace(SCHEDULE, schedule_bytes=1)
    [found] = fit(tiny, tiny_batch, 10**9, recipes=[impossible, SGD], progress=False)
    assert found.recipe == SGD
    with pytest.raises(InfeasibleBudget) as caught:
        fit(tiny, tiny_batch, 10**9, recipes=[impossible], progress=False)
    assert caught.value.least is caught.value.least_bytes is None


def test_the_way_to_a_schedule_is_one_that_can_be_gone():
    recipe = replace(SCHEDULE, schedule_bytes=200_000, micro_batches=5, offload_optimizer=1.0)
    steps = steps_to(recipe)
    assert len(steps) == 4 and all(estimate(tiny, tiny_batch, step) for step in steps)


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
        assert estimate(Turned, partial(torch.ones, 8, 64), recipe).moved_bytes == 0
