"""course_lib.budget for several ranks: what is estimated is what `course_lib.distributed` takes,
composed or whole."""

import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

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
)
from course_lib.budget.__main__ import main
from course_lib.budget.traces import rank_trace
from course_lib.distributed import held_bytes, predict, sent_bytes, shapes_of
from course_lib.distributed.formulas import ring_bytes
from course_lib.models import Decoder, random_tokens

MODES = {"ddp": "ddp", "zero1": "zero1", "zero2": "fsdp-keep", "zero3": "fsdp"}
LAYERS = 7  # enough to be composed from few


def make_model():
    # 4 divides neither
    return Decoder(vocabulary=515, hidden=66, heads=2, layers=LAYERS, sequence=32)


def make_batch():
    return random_tokens(8, 32, 515)


def of_rank(ranks):
    """The arguments of `predict` for a rank's share of the batch."""
    return make_model, lambda: make_batch()[: 8 // ranks], Decoder.loss_sum


def recipe_for(shard, ranks=4, **fields):
    return Recipe(ranks=ranks, shard=shard, **fields)


@pytest.mark.parametrize(
    ("shard", "max_norm"), [("ddp", None), ("zero1", 0.5), ("zero2", None), ("zero3", 0.5)]
)
def test_a_rank_is_composed_to_the_byte_of_the_whole_and_of_a_prediction(
    monkeypatch, shard, max_norm
):
    """Clipping sends no additional bytes."""
    given, counts = (make_model, make_batch, recipe_for(shard)), []
    composed = estimate(*given, max_norm=max_norm)
    monkeypatch.setattr(rank_trace, "MANY", LAYERS + 1)
    measured = rank_trace._measure

    def counted(*arguments, **options):
        counts.append(arguments[6])
        return measured(*arguments, **options)

    monkeypatch.setattr(rank_trace, "_measure", counted)
    assert estimate(*given, max_norm=max_norm) == composed and counts == [LAYERS]
    shapes, mode = shapes_of(make_model()), MODES[shard]
    states = [each["optimizer"] for each in held_bytes(shapes, mode, 4)]
    fullest = states.index(max(states))
    found = predict(*of_rank(4), mode, 4, rank=fullest, max_norm=max_norm)
    assert (composed.peak_bytes, composed.flops) == (found.peak_bytes, found.flops)
    assert composed.sent_bytes == composed.moved_bytes == found.sent_bytes
    assert composed.sent_bytes == sent_bytes(shapes, mode, 4)
    assert composed.at_peak["optimizer"] == max(states)


@pytest.mark.parametrize(("shard", "sync"), [("ddp", "last"), ("zero3", "each")])
def test_micro_batches_of_a_rank_are_those_of_a_prediction_but_for_their_losses(shard, sync):
    recipe = recipe_for(shard, 2, micro_batches=2)
    found = estimate(make_model, make_batch, recipe)
    whole = predict(*of_rank(2), MODES[shard], 2, micro_batches=2, sync=sync)
    assert (found.flops, found.sent_bytes) == (whole.flops, whole.sent_bytes)
    assert 0 <= whole.peak_bytes - found.peak_bytes <= 4096


def test_in_bf16_a_rank_of_ddp_has_fp32_masters_and_a_shard_is_in_fp32():
    numbers = shapes_of(make_model()).numbers
    recipes = (recipe_for(shard, precision="bf16") for shard in ("ddp", "zero3"))
    copy, cut = (estimate(make_model, make_batch, recipe) for recipe in recipes)
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
    peaks = {shard: estimate(Blocks, rows, recipe_for(shard)).peak_bytes for shard in MODES}
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


def test_what_ranks_communicate_is_priced_by_the_wire_between_them():
    found = estimate(make_model, make_batch, recipe_for("ddp"))
    rates = Rates(1e12, 1e12, 1e9, peer_bytes=100.0, network_bytes=10.0, peers=8)
    assert rates.parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 100
    assert rates.seconds(found) > rates.parts(found)["ranks"]  # a file below: nothing overlaps
    assert replace(rates, peers=2).parts(found)["ranks"] == found.sent_bytes * 3 / 4 / 10
    assert RATES["H100"].seconds(replace(found, tier="host")) < RATES["laptop"].seconds(found)


def passed_on(collective, ring):
    """Run a collective on one byte per rank step by step, and return the bytes of each link."""
    ranks, links = len(ring), Counter()
    # The ranks whose numbers are added up in each chunk that a place of the ring has.
    terms = [{chunk: {place} for chunk in range(ranks)} for place in range(ranks)]
    if collective == "all-gather":
        terms = [{place: {place}} for place in range(ranks)]
    for step in range(ranks - 1):
        chunks = [(place - step) % ranks for place in range(ranks)]
        sent = [terms[place][chunk] for place, chunk in enumerate(chunks)]
        for place, chunk in enumerate(chunks):
            after = (place + 1) % ranks
            terms[after][chunk] = terms[after].get(chunk, set()) | sent[place]
            links[ring[place], ring[after]] += Fraction(1, ranks)
    if collective == "all-gather":
        assert all(len(chunks) == ranks for chunks in terms)
    else:
        assert all(len(terms[(chunk - 1) % ranks][chunk]) == ranks for chunk in range(ranks))
    return links


def ring_over_machines(ranks, peers, turn):
    """Return the ranks in the order of a ring that leaves each machine from its device `turn`."""
    machines = [range(ranks)[first : first + peers] for first in range(0, ranks, peers)]
    starts = [(turn + 1) % len(machine) for machine in machines]
    pairs = zip(machines, starts, strict=True)
    return [rank for machine, start in pairs for rank in (*machine[start:], *machine[:start])]


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize(("ranks", "peers"), [(2, 8), (8, 8), (16, 8), (12, 8), (9, 8), (7, 3)])
def test_ring_sends_the_same_bytes_over_each_link_and_boundary(collective, ranks, peers):
    links = passed_on(collective, ring_over_machines(ranks, peers, turn=1))
    each = 1000 * links.total() / ranks
    assert {1000 * sent for sent in links.values()} == {each}
    assert ring_bytes(1000, ranks) == pytest.approx(float(each))
    out, into = Counter(), Counter()
    for (sender, receiver), sent in links.items():
        if sender // peers != receiver // peers:
            out[sender // peers] += 1000 * sent
            into[receiver // peers] += 1000 * sent
    machines = math.ceil(ranks / peers) if ranks > peers else 0
    assert out == into == dict.fromkeys(range(machines), each)


def seconds_of_rings(ranks, rates):
    """Return the seconds in which rings all-gather one byte, with the best number of rings."""
    found = []
    for rings in range(1, 1 + rates.network_cards):
        devices, cards = Counter(), Counter()
        for turn in range(rings):
            ring = ring_over_machines(ranks, rates.peers, turn)
            for (sender, receiver), sent in passed_on("all-gather", ring).items():
                devices[sender] += sent / rings
                machine, place = divmod(sender, rates.peers)
                if machine != receiver // rates.peers:
                    cards[machine, place % rates.network_cards] += sent / rings
        slowest = max(devices.values()) / Fraction(rates.peer_bytes)
        found.append(max(slowest, max(cards.values(), default=0) / Fraction(rates.network_bytes)))
    return float(min(found))


@pytest.mark.parametrize("ranks", [2, 8, 9, 12, 16, 24])
@pytest.mark.parametrize(
    ("peers", "cards", "peer_bytes"),
    [(8, 8, 450), (8, 1, 450), (8, 4, 450), (4, 8, 450), (8, 8, 31.5), (1, 1, 31.5)],
)
def test_seconds_of_ranks_are_those_of_simulated_rings(ranks, peers, cards, peer_bytes):
    rates = Rates(
        1, 1, 1, peer_bytes=peer_bytes, network_bytes=50, peers=peers, network_cards=cards
    )
    expected = seconds_of_rings(ranks, rates)
    assert ring_bytes(1, ranks) / rates.ring_rate(ranks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "rates_by_ranks"),
    [
        ("H100", {8: 450e9, 9: 50e9, 12: 200e9, 16: 400e9, 64: 400e9}),
        ("A100 40GB", {8: 300e9, 16: 200e9}),
        ("RTX 4090", {8: 31.5e9, 9: 12.5e9, 16: 12.5e9}),
        ("T4", {8: 15.75e9, 16: 12.5e9}),
    ],
)
def test_rate_of_a_ring_is_that_of_all_network_cards(device, rates_by_ranks):
    assert {ranks: RATES[device].ring_rate(ranks) for ranks in rates_by_ranks} == rates_by_ranks


def test_second_machine_does_not_slow_a_hidden_communication():
    """Each rank has the same work on 8 and on 16 ranks."""
    one, two = (
        replace(
            estimate(make_model, lambda n=n: random_tokens(n, 32, 515), recipe_for("zero3", n)),
            tier="host",
            flops=10**12,
        )
        for n in (8, 16)
    )
    rates = RATES["H100"]
    assert rates.seconds(two) == rates.seconds(one) == rates.parts(one)["compute"]
    one_card = replace(rates, network_cards=1)
    assert one_card.parts(two)["ranks"] == pytest.approx(8 * rates.parts(two)["ranks"])


class Mean(Blocks):
    """The number of samples in its loss is unknown."""

    def loss(self, x):
        return self(x).square().mean()


@pytest.mark.parametrize(
    ("make", "recipe", "says"),
    [
        (Blocks, Recipe(ranks=4), "shard must be ddp, zero1, zero2 or zero3"),
        (Blocks, recipe_for("ddp", 3), "ranks must be a divisor of the batch's 16 samples"),
        (Blocks, recipe_for("ddp", micro_batches=8), "must be a divisor of a rank's 4 samples"),
        (Mean, recipe_for("ddp"), r"ranks must be 1 for a Mean, got 4: .* loss_sum"),
    ],
)
def test_what_cannot_be_estimated_is_refused(make, recipe, says):
    with pytest.raises(ValueError, match=says):
        estimate(make, rows, recipe)


def test_command_says_what_leaves_a_machine_if_there_are_several(capsys):
    sizes = "--hidden 64 --layers 1 --vocabulary 100 --sequence 16 --batch 16 --quick"
    asked = [*sizes.split(), "--precision", "fp32", "--budget", "2GB", "--shard", "ddp"]
    told = {}
    for name, options in {
        "one": ["--ranks", "8", "--device", "H100"],
        "two": ["--ranks", "16", "--device", "H100"],
        "desktop": ["--ranks", "16", "--device", "RTX 4090"],
    }.items():
        assert main([*asked, *options, "--details"]) == 0
        told[name] = " ".join(capsys.readouterr().out.split())
    assert "leave each of" not in told["one"]
    assert "8 devices, whose network cards together carry 400 GB/s in each" in told["two"]
    assert "8 devices, whose network cards together carry 12.5 GB/s in" in told["desktop"]
    assert main([*asked, "--ranks", "16", "--device", "H100", "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)["recipes"][0]["sent_bytes"]
    assert f"per step, {round(sent * 15 / 16):,} bytes" in told["two"]
    assert "leave each of the 2 machines, and the same number enters it" in told["two"]


def test_the_command_asks_for_ranks(capsys):
    sizes = "--hidden 64 --layers 1 --vocabulary 100 --sequence 16 --batch 4 --ranks 4"
    asked = [*sizes.split(), "--precision", "fp32", "--budget", "2MB", "--count", "tensors"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    recipes = [(each["recipe"]["ranks"], each["recipe"]["update"]) for each in found]
    assert set(recipes) == {(4, "fused")} and all(each["sent_bytes"] > 0 for each in found)
    with pytest.raises(SystemExit):
        main([*asked, "--check"])
    assert "--check cannot be combined with --ranks 4" in capsys.readouterr().err


class Around(Blocks):
    """The loss calls the blocks, and a layer of its own, but not the model."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def loss_sum(self, x):
        return self.forward(self.first(x)).square().sum(), len(x)


@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_a_loss_that_does_not_call_the_model_is_refused_where_parameters_are_gathered(shard):
    told = rf"^shard must be 'ddp' or 'zero1' .*, got '{shard}'.* let the loss call the model$"
    with pytest.raises(ValueError, match=told):
        estimate(Around, rows, recipe_for(shard))
    plain = estimate(Around, rows, recipe_for("ddp")).peak_bytes
    found = fit(Around, rows, plain - 1, base=Recipe(ranks=4), rates="H100")
    assert {e.recipe.shard for e in found} <= {"ddp", "zero1"}
    with pytest.raises(ValueError, match=told):
        fit(Around, rows, plain, base=Recipe(ranks=4, shard=shard))
