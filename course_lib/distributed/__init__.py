r"""Training on several devices by the engines that exist: DDP, ZeroRedundancyOptimizer, FSDP2,
distributed checkpoints.

A script that torchrun starts trains a model by one mode or several, and says what each rank held
and communicated:

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m course_lib.distributed --mode ddp,fsdp

`launch` does that from Python, `held_bytes` and `sent_bytes` say by formula what to expect, and
`predict` by a symbolic rank, of which none is started. In a program of your own, `Trainer` and
`Watch` are the parts. Lesson 08 explains.
"""

from .formulas import MODES, held_bytes, sent_bytes, shapes_of
from .measurement import Communicated, Taken, Watch
from .modes import Trainer
from .prediction import predict
from .sharded_checkpoint import last_complete, load, save
from .tasks import task_of
from .torchrun import launch, process_group, train

__all__ = [
    "MODES",
    "Communicated",
    "Taken",
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
