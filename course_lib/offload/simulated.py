"""A device in the books alone, on any machine: it finds copies that nothing orders, and tells when each stream is busy.

    with SimulatedDevice() as device:
        model, x = device.move(model), device.move(x)
        with offload_activations():
            loss = model(x).sum()
        loss.backward()
    # leaving the block raises a Race that names all that was found

Its memory is CPU memory of which freed blocks are handed out again, the latest first. Its streams do in order what they
are given, and who may be ahead of whom is known from vector clocks: each party, a stream or a thread of the host, knows
how far it has seen the others get, by the events that it waited for. An access to memory is a race if the last write
there (for a write, the last reads too) is not among what its party has seen, whoever owned the memory then.

Source: Fidge 1988 and Mattern 1989 for the clocks; PyTorch's CUDA sanitizer looks at device memory in the same way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from course_lib._check import positive, whole
from course_lib._torch import map_tensors

from .books import Arena, Books, Event, Party, Span
from .device import Device

aten = torch.ops.aten
RATES = ("flops_per_second", "bytes_per_second", "up_bytes_per_second", "down_bytes_per_second")


class Race(RuntimeError):
    """Accesses to the same memory that nothing orders."""


class SimulatedDevice(Device):
    """A `Device` of which operators run on the CPU, and of which the order is checked. A context manager.

    Inside the block `Device.of` knows its tensors: those that `move` and `up` return, what operators make of them, and
    new tensors made from nothing (`torch.zeros(3)`). Of the host are tensors made before, `pinned` ones, and what
    operators make of those. Single numbers go with either, as on CUDA. All of them say that their device is the CPU,
    so `.cpu()` and `.to(device)` copy nothing: code that is to be tested copies by the methods of `Device`.

    Each thread of the host is a party. What orders threads among themselves is not seen, but that a thread begins after
    all that was done before it.

    Args:
        late: copies run as late as the order allows, so that a race shows as wrong numbers too.
        memory_bytes: of the device, and as many pinned ones; taken from this machine as far as they are used.
        flops_per_second, bytes_per_second: an operator takes the longer of its FLOPs and of the bytes that it reads and
            writes; no time, if left out.
        up_bytes_per_second, down_bytes_per_second: of copies from the host and to it; no time, if left out.

    Attributes:
        races: a sentence for each that was found. Clear it before the block ends where you expect some.
        spans: a `Span` for each operator and copy that took time.
        samples: (simulated seconds, live bytes) after each operator.
        seconds: how long all that was given to the device takes.
        live_bytes: of the device's memory, now.
        peak_bytes: of the device's memory, the most so far.

    Raises:
        Race: at the end of the block, if `races` are left and nothing else was raised.
        torch.OutOfMemoryError: from an operator: `memory_bytes` do not suffice.
        RuntimeError: from an operator: its tensors are on the host and on the device.
    """

    apart, ahead = True, 2

    def __init__(self, *, late: bool = False, memory_bytes: int = 1 << 28, **rates: float | None):
        super().__init__(torch.device("cpu"))
        self.rates = _checked(rates)
        self.late, nbytes = late, whole("memory_bytes", memory_bytes, 1, of="bytes")
        self.memory, self.host_memory = Arena("device", nbytes), Arena("pinned", nbytes)
        self.books = Books([self.memory, self.host_memory])
        self.races, self.spans = self.books.races, self.books.spans
        self.samples: list[tuple[float, int]] = []
        self._sides: dict[str, Party] = {}
        self._local, self._operators = threading.local(), _Operators(self)
        self._compute = self.side("compute")

    def __enter__(self) -> SimulatedDevice:
        Device.guests.append(self)
        self._operators.__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._operators.__exit__(kind, value, trace)
        Device.guests.remove(self)
        for stream in self._sides.values():
            self.finish(stream.event())
        if self.races and kind is None:
            raise Race("\n".join(self.races))

    @property
    def seconds(self) -> float:
        return max(party.seconds for party in self.books.parties)

    @property
    def live_bytes(self) -> int:
        self.memory.collect()
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def move(self, thing: Any) -> Any:
        """A module, its parameters and buffers in place; or tensors, in containers too, as copies."""
        if not isinstance(thing, nn.Module):
            return map_tensors(lambda tensor: self.up(tensor.detach()).requires_grad_(tensor.requires_grad), thing)
        for tensor in (*thing.parameters(), *thing.buffers()):
            tensor.data = self.up(tensor.data)
        return thing

    def plot(self, ax=None, *, since: float = 0.0):
        """Draw when each stream was busy from the second `since` on, a lane each; on new axes if left out. The axes."""
        return _draw(self.spans, ax, since)

    # ---- what a Device has

    def holds(self, tensor: Tensor) -> bool:
        return self.memory.block_of(tensor) is not None

    def current(self) -> Party:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Party) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def side(self, name: str) -> Party:
        if name not in self._sides:
            self._sides[name] = self.books.party(name)
        return self._sides[name]

    def event(self) -> Event:
        return self.current().event()

    def wait(self, event: Event) -> None:
        self.current().follow(event)

    def finish(self, event: Event) -> None:
        with self.books.lock:
            self.books.host.follow(event)
            self.books.host.run()

    def used(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            self.memory.block_of(tensor).used_by.add(self.current())
        return tensor

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.books.new(self.host_memory, self.books.host, shape, dtype)

    def up(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            return tensor
        if self.host_memory.block_of(tensor) is None:
            with _disable_current_modes():
                tensor = self.pinned(tensor.shape, tensor.dtype).copy_(tensor)
        made = self.books.new(self.memory, self.current(), tensor.shape, tensor.dtype)
        self.transfer(made, tensor)
        return made

    def transfer(self, target: Tensor, source: Tensor) -> None:
        up, stream = self.holds(target), self.current()
        host, name = (source, "up") if up else (target, "down")
        # Of aliases: a copy does not keep from being freed what it reads and writes.
        into, out = (self.memory.alias(self.host_memory.alias(tensor)) for tensor in (target, source))
        seconds = source.nbytes / self.rates[f"{name}_bytes_per_second"]
        with self.books.lock:
            stream.follow(self.books.host.event())
            stream.give(lambda: _copy(into, out))
            self.books.did(stream, f"a copy {name}", [source], [target], seconds)
            if (block := self.host_memory.block_of(host)) is None:
                self.finish(stream.event())  # as CUDA does where memory is not pinned
            else:
                block.used_by.add(stream)  # as PyTorch does for pinned memory
            if not self.late:
                stream.run()


class _Operators(TorchDispatchMode):
    """Runs operators on the device's tensors: in its memory, in the order and the time of the current stream."""

    def __init__(self, device: SimulatedDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with self.device.books.lock:
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        device, tensors = self.device, _tensors((args, kwargs))
        here = [device.holds(tensor) for tensor in tensors]
        if func is aten.copy_.default and sum(here) == 1 and args[1].numel() > 1:
            device.transfer(*args[:2])
            if len(args) == 2:  # not asked to be non-blocking
                device.finish(device.event())
            return args[0]
        if any(here):
            for tensor, is_here in zip(tensors, here, strict=True):
                if not is_here and tensor.numel() > 1:
                    raise RuntimeError(f"{func} got tensors of the device, and one of the host with shape "
                                       f"{tuple(tensor.shape)}; it takes all on the device: `move` it")  # fmt: skip
        on_device = any(here) or not tensors
        party = device.current() if on_device else device.books.host
        party.follow(device.books.host.event())
        party.run()
        result = func(*args, **kwargs)
        changed, made = _changed(func, args, kwargs), []
        if on_device and not changed and not _tensors(result):  # a number, as of `item`: the host waits for it
            device.books.did(party, str(func), tensors, [])
            device.finish(party.event())
            return result
        if on_device:
            result = self._at_home(result, tensors, made)
        if made or changed or not on_device:
            reads = [tensor for tensor in tensors if not any(tensor is other for other in changed)]
            seconds = self._seconds(func, args, kwargs, result) if on_device else 0.0
            device.books.did(party, str(func), reads, [*changed, *made], seconds)
        if made:
            device.samples.append((party.seconds, device.live_bytes))
        return result

    def _at_home(self, result: Any, tensors: list[Tensor], made: list[Tensor]) -> Any:
        """The result with what is new moved into the device's memory; `made` gets that."""
        old = {tensor.untyped_storage()._cdata for tensor in tensors}
        homes: dict[int, Tensor] = {}

        def at_home(value: Any) -> Any:
            if not isinstance(value, Tensor) or (value.numel() <= 1 and not tensors):
                return value
            storage = value.untyped_storage()
            if storage._cdata in old or not storage.nbytes():
                return value
            if storage._cdata not in homes:
                everything = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
                device = self.device
                home = device.books.new(device.memory, device.current(), everything.shape, torch.uint8)
                homes[storage._cdata] = home.copy_(everything)
            home = homes[storage._cdata].untyped_storage()
            return torch.empty(0, dtype=value.dtype).set_(home, value.storage_offset(), value.shape, value.stride())

        result = tree_map(at_home, result)
        made.extend(homes.values())
        return result

    def _seconds(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> float:
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        nbytes = sum(tensor.nbytes for tensor in _tensors((args, kwargs, result)))
        return max(flops / self.device.rates["flops_per_second"], nbytes / self.device.rates["bytes_per_second"])


def _draw(spans: list[Span], ax: Any, since: float) -> Any:
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(7, 1.8))
    lanes = list(dict.fromkeys(span.stream for span in spans))
    for place, lane in enumerate(lanes):
        mine = [span for span in spans if span.stream == lane and span.end > since]
        busy = [(span.start - since, span.end - span.start) for span in mine]
        ax.broken_barh(busy, (place - 0.35, 0.7), color=f"C{place}", edgecolor="white", linewidth=0.3)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel("simulated seconds")
    return ax


def _checked(rates: dict[str, float | None]) -> dict[str, float]:
    if unknown := rates.keys() - set(RATES):
        raise TypeError(f"SimulatedDevice got {', '.join(unknown)}; it takes {', '.join(RATES)}")
    return {name: math.inf if rates.get(name) is None else positive(name, rates[name]) for name in RATES}


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _changed(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operator writes into, by its schema."""
    given = zip(func._schema.arguments, args, strict=False)
    named = ((argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs)
    changed = [value for argument, value in (*given, *named) if argument.alias_info and argument.alias_info.is_write]
    return _tensors(changed)


def _copy(target: Tensor, source: Tensor) -> None:
    with _disable_current_modes():
        target.copy_(source)
