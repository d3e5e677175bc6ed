"""Recipes, and what `train_step`, `estimate`, `run` and `fit` guarantee for them.

`test_budget_combinations` compares gradients with autograd's, and
`test_budget_estimate_equals_run` compares bytes with the meter's."""

import copy
import gc
import inspect
import math
import pickle
import re
import weakref
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from all_pairs import rows
from test_budget_combinations import OFFLOAD, TABLE, assert_plain, plain_gradients
from test_budget_search import RATE, search_of
from torch import nn
from torch.nn import functional as F

from course_lib.budget import InfeasibleBudget, Recipe, build, estimate, fit, run, train_step
from course_lib.budget.search.best_numbers import best_of
from course_lib.budget.search.lower_bounds import floor_bytes, least_seconds
from course_lib.budget.techniques import APPLIED, TECHNIQUES
from course_lib.budget.techniques.attention import ATTENTIONS
from course_lib.budget.techniques.micro_batches import counts_allowed
from course_lib.budget.waterfall import steps_to
from course_lib.memory import MemoryBudgetExceeded, cast
from course_lib.models import Attention, Decoder, DecoderLayer, random_tokens
from course_lib.offload import DiskStore
from course_lib.offload.device import Cuda, Device
from course_lib.schedule import Chain

SGD = Recipe(optimizer="sgd")
IN_BACKWARD = Recipe(in_backward=True)
SCHEDULE = Recipe(checkpoint="optimal", schedule_bytes=450_000)


def tiny(**options):
    sizes = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 3, "sequence": 24}
    return Decoder(**{**sizes, **options})


def tiny_batch(samples=5, seed=0):
    return random_tokens(samples, 24, 61, seed=seed)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = 3  # in a decoder, this name is a list of blocks
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


def test_recipe_repr_evaluates_to_equal_recipe_and_omits_defaults():
    assert repr(Recipe()) == "Recipe()"
    blocks = Recipe(checkpoint="layers", blocks=("encoder.*", "decoder.*"), ranks=2, shard="ddp")
    for recipe in (*(each for _, each in TABLE), blocks):
        copied = eval(repr(recipe))
        assert copied == recipe and hash(copied) == hash(recipe)
        changed = recipe.changed_fields()
        assert repr(recipe).count("=") == len(changed) and Recipe(**changed) == recipe
        assert not changed.items() & Recipe().__dict__.items()


def test_each_recipe_field_belongs_to_exactly_one_technique():
    owned = [name for technique in TECHNIQUES for name in technique.fields]
    names = Recipe.__dataclass_fields__.keys()
    assert sorted(owned) == sorted(names)
    documented = re.findall(r"^ {4}(\w+): ", inspect.cleandoc(Recipe.__doc__), re.MULTILINE)
    assert names <= {*documented}
    # A technique that changes a model must have a place in the order.
    for technique in TECHNIQUES:
        assert technique in APPLIED or "apply" not in vars(type(technique))


def test_allowed_micro_batch_counts_agree_with_tensor_split():
    for samples in range(1, 70):
        cuts = {len(torch.empty(samples).split(size)) for size in range(1, samples + 1)}
        assert counts_allowed(samples) == sorted(cuts)


# ---- the step


def mean_loss(model, batch):
    return model.loss(batch), 1


def assert_plain_step(model, recipe, batch, **options):
    """Assert that a step has the gradients that autograd alone gives in float64."""
    expected = plain_gradients(lambda: copy.deepcopy(model), batch, mean_loss)
    assert_plain(lambda: model, batch, recipe, expected, **options)


def test_train_step_takes_loss_sum_function_from_model_or_argument():
    several = replace(SGD, micro_batches=3)
    assert_plain_step(Summing(), several, points())
    assert_plain_step(Regression(), several, points(), loss_sum=squares)


def test_micro_batches_require_loss_sum_for_a_mean_loss():
    class Tripled(Summing):
        def loss(self, batch):
            return 3 * super().loss(batch)

    for make in (Regression, Tripled):
        assert_plain_step(make(), Recipe(), points())
        with pytest.raises(ValueError, match=r"^micro_batches must be 1 .*got 2: .* loss_sum"):
            estimate(make, points, Recipe(micro_batches=2))
    search = partial(search_of, Regression, points, SGD)
    assert search().micro_batch_counts == (1,)
    assert search(loss_sum=squares).micro_batch_counts == (1, 2, 3, 6)


