"""Prefetching: load the next batch and copy it to the device while the current one is used."""

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
    """Iterable over the batches of a loader; a background thread loads and copies them in advance.

    Batches are copied to CUDA from pinned memory, on a side stream, so that the copies overlap
    computation. Each new iteration restarts the loader. If the loop is left early, the thread stops
    as soon as the loader has returned the batch that it is loading.

    Args:
        loader: Any iterable of batches. A batch is a tensor, a nested tuple, list, mapping or
            dataclass of tensors, or an object with a method `to(device)`.
        device: Device to which the batches are copied: a `torch.device`, its name, or a `Device` of
            `course_lib.offload`.
        depth: Number of copied batches that may wait until the loop needs them. In addition, the
            thread loads and copies one more batch.

    Raises:
        TypeError: An argument has the wrong type, or a batch contains no tensors (raised when the
            loop reaches that batch).
        ValueError: depth is less than 1.
        Exception: Any error of the loader, raised when the loop reaches the batch that failed.
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
            target=self._load_batches,
            args=(batches, free_slots, stop),
            name="prefetcher",
            daemon=True,
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
            thread.join(timeout=0.1)  # short timeout, because a blocking loader would delay Ctrl-C

    def _load_batches(
        self, batches: queue.SimpleQueue, free_slots: threading.Semaphore, stop: threading.Event
    ) -> None:
        """Load batches, copy them to the device and put them into the queue; the thread runs this.

        Args:
            batches: Queue of tuples (batch, event at the end of its copy, None). The last item is
                (None, `_END`, None), or (None, None, error) after an error.
            free_slots: Semaphore with the number of batches that may still be loaded ahead.
            stop: Event that is set when the loop has ended.
        """
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
                device.finish(event)  # the loader can reuse the memory of its batch after this wait
            batches.put((None, _END, None))
        except BaseException as error:
            batches.put((None, None, error))

    def _move(self, batch: Any, device: Device) -> Any:
        """Copy all tensors of a batch to the device, on the current stream."""
        if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):
            return batch.to(device.device)
        if next(tensors_in(batch), None) is None:
            raise TypeError(
                "a batch of the loader must contain a tensor, or be an object with a method"
                f" to(device), got {describe(batch)}, which contains no tensor"
            )
        return map_tensors(device.up, batch)


_END = object()
