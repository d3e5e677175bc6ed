"""Measure a rank's step: the bytes it holds, its peak, and the bytes it passes to collectives."""

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

# Time that gloo's thread needs to release the tensors of a collective.
RELEASE_SECONDS = 0.002
# DDP and FSDP2 call collectives of the first namespace, DTensor calls those of the second.
_c10d = torch.ops.c10d
_functional = torch.ops._c10d_functional
# For each collective: how many times its bytes count, and the index of the argument with the bytes.
_COUNTED = {
    _c10d.allreduce_: (2, 0),
    _c10d._allgather_base_: (1, 0),  # argument 0 is the gathered output
    _c10d._reduce_scatter_base_: (1, 1),  # argument 1 is the unreduced input
    _c10d.broadcast_: (1, 0),
    _c10d.send: (1, 0),
    _functional.all_reduce: (2, 0),
    _functional.all_gather_into_tensor: (
        1,
        0,
    ),  # argument 0 is one rank's part, see `_communicated_bytes`
    _functional.reduce_scatter_tensor: (1, 0),
}


class CommunicationCounter(ObserverMode):
    """Dispatch mode that counts the bytes which this rank communicates inside a `with` block.

    Among the tensors that the rank passes to collectives, the class counts only floating-point
    tensors with fewer than 64 bits per element. These are parameters and gradients, and with tensor
    or context parallelism also activations. The other tensors contain the loss, its weight and the
    order of DDP's buckets, in total a few bytes per step.

    - An all-reduce of n bytes counts as 2n, because it is a reduce-scatter and an all-gather.
    - An all-gather counts the bytes of its output, and a reduce-scatter those of its input.
    - A broadcast, and a send to one rank, count the bytes of their tensor.

    If N ranks form a ring, a rank really sends only (N - 1)/N of the bytes that count for an
    all-reduce, an all-gather or a reduce-scatter. A single rank sends nothing. DDP's reducer is
    written in C++ but calls the same operators, so its collectives are included.

    Attributes:
        bytes: Number of bytes counted so far.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    @classmethod
    # False, because True would add compiler guards, which slow down operators.
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.bytes += _communicated_bytes(func, args)
        return func(*args, **(kwargs or {}))


def _is_collective(func) -> bool:
    """Return whether an operator is a collective."""
    return func.namespace in ("c10d", "_c10d_functional")


def _communicated_bytes(func, args) -> int:
    """Return how many bytes `CommunicationCounter` counts for a call of an operator."""
    if (
        not _is_collective(func)
        or func.overloadpacket not in _COUNTED
        or dist.get_world_size() == 1
    ):
        return 0
    times, index = _COUNTED[func.overloadpacket]
    if func.overloadpacket is _functional.all_gather_into_tensor:
        times = args[1]  # the number of ranks whose parts are gathered
    return times * sum(
        t.nbytes for t in tensors_in(args[index]) if t.is_floating_point() and t.itemsize < 8
    )


@dataclass(frozen=True)
class RankUsage:
    """Memory, communicated bytes and FLOPs of one training step on one rank.

    Attributes:
        held: Bytes of parameters, gradients and optimizer state on this rank when the optimizer
            steps. The keys are "parameter", "gradient" and "optimizer".
        peak_bytes: Largest number of bytes that were live at once in the step.
        at_peak: Bytes at the peak, by category. The categories are those of `MemoryMeter`, and
            "gathered" for parameters that were gathered from other ranks.
        sent_bytes: Bytes communicated, as counted by `CommunicationCounter`.
        flops: FLOPs of this rank in the step, as `MemoryMeter` counts them.
    """

    held: dict[str, int]
    peak_bytes: int
    at_peak: dict[str, int]
    sent_bytes: int
    flops: int


class _Meter(UnguardedMeter):
    """A memory meter that also counts communicated bytes.

    Attributes:
        sent_bytes: Bytes communicated so far, as `CommunicationCounter` counts them.
        sending: Whether the last operator was a collective of gloo.
    """

    sent_bytes = 0
    sending = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # gloo's thread releases the tensors of a collective some time after it has reported the end
        # of the collective. The wait keeps these tensors from counting as live in the next
        # operator.
        if self.sending:
            time.sleep(RELEASE_SECONDS)
        self.sending = _is_collective(func) and dist.get_backend() == "gloo"
        self.sent_bytes += _communicated_bytes(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note_buckets(self, gradients: Iterable[Tensor]) -> None:
        """Count the storages of `gradients` in the category "gradient" from their creation on.

        DDP creates its buckets in the forward pass, and backward writes gradients into them.
        Without this method the meter would count the buckets as activations until backward writes
        into them.
        """
        with self._tracker.lock:
            for gradient in gradients:
                for storage in storages_of(gradient):
                    record = self._tracker.find(storage)
                    if record is not None:
                        record.role, record.since = "gradient", record.born


class Watch:
    """Measurement of training steps on one rank, including the memory that DDP and FSDP use.

    The measurement must begin before the model is sharded: create a `Watch` with the unsharded
    model and enter its `with` block. Inside the block create the `Trainer`, and run each step
    inside `with watch.step(trainer)`.

    Attributes:
        meter: Memory meter that counts the live bytes on this rank.
        taken: `RankUsage` with the memory, the communicated bytes and the FLOPs of the last step.
            None until the `with` block of the `Watch` ends.
        span: Slice of the meter's trace that contains the last step.

    Args:
        model: The unsharded model.
        device: Device on which bytes are counted.
        budget_bytes: Limit of live bytes, as in `MemoryMeter`. The first operator that exceeds it
            raises `MemoryBudgetExceeded`. None for no limit.
        places: Whether the trace has the module and the source line of each operator.
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
        """Context manager that measures the training step in its `with` block.

        Args:
            trainer: The `Trainer` that runs the step, or an object with the same attributes, such
                as a `TensorParallel`.
        """
        self._last, gradients = None, {}  # release the gradients of the previous step

        def keep_gradients(*_) -> None:
            gradients.update({p: p.grad for p in trainer.model.parameters() if p.grad is not None})
            if trainer.mode in REPLICATED:
                self.meter.note_buckets(gradients.values())

        hook = trainer.optimizer.register_step_pre_hook(keep_gradients)
        began, sent, flops = self.meter.points, self.meter.sent_bytes, self.meter.flops
        try:
            yield
        finally:
            hook.remove()
        self.span = slice(began, self.meter.points)
        self._last = trainer, gradients, self.meter.sent_bytes - sent, self.meter.flops - flops

    def __exit__(self, *error) -> None:
        if error[0] is not None:
            self.meter.__exit__(*error)
            return
        trainer, gradients, *totals = self._last
        # The meter below finds gradients by the attribute `grad` of parameters.
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
