"""What a training step uses: a value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from course_lib._check import kind, number, one_of, whole

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("adam", "sgd")
ATTENTIONS = ("standard", "flash")
MIN_BYTES = 1 << 20
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
        min_bytes: the smallest storage of activations that goes down.
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
    min_bytes: int = MIN_BYTES
    head_chunk: int | None = None
    in_backward: bool = False
    micro_batches: int = 1

    def __post_init__(self):
        known = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "attention": ATTENTIONS, "checkpoint": CHECKPOINTS}
        for name, options in known.items():
            one_of(name, getattr(self, name), options)
        number("offload_optimizer", self.offload_optimizer, 0, 1)
        for name in ("offload_activations", "in_backward"):
            kind(name, getattr(self, name), bool, "True or False")
        for name in ("segments", "schedule_bytes", "head_chunk"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        whole("micro_batches", self.micro_batches, 1)
        whole("min_bytes", self.min_bytes, 0)
        for name, owner in (("segments", "segments"), ("schedule_bytes", "optimal")):
            if (getattr(self, name) is not None) != (self.checkpoint == owner):
                got = f'{name} is {getattr(self, name)} and checkpoint is "{self.checkpoint}"'
                raise ValueError(f'{got}; it takes a number where that is "{owner}", and None elsewhere')
        if self.offload_activations and self.checkpoint in ("selective", "optimal"):
            got = f'offload_activations is True and checkpoint is "{self.checkpoint}", which holds its tensors itself'
            raise ValueError(f'{got}; it takes "none", "layers" or "segments"')
        if self.in_backward and self.micro_batches > 1:
            got = f"in_backward is True and micro_batches is {self.micro_batches}, whose gradients must be added up"
            raise ValueError(f"{got}; it takes 1 micro-batch")

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
            least = "" if self.min_bytes == MIN_BYTES else f" from {self.min_bytes} bytes on"
            words.append(f"activations offloaded{least}")
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