CHANGES = {
    "a block": lambda model: setattr(model.layers, "1", DecoderLayer(32, 2, norm_first=False)),
    "the loss": lambda model: setattr(model, "loss", lambda x, loss=model.loss: 3 * loss(x)),
    "a hook": lambda model: model.layers[0].register_forward_hook(lambda module, x, y: 2 * y),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modified_decoder_has_unchanged_loss_in_every_recipe(change):
    model = tiny(fused=True)
    CHANGES[change](model)
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


def test_train_step_ignores_stale_gradients_of_untrained_parameters():
    for recipe in (Recipe(), IN_BACKWARD):
        model, unused = tiny(), nn.Parameter(torch.ones(3))
        frozen = model.positions.weight.requires_grad_(False)
        for p in (frozen, unused):
            p.grad = torch.ones_like(p)
        before = frozen.clone()
        optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1)
        result = train_step(model, optimizer, tiny_batch(), recipe)
        assert result.weight == tiny_batch()[:, 1:].numel()
        assert torch.equal(frozen, before) and torch.equal(unused, torch.ones(3))
        assert all(p.grad is None for p in (*model.parameters(), unused))


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
        ({"max_norm": 1.0}, IN_BACKWARD, "max_norm"),
        *(
            (changes, recipe, name)
            for recipe in (Recipe(), IN_BACKWARD)
            for changes, name in (
                ({"loss_sum": loss_as(torch.Tensor.detach)}, "[^:]*: the sum of losses"),
                ({"loss_sum": loss_as(lambda loss: loss * math.nan)}, "[^:]*:? ?the loss"),
                ({"optimizer": lambda p: None}, "optimizer"),
                ({"optimizer": another_optimizer}, "no parameter of the optimizer"),
            )
        ),
    ],
)
def test_train_step_rejects_invalid_argument_and_leaves_parameters_unchanged(changes, recipe, name):
    model, _ = build(tiny, Recipe())
    options = {"optimizer": torch.optim.SGD, "batch": tiny_batch(), **changes}
    optimizer = options.pop("optimizer")(model.parameters())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"^{name}[^\n]* must "):
        train_step(model, optimizer, options.pop("batch"), recipe, **options)
    assert all(map(torch.equal, before, model.parameters()))


def test_schedule_profile_is_computed_once_for_all_steps(monkeypatch):
    profiles, profile = [], Chain.profile
    monkeypatch.setattr(
        Chain, "profile", lambda *args, **kwargs: (profiles.append(1), profile(*args, **kwargs))[1]
    )
    recipe = replace(SCHEDULE, micro_batches=5)
    model, optimizer = build(tiny, recipe)
    # other bytes for the same chain need another schedule, but the same profile
    for each in (recipe, recipe, replace(recipe, schedule_bytes=500_000)):
        train_step(model, optimizer, tiny_batch(), each)
    assert len(profiles) == 1
    model.layers[0].requires_grad_(False)  # the chain keeps fewer bytes
    train_step(model, optimizer, tiny_batch(), recipe)
    assert len(profiles) == 2
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("loss", [3.0, torch.ones(2, requires_grad=True)], ids=str)
def test_train_step_rejects_model_loss_that_is_not_scalar(loss):
    model = Regression()
    model.loss = lambda batch: loss
    with pytest.raises(
        TypeError, match=r"^Regression\.loss must return the mean over samples as a scalar"
    ):
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
        Recipe(**OFFLOAD),
    ],
    ids=repr,
)
def test_error_inside_step_restores_model_gradients_and_random_state(recipe, where):
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


def test_estimate_restores_dtype_random_state_and_modes_after_error():
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


def test_estimate_runs_only_one_of_equal_micro_batches():
    runs = []

    def make():
        decoder = tiny()
        decoder.tokens.register_forward_pre_hook(lambda *_: runs.append(1))
        return decoder

    estimate(make, partial(tiny_batch, 64), Recipe(micro_batches=64))
    assert len(runs) == 1 + 2  # one more run checks whether the model reads values


@pytest.mark.parametrize(("tier", "copies"), [("file", 1), ("host", 2)])
def test_default_prefetch_is_1_for_files_and_2_for_host(tier, copies):
    assert {"file": Device, "host": Cuda}[tier].ahead == copies
    default, explicit, other = (
        estimate(tiny, tiny_batch, Recipe(**OFFLOAD, prefetch=n, in_flight=n), tier=tier)
        for n in (None, copies, 3 - copies)
    )
    assert default.peak_bytes != other.peak_bytes and default.recipe.in_flight is None
    assert default == replace(explicit, recipe=default.recipe)


# ---- runs


