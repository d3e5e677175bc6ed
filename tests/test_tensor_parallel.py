"""Tensor parallelism on two real ranks and on symbolic ranks."""

from dataclasses import asdict
from functools import partial

import pytest
import torch
from patience import HANGS_SECONDS

from course_lib.distributed import launch, shapes_of, task_of
from course_lib.distributed.tensor_parallel import (
    TENSOR_MODES,
    predict_tensor,
    tensor_held_bytes,
    tensor_sent_bytes,
)
from course_lib.lessons.lesson_08.large import kept_per_layer
from course_lib.models import Decoder

SCRIPT = "course_lib.distributed.tensor_parallel"
TASK = task_of()
ACTIVATION = 4 * 8 * 128 * 256  # bytes of (b, s, h)


def test_two_ranks_train_as_one_process_and_ranks_need_the_predicted_bytes():
    model, losses = TASK.make_model(), []
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(2):
        loss, tokens = TASK.loss_sum(model, TASK.make_batch(step))
        (loss / tokens).backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item() / tokens.item())
    make_batch, shapes = partial(TASK.make_batch, 0), shapes_of(TASK.make_model())
    two = {run["mode"]: run for run in launch(2, script=SCRIPT, timeout=HANGS_SECONDS)}
    for mode in TENSOR_MODES:
        assert two[mode]["losses"] == pytest.approx(losses, abs=1e-5)
        assert two[mode]["gradient_difference"] < 1e-5
        for ranks in (2, 4):
            found = predict_tensor(TASK.make_model, make_batch, TASK.loss_sum, mode, ranks)
            assert found.held == tensor_held_bytes(shapes, ranks)
            assert found.sent_bytes == tensor_sent_bytes(shapes, mode, ACTIVATION)
            assert ranks != 2 or two[mode]["taken"] == [asdict(found)] * 2


def test_a_layer_keeps_gathered_inputs_with_sequence_parallelism():
    b, s, h, a = 8, 128, 256, 8
    norms, inside = 4 * s * b * h + 4 * s * b, 12 * s * b * h + a * s * s * b
    assert kept_per_layer("tp", 2) == 4 * (norms + inside / 2)
    gathered = 2 * (4 * s * b * h) / 2  # the halves of two inputs that another rank computed
    assert kept_per_layer("tp-sp", 2) == 4 * (norms + inside) / 2 + gathered


def test_heads_that_ranks_do_not_divide_are_refused():
    sizes = {"vocabulary": 8, "hidden": 6, "layers": 1, "sequence": 4}
    with pytest.raises(ValueError, match="a divisor of the model's 3 heads, got 2"):
        predict_tensor(lambda: Decoder(**sizes, heads=3), None, None, "tp", 2)
