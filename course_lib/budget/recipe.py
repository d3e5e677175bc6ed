"""What a training step uses: a value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("adam", "sgd")
ATTENTIONS = ("standard", "flash")
CHECKPOINTS = ("none", "selective", "layers", "segments", "optimal")


@dataclass(frozen=True, repr=False)
class Recipe:
    """All that a training step uses to save memory. The default is the plain step.

    Attributes:
        precision: "fp32"; or "bf16" for parameters, gradients and activations, with fp32 master weights.
        optimizer: "adam" (AdamW) or "sgd" (without momentum).
        offload_optimizer: the fraction of the optimizer's state, masters included, that lives one tier down.
        attention: "standard" saves the scores' softmax, "flash" one number a row.
        checkpoint: "none"; "layers", of every layer the input; "selective", of every layer its matrix products;
            "segments", of so many runs of layers the input; "optimal", what the fastest schedule keeps.
        segments: how many, for "segments" alone. The last one is not recomputed.
        schedule_bytes: the most bytes of activations of one micro-batch, for "optimal" alone.
        offload_activations: what is saved for backward goes one tier down; not with "selective" or "optimal".
        head_chunk: tokens of the loss head at a time; None for all at once.
        in_backward: the optimizer steps as each gradient is there, and the gradient goes; takes one micro-batch.
        micro_batches: pieces of the batch, equal but for the last.

    Raises:
        TypeError, ValueError: a field is not of its kind, out of its range, or does not go with another one.
    """

    precision: str = "fp32"
    optimizer: str = "adam"
    offload_optimizer: float = 0.0
    attention: str = "standard"
    checkpoint: str = "none"
    segments: int | None = None
    schedule_bytes: int | None = None
    offload_activations: bool = False
    head_chunk: int | None = None
    in_backward: bool = False
    micro_batches: int = 1

    def __post_init__(self):
        known = {
            "precision": tuple(PRECISIONS),
            "optimizer": OPTIMIZERS,
            "attention": ATTENTIONS,
            "checkpoint": CHECKPOINTS,
        }
        for name, options in known.items():
            if getattr(self, name) not in options:
                quoted = ", ".join(f'"{option}"' for option in options)
                raise ValueError(f"{name} is {getattr(self, name)!r}; it takes one of {quoted}")
        fraction = self.offload_optimizer
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"offload_optimizer is {fraction!r}; it takes a number from 0 to 1")
        if not 0 <= fraction <= 1:
            raise ValueError(f"offload_optimizer is {fraction}; it takes a number from 0 to 1")
        for name in ("offload_activations", "in_backward"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it takes True or False")
        for name, optional in (
            ("segments", True),
            ("schedule_bytes", True),
            ("head_chunk", True),
            ("micro_batches", False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it takes a whole number, 1 or more")
            if value < 1:
                raise ValueError(f"{name} is {value}; it takes a whole number, 1 or more")
        for name, owner in (("segments", "segments"), ("schedule_bytes", "optimal")):
            given = getattr(self, name) is not None
            if given != (self.checkpoint == owner):
                raise ValueError(
                    f'{name} is {getattr(self, name)} and checkpoint is "{self.checkpoint}"; '
                    f'{name} takes a number where checkpoint is "{owner}", and None elsewhere'
                )
        if self.offload_activations and self.checkpoint in ("selective", "optimal"):
            raise ValueError(
                f'offload_activations does not go with checkpoint="{self.checkpoint}", which holds its tensors itself; '
                'it takes "none", "layers" or "segments"'
            )
        if self.in_backward and self.micro_batches > 1:
            raise ValueError(
                f"in_backward is True with micro_batches = {self.micro_batches}; gradients of several pieces must be "
                "added up before a step, so it takes micro_batches = 1"
            )

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def __str__(self) -> str:
        """In words: "bf16, adam, flash attention, checkpoint layers, 4 micro-batches"."""
        words = [self.precision, self.optimizer]
        if self.offload_optimizer:
            share = "" if self.offload_optimizer == 1 else f"{self.offload_optimizer:.0%} of "
            words.append(f"{share}optimizer offloaded")
        if self.attention == "flash":
            words.append("flash")
        if self.checkpoint != "none":
            more = {"segments": f" {self.segments}", "optimal": f" {(self.schedule_bytes or 0) / 1e6:,.1f} MB"}
            words.append(f"checkpoint {self.checkpoint}{more.get(self.checkpoint, '')}")
        if self.offload_activations:
            words.append("activations offloaded")
        if self.head_chunk:
            words.append(f"head in chunks of {self.head_chunk}")
        if self.in_backward:
            words.append("steps in backward")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return ", ".join(words)

    def changed(self) -> dict[str, object]:
        """The fields that are not as in the plain step."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


def pieces_allowed(samples: int) -> list[int]:
    """The numbers of micro-batches into which so many samples can be split, equal but for the last."""
    return [m for m in range(1, samples + 1) if math.ceil(samples / math.ceil(samples / m)) == m]