@pytest.mark.parametrize("recipe", [IN_BACKWARD, Recipe(**OFFLOAD, micro_batches=2)], ids=repr)
def test_run_over_budget_raises_at_estimated_peak_operator(recipe):
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


def test_results_of_run_hold_no_reference_to_model():
    models = []

    def make():
        models.append(weakref.ref(model := tiny()))
        return model

    found = [run(make, tiny_batch, recipe) for recipe in (Recipe(), IN_BACKWARD, Recipe("bf16"))]
    gc.collect()
    assert [model() for model in models] == [None] * len(found)


@pytest.mark.filterwarnings("error")
def test_run_warns_if_min_bytes_exceeds_all_activations():
    none = Recipe(offload_activations=True, min_bytes=10**9)
    with pytest.warns(UserWarning, match="no activation was moved"):
        assert run(tiny, tiny_batch, none).traffic.bytes_down == 0
    fit(tiny, tiny_batch, 10**9, recipes=[none], progress=False)


def test_run_closes_store_that_it_created_but_not_argument(monkeypatch):
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


# ---- search


FIT_OPTIONS = {"rates": RATE, "tier": "file", "progress": False}


def test_fit_returns_fitting_recipes_in_order_of_cost():
    make = partial(tiny, layers=2)
    recipes = [recipe for name, recipe in TABLE if name == "decoder"][:3]
    recipes += [Recipe("bf16", offload_optimizer=1.0), Recipe("bf16"), Recipe(), SGD, IN_BACKWARD]
    estimates = {recipe: estimate(make, tiny_batch, recipe) for recipe in recipes}
    budget = sorted(e.peak_bytes for e in estimates.values())[-2]
    found = fit(make, tiny_batch, budget, recipes=iter(recipes + recipes[::-1]), **FIT_OPTIONS)
    assert set(found) == {e for e in estimates.values() if e.peak_bytes <= budget}
    order = [(RATE.seconds(e), e.recipe.micro_batches) for e in found]
    assert order == sorted(order) and len(found) == len(set(found)) > 5
    # The plain step needs less memory than the last of these, but was not given.
    for given in ([Recipe("bf16"), IN_BACKWARD], [IN_BACKWARD]):
        least = min((estimates[recipe] for recipe in given), key=lambda e: e.peak_bytes)
        with pytest.raises(InfeasibleBudget) as caught:
            fit(make, tiny_batch, least.peak_bytes - 1, recipes=given, **FIT_OPTIONS)
        assert caught.value.least == least


def test_infeasible_budget_error_names_lowest_peak_and_its_recipe():
    functions = partial(tiny, layers=1), partial(random_tokens, 2, 8, 61)
    options = {"base": SGD, "quick": True, **FIT_OPTIONS}
    with pytest.raises(InfeasibleBudget) as caught:
        fit(*functions, 1000, **options)
    error, least = caught.value, caught.value.least
    assert estimate(*functions, least.recipe).peak_bytes == least.peak_bytes == error.least_bytes
    assert f"{least.peak_bytes:,} bytes" in str(error) and repr(least.recipe) in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert fit(*functions, least.peak_bytes, **options)[0].peak_bytes <= least.peak_bytes


def test_search_tries_standard_attention_where_flash_needs_more_memory():
    # a tile in fp32 is larger than the scores of standard attention
    make = partial(Decoder, vocabulary=10, hidden=16, heads=4, layers=1, sequence=64)
    base = Recipe(precision="bf16")
    search = search_of(make, partial(random_tokens, 2, 64, 10), base)
    recipe = replace(base, checkpoint="layers", micro_batches=2)
    standard, flash = (
        search.cache.estimate(replace(recipe, attention=name)).peak_bytes for name in ATTENTIONS
    )
    assert standard < flash
    assert set(search.values("attention")) == set(ATTENTIONS)


@pytest.mark.parametrize("tier", ["file", "host"])
def test_search_lower_bounds_do_not_exceed_estimated_bytes_and_seconds(tier):
    base = Recipe(attention="flash", min_bytes=1000)
    estimates = search_of(tiny, tiny_batch, base, tier=tier).cache
    estimates.estimate(base)  # the bounds of others are computed from its FLOPs
    choices = {
        "checkpoint": ("none", "layers"),
        "head_chunk": (None, 32),
        "offload_optimizer": (0.0, 0.5, 1.0),
        "offload_activations": (False, True),
        "in_backward": (False, True),
        "micro_batches": (1, 2),
    }
    for row in rows(choices, lambda row: not row["in_backward"] or row["micro_batches"] == 1, 200):
        recipe = replace(base, **row)
        floor, seconds = floor_bytes(estimates, recipe), least_seconds(estimates, recipe, RATE)
        found = estimates.estimate(recipe)
        assert 0 < floor <= found.peak_bytes and 0 < seconds <= RATE.seconds(found)


