"""A simulated device that checks, on any machine, whether its operators and copies are ordered.

It also computes when each stream is busy.

    with SimulatedDevice() as device:
        model, x = device.move(model), device.move(x)
        with offload_activations():
            loss = model(x).sum()
        loss.backward()
    # leaving the block raises a Race that lists everything that was found

Device memory is CPU memory, and a freed block is reused, the last one freed first. Each stream runs
its tasks in order. Vector clocks record what is ordered: each actor, which is a stream or a thread
of the host, knows how far it has waited for the others, through events. An access to memory is a
race if the actor has not waited for the last write there, whichever tensor owned the memory then. A
write is also a race if it has not waited for the reads since that write.

Source: Fidge 1988 and Mattern 1989 for the clocks. PyTorch's CUDA sanitizer checks device memory in
the same way.
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
    """Accesses to the same memory that no wait orders."""


class _Streams(Device):
    """Streams in the access log; each thread chooses its current stream."""

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
        """Run all tasks of an actor, so that the host can run its next task at once.

        The actor is first ordered after the host.
        """
        actor.follow(self.log.host.event())
        actor.run()


class SimulatedDevice(_Streams):
    """A `Device` that runs operators on the CPU and checks their ordering; a context manager.

    Inside the block, `Device.of` recognizes the device's tensors: those that `move` and `up`
    return, results of operators on them, and new tensors made from nothing (`torch.zeros(3)`). Host
    tensors are those made before, `pinned` ones, and results of operators on those. Tensors of a
    single number can be combined with both, as on CUDA. All tensors report the CPU as their device,
    so `.cpu()` and `.to(device)` copy nothing. Code under test must copy through the methods of
    `Device`.

    If everything is ordered, all numbers are correct bit by bit. If something is not ordered, it is
    reported, and the numbers may still be correct by chance. Two modes run the same program in
    another order that its waits allow, so that the numbers become wrong too:

    - `late`: Copies run as late as possible. Code that uses a copy, or reuses the memory of its
      source, too early gets wrong numbers.
    - `early`: Operators, copies and reads by the host see the values of their tensors from before
      the last write that they do not wait for. Code that uses the result of an operator or copy too
      early gets wrong numbers.

    Limits:

    - Operators never run late. If code writes over memory that an operator is still reading, this
      is reported, but the numbers stay correct.
    - An access covers a tensor from its first byte to its last, so different columns of one matrix
      are not distinguished.
    - Only the thread that entered the block is observed: operators, `tolist`, `numpy` and printing,
      and the last three not in hooks during a backward pass. Accesses through a storage, such as
      those of `torch.save` and pickle, are not observed, and neither are later accesses through an
      array that `numpy` returned. A view reads nothing, but `host[0]`, a single number, counts as
      read.
    - Each thread of the host is an actor. Synchronization between threads is not observed, except
      that a thread starts after everything that was done before.
    - Each stream has the whole device, so two streams that compute at the same time do not slow
      each other down. Caches, launching operators, Python and views take no time. An indexed tensor
      counts as read completely.

    Args:
        late, early: Whether to use that mode; at most one can be True.
        memory_bytes: Bytes of device memory, and also of pinned memory. This machine provides only
            the part that is used.
        flops_per_second, bytes_per_second: Rates of the device. An operator takes the time of its
            FLOPs (counted by PyTorch, for products and attention) or of the bytes that it reads and
            writes (of an expanded tensor, those in memory), whichever is longer. By default it
            takes no time.
        up_bytes_per_second, down_bytes_per_second: Rates of copies from and to the host. By default
            copies take no time.
        host_flops_per_second, host_bytes_per_second: The same rates for operators on host tensors,
            such as an optimizer update on the host. Tasks that the host gives to the device
            afterwards start after them.

    Attributes:
        races: One sentence per race. If you expect races, clear this list before the block ends.
        spans: One `Span` per operator or copy that took time. The stream of a host operator is
            "host".
        samples: (simulated seconds, live bytes) after each operator.
        seconds: When the device has finished everything that it was given.
        live_bytes: Bytes of device memory that are live now.
        peak_bytes: The most bytes of device memory that were live at once.

    Raises:
        Race: At the end of the block, if `races` is not empty and no other error was raised.
        torch.OutOfMemoryError: From an operator, if `memory_bytes` is too small.
        RuntimeError: From an operator, if some of its tensors are on the host and some on the
            device.

    Example:
        >>> with SimulatedDevice(bytes_per_second=1e9) as device:
        ...     y = torch.zeros(1_000_000) + 1
        >>> device.peak_bytes, device.seconds
        (8000000, 0.012)
    """

    has_own_memory, ahead = True, 2

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
        """Move a module's parameters and buffers in place; copy tensors, also in containers."""
        if not isinstance(thing, nn.Module):
            return map_tensors(
                lambda tensor: self.up(tensor.detach()).requires_grad_(tensor.requires_grad), thing
            )
        for tensor in (*thing.parameters(), *thing.buffers()):
            tensor.data = self.up(tensor.data)
        return thing

    def plot(self, ax=None, *, since: float = 0.0):
        """Draw when each stream was busy from second `since` on, one lane per stream.

        Args:
            ax: Matplotlib axes; by default new ones.

        Returns:
            The axes.
        """
        return draw_lanes(self.spans, ax, since)

    def plot_bytes(self, ax=None, *, since: float = 0.0):
        """Draw the device's live bytes from second `since` on, to go below a `plot`.

        Args:
            ax: Matplotlib axes; by default new ones.

        Returns:
            The axes.
        """
        return draw_bytes(self.samples, ax, since, self.seconds)

    # ---- the methods of a Device

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
        # Aliases, so that the copy does not keep its tensors from being freed.
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
                self.finish(stream.event())  # CUDA waits too if memory is not pinned
            else:
                block.used_by.add(stream)  # PyTorch does this for pinned memory

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
