"""Schedules of activation checkpointing for a chain of stages: planning, exact cost, execution.

A `Chain` describes a network by the costs of its stages. A `Schedule` lists which stage runs when
and what its forward keeps, and `simulate` computes its peak bytes and its time. `optimal` finds the
fastest schedule within a byte budget. `ScheduledSequential` runs a schedule under autograd, and
`schedule_blocks` runs the blocks of any model by a schedule, in place. Lesson 03 explains
schedules.

Example:
    >>> import torch
    >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> x = torch.randn(32, 64, requires_grad=True)
    >>> chain = Chain.profile(net, x)
    >>> plan = optimal(chain, 50_000)
    >>> simulate(plan, chain)
    Cost(peak_bytes=49408, time=13369344.0, forward_steps=35)
    >>> ScheduledSequential(net, plan)(x).sum().backward()

Source of the cost model: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing
for heterogeneous chains: how to train deep neural networks with limited memory" (Rotor),
arXiv:1911.13214.

To use this package alone, copy it together with `checkpoint/`, `_check.py` and `_torch/`.
That is enough for chains whose costs you give as numbers. Measuring a chain and plotting a schedule
also use other parts of the library.
"""

from course_lib._check import InfeasibleBudget

from .actions import COLORS, Backward, Cost, Forward, IllegalSchedule, Schedule, simulate
from .blocks import ScheduledBlocks, schedule_blocks
from .chain import Chain, Stage
from .executor import ScheduledSequential
from .planner import frontier, optimal
from .rules import binomial, recursive, segments, sqrt_segments, store_all

__all__ = [
    "COLORS",
    "Backward",
    "Chain",
    "Cost",
    "Forward",
    "IllegalSchedule",
    "InfeasibleBudget",
    "Schedule",
    "ScheduledBlocks",
    "ScheduledSequential",
    "Stage",
    "binomial",
    "frontier",
    "optimal",
    "recursive",
    "schedule_blocks",
    "segments",
    "simulate",
    "sqrt_segments",
    "store_all",
]
