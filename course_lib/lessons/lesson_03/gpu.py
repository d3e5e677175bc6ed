"""Lesson 03 on a GPU: schedules of a decoder, predicted and run."""

from collections.abc import Iterator

import torch

from course_lib.models import loss_stages
from course_lib.schedule import Chain, ScheduledSequential, frontier, optimal, simulate
from course_lib.teaching.experiments import (
    TINY,
    Part,
    decoder_and_tokens,
    experiment,
    peaks,
    seconds,
)


@experiment(
    title=(
        "A decoder's forward and backward pass under half and a quarter of the peak that storing"
        " all takes"
    ),
    sizes={
        "vocabulary": 8192,
        "hidden": 1024,
        "heads": 16,
        "layers": 12,
        "sequence": 1024,
        "batch": 4,
    },
    small={**TINY, "layers": 4},
    variants={"plain": "store all", "half": "half", "quarter": "a quarter"},
)
def scheduled_decoder(device: torch.device, **sizes: int) -> Iterator[Part]:
    """Measure the peaks and times of a decoder's forward and backward pass under three schedules.

    The first schedule stores all tensors. The second one has half of the first schedule's peak as
    its budget, and the third one a quarter. A budget below the lowest possible peak is raised to
    that peak. All gradients are allocated before the forward pass.
    """
    model, tokens = decoder_and_tokens(device, **sizes, tied=False)
    stages = loss_stages(model, tokens[:, 1:])
    x = tokens[:, :-1].contiguous()
    gradient_bytes = sum(parameter.nbytes for parameter in stages.parameters())

    def step(run: torch.nn.Module) -> None:
        for parameter in stages.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run(x).backward()

    variants = {"plain": lambda: step(stages)}
    yield peaks("plain", variants["plain"])
    for parameter in stages.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chain = Chain.profile(stages, x, clock=True)
    points = frontier(chain)
    for name, part in (("half", 2), ("quarter", 4)):
        # The budget is this fraction of the baseline's peak, or the lowest possible peak if larger.
        schedule = optimal(chain, max(points[-1].peak_bytes // part, points[0].peak_bytes))
        run = ScheduledSequential(stages, schedule)
        # x exists before the step
        predicted = simulate(schedule, chain).peak_bytes - x.nbytes + gradient_bytes
        yield {f"{name}_predicted_bytes": predicted}
        variants[name] = lambda run=run: step(run)
        yield peaks(name, variants[name])
    yield seconds(device, variants)
