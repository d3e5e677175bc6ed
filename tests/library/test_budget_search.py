"""The search of `fit`: extrapolated estimates, and the recipes that it finds and skips.

Extrapolated estimates are compared with whole symbolic steps, and the cheapest recipe with a grid
of recipes that are all estimated."""

import pickle
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial

import brute_force_fit
import pytest
import torch
from brute_force_fit import Chain
from torch import nn

from course_lib.budget import RATES, InfeasibleBudget, Rates, Recipe, estimate, fit, run
from course_lib.budget.search.best_numbers import least_schedule, with_schedule
from course_lib.budget.search.candidates import RecipeSearch
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.extrapolation import (
    MANY,
    BlockExtrapolator,
    can_extrapolate,
    highest_cost,
)
from course_lib.budget.search.fit import search_by_tensors
from course_lib.budget.traces.equal_stages import ForwardPassCache
from course_lib.memory import symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.offload import chosen_below

RATE = Rates(1e9, 2e9, 1e9)
CACHE_OPTIONS = {"loss_sum": None, "tier": "file", "max_norm": None}
FIT_OPTIONS = {"tier": "file", "progress": False}
SGD, LAYERS = Recipe(optimizer="sgd"), Recipe(checkpoint="layers")
SMALL = {"offload_activations": True, "min_bytes": 500}


def deep(layers=MANY + 1, hidden=16, **options):
    return Decoder(vocabulary=67, hidden=hidden, heads=2, layers=layers, sequence=12, **options)


def batch(samples=5):
    return random_tokens(samples, 12, 67)


def extrapolator_of(make, make_batch, base=None, tier="file", max_norm=None):
    return BlockExtrapolator(make, make_batch, base or Recipe(), None, tier, max_norm)


def search_of(make, make_batch, base, budget=1, **options):
    estimates = EstimateCache(make, make_batch, base, **{**CACHE_OPTIONS, **options})
    return RecipeSearch(estimates, budget, RATE)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_schedule_cost_is_set_by_largest_micro_batch(sizes):
    recipe = Recipe(checkpoint="optimal", schedule_bytes=10**9)
    with symbolic():
        model = Decoder(vocabulary=67, hidden=16, heads=2, layers=4, sequence=12)
        costs = [highest_cost(model, [batch(n)], recipe, None) for n in sizes]
        found = highest_cost(model, [batch(n) for n in sizes], recipe, None)
    assert found == costs[sizes.index(3)] != costs[sizes.index(1)]


class PlainChain(Chain):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Alternating(PlainChain):
    """Equal blocks with different operators between them."""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x if i % 2 else x.sin().cos())
        return x


class NeedsAllBlocks(Chain):
    """Chain that raises if some blocks are removed."""

    def forward(self, x):
        _ = self.blocks[MANY]
        return super().forward(x)


class Growing(Chain):
    """Chain that needs bytes in proportion to the square of the number of blocks."""

    def forward(self, x):
        return super().forward(x) + (x.new_ones(len(self.blocks) ** 2, 999) * x[0, 0]).sin().sum()


points, many_points = partial(torch.randn, 6, 16), partial(torch.randn, 300, 16)


def frozen():
    model = deep()
    model.tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


class Wide(nn.Module):
    """Equal blocks with large and small parameters; the update needs the most memory."""

    def __init__(self, width=2100):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(9)
        )

    def loss_sum(self, batch):
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), len(batch)


class Nested(PlainChain):
    """Different blocks, each of which has a list of equal modules."""

    def __init__(self, count):
        nn.Module.__init__(self)
        lists = [[nn.Linear(16, 16, bias=bool(i % 2)) for _ in range(count)] for i in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in lists)


class Numbered(PlainChain):
    """Blocks with a number, a rate and a setting, by which every other one may need more bytes."""

    class Block(nn.Linear):
        def __init__(self, layer_idx, wide):
            super().__init__(16, 16)
            self.layer_idx, self.rate, self.wide = layer_idx, 0.1 + 0.1 * layer_idx, wide

        def forward(self, x):
            return super().forward(x) + (torch.cat([x] * 9).sin().sum() if self.wide else 0.0)

    def __init__(self, alternating):
        nn.Module.__init__(self)
        wide = [bool(i % 2) and alternating for i in range(MANY + 1)]
        self.blocks = nn.ModuleList(self.Block(i, each) for i, each in enumerate(wide))


