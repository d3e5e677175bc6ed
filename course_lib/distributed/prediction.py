"""Predict memory, communication and FLOPs of one of N ranks by running it on symbolic tensors.

The tensors have shapes but no values. The rank runs in a fake process group, whose collectives send
nothing, so no other process is started.
"""

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
    """Predict the memory, communicated bytes and FLOPs of one rank's training step.

    Adam's state exists when the predicted step begins, as in every step except the first. The step
    runs on symbolic tensors, which have shapes but no values, in a fake process group. No other
    process is started. On real GPUs the peak is higher in the modes with FSDP, because FSDP2
    gathers the parameters of a block before they are needed.

    Args:
        make_model: Function that builds the unsharded model, in fp32.
        make_batch: Function that returns this rank's batch.
        loss_sum: Function (model, micro-batch) -> (sum of losses, weight). The weight is the
            number by which the sum is divided, such as the number of tokens.
        mode: A mode of `Trainer`, such as "ddp" or "fsdp" (see `MODES`).
        ranks: Number of ranks.
        rank: The rank that is predicted. Rank 0 has the largest share of the model in all modes
            except zero1.
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
    """Run training steps of one rank on symbolic tensors, and return the `Watch` of these steps.

    The `Watch` has two results: a `RankUsage` with the memory, the communicated bytes and the FLOPs
    of the last step, and the trace of all steps. `predict` returns only the `RankUsage`.

    Args:
        make_model, make_batch, loss_sum, mode, ranks, rank, options: The arguments of `predict`.
        within: Function that receives the model and returns a context manager, inside which the
            steps run.
        steps: Number of steps in modes with FSDP; other modes always run 2. In the first step, FSDP
            runs additional operators that prepare each block and add no bytes. With 2 steps, the
            last step does not have these operators.
        places: Whether the trace has the module and the source line of each operator.
    """
    ranks, rank = whole("ranks", ranks, 1), whole("rank", rank, 0, ranks - 1)
    with fake_rank(ranks, rank), Watch(model := make_model(), places=places) as watch:
        trainer = Trainer(mode, model, loss_sum, **options)
        if isinstance(trainer.run, DistributedDataParallel):
            _fake_reductions(trainer.run)
        _create_optimizer_state(trainer)
        batch = make_batch()
        # The meter recognizes DDP's buckets as gradients only from the second step on.
        for _ in range(2 if mode in REPLICATED else steps):
            with within(model), watch.step(trainer):
                trainer(batch)
    return watch


def _create_optimizer_state(trainer: Trainer) -> None:
    """Create Adam's state, which exists in every step except the first."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    trainer.local.step()
    for p in parameters:
        p.grad = None


# ---- replacements for the other ranks
#
# The code below uses these private parts of PyTorch. For each of them, test_private_torch_names.py
# or test_distributed.py tests the behavior that this module relies on:
#
# torch.testing._internal.distributed.fake_pg: the group "fake", whose collectives return at once
# torch.nn.parallel.distributed, DDP_FUNCTIONS: functions that need the values of tensors, and that
#     DDP calls when it is created
# torch.nn.modules.module, GLOBAL_HOOKS: hooks on all modules
# torch.distributed.tensor._sharding_prop.ShardingPropagator, SHAPE_FUNCTION: the method that finds
#     the shapes of DTensor's results
# torch.distributed._tools.fake_collectives: kernels with which collectives run on symbolic tensors
#     (torch itself has these kernels from version 2.11 on)
# DistributedDataParallel.reducer, _rebuild_buckets: the C++ code that reorders buckets (it needs
#     the values of tensors)

# DDP calls these functions to compare shapes between ranks, and to copy weights from rank 0.
DDP_FUNCTIONS = "_verify_param_shape_across_processes", "_sync_module_states"
# Hooks such as those of `FlopCounterMode` keep the graph of a recomputation, and with it all
# recomputed tensors, alive until the hooks are removed.
GLOBAL_HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks"
# DTensor finds the shape of a result by running the operator on fake tensors of the full size.
# These tensors need no memory on a real rank, so they must not be measured. Up to torch 2.11,
# DTensor runs the operator in this way in every symbolic step.
SHAPE_FUNCTION = "_propagate_tensor_meta_non_cached"


@contextmanager
def fake_rank(ranks: int, rank: int) -> Iterator[None]:
    """Inside a `with` block, use symbolic tensors and a process group that sends nothing.

    The code in the `with` block runs as on one of several ranks, but in a single process.

    Args:
        ranks: Number of ranks in the fake group.
        rank: The rank of this process.

    Raises:
        RuntimeError: A process group already exists.
    """
    from course_lib._torch.dtensor import ShardingPropagator
    from course_lib._torch.fake_group import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "predict must be called in a process without a process group of torch.distributed, but"
            " this process already has one. Call it before init_process_group, or in another"
            " process"
        )
    propagate = getattr(ShardingPropagator, SHAPE_FUNCTION)

    def propagate_unmeasured(*args):
        with disable_current_modes():
            return propagate(*args)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ExitStack() as stack:
            stack.enter_context(not_collecting())
            for name in GLOBAL_HOOKS:
                stack.enter_context(patch.dict(f"torch.nn.modules.module.{name}", clear=True))
            for name in DDP_FUNCTIONS:
                stack.enter_context(patch(f"torch.nn.parallel.distributed.{name}"))
            stack.enter_context(
                patch.object(ShardingPropagator, SHAPE_FUNCTION, propagate_unmeasured)
            )
            stack.enter_context(symbolic())
            yield
    finally:
        dist.destroy_process_group()


def _fake_reductions(run: DistributedDataParallel) -> None:
    """Replace the parts of DDP's reducer that need data from other ranks.

    Without the replacements, the reducer would wait for the result of an all-reduce that the fake
    group does not send. It would also agree with the other ranks on an order of buckets by sending
    values, which symbolic tensors do not have.
    """

    # The function has no annotations, because DDP compares them with classes, and in this file they
    # are strings.
    def reduce(_, bucket):
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    run.register_comm_hook(None, reduce)
    run.reducer = _FixedBuckets(run.reducer)  # pyrefly: ignore[bad-assignment]


class _FixedBuckets:
    """Reducer of DDP that never rebuilds its buckets. A rebuild would not change their bytes."""

    def __init__(self, reducer):
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
