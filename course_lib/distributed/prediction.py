"""Prediction of what a rank of N takes, without starting any: one symbolic rank, and a process
group that sends nothing."""

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
from course_lib._torch import not_collecting
from course_lib.memory import symbolic

from .formulas import REPLICATED
from .measurement import Taken, Watch
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
) -> Taken:
    """Predict what one rank's steady step takes, on a machine that has none of these ranks nor
    their memory.

    The step is that of `Trainer` itself, on symbolic tensors, by rank `rank` of a fake process
    group; the first rank's share is never smaller than another's, but for zero1. On a GPU, gathers
    that run ahead of their use add to the peak.

    Args:
        make_model: builds the plain model, in fp32.
        make_batch: this rank's batch.
        options: as for `Trainer`.

    Raises:
        RuntimeError: a process group is there already.
    """
    watch = watched_rank(make_model, make_batch, loss_sum, mode, ranks, rank=rank, **options)
    return watch.taken  # pyrefly: ignore[bad-return]  # a step was watched


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
    """The same, moment by moment; what `within` returns for the model is around its steps.

    With `places` the trace tells modules and source lines.

    In FSDP's first step each block is prepared once, which takes nothing but operators; with 2
    `steps` there are none.
    """
    ranks, rank = whole("ranks", ranks, 1), whole("rank", rank, 0, ranks - 1)
    with _fake_rank(ranks, rank), Watch(model := make_model(), places=places) as watch:
        trainer = Trainer(mode, model, loss_sum, **options)
        if isinstance(trainer.run, DistributedDataParallel):
            _without_answers(trainer.run)
        _make_state(trainer)
        batch = make_batch()
        # DDP's buckets are known for gradients from the second on
        for _ in range(2 if mode in REPLICATED else steps):
            with within(model), watch.step(trainer):
                trainer(batch)
    return watch


def _make_state(trainer: Trainer) -> None:
    """Adam's state, as every step but the first finds it.

    Likewise, DTensor has tried out by then, on tensors of the full size, each operator that
    gradients meet.
    """
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    torch._foreach_mul_([p.grad for p in parameters], 1.0)  # as `AccumulatedStep` does
    trainer.local.step()
    for p in parameters:
        p.grad = None


# ---- what stands in for the other ranks, by private doors of PyTorch: those that
# tests/test_torch_doors.py lists with all others, each over a test of what is relied on here
#
# torch.testing._internal.distributed.fake_pg: the group "fake", whose collectives return at once
# torch.nn.parallel.distributed, IN_CPP: what DDP calls when it is made, on values that are missing
# torch.nn.modules.module, HOOKS: hooks on all modules
# DistributedDataParallel.reducer, _rebuild_buckets: C++ that sorts buckets anew, by values

# of shapes, and of weights from rank 0
IN_CPP = "_verify_param_shape_across_processes", "_sync_module_states"
# Such as those of `FlopCounterMode`, which hold the graph of what a checkpoint computes again, and
# with it all that was recomputed, until they are removed.
HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks"


@contextmanager
def _fake_rank(ranks: int, rank: int) -> Iterator[None]:
    """Symbolic tensors, and a group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group exists already; call predict in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ExitStack() as stack:
            stack.enter_context(not_collecting())  # a third of the time
            for name in HOOKS:
                stack.enter_context(patch.dict(f"torch.nn.modules.module.{name}", clear=True))
            for name in IN_CPP:
                stack.enter_context(patch(f"torch.nn.parallel.distributed.{name}"))
            stack.enter_context(symbolic())
            yield
    finally:
        dist.destroy_process_group()


def _without_answers(run: DistributedDataParallel) -> None:
    """The reducer waits for what a fake all-reduce does not return, and agrees on the order of
    buckets by values."""

    def reduce(_, bucket):  # DDP reads annotations
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    run.register_comm_hook(None, reduce)
    run.reducer = _AsItIs(run.reducer)  # pyrefly: ignore[bad-assignment]


class _AsItIs:
    """A reducer whose buckets stay as they were made; they hold the same bytes in another order."""

    def __init__(self, reducer):
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