def test_search_uses_smallest_number_of_segments_that_fits():
    make = partial(tiny, layers=9)
    family = replace(IN_BACKWARD, checkpoint="segments", segments=2)
    found = [estimate(make, tiny_batch, replace(family, segments=n)) for n in (2, 3, 9)]
    two, three, nine = (e.peak_bytes for e in found)
    assert nine < three < two and found[0].flops < found[1].flops < found[2].flops
    search = search_of(make, tiny_batch, Recipe())
    for search.budget, count in (
        (two, 2),
        (two - 1, 3),
        (three, 3),
        (three - 1, 9),
        (nine - 1, None),
    ):
        best = best_of(search, family)
        assert best == (count and replace(family, segments=count))


@pytest.mark.parametrize(
    ("options", "tier"),
    [({}, "file"), ({"rates": RATE}, "host"), ({"rates": "H100", "tier": "file"}, "file")],
)
def test_default_offload_tier_is_file_for_laptop_otherwise_host(options, tier):
    make, recipes = partial(tiny, layers=1), [Recipe(offload_optimizer=1.0)]
    [found] = fit(make, tiny_batch, 10**9, recipes=recipes, progress=False, **options)
    assert found.tier == tier


# ---- steps that cannot be estimated


def test_casting_to_real_dtype_keeps_imaginary_parts_of_complex_parameters():
    model = nn.ParameterList([torch.polar(torch.ones(3), torch.ones(3))])
    assert cast(model, torch.float64)[0].dtype == torch.complex64


def test_estimate_rejects_make_functions_that_return_existing_tensors():
    batch, model = points(), tiny()
    for make, make_batch in ((Regression, lambda: batch), (lambda: model, tiny_batch)):
        with pytest.raises(ValueError, match=r"^an estimate cannot use a tensor"):
            estimate(make, make_batch, Recipe())


def test_run_raises_if_user_cache_contains_symbolic_tensor():
    table = lru_cache(lambda: torch.linspace(0, 1, 9).sum())
    step = Regression, points, SGD
    options = {"loss_sum": lambda model, batch: (model.loss(batch) * table(), 1)}
    estimate(*step, **options)
    with pytest.raises(ValueError, match=r"stored it .* Clear that cache"):
        run(*step, **options)
    table.cache_clear()
    assert run(*step, **options).result.stepped


def test_fit_skips_recipe_with_infeasible_schedule_bytes():
    impossible = replace(SCHEDULE, schedule_bytes=1)
    [found] = fit(tiny, tiny_batch, 10**9, recipes=[impossible, SGD], progress=False)
    assert found.recipe == SGD
    with pytest.raises(InfeasibleBudget) as caught:
        fit(tiny, tiny_batch, 10**9, recipes=[impossible], progress=False)
    assert caught.value.least is caught.value.least_bytes is None


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(update="foreach", attention=None, checkpoint="segments", segments=2, head_chunk=8),
        Recipe(offload_activations=True, min_bytes=10, optimizer="momentum", in_backward=True),
        replace(SCHEDULE, schedule_bytes=200_000, micro_batches=5, offload_optimizer=1.0),
    ],
    ids=str,
)
def test_steps_from_baseline_to_recipe_can_all_be_estimated(recipe):
    steps = steps_to(recipe)
    assert steps[-1] == recipe and len(set(steps)) == len(steps) > 1
    assert steps[0].changed_fields().keys() <= {"precision", "optimizer", "update", "attention"}
    assert steps[0].attention == (None if recipe.attention is None else "standard")
    assert all(estimate(tiny, tiny_batch, step) for step in steps)


class Rotating(nn.Module):
    """Model that reads its buffer in backward, outside a call of the module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("rotation", torch.linalg.qr(torch.randn(64, 64))[0])

    def loss_sum(self, batch):
        return (self.layer(batch) @ self.rotation).square().sum(), len(batch)


def test_activation_offload_leaves_model_buffers_on_device():
    recipe = Recipe(offload_activations=True, min_bytes=64 * 64 * 4)
    with pytest.warns(UserWarning, match="no activation was moved"):
        assert estimate(Rotating, partial(torch.ones, 8, 64), recipe).moved_bytes == 0
