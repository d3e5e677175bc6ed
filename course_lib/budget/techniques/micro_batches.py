"""Technique that splits the batch and accumulates gradients of micro-batches (lesson 05)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from course_lib._batches import Split, has_samples, num_splittable_samples, parts_of, samples_in
from course_lib._torch.tensors import tensors_in
from course_lib.labels import text, verbatim
from course_lib.labels.command import translated_error

from ..loss import check_loss
from .technique import Recipe, RecipeSearch, Technique, at_least, choice, fields_of


class MicroBatches(Technique):
    """Technique that splits the batch into micro-batches and accumulates their gradients.

    `AccumulatedStep` runs the micro-batches.
    """

    fields = fields_of(accumulate=choice("fp32", None), micro_batches=at_least(1))
    after = ("checkpoint",)
    composable = True
    computes = False
    acts_on = frozenset({"activation", "temporary", "input"})

    def conflict(self, recipe: Recipe) -> str | None:
        if recipe.in_backward and recipe.accumulate:
            return (
                "accumulate must be None when in_backward is True, got"
                f" {recipe.accumulate!r}: no gradients are accumulated then"
            )
        return None

    def labels(self, recipe: Recipe) -> list[str]:
        words: list[str] = [text("fp32 sums")] if recipe.accumulate else []
        if recipe.micro_batches > 1:
            words.append(text("{count} micro-batches", count=recipe.micro_batches))
        return words

    def not_tried(self, search: RecipeSearch) -> str | None:
        cache = search.cache
        if (
            search.micro_batch_counts != (1,)
            or cache.base.in_backward
            or samples_in(cache.batch) == 1
        ):
            return None
        try:
            check_loss(cache.model, replace(cache.base, micro_batches=2), cache.composer.loss_sum)
        except ValueError as error:
            return text("only one micro-batch was tried: {reason}", reason=verbatim(error))
        return cache.counts_of_batch[1]


def counts_allowed(samples: int) -> list[int]:
    """Return the numbers of micro-batches into which `samples` samples can be split.

    All micro-batches must have the same number of samples, except that the last one may have fewer.
    For example, the result is [1, 2, 3, 5] for 5 samples. The number 4 is not possible, because
    micro-batches of 2 samples make 3 micro-batches, and micro-batches of 1 sample make 5.
    """
    # If m micro-batches have n samples each, except that the last one may have fewer, (m - 1) * n
    # is less than `samples`. So m or n is at most the square root of `samples`, rounded up.
    small = range(1, math.isqrt(samples - 1) + 2) if samples else ()
    counts = {-(-samples // size) for size in small}
    return sorted(counts | {m for m in small if -(-samples // -(-samples // m)) == m})


def counts_of_batch(
    batch: Any, split: Split | None, least: int = 1
) -> tuple[list[int], str | None]:
    """Return the numbers of micro-batches into which a batch can be split.

    Args:
        batch: Batch to split.
        split: The user's function (batch, parts) that returns a list of `parts` batches. None
            splits the batch along the first dimension of its tensors.
        least: Smallest number of samples that each micro-batch must have, if there are several
            micro-batches and `split` is None.

    Returns:
        The pair (list of the numbers in ascending order, text for the user). The text states why
        the batch cannot be split, and is None if the batch can be split.
    """
    if split is None:
        try:
            samples = num_splittable_samples(batch)
        except (TypeError, ValueError) as error:
            reason = translated_error(str(error))
            return [1], text("only one micro-batch was tried: {reason}", reason=reason)
        every = counts_allowed(samples)
        return [m for m in every if m == 1 or _samples_in_last(samples, m) >= least], None
    counts = counts_by_split(batch, split)
    if len(counts) > 1:
        return counts, None
    return counts, text(
        "only one micro-batch was tried, because `split` did not return two smaller parts that"
        " both contain samples"
    )


def _samples_in_last(samples: int, micro_batches: int) -> int:
    """Return the number of samples in the last micro-batch, which may be the smallest."""
    return samples - math.ceil(samples / micro_batches) * (micro_batches - 1)


def counts_by_split(batch: Any, split: Split) -> list[int]:
    """Return the numbers of micro-batches into which the user's function `split` can split a batch.

    The numbers 1, 2, 4 and so on are tried in turn, and the result lists those that are possible.
    The trials end when `split` raises an error, returns a micro-batch without samples, or no longer
    makes the largest micro-batch smaller.

    Args:
        batch: Batch to split.
        split: Function (batch, parts) that returns a list of `parts` batches.

    Raises:
        Exception: `split` raised this error for two parts. An error for more parts only ends the
            list.
    """
    counts, largest = [1], _elements(batch)
    while True:
        count = 2 * counts[-1]
        try:
            parts = parts_of(batch, count, split)
        except Exception:
            if count == 2:
                raise
            return counts
        most = max(map(_elements, parts))
        if most >= largest or not all(has_samples(part, batch) for part in parts):
            return counts
        counts.append(count)
        largest = most


def _elements(batch: Any) -> int:
    """Return the number of elements of all tensors in a batch."""
    return sum(tensor.numel() for tensor in tensors_in(batch))
