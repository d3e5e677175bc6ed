"""The ledger: every row that stands in the library is measured again."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_lib.accumulation import AccumulatedStep, split
from course_lib.attention import flash_attention
from course_lib.budget import Recipe, run
from course_lib.checkpoint import checkpoint_blocks
from course_lib.lessons.ledger import ROWS, ledger
from course_lib.memory import measure, symbolic
from course_lib.models import Decoder, loss_stages, random_tokens
from course_lib.offload import offload_activations
from course_lib.offload.stores import SymbolicStore
from course_lib.schedule import Chain, ScheduledSequential, optimal, simulate, store_all


def plain(decoder, tokens, adam):
    decoder.loss(tokens).backward()
    adam.step()


def autocast(decoder, tokens, adam):
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.loss(tokens)
    loss.backward()
    adam.step()


def checkpointed(decoder, tokens, adam):
    with checkpoint_blocks(decoder, "layers.*"):
        decoder.loss(tokens).backward()
    adam.step()


made = {}


def scheduled(decoder, tokens, adam):
    if not made:  # in the first step, which is not measured
        stages, x = loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()
        chain = Chain.profile(stages, x)
        half = optimal(chain, simulate(store_all(chain), chain).peak_bytes // 2)
        made.update(run=ScheduledSequential(stages, half), x=x)
    made["run"](made["x"]).backward()
    adam.step()


store = SymbolicStore()


def offloaded(decoder, tokens, adam):
    # as on a CPU, where it is a file
    with offload_activations(store, min_bytes=1 << 17, prefetch=1):
        loss = decoder.loss(tokens)
    loss.backward()
    adam.step()


def loss_sum(decoder, tokens):
    targets = tokens[:, 1:].flatten()
    return F.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), len(
        targets
    )


def in_pieces(decoder, tokens, adam):
    AccumulatedStep(decoder, adam, loss_sum)(split(tokens, 1))


def with_flash(decoder, tokens, adam):
    for layer in decoder.layers:
        layer.attention.standard = partial(flash_attention, causal=True)
    plain(decoder, tokens, adam)


TECHNIQUES = {
    "plain": plain,
    "autocast, bf16": autocast,
    "checkpoint each layer": checkpointed,
    "optimal schedule, half the activations": scheduled,
    "all activations to a file": offloaded,
    "eight micro-batches": in_pieces,
    "flash attention": with_flash,
}


# Run for real: PyTorch counts the FLOPs, the store the bytes.
COMBINED = {
    "all offloaded, checkpoints, steps in backward": Recipe(
        checkpoint="layers", offload_optimizer=1.0, offload_activations=True, in_backward=True
    ),
}


RANKS = {"FSDP2, one rank of four": ("fsdp", 4)}


def moved_bytes():
    return store.stats.bytes_down + store.stats.bytes_up


def test_every_row_is_measured_here():
    assert [row.technique for row in ROWS] == [*TECHNIQUES, *COMBINED, *RANKS]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.technique in TECHNIQUES], ids=lambda row: row.lesson
)
def test_a_row_is_what_the_step_takes(row):
    moved = []
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        tokens, adam = random_tokens(8, 128, 2048), torch.optim.Adam(decoder.parameters())

        def step():
            before = moved_bytes()
            TECHNIQUES[row.technique](decoder, tokens, adam)
            moved.append(moved_bytes() - before)

        found = measure(step, model=decoder, optimizer=adam)
    assert (found.peak_bytes, found.flops) == (row.peak_bytes, row.flops)
    assert set(moved) == {row.moved_bytes}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.technique in COMBINED], ids=lambda row: row.lesson
)
def test_a_row_of_several_techniques_is_what_a_real_step_takes_and_moves(row):
    def step():
        return run(
            lambda: Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128),
            lambda: random_tokens(8, 128, 2048),
            COMBINED[row.technique],
        )

    found = step()
    moved = found.traffic.bytes_down + found.traffic.bytes_up
    with FlopCounterMode(display=False) as counter:  # apart, since its own hooks keep tensors
        step()
    assert (found.meter.peak_bytes, counter.get_total_flops(), moved) == (
        row.peak_bytes,
        row.flops,
        row.moved_bytes,
    )


def test_a_lesson_shows_its_own_row_under_the_earlier_ones():
    first = ROWS[0]
    assert ledger("00", "plain", first).data["technique"].tolist() == ["plain"]
    half = type(first)("09", "`mine`", first.peak_bytes // 2, 2 * first.flops)
    shown = ledger("09", "`mine`", half, moved_bytes=3_000_000).data
    assert shown["technique"].tolist() == [*(row.technique for row in ROWS), "`mine`"]
    assert shown.iloc[-1].tolist()[2:] == [first.peak_bytes / 2e6, 0.5, 2.0, 3.0]
