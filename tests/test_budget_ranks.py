"""course_lib.budget for several ranks: what is estimated is what `course_lib.distributed` takes,
composed or whole."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from course_lib.budget import (
    RATES,
    InfeasibleBudget,
    Rates,
    Recipe,
    estimate,
    fit,
    rank,
    steps_to,
    train_step,
)
from course_lib.budget.__main__ import main
from course_lib.distributed import held_bytes, predict, sent_bytes, shapes_of
from course_lib.models import Decoder, random_tokens

MODES = {"ddp": "ddp", "zero1": "zero1", "zero2": "fsdp-keep", "zero3": "fsdp"}
LAYERS = 10  # enough to be composed from few


def make_model():
    # 4 divides neither
    return Decoder(vocabulary=515, hidden=66, heads=2, layers=LAYERS, sequence=32)


def make_batch():
    return random_tokens(8, 32, 515)


def of(shard, ranks=4, **fields):
    return Recipe(ranks=ranks, shard=shard, **fields)


def part():
    return make_batch()[:2]


def loss_sum(model, batch):
    return model.loss_sum(batch)


@pytest.mark.parametrize("shard", MODES)
def test_a_rank_is_composed_from_few_blocks_to_the_byte_of_the_whole_and_of_a_prediction(
    monkeypatch, shard
):
    composed, counts = estimate(make_model, make_batch, of(shard)), []
    monkeypatch.setattr(rank, "MANY", LAYERS + 1)
    measured = rank._measure
    monkeypatch.setattr(
        rank, "_measure", lambda *given: (counts.append(given[6]), measured(*given))[1]
    )
    assert estimate(make_model, make_batch, of(shard)) == composed and counts == [LAYERS]
    states = [each["optimizer"] for each in held_bytes(shapes_of(make_model()), MODES[shard], 4)]
    fullest = states.index(max(states))
    found = predict(make_model, part, loss_sum, MODES[shard], 4, rank=fullest)
    assert (composed.peak_bytes, composed.flops, composed.sent_bytes) == (
        found.peak_bytes, found.flops, found.sent_bytes
    )  # fmt: skip
    assert (
        composed.sent_bytes
        == sent_bytes(shapes_of(make_model()), MODES[shard], 4)
        == composed.moved_bytes
    )
    assert composed.at_peak["optimizer"] == max(states)


@pytest.mark.parametrize(("shard", "sync"), [("ddp", "last"), ("zero3", "each")])
def test_micro_batches_of_a_rank_are_those_of_a_prediction_but_for_their_losses(shard, sync):
    recipe = of(shard, 2, micro_batches=4)
    found = estimate(make_model, make_batch, recipe)
    whole = predict(
        make_model, lambda: make_batch()[:4], loss_sum, MODES[shard], 2, micro_batches=4, sync=sync
    )
    assert (found.flops, found.sent_bytes) == (whole.flops, whole.sent_bytes)
    assert 0 <= whole.peak_bytes - found.peak_bytes <= 4096


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_a_rank_that_clips_its_gradient_is_that_of_a_prediction_and_sends_no_byte_more(
    monkeypatch, shard
):
    clip, clipped = nn.utils.clip_grads_with_norm_, []
    monkeypatch.setattr(
        nn.utils, "clip_grads_with_norm_", lambda *given: (clipped.append(given[1]), clip(*given))
    )
    found = estimate(make_model, make_batch, of(shard), max_norm=0.5)
    assert clipped and set(clipped) == {0.5}
    states = [each["optimizer"] for each in held_bytes(shapes_of(make_model()), MODES[shard], 4)]
    fullest = states.index(max(states))
    whole = predict(make_model, part, loss_sum, MODES[shard], 4, rank=fullest, max_norm=0.5)
    assert (found.peak_bytes, found.sent_bytes) == (whole.peak_bytes, whole.sent_bytes)
    assert found.sent_bytes == sent_bytes(shapes_of(make_model()), MODES[shard], 4)


def test_in_bf16_a_rank_of_ddp_has_fp32_masters_and_a_shard_is_in_fp32():
    numbers = shapes_of(make_model()).numbers
    copy, cut = (
        estimate(make_model, make_batch, of(shard, precision="bf16")) for shard in ("ddp", "zero3")
    )
    assert copy.at_peak["parameter"] == 2 * numbers and copy.at_peak["gradient"] == 2 * numbers
    assert copy.at_peak["optimizer"] == pytest.approx(12 * numbers, rel=1e-2)
    assert cut.at_peak["optimizer"] == pytest.approx(8 * numbers / 4, rel=0.05)
    assert cut.peak_bytes < copy.peak_bytes and copy.sent_bytes == 4 * numbers


class Blocks(nn.Module):
    """A few blocks, which take no time."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    def loss_sum(self, x):
        return self(x).square().sum(), len(x)


def rows():
    return torch.randn(16, 32)


def test_fit_tries_each_sharding_and_leaves_out_what_is_not_needed():
    peaks = {shard: estimate(Blocks, rows, of(shard)).peak_bytes for shard in MODES}
    assert peaks["ddp"] > peaks["zero1"] > peaks["zero2"] > peaks["zero3"]
    found = fit(Blocks, rows, peaks["zero2"], base=Recipe(ranks=4), rates="H100")
    kinds = {(e.recipe.shard, e.recipe.checkpoint) for e in found}
    assert {("zero2", "none"), ("zero3", "none")} <= kinds and ("zero3", "layers") not in kinds
    assert all(e.peak_bytes <= peaks["zero2"] and e.recipe.ranks == 4 for e in found)
    way = found.way()
    assert way[0].recipe.shard == "ddp" and way[-1].recipe == found[0].recipe
    alone = fit(Blocks, rows, peaks["ddp"], base=Recipe(ranks=4, shard="zero3"), rates="H100")
    assert {e.recipe.shard for e in alone} == {"zero3"}
    with pytest.raises(InfeasibleBudget, match=r"the least peak found is .* of Recipe\(.*ranks=4"):
        fit(Blocks, rows, 10_000, base=Recipe(ranks=4))


