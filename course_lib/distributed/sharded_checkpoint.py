"""Sharded checkpoints by `torch.distributed.checkpoint`.

Each rank writes its part, and any number of ranks can read them. A checkpoint is written to a
folder `step-00000010.incomplete`, which is renamed once all ranks have finished. If a process is
killed before that, no folder has the name of a complete checkpoint, and the previous one is used.
An older checkpoint of the same step is renamed to `step-00000010.replaced` meanwhile, and deleted
afterwards, so a complete checkpoint exists at every moment.

A checkpoint holds parameters, Adam's state, the step, and each rank's random generator states.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn

from course_lib._torch import RandomState

from .modes import Trainer

# by parameter names, so that ranks with different shares (as in zero1) find theirs
_BY_NAME = states.StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: Path | str, trainer: Trainer, step: int) -> Path:
    """Write a checkpoint after `step` steps; all ranks call this and see the same folder."""
    done = Path(folder) / f"step-{step:08}"
    making, replaced = done.with_suffix(".incomplete"), done.with_suffix(".replaced")
    if dist.get_rank() == 0:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    dist.barrier()
    random = _by_rank(RandomState([trainer.device]))
    dcp.save({**_state(trainer), **random, "step": step}, checkpoint_id=making)
    dist.barrier()  # until all ranks have written
    if dist.get_rank() == 0:
        if done.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            done.rename(replaced)
        making.rename(done)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()
    return done


def last_complete(folder: Path | str) -> Path:
    """Return the newest checkpoint that was written completely.

    Raises:
        ValueError: There is none.
    """
    names = re.compile(r"step-\d{8,}(\.replaced)?")
    found = [path for path in Path(folder).glob("step-*") if names.fullmatch(path.name)]
    # of the same step, a new checkpoint is preferred to the one that it replaces
    found.sort(key=lambda path: (path.stem, not path.suffix))
    if not found:
        raise ValueError(
            "resume must be a folder with a complete checkpoint, as --save writes it, got"
            f" {str(folder)!r}"
        )
    return found[-1]


def check_fits(checkpoint: Path, model: nn.Module) -> None:
    """Check that a checkpoint is of this model, which is real or symbolic, and not sharded.

    Raises:
        ValueError: Names or shapes differ; the message names the first difference.
    """
    saved = _metadata(checkpoint)
    there = {
        name.removeprefix("model."): tuple(it.size)
        for name, it in saved.items()
        if name.startswith("model.")
    }
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            got, wanted = (
                f"{shapes[name]}" if name in shapes else "nothing" for shapes in (there, here)
            )
            raise ValueError(
                f"resume must be a checkpoint of this model, got {str(checkpoint)!r}, in which"
                f" {name} is {got} instead of {wanted}"
            )


def load(checkpoint: Path, trainer: Trainer) -> int:
    """Load a checkpoint written by any number of ranks, and return its number of steps.

    Random numbers continue as on the rank with the same number. A rank for which none were saved
    keeps its own.
    """
    saved = _metadata(checkpoint)
    random = RandomState([trainer.device])
    own = {name: tensor for name, tensor in _by_rank(random).items() if name in saved}
    state = {**_state(trainer), **own, "step": 0}
    dcp.load(state, checkpoint_id=checkpoint)  # into these tensors
    states.set_model_state_dict(trainer.model, state["model"])
    states.set_optimizer_state_dict(
        trainer.model, trainer.local, state["optimizer"], options=_BY_NAME
    )
    random.restore()
    return int(state["step"])


def _metadata(checkpoint: Path) -> dict[str, Any]:
    """Return name -> metadata of what is saved under that name."""
    return dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata


def _by_rank(random: RandomState) -> dict[str, Tensor]:
    states = {"cpu": random.cpu, **{device.type: state for device, state in random.devices.items()}}
    return {f"random.{dist.get_rank()}.{kind}": state for kind, state in states.items()}


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's state with its sharding; Adam's state is created if needed."""
    with torch.no_grad():
        optimizer = states.get_optimizer_state_dict(trainer.model, trainer.local, options=_BY_NAME)
        return {"model": states.get_model_state_dict(trainer.model), "optimizer": optimizer}
