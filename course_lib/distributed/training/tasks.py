"""Models to train on several ranks, with their batches and losses.

A model is the course's decoder, one that a Hugging Face config.json describes, or one that a
function of the user returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib._batches import Split, parts_of
from course_lib._check import describe, whole
from course_lib._hugging_face_losses import has_loss_sum, own_loss, takes_arguments
from course_lib._torch.tensors import map_tensors
from course_lib.models import Decoder, random_tokens
from course_lib.symbolic import symbolic
from course_lib.workload import model_of_config, named_function, samples_of

DECODER = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8}
SEQUENCE, BATCH = 128, 8
IGNORED = -100  # the default of cross_entropy


@dataclass(frozen=True)
class Task:
    """A model and its batches.

    Attributes:
        make_model: Function that builds the unsharded model, with the same values each time.
        make_batch: Function of the step that returns the batch of all ranks.
        loss_sum: Function (model, micro-batch) -> (sum of losses, weight).
        samples: Number of samples in a batch of all ranks; None if it is not known.
        split: Function (batch, parts) -> list of `parts` batches, which cuts the batch into the
            ranks' shares and these into micro-batches. None cuts along the first dimensions of the
            tensors.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss_sum: Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]
    samples: int | None
    split: Split | None = None

    def part(self, step: int, ranks: int, rank: int, device: torch.device | str = "cpu") -> Any:
        """Return a rank's share of the batch.

        Raises:
            TypeError, ValueError: The batch cannot be split, or the number of ranks does not divide
                its samples.
        """
        part = self.parts(step, ranks)[rank]
        return map_tensors(lambda tensor: tensor.to(device), part)

    def parts(self, step: int, ranks: int) -> list[Any]:
        """Return the shares of all ranks; raises the errors of `part`."""
        if self.split is None and self.samples is not None:
            check_divides(self.samples, ranks)
        return parts_of(self.make_batch(step), ranks, self.split)


def check_divides(samples: int, ranks: int) -> None:
    if samples % ranks:
        divisors = ", ".join(str(n) for n in range(1, samples + 1) if samples % n == 0)
        raise ValueError(
            f"the number of ranks must be a divisor of the batch's {samples} samples"
            f" ({divisors}), got {ranks}"
        )


def task_of(
    config: str | None = None,
    model: str | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    unequal: bool = False,
) -> Task:
    """Return the task for a `config.json` or a function, or else for the course's decoder.

    Args:
        config: Path of a file that `course_lib.configs` can read.
        model: "package:function". The function's attribute `make_batch`, also a function, returns
            the batch of all ranks. Its attribute `split`, if there is one, cuts the batch. The loss
            is the function's attribute `loss_sum`, or the model's method of that name, or a Hugging
            Face model's own loss, weighted by its labels.
        batch, sequence: Samples per batch and tokens per sample, by default 8 and 128; cannot be
            combined with `model`.
        unequal: Whether samples have unequal lengths, so that ranks have unequal numbers of tokens.

    Raises:
        ValueError: The file or the function cannot be found or used, or arguments cannot be
            combined.
    """
    values = {"config": config, "batch": batch, "sequence": sequence, "unequal": unequal}
    options = [name for name, value in values.items() if value]
    if model is not None:
        if options:
            raise ValueError(
                f"--{options[0]} cannot be combined with --model, whose function brings its own"
                " batch"
            )
        return _by_function(model)
    sizes = (
        whole("batch", BATCH if batch is None else batch, 1),
        whole("sequence", SEQUENCE if sequence is None else sequence, 1),
    )
    if config is None:
        make, vocabulary = partial(Decoder, **DECODER, sequence=sizes[1]), DECODER["vocabulary"]
    else:
        workload = model_of_config(config, sizes[1])
        make, vocabulary = workload.make_model, workload.vocabulary
        if not workload.plain:
            batches = partial(_labelled_batch, workload.make_batch, *sizes, unequal)
            return Task(partial(_without_cache, make), batches, _own_loss, sizes[0])
    return Task(make, partial(_batch, *sizes, vocabulary, unequal), token_loss_sum, sizes[0])


def token_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies, and the number of labels in it.

    Args:
        model: Function of tokens (b, s) that returns logits (b, s, vocabulary).
        batch: {"tokens": (b, s), "labels": (b, s)}.
    """
    logits = model(batch["tokens"]).flatten(0, 1).float()
    labels = batch["labels"].flatten()
    return (
        F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"),
        (labels != IGNORED).sum(),
    )


def _unequal(labels: Tensor, samples: int, sequence: int) -> None:
    """Ignore labels at the ends of samples, in place; the last sample keeps the fewest."""
    for i in range(samples):
        labels[i, sequence - sequence * i // samples :] = IGNORED


def _labelled_batch(
    make_batch: Callable[..., dict[str, Tensor]],
    samples: int,
    sequence: int,
    unequal: bool,
    step: int,
) -> dict[str, Tensor]:
    batch = make_batch(samples, seed=step)
    if unequal:
        _unequal(batch["labels"], samples, sequence)
    return batch


def _batch(
    samples: int, sequence: int, vocabulary: int, unequal: bool, step: int
) -> dict[str, Tensor]:
    tokens = random_tokens(samples, sequence, vocabulary, seed=step)
    labels = tokens[:, 1:].clone()
    if unequal:
        _unequal(labels, samples, sequence)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def _by_function(name: str) -> Task:
    make_model = named_function("--model", name)
    make_batch = getattr(make_model, "make_batch", None)
    if not callable(make_batch):
        raise ValueError(
            "--model must be a function with an attribute make_batch, another function,"
            f" got {name!r}, which is {describe(make_model)} without one"
        )
    loss_sum = getattr(make_model, "loss_sum", None)
    takes_arguments("--model", make_model, "no arguments")
    samples = samples_of(make_batch)
    with symbolic():
        if loss_sum is None and not has_loss_sum(make_model()):
            raise ValueError(
                "--model must have a loss that is a sum with a known weight, got"
                f" {name!r}; add an attribute loss_sum(model, batch) to the function, or a method"
                " loss_sum(batch) to the model, and return (sum of losses, weight) from it"
            )
    return Task(
        partial(_without_cache, make_model),
        lambda step: make_batch(),
        loss_sum or _own_loss,
        samples,
        getattr(make_model, "split", None),
    )


def _own_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float | Tensor]:
    # a rank's batch is a part of the whole, so its weight must be known
    return own_loss(model, batch, micro_batches=2)


def _without_cache(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without its key-value cache, which recomputation would extend a second time."""
    model = make_model()
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model
