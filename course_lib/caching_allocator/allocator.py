"""The simulated caching allocator: its public methods `allocate`, `free`, `replay` and others.

The rules for reserving, splitting, merging and releasing memory are in `segments.py`. They follow
c10/cuda/CUDACachingAllocator.cpp of torch 2.13, and names in comments are from that file.
The simulation has one stream, no CUDA graphs and no private pools. Memory that libraries request
from CUDA directly (the context, NCCL) is not included. The only simulated setting of
PYTORCH_CUDA_ALLOC_CONF is `expandable_segments`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import OutOfMemoryError

from .._check import kind, whole
from .device_memory import Chunk
from .memory_snapshot import save_snapshot, snapshot_of
from .segments import (
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    CudaMalloc,
    ExpandableSegments,
    Segments,
    round_up,
)

# Maps the identifier of each allocated storage to the storage's block.
Live = dict[Hashable, "Block"]


@runtime_checkable
class Replayable(Protocol):
    """Object that `CachingAllocator.replay` can replay, such as a `course_lib.memory.Trace`."""

    def allocations(self) -> Iterable[tuple]:
        """Yield events ("birth" or "release", storage, bytes) in the order in which they happen.

        `storage` is any hashable value that identifies the storage.
        """
        ...


@dataclass(eq=False, slots=True)
class Block:
    """Memory that `CachingAllocator.allocate` returned for one storage.

    Attributes:
        address: Address of the first byte.
        size_bytes: Bytes of the block: the requested bytes, rounded up to a multiple of 512. If the
            free memory that was used for the block had more bytes, but too few to be split off, the
            block includes them.
        requested_bytes: Bytes that were requested.
        allocated: True until the block is freed.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    allocated: bool = True


