"""Tensor parallelism on two real ranks, which all tests share, and on symbolic ranks."""

import pytest
import torch
from patience import HANGS_SECONDS

from course_lib.distributed import launch, shapes_of, task_of
from course_lib.distributed.tensor_parallel import (
    TENSOR_MODES,
    by_rank,
    predict_tensor,
    tensor_held_bytes,
    tensor_sent_bytes,
)
from course_lib.lessons import lesson_08
from course_lib.models import Decoder

SCRIPT = "course_lib.distributed.tensor_parallel"
TASK = task_of()
ACTIVATION = 4 * 8 * 128 * 256  # bytes of (b, s, h)


@pytest.fixture(scope="module")
def two():
    return {run["mode"]: run for run in launch(2, script=SCRIPT, timeout=HANGS_SECONDS)}


def predicted(mode, ranks):
    return predict_tensor(TASK.make_model, lambda: TASK.make_batch(0), TASK.loss_sum, mode, ranks)


@pytest.mark.parametrize("mode", TENSOR_MODES)
def test_two_ranks_train_as_one_process(two, mode):
    model = TASK.make_model()
    adam, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    for step in range(2):
        loss, tokens = TASK.loss_sum(model, TASK.make_batch(step))
        (loss / tokens).backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item() / tokens.item())
    assert two[mode]["losses"] == pytest.approx(losses, abs=1e-5)
    assert two[mode]["gradient_difference"] < 1e-5


@pytest.mark.parametrize("mode", TENSOR_MODES)
def test_two_ranks_need_the_predicted_bytes(two, mode):
    shapes, symbolic_rank = shapes_of(TASK.make_model()), predicted(mode, 2)
    for usage in two[mode]["taken"]:
        assert usage["held"] == symbolic_rank.held == tensor_held_bytes(shapes, 2)
        sent = tensor_sent_bytes(shapes, mode, ACTIVATION)
        assert usage["sent_bytes"] == symbolic_rank.sent_bytes == sent
        assert usage["peak_bytes"] == symbolic_rank.peak_bytes
        assert usage["at_peak"] == symbolic_rank.at_peak
        assert usage["flops"] == symbolic_rank.flops


@pytest.mark.parametrize("mode", TENSOR_MODES)
def test_four_ranks_hold_and_send_what_formulas_say(mode):
    shapes, usage = shapes_of(TASK.make_model()), predicted(mode, 4)
    assert usage.held == tensor_held_bytes(shapes, 4)
    assert usage.sent_bytes == tensor_sent_bytes(shapes, mode, ACTIVATION)


def test_a_layer_keeps_gathered_inputs_with_sequence_parallelism():
    b, s, h, a = 8, 128, 256, 8
    norms, inside = 4 * s * b * h + 4 * s * b, 12 * s * b * h + a * s * s * b
    assert lesson_08.kept_per_layer("tp", 2) == 4 * (norms + inside / 2)
    gathered = 2 * (4 * s * b * h) / 2  # the halves of two inputs that another rank computed
    assert lesson_08.kept_per_layer("tp-sp", 2) == 4 * (norms + inside) / 2 + gathered


def test_rows_of_one_rank_are_those_of_its_heads():
    rows = torch.arange(12)  # 4 heads of size 1: queries 0-3, keys 4-7, values 8-11
    assert by_rank(rows, 2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]


def test_heads_that_ranks_do_not_divide_are_refused():
    sizes = {"vocabulary": 8, "hidden": 6, "layers": 1, "sequence": 4}
    with pytest.raises(ValueError, match="a divisor of the model's 3 heads, got 2"):
        predict_tensor(lambda: Decoder(**sizes, heads=3), None, None, "tp", 2)