def one_block_per_segment(layers, **options):
    return Recipe(checkpoint="segments", segments=layers, **options)


FOR_DECODER = [
    Recipe(attention="flash", checkpoint="layers", micro_batches=5),
    Recipe(checkpoint="selective", head_chunk=7, offload_optimizer=0.5),
    Recipe(checkpoint="segments", segments=3, offload_optimizer=0.25),
    Recipe(checkpoint="optimal", schedule_bytes=150_000, micro_batches=2),
    Recipe(in_backward=True, offload_optimizer=1.0, **SMALL),
    Recipe(checkpoint="layers", micro_batches=3, offload_optimizer=0.75, **SMALL),
    one_block_per_segment(MANY + 1, micro_batches=2, attention="flash"),
    Recipe(prefetch=2, in_flight=1, offload_optimizer=1.0, page_bytes=30_000, **SMALL),
    Recipe(accumulate="fp32", micro_batches=2),
]
FOR_ANY_MODEL = [
    Recipe(micro_batches=6, checkpoint="layers"),
    Recipe(micro_batches=3, offload_optimizer=0.5),
    Recipe(optimizer="sgd", in_backward=True),
]
PAGED = [
    Recipe(offload_optimizer=fraction, page_bytes=page_bytes)
    for fraction, page_bytes in ((0.0, 16 << 20), (0.2, 16 << 20), (0.5, 1 << 20), (1.0, 1 << 20))
]
FIRST = [replace(LAYERS, first_blocks=n, attention="flash") for n in (1, MANY + 1)]


EIGHT_BIT = Recipe(optimizer="adam8bit", update="loop")
OPTIMIZERS = [
    Recipe(optimizer="momentum", update="foreach"),
    Recipe(optimizer="momentum", update="loop", in_backward=True),
    Recipe(optimizer="momentum", update="foreach", offload_optimizer=1.0, in_backward=True),
    Recipe(update="fused", offload_optimizer=0.5),
    Recipe(optimizer="adafactor"),
    Recipe(optimizer="adafactor", in_backward=True),
]


@pytest.mark.parametrize(
    ("make", "make_batch", "precision", "tier", "recipes"),
    [
        (deep, batch, "bf16", "host", FOR_DECODER[7:]),
        (partial(deep, tied=False), batch, "bf16", "file", FOR_DECODER[4:7]),
        (partial(deep, dropout=0.1), batch, "fp32", "host", FOR_DECODER[1:4]),
        (frozen, batch, "fp32", "file", FOR_DECODER[:1]),
        (partial(deep, MANY + 2), batch, "fp32", "file", FIRST),
        (partial(Chain, [16] * (MANY + 1)), points, "bf16", "file", OPTIMIZERS),
        # parameters of 4,096 numbers or more have 8-bit state, and share a table
        (partial(deep, 8, 64), batch, "fp32", "file", [EIGHT_BIT]),
        (Wide, points, "fp32", "host", PAGED),
        (partial(Nested, MANY + 1), points, "fp32", "file", [one_block_per_segment(MANY + 1)]),
        (partial(Numbered, False), points, "fp32", "file", FOR_ANY_MODEL),
        (partial(Numbered, True), points, "fp32", "file", FOR_ANY_MODEL[:1]),
        (partial(Chain, [16] * MANY + [32]), points, "fp32", "file", FOR_ANY_MODEL[:1]),
        (partial(Alternating, [16] * (MANY + 3)), points, "fp32", "file", FOR_ANY_MODEL),
    ],
)
def test_estimate_extrapolated_from_few_blocks_equals_estimate_of_all_blocks(
    make, make_batch, precision, tier, recipes
):
    extrapolator = extrapolator_of(make, make_batch, Recipe(precision), tier)
    for recipe in recipes:
        recipe = replace(recipe, precision=precision)
        assert can_extrapolate(recipe)
        expected = estimate(make, make_batch, recipe, tier=tier)
        assert extrapolator.estimate(recipe) == expected, recipe
        if make is Wide:
            offloaded = chosen_below(extrapolator.trained, recipe.offload_optimizer)
            assert extrapolator.updates.parameters_left_out(recipe, offloaded)
    if recipes is FIRST:  # not all of the blocks were run
        assert max(count for _, count in extrapolator._few) <= MANY


