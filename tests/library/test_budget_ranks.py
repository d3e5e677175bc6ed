"""Recipes for several ranks: estimates equal predictions of `course_lib.distributed`, and the time
of communication equals that of simulated rings."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from brute_force_fit import Chain
from torch import nn

from course_lib.budget import RATES, InfeasibleBudget, Rates, Recipe, estimate, fit
from course_lib.budget.traces import rank_trace
from course_lib.distributed import held_bytes, predict, sent_bytes, shapes_of
from course_lib.distributed.formulas import ring_bytes
from course_lib.models import Decoder, random_tokens

MODES = {"ddp": "ddp", "zero1": "zero1", "zero2": "fsdp-keep", "zero3": "fsdp"}
LAYERS = rank_trace.FEW + 2  # one more than the longer step of an extrapolation


def make_model():
    # vocabulary and hidden size are not divisible by 4 ranks
    return Decoder(vocabulary=515, hidden=66, heads=2, layers=LAYERS, sequence=32)


def make_batch():
    return random_tokens(8, 32, 515)


def share_of_rank(ranks):
    """Return the arguments of `predict` for a rank's share of the batch."""
    return make_model, lambda: make_batch()[: 8 // ranks], Decoder.loss_sum


def recipe_for(shard, ranks=4, **fields):
    return Recipe(ranks=ranks, shard=shard, **fields)


@pytest.mark.parametrize(
    ("shard", "max_norm"), [("ddp", None), ("zero1", 0.5), ("zero2", None), ("zero3", 0.5)]
)
def test_extrapolated_rank_estimate_equals_estimate_and_prediction_of_all_blocks(
    monkeypatch, shard, max_norm
):
    """Clipping sends no additional bytes."""
    functions = make_model, make_batch, recipe_for(shard)
    found, extrapolated = estimate(*functions, max_norm=max_norm), []
    monkeypatch.setattr(rank_trace, "MANY", LAYERS)
    growth_of = rank_trace.Growth
    monkeypatch.setattr(
        rank_trace, "Growth", lambda *runs: extrapolated.append(growth_of(*runs)) or extrapolated[0]
    )
    assert estimate(*functions, max_norm=max_norm) == found
    # With "zero1", the parameters that a rank updates do not grow evenly with these blocks, so the
    # whole step is run.
    assert len(extrapolated) == (shard != "zero1")
    shapes, mode = shapes_of(make_model()), MODES[shard]
    states = [each["optimizer"] for each in held_bytes(shapes, mode, 4)]
    fullest = states.index(max(states))
    predicted = predict(*share_of_rank(4), mode, 4, rank=fullest, max_norm=max_norm)
    assert (found.peak_bytes, found.flops) == (predicted.peak_bytes, predicted.flops)
    assert found.sent_bytes == found.moved_bytes == predicted.sent_bytes
    assert found.sent_bytes == sent_bytes(shapes, mode, 4)
    assert found.at_peak["optimizer"] == max(states)


@pytest.mark.parametrize(("shard", "sync"), [("ddp", "last"), ("zero3", "each")])
def test_rank_estimate_with_micro_batches_equals_prediction_except_losses(shard, sync):
    recipe = recipe_for(shard, 2, micro_batches=2)
    found = estimate(make_model, make_batch, recipe)
    whole = predict(*share_of_rank(2), MODES[shard], 2, micro_batches=2, sync=sync)
    assert (found.flops, found.sent_bytes) == (whole.flops, whole.sent_bytes)
    assert 0 <= whole.peak_bytes - found.peak_bytes <= 4096


def test_bf16_ddp_stores_fp32_master_weights():
    numbers = shapes_of(make_model()).numbers
    ddp = estimate(make_model, make_batch, recipe_for("ddp", precision="bf16"))
    assert ddp.at_peak["parameter"] == ddp.at_peak["gradient"] == 2 * numbers
    assert ddp.at_peak["optimizer"] == pytest.approx(12 * numbers, rel=1e-2)
    assert ddp.sent_bytes == 4 * numbers


class Blocks(Chain):
    def __init__(self):
        super().__init__([64, 64])

    def loss_sum(self, x):
        return self(x).square().sum(), len(x)


rows = partial(torch.randn, 16, 16)


def test_fit_tries_every_sharding_mode_and_skips_unneeded_techniques():
    peaks = {shard: estimate(Blocks, rows, recipe_for(shard)).peak_bytes for shard in MODES}
    assert peaks["ddp"] > peaks["zero1"] > peaks["zero2"] > peaks["zero3"]
    found = fit(Blocks, rows, peaks["zero2"], base=Recipe(ranks=4), rates="H100")
    kinds = {(e.recipe.shard, e.recipe.checkpoint) for e in found}
    assert {("zero2", "none"), ("zero3", "none")} <= kinds and ("zero3", "layers") not in kinds
    assert all(e.peak_bytes <= peaks["zero2"] and e.recipe.ranks == 4 for e in found)
    steps = found.steps_from_baseline()
    assert steps[0].recipe.shard == "ddp" and steps[-1].recipe == found[0].recipe
    sharded = fit(Blocks, rows, peaks["ddp"], base=Recipe(ranks=4, shard="zero3"), rates="H100")
    assert {e.recipe.shard for e in sharded} == {"zero3"}
    with pytest.raises(InfeasibleBudget, match=r"lowest peak found is .* with Recipe\(.*ranks=4"):
        fit(Blocks, rows, 10_000, base=Recipe(ranks=4))


def test_communication_seconds_are_computed_from_slowest_link():
    found = estimate(make_model, make_batch, recipe_for("ddp"))
    rates = Rates(1e12, 1e12, 1e9, peer_bytes=100.0, network_bytes=10.0, peers=8)
    assert rates.parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 100
    assert rates.seconds(found) > rates.parts(found)["ranks"]  # the tier "file" overlaps nothing
    assert replace(rates, peers=2).parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 10
    hidden = replace(found, tier="host", flops=10**12)
    assert RATES["H100"].seconds(hidden) == RATES["H100"].parts(hidden)["compute"]


def ring_over_machines(ranks, peers, exit_device):
    """Return the ranks in the order of a ring that leaves each machine from one of its devices."""
    machines = [range(ranks)[first : first + peers] for first in range(0, ranks, peers)]
    starts = [(exit_device + 1) % len(machine) for machine in machines]
    pairs = zip(machines, starts, strict=True)
    return [rank for machine, start in pairs for rank in (*machine[start:], *machine[:start])]


def seconds_of_rings(ranks, rates):
    """Return the seconds in which rings all-gather one byte, with the best number of rings."""
    found, sent_by_each = [], Fraction(ranks - 1, ranks)
    for rings in range(1, 1 + rates.network_cards):
        devices, cards = Counter(), Counter()
        for exit_device in range(rings):
            ring = ring_over_machines(ranks, rates.peers, exit_device)
            for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True):
                devices[sender] += sent_by_each / rings
                machine, place = divmod(sender, rates.peers)
                if machine != receiver // rates.peers:
                    cards[machine, place % rates.network_cards] += sent_by_each / rings
        slowest = max(devices.values()) / Fraction(rates.peer_bytes)
        found.append(max(slowest, max(cards.values(), default=0) / Fraction(rates.network_bytes)))
    return float(min(found))


