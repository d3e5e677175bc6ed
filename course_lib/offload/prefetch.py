"""Prefetching: load the next batch and move it to the device while the current one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from course_lib._check import describe, kind, whole
from course_lib._torch.tensors import map_tensors, tensors_in

from .device import Device


class Prefetcher:
    """Iterate over a loader in a background thread, which also moves the batches to a device.

    Batches are copied to CUDA from pinned memory, on a side stream.

    Args:
        loader: Any iterable of batches. A batch is a tensor, a nested tuple, list, mapping or
            dataclass of tensors, or an object with a method `to(device)`.
        device: Destination of the batches; it may also be a `Device`.
        depth: Number of batches that are loaded ahead.

    Each `iter` restarts the loader. Leaving the loop early stops the thread as soon as the loader
    has returned the batch that it is loading.

    Raises:
        TypeError: An argument has the wrong type, or a batch contains no tensors (raised when it
            would be returned).
        ValueError: depth is less than 1.
        Exception: Any error of the loader is raised when its batch would be returned.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | Device = "cpu", *, depth: int = 1
    ):
        self.loader = kind("loader", loader, Iterable, "an iterable of batches")
        self.device = device if isinstance(device, Device) else torch.device(device)
        self.depth = whole("depth", depth, 1)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = queue.SimpleQueue()
        free_slots = threading.Semaphore(self.depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._make, args=(batches, free_slots, stop), name="prefetcher", daemon=True
        )
        thread.start()
        try:
            while True:
                batch, event, error = batches.get()
                if error is not None:
                    raise error
                if event is _END:
                    return
                free_slots.release()
                device = Device.from_torch(self.device)
                device.wait(event)
                for tensor in tensors_in(batch):
                    device.used(tensor)
                yield batch
        finally:
            stop.set()
            free_slots.release()
            thread.join(timeout=0.1)  # short, because a loader that blocks would delay Ctrl-C

    def _make(
        self, batches: queue.SimpleQueue, free_slots: threading.Semaphore, stop: threading.Event
    ) -> None:
        try:
            device = Device.from_torch(self.device)
            for batch in self.loader:
                with device.on(device.side("batches")):
                    moved = self._move(batch, device)
                    event = device.event()
                free_slots.acquire()
                if stop.is_set():
                    return
                batches.put((moved, event, None))
                device.finish(event)  # after this the loader may reuse the memory of its batch
            batches.put((None, _END, None))
        except BaseException as error:
            batches.put((None, None, error))

    def _move(self, batch: Any, device: Device) -> Any:
        if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):
            return batch.to(device.device)
        if next(tensors_in(batch), None) is None:
            raise TypeError(
                "a batch of the loader must be a tensor, a container of tensors, or an object with"
                f" `to(device)`, got {describe(batch)}"
            )
        return map_tensors(device.up, batch)


_END = object()
