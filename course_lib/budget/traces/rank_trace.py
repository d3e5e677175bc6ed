"""Trace the training step of one of several ranks (processes), with its share of the batch.

No process is started: the step of `course_lib.distributed.Trainer` runs on symbolic tensors, which
need no memory. If the model has equal blocks and the memory of its step grows evenly with the
number of blocks, only a few blocks are run.

PyTorch has no implementation of ZeRO-2. Therefore "zero2" is FSDP2 that keeps the gathered
parameters after forward, until backward has used them. Each rank then holds its own shard of the
parameters in addition to the gathered parameters.

The optimizer updates all parameters with one fused operator, which needs no temporaries. With
precision="bf16", "ddp" and "zero1" keep bf16 parameters and fp32 master weights, whereas "zero2"
and "zero3" keep fp32 shards. These shards are gathered in bf16, and the step computes in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from course_lib._batches import Split, num_splittable_samples, parts_of
from course_lib._batches import split as cut
from course_lib._check import any_of, describe
from course_lib._hugging_face_losses import GIVE_LOSS_SUM
from course_lib._torch.tensors import tensors_in
from course_lib.budget.loss import LossSum, check_loss, has_loss_sum, loss_of
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import apply_techniques, check_model, default_dtype, model_of
from course_lib.budget.techniques.micro_batches import counts_by_split
from course_lib.distributed.formulas import REPLICATED, STEP_BYTES, Shapes, shapes_of, zero1_parts
from course_lib.memory import CATEGORIES, Trace
from course_lib.symbolic import symbolic
from course_lib.symbolic.quantization import quantization_state

from .equal_blocks import Growth, IrregularSteps, equal_blocks

# Maps each value of `shard` to the engine of `course_lib.distributed` that implements it. "zero1"
# runs forward and backward as "ddp" does.
MODES = {"ddp": "ddp", "zero1": "ddp", "zero2": "fsdp-keep", "zero3": "fsdp"}
# Number of blocks in the shorter of the two runs from which a step is extrapolated. It is larger
# than 3, because up to three blocks need memory at once: one is used, the parameters of another one
# are gathered, and the gradients of a third one are reduced and released.
FEW = 4
# Smallest number of blocks for which the step is extrapolated.
MANY = 2 * FEW + 2
# Largest number of micro-batches that are run. More are not needed, because all later micro-batches
# start with as many live bytes as the second one.
MOST_MICRO_BATCHES_RUN = 2


def rank_trace(
    make_model: Callable,
    make_batch: Callable,
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    events: bool = False,
) -> Trace:
    """Return the trace of a training step on the rank that needs the most memory.

    The recipe must have several ranks (processes). The step runs on symbolic tensors, so no process
    is started.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm, split: Model, batch and options, as in
            `course_lib.budget.estimate`.
        events: Whether to record when each storage is allocated and released. If so, all blocks of
            the model are run. Otherwise, if the model has many equal blocks, only a few of them are
            run.

    Raises:
        ValueError: Recipe, model and batch cannot be combined, or the batch cannot be split evenly
            among the ranks.
    """
    if recipe.shard is None:
        raise ValueError(f"shard must be {any_of(MODES)} when ranks is {recipe.ranks}, got None")
    with _explain_sharded_parameters(recipe):
        with symbolic():
            model = model_of(make_model, one_rank_recipe(recipe))
            check_model(model, one_rank_recipe(recipe))
            _check_on_ranks(model, recipe, loss_sum)
            shapes = shapes_of(model, recipe.blocks)
            count = len(equal_blocks(model))
            if split is None:
                # Raises if the batch cannot be split evenly among the ranks, or a rank's samples
                # among the micro-batches.
                micro_batch_counts_for(recipe, make_batch())
        given = make_model, make_batch, recipe, loss_sum, max_norm, events
        measured = partial(_measure, *given, split=split)
        trace = None
        if count >= MANY and not events:
            with suppress(IrregularSteps):
                trace = Growth(measured(FEW, 2), measured(FEW + 1, 2)).trace(count - FEW)
        trace = measured(count) if trace is None else trace
        return _with_state(trace, shapes, recipe, _micro_batches_run(recipe, split))


def _check_on_ranks(model: nn.Module, recipe: Recipe, loss_sum: LossSum | None) -> None:
    """Raise TypeError or ValueError if the model or the loss cannot be used on several ranks."""
    if any(True for _ in quantization_state(model)):
        raise ValueError(
            "ranks must be 1 for a model with quantized weights of bitsandbytes, got"
            f" {recipe.ranks}. For several ranks, run a real step instead of an estimate, and"
            " measure one rank with course_lib.memory.MemoryMeter"
        )
    check_loss(model, one_rank_recipe(recipe), loss_sum)
    if loss_sum is None and not has_loss_sum(model):
        raise ValueError(
            f"ranks must be 1 for {describe(model)}, got {recipe.ranks}: its loss is a mean,"
            " and the number of tokens or samples in that mean is not known. To use several"
            f" ranks, {GIVE_LOSS_SUM}"
        )


def _measure(
    make_model,
    make_batch,
    recipe: Recipe,
    loss_sum,
    max_norm,
    events: bool,
    count: int,
    steps: int = 1,
    split: Split | None = None,
) -> Trace:
    """Run the step of one rank with some of the equal blocks, and return its trace.

    Args:
        make_model, make_batch, recipe, loss_sum, max_norm, events, split: Arguments of the same
            names of the function `rank_trace`.
        count: Number of equal blocks to run.
        steps: Number of steps to run with FSDP. The last step is traced. The first step prepares
            each block once, which adds operators to its trace.
    """
    alone = one_rank_recipe(recipe)

    def make_short() -> nn.Module:
        model = model_of(make_model, alone)
        del equal_blocks(model)[count:]
        return model

    def make_part() -> Any:
        with default_dtype(alone.dtype):
            batch = make_batch()
        share = largest_share(batch, recipe.ranks, split)
        if split is not None:
            return share
        size = len(next(tensors_in(share))) // recipe.micro_batches
        return next(cut(share, size * shown))

    shown = _micro_batches_run(recipe, split)
    sync = "last" if recipe.shard in REPLICATED else "each"
    options = {
        "micro_batches": shown,
        "split": split,
        "sync": sync,
        "blocks": recipe.blocks,
    }
    options["max_norm"] = max_norm
    from course_lib.distributed.prediction import watched_rank  # slow to import

    watch = watched_rank(
        make_short,
        make_part,
        lambda model, micro_batch: loss_of(model, micro_batch, alone, loss_sum),
        MODES[recipe.shard],
        recipe.ranks,
        within=lambda model: apply_techniques(model, alone),
        steps=steps,
        places=events,
        bf16=recipe.precision == "bf16" and recipe.shard not in REPLICATED,
        **options,
    )
    trace = watch.meter.trace(events=events)[watch.span]
    trace.flops, trace.sent_bytes = watch.taken.flops, watch.taken.sent_bytes
    return trace


def _micro_batches_run(recipe: Recipe, split: Split | None) -> int:
    """Return the number of a rank's micro-batches that are run for the trace.

    If the user's function `split` makes the micro-batches, all of them are run, because they may
    differ. Otherwise at most `MOST_MICRO_BATCHES_RUN` are run.
    """
    return (
        recipe.micro_batches
        if split is not None
        else min(recipe.micro_batches, MOST_MICRO_BATCHES_RUN)
    )


def largest_share(batch: Any, ranks: int, split: Split | None) -> Any:
    """Split the batch among the ranks, and return the share with the most bytes of tensors.

    Args:
        batch: Batch of all ranks.
        ranks: Number of ranks (processes).
        split: The user's function (batch, parts) that returns a list of `parts` batches. None
            splits the batch along the first dimension of its tensors.
    """
    shares = parts_of(batch, ranks, split)
    return max(shares, key=lambda share: sum(tensor.nbytes for tensor in tensors_in(share)))


def _with_state(trace: Trace, shapes: Shapes, recipe: Recipe, shown: int) -> Trace:
    """Return the trace of all micro-batches, with the largest optimizer state of any rank.

    Args:
        trace: Trace of `shown` micro-batches, with the optimizer state of the first rank.
        shapes: Shapes of the model's parameters.
        recipe: Memory-saving techniques of the step, with `ranks` above 1.
        shown: Number of micro-batches in the trace.
    """
    live = trace.live.copy()
    if trace.spans is None:
        live[:, CATEGORIES.index("optimizer")] = state_bytes(shapes, recipe)
    repeats = recipe.micro_batches / shown
    sent = int(trace.sent_bytes * (1 if recipe.shard in REPLICATED else repeats))
    if recipe.shard == "zero1":
        # Each rank broadcasts the parameters that it has updated.
        sent += shapes.updated_bytes
    flops = int(trace.flops * repeats)
    return Trace(
        trace.operators,
        live,
        flops_at=trace.flops_at,
        flops=flops,
        modules=trace.modules,
        lines=trace.lines,
        spans=trace.spans,
        sent_bytes=sent,
    )


@contextmanager
def _explain_sharded_parameters(recipe: Recipe) -> Iterator[None]:
    """Replace the RuntimeError of a loss that uses sharded parameters by a clear ValueError."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise ValueError(
            "shard must be 'ddp' or 'zero1' for a loss that uses parameters outside of model(...),"
            f" got {recipe.shard!r}. Sharded parameters are gathered only while model(...) runs, so"
            " let the loss use parameters only through model(...)"
        ) from error


