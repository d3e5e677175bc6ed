"""What `fit` composes is what whole symbolic steps take, and nothing is lost by it."""

import itertools
import math
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial

import brute_force_fit
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.budget import RATES, InfeasibleBudget, Rates, Recipe, estimate, fit, run, search
from course_lib.budget.blocks import equal_blocks
from course_lib.budget.candidates import Search
from course_lib.budget.extrapolate import MANY, BlockExtrapolator
from course_lib.budget.knowledge import EstimateCache
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.refine import best_copies, least_schedule, with_schedule
from course_lib.budget.repeats import Repeats
from course_lib.budget.reservation import search_by_reserved
from course_lib.budget.search import most_blocks, search_by_tensors
from course_lib.budget.techniques.attention import ATTENTIONS
from course_lib.budget.techniques.checkpoints import Checkpoint
from course_lib.budget.techniques.head import ChunkedHead
from course_lib.budget.techniques.micro_batches import counts_allowed
from course_lib.budget.techniques.offload_activations import OffloadedActivations
from course_lib.budget.techniques.optimizer import OffloadedState
from course_lib.memory import symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.offload import chosen_below

RATE = Rates(1e9, 2e9, 1e9)
FILE = {"loss_sum": None, "tier": "file", "max_norm": None}


def deep(layers=MANY + 1, hidden=16, **options):
    return Decoder(vocabulary=67, hidden=hidden, heads=2, layers=layers, sequence=12, **options)


def batch(samples=5):
    return random_tokens(samples, 12, 67)


class Uneven(nn.Module):
    """One block is wider than the others, so that none stands for all."""

    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in widths
        )

    def loss_sum(self, batch):
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, batch, reduction="sum"), len(batch)


class Counting(Uneven):
    """All blocks are alike, but what is done between them is not."""

    def loss_sum(self, batch):
        x = batch
        for i, block in enumerate(self.blocks):
            x = block(x if i % 2 else x.sin().cos())
        return x.square().sum(), len(batch)


class Whole(Uneven):
    """Needs all its blocks."""

    def loss_sum(self, batch):
        _ = self.blocks[MANY]
        return super().loss_sum(batch)


class Mean(Uneven):
    """Over how many samples its loss goes is not known, so that it takes one micro-batch."""

    def loss(self, batch):
        total, weight = self.loss_sum(batch)
        return total / weight


class Growing(Uneven):
    """The last block alone takes more the more blocks there are: as many bytes as their number
    squared."""

    def loss_sum(self, batch):
        loss, weight = super().loss_sum(batch)
        return loss + (batch.new_ones(len(self.blocks) ** 2, 999) * batch[0, 0]).sin().sum(), weight


def points():
    return torch.randn(6, 8)


DOWN = {"offload_activations": True, "min_bytes": 500}
COMPOSED = [
    Recipe(),
    Recipe(attention="flash", checkpoint="layers", micro_batches=5),
    Recipe(checkpoint="selective", head_chunk=7, offload_optimizer=0.5),
    Recipe(checkpoint="segments", segments=3, offload_optimizer=0.25),
    Recipe(checkpoint="optimal", schedule_bytes=100_000, micro_batches=3),
    Recipe(in_backward=True, offload_optimizer=0.5),
    Recipe(in_backward=True, offload_optimizer=0.25, checkpoint="layers", head_chunk=16),
    Recipe(in_backward=True, offload_optimizer=1.0, **DOWN),
    Recipe(checkpoint="layers", micro_batches=3, offload_optimizer=0.75, **DOWN),
    Recipe(optimizer="sgd", in_backward=True, attention="flash"),
    Recipe(checkpoint="segments", segments=MANY + 1, micro_batches=3, attention="flash"),
    Recipe(checkpoint="layers", first_blocks=2, attention="flash"),
    Recipe(checkpoint="selective", first_blocks=5, micro_batches=3),
    Recipe(prefetch=2, in_flight=1, offload_optimizer=1.0, page_bytes=30_000, **DOWN),
    Recipe(checkpoint="layers", prefetch=1, in_flight=2, attention="flash", **DOWN),
]
ANY_MODEL = [
    Recipe(),
    Recipe(micro_batches=6),
    Recipe(micro_batches=3, offload_optimizer=0.5),
    Recipe(in_backward=True, offload_optimizer=0.5),
    Recipe(optimizer="sgd", in_backward=True),
]
MODELS = {
    "tied": (deep, batch),
    "untied": (partial(deep, tied=False), batch),
    "dropout": (partial(deep, dropout=0.1), batch),
    "frozen": (lambda: _frozen(deep()), batch),
    "few": (partial(deep, layers=3), batch),
    "uneven": (partial(Uneven, [16] * MANY + [32]), points),
    "even": (partial(Uneven, [16] * (MANY + 3)), points),
    "counting": (partial(Counting, [16] * (MANY + 3)), points),
}


