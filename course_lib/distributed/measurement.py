"""Measure a rank's step: bytes held, bytes at the peak, and bytes given to collectives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib._torch.modes import ObserverMode
from course_lib._torch.tensors import tensors_in
from course_lib.memory import MemoryMeter
from course_lib.memory.meter import UnguardedMeter
from course_lib.memory.storages import storages_of

from .formulas import REPLICATED, STATE
from .modes import Trainer

RELEASE_SECONDS = 0.002  # time for gloo's thread to release the tensors of a collective
# DDP and FSDP2 call collectives of the first namespace, DTensor calls those of the second
_c10d = torch.ops.c10d
_functional = torch.ops._c10d_functional
# collective -> (number of times that its bytes are sent, index of the argument that holds them)
_COUNTED = {
    _c10d.allreduce_: (2, 0),
    _c10d._allgather_base_: (1, 0),  # argument 0 is the gathered output
    _c10d._reduce_scatter_base_: (1, 1),  # argument 1 is the unreduced input
    _c10d.broadcast_: (1, 0),
    _functional.all_reduce: (2, 0),
    _functional.all_gather_into_tensor: (1, 0),  # argument 0 is one rank's part, see `_sent_by`
    _functional.reduce_scatter_tensor: (1, 0),
}


class CommunicationCounter(ObserverMode):
    """Count the bytes of floating-point tensors that this rank gives to collectives in the block.

    These are parameters and gradients, and with tensor parallelism also activations.

    An all-reduce of n bytes counts as 2n, because it is a reduce-scatter and an all-gather. An
    all-gather counts the bytes of its output, a reduce-scatter those of its input, and a broadcast
    those of its tensor. With a ring of N ranks, a rank sends (N - 1)/N of the count of the first
    three. DDP's reducer is written in C++ but calls the same operators, so its collectives are
    included. Integer and float64 tensors are not counted. They hold the loss, its weight and the
    order of DDP's buckets, a few bytes per step. A single rank sends nothing.

    Attributes:
        bytes: Bytes so far.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    @classmethod
    # False, so that no compiler guards are added, which would slow down operators
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.bytes += _sent_by(func, args)
        return func(*args, **(kwargs or {}))


def _is_collective(func) -> bool:
    return func.namespace in ("c10d", "_c10d_functional")


def _sent_by(func, args) -> int:
    if (
        not _is_collective(func)
        or func.overloadpacket not in _COUNTED
        or dist.get_world_size() == 1
    ):
        return 0
    times, index = _COUNTED[func.overloadpacket]
    if func.overloadpacket is _functional.all_gather_into_tensor:
        times = args[1]  # the number of ranks that are gathered
    return times * sum(
        t.nbytes for t in tensors_in(args[index]) if t.is_floating_point() and t.itemsize < 8
    )


@dataclass(frozen=True)
class RankUsage:
    """Bytes and FLOPs that a step needed on one rank.

    Attributes:
        held: Bytes of parameters, gradients and optimizer state, when the optimizer steps.
        peak_bytes: The most bytes that were live at once in the step.
        at_peak: Category -> bytes at the peak. The categories are those of the meter, and
            "gathered": parameters beyond this rank's own.
        sent_bytes: Bytes communicated, as counted by `CommunicationCounter`.
        flops: FLOPs of this rank, by the formulas of `FlopCounterMode`.
    """

    held: dict[str, int]
    peak_bytes: int
    at_peak: dict[str, int]
    sent_bytes: int
    flops: int


class _Meter(UnguardedMeter):
    """A meter that also counts communicated bytes."""

    sent_bytes = 0
    sending = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # gloo's thread drops the tensors of a collective some time after it has reported the end
        if self.sending:
            time.sleep(RELEASE_SECONDS)
        self.sending = _is_collective(func) and dist.get_backend() == "gloo"
        self.sent_bytes += _sent_by(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note_buckets(self, gradients: Iterable[Tensor]) -> None:
        """Count the storages of these gradients as gradients from their creation on.

        DDP creates its buckets in the forward pass, and backward writes into them. Without this
        method the meter would count them as activations until then.
        """
        with self._ledger.lock:
            for gradient in gradients:
                for storage in storages_of(gradient):
                    record = self._ledger.find(storage)
                    if record is not None:
                        record.role, record.since = "gradient", record.born


class Watch:
    """A meter that starts before a model is sharded, so that it counts what DDP and FSDP allocate.

    Create it with the unsharded model and enter it, create the `Trainer`, do steps within `step`,
    and leave it.

    Attributes:
        meter: The meter.
        taken: Bytes and FLOPs of the last step; None until the block is left.
        span: The last step, as a range of the meter's trace.

    Args:
        model: The unsharded model.
        device: Device on which bytes are counted.
        budget_bytes: Limit of live bytes. An operator that would exceed it raises
            `MemoryBudgetExceeded` and does not run.
        places: Whether the trace includes modules and source lines.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str = "cpu",
        *,
        budget_bytes: int | None = None,
        places: bool = False,
    ):
        kept = {"module_paths": places, "source_lines": places}
        self.meter = _Meter(model, device=device, budget_bytes=budget_bytes, **kept)
        self.span = slice(0)
        self.taken: RankUsage | None = None

    def __enter__(self) -> Watch:
        self.meter.__enter__()
        return self

    @contextmanager
    def step(self, trainer: Trainer) -> Iterator[None]:
        """Measure one step of the trainer inside the block."""
        self._last, gradients = None, {}  # the previous step's gradients must be freed

        def keep_gradients(*_) -> None:
            gradients.update({p: p.grad for p in trainer.model.parameters() if p.grad is not None})
            if trainer.mode in REPLICATED:
                self.meter.note_buckets(gradients.values())

        hook = trainer.optimizer.register_step_pre_hook(keep_gradients)
        began, sent, flops = self.meter.moments, self.meter.sent_bytes, self.meter.flops
        try:
            yield
        finally:
            hook.remove()
        self.span = slice(began, self.meter.moments)
        self._last = trainer, gradients, self.meter.sent_bytes - sent, self.meter.flops - flops

    def __exit__(self, *error) -> None:
        if error[0] is not None:
            self.meter.__exit__(*error)
            return
        trainer, gradients, *totals = self._last
        # the meter below finds gradients by the attribute `grad` of parameters
        for p, gradient in gradients.items():
            p.grad = gradient
        with MemoryMeter(trainer.model, trainer.local, device=self.meter.device) as held_meter:
            pass
        self.meter.__exit__(None, None, None)
        for p in gradients:
            p.grad = None
        held = {name: held_meter.at_peak()[name] for name in STATE}
        step = self.meter.trace(events=False)[self.span]
        at_peak = step.at_peak()
        own = min(held["parameter"], at_peak["parameter"])
        at_peak |= {"parameter": own, "gathered": at_peak["parameter"] - own}
        self.taken = RankUsage(held, step.peak_bytes, at_peak, *totals)
