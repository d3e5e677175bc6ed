"""What `fit` composes is what whole symbolic steps take, and nothing is lost by it."""

import pickle
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import brute_force_fit
import pytest
import torch
from brute_force_fit import Chain
from torch import nn

from course_lib.budget import RATES, InfeasibleBudget, Rates, Recipe, estimate, fit, run
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.search import families
from course_lib.budget.search.best_numbers import least_schedule, with_schedule
from course_lib.budget.search.candidates import Search, additions
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.extrapolation import MANY, BlockExtrapolator
from course_lib.budget.search.fit import Estimates, search_by_reserved, search_by_tensors
from course_lib.budget.techniques.checkpoints import Checkpoint
from course_lib.budget.techniques.head import ChunkedHead
from course_lib.budget.traces.equal_blocks import equal_blocks
from course_lib.budget.traces.equal_stages import Repeats
from course_lib.memory import symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.offload import chosen_below

RATE = Rates(1e9, 2e9, 1e9)
FILE = {"loss_sum": None, "tier": "file", "max_norm": None}
ASK = {"tier": "file", "progress": False}
SGD, LAYERS = Recipe(optimizer="sgd"), Recipe(checkpoint="layers")
SMALL = {"offload_activations": True, "min_bytes": 500}


def deep(layers=MANY + 1, hidden=16, **options):
    return Decoder(vocabulary=67, hidden=hidden, heads=2, layers=layers, sequence=12, **options)


def batch(samples=5):
    return random_tokens(samples, 12, 67)


def composer_of(make, of, base=None, tier="file", max_norm=None):
    return BlockExtrapolator(make, of, base or Recipe(), None, tier, max_norm)


def search_of(make, of, base, budget=1, **options):
    """A search with estimates of its own."""
    return Search(EstimateCache(make, of, base, **{**FILE, **options}), budget, RATE)


