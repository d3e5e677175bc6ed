"""GPU experiments of lesson 03: schedules of a decoder under byte budgets, promised and run."""

from __future__ import annotations

import torch

from course_lib.memory import measure
from course_lib.models import Decoder, loss_stages, random_tokens
from course_lib.schedule import Chain, ScheduledSequential, frontier, optimal, simulate

from . import experiment


@experiment(
    "03",
    "scheduled_decoder",
    en="A decoder's forward and backward pass under half and a quarter of the peak that storing all takes",
    zh="解码器的前向与反向，预算为全部保留时峰值的二分之一和四分之一",
    small={"vocabulary": 64, "hidden": 32, "heads": 2, "layers": 4, "sequence": 16, "batch": 2},
    labels={
        "plain_peak_bytes": ("store all: peak of tensors", "全部保留：张量峰值"),
        "plain_seconds": ("store all: time", "全部保留：时间"),
        "half_predicted_bytes": ("half: peak predicted", "二分之一：预测峰值"),
        "half_peak_bytes": ("half: peak of tensors", "二分之一：张量峰值"),
        "half_allocator_peak_bytes": ("half: allocator's peak", "二分之一：分配器峰值"),
        "half_seconds": ("half: time", "二分之一：时间"),
        "quarter_predicted_bytes": ("a quarter: peak predicted", "四分之一：预测峰值"),
        "quarter_peak_bytes": ("a quarter: peak of tensors", "四分之一：张量峰值"),
        "quarter_allocator_peak_bytes": ("a quarter: allocator's peak", "四分之一：分配器峰值"),
        "quarter_seconds": ("a quarter: time", "四分之一：时间"),
    },
)
def scheduled_decoder(
    device: torch.device,
    *,
    vocabulary: int = 8192,
    hidden: int = 1024,
    heads: int = 16,
    layers: int = 12,
    sequence: int = 1024,
    batch: int = 4,
) -> dict[str, float]:
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "heads": heads, "layers": layers, "sequence": sequence}
    tokens = random_tokens(batch, sequence, vocabulary).to(device)
    stages = loss_stages(Decoder(**sizes, tied=False).to(device), tokens[:, 1:])
    x = tokens[:, :-1].contiguous()
    for parameter in stages.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = measure(lambda: stages(x).backward())
    figures = {"plain_peak_bytes": plain.peak_bytes, "plain_seconds": plain.seconds}
    chain = Chain.profile(stages, x, clock=True)
    points = frontier(chain)
    for name, part in (("half", 2), ("quarter", 4)):
        # What fits in the part, or the nearest that there is.
        schedule = optimal(chain, max(points[-1].peak_bytes // part, points[0].peak_bytes))
        run = ScheduledSequential(stages, schedule)
        found = measure(lambda run=run: run(x).backward())
        figures[f"{name}_predicted_bytes"] = simulate(schedule, chain).peak_bytes - x.nbytes  # x is there before
        figures[f"{name}_peak_bytes"] = found.peak_bytes
        figures[f"{name}_allocator_peak_bytes"] = found.allocator_peak_bytes
        figures[f"{name}_seconds"] = found.seconds
    return figures
