r"""Training on several devices with PyTorch's engines: DDP, ZeroRedundancyOptimizer and FSDP2.

The script of this package, started by torchrun, trains a model in one or several modes. It prints
the bytes that each rank held and communicated:

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m course_lib.distributed --mode ddp,fsdp

`launch` starts this script from Python. `held_bytes` and `sent_bytes` compute the expected bytes
with formulas. `predict` computes them by running one rank on symbolic tensors (shapes without
values), without starting any process. To measure steps in another program, use `Trainer` and
`Watch`. Lesson 08 explains the modes.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formulas import MODES, held_bytes, sent_bytes, shapes_of
    from .measurement import CommunicationCounter, RankUsage, Watch
    from .modes import Trainer
    from .prediction import predict
    from .training.loop import train
    from .training.sharded_checkpoint import latest_complete_checkpoint, load, save
    from .training.tasks import task_of
    from .training.torchrun import launch, process_group

__all__ = [
    "MODES",
    "CommunicationCounter",
    "RankUsage",
    "Trainer",
    "Watch",
    "held_bytes",
    "latest_complete_checkpoint",
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

# `course_lib.budget` needs only the formulas, unless a recipe has ranks. The other modules import
# FSDP, DTensor and the distributed checkpoints, which takes longer than importing the rest of the
# library. Therefore a module is imported only when one of its names is first used.
_MODULES = {
    "formulas": ("MODES", "held_bytes", "sent_bytes", "shapes_of"),
    "measurement": ("CommunicationCounter", "RankUsage", "Watch"),
    "modes": ("Trainer",),
    "prediction": ("predict",),
    "training.loop": ("train",),
    "training.sharded_checkpoint": ("latest_complete_checkpoint", "load", "save"),
    "training.tasks": ("task_of",),
    "training.torchrun": ("launch", "process_group"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