def _frozen(model):
    model.tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("name", "precision", "tier", "recipes"),
    [
        # Each of the recipes in at least one row.
        ("tied", "fp32", "file", COMPOSED[0::2]),
        ("tied", "bf16", "host", COMPOSED[1::4]),
        ("untied", "fp32", "host", COMPOSED[3::5]),
        ("untied", "bf16", "file", COMPOSED[7::4]),
        ("dropout", "fp32", "file", [r for r in COMPOSED if r.attention == "standard"][::5]),
        ("frozen", "bf16", "host", COMPOSED[::7]),
        ("tied", "bf16", "file", [Recipe(accumulate="fp32", micro_batches=2)]),
        ("tied", "bf16", "host", [Recipe(accumulate="fp32", offload_optimizer=0.5)]),
        ("few", "bf16", "file", COMPOSED[2:9:3]),
        ("uneven", "fp32", "file", ANY_MODEL),
        ("even", "bf16", "host", ANY_MODEL),
        ("even", "fp32", "file", ANY_MODEL),
        ("counting", "fp32", "file", ANY_MODEL),
    ],
    ids=str,
)
def test_what_is_composed_is_the_estimate_of_the_whole_step(name, precision, tier, recipes):
    make, of = MODELS[name]
    composer = BlockExtrapolator(make, of, Recipe(precision=precision), None, tier)
    for recipe in recipes:
        recipe = replace(recipe, precision=precision)
        assert composer.estimate(recipe) == estimate(make, of, recipe, tier=tier), recipe


def test_estimates_that_need_the_whole_step_are_counted():
    for model, count in ((Whole, 2), (Uneven, 0)):
        make = partial(model, [64] * (MANY + 1))
        recipes = [Recipe(), Recipe(micro_batches=6)]
        found = fit(make, points, 10**9, recipes=recipes, tier="file", progress=False)
        assert found.whole == count
        assert {e.recipe: e for e in found} == {r: estimate(make, points, r) for r in recipes}


def test_an_error_of_the_composer_itself_is_raised(monkeypatch):
    def broken(*_):
        raise KeyError("a mistake of the library")

    known = EstimateCache(deep, batch, Recipe(), **FILE)
    monkeypatch.setattr(BlockExtrapolator, "with_optimizer", broken)
    with pytest.raises(KeyError, match="a mistake of the library"):
        known.estimate(Recipe())


@pytest.mark.parametrize("first", [1, 2, MANY - 1, MANY, MANY + 1, 2 * MANY - 1])
def test_of_two_kinds_of_blocks_there_may_be_any_number_of_each(first):
    make, recipe = (
        partial(deep, 2 * MANY),
        Recipe(checkpoint="layers", first_blocks=first, attention="flash"),
    )
    composer = BlockExtrapolator(make, batch, Recipe(), None, "file")
    assert composer.estimate(recipe) == estimate(make, batch, recipe)
    assert max(count for _, count in composer._few) <= MANY  # of twelve blocks not all were run


GROWN = [
    Recipe(),
    Recipe(in_backward=True),
    Recipe(checkpoint="layers", micro_batches=3),
    Recipe(**DOWN),
    Recipe(checkpoint="layers", **DOWN),
    *(
        Recipe(checkpoint=keep, prefetch=ahead, in_flight=down, **DOWN)
        for keep, ahead, down in (("layers", 0, 2), ("layers", 2, 2), ("none", 2, 1))
    ),
]


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (partial(deep, 2 * MANY), batch),
        (partial(brute_force_fit.Chain, [24] * 2 * MANY), partial(torch.zeros, 6, 16)),
    ],
    ids=["decoder", "chain"],
)
@pytest.mark.parametrize("recipe", GROWN, ids=str)
def test_what_is_composed_is_the_whole_step_moment_by_moment(make, of, recipe):
    """Of a decoder, and of a chain with sums between its blocks."""
    composer = BlockExtrapolator(make, of, Recipe(), None, "file")
    with symbolic(composer.mode):
        composed, whole = composer.moments(recipe), composer.measure(recipe, 2 * MANY)
    ours, others = composed.trace, whole.trace
    assert composer._few and ours.operators == others.operators and (ours.live == others.live).all()
    for name in ("flops", "bytes_down", "bytes_up"):
        assert getattr(ours, name) == getattr(others, name)
    if recipe.in_backward:
        assert [[id(p) for p in due] for due in composed.due] == [
            [id(p) for p in due] for due in whole.due
        ]


BY_SCHEDULE = [
    Recipe(checkpoint="optimal", schedule_bytes=1),  # that is, the least that there is
    Recipe(checkpoint="optimal", schedule_bytes=1, blocks="layers.*", attention="flash"),
    Recipe(checkpoint="segments", segments=3, blocks="layers.*", in_backward=True),
    Recipe(checkpoint="segments", segments=2, blocks="layers.*", micro_batches=2),
    Recipe(checkpoint="segments", segments=2 * MANY - 1, blocks="layers.*"),
]


