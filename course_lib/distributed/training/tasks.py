"""Models to train on several ranks, with their batches and losses.

A model is the course's decoder, a model that a Hugging Face config.json describes, or one that a
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
IGNORED = -100  # label of tokens whose loss does not count; the default of cross_entropy


@dataclass(frozen=True)
class Task:
    """A training task for several ranks: a model, its batches and its loss.

    Attributes:
        make_model: Function that builds the unsharded model, with the same values each time.
        make_batch: Function from a step number to the batch of all ranks in that step.
        loss_sum: Function (model, micro-batch) -> (sum of losses, weight). The weight is the number
            by which the sum is divided, such as the number of tokens.
        samples: Number of samples in a batch of all ranks, or None if it cannot be determined.
        split: Function (batch, parts) -> list of `parts` batches. It cuts the batch of all ranks
            into one share per rank, and each share into micro-batches. With None, tensors are cut
            along their first dimensions.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss_sum: Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]
    samples: int | None
    split: Split | None = None

    def part(self, step: int, ranks: int, rank: int, device: torch.device | str = "cpu") -> Any:
        """Return one rank's share of the batch of a step, on a device.

        Args:
            step: Number of the step.
            ranks: Number of ranks.
            rank: The rank whose share is returned.
            device: Device to which the tensors are moved.

        Raises:
            TypeError, ValueError: The batch cannot be split, as described in `parts`.
        """
        part = self.parts(step, ranks)[rank]
        return map_tensors(lambda tensor: tensor.to(device), part)

    def parts(self, step: int, ranks: int) -> list[Any]:
        """Split the batch of a step into one share per rank, and return the shares in rank order.

        With one rank, the list contains just the batch itself.

        Args:
            step: Number of the step.
            ranks: Number of ranks.

        Raises:
            TypeError: The function `split` returned neither a list nor a tuple. Without `split`,
                there are two possible causes: the batch contains no tensor, or the batch contains a
                nested or sparse tensor.
            ValueError: The function `split` did not return one batch per rank. Without `split`,
                the error has three possible causes. First, the number of samples is not a multiple
                of the number of ranks. Second, the tensors have different numbers of samples.
                Third, the batch contains a Python list with one value per sample; only tensors and
                NumPy arrays are cut.
        """
        if self.split is None and self.samples is not None:
            check_divides(self.samples, ranks)
        return parts_of(self.make_batch(step), ranks, self.split)


def check_divides(samples: int, ranks: int) -> None:
    """Raise a ValueError if the number of ranks does not divide the batch's number of samples."""
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
    """Return the training task for a given model, or for the course's decoder by default.

    The model is given either by a `config.json` or by a function that builds it.

    Args:
        config: Path of a `config.json` that `course_lib.configs` can read.
        model: Name of a function that returns the model, as "package:function". The function must
            have an attribute `make_batch`, a function that returns the batch of all ranks. It may
            have an attribute `split`, a function that cuts the batch. The loss is computed by the
            function's attribute `loss_sum` or by the model's method `loss_sum`. Otherwise, the
            model must be a Hugging Face model whose own loss is a mean over labels or samples.
            `model` cannot be combined with any other argument.
        batch, sequence: Samples per batch and tokens per sample, by default 8 and 128.
        unequal: Whether samples have unequal lengths, so that ranks have unequal numbers of tokens.

    Raises:
        ValueError: The file or the function cannot be found or used, or `model` is combined with
            another argument.
    """
    values = {"config": config, "batch": batch, "sequence": sequence, "unequal": unequal}
    options = [name for name, value in values.items() if value]
    if model is not None:
        if options:
            raise ValueError(
                f"--{options[0]} cannot be combined with --model, because the function of"
                " --model also creates the batch"
            )
        return _task_of_function(model)
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
    """Return the sum of cross-entropies over all labels, and the number of these labels.

    Labels that are `IGNORED` (-100) do not count.

    Args:
        model: Model that maps tokens of shape (batch, s) to logits of shape (batch, s, vocabulary).
        batch: Dict with "tokens" and "labels", both of shape (batch, s).
    """
    logits = model(batch["tokens"]).flatten(0, 1).float()
    labels = batch["labels"].flatten()
    return (
        F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"),
        (labels != IGNORED).sum(),
    )


def _ignore_last_labels(labels: Tensor, samples: int, sequence: int) -> None:
    """Mark the last labels of each sample as ignored, in place; later samples keep fewer labels."""
    for i in range(samples):
        labels[i, sequence - sequence * i // samples :] = IGNORED


def _labelled_batch(
    make_batch: Callable[..., dict[str, Tensor]],
    samples: int,
    sequence: int,
    unequal: bool,
    step: int,
) -> dict[str, Tensor]:
    """Return the batch of a step for a Hugging Face model; `make_batch` makes it."""
    batch = make_batch(samples, seed=step)
    if unequal:
        _ignore_last_labels(batch["labels"], samples, sequence)
    return batch


def _batch(
    samples: int, sequence: int, vocabulary: int, unequal: bool, step: int
) -> dict[str, Tensor]:
    """Return the batch of a step for a model that maps tokens to logits."""
    tokens = random_tokens(samples, sequence, vocabulary, seed=step)
    labels = tokens[:, 1:].clone()
    if unequal:
        _ignore_last_labels(labels, samples, sequence)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def _task_of_function(name: str) -> Task:
    """Return the task for a function of the user, given as "package:function"."""
    make_model = named_function("--model", name)
    make_batch = getattr(make_model, "make_batch", None)
    if not callable(make_batch):
        raise ValueError(
            "--model must name a function with an attribute make_batch, which must be a function"
            f" that returns a batch. Got {name!r}, {describe(make_model)} without this attribute"
        )
    loss_sum = getattr(make_model, "loss_sum", None)
    takes_arguments("--model", make_model, "no arguments")
    samples = samples_of(make_batch)
    with symbolic():
        if loss_sum is None and not has_loss_sum(make_model()):
            raise ValueError(
                f"the model of --model {name} must have a method loss_sum(batch), got none. Add"
                " this method to the model, or write a function loss_sum(model, batch) and add the"
                f" line {name.partition(':')[2]}.loss_sum = loss_sum. Either must return (sum of"
                " losses, weight), where the weight is, for example, the number of tokens"
            )
    return Task(
        partial(_without_cache, make_model),
        lambda step: make_batch(),
        loss_sum or _own_loss,
        samples,
        getattr(make_model, "split", None),
    )


def _own_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float | Tensor]:
    """Return (sum of losses, weight) for the loss that a model itself defines."""
    # With `micro_batches=2`, a loss without a known weight raises an error. The weight is needed
    # because a rank's batch is only a part of the whole batch.
    return own_loss(model, batch, micro_batches=2)


def _without_cache(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model and turn off its key-value cache, which a recomputation would extend again."""
    model = make_model()
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return model
