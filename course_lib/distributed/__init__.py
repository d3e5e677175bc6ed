r"""Training on several devices with existing engines: DDP, ZeroRedundancyOptimizer and FSDP2.

A script, started by torchrun, trains a model in one or several modes and prints what each rank held
and communicated:

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m course_lib.distributed --mode ddp,fsdp

`launch` does this from Python. `held_bytes` and `sent_bytes` compute the expected bytes with
formulas, and `predict` computes them with one symbolic rank, without starting any process. In
another program, use `Trainer` and `Watch`. Lesson 08 explains the modes.
"""

from .formulas import MODES, held_bytes, sent_bytes, shapes_of
from .measurement import CommunicationCounter, RankUsage, Watch
from .modes import Trainer
from .prediction import predict
from .sharded_checkpoint import last_complete, load, save
from .tasks import task_of
from .torchrun import launch, process_group, train

__all__ = [
    "MODES",
    "CommunicationCounter",
    "RankUsage",
    "Trainer",
    "Watch",
    "held_bytes",
    "last_complete",
    "launch",
    "load",
    "predict",
    "process_group",
    "save",
    "sent_bytes",
    "shapes_of",
    "task_of",
    "train",
]