@pytest.mark.parametrize(
    ("recipe", "dropout"),
    [(BY_SCHEDULE[0], 0.1), *((recipe, 0.0) for recipe in BY_SCHEDULE)],
    ids=str,
)
def test_a_stage_that_stands_for_equal_ones_leaves_the_books_of_all_line_by_line(
    monkeypatch, recipe, dropout
):
    """Where every operator runs, and where a search enters what is known already."""
    composer = BlockExtrapolator(
        partial(deep, 2 * MANY, dropout=dropout), batch, Recipe(), None, "file"
    )
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
    ours, others = short.trace, whole.trace
    assert len(entered) > MANY
    assert ours.operators == others.operators and ours.flops == others.flops
    assert (ours.live == others.live).all()
    assert [[id(p) for p in due] for due in short.due] == [
        [id(p) for p in due] for due in whole.due
    ]


class Wide(nn.Module):
    """Many equal blocks with parameters large and small, of which the update takes the most."""

    def __init__(self, blocks=9, width=2100):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(blocks)
        )

    def loss_sum(self, batch):
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), len(batch)


@pytest.mark.parametrize("tier", ["file", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_of_all_is_that_of_few_blocks_and_what_the_others_hold(precision, tier):
    base, names = Recipe(precision=precision), []
    composer = BlockExtrapolator(Wide, points, base, None, tier)
    for fraction in (0.0, 0.2, 0.5, 0.8, 1.0):
        for page_bytes in (1 << 20, 16 << 20):
            recipe = replace(base, offload_optimizer=fraction, page_bytes=page_bytes)
            below = chosen_below(composer.trained, fraction)
            names.append(len(composer.updates.left_out(recipe, below)))
            assert composer.estimate(recipe) == estimate(Wide, points, recipe, tier=tier)
    assert min(names) > 0


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
    of, recipe = partial(torch.ones, 2, 1), Recipe(optimizer="sgd")
    guess, plain = (estimate(Narrow, of, recipe, max_norm=norm) for norm in (1e-3, None))
    assert (
        guess.peak_bytes
        == run(Narrow, of, recipe, max_norm=1e-3).meter.peak_bytes
        > plain.peak_bytes
    )
    for count in (2, MANY + 9):
        for each in (recipe, Recipe(micro_batches=2)):
            composer = BlockExtrapolator(partial(Narrow, count), of, Recipe(), None, "file", 1e-3)
            assert composer.estimate(each) == estimate(
                partial(Narrow, count), of, each, max_norm=1e-3
            )
    options = {"base": recipe, "max_norm": 1.0, "tier": "file", "progress": False}
    make, of = partial(deep, 1), partial(batch, 1)
    assert not any(e.recipe.in_backward for e in fit(make, of, 10**9, **options))
    with pytest.raises(InfeasibleBudget) as told:
        fit(make, of, 1, **options)
    assert not told.value.least.recipe.in_backward
    with pytest.raises(InfeasibleBudget) as told:
        fit(make, of, 1, **{**options, "max_norm": None})
    assert told.value.least.recipe.in_backward
    with pytest.raises(
        ValueError, match=r"max_norm must be None when in_backward is True, .*, got 1\.0"
    ):
        estimate(deep, batch, Recipe(in_backward=True), max_norm=1.0)


@pytest.mark.parametrize(
    "keep", [{"checkpoint": "layers"}, DOWN, {"checkpoint": "layers", **DOWN}], ids=str
)
def test_the_work_of_an_estimate_does_not_grow_with_the_blocks(keep):
    work = []
    for layers in (2 * MANY, 2 * MANY + 4):
        composer = BlockExtrapolator(partial(deep, layers), batch, Recipe(), None, "file")
        calls = []
        for block in composer.blocks:
            block.norm1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        composer.estimate(Recipe(**keep))
        work.append(len(calls))
    assert work[0] == work[1] > 0


class InAChain(Uneven):
    def loss_sum(self, batch):
        x = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, batch, reduction="sum"), len(batch)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"in_backward": True}], ids=str)
def test_a_segment_for_each_block_of_any_model_takes_the_work_of_a_few_blocks(options):
    work = []
    for layers in (MANY, MANY + 4):
        make, recipe = (
            partial(InAChain, [64] * layers),
            Recipe(checkpoint="segments", segments=layers, **options),
        )
        composer, calls = BlockExtrapolator(make, points, Recipe(), None, "file"), []
        for block in composer.blocks:
            block.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert composer.estimate(recipe) == estimate(make, points, recipe)
        work.append(len(calls))
    assert work[0] == work[1] > 0


