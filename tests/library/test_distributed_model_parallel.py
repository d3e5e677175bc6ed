"""Tensor, context and pipeline parallelism, compared with one process and with predictions."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from process_groups import run_ranks
from torch.nn import functional as F

from course_lib.distributed import model_parallel, shapes_of, task_of
from course_lib.distributed.context_parallel import (
    RingAttention,
    context_sent_bytes,
    predict_context_parallel,
)
from course_lib.distributed.pipeline import RUNS
from course_lib.distributed.tensor_parallel import (
    TENSOR_MODES,
    predict_tensor_parallel,
    tensor_held_bytes,
    tensor_sent_bytes,
)
from course_lib.lessons.lesson_08.large import kept_per_layer
from course_lib.models import Decoder

DECODER = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 2, "sequence": 32}
TASK = replace(task_of(batch=2, sequence=32), make_model=partial(Decoder, **DECODER))
ACTIVATION = 4 * 2 * 32 * 256  # bytes of (b, s, h)
PIPELINES = RUNS[0], RUNS[4], RUNS[-1]


def results(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_parallel, "task_of", lambda: TASK)
        patch.setattr(model_parallel, "RUNS", PIPELINES)
        return list(model_parallel.results_of_all_modes())


@pytest.fixture(scope="module")
def runs():
    return run_ranks(2, results)[0]


def test_tensor_and_context_parallel_training_equals_one_process(runs):
    model, losses = TASK.make_model(), []
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(2):
        loss, tokens = TASK.loss_sum(model, TASK.make_batch(step))
        (loss / tokens).backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item() / tokens.item())
    make_batch, shapes = partial(TASK.make_batch, 0), shapes_of(TASK.make_model())
    two = {run["mode"]: run for run in runs}
    for mode in (*TENSOR_MODES, "cp"):
        assert two[mode]["losses"] == pytest.approx(losses, abs=1e-5)
        assert two[mode]["gradient_difference"] < 1e-5
    for mode, ranks in (("tp", 2), ("tp-sp", 2), ("tp-sp", 4)):
        found = predict_tensor_parallel(TASK.make_model, make_batch, TASK.loss_sum, mode, ranks)
        assert found.held == tensor_held_bytes(shapes, ranks)
        assert found.sent_bytes == tensor_sent_bytes(shapes, mode, ACTIVATION)
        assert ranks != 2 or two[mode]["taken"] == [asdict(found)] * 2
    for ranks, rank in ((2, 0), (2, 1), (4, 3)):
        found = predict_context_parallel(TASK.make_model, make_batch, ranks, rank)
        assert found.sent_bytes == context_sent_bytes(shapes, ranks, ACTIVATION // ranks)
        assert ranks != 2 or two["cp"]["taken"][rank] == asdict(found)


@pytest.mark.parametrize("run", PIPELINES)
def test_pipeline_parallel_gradients_equal_gradients_of_one_process(runs, run):
    keys = "mode", "micro_batches", "return_outputs"
    [found] = [each["taken"] for each in runs if tuple(map(each.get, keys)) == run]
    assert all(stage["difference"] < 1e-5 for stage in found)
    for rank, stage in enumerate(found):
        in_flight = most = 0
        for each in stage["order"]:
            in_flight += 1 if each[0] == "F" else -1
            most = max(most, in_flight)
        assert most == (run[1] if run[0] == "gpipe" else 2 - rank)


def test_sequence_parallel_layer_saves_gathered_inputs_for_backward():
    b, s, h, a = 8, 128, 256, 8
    norms, inside = 4 * s * b * h + 4 * s * b, 12 * s * b * h + a * s * s * b
    assert kept_per_layer("tp", 2) == 4 * (norms + inside / 2)
    gathered = 2 * (4 * s * b * h) / 2  # halves of two inputs from the other rank
    assert kept_per_layer("tp-sp", 2) == 4 * (norms + inside) / 2 + gathered


def test_tensor_parallelism_rejects_ranks_that_do_not_divide_heads():
    sizes = {"vocabulary": 8, "hidden": 6, "layers": 1, "sequence": 4}
    with pytest.raises(ValueError, match="a divisor of the model's 3 heads, got 2"):
        predict_tensor_parallel(lambda: Decoder(**sizes, heads=3), None, None, "tp", 2)


def test_ring_attention_on_one_rank_equals_causal_attention():
    for size in (1.0, 300.0):  # scores of about 1 and of about 1000
        q, k, v = (torch.linspace(-size, size, 80).sin().view(1, 2, 8, 5) * size for _ in range(3))
        ours = [each.clone().double().requires_grad_() for each in (q, k.flip(2), v.cos())]
        theirs = [each.detach().clone().requires_grad_() for each in ours]
        outputs = [
            RingAttention.apply(*ours, 0, 1, lambda *tensors: tensors),
            F.scaled_dot_product_attention(*theirs, is_causal=True),
        ]
        for each in outputs:
            (each * torch.linspace(0, 1, each.numel()).view(each.shape)).sum().backward()
        assert torch.allclose(*outputs)
        for own, other in zip(ours, theirs, strict=True):
            assert torch.allclose(own.grad, other.grad)
