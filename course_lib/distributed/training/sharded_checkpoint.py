"""Sharded checkpoints by `torch.distributed.checkpoint`, in one folder per step.

Each rank writes its part, and any number of ranks can read them. PyTorch writes the file
`.metadata` once all ranks have finished, so a folder without it is not a complete checkpoint. An
older checkpoint of the same step is renamed to `step-00000010.replaced` before the new one is
written, and deleted afterwards, so a complete checkpoint exists at every moment.

A checkpoint holds parameters, Adam's state, the step, and each rank's random generator states.
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

# State is saved by parameter name, so that it can be loaded with other shares per rank (zero1).
_BY_NAME = states.StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: Path | str, trainer: Trainer, step: int) -> Path:
    """Write a checkpoint after `step` steps; all ranks call this and see the same folder."""
    checkpoint = Path(folder) / f"step-{step:08}"
    replaced = checkpoint.with_suffix(".replaced")
    if dist.get_rank() == 0:
        if (checkpoint / ".metadata").exists():
            shutil.rmtree(replaced, ignore_errors=True)
            checkpoint.rename(replaced)
        shutil.rmtree(checkpoint, ignore_errors=True)
    dist.barrier()  # no rank writes before the older checkpoint has been renamed
    random = _by_rank(RandomState([trainer.device]))
    dcp.save({**_state(trainer), **random, "step": step}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        shutil.rmtree(replaced, ignore_errors=True)
    return checkpoint


def last_complete(folder: Path | str) -> Path:
    """Return the newest checkpoint that was written completely.

    Raises:
        ValueError: The folder has no complete checkpoint.
    """
    names = re.compile(r"step-\d{8,}(\.replaced)?")
    complete = [path.parent for path in Path(folder).glob("step-*/.metadata")]
    found = [path for path in complete if names.fullmatch(path.name)]
    # If two are of the same step, the new one comes last, after the one that it replaces.
    found.sort(key=lambda path: (int(path.stem.removeprefix("step-")), not path.suffix))
    if not found:
        raise ValueError(
            "resume must be a folder with a complete checkpoint, as --save writes it, got"
            f" {str(folder)!r}"
        )
    return found[-1]


def check_fits(checkpoint: Path, model: nn.Module) -> None:
    """Check that a checkpoint has the parameters and buffers of this model.

    The model may be real or symbolic, but must not be sharded.

    Raises:
        ValueError: Names or shapes differ; the message names the first difference.
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
    """Load a checkpoint written by any number of ranks, and return its number of steps.

    Each rank continues with the random generator state that was saved by the rank of the same
    number. If there was no such rank, it keeps its own state.
    """
    saved = _metadata(checkpoint)
    random = RandomState([trainer.device])
    own = {name: tensor for name, tensor in _by_rank(random).items() if name in saved}
    state = {**_state(trainer), **own, "step": 0}
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
    """Return name of a saved value -> its metadata, such as shape and dtype."""
    return dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata


def _by_rank(random: RandomState) -> dict[str, Tensor]:
    states = {"cpu": random.cpu, **{device.type: state for device, state in random.devices.items()}}
    return {f"random.{dist.get_rank()}.{kind}": state for kind, state in states.items()}


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's state with its sharding; Adam's state is created if needed."""
    model, optimizer = states.get_state_dict(trainer.model, trainer.local, options=_BY_NAME)
    return {"model": model, "optimizer": optimizer}
