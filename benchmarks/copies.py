"""Peers of the rows about offload: copies to and from a file without a step, in another thread
during a step, or in a step that waits for each copy."""

import os
import tempfile
import threading
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from course_lib.offload import DiskStore

CHUNK = 8 << 20
COPIES_NOTE = "at the same time, another thread writes and reads {:,} bytes"


def copies(nbytes: int) -> Callable[[], None]:
    """Return a function that writes `nbytes` bytes to a file and reads them into buffers.

    Six buffers are used in turn, which are as large as the three pages of an offloaded optimizer.
    """
    file = tempfile.TemporaryFile(dir=DiskStore().directory)  # noqa: SIM115
    # The address of a bytearray may not be a multiple of 32. On some CPUs, reads into such a buffer
    # take five times as long.
    buffers = [torch.zeros(CHUNK, dtype=torch.uint8).numpy() for _ in range(6)]

    def call() -> None:
        for move in (os.pwritev, os.preadv):
            for i, place in enumerate(range(0, nbytes, CHUNK)):
                move(file.fileno(), [buffers[i % len(buffers)][: nbytes - place]], place)

    return call


def in_two_threads(
    here: Sequence[Callable[[], object]], there: Sequence[Callable[[], object]]
) -> Callable[[], None]:
    """Return a function that calls some functions while another thread calls the others.

    No call waits for the other thread. The function returns when both threads have ended.
    """

    def call() -> None:
        thread = threading.Thread(target=lambda: [function() for function in there])
        thread.start()
        for function in here:
            function()
        thread.join()

    return call


def synchronous_file(parameters: set[int]):
    """Return hooks that write each saved tensor to a file, and read it back when backward needs it.

    The step waits for each copy, as in a first and simple implementation.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the graph keeps it open

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in parameters:
            return tensor.detach()
        place = file.seek(0, 2)
        file.write(tensor.contiguous().numpy())
        return place, tensor.shape

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        file.seek(packed[0])
        read = bytearray(file.read(packed[1].numel() * 4))
        return torch.frombuffer(read, dtype=torch.float32).view(packed[1])

    return saved_tensors_hooks(pack, unpack)