def test_the_way_to_a_recipe_for_ranks_begins_with_ddp():
    recipe = of("zero3", attention="flash", checkpoint="layers")
    shards = [(step.shard, step.attention, step.checkpoint) for step in steps_to(recipe)]
    assert shards == [
        ("ddp", "standard", "none"), ("zero3", "standard", "none"), ("zero3", "flash", "none"),
        ("zero3", "flash", "layers"),
    ]  # fmt: skip
    assert len(steps_to(of("ddp"))) == 1


def test_what_ranks_communicate_is_priced_by_the_wire_between_them():
    found = estimate(make_model, make_batch, of("ddp"))
    rates = Rates(1e12, 1e12, 1e9, peer_bytes=100.0, network_bytes=10.0, peers=8)
    assert rates.parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 100
    assert rates.seconds(found) > rates.parts(found)["ranks"]  # a file below: nothing overlaps
    assert replace(rates, peers=2).parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 10
    assert RATES["H100"].seconds(replace(found, tier="host")) < RATES["laptop"].seconds(found)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"shard": "zero3"}, "shard must be None when ranks is 1, got 'zero3'"),
        ({"ranks": 4, "shard": "zero4"}, "shard must be .*, got 'zero4'"),
        ({"ranks": 0}, "ranks must be a whole number, at least 1, got 0"),
        (
            {"ranks": 4, "update": "foreach"},
            "update must be .*'fused'.* when ranks is 4, got 'foreach'",
        ),
        ({"ranks": 4, "in_backward": True}, "in_backward must be False when ranks is 4, got True"),
        ({"ranks": 4, "head_chunk": 8}, "head_chunk must be None when ranks is 4, got 8"),
    ],
)
def test_fields_that_do_not_go_with_ranks_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Recipe(**fields)


def test_what_cannot_be_estimated_or_run_is_refused_in_one_sentence():
    with pytest.raises(
        ValueError, match="shard must be ddp, zero1, zero2 or zero3 when ranks is 4, got None"
    ):
        estimate(make_model, make_batch, Recipe(ranks=4))
    with pytest.raises(
        ValueError, match=r"ranks must be a divisor of the batch's 8 samples \(1, 2, 4, 8\), got 3"
    ):
        estimate(make_model, make_batch, of("ddp", 3))
    with pytest.raises(
        ValueError, match=r"micro_batches must be a divisor of a rank's 2 samples \(1, 2\), got 4"
    ):
        estimate(make_model, make_batch, of("ddp", micro_batches=4))
    model = make_model()
    with pytest.raises(
        ValueError,
        match=r"^ranks must be 1 in a single process, got 4; .* python -m course_lib.distributed",
    ):
        train_step(model, None, make_batch(), of("ddp"))

    class Mean(nn.Linear):
        def loss(self, batch):
            return self(batch).mean()

    with pytest.raises(
        ValueError,
        match=r"ranks must be 1 for a \w+, got 2: its loss .* give the model a method loss_sum",
    ):
        estimate(lambda: Mean(2, 2), lambda: nn.Linear(2, 4).weight.detach(), of("ddp", 2))


def test_the_command_asks_for_ranks(capsys):
    sizes = [
        "--hidden",
        "64",
        "--layers",
        "1",
        "--vocabulary",
        "100",
        "--sequence",
        "16",
        "--batch",
        "4",
    ]
    sizes += ["--ranks", "4", "--budget", "2MB", "--count", "tensors"]
    assert main([*sizes, "--precision", "fp32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    recipes = [found["recipe"] for found in told["recipes"]]
    assert recipes and all(
        recipe["ranks"] == 4 and recipe["update"] == "fused" for recipe in recipes
    )
    assert all(found["sent_bytes"] > 0 for found in told["recipes"])
    with pytest.raises(SystemExit):
        main([*sizes, "--check"])
    assert "--check cannot be combined with --ranks 4" in capsys.readouterr().err


class Around(Blocks):
    """The loss calls the blocks, and a layer of its own, but not the model."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def loss_sum(self, x):
        return self.forward(self.first(x)).square().sum(), len(x)


def test_a_loss_that_does_not_call_the_model_is_refused_where_parameters_are_gathered():
    told = (
        r"^shard must be 'ddp' or 'zero1' for a loss that uses [^\n]*, got 'zero[23]'\. Sharded"
        r" parameters [^\n]* let the loss call the model$"
    )
    for shard in ("zero2", "zero3"):
        with pytest.raises(ValueError, match=told):
            estimate(Around, rows, of(shard))
    plain = estimate(Around, rows, of("ddp")).peak_bytes
    found = fit(Around, rows, plain - 1, base=Recipe(ranks=4), rates="H100")
    assert {e.recipe.shard for e in found} <= {"ddp", "zero1"}
    with pytest.raises(ValueError, match=told):
        fit(Around, rows, plain, base=Recipe(ranks=4, shard="zero3"))
