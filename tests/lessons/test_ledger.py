"""The ledger: compare the rows of lessons 00 to 07 with estimates and measurements."""

from functools import partial

import numpy as np
import pytest
import torch

from course_lib.budget import Recipe, estimate
from course_lib.checkpoint import checkpoint_blocks
from course_lib.lessons.ledger import ROWS, ledger
from course_lib.lessons.lesson_07.exercises import make_batch, make_model
from course_lib.memory import MemoryMeter, measure, symbolic
from course_lib.models import loss_stages
from course_lib.schedule import Chain, ScheduledSequential, optimal, simulate, store_all

RECIPES = {
    "00": Recipe(),
    "04": Recipe(offload_activations=True, prefetch=1, min_bytes=1 << 17),  # to a file
    "05": Recipe(micro_batches=8),
    "06": Recipe(attention="flash"),
    "07": Recipe(
        checkpoint="layers", offload_optimizer=1.0, offload_activations=True, in_backward=True
    ),
}


@pytest.mark.parametrize("lesson", RECIPES)
def test_numbers_of_each_recipe_in_ledger_equal_its_estimate(lesson):
    found, row = estimate(make_model, make_batch, RECIPES[lesson]), ROWS[int(lesson)]
    wanted = (row.peak_bytes, row.flops, row.moved_bytes)
    assert (found.peak_bytes, found.flops, found.moved_bytes) == wanted


def autocast(decoder, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return decoder.loss(tokens)


def checkpointed(decoder, tokens):
    with checkpoint_blocks(decoder, "layers.*"):
        return decoder.loss(tokens)


def half_scheduled(decoder, tokens):
    stages, x = loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()
    chain = Chain.profile(stages, x)
    half = optimal(chain, simulate(store_all(chain), chain).peak_bytes // 2)
    return partial(ScheduledSequential(stages, half), x)


# A recipe has neither autocast nor this schedule, and keeps no state of random numbers.
@pytest.mark.parametrize(
    ("lesson", "make_loss"),
    [
        ("01", partial(partial, autocast)),
        ("02", partial(partial, checkpointed)),
        ("03", half_scheduled),
    ],
)
def test_numbers_of_each_recipe_in_ledger_equal_measured_step(lesson, make_loss):
    with symbolic():
        decoder, tokens = make_model(), make_batch()
        adam, loss = torch.optim.Adam(decoder.parameters()), make_loss(decoder, tokens)

        def step():
            loss().backward()
            adam.step()

        found, row = measure(step, model=decoder, optimizer=adam), ROWS[int(lesson)]
    assert (found.peak_bytes, found.flops) == (row.peak_bytes, row.flops)


def test_ledger_appends_learner_recipe_after_recipes_of_earlier_lessons():
    first = ROWS[0]
    assert ledger("00", "plain", first).data["technique"].tolist() == ["plain"]
    half = type(first)("09", "`mine`", first.peak_bytes // 2, 2 * first.flops)
    shown = ledger("09", "`mine`", half, moved_bytes=3_000_000).data
    assert shown["technique"].tolist() == [*(row.technique for row in ROWS), "`mine`"]
    assert shown.iloc[-1].tolist()[2:] == [first.peak_bytes / 2e6, 0.5, 2.0, 3.0]


def test_four_and_eight_checkpointed_layers_have_equal_late_backward_peak():
    """Compare the points of lesson 00's exercise: only the start of backward differs."""
    early, late = {}, {}
    for count in (4, 8):
        with symbolic():
            decoder, tokens = make_model(), make_batch()
            checkpoint_blocks(decoder, "layers.*", first=count)
            adam = torch.optim.Adam(decoder.parameters())
            for _ in range(2):
                decoder.zero_grad()
                with MemoryMeter(decoder, adam) as meter:
                    decoder.loss(tokens).backward()
                    adam.step()
        held, gradients = sum(meter.series().values()), meter.series()["gradient"]
        in_backward = np.array(meter.phases()) == "backward"
        early[count] = held[gradients == 0].max()
        late[count] = held[in_backward & (gradients > 2e7)].max()
    assert late[4] == late[8] == ROWS[2].peak_bytes
    assert early[4] == 197_945_496 and early[8] < late[8]