class Nested(InAChain):
    """The longest list of equal modules is inside a block, of which each is unlike the next."""

    def __init__(self, count):
        nn.Module.__init__(self)
        lists = [[nn.Linear(8, 8, bias=bool(i % 2)) for _ in range(count)] for i in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in lists)


def test_segments_are_of_the_blocks_that_a_schedule_runs():
    make, recipe = partial(Nested, MANY + 1), Recipe(checkpoint="segments", segments=MANY + 1)
    assert len(BlockExtrapolator(make, points, Recipe(), None, "file").blocks) == MANY + 1
    assert not BlockExtrapolator(make, points, Recipe(), None, "file").runs_them
    assert BlockExtrapolator(
        partial(InAChain, [64] * MANY), points, Recipe(), None, "file"
    ).runs_them
    assert BlockExtrapolator(make, points, Recipe(), None, "file").estimate(recipe) == estimate(
        make, points, recipe
    )


def test_recipes_that_differ_below_alone_share_their_step(monkeypatch):
    composer, steps = BlockExtrapolator(deep, batch, Recipe(), None, "host"), []
    monkeypatch.setattr(
        composer,
        "moments",
        lambda *key, moments=composer.moments: (steps.append(key), moments(*key))[1],
    )
    found = [composer.estimate(Recipe(offload_optimizer=fraction)) for fraction in (0.0, 0.5, 1.0)]
    assert len(steps) == 1 and len({e.peak_bytes for e in found}) == 3


def test_the_blocks_are_the_longest_list_of_equal_ones_and_are_all_there_afterwards():
    assert list(equal_blocks(model := deep())) == list(model.layers)
    assert len(equal_blocks(Uneven([16] * 9 + [32]))) == 0
    composer = BlockExtrapolator(deep, batch, Recipe(), None, "file")
    before = list(composer.blocks)
    composer.estimate(Recipe())
    assert list(composer.blocks) == before and all(
        p.grad is None for p in composer.model.parameters()
    )


class Numbered(nn.Module):
    """Blocks with a number, a rate and a setting, by which every other one takes more."""

    class Block(nn.Module):
        def __init__(self, layer_idx, wide):
            super().__init__()
            self.layer_idx, self.rate, self.wide, self.linear = (
                layer_idx,
                0.1 + 0.1 * layer_idx,
                wide,
                nn.Linear(8, 8),
            )

        def forward(self, x):
            return self.linear(x) + (torch.cat([x] * 9).sin().sum() if self.wide else 0.0)

    def __init__(self, alternating):
        super().__init__()
        self.blocks = nn.ModuleList(
            self.Block(i, bool(i % 2) and alternating) for i in range(MANY + 1)
        )

    def loss_sum(self, batch):
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), len(batch)


@pytest.mark.parametrize("alternating", [False, True])
def test_blocks_that_are_set_otherwise_are_not_alike(alternating):
    make = partial(Numbered, alternating)
    assert len(equal_blocks(make())) == (0 if alternating else MANY + 1)
    for recipe in (Recipe(), Recipe(checkpoint="layers", micro_batches=2)):
        assert EstimateCache(make, points, Recipe(), **FILE).estimate(recipe) == estimate(
            make, points, recipe
        )


# ---- nothing is lost


@pytest.mark.parametrize(
    "make", [Growing, Whole, partial(Uneven)], ids=["growing", "whole", "even"]
)
def test_what_fits_is_what_whole_steps_say_whatever_the_model(make):
    make = partial(make, [64] * (MANY + 1))
    recipes = [Recipe(), Recipe(in_backward=True), Recipe(micro_batches=6, offload_optimizer=1.0)]
    known = [estimate(make, points, recipe) for recipe in recipes]
    for budget in sorted(e.peak_bytes for e in known)[:2]:
        found = fit(make, points, budget, recipes=recipes, tier="file", progress=False)
        assert {e.recipe for e in found} == {e.recipe for e in known if e.peak_bytes <= budget}
        assert found[0] in known
    with pytest.raises(InfeasibleBudget) as caught:
        fit(
            make,
            points,
            min(e.peak_bytes for e in known) - 1,
            recipes=recipes,
            tier="file",
            progress=False,
        )
    assert caught.value.least in known


def test_checkpoints_go_around_as_few_of_the_first_blocks_of_any_model_as_fit():
    make, of, base = partial(Mean, [32] * 5), partial(torch.randn, 300, 8), Recipe(optimizer="sgd")
    keeps = [{}, {"checkpoint": "selective"}, {"checkpoint": "layers"}]
    keeps += [{"checkpoint": "layers", "first_blocks": count} for count in range(1, 5)]
    known = [estimate(make, of, replace(base, **keep)) for keep in keeps]
    for count in (2, 3):
        budget = next(e.peak_bytes for e in known if e.recipe.first_blocks == count)
        found = fit(
            make, of, budget, base=base, rates=Rates(1e9, 2e9, 1.0), tier="file", progress=False
        )
        cheapest = min((e for e in known if e.peak_bytes <= budget), key=RATE.seconds)
        assert found[0] == cheapest and cheapest.recipe.first_blocks == count


