"""A simulated GPU that checks whether operators and copies on several streams wait for one another.

The simulated GPU runs on any machine. It also computes when each stream would be busy on a real
GPU.

    with SimulatedDevice() as device:
        model, x = device.move(model), device.move(x)
        with offload_activations():
            loss = model(x).sum()
        loss.backward()
    # the end of the block raises a Race that lists all races that were found

Device memory is CPU memory, and the most recently freed block is reused first. An actor is a stream
or a thread of the host. Each stream runs its tasks in order. An actor waits for other actors
through events, and its vector clock records which of their tasks it has waited for.

An access to memory is a race if its actor has not waited for the last write to the same bytes. This
holds even if the bytes belonged to another tensor at the time of the write. A write is also a race
if its actor has not waited for the reads since the last write.

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

from course_lib._check import positive, whole
from course_lib._torch.modes import disable_current_modes
from course_lib._torch.tensors import map_tensors
from course_lib.offload import Device

from .lanes import draw_bytes, draw_lanes
from .operators import HostReads, Operators
from .race_detector import COPIES, AccessLog, Actor, Arena, Event

# Names of the options that set the device's rates.
RATES = (
    "flops_per_second",
    "bytes_per_second",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "host_flops_per_second",
    "host_bytes_per_second",
)


class Race(RuntimeError):
    """Error that reports races: accesses to the same memory without a defined order.

    Two accesses to the same bytes are a race if at least one of them is a write and neither access
    waits for the other.
    """


class _Streams(Device):
    """The part of `SimulatedDevice` that implements streams, events and waits.

    Each stream is an `Actor` of an `AccessLog`. Each thread of the host has its own current stream,
    as in PyTorch.

    Args:
        log: The `AccessLog` in which the streams record their accesses to memory.
    """

    def __init__(self, log: AccessLog):
        super().__init__(torch.device("cpu"))
        self.log = log
        self._streams_by_name: dict[str, Actor] = {}
        self._local = threading.local()
        self._compute = self.side("compute")

    def current(self) -> Actor:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Actor) -> Iterator[None]:
        previous, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = previous

    def side(self, name: str) -> Actor:
        if name not in self._streams_by_name:
            self._streams_by_name[name] = self.log.actor(name)
        return self._streams_by_name[name]

    def event(self) -> Event:
        return self.current().event()

    def wait(self, event: Event) -> None:
        self.current().wait_for(event)

    def finish(self, event: Event) -> None:
        with self.log.lock:
            self.log.host.wait_for(event)
            self.log.host.run()

    def run_all(self, actor: Actor) -> None:
        """Run all pending tasks of an actor, after everything that the host has done so far.

        An actor is a stream or a host thread. Afterwards the caller can run the actor's next
        task immediately.
        """
        actor.wait_for(self.log.host.event())
        actor.run()


class SimulatedDevice(_Streams):
    """Simulated GPU that runs operators on the CPU and detects races; used as a context manager.

    Two accesses to the same bytes are a race if at least one of them is a write and neither waits
    for the other. If the program waits wherever it must, all results are correct bit for bit. A
    missing wait is reported as a race, but the results can still be correct by chance. With one of
    the following options, a missing wait is more likely to give wrong results. The options change
    the order of operators and copies, as far as the program's waits allow:

    - `late`: Copies run as late as possible. Code gets wrong results if it uses the result of a
      copy too early, or reuses the memory of the copy's source too early.
    - `early`: Operators, copies and reads by the host run as early as possible. An access that does
      not wait for a write gets the value from before that write. Code gets wrong results if it
      uses the result of an operator or copy too early.

    All tensors report the CPU as their device, so `.cpu()` and `.to(device)` copy nothing. The
    program must instead copy with the methods of `course_lib.offload.Device`, such as `up`. Inside
    the block, a tensor belongs either to the device or to the host:

    - Device tensors are results of `move` and `up`, results of operators on device tensors, and
      tensors made without an input tensor, as by `torch.zeros(3)`.
    - Host tensors are tensors made before the block, tensors that `pinned` returns, and results of
      operators on host tensors.
    - A host tensor with a single element can be an operand together with device tensors, as on
      CUDA.

    The simulation has these limits:

    - Operators never run late. If code writes to memory that an operator is still reading, a race
      is reported, but the results stay correct.
    - An access covers a tensor from its first byte to its last, so different columns of one matrix
      count as the same memory.
    - Only the thread that entered the block is observed: its operators, the methods `tolist` and
      `numpy`, and printing. In hooks during a backward pass, these methods and printing are not
      observed.
    - Accesses through a storage, such as those of `torch.save` and pickle, are not observed. Later
      accesses through an array that `numpy` returned are not observed either.
    - Making a view does not count as a read. The exception is an index that selects a single
      element of a host tensor, as in `x[0]`.
    - Each thread of the host is treated like a stream. Synchronization between threads is not
      observed. However, a thread's first access counts as ordered after everything that other
      threads have done so far.
    - Each stream has the full rates of the device, so two streams that compute at the same time do
      not slow each other down. Cache effects, kernel launches, Python code and views take no time.
      An operator that indexes a tensor counts as reading the whole tensor.

    Args:
        late: Whether copies run as late as possible. Cannot be combined with `early`.
        early: Whether operators, copies and reads by the host run as early as possible.
        memory_bytes: Size of the device memory in bytes, and also of the pinned host memory. Only
            the part that is used takes memory of this machine.
        flops_per_second, bytes_per_second: Rates of the device. An operator takes the time of its
            FLOPs or of the bytes that it reads and writes, whichever is longer. FLOPs are counted
            only for matrix products, convolutions and attention, by PyTorch's formulas. For an
            expanded tensor, only its bytes in memory count. By default an operator takes no time.
        up_bytes_per_second: Rate of copies from the host to the device (H2D). By default these
            copies take no time.
        down_bytes_per_second: Rate of copies from the device to the host (D2H). By default these
            copies take no time.
        host_flops_per_second, host_bytes_per_second: Rates of operators on host tensors, such as an
            optimizer update on the host. If the host starts a device task after such an operator,
            the task begins when the operator is finished. By default these operators take no time.

    Attributes:
        races: List with one sentence per race. If you expect races, clear this list before the
            block ends.
        spans: List with one `Span` per operator or copy that took simulated time. The stream of a
            host operator is "host".
        samples: List of pairs (simulated time in seconds, live bytes of device memory), with one
            pair for each operator that allocated device memory.
        seconds: Simulated time in seconds at which all tasks so far are finished.
        live_bytes: Bytes of device memory that are live now.
        peak_bytes: Largest number of bytes of device memory that were live at once.

    Raises:
        TypeError, ValueError: An option has the wrong type or value, or does not exist.
        Race: Raised at the end of the block if `races` is not empty and no other error was raised.
        torch.OutOfMemoryError: Raised by an operator if `memory_bytes` is too small.
        RuntimeError: Raised by an operator other than `copy_` if some of its tensors are on the
            host and some on the device. Host tensors with a single element are allowed.

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
        self.rates = _checked_rates(rates)
        if late and early:
            raise ValueError("late and early cannot be combined: set at most one of them to True")
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
        for stream in self._streams_by_name.values():
            self.finish(stream.event())
        if self.races and kind is None:
            raise Race("\n".join(self.races))

    @property
    def seconds(self) -> float:
        """Simulated time in seconds at which all tasks that were started so far are finished."""
        return max(actor.seconds for actor in self.log.actors)

    @property
    def live_bytes(self) -> int:
        """Bytes of simulated device memory that are live now."""
        self.memory.collect()
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes of simulated device memory that were live at once."""
        return self.memory.peak_bytes

    def move(self, thing: Any) -> Any:
        """Copy a module's parameters and buffers, or tensors, to the simulated device memory.

        Args:
            thing: A module, a tensor, or a nested container of tensors.

        Returns:
            For a module, the module itself, with its parameters and buffers on the device. For a
            tensor or a container of tensors, a copy with the same structure.
        """
        if not isinstance(thing, nn.Module):
            return map_tensors(
                lambda tensor: self.up(tensor.detach()).requires_grad_(tensor.requires_grad), thing
            )
        for tensor in (*thing.parameters(), *thing.buffers()):
            tensor.data = self.up(tensor.data)
        return thing

    def plot(self, ax=None, *, since: float = 0.0):
        """Draw one lane per stream that shows when the stream was busy.

        Args:
            ax: Matplotlib axes to draw on; None creates new axes.
            since: Simulated time in seconds at which the plot begins.

        Returns:
            The axes.
        """
        return draw_lanes(self.spans, ax, since)

    def plot_bytes(self, ax=None, *, since: float = 0.0):
        """Draw the live bytes of device memory over simulated time, on the time axis of `plot`.

        Args:
            ax: Matplotlib axes to draw on; None creates new axes.
            since: Simulated time in seconds at which the plot begins.

        Returns:
            The axes.
        """
        return draw_bytes(self.samples, ax, since, self.seconds)

    # ---- methods of `Device`, whose docstrings explain them

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
            with disable_current_modes():
                tensor = self.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        copy = self.log.new(self.memory, self.current(), tensor.shape, tensor.dtype)
        self.transfer(copy, tensor)
        return copy

    def transfer(self, target: Tensor, source: Tensor) -> None:
        up, stream = self.holds(target), self.current()
        host, name = (source, "up") if up else (target, "down")
        # A pending copy must not prevent the reuse of its tensors' memory. Therefore the copy works
        # on aliases of the tensors.
        target_alias, source_alias = (
            self.memory.alias(self.host_memory.alias(tensor)) for tensor in (target, source)
        )
        seconds = source.nbytes / self.rates[f"{name}_bytes_per_second"]
        with self.log.lock:
            stream.wait_for(self.log.host.event())
            stream.submit(lambda: self._copy(stream, target_alias, source_alias))
            if not self.late:
                stream.run()
            self.log.record_access(stream, COPIES[name], [source], [target], seconds)
            if (block := self.host_memory.block_of(host)) is None:
                # As on CUDA, the host waits for the copy if the host memory is not pinned.
                self.finish(stream.event())
            else:
                # As in PyTorch, pinned memory is not reused before the copy is finished.
                block.used_by.add(stream)

    def _copy(self, stream: Actor, target: Tensor, source: Tensor) -> None:
        """Run a copy as a task of a stream."""
        with disable_current_modes(), self.log.run_early(stream, [target, source], [target]):
            target.copy_(source)


def _checked_rates(rates: dict[str, float | None]) -> dict[str, float]:
    """Return a dict with all `RATES`; a rate that is missing or None is infinite.

    Raises:
        TypeError, ValueError: A name is not in `RATES`, or a rate is not a positive number.
    """
    if unknown := rates.keys() - set(RATES):
        raise TypeError(
            "each option of a SimulatedDevice must be one of late, early, memory_bytes,"
            f" {', '.join(RATES)}, got {min(unknown)!r}"
        )
    return {
        name: math.inf if rates.get(name) is None else positive(name, rates[name]) for name in RATES
    }
