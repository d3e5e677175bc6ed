"""What `fit` composes is what whole symbolic steps take, and nothing is lost by it."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.budget import InfeasibleBudget, Rates, Recipe, estimate, fit, search
from course_lib.budget.composing import MANY, Composer, equal_blocks
from course_lib.budget.recipe import pieces_allowed
from course_lib.models import Decoder, random_tokens

RATE = Rates(1e9, 2e9, 1e9)


def deep(layers=MANY + 1, **options):
    return Decoder(vocabulary=67, hidden=16, heads=2, layers=layers, sequence=12, **options)


def batch(samples=5):
    return random_tokens(samples, 12, 67)


class Uneven(nn.Module):
    """One block is wider than the others, so that none stands for all."""

    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in widths)

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
    """The last block alone takes more the more blocks there are: as many bytes as their number squared."""

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
        ("tied", "fp32", "file", COMPOSED),
        ("tied", "bf16", "host", COMPOSED[1::4]),
        ("untied", "fp32", "host", COMPOSED[3::5]),
        ("untied", "bf16", "file", COMPOSED[4::5]),
        ("dropout", "fp32", "file", [r for r in COMPOSED if r.attention == "standard"][::5]),
        ("frozen", "bf16", "host", COMPOSED[::7]),
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
    composer = Composer(make, of, Recipe(precision=precision), None, tier)
    for recipe in recipes:
        recipe = replace(recipe, precision=precision)
        assert composer.estimate(recipe) == estimate(make, of, recipe, tier=tier), recipe


@pytest.mark.parametrize("keep", [{"checkpoint": "layers"}, DOWN, {"checkpoint": "layers", **DOWN}], ids=str)
def test_the_work_of_an_estimate_does_not_grow_with_the_blocks(keep):
    work = []
    for layers in (MANY, MANY + 4):
        composer = Composer(partial(deep, layers), batch, Recipe(), None, "file")
        calls = []
        for block in composer.blocks:
            block.norm1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        composer.estimate(Recipe(**keep))
        work.append(len(calls))
    assert work[0] == work[1] > 0


def test_recipes_that_differ_below_alone_share_their_step(monkeypatch):
    composer, steps = Composer(deep, batch, Recipe(), None, "host"), []
    monkeypatch.setattr(
        composer, "moments", lambda *key, moments=composer.moments: (steps.append(key), moments(*key))[1]
    )
    found = [composer.estimate(Recipe(offload_optimizer=fraction)) for fraction in (0.0, 0.5, 1.0)]
    assert len(steps) == 1 and len({e.peak_bytes for e in found}) == 3


def test_the_blocks_are_the_longest_list_of_equal_ones_and_are_all_there_afterwards():
    assert list(equal_blocks(model := deep())) == list(model.layers)
    assert len(equal_blocks(Uneven([16] * 9 + [32]))) == 0
    composer = Composer(deep, batch, Recipe(), None, "file")
    before = list(composer.blocks)
    composer.estimate(Recipe())
    assert list(composer.blocks) == before and all(p.grad is None for p in composer.model.parameters())


# ---- nothing is lost


@pytest.mark.parametrize("make", [Growing, Whole, partial(Uneven)], ids=["growing", "whole", "even"])
def test_what_fits_is_what_whole_steps_say_whatever_the_model(make):
    make = partial(make, [64] * (MANY + 1))
    recipes = [Recipe(), Recipe(in_backward=True), Recipe(micro_batches=6, offload_optimizer=1.0)]
    known = [estimate(make, points, recipe) for recipe in recipes]
    for budget in sorted(e.peak_bytes for e in known)[:2]:
        found = fit(make, points, budget, recipes=recipes, tier="file", progress=False)
        assert {e.recipe for e in found} == {e.recipe for e in known if e.peak_bytes <= budget}
        assert found[0] in known
    with pytest.raises(InfeasibleBudget) as caught:
        fit(make, points, min(e.peak_bytes for e in known) - 1, recipes=recipes, tier="file", progress=False)
    assert caught.value.least in known


def test_checkpoints_go_around_as_few_of_the_first_blocks_of_any_model_as_fit():
    make, of, base = partial(Mean, [32] * 5), partial(torch.randn, 300, 8), Recipe(optimizer="sgd")
    keeps = [{}, {"checkpoint": "selective"}, {"checkpoint": "layers"}]
    keeps += [{"checkpoint": "layers", "first_blocks": count} for count in range(1, 5)]
    known = [estimate(make, of, replace(base, **keep)) for keep in keeps]
    for count in (2, 3):
        budget = next(e.peak_bytes for e in known if e.recipe.first_blocks == count)
        found = fit(make, of, budget, base=base, rates=Rates(1e9, 2e9, 1.0), tier="file", progress=False)
        cheapest = min((e for e in known if e.peak_bytes <= budget), key=RATE.seconds)
        assert found[0] == cheapest and cheapest.recipe.first_blocks == count


def test_of_a_deep_model_nothing_is_cheaper_than_what_is_found(monkeypatch):
    monkeypatch.setattr(search, "HEAD_CHUNK", 5)
    make, of, base = partial(deep, MANY), partial(batch, 2), Recipe(optimizer="sgd")
    keeps = [{}, {"checkpoint": "layers"}, {"checkpoint": "segments", "segments": 2}]
    every = [
        replace(base, head_chunk=chunk, micro_batches=count, **keep)
        for keep, chunk, count in itertools.product(keeps, (None, 5), pieces_allowed(2))
    ]
    known = [estimate(make, of, recipe) for recipe in every]
    peaks = sorted(e.peak_bytes for e in known)
    budget = peaks[len(peaks) // 3]
    found = fit(make, of, budget, base=base, rates=RATE, tier="file", progress=False)
    assert RATE.seconds(found[0]) <= min(RATE.seconds(e) for e in known if e.peak_bytes <= budget)
    assert all(estimate(make, of, e.recipe) == e for e in found[:3])