class WithAHead(InAChain):
    """What comes after the blocks takes more than they do."""

    def loss_sum(self, batch):
        loss, weight = super().loss_sum(batch)
        return loss + (batch.new_ones(99, 999) * loss).sin().sum(), weight


def test_standard_attention_is_not_tried_where_flash_attention_was_too_large():
    """Of a long sequence flash attention takes less, here with fewer FLOPs as well."""
    make = partial(Decoder, vocabulary=31, hidden=16, heads=2, layers=1, sequence=1024)
    known = EstimateCache(make, partial(random_tokens, 2, 1024, 31), Recipe(), **FILE)
    standard, flash = (known.estimate(replace(Recipe(), attention=a)) for a in ATTENTIONS)
    search = Search(known, 2_000_000, RATE)
    assert search.least_memory_attention == ("flash",) and flash.flops < standard.flops
    with pytest.raises(InfeasibleBudget):
        search_by_tensors(search, Recipe())
    two = [e for e in known.estimates if e.micro_batches == 2 and not e.offload_activations]
    tried = {e.attention for e in two}
    assert tried == {"flash"}


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_is_given_up_at_once_only_where_none_fits(inside):
    make, recipe = (
        partial(WithAHead, [64] * 6),
        Recipe(checkpoint="optimal", schedule_bytes=1, in_backward=inside),
    )
    searching = Search(EstimateCache(make, points, Recipe(), **FILE), 1, RATE)
    least = least_schedule(searching, recipe).schedule_bytes
    peaks = [
        estimate(make, points, replace(recipe, schedule_bytes=least + 2000 * i)).peak_bytes
        for i in range(8)
    ]
    given_up = 0
    for budget in range(min(peaks) - 9000, min(peaks) + 9000, 3000):
        searching.budget, searching.known.estimates = budget, {}
        found = with_schedule(searching, recipe)
        assert (found is not None and searching.fits(found)) == (budget >= min(peaks))
        given_up += (
            found is None and sum(e.checkpoint == "optimal" for e in searching.known.estimates) == 1
        )
    assert given_up


def test_of_a_deep_model_nothing_is_cheaper_than_what_is_found(monkeypatch):
    monkeypatch.setattr("course_lib.budget.techniques.head.HEAD_CHUNK", 5)
    make, of = partial(deep, MANY), partial(batch, 2)
    base = Recipe(optimizer="sgd", attention="flash")
    keeps = [{}, {"checkpoint": "layers"}, {"checkpoint": "segments", "segments": 2}]
    every = [
        replace(base, head_chunk=chunk, micro_batches=count, **keep)
        for keep, chunk, count in itertools.product(keeps, (None, 5), counts_allowed(2))
    ]
    known = [estimate(make, of, recipe) for recipe in every]
    peaks = sorted(e.peak_bytes for e in known)
    budget = peaks[len(peaks) // 3]
    found = fit(make, of, budget, base=base, rates=RATE, tier="file", progress=False)
    assert RATE.seconds(found[0]) <= min(RATE.seconds(e) for e in known if e.peak_bytes <= budget)
    assert all(estimate(make, of, e.recipe) == e for e in found[:3])


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x):
        hidden = self.up(x).relu_() * 1.5
        for expert in self.experts:
            x = x + expert(x)
        return x + self.down(hidden.mul_(0.5))


class Odd(nn.Module):
    """Blocks that change in place what "selective" keeps; the same block often; or with more
    experts than blocks."""

    def __init__(self, experts=0, shared=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * 4 if shared else [Block(experts) for _ in range(3)])

    def loss(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"experts": 6}], ids=str)
def test_what_a_model_cannot_do_is_passed_over_and_the_rest_fits_when_it_is_run(options):
    make, of, base = partial(Odd, **options), partial(torch.randn, 300, 8), Recipe(optimizer="sgd")
    with pytest.raises(RuntimeError):
        estimate(make, of, replace(base, checkpoint="selective"))
    plain = estimate(make, of, base).peak_bytes
    for budget in (plain * 3 // 4, plain // 2):
        for found in fit(make, of, budget, base=base, tier="file", progress=False):
            assert run(make, of, found.recipe).meter.peak_bytes == found.peak_bytes <= budget


# ---- what is passed over loses nothing


def course():
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)


