"""What a rank's step takes: bytes held and at the peak, by the meter, and bytes communicated, at the collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch import tensors_in
from course_lib.memory import MemoryMeter

from .formulas import STATE
from .modes import Trainer

_c10d = torch.ops.c10d
# A collective -> how often its bytes pass, and which of its arguments holds all of them.
_COUNTED = {
    _c10d.allreduce_: (2, 0),
    _c10d._allgather_base_: (1, 0),  # its output
    _c10d._reduce_scatter_base_: (1, 1),  # its input
    _c10d.broadcast_: (1, 0),
}


class Communicated(TorchDispatchMode):
    """Count the bytes of parameters and gradients that this rank's collectives are called with, inside the block.

    An all-reduce of n bytes counts 2n (it is a reduce-scatter and an all-gather), an all-gather by what it makes, a
    reduce-scatter by what it takes, a broadcast n; on the wire of a ring it is (N - 1)/N of that. Among them are those
    of DDP's reducer, which is C++: it calls the same operators. Numbers in float64 and whole numbers do not count: the
    loss, its weight and the order of DDP's buckets, some bytes a step. With one rank nothing is sent.

    Attributes:
        bytes: so far.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func.overloadpacket in _COUNTED and dist.get_world_size() > 1:
            times, which = _COUNTED[func.overloadpacket]
            counted = [t.nbytes for t in tensors_in(args[which]) if t.is_floating_point() and t.itemsize < 8]
            self.bytes += times * sum(counted)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Taken:
    """What a step took on one rank, in bytes.

    Attributes:
        held: parameter, gradient and optimizer, when the optimizer steps.
        peak_bytes: the most that was live at once in the step.
        at_peak: category -> bytes, those of the meter, and "gathered": parameters beyond this rank's own.
        sent_bytes: communicated, as `Communicated` counts.
    """

    held: dict[str, int]
    peak_bytes: int
    at_peak: dict[str, int]
    sent_bytes: int


class Watch:
    """One meter from before a model is sharded, since what DDP and FSDP keep of their own must be seen being made.

    Enter it with the plain model, make the `Trainer`, take steps within `step`, and leave it; `taken` is of the last.
    """

    def __init__(self, model: nn.Module, device: torch.device | str = "cpu"):
        self._meter = MemoryMeter(model, device=device)
        self.taken: Taken | None = None

    def __enter__(self) -> Watch:
        self._meter.__enter__()
        return self

    @contextmanager
    def step(self, trainer: Trainer) -> Iterator[None]:
        self._last, gradients = None, {}  # those of the step before must be gone

        def keep(*_) -> None:
            gradients.update({p: p.grad for p in trainer.model.parameters() if p.grad is not None})

        hook = trainer.optimizer.register_step_pre_hook(keep)
        began = len(self._meter.phases())
        with Communicated() as sent:
            yield
        hook.remove()
        self._last = trainer, gradients, began, len(self._meter.phases()), sent

    def __exit__(self, *error) -> None:
        if error[0] is not None:
            self._meter.__exit__(*error)
            return
        trainer, gradients, began, ended, sent = self._last
        for p, gradient in gradients.items():  # the meter finds them there
            p.grad = gradient
        with MemoryMeter(trainer.model, trainer.local, device=self._meter.device) as now:
            pass
        self._meter.__exit__(None, None, None)
        for p in gradients:
            p.grad = None
        held = {name: now.at_peak()[name] for name in STATE}
        series = {name: values[began:ended] for name, values in self._meter.series().items()}
        live = sum(series.values())
        at_peak = {name: int(values[live.argmax()]) for name, values in series.items()}
        own = min(held["parameter"], at_peak["parameter"])
        at_peak |= {"parameter": own, "gathered": at_peak["parameter"] - own}
        self.taken = Taken(held, int(live.max()), at_peak, sent.bytes)