class UNet(nn.Module):
    """Blocks with different names, which are not in a list."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        for name in ("down", "middle", "up"):
            inside = nn.Linear(16, 99), nn.Tanh(), norm(99), nn.Linear(99, 16)
            self.add_module(name, nn.Sequential(*inside))

    def loss(self, x):
        first = self.down(x)
        return self.up(self.middle(first) + first).square().mean()


def summed(model, x):
    return model.loss(x) * len(x), len(x)


NO_BLOCKS = (
    r"no checkpoint was tried, .*blocks= \(--blocks in the command\): 'down', 'middle', 'up'"
)
ONE_MICRO_BATCH = "only one micro-batch was tried: micro_batches must be 1 for a UNet"


@pytest.mark.parametrize(
    ("norm", "options", "expected"),
    [
        (nn.Identity, {}, [NO_BLOCKS, f"{ONE_MICRO_BATCH}, got 2: its loss is a mean.*loss_sum"]),
        (nn.Identity, {"loss_sum": summed}, [NO_BLOCKS]),
        (nn.BatchNorm1d, {"loss_sum": summed}, [NO_BLOCKS, f"{ONE_MICRO_BATCH} with BatchNorm "]),
        (nn.Identity, {"blocks": ["down", "middle", "up"], "loss_sum": summed}, []),
        (nn.Identity, {"base": replace(SGD, micro_batches=2), "loss_sum": summed}, [NO_BLOCKS]),
        (nn.Identity, {"recipes": [SGD]}, []),
        (nn.Identity, {"loss_sum": summed, "count": "reserved", "kind": "cuda"}, [NO_BLOCKS]),
    ],
)
def test_search_result_or_error_lists_untried_techniques_with_reason(norm, options, expected):
    options = {"base": SGD, "quick": True, "progress": False, **options}
    for budget in (10**9, 1000):
        try:
            found = fit(partial(UNet, norm), many_points, budget, **options)
        except InfeasibleBudget as error:
            assert budget == 1000
            found = pickle.loads(pickle.dumps(error))
        assert len(found.not_tried) == len(expected)
        for sentence, pattern in zip(found.not_tried, expected, strict=True):
            assert re.match(pattern, sentence) and sentence in str(found)


def assert_equal_traces(found, expected):
    """Assert that two steps are equal at every point of the trace."""
    assert found.trace.operators == expected.trace.operators
    assert (found.trace.live == expected.trace.live).all()
    for name in ("flops", "bytes_down", "bytes_up"):
        assert getattr(found.trace, name) == getattr(expected.trace, name)


def ids_of_due(step):
    """Return the ids of the parameters that are due for an update, for each point of the trace."""
    return [[id(p) for p in each] for each in step.due]


EXTRAPOLATED = [
    Recipe(in_backward=True),
    replace(LAYERS, micro_batches=3),
    replace(LAYERS, **SMALL),
    replace(LAYERS, prefetch=2, in_flight=2, **SMALL),
    Recipe(prefetch=2, in_flight=1, **SMALL),
]


@pytest.mark.parametrize("recipe", EXTRAPOLATED, ids=str)
def test_extrapolated_trace_equals_trace_of_all_blocks_at_every_point(recipe):
    extrapolator = extrapolator_of(partial(deep, 2 * MANY), batch)
    with symbolic(extrapolator.mode):
        found = extrapolator.forward_and_backward(recipe)
        whole = extrapolator.measure(recipe, 2 * MANY)
    assert extrapolator._few
    assert_equal_traces(found, whole)
    if recipe.in_backward:
        assert ids_of_due(found) == ids_of_due(whole)


BLOCKS = {"blocks": "layers.*"}
BY_SCHEDULE = [
    (Recipe(checkpoint="optimal", schedule_bytes=1), 0.1),  # replaced by the least feasible bytes
    (Recipe(checkpoint="optimal", schedule_bytes=1, attention="flash", **BLOCKS), 0.0),
    (Recipe(checkpoint="segments", segments=3, in_backward=True, **BLOCKS), 0.0),
    (Recipe(checkpoint="segments", segments=2 * MANY - 1, micro_batches=2, **BLOCKS), 0.0),
]


@pytest.mark.parametrize(("recipe", "dropout"), BY_SCHEDULE, ids=str)
def test_trace_with_replayed_equal_stages_equals_trace_of_all_stages(monkeypatch, recipe, dropout):
    """Compare a run of every operator with one that replays records of an equal stage."""
    extrapolator = extrapolator_of(partial(deep, 2 * MANY, dropout=dropout), batch)
    if recipe.checkpoint == "optimal":
        with pytest.raises(InfeasibleBudget) as info:
            extrapolator.schedule_cost(recipe)
        recipe = replace(recipe, schedule_bytes=info.value.least_bytes)
    calls, replay = [], ForwardPassCache._replay_record
    monkeypatch.setattr(
        ForwardPassCache, "_replay_record", lambda *args: calls.append(1) or replay(*args)
    )
    with extrapolator.symbolic_step(recipe):
        whole = extrapolator.measure(recipe, 2 * MANY, skip_equal_stages=False)
        assert not calls
        replayed = extrapolator.measure(recipe, 2 * MANY)
    assert len(calls) > MANY
    assert_equal_traces(replayed, whole)
    assert ids_of_due(replayed) == ids_of_due(whole)


class Narrow(nn.Module):
    """Blocks of two numbers each, so that the norms of the gradients need the most memory."""

    def __init__(self, blocks=20):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(blocks))

    def loss_sum(self, batch):
        weights = sum(block.weight.sum() + block.bias.sum() for block in self.blocks)
        return weights * batch.sum(), len(batch)


def test_estimate_with_clipping_counts_norms_and_excludes_step_in_backward():
    make_batch, recipe = partial(torch.ones, 2, 1), Recipe(micro_batches=2)
    clipped, plain = (estimate(Narrow, make_batch, SGD, max_norm=norm) for norm in (1e-3, None))
    measured = run(Narrow, make_batch, SGD, max_norm=1e-3)
    assert clipped.peak_bytes == measured.meter.peak_bytes > plain.peak_bytes
    for make in (partial(Narrow, 2), partial(Narrow, MANY + 9)):
        found = extrapolator_of(make, make_batch, max_norm=1e-3).estimate(recipe)
        assert found == estimate(make, make_batch, recipe, max_norm=1e-3)
    for max_norm, tried in ((1.0, {False}), (None, {False, True})):
        families = search_of(deep, batch, SGD, max_norm=max_norm).families()
        assert {family.in_backward for family in families} == tried


def plain_chain(layers):
    return PlainChain([64] * layers)


@pytest.mark.parametrize(
    ("make", "make_batch", "recipe_of"),
    [
        (deep, batch, lambda layers: replace(LAYERS, **SMALL)),
        (plain_chain, points, partial(one_block_per_segment, micro_batches=2)),
        (plain_chain, points, partial(one_block_per_segment, in_backward=True)),
    ],
    ids=["offloaded", "segments", "in backward"],
)
def test_number_of_blocks_run_by_estimate_is_independent_of_depth(make, make_batch, recipe_of):
    work = []
    for layers in (2 * MANY, 2 * MANY + 4):
        recipe, calls = recipe_of(layers), []
        extrapolator = extrapolator_of(partial(make, layers), make_batch)
        for block in extrapolator.blocks:
            inner = block.norm1 if make is deep else block
            inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        extrapolator.estimate(recipe)
        work.append(len(calls))
    assert work[0] == work[1] > 0


# ---- recipes that a search must find


@pytest.mark.parametrize("model", [Growing, NeedsAllBlocks])
def test_fit_for_irregular_models_returns_estimates_of_all_blocks(model):
    make = partial(model, [64] * (MANY + 1))
    recipes = [Recipe(), Recipe(in_backward=True), Recipe(micro_batches=6, offload_optimizer=1.0)]
    expected = [estimate(make, points, recipe) for recipe in recipes]
    peaks = sorted(e.peak_bytes for e in expected)
    for budget in peaks[:2]:
        found = fit(make, points, budget, recipes=recipes, **FIT_OPTIONS)
        assert {e.recipe for e in found} == {e.recipe for e in expected if e.peak_bytes <= budget}
        assert found[0] in expected and (found.whole > 0) == (model is NeedsAllBlocks)
    with pytest.raises(InfeasibleBudget) as caught:
        fit(make, points, peaks[0] - 1, recipes=recipes, **FIT_OPTIONS)
    assert caught.value.least in expected


@pytest.mark.parametrize("in_backward", [False, True])
def test_search_finds_schedule_whenever_smallest_schedule_fits_budget(in_backward):
    make = partial(PlainChain, [64] * 6)
    recipe = Recipe(checkpoint="optimal", schedule_bytes=1, in_backward=in_backward)
    search = search_of(make, points, Recipe())
    peak = estimate(make, points, least_schedule(search, recipe)).peak_bytes
    for search.budget in (peak - 1, peak, peak + 6000):
        found = with_schedule(search, recipe)
        assert (found is not None and search.fits(found)) == (search.budget >= peak)


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(experts))

    def forward(self, x):
        hidden = self.up(x).relu_() * 1.5
        return x + self.down(hidden.mul_(0.5)) + sum(expert(x) for expert in self.experts)


class Odd(PlainChain):
    """Blocks that change in place what "selective" keeps, in a model whose loss is a mean.

    The blocks may be the same module, or have more experts than there are blocks."""

    def __init__(self, experts=0, shared=False):
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList([Block()] * 4 if shared else [Block(experts) for _ in range(3)])

    def loss(self, x):
        return self(x).square().mean()


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"experts": 6}], ids=str)
def test_search_skips_failing_recipes_and_estimates_returned_recipes_exactly(options):
    make, base = partial(Odd, **options), replace(SGD, in_backward=True)
    with pytest.raises(RuntimeError):
        estimate(make, many_points, replace(base, checkpoint="selective"))
    budget = estimate(make, many_points, base).peak_bytes * 5 // 8
    for found in fit(make, many_points, budget, base=base, **FIT_OPTIONS):
        measured = run(make, many_points, found.recipe).meter
        assert measured.peak_bytes == found.peak_bytes <= budget


def test_search_selects_largest_offload_pages_that_fit_budget():
    base, make = Recipe(micro_batches=5, offload_optimizer=1.0), partial(deep, 2)
    large, *small = brute_force_fit.PAGES
    with brute_force_fit.small_pages():
        for size in (large, small[0]):
            budget = estimate(make, batch, replace(base, page_bytes=size)).peak_bytes
            found = fit(make, batch, budget, base=base, quick=True, progress=False)
            assert {e.recipe.page_bytes for e in found} == {size}


@pytest.mark.parametrize(
    ("name", "most", "budgets"), [("chain", 150, 4), ("uneven chain", 60, 1), ("table", 60, 1)]
)
def test_exhaustive_grid_contains_no_cheaper_recipe_than_search_result(name, most, budgets):
    cache = brute_force_fit.estimates_of(brute_force_fit.CASES[name])
    with brute_force_fit.small_pages():
        searches, differences = brute_force_fit.compare(cache, most, budgets)
    assert searches == 3 * budgets and not differences


# ---- options of a search


HALF = {"precision": "bf16", "accumulate": "fp32", "head_chunk": 7}
BASES = [
    {"checkpoint": "segments", "segments": 2, "update": "foreach", "attention": None, **HALF},
    {"checkpoint": "optimal", "schedule_bytes": 70_000, "offload_optimizer": 0.5},
    {"in_backward": True, "page_bytes": 999, **SMALL},
    {"checkpoint": "selective", "first_blocks": 1, "optimizer": "sgd", "micro_batches": 5},
]


@pytest.mark.parametrize("fields", BASES, ids=str)
def test_search_does_not_change_fields_set_in_base_recipe(fields):
    base = Recipe(**fields)
    search = search_of(partial(deep, 2), batch, base)
    search.budget = search.cache.estimate(base).peak_bytes - 1
    with suppress(InfeasibleBudget):
        search_by_tensors(search, base)
    # recipes without offloaded state are only used to compute the bytes that offloading moves
    tried = [r for r in search.cache.estimates if r.offload_optimizer or not base.offload_optimizer]
    assert len(tried) > 1
    for recipe in tried:
        assert {name: getattr(recipe, name) for name in fields} == fields


@pytest.mark.parametrize("fields", [{}, {"checkpoint": "layers"}], ids=str)
def test_search_checkpoints_only_named_blocks(fields):
    names = ("down", "up")
    base, checkpointed = replace(SGD, **fields), replace(SGD, checkpoint="layers", blocks=names)
    expected = estimate(UNet, many_points, checkpointed)
    search = search_of(UNet, many_points, base, expected.peak_bytes, blocks=list(names))
    assert search_by_tensors(search, base)[0].peak_bytes <= expected.peak_bytes
    assert search.cache.estimate(checkpointed) == expected
    assert {e.blocks for e in search.cache.estimates if e.checkpoint != "none"} == {names}


def test_quick_search_estimates_fewer_recipes_and_title_says_quick():
    make = partial(Chain, [64] * 3)
    budget = estimate(make, points, Recipe()).peak_bytes * 6 // 10
    slow, quick = (
        fit(make, points, budget, rates=RATE, quick=each, **FIT_OPTIONS) for each in (False, True)
    )
    assert "quick search" in quick.title and "quick search" not in slow.title
    counts = [int(re.search(r"([0-9]+) were estimated", each.title)[1]) for each in (slow, quick)]
    assert counts[1] < counts[0] and RATE.seconds(slow[0]) <= RATE.seconds(quick[0])


def test_search_counting_reserved_memory_finds_cheapest_recipe():
    make = partial(Decoder, vocabulary=2000, hidden=256, heads=4, layers=1, sequence=128)
    functions, rates = (make, lambda: random_tokens(4, 128, 2000)), RATES["H100"]
    recipes = [Recipe(), Recipe(micro_batches=4), Recipe(checkpoint="layers", micro_batches=2)]
    found = [estimate(*functions, recipe, tier="host", kind="cuda") for recipe in recipes]
    reserved = {each.reserved_bytes(): each for each in found}
    options = {"kind": "cuda", "tier": "host", "rates": rates, "progress": False}
    search = partial(fit, *functions, recipes=recipes, count="reserved", **options)
    cheapest = min(found, key=rates.seconds)
    assert cheapest.peak_bytes < min(reserved) < cheapest.reserved_bytes()
    for budget in (min(reserved), max(reserved)):
        fitting = [each for count, each in reserved.items() if count <= budget]
        best = search(budget_bytes=budget)
        assert set(best) <= set(fitting)
        assert rates.seconds(best[0]) == min(map(rates.seconds, fitting))
    with pytest.raises(InfeasibleBudget):
        search(budget_bytes=min(reserved) - 1)


def test_search_counting_reserved_memory_requires_cuda():
    with pytest.raises(ValueError, match=r"^kind must be 'cuda' if count is 'reserved'"):
        fit(deep, batch, 10**9, count="reserved")


def test_recipe_uses_techniques_of_smaller_recipe_but_not_vice_versa():
    search = search_of(deep, batch, Recipe())
    half, both = Recipe(offload_optimizer=0.5), replace(LAYERS, offload_optimizer=1.0)
    for recipe, smaller in [(LAYERS, Recipe()), (half, Recipe()), (both, half), (both, LAYERS)]:
        assert search.uses_techniques_of(recipe, smaller) and not search.uses_techniques_of(
            smaller, recipe
        )