@pytest.mark.parametrize("ranks", [2, 8, 9, 12, 16, 24])
@pytest.mark.parametrize(
    ("peers", "cards", "peer_bytes"),
    [(8, 8, 450), (8, 1, 450), (8, 4, 450), (4, 8, 450), (8, 8, 31.5), (1, 1, 31.5)],
)
def test_ring_rate_equals_bandwidth_of_simulated_rings(ranks, peers, cards, peer_bytes):
    rates = Rates(
        1, 1, 1, peer_bytes=peer_bytes, network_bytes=50, peers=peers, network_cards=cards
    )
    expected = seconds_of_rings(ranks, rates)
    assert ring_bytes(1, ranks) / rates.ring_rate(ranks) == pytest.approx(expected)


class MeanLoss(Blocks):
    def loss(self, x):
        return self(x).square().mean()


@pytest.mark.parametrize(
    ("make", "recipe", "message"),
    [
        (Blocks, Recipe(ranks=4), "shard must be ddp, zero1, zero2 or zero3"),
        (Blocks, recipe_for("ddp", 3), "ranks must be a divisor of the batch's 16 samples"),
        (Blocks, recipe_for("ddp", micro_batches=8), "must be a divisor of a rank's 4 samples"),
        (MeanLoss, recipe_for("ddp"), r"ranks must be 1 for a MeanLoss, got 4: .* loss_sum"),
    ],
)
def test_estimate_rejects_unsuitable_number_of_ranks_or_sharding_mode(make, recipe, message):
    with pytest.raises(ValueError, match=message):
        estimate(make, rows, recipe)


class BypassesCall(Blocks):
    """Model whose loss calls the blocks and another layer, but not the model."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def loss_sum(self, x):
        return self.forward(self.first(x)).square().sum(), len(x)


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_parameter_sharding_rejects_loss_that_bypasses_model_call(shard):
    message = (
        rf"^shard must be 'ddp' or 'zero1' .*, got '{shard}'.* use parameters only through model"
    )
    with pytest.raises(ValueError, match=message):
        estimate(BypassesCall, rows, recipe_for(shard))
    plain = estimate(BypassesCall, rows, recipe_for("ddp")).peak_bytes
    found = fit(BypassesCall, rows, plain - 1, base=Recipe(ranks=4), rates="H100")
    assert {e.recipe.shard for e in found} <= {"ddp", "zero1"}
    with pytest.raises(ValueError, match=message):
        fit(BypassesCall, rows, plain, base=Recipe(ranks=4, shard=shard))
