"""Sharded checkpoints with `torch.distributed.checkpoint`, in one folder per step.

Each rank writes its part, and any number of ranks can read the parts. PyTorch writes the file
`.metadata` when all ranks have finished, so a folder without it is not a complete checkpoint.

A checkpoint contains parameters, Adam's state, the step number, and the states of each rank's
random number generators.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn

from course_lib._torch.generators import RandomState

from ..modes import Trainer

# State is saved by parameter name, because in mode zero1 a rank can load the state of a parameter
# whose state another rank has saved.
_BY_NAME = states.StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: Path | str, trainer: Trainer, step: int) -> Path:
    """Write a checkpoint of the training state. All ranks must call this with the same folder.

    An older checkpoint of the same step is deleted first.

    Args:
        folder: Folder of all checkpoints, which all ranks can access.
        trainer: This rank's trainer, whose state is saved.
        step: Number of steps done so far.

    Returns:
        The path of the new checkpoint.
    """
    checkpoint = Path(folder) / f"step-{step:08}"
    if dist.get_rank() == 0:
        # If saving is interrupted, an older checkpoint of this step must not look complete.
        (checkpoint / ".metadata").unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
    dist.barrier()  # no rank writes before the older checkpoint has been deleted
    random = _states_by_rank(RandomState([trainer.device]))
    dcp.save({**_trainer_state(trainer), **random, "step": step}, checkpoint_id=checkpoint)
    return checkpoint


def latest_complete_checkpoint(folder: Path | str) -> Path:
    """Return the path of the complete checkpoint with the highest step number in a folder.

    Args:
        folder: Folder with the checkpoints that `save` has written.

    Raises:
        ValueError: The folder has no complete checkpoint.
    """
    complete = [path.parent for path in Path(folder).glob("step-*/.metadata")]
    found = [path for path in complete if re.fullmatch(r"step-\d{8,}", path.name)]
    if not found:
        raise ValueError(
            "resume must be a folder with a complete checkpoint, as --save writes it, got"
            f" {str(folder)!r}"
        )
    return max(found, key=lambda path: int(path.name.removeprefix("step-")))


def check_fits(checkpoint: Path, model: nn.Module) -> None:
    """Raise an error unless a checkpoint has the parameters and buffers of this model.

    Args:
        checkpoint: Path of the checkpoint.
        model: The model, real or symbolic. It must not be sharded.

    Raises:
        ValueError: Names or shapes differ. The message names the first difference.
    """
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in _metadata(checkpoint).items()
        if name.startswith("model.")
    }
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({*saved, *own}):
        actual, expected = (shapes.get(name, "nothing") for shapes in (saved, own))
        if actual != expected:
            raise ValueError(
                f"resume must be a checkpoint of this model, got {str(checkpoint)!r}, in which"
                f" {name} is {actual} instead of {expected}"
            )


def load(checkpoint: Path, trainer: Trainer) -> int:
    """Load a checkpoint into a trainer, and return the number of steps done before it was saved.

    The checkpoint may have been written by any number of ranks. Each rank also loads the states of
    its random number generators. If the checkpoint has none for this rank, the generators are not
    changed.

    Args:
        checkpoint: Path of the checkpoint.
        trainer: This rank's trainer, whose model and optimizer receive the state.
    """
    saved = _metadata(checkpoint)
    random = RandomState([trainer.device])
    own = {name: tensor for name, tensor in _states_by_rank(random).items() if name in saved}
    state = {**_trainer_state(trainer), **own, "step": 0}
    dcp.load(state, checkpoint_id=checkpoint)  # overwrites the tensors of `state`
    states.set_state_dict(
        trainer.model,
        trainer.local,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    random.restore()
    return int(state["step"])


def _metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the metadata of each saved value, such as its shape and dtype, by name."""
    return dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata


def _states_by_rank(random: RandomState) -> dict[str, Tensor]:
    """Return this rank's generator states, with names that include the rank's number."""
    states = {"cpu": random.cpu, **{device.type: state for device, state in random.devices.items()}}
    return {f"random.{dist.get_rank()}.{kind}": state for kind, state in states.items()}


def _trainer_state(trainer: Trainer) -> dict[str, Any]:
    """Return the sharded state of a trainer's model and optimizer.

    If Adam's state does not exist yet, it is created.
    """
    model, optimizer = states.get_state_dict(trainer.model, trainer.local, options=_BY_NAME)
    return {"model": model, "optimizer": optimizer}