class CachingAllocator:
    """Simulated CUDA caching allocator for one device and one stream.

    A segment is memory that the allocator reserves from CUDA, and a block is a part of a segment.
    There are two pools of segments, one for small blocks (up to 1 MiB) and one for large blocks.

    Args:
        capacity_bytes: Bytes of the device's memory that no other process uses; None for no limit.
        expandable_segments: Whether each pool has one segment that grows page by page. If False,
            each pool has many segments of fixed size.
        record_history: Whether to store each event for `snapshot`, as
            `torch.cuda.memory._record_memory_history` does.

    Raises:
        ValueError: The capacity is smaller than the smallest segment, 2 MiB.

    Example:
        >>> allocator = CachingAllocator(24 << 30, expandable_segments=True)
        >>> block = allocator.allocate(3_000_000)
        >>> allocator.memory_stats()["reserved_bytes.all.current"]
        20971520
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        record_history: bool = False,
    ):
        if capacity_bytes is not None:
            whole("capacity_bytes", capacity_bytes, SMALL_SEGMENT_BYTES, of="bytes")
        kind("expandable_segments", expandable_segments, bool, "True or False")
        source = ExpandableSegments if expandable_segments else CudaMalloc
        self._segments = source(capacity_bytes, [] if record_history else None)
        # Maps each allocated block to its chunk of a segment.
        self._chunks: dict[Block, Chunk] = {}

    def allocate(self, size_bytes: int, frames: Sequence[Mapping] = ()) -> Block:
        """Allocate a block of memory for a storage and return it (`malloc` in PyTorch).

        Args:
            size_bytes: Requested bytes; 0 returns a block without memory.
            frames: Call stack of the request, which a memory viewer shows, innermost frame first. A
                frame is a dict `{"filename": ..., "line": ..., "name": ...}`.

        Raises:
            torch.OutOfMemoryError: The device has too little free memory, even after the allocator
                has released its cached memory. The error has the same message as in PyTorch.
        """
        requested = whole("size_bytes", size_bytes, 0, of="bytes")
        if requested == 0:
            return Block(0, 0, 0)
        segments = self._segments
        size = round_up(requested, MIN_BLOCK_BYTES)  # `round_size`
        chunk = segments.malloc(size, frames)
        if chunk is None:
            segments.statistics.counters["num_ooms"] += 1
            segments.record("oom", segments.free_bytes, size, frames)
            raise OutOfMemoryError(_out_of_memory(segments, size))
        chunk.requested, chunk.frames, chunk.allocated = requested, frames, True
        segments.record("alloc", chunk.address, requested, frames)
        segments.count_block(chunk, 1)
        block = Block(chunk.address, chunk.size, requested)
        self._chunks[block] = chunk
        return block

    def free(self, block: Block) -> None:
        """Free a block (`free` and `free_block` in PyTorch).

        The memory of the block is merged with free neighbors and stays reserved for later
        allocations.

        Raises:
            ValueError: The block was already freed, or belongs to another allocator.
        """
        kind("block", block, Block, "a block that `allocate` returned")
        named = f"the block of {block.size_bytes} bytes at {block.address:#x}"
        if not block.allocated:
            raise ValueError(f"free() must be called once for each block, but {named} is free")
        if block.requested_bytes and block not in self._chunks:
            raise ValueError(
                "free() needs a block that allocate() of the same allocator returned, but"
                f" {named} is of another one"
            )
        block.allocated = False
        if block.requested_bytes == 0:
            return
        chunk = self._chunks.pop(block)
        for action in ("free_requested", "free_completed"):  # with one stream, both happen at once
            self._segments.record(action, chunk.address, chunk.requested, chunk.frames)
        self._segments.count_block(chunk, -1)
        chunk.requested, chunk.frames, chunk.allocated = 0, (), False
        self._segments.free(chunk)

    def replay(self, events: Replayable | Iterable[tuple], live: Live | None = None) -> Live:
        """Allocate and free blocks for a sequence of events, such as those of a training step.

        Args:
            events: A `Trace`, or tuples ("birth" or "release", storage, bytes) in order. `storage`
                is any hashable value that identifies the storage. A birth may have a fourth item,
                the argument `frames` of `allocate`.
            live: Dict that an earlier call returned, to continue from it. It is changed in place.
                None means that no storage is allocated before the first event.

        Returns:
            A dict from storage to `Block`, with the blocks that are still allocated at the end.

        Raises:
            torch.OutOfMemoryError: The device has too little memory for an event. All earlier
                events have been replayed.
            ValueError: The first item of an event is neither "birth" nor "release", or a storage is
                allocated twice or released before it was allocated.
        """
        live = {} if live is None else live
        if isinstance(events, Replayable):
            events = events.allocations()
        for number, (what, storage, size_bytes, *frames) in enumerate(events):
            if what not in ("birth", "release"):
                raise ValueError(f"event {number} must be 'birth' or 'release', got {what!r}")
            if what == "birth":
                if storage in live:
                    raise ValueError(
                        f"event {number} allocates storage {storage!r}, which must not be allocated"
                        " already"
                    )
                live[storage] = self.allocate(size_bytes, *frames)
            else:
                if storage not in live:
                    raise ValueError(
                        f"event {number} releases storage {storage!r}, which must be allocated"
                        " before"
                    )
                self.free(live.pop(storage))
        return live

    def empty_cache(self) -> None:
        """Release unused reserved memory to the device (`emptyCache` in PyTorch).

        A segment is released if it is completely free. A page of an expandable segment is released
        if the page is completely free.
        """
        self._segments.release_cached()

    def memory_stats(self) -> dict[str, int]:
        """Return the same statistics as `torch.cuda.memory_stats`, for the simulated device.

        The result is a dict from name, such as "reserved_bytes.all.peak", to value.
        """
        return self._segments.statistics.as_dict()

    def reset_peak_memory_stats(self) -> None:
        """Set the peak of each statistic to the statistic's current value.

        After this call, each peak is the largest value since the call.
        """
        for statistic in self._segments.statistics.values():
            statistic.peak = statistic.current

    def snapshot(self) -> dict:
        """Return a dict with all segments, their blocks, and the recorded events.

        The dict has the same form as the result of `torch.cuda.memory._snapshot`.
        """
        return snapshot_of(self._segments, self._chunks.values())

    def save_snapshot(self, path) -> None:
        """Write `snapshot()` to a file that pytorch.org/memory_viz can open.

        The format is that of `torch.cuda.memory._dump_snapshot`.
        """
        save_snapshot(self.snapshot(), path)


def _out_of_memory(segments: Segments, size: int) -> str:
    """Return PyTorch's out-of-memory message for a request of `size` bytes.

    The message has the form that PyTorch uses without NVML. With NVML, PyTorch's message also
    reports the memory of each process.
    """
    wanted, free, total = map(
        _size_text, (segments.segment_bytes(size), segments.free_bytes, segments.total_bytes)
    )
    reserved = segments.statistics["reserved_bytes.all"].current
    allocated = segments.statistics["allocated_bytes.all"].current
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of {total} "
        f"of which {free} is free. Of the allocated memory {_size_text(allocated)} is "
        f"allocated by PyTorch, and {_size_text(reserved - allocated)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _size_text(count: int) -> str:
    """Return a number of bytes as text, such as "2.00 MiB" (`format_size` in PyTorch)."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count > unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
