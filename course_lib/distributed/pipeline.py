"""Pipeline parallelism with `torch.distributed.pipelining`: each rank has some of the layers.

GPipe computes the forward passes of all micro-batches before the first backward pass. 1F1B
alternates between forward and backward passes, so stage i of p (counted from 0) has at most p - i
micro-batches in flight.

Source: Huang et al. 2018, arXiv:1811.06965 (GPipe); Narayanan et al. 2019, arXiv:1806.03377 (1F1B).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, loss_stages, random_tokens

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
#: Sizes of the decoder in the pipeline. Its head does not share the embedding's weight, because the
#: embedding is on another rank.
SIZES = {"vocabulary": 512, "hidden": 256, "heads": 8, "layers": 4, "sequence": 32, "tied": False}
#: Runs of the script: (schedule, micro-batches, whether the last stage returns its outputs).
RUNS = (
    *((schedule, count, True) for schedule in SCHEDULES for count in (4, 8, 16)),
    ("1f1b", 16, False),
)


def part_of(decoder: Decoder, rank: int, ranks: int) -> nn.Sequential:
    """Return the modules of a decoder that one rank of a pipeline runs, as a sequence.

    The first rank also has the embedding, and the last rank also has the last norm and the head.

    Args:
        decoder: The decoder. Its layers are divided evenly.
        rank: Rank whose modules are returned.
        ranks: Number of ranks in the pipeline.
    """
    embedding, *halves, _ = loss_stages(decoder, torch.zeros(1, 2, dtype=torch.long))
    share = len(halves) // ranks
    own = halves[rank * share : (rank + 1) * share]
    first = [embedding] if rank == 0 else []
    last = [decoder.norm, decoder.head] if rank == ranks - 1 else []
    return nn.Sequential(*first, *own, *last)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a micro-batch.

    Args:
        logits: Logits of shape (batch, tokens, vocabulary).
        labels: Labels of shape (batch, tokens).
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def measured_pipeline(schedule: str, micro_batches: int, return_outputs: bool) -> dict[str, Any]:
    """Run and measure one training step of a pipeline on the ranks of the process group.

    Each micro-batch is one sequence. The gradients are compared with those of the same step in one
    process.

    Args:
        schedule: "gpipe" or "1f1b".
        micro_batches: Number of micro-batches.
        return_outputs: Whether the last rank of the pipeline keeps the outputs of all micro-batches
            and returns them.

    Returns:
        A dict for this rank. "order" lists the forward and backward passes in the order in which
        they ran. For example, ["F0", "B0"] is the forward and then the backward pass of micro-batch
        0. "peak_bytes" is the largest number of tensor bytes that were live at once. "difference"
        is the largest relative difference between the gradients and those of one process. For each
        parameter, the largest absolute difference is divided by the largest absolute entry of the
        gradient in one process.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    decoder = Decoder(**SIZES)
    module = part_of(decoder, rank, ranks)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    tokens = random_tokens(micro_batches, SIZES["sequence"], SIZES["vocabulary"])
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with MemoryMeter(module) as meter:
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        order = _recorded_order(stage)
        run = SCHEDULES[schedule](stage, micro_batches, loss_fn=mean_loss)
        first = [inputs] if rank == 0 else []
        run.step(
            *first, target=labels if rank == ranks - 1 else None, return_outputs=return_outputs
        )
        del stage, run
    whole = Decoder(**SIZES)
    mean_loss(whole(inputs), labels).backward()
    expected = dict(whole.named_parameters())
    own = set(module.parameters())
    differences = [
        ((p.grad - expected[name].grad).abs().max() / expected[name].grad.abs().max()).item()
        for name, p in decoder.named_parameters()
        if p in own
    ]
    return {"order": order, "peak_bytes": meter.peak_bytes, "difference": max(differences)}


def _recorded_order(stage: PipelineStage) -> list[str]:
    """Return a list to which each pass of the stage is appended when it runs, such as "F0"."""
    order: list[str] = []

    def recorder(run: Any, letter: str) -> Any:
        def run_and_record(chunk: int, *args: Any, **options: Any) -> Any:
            order.append(f"{letter}{chunk}")
            return run(chunk, *args, **options)

        return run_and_record

    stage.forward_one_chunk = recorder(stage.forward_one_chunk, "F")
    stage.backward_one_chunk = recorder(stage.backward_one_chunk, "B")
    return order