class InAChain(Chain):
    """Nothing is added between blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Alternating(InAChain):
    """All blocks are alike, but what is done between them is not."""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x if i % 2 else x.sin().cos())
        return x


class Whole(Chain):
    """Needs all its blocks."""

    def forward(self, x):
        _ = self.blocks[MANY]
        return super().forward(x)


class Growing(Chain):
    """The last block needs bytes in proportion to the square of the number of blocks."""

    def forward(self, x):
        return super().forward(x) + (x.new_ones(len(self.blocks) ** 2, 999) * x[0, 0]).sin().sum()


points, many_points = partial(torch.randn, 6, 16), partial(torch.randn, 300, 16)


def frozen():
    model = deep()
    model.tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


class Wide(nn.Module):
    """Many equal blocks with large and small parameters; the update takes the most memory."""

    def __init__(self, blocks=9, width=2100):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(blocks)
        )

    def loss_sum(self, batch):
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), len(batch)


class Nested(InAChain):
    """The longest list of equal modules is inside a block, and all blocks differ."""

    def __init__(self, count):
        nn.Module.__init__(self)
        lists = [[nn.Linear(16, 16, bias=bool(i % 2)) for _ in range(count)] for i in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in lists)


class Numbered(InAChain):
    """Blocks with a number, a rate and a setting, by which every other one takes more."""

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


def alone(layers, **options):
    """A segment for each block."""
    return Recipe(checkpoint="segments", segments=layers, **options)


COMPOSED = [
    Recipe(attention="flash", checkpoint="layers", micro_batches=5),
    Recipe(checkpoint="selective", head_chunk=7, offload_optimizer=0.5),
    Recipe(checkpoint="segments", segments=3, offload_optimizer=0.25),
    Recipe(checkpoint="optimal", schedule_bytes=100_000, micro_batches=3),
    Recipe(in_backward=True, offload_optimizer=1.0, **SMALL),
    Recipe(checkpoint="layers", micro_batches=3, offload_optimizer=0.75, **SMALL),
    alone(MANY + 1, micro_batches=3, attention="flash"),
    Recipe(checkpoint="selective", first_blocks=5, micro_batches=3),
    Recipe(prefetch=2, in_flight=1, offload_optimizer=1.0, page_bytes=30_000, **SMALL),
    Recipe(checkpoint="layers", prefetch=1, in_flight=2, attention="flash", **SMALL),
    Recipe(accumulate="fp32", micro_batches=2),
]
ANY_MODEL = [
    Recipe(micro_batches=6, checkpoint="layers"),
    Recipe(micro_batches=3, offload_optimizer=0.5),
    Recipe(optimizer="sgd", in_backward=True),
]
PAGED = [
    Recipe(offload_optimizer=fraction, page_bytes=page_bytes)
    for fraction, page_bytes in ((0.0, 16 << 20), (0.2, 16 << 20), (0.5, 1 << 20), (1.0, 1 << 20))
]
FIRST = [replace(LAYERS, first_blocks=n, attention="flash") for n in (1, MANY, 2 * MANY - 1)]


def updated(optimizer, update="loop", offloaded=True):
    """Recipes with another optimizer."""
    states = [(0.0, False), (0.0, True), *([(0.5, False), (1.0, True)] if offloaded else [])]
    base = Recipe(optimizer=optimizer, update=update)
    return [
        replace(base, offload_optimizer=fraction, in_backward=inside) for fraction, inside in states
    ]


@pytest.mark.parametrize(
    ("make", "of", "precision", "tier", "recipes"),
    [
        # Each of the recipes in at least one row.
        (deep, batch, "bf16", "host", COMPOSED[7:]),
        (partial(deep, tied=False), batch, "bf16", "file", COMPOSED[4:7]),
        (partial(deep, dropout=0.1), batch, "fp32", "host", COMPOSED[1:4]),
        (partial(deep, layers=3), batch, "bf16", "file", COMPOSED[2:5:2]),
        (frozen, batch, "fp32", "file", COMPOSED[0::5]),
        (partial(deep, 2 * MANY), batch, "fp32", "file", FIRST),
        (deep, batch, "bf16", "file", updated("momentum")),
        (deep, batch, "bf16", "file", updated("momentum", "foreach")),
        (deep, batch, "bf16", "file", updated("adam", "fused")),
        (deep, batch, "bf16", "file", updated("adafactor", offloaded=False)),
        # of 4,096 numbers and more; a table is shared
        (partial(deep, 8, 64), batch, "fp32", "file", updated("adam8bit", offloaded=False)),
        (Wide, points, "fp32", "host", PAGED),
        (Wide, points, "bf16", "file", PAGED),
        (partial(Nested, MANY + 1), points, "fp32", "file", [alone(MANY + 1)]),
        (partial(Numbered, False), points, "fp32", "file", ANY_MODEL),
        (partial(Numbered, True), points, "fp32", "file", ANY_MODEL),
        (partial(Chain, [16] * MANY + [32]), points, "fp32", "file", ANY_MODEL),
        (partial(Chain, [16] * (MANY + 3)), points, "bf16", "host", ANY_MODEL),
        (partial(Alternating, [16] * (MANY + 3)), points, "fp32", "file", ANY_MODEL),
    ],
)
def test_what_is_composed_is_the_estimate_of_the_whole_step(make, of, precision, tier, recipes):
    composer = composer_of(make, of, Recipe(precision), tier)
    for recipe in recipes:
        recipe = replace(recipe, precision=precision)
        assert composer.takes(recipe)
        assert composer.estimate(recipe) == estimate(make, of, recipe, tier=tier), recipe
        if make is Wide:
            below = chosen_below(composer.trained, recipe.offload_optimizer)
            assert composer.updates.left_out(recipe, below)
    if recipes is FIRST:
        assert max(count for _, count in composer._few) <= MANY  # of twelve blocks not all were run


def test_equal_blocks_are_the_longest_list_of_those_that_are_set_alike():
    model = deep()
    assert list(equal_blocks(model)) == list(model.layers)
    assert len(equal_blocks(Numbered(False))) == MANY + 1
    assert len(equal_blocks(Numbered(True))) == len(equal_blocks(Chain([16] * 9 + [32]))) == 0
    assert composer_of(partial(InAChain, [64] * MANY), points).runs_them
    composer = composer_of(partial(Nested, MANY + 1), points)
    assert len(composer.blocks) == MANY + 1 and not composer.runs_them


class Hybrid(Chain):
    """Blocks of two types in one list."""

    def __init__(self, count=6):
        nn.Module.__init__(self)
        kinds = [nn.GELU, nn.Tanh]
        self.blocks = nn.ModuleList(
            type(f"Of{kinds[i % 2].__name__}", (nn.Sequential,), {})(
                nn.Linear(16, 99), kinds[i % 2](), nn.Linear(99, 16)
            )
            for i in range(count)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Skips(nn.Module):
    """Blocks that have names of their own, and no list."""

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


def test_blocks_of_several_types_are_found_as_if_they_were_named():
    of = partial(torch.randn, 1, 300, 16)
    peak = estimate(Hybrid, of, SGD).peak_bytes
    for share in (0.7, 0.5):
        found, named = (
            fit(Hybrid, of, int(peak * share), base=SGD, quick=True, **ASK, blocks=blocks)
            for blocks in (None, "blocks.*")
        )
        assert [e.peak_bytes for e in found] == [e.peak_bytes for e in named]
        assert found.not_tried == named.not_tried == [] and "not tried" not in str(found)
        assert named[0].recipe.checkpoint == found[0].recipe.checkpoint == "layers"


NO_BLOCKS = (
    r"no checkpoint was tried, .*blocks= \(--blocks in the command\): 'down', 'middle', 'up'"
)
ONE_ALONE = "only one micro-batch was tried: micro_batches must be 1 for a Skips"


@pytest.mark.parametrize(
    ("norm", "options", "said"),
    [
        (nn.Identity, {}, [NO_BLOCKS, f"{ONE_ALONE}, got 2: its loss is a mean.*loss_sum"]),
        (nn.Identity, {"loss_sum": summed}, [NO_BLOCKS]),
        (nn.BatchNorm1d, {"loss_sum": summed}, [NO_BLOCKS, f"{ONE_ALONE} with BatchNorm .* eval"]),
        (nn.Identity, {"blocks": ["down", "middle", "up"], "loss_sum": summed}, []),
        (nn.Identity, {"base": replace(SGD, micro_batches=2), "loss_sum": summed}, [NO_BLOCKS]),
    ],
)
@pytest.mark.parametrize("count", ["tensors", "reserved"])
def test_a_search_says_what_it_could_not_try(norm, options, said, count):
    options = {"base": SGD, "quick": True, "progress": False, **options}
    options |= {"count": count, "kind": "cuda"} if count == "reserved" else {}
    for budget in (10**9, 1000):
        try:
            found = fit(partial(Skips, norm), many_points, budget, **options)
        except InfeasibleBudget as error:
            assert budget == 1000
            found = pickle.loads(pickle.dumps(error))
        assert len(found.not_tried) == len(said)
        for sentence, each in zip(found.not_tried, said, strict=True):
            assert re.match(each, sentence) and sentence in str(found)


def test_given_recipes_are_all_tried():
    given = {"recipes": [SGD], "progress": False}
    assert not fit(Skips, many_points, 10**9, **given).not_tried
    with pytest.raises(InfeasibleBudget) as raised:
        fit(Skips, many_points, 1, **given)
    assert not raised.value.not_tried


@pytest.mark.parametrize(
    ("recipe", "allowed"),
    [
        (SGD, {"precision", "offload_activations", "in_backward"}),
        (replace(SGD, in_backward=True), {"precision", "offload_activations"}),
    ],
)
def test_additions_are_the_techniques_that_model_and_recipe_allow(recipe, allowed):
    search = search_of(partial(Skips, nn.BatchNorm1d), many_points, SGD, loss_sum=summed)
    assert set(additions(search, recipe)) == allowed
    search = search_of(Skips, many_points, SGD, loss_sum=summed)
    more = set() if recipe.in_backward else {"micro_batches"}
    assert set(additions(search, recipe)) == allowed | more
    adam = replace(recipe, optimizer="adam")
    assert ("ranks" in additions(search, adam)) == (not recipe.in_backward)


@pytest.mark.parametrize("blocks", ["left", ["down", "left.*"]])
def test_names_of_blocks_that_match_nothing_are_an_error(blocks):
    with pytest.raises(ValueError, match=r"blocks must match .*, got 'left"):
        fit(Skips, many_points, 10**9, blocks=blocks, **ASK)


def test_an_error_of_the_composer_itself_is_raised(monkeypatch):
    known = EstimateCache(deep, batch, Recipe(), **FILE)
    monkeypatch.setattr(BlockExtrapolator, "with_optimizer", lambda *_: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        known.estimate(Recipe())


def assert_equal_traces(ours, others):
    """Assert that two steps are the same at every moment."""
    assert ours.trace.operators == others.trace.operators
    assert (ours.trace.live == others.trace.live).all()
    for name in ("flops", "bytes_down", "bytes_up"):
        assert getattr(ours.trace, name) == getattr(others.trace, name)


def ids_of_due(step):
    """What is due for an update at each moment."""
    return [[id(p) for p in each] for each in step.due]


GROWN = [
    Recipe(in_backward=True),
    replace(LAYERS, micro_batches=3),
    replace(LAYERS, **SMALL),
    replace(LAYERS, prefetch=0, in_flight=2, **SMALL),
    replace(LAYERS, prefetch=2, in_flight=2, **SMALL),
    Recipe(prefetch=2, in_flight=1, **SMALL),
]


@pytest.mark.parametrize(
    ("make", "of"),
    [(partial(deep, 2 * MANY), batch), (partial(Chain, [24] * 2 * MANY), points)],
    ids=["decoder", "sums between blocks"],
)
@pytest.mark.parametrize("recipe", GROWN, ids=str)
def test_what_is_composed_is_the_whole_step_moment_by_moment(make, of, recipe):
    composer = composer_of(make, of)
    with symbolic(composer.mode):
        composed, whole = composer.moments(recipe), composer.measure(recipe, 2 * MANY)
    assert composer._few
    assert_equal_traces(composed, whole)
    if recipe.in_backward:
        assert ids_of_due(composed) == ids_of_due(whole)


BLOCKS = {"blocks": "layers.*"}
BY_SCHEDULE = [
    (Recipe(checkpoint="optimal", schedule_bytes=1), 0.1),  # that is, the least that there is
    (Recipe(checkpoint="optimal", schedule_bytes=1, attention="flash", **BLOCKS), 0.0),
    (Recipe(checkpoint="segments", segments=3, in_backward=True, **BLOCKS), 0.0),
    (Recipe(checkpoint="segments", segments=2 * MANY - 1, micro_batches=2, **BLOCKS), 0.0),
]


@pytest.mark.parametrize(("recipe", "dropout"), BY_SCHEDULE, ids=str)
def test_one_of_equal_stages_gives_the_trace_of_all(monkeypatch, recipe, dropout):
    """Compare a run of every operator with one that replays records of an equal stage."""
    composer = composer_of(partial(deep, 2 * MANY, dropout=dropout), batch)
    if recipe.checkpoint == "optimal":
        with pytest.raises(InfeasibleBudget) as info:
            composer.schedule_cost(recipe)
        recipe = replace(recipe, schedule_bytes=info.value.least_bytes)
    entered, enter = [], Repeats._replay_record
    monkeypatch.setattr(
        Repeats, "_replay_record", lambda *given: entered.append(1) or enter(*given)
    )
    with composer.check_equal_blocks(recipe):
        whole = composer.measure(recipe, 2 * MANY, repeats=False)
        assert not entered
        short = composer.measure(recipe, 2 * MANY)
    assert len(entered) > MANY
    assert_equal_traces(short, whole)
    assert ids_of_due(short) == ids_of_due(whole)


class Narrow(nn.Module):
    """So many blocks of so few numbers each that the norms of their gradients take the most."""

    def __init__(self, blocks=20):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(blocks))

    def loss_sum(self, batch):
        return sum(
            block.weight.sum() + block.bias.sum() for block in self.blocks
        ) * batch.sum(), len(batch)


def test_a_step_that_clips_takes_its_norms_and_no_steps_in_backward():
    of = partial(torch.ones, 2, 1)
    guess, plain = (estimate(Narrow, of, SGD, max_norm=norm) for norm in (1e-3, None))
    done = run(Narrow, of, SGD, max_norm=1e-3)
    assert guess.peak_bytes == done.meter.peak_bytes > plain.peak_bytes
    for make in (partial(Narrow, 2), partial(Narrow, MANY + 9)):
        composer = composer_of(make, of, max_norm=1e-3)
        recipe = Recipe(micro_batches=2)
        assert composer.estimate(recipe) == estimate(make, of, recipe, max_norm=1e-3)
    for max_norm, tried in ((1.0, {False}), (None, {False, True})):
        families = search_of(deep, batch, SGD, max_norm=max_norm).families()
        assert {family.in_backward for family in families} == tried


@pytest.mark.parametrize(
    ("make", "of", "recipe_of"),
    [
        (deep, batch, lambda layers: LAYERS),
        (deep, batch, lambda layers: replace(LAYERS, **SMALL)),
        (lambda layers: InAChain([64] * layers), points, alone),
        (lambda layers: InAChain([64] * layers), points, partial(alone, micro_batches=2)),
        (lambda layers: InAChain([64] * layers), points, partial(alone, in_backward=True)),
    ],
    ids=["layers", "offloaded", "segments", "micro-batches", "in backward"],
)
def test_the_work_of_an_estimate_does_not_grow_with_the_blocks(make, of, recipe_of):
    work = []
    for layers in (2 * MANY, 2 * MANY + 4):
        recipe, composer, calls = recipe_of(layers), composer_of(partial(make, layers), of), []
        for block in composer.blocks:
            inner = block.norm1 if make is deep else block
            inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert composer.estimate(recipe) == estimate(partial(make, layers), of, recipe)
        work.append(len(calls))
    assert work[0] == work[1] > 0


# ---- nothing is lost


@pytest.mark.parametrize("kind", [Growing, Whole])
def test_what_fits_is_what_whole_steps_say_whatever_the_model(kind):
    make = partial(kind, [64] * (MANY + 1))
    recipes = [Recipe(), Recipe(in_backward=True), Recipe(micro_batches=6, offload_optimizer=1.0)]
    known = [estimate(make, points, recipe) for recipe in recipes]
    peaks = sorted(e.peak_bytes for e in known)
    for budget in peaks[:2]:
        found = fit(make, points, budget, recipes=recipes, **ASK)
        assert {e.recipe for e in found} == {e.recipe for e in known if e.peak_bytes <= budget}
        assert found[0] in known and (found.whole > 0) == (kind is Whole)
    with pytest.raises(InfeasibleBudget) as caught:
        fit(make, points, peaks[0] - 1, recipes=recipes, **ASK)
    assert caught.value.least in known


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_is_found_if_the_least_one_fits(inside):
    make = partial(InAChain, [64] * 6)
    recipe = Recipe(checkpoint="optimal", schedule_bytes=1, in_backward=inside)
    searching = search_of(make, points, Recipe())
    peak = estimate(make, points, least_schedule(searching, recipe)).peak_bytes
    for searching.budget in (peak - 1, peak, peak + 6000):
        found = with_schedule(searching, recipe)
        assert (found is not None and searching.fits(found)) == (searching.budget >= peak)


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(experts))

    def forward(self, x):
        hidden = self.up(x).relu_() * 1.5
        return x + self.down(hidden.mul_(0.5)) + sum(expert(x) for expert in self.experts)


class Odd(InAChain):
    """Blocks that change in place what "selective" keeps; the same block often; or with more
    experts than blocks. Over how many samples its loss goes is not known."""

    def __init__(self, experts=0, shared=False):
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList([Block()] * 4 if shared else [Block(experts) for _ in range(3)])

    def loss(self, x):
        return self(x).square().mean()


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"experts": 6}], ids=str)
def test_what_a_model_cannot_do_is_passed_over_and_the_rest_fits_when_it_is_run(options):
    make, base = partial(Odd, **options), replace(SGD, in_backward=True)
    with pytest.raises(RuntimeError):
        estimate(make, many_points, replace(base, checkpoint="selective"))
    budget = estimate(make, many_points, base).peak_bytes * 5 // 8
    for found in fit(make, many_points, budget, base=base, **ASK):
        done = run(make, many_points, found.recipe)
        assert done.meter.peak_bytes == found.peak_bytes <= budget


# ---- what is passed over loses nothing


def test_smaller_pages_fit_where_large_ones_do_not_and_the_largest_that_fit_are_taken():
    base, make = Recipe(micro_batches=5, offload_optimizer=1.0), partial(deep, 2)
    large, *small = brute_force_fit.PAGES
    with brute_force_fit.small_pages():
        for size in (large, small[0]):
            budget = estimate(make, batch, replace(base, page_bytes=size)).peak_bytes
            found = fit(make, batch, budget, base=base, quick=True, progress=False)
            assert {e.recipe.page_bytes for e in found} == {size}


@cache
def known_of(name):
    """A model, its batch, and what is estimated of it in several tests."""
    return brute_force_fit.known_of(brute_force_fit.CASES[name])


@pytest.mark.parametrize("name", ["chain", "uneven chain", "table"])
def test_no_recipe_of_a_grid_is_cheaper_than_what_is_found(name):
    with brute_force_fit.small_pages():
        searches, differences = brute_force_fit.compare(known_of(name), 150, budgets=4)
    assert searches > 5 and not differences


def test_grid_varies_every_field_that_the_search_varies():
    """A new field must be added to the grid, or here if the search never changes it."""
    never = {"precision", "optimizer", "update", "min_bytes", "accumulate", "ranks", "shard"}
    never |= {"blocks"}  # which blocks there are depends on the model
    with brute_force_fit.small_pages():
        recipes = brute_force_fit.grid(known_of("deep decoder"))
    names = Recipe.__dataclass_fields__
    varied = {name for name in names if len({getattr(r, name) for r in recipes}) > 1}
    assert varied == names.keys() - never


def test_brute_force_sees_a_rule_that_is_wrong(monkeypatch):
    # a wrong rule: adding a technique never moves fewer bytes
    monkeypatch.setattr(families, "_moves_as_much", lambda recipe, smaller: True)
    with brute_force_fit.small_pages():
        assert brute_force_fit.compare(known_of("chain"), 150, budgets=1)[1]


# ---- what is asked


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_search_is_for_any_optimizer(optimizer):
    base, make, of = Recipe(optimizer=optimizer), partial(deep, 1), partial(batch, 2)
    plain = estimate(make, of, base)
    # Somewhat more than the least that a quick search finds.
    share = {"sgd": 0.9, "adafactor": 0.9, "adam8bit": 0.94, "muon": 0.95}.get(optimizer, 0.75)
    budget = int(plain.peak_bytes * share)
    found = fit(make, of, budget, base=base, rates=RATE, quick=True, **ASK)
    assert all(e.recipe.optimizer == optimizer and e.peak_bytes <= budget for e in found)
    assert found[0] == estimate(make, of, found[0].recipe)


KEPT = [
    {"checkpoint": "layers", "blocks": "layers.1", "attention": "flash", "micro_batches": 5},
    {"checkpoint": "segments", "segments": 2, "update": "foreach", "attention": None},
    {"checkpoint": "optimal", "schedule_bytes": 70_000, "offload_optimizer": 0.5},
    {"precision": "bf16", "accumulate": "fp32", "head_chunk": 7},
    SMALL,
    {"in_backward": True, "offload_activations": True, "page_bytes": 999},
    {"checkpoint": "selective", "first_blocks": 1, "optimizer": "sgd"},
]


@pytest.mark.parametrize("fields", KEPT, ids=str)
def test_what_the_base_sets_is_in_every_recipe_that_is_tried(fields):
    base = Recipe(**fields)
    searching = search_of(partial(deep, 2), batch, base)
    searching.budget = searching.known.estimate(base).peak_bytes - 1
    with suppress(InfeasibleBudget):
        search_by_tensors(searching, base)
    tried = [
        recipe
        for recipe in searching.known.estimates
        if recipe.offload_optimizer or not base.offload_optimizer
    ]
    assert len(tried) > 1
    for recipe in tried:  # those without state below are compared with, for what it moves
        assert {name: getattr(recipe, name) for name in fields} == fields


class Mixed(Odd):
    """An encoder and a decoder, whose blocks are unlike."""

    def __init__(self):
        nn.Module.__init__(self)
        self.encoder, self.decoder = (Chain([64] * 3).blocks for _ in range(2))
        for block in self.decoder:
            block.append(nn.LayerNorm(16))

    @property
    def blocks(self):
        return [*self.encoder, *self.decoder]


@pytest.mark.parametrize("keep", [{}, {"checkpoint": "layers"}], ids=str)
def test_blocks_are_those_that_are_named(keep):
    both = ("encoder.*", "decoder.*")
    base, wanted = replace(SGD, **keep), replace(SGD, checkpoint="layers", blocks=both)
    budget = estimate(Mixed, many_points, wanted).peak_bytes
    searching = search_of(Mixed, many_points, base, budget, blocks=list(both))
    known = searching.known
    assert search_by_tensors(searching, base)[0].peak_bytes <= budget
    assert known.estimate(wanted) == estimate(Mixed, many_points, wanted)
    assert {e.blocks for e in known.estimates if e.checkpoint != "none"} == {both}


def test_a_quick_search_says_so_and_tries_less():
    make = partial(deep, 3)
    budget = estimate(make, batch, Recipe()).peak_bytes * 6 // 10
    slow, quick = (
        fit(make, batch, budget, rates=RATE, quick=each, **ASK) for each in (False, True)
    )
    assert "quick search" in quick.title and "quick search" not in slow.title
    made = [int(re.search(r"([0-9]+) were estimated", found.title)[1]) for found in (slow, quick)]
    assert made[1] < made[0] and RATE.seconds(slow[0]) <= RATE.seconds(quick[0])
    assert all(e.peak_bytes <= budget and e == estimate(make, batch, e.recipe) for e in quick)


def test_the_bar_shows_no_size_that_nobody_asked_for():
    shown = []
    searching = search_of(partial(InAChain, [64] * 3), many_points, SGD, watch=shown.append)
    searching.known.estimate(SGD)
    assert {"optimal", "layers"} <= {*searching.values("checkpoint")}
    assert SGD in shown and all((recipe.schedule_bytes or 0) < 1 << 50 for recipe in shown)


def test_a_search_by_what_is_reserved_finds_what_the_allocator_would_let_run():
    make = partial(Decoder, vocabulary=2000, hidden=256, heads=4, layers=1, sequence=128)
    given, rates = (make, lambda: random_tokens(4, 128, 2000)), RATES["H100"]
    every = [Recipe(), Recipe(micro_batches=4), Recipe(checkpoint="layers", micro_batches=2)]
    found = [estimate(*given, recipe, tier="host", kind="cuda") for recipe in every]
    taken = {each.recipe: each.reserved_bytes() for each in found}

    def within(room):
        """The search by tensors, among these."""
        fitting = sorted((e for e in found if e.peak_bytes <= room), key=rates.seconds)
        if not fitting:
            raise InfeasibleBudget(room, min(e.peak_bytes for e in found), "none was found")
        return Estimates(fitting, rates)

    cheapest = min(found, key=rates.seconds)
    assert taken[cheapest.recipe] > cheapest.peak_bytes
    budgets = {1} | {count + more for count in taken.values() for more in (-1, 0)}
    for budget in budgets | {each.peak_bytes for each in found}:
        fitting = [each for each in found if taken[each.recipe] <= budget]
        if not fitting:
            with pytest.raises(InfeasibleBudget):
                search_by_reserved(budget, within)
            continue
        best = search_by_reserved(budget, within)
        assert set(best) <= set(fitting)
        assert rates.seconds(best[0]) == min(map(rates.seconds, fitting))


def test_a_search_by_what_is_reserved_takes_a_device_that_has_such_an_allocator():
    with pytest.raises(ValueError, match=r"^kind must be 'cuda' when count is 'reserved'"):
        fit(deep, batch, 10**9, count="reserved")


@pytest.mark.parametrize(
    ("technique", "tried"),
    [
        (ChunkedHead, [{"head_chunk": None}, {"head_chunk": 3}]),
        (Checkpoint, [{"checkpoint": "none"}, {"checkpoint": "layers", "first_blocks": 2}]),
    ],
)
def test_a_search_tries_what_each_technique_proposes_and_nothing_else(
    technique, tried, monkeypatch
):
    """Combined with all that the others propose, except what two of them refuse together."""
    monkeypatch.setattr(technique, "candidates", lambda self, search: tried)
    families = list(search_of(deep, batch, Recipe(min_bytes=500)).families())
    field = next(iter(tried[0]))
    assert {getattr(recipe, field) for recipe in families} == {each[field] for each in tried}
    for each in tried:
        assert any(each.items() <= vars(recipe).items() for recipe in families)


def test_a_recipe_adds_to_one_that_uses_part_of_it_alone():
    search = search_of(deep, batch, Recipe())
    half, both = Recipe(offload_optimizer=0.5), replace(LAYERS, offload_optimizer=1.0)
    for recipe, smaller in [(LAYERS, Recipe()), (half, Recipe()), (both, half), (both, LAYERS)]:
        assert search.adds_to(recipe, smaller) and not search.adds_to(smaller, recipe)