def one_rank_recipe(recipe: Recipe) -> Recipe:
    """Return a copy of a recipe for the step of a single rank, with one micro-batch.

    If FSDP2 shards the parameters (shard="zero2" or "zero3"), the precision of the new recipe is
    "fp32", because FSDP2 keeps fp32 shards even if it computes in bf16.
    """
    sharded = recipe.shard not in REPLICATED
    return replace(
        recipe, ranks=1, shard=None, micro_batches=1, **({"precision": "fp32"} if sharded else {})
    )


def state_bytes(shapes: Shapes, recipe: Recipe) -> int:
    """Return the bytes of Adam's state on the rank that has the most state.

    If the parameters are in bf16, their fp32 master weights are included.

    Args:
        shapes: Shapes of the model's parameters, as `course_lib.distributed.shapes_of` returns
            them.
        recipe: Memory-saving techniques of the step, with `ranks` above 1.
    """
    each = 12 if recipe.precision == "bf16" and recipe.shard in REPLICATED else 8
    if recipe.shard == "zero1":
        parts = zero1_parts(shapes.trained, recipe.ranks)
        return max(sum(each * weight.numbers + STEP_BYTES for weight in part) for part in parts)
    ranks = 1 if recipe.shard == "ddp" else recipe.ranks
    return sum(each * weight.share(ranks) + STEP_BYTES for weight in shapes.trained)