def test_a_checkpoint_on_top_of_offloaded_activations_may_be_the_cheapest():
    base, of = Recipe(in_backward=True, offload_optimizer=1.0), partial(random_tokens, 8, 128, 2048)
    found = fit(course, of, 60_000_000, base=base, quick=True, progress=False)
    without = replace(base, offload_activations=True)
    flash = replace(without, attention="flash")
    told = [(f"{e.peak_bytes / 1e6:.2f}", f"{found.rates.seconds(e):.3f}") for e in found]
    assert told == [("57.93", "0.676"), ("54.12", "0.854"), ("53.86", "0.899")]
    assert [e.recipe for e in found] == [replace(without, checkpoint="layers"), flash, without]
    assert found[0].moved_bytes < found[1].moved_bytes / 3


def test_smaller_pages_fit_where_large_ones_do_not_and_the_largest_that_fit_are_taken():
    base = Recipe(checkpoint="layers", micro_batches=8, offload_optimizer=1.0)
    of, peaks = partial(random_tokens, 8, 128, 2048), {}
    for budget, size in ((110_000_000, 16), (100_000_000, 4), (65_000_000, 1)):
        found = fit(course, of, budget, base=base, progress=False)
        assert {e.recipe.page_bytes for e in found} == {size << 20} and found[
            0
        ].peak_bytes <= budget
        peaks[size] = found[0].peak_bytes / 1e6
    assert {size: f"{peak:.1f}" for size, peak in peaks.items()} == {
        16: "103.7",
        4: "67.1",
        1: "63.7",
    }
    with pytest.raises(InfeasibleBudget):
        fit(course, of, 65_000_000, base=replace(base, page_bytes=4 << 20), progress=False)


@pytest.fixture(scope="module")
def compared():
    """Compare a case with its grid; later comparisons of it know the estimates of earlier ones."""
    known = {}

    def compare(name, budgets=4):
        case = brute_force_fit.CASES[name]
        facts = known.setdefault(name, brute_force_fit.known_of(case))
        with brute_force_fit.small_pages():
            return brute_force_fit.compare(case, 150, budgets, known=facts)

    return compare


@pytest.mark.parametrize("name", ["chain", "table"])
def test_no_recipe_of_a_grid_is_cheaper_than_what_is_found(compared, name):
    searches, differences, _ = compared(name)
    assert searches > 5 and not differences


def test_brute_force_sees_a_rule_that_is_wrong(compared, monkeypatch):
    # as if to add always cost
    monkeypatch.setattr(search, "_moves_as_much", lambda recipe, smaller: True)
    assert compared("chain", budgets=1)[1]


def test_copies_under_way_are_as_many_as_the_price_asks_and_the_budget_allows():
    make, base = partial(deep, 3), Recipe(offload_activations=True, min_bytes=500, in_backward=True)
    facts = EstimateCache(make, batch, base, **{**FILE, "tier": "host"})
    copies_for = Search(facts, 1, RATE).copies_for
    every = [facts.estimate(replace(base, **copies)) for copies in copies_for(base)]
    assert [e.recipe.copies("host") for e in every] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    for link in (1e5, math.inf):
        for budget in sorted({e.peak_bytes for e in every}):
            searching = Search(facts, budget, Rates(1e9, 2e9, link))
            best = facts.estimate(best_copies(searching, searching.family()))
            fitting = [e for e in every if e.peak_bytes <= budget]
            assert searching.rates.seconds(best) == min(map(searching.rates.seconds, fitting))
            if link == math.inf:
                assert best.recipe.copies("host") == (0, 1)  # all cost the same: the fewest
    in_a_file = Search(EstimateCache(make, batch, base, **FILE), 1, RATE)
    assert copies_for(Recipe()) == in_a_file.copies_for(base) == [{}]


# ---- what is asked


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_search_is_for_any_optimizer(optimizer):
    base, make, of = Recipe(optimizer=optimizer), partial(deep, 1), partial(batch, 2)
    plain = estimate(make, of, base)
    # Somewhat more than the least that a quick search finds.
    share = {"sgd": 0.9, "adafactor": 0.9, "adam8bit": 0.94}.get(optimizer, 0.75)
    options = {"rates": RATE, "tier": "file", "progress": False, "quick": True}
    found = fit(make, of, int(plain.peak_bytes * share), base=base, **options)
    assert all(e.recipe.optimizer == optimizer and e.peak_bytes < plain.peak_bytes for e in found)
    assert found[0] == estimate(make, of, found[0].recipe)
    if optimizer != "adam8bit":  # whose step is another library's
        assert run(make, of, found[0].recipe).meter.peak_bytes == found[0].peak_bytes


UPDATED = [
    ("momentum", "loop"),
    ("momentum", "foreach"),
    ("adam", "fused"),
    ("adafactor", "loop"),
    ("adam8bit", "loop"),
]


