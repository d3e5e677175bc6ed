"""A device of which the order is checked, on any machine: it finds copies that nothing
orders, and tells when each stream is busy.

    with SimulatedDevice() as device:
        model, x = device.move(model), device.move(x)
        with offload_activations():
            loss = model(x).sum()
        loss.backward()
    # leaving the block raises a Race that names all that was found

Its memory is CPU memory of which freed blocks are handed out again, the latest first. Its streams
do in order what they are given, and who may be ahead of whom is known from vector clocks: each
actor, a stream or a thread of the host, knows how far it has seen the others get, by the events
that it waited for. An access to memory is a race if the last write there (for a write, the last
reads too) is not among what its actor has seen, whoever owned the memory then.

Source: Fidge 1988 and Mattern 1989 for the clocks; PyTorch's CUDA sanitizer looks at device memory
in the same way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import any_of, positive, whole
from course_lib._torch import map_tensors
from course_lib.offload import Device

from .lanes import draw_bytes, draw_lanes
from .operators import HostReads, Operators
from .race_detector import COPY, AccessLog, Actor, Arena, Event

RATES = (
    "flops_per_second",
    "bytes_per_second",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "host_flops_per_second",
    "host_bytes_per_second",
)


class Race(RuntimeError):
    """Accesses to the same memory that nothing orders."""


class _Streams(Device):
    """Streams in the access log: each thread is on one of its own choice."""

    def __init__(self, log: AccessLog):
        super().__init__(torch.device("cpu"))
        self.log = log
        self._sides: dict[str, Actor] = {}
        self._local = threading.local()
        self._compute = self.side("compute")

    def current(self) -> Actor:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Actor) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def side(self, name: str) -> Actor:
        if name not in self._sides:
            self._sides[name] = self.log.actor(name)
        return self._sides[name]

    def event(self) -> Event:
        return self.current().event()

    def wait(self, event: Event) -> None:
        self.current().follow(event)

    def finish(self, event: Event) -> None:
        with self.log.lock:
            self.log.host.follow(event)
            self.log.host.run()

    def done_by(self, actor: Actor) -> None:
        """Do what an actor was given so far, and next what the host, which has got as far as it
        has, gives it now."""
        actor.follow(self.log.host.event())
        actor.run()


class SimulatedDevice(_Streams):
    """A `Device` of which operators run on the CPU, and of which the order is checked. A context
    manager.

    Inside the block `Device.of` knows its tensors: those that `move` and `up` return, what
    operators make of them, and new tensors made from nothing (`torch.zeros(3)`). Of the host are
    tensors made before, `pinned` ones, and what operators make of those. Single numbers go with
    either, as on CUDA. All of them say that their device is the CPU, so `.cpu()` and `.to(device)`
    copy nothing: code that is to be tested copies by the methods of `Device`.

    Where all is ordered every number is right to the bit. Where something is not, that is reported,
    and the numbers are right by luck. Two modes run the same program in another order that its
    waits allow, so that they are wrong too:

    - `late`: copies run as late as they may. Wrong is what uses a copy, or takes its source's
      memory, too soon.
    - `early`: operators, copies and what the host reads see their tensors before the last write
      that they do not wait for. Wrong is what uses anything, of an operator or of a copy, before it
      is made.

    Limits:

    - In neither mode does an operator run late: where others write over what it still reads, that
      is reported alone.
    - An access counts from a tensor's first byte to its last: columns of one matrix are not told
      apart.
    - What the thread that entered the block does is seen: operators, `tolist`, `numpy` and what
      prints, though these three not in hooks during a backward pass. What goes by a storage is not,
      as `torch.save` and pickle, nor what goes by an array later than by the `numpy` that gave it.
      A view reads nothing; `host[0]`, one number, is read.
    - Each thread of the host is an actor; what orders threads among themselves is not seen, but
      that a thread begins after all that was done before it.
    - Each stream has the whole device: two that compute at the same time take no longer for it.
      Caches, the launching of operators and Python take no time, nor do views. What is indexed
      counts as read whole.

    Args:
        late, early: one of the modes, or none.
        memory_bytes: of the device, and as many pinned ones; taken from this machine as far as they
            are used.
        flops_per_second, bytes_per_second: an operator takes the longer of its FLOPs (those that
            PyTorch's counter knows: of products and attention) and of the bytes that it reads and
            writes (what is expanded as it lies in memory); no time, if left out.
        up_bytes_per_second, down_bytes_per_second: of copies from the host and to it; no time, if
            left out.
        host_flops_per_second, host_bytes_per_second: the same for operators on tensors of the host,
            such as the update of an optimizer that is there; what the host gives to the device then
            comes after that.

    Attributes:
        races: a sentence for each that was found. Clear it before the block ends where you expect
            some.
        spans: a `Span` for each operator and copy that took time; those of the host have the stream
            "host".
        samples: (simulated seconds, live bytes) after each operator.
        seconds: how long all that was given to the device takes.
        live_bytes: of the device's memory, now.
        peak_bytes: of the device's memory, the most so far.

    Raises:
        Race: at the end of the block, if `races` are left and nothing else was raised.
        torch.OutOfMemoryError: from an operator: `memory_bytes` do not suffice.
        RuntimeError: from an operator: its tensors are on the host and on the device.

    Example:
        >>> with SimulatedDevice(bytes_per_second=1e9) as device:
        ...     y = torch.zeros(1_000_000) + 1
        >>> device.peak_bytes, device.seconds
        (8000000, 0.012)
    """

    apart, ahead = True, 2

    def __init__(
        self,
        *,
        late: bool = False,
        early: bool = False,
        memory_bytes: int = 1 << 28,
        **rates: float | None,
    ):
        self.rates = _checked(rates)
        if late and early:
            raise ValueError("late and early cannot both be True: choose one of them")
        self.late, self.early, nbytes = (
            late,
            early,
            whole("memory_bytes", memory_bytes, 1, of="bytes"),
        )
        self.memory, self.host_memory = (
            Arena(name, nbytes, early) for name in ("device", "pinned")
        )
        super().__init__(AccessLog([self.memory, self.host_memory]))
        self.races, self.spans = self.log.races, self.log.spans
        self.samples: list[tuple[float, int]] = []
        self._watch = ExitStack()

    def __enter__(self) -> SimulatedDevice:
        Device.guests.append(self)
        self._watch.callback(Device.guests.remove, self)
        self._watch.enter_context(Operators(self))
        self._watch.enter_context(HostReads(self))
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._watch.close()
        for stream in self._sides.values():
            self.finish(stream.event())
        if self.races and kind is None:
            raise Race("\n".join(self.races))

    @property
    def seconds(self) -> float:
        return max(actor.seconds for actor in self.log.actors)

    @property
    def live_bytes(self) -> int:
        self.memory.collect()
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def move(self, thing: Any) -> Any:
        """A module, its parameters and buffers in place; or tensors, in containers too, as
        copies."""
        if not isinstance(thing, nn.Module):
            return map_tensors(
                lambda tensor: self.up(tensor.detach()).requires_grad_(tensor.requires_grad), thing
            )
        for tensor in (*thing.parameters(), *thing.buffers()):
            tensor.data = self.up(tensor.data)
        return thing

    def plot(self, ax=None, *, since: float = 0.0):
        """Draw when each stream was busy from the second `since` on, a lane each; on new axes if
        left out. The axes."""
        return draw_lanes(self.spans, ax, since)

    def plot_bytes(self, ax=None, *, since: float = 0.0):
        """Draw the device's live bytes over the seconds from `since` on, as they go below `plot`.
        The axes."""
        return draw_bytes(self.samples, ax, since, self.seconds)

    # ---- what a Device has

    def holds(self, tensor: Tensor) -> bool:
        return self.memory.block_of(tensor) is not None

    def used(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            self.memory.block_of(tensor).used_by.add(self.current())
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.log.new(self.host_memory, self.log.host, shape, dtype)

    def up(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            return tensor
        if self.host_memory.block_of(tensor) is None:
            with _disable_current_modes():
                tensor = self.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        made = self.log.new(self.memory, self.current(), tensor.shape, tensor.dtype)
        self.transfer(made, tensor)
        return made

    def transfer(self, target: Tensor, source: Tensor) -> None:
        up, stream = self.holds(target), self.current()
        host, name = (source, "up") if up else (target, "down")
        # Of aliases: a copy does not keep from being freed what it reads and writes.
        into, out = (
            self.memory.alias(self.host_memory.alias(tensor)) for tensor in (target, source)
        )
        seconds = source.nbytes / self.rates[f"{name}_bytes_per_second"]
        with self.log.lock:
            stream.follow(self.log.host.event())
            stream.give(lambda: self._copy(stream, into, out))
            if not self.late:
                stream.run()
            self.log.record_access(stream, f"{COPY}{name}", [source], [target], seconds)
            if (block := self.host_memory.block_of(host)) is None:
                self.finish(stream.event())  # as CUDA does where memory is not pinned
            else:
                block.used_by.add(stream)  # as PyTorch does for pinned memory

    def _copy(self, stream: Actor, target: Tensor, source: Tensor) -> None:
        with _disable_current_modes(), self.log.early(stream, [target, source], [target]):
            target.copy_(source)


def _checked(rates: dict[str, float | None]) -> dict[str, float]:
    if unknown := rates.keys() - set(RATES):
        raise TypeError(
            f"the options of a SimulatedDevice must be {any_of(RATES)}, got"
            f" {', '.join(sorted(unknown))}"
        )
    return {
        name: math.inf if rates.get(name) is None else positive(name, rates[name]) for name in RATES
    }
