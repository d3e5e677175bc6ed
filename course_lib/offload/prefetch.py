"""The next batch on its way while this one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from course_lib._check import kind, shown, whole
from course_lib._torch import map_tensors, tensors_in

from .device import Device


class Prefetcher:
    """Iterate over a loader in a background thread, which also moves the batches: to CUDA from pinned memory, on a side
    stream.

    Args:
        loader: any iterable of batches: tensors, or nested tuples, lists, mappings and dataclasses of them; or objects
            that have a method `to(device)`.
        device: where the batches go.
        depth: how many batches are made ahead.

    Each `iter` starts the loader anew. What the loader raises is raised where its batch would have come, and so is a
    TypeError for a batch that holds no tensors. Leaving the loop early stops the thread, once the loader has handed
    over the batch that it is making.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str = "cpu", *, depth: int = 1):
        self.loader = kind("loader", loader, Iterable, "an iterable of batches")
        self.device, self.depth = torch.device(device), whole("depth", depth, 1)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        made: queue.Queue = queue.Queue(self.depth)
        stop = threading.Event()

        def put(*item: Any) -> None:
            while not stop.is_set():
                with suppress(queue.Full):
                    made.put(item, timeout=0.05)
                    return

        thread = threading.Thread(target=self._make, args=(put, stop), name="prefetcher", daemon=True)
        thread.start()
        try:
            while True:
                what, value, event = made.get()
                if what == "end":
                    return
                if what == "error":
                    raise value
                device = Device.at(self.device)
                device.wait(event)
                for tensor in tensors_in(value):
                    device.used(tensor)
                yield value
        finally:
            stop.set()
            thread.join(timeout=0.1)  # not longer: a loader that waits would hold up Ctrl-C

    def _make(self, put: Callable, stop: threading.Event) -> None:
        try:
            device = Device.at(self.device)
            for batch in self.loader:
                with device.on(device.side("batches")):
                    moved, event = self._moved(batch, device), device.event()
                put("batch", moved, event)
                device.finish(event)  # the loader may use its memory again
                if stop.is_set():
                    return
            put("end", None, None)
        except BaseException as error:
            put("error", error, None)

    def _moved(self, batch: Any, device: Device) -> Any:
        if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):
            return batch.to(self.device)
        if next(tensors_in(batch), None) is None:
            raise TypeError(
                f"a batch is {shown(batch)}; it takes tensors, containers of them, or what has `to(device)`"
            )
        return map_tensors(device.up, batch)
