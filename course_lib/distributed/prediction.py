"""Predict what one of N ranks needs, with one symbolic rank in a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib._check import whole
from course_lib._torch.modes import disable_current_modes
from course_lib._torch.steps import not_collecting
from course_lib.symbolic import symbolic

from .formulas import REPLICATED
from .measurement import RankUsage, Watch
from .modes import LossSum, Trainer


def predict(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss_sum: LossSum,
    mode: str,
    ranks: int,
    *,
    rank: int = 0,
    **options: Any,
) -> RankUsage:
    """Predict what one rank's steady step needs, on a machine without these ranks and their memory.

    The step is that of `Trainer`, on symbolic tensors, run by rank `rank` of a fake process group.
    The first rank's share is never smaller than another's, except with zero1. On a GPU, gathers
    that run ahead of their use add to the peak.

    Args:
        make_model: Function that builds the unsharded model, in fp32.
        make_batch: Function that returns this rank's batch.
        options: Options of `Trainer`.

    Raises:
        RuntimeError: A process group already exists.
    """
    watch = watched_rank(make_model, make_batch, loss_sum, mode, ranks, rank=rank, **options)
    return watch.taken  # pyrefly: ignore[bad-return]  # not None, since a step was run


def watched_rank(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss_sum: LossSum,
    mode: str,
    ranks: int,
    *,
    rank: int = 0,
    within: Callable[[nn.Module], AbstractContextManager] = nullcontext,
    steps: int = 1,
    places: bool = False,
    **options: Any,
) -> Watch:
    """Run the steps of `predict`, and return the `Watch` with their trace.

    Args:
        within: Function of the model that returns a context for its steps.
        steps: Number of steps with FSDP. In its first step each block is prepared once, which adds
            operators but no bytes; with 2 steps, the last one has none of these.
        places: Whether the trace includes modules and source lines.
    """
    ranks, rank = whole("ranks", ranks, 1), whole("rank", rank, 0, ranks - 1)
    with fake_rank(ranks, rank), Watch(model := make_model(), places=places) as watch:
        trainer = Trainer(mode, model, loss_sum, **options)
        if isinstance(trainer.run, DistributedDataParallel):
            _fake_reductions(trainer.run)
        _make_state(trainer)
        batch = make_batch()
        # the meter recognizes DDP's buckets as gradients from the second step on
        for _ in range(2 if mode in REPLICATED else steps):
            with within(model), watch.step(trainer):
                trainer(batch)
    return watch


def _make_state(trainer: Trainer) -> None:
    """Create Adam's state, which exists in every step but the first."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    trainer.local.step()
    for p in parameters:
        p.grad = None


# ---- replacements for the other ranks
#
# The code below uses these private parts of PyTorch. For each of them, tests/test_torch_doors.py or
# tests/test_distributed.py tests the behavior that this module relies on:
#
# torch.testing._internal.distributed.fake_pg: the group "fake", whose collectives return at once
# torch.nn.parallel.distributed, IN_CPP: functions that DDP calls when it is created, which need
#     values
# torch.nn.modules.module, HOOKS: hooks on all modules
# torch.distributed.tensor._sharding_prop.ShardingPropagator, SHAPES: shapes of DTensor's results
# torch.distributed._tools.fake_collectives: kernels of collectives for symbolic tensors, which
#     torch itself has from 2.11 on
# DistributedDataParallel.reducer, _rebuild_buckets: C++ that reorders buckets, by values

# DDP calls these functions to compare shapes between ranks, and to copy weights from rank 0.
IN_CPP = "_verify_param_shape_across_processes", "_sync_module_states"
# Hooks such as those of `FlopCounterMode` hold the graph of a recomputation, and with it all
# recomputed tensors, until they are removed.
HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks"
# DTensor finds the shape of a result by running the operator on tensors of the full size, which
# take no memory on a real rank. Up to torch 2.11 it does so in every step that is symbolic.
SHAPES = "_propagate_tensor_meta_non_cached"


@contextmanager
def fake_rank(ranks: int, rank: int) -> Iterator[None]:
    """Use symbolic tensors, and a process group that sends nothing, inside the block."""
    from course_lib._torch.dtensor import ShardingPropagator
    from course_lib._torch.fake_group import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "predict needs a process without a process group, but one exists already"
        )
    propagate = getattr(ShardingPropagator, SHAPES)

    def propagate_unmeasured(*args):
        with disable_current_modes():
            return propagate(*args)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ExitStack() as stack:
            stack.enter_context(not_collecting())
            for name in HOOKS:
                stack.enter_context(patch.dict(f"torch.nn.modules.module.{name}", clear=True))
            for name in IN_CPP:
                stack.enter_context(patch(f"torch.nn.parallel.distributed.{name}"))
            stack.enter_context(patch.object(ShardingPropagator, SHAPES, propagate_unmeasured))
            stack.enter_context(symbolic())
            yield
    finally:
        dist.destroy_process_group()


def _fake_reductions(run: DistributedDataParallel) -> None:
    """Replace the parts of DDP's reducer that need data from other ranks.

    Without these replacements the reducer would wait for the result of a fake all-reduce. It would
    also agree with the other ranks on an order of buckets by sending values, which symbolic tensors
    do not have.
    """

    # It has no annotations, because DDP compares them with classes, and here they are strings.
    def reduce(_, bucket):
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    run.register_comm_hook(None, reduce)
    run.reducer = _FixedBuckets(run.reducer)  # pyrefly: ignore[bad-assignment]


class _FixedBuckets:
    """A reducer that never rebuilds its buckets; rebuilding would not change their total bytes."""

    def __init__(self, reducer):
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