def floor_bytes(shapes: Shapes, recipe: Recipe) -> int:
    """Return a lower bound on the peak memory of the rank that needs the most memory, in bytes.

    The bound is the sum of parameters, gradients and optimizer state. All of these are live during
    the optimizer step.

    Args:
        shapes: Shapes of the model's parameters, as `course_lib.distributed.shapes_of` returns
            them.
        recipe: Memory-saving techniques of the step, with `ranks` above 1.
    """
    ranks = 1 if recipe.shard in REPLICATED else recipe.ranks
    size = 2 if recipe.precision == "bf16" and recipe.shard in REPLICATED else 4
    return sum((1 + w.trained) * size * w.share(ranks) for w in shapes.all) + state_bytes(
        shapes, recipe
    )


def micro_batch_counts_for(recipe: Recipe, batch: Any, split: Split | None = None) -> list[int]:
    """Return all possible numbers of micro-batches per rank, in rising order.

    Each rank splits its share of the batch into micro-batches. Without `split`, the possible
    numbers are those that divide the number of samples per rank. For example, a batch of 12 samples
    on 2 ranks has 6 samples per rank, and the result is [1, 2, 3, 6]. With `split`, the numbers 1,
    2, 4 and so on are tried (see `counts_by_split`).

    Args:
        recipe: Recipe with several ranks. Without `split`, its field `micro_batches` must be one of
            the possible numbers. With `split`, this field is ignored.
        batch: Batch of all ranks.
        split: The user's function (batch, parts) that returns a list of `parts` batches. None
            splits the batch along the first dimension of its tensors.

    Raises:
        TypeError: The batch cannot be split, for example because it contains no tensor.
        ValueError: The batch cannot be split, its number of samples is not a multiple of the number
            of ranks, or `recipe.micro_batches` is not one of the possible numbers.
        Exception: The function `split` raised this error in one of two calls: when it split the
            batch into one part per rank, or when it split a rank's share into two micro-batches.
    """
    if split is not None:
        return counts_by_split(largest_share(batch, recipe.ranks, split), split)
    samples = num_splittable_samples(batch)
    if samples % recipe.ranks:
        divisors = ", ".join(str(n) for n in range(1, samples + 1) if samples % n == 0)
        raise ValueError(
            f"ranks must be a divisor of the batch's {samples} samples ({divisors}), got"
            f" {recipe.ranks}"
        )
    each = samples // recipe.ranks
    allowed = [m for m in range(1, each + 1) if each % m == 0]
    if recipe.micro_batches not in allowed:
        raise ValueError(
            f"micro_batches must be a divisor of a rank's {each} samples"
            f" ({', '.join(map(str, allowed))}), got {recipe.micro_batches}"
        )
    return allowed