@pytest.mark.parametrize(("optimizer", "update"), UPDATED)
def test_what_is_composed_is_the_whole_step_with_any_optimizer(optimizer, update):
    base = Recipe(precision="bf16", optimizer=optimizer, update=update)
    make = deep
    if optimizer == "adam8bit":  # of 4,096 numbers and more; a table is shared
        base = replace(base, precision="fp32")
        make = partial(deep, 8, hidden=64)
    composer = BlockExtrapolator(make, batch, base, None, "file")
    for fraction, inside in ((0.0, False), (0.0, True), (0.5, False), (1.0, True)):
        if OPTIMIZERS[optimizer].can_offload_state or not fraction:
            recipe = replace(base, offload_optimizer=fraction, in_backward=inside)
            assert composer.takes(recipe)
            assert composer.estimate(recipe) == estimate(make, batch, recipe)


KEPT = [
    {"min_bytes": 500, "offload_activations": True},
    {"checkpoint": "layers", "blocks": "layers.1"},
    {"checkpoint": "segments", "segments": 2},
    {"checkpoint": "optimal", "schedule_bytes": 70_000},
    {"precision": "bf16", "accumulate": "fp32", "head_chunk": 7},
    {"attention": "flash", "micro_batches": 5},
    {"in_backward": True, "offload_activations": True, "page_bytes": 999},
    {"checkpoint": "selective", "first_blocks": 1, "optimizer": "sgd"},
    {"update": "foreach", "attention": None, "offload_optimizer": 0.5},
]


@pytest.mark.parametrize("fields", KEPT, ids=str)
def test_what_the_base_sets_is_in_every_recipe_that_is_tried(fields):
    base, make = Recipe(**fields), partial(deep, 2)
    facts = EstimateCache(make, batch, base, **FILE)
    peak = facts.estimate(base).peak_bytes
    with suppress(InfeasibleBudget):
        search_by_tensors(Search(facts, peak - 1, RATE), base)
    tried = [
        recipe
        for recipe in facts.estimates
        if recipe.offload_optimizer or not base.offload_optimizer
    ]
    assert len(tried) > 1
    for recipe in tried:  # those without state below are compared with, for what it moves
        assert {name: getattr(recipe, name) for name in fields} == fields


class Mixed(Mean):
    """An encoder and a decoder, whose blocks are unlike."""

    def __init__(self):
        nn.Module.__init__(self)
        self.encoder = Uneven([64] * 3).blocks
        self.decoder = nn.ModuleList(
            nn.Sequential(*block, nn.LayerNorm(8)) for block in Uneven([64] * 3).blocks
        )

    def loss_sum(self, batch):
        x = batch
        for block in (*self.encoder, *self.decoder):
            x = x + block(x)
        return F.mse_loss(x, batch, reduction="sum"), len(batch)

    loss = Mean.loss


@pytest.mark.parametrize("keep", [{}, {"checkpoint": "layers"}], ids=str)
def test_blocks_are_those_that_are_named(keep):
    both, of, base = (
        ("encoder.*", "decoder.*"),
        partial(torch.randn, 300, 8),
        Recipe(optimizer="sgd", **keep),
    )
    facts = EstimateCache(Mixed, of, base, blocks=list(both), **FILE)
    wanted = Recipe(optimizer="sgd", checkpoint="layers", blocks=both)
    budget = estimate(Mixed, of, wanted).peak_bytes
    found = search_by_tensors(Search(facts, budget, RATE), base)
    assert found[0].peak_bytes <= budget and facts.estimate(wanted) == estimate(Mixed, of, wanted)
    assert {e.blocks for e in facts.estimates if e.checkpoint != "none"} == {both}


def test_a_quick_search_says_so_and_tries_less():
    make, options = partial(deep, 3), {"tier": "file", "rates": RATE, "progress": False}
    budget = estimate(make, batch, Recipe()).peak_bytes * 6 // 10
    slow, quick = (fit(make, batch, budget, quick=each, **options) for each in (False, True))
    assert "quick search" in quick.title and "quick search" not in slow.title
    made = [int(re.search(r"([0-9]+) were estimated", found.title)[1]) for found in (slow, quick)]
    assert made[1] < made[0] and RATE.seconds(slow[0]) <= RATE.seconds(quick[0])
    assert all(e.peak_bytes <= budget and e == estimate(make, batch, e.recipe) for e in quick)


def test_budgets_and_rates_share_what_is_known():
    facts = EstimateCache(partial(deep, 1), partial(batch, 2), Recipe(), **FILE)
    peak = facts.estimate(Recipe()).peak_bytes
    first = search_by_tensors(Search(facts, peak - 1, RATE), Recipe())
    made = len(facts.estimates)
    assert (
        list(search_by_tensors(Search(facts, peak - 1, RATE), Recipe())) == list(first)
        and len(facts.estimates) == made
    )
    assert search_by_tensors(Search(facts, peak, RATE), Recipe())[0].recipe == Recipe()
    with pytest.raises(InfeasibleBudget):
        search_by_tensors(Search(facts, 1, RATE), Recipe())


def test_the_bar_shows_no_size_that_nobody_asked_for_and_is_gone_before_an_error(capsys):
    make, of, base, shown = (
        partial(InAChain, [64] * 3),
        partial(torch.randn, 300, 8),
        Recipe(optimizer="sgd"),
        [],
    )
    facts = EstimateCache(make, of, base, watch=shown.append, **FILE)
    facts.estimate(base)
    assert {"optimal", "layers"} <= {*Search(facts, 1, RATE).values("checkpoint")}
    assert base in shown
    assert all((recipe.schedule_bytes or 0) < 1 << 50 for recipe in shown)
    with pytest.raises(InfeasibleBudget):
        fit(make, of, 1000, base=base, tier="file", quick=True)
    assert not capsys.readouterr().err.split("\r")[-1].strip()


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
        return search.Estimates(fitting, rates)

    cheapest = min(found, key=rates.seconds)
    assert taken[cheapest.recipe] > cheapest.peak_bytes
    budgets = {1} | {count + more for count in taken.values() for more in (-1, 0)}
    for budget in sorted(budgets | {each.peak_bytes for each in found}):
        fitting = [each for each in found if taken[each.recipe] <= budget]
        if not fitting:
            with pytest.raises(InfeasibleBudget):
                search_by_reserved(budget, within)
        else:
            best = search_by_reserved(budget, within)
            assert set(best) <= set(fitting)
            assert rates.seconds(best[0]) == min(map(rates.seconds, fitting))
    [best] = fit(
        *given,
        taken[cheapest.recipe],
        recipes=[cheapest.recipe],
        kind="cuda",
        count="reserved",
        rates="H100",
        progress=False,
    )
    assert best == cheapest


def test_a_search_by_what_is_reserved_takes_a_device_that_has_such_an_allocator():
    with pytest.raises(
        ValueError, match=r"^kind must be 'cuda' when count is 'reserved', got 'cpu'"
    ):
        fit(deep, batch, 10**9, count="reserved")
    with pytest.raises(ValueError, match="count must be 'tensors' or 'reserved', got 'bytes'"):
        fit(deep, batch, 10**9, count="bytes")


@pytest.mark.parametrize(
    ("technique", "tried"),
    [
        (ChunkedHead, [{"head_chunk": None}, {"head_chunk": 3}]),
        (OffloadedState, [{"offload_optimizer": share} for share in (0.0, 0.3, 0.6)]),
        (OffloadedActivations, [{"offload_activations": True}]),
        (Checkpoint, [{"checkpoint": "none"}, {"checkpoint": "layers", "first_blocks": 2}]),
    ],
)
def test_a_search_tries_what_each_technique_proposes_and_nothing_else(
    technique, tried, monkeypatch
):
    """Combined with all that the others propose, except what two of them refuse together."""
    monkeypatch.setattr(technique, "candidates", lambda self, search: tried)
    base = Recipe(min_bytes=500)
    families = list(Search(EstimateCache(deep, batch, base, **FILE), 1, RATE).families())
    field = next(iter(tried[0]))
    assert {getattr(recipe, field) for recipe in families} == {each[field] for each in tried}
    for each in tried:
        assert any(each.items() <= vars(recipe).items() for recipe in families)


def test_a_recipe_adds_to_one_that_uses_part_of_it_alone():
    search = Search(EstimateCache(deep, batch, Recipe(), **FILE), 1, RATE)
    plain, layers = Recipe(), Recipe(checkpoint="layers")
    half = Recipe(offload_optimizer=0.5)
    both = replace(layers, offload_optimizer=1.0)
    for recipe, smaller in [(layers, plain), (half, plain), (both, half), (both, layers)]:
        assert search.adds_to(recipe, smaller)
        assert not search.adds_to(smaller, recipe)
    assert not search.adds_to(both, Recipe(checkpoint="selective"))
    assert search.amounts(both) == 2 and search.amounts(half) == 0.5


def test_no_more_blocks_are_tried_than_cost_less_than_the_cheapest_found():
    """Of equal blocks; of unlike ones any number but all."""
    known = EstimateCache(deep, batch, Recipe(), **FILE)
    search, layers = Search(known, 10**9, RATE), known.layers
    one = Recipe(checkpoint="layers", first_blocks=1)
    search.seconds(Recipe())
    for count in range(2, layers):
        more = search.seconds(replace(one, first_blocks=count))
        assert most_blocks(search, one, more) == count - 1
        assert most_blocks(search, one, more * 1.0001) == count
    unlike = EstimateCache(
        partial(InAChain, [64, 32, 16, 64]), partial(torch.randn, 300, 8), Recipe(), **FILE
    )
    assert most_blocks(Search(unlike, 10**9, RATE), one, math.inf) == unlike.layers - 1
