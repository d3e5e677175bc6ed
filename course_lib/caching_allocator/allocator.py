"""Simulation of PyTorch's rules for device memory, without a GPU: which bytes are reserved, split,
merged and released.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.13, and names in comments are
from that file. The simulation has one stream, no CUDA graphs and no private pools. Memory that
libraries request from CUDA directly (the context, NCCL) is not included. The simulation has one
setting of PYTORCH_CUDA_ALLOC_CONF, `expandable_segments`.
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

# Maps a storage's name to its block.
Live = dict[Hashable, "Block"]


@runtime_checkable
class Replayable(Protocol):
    """Protocol of an object that yields its own events, such as a `Trace`."""

    def allocations(self) -> Iterable[tuple]: ...


@dataclass(eq=False, slots=True)
class Block:
    """Memory that `allocate` returned for one storage."""

    address: int
    # The size is `requested_bytes`, rounded up, plus a rest that was not worth splitting off.
    size_bytes: int
    requested_bytes: int
    allocated: bool = True


class CachingAllocator:
    """Simulated CUDA caching allocator for one device and one stream.

    Args:
        capacity_bytes: Memory of the device without the bytes that other processes hold; None for
            no limit.
        expandable_segments: Whether each pool has one segment that grows page by page, instead of
            many segments.
        record_history: Whether to keep each event for `snapshot`, as
            `torch.cuda.memory._record_memory_history` does.

    Raises:
        ValueError: The capacity is smaller than the first segment.

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
        # Chunks of all blocks that are handed out.
        self._chunks: dict[Block, Chunk] = {}

    def allocate(self, size_bytes: int, frames: Sequence[Mapping] = ()) -> Block:
        """Return a block of memory for a storage. PyTorch's name is `malloc`.

        Args:
            size_bytes: Requested bytes; 0 takes no memory.
            frames: Call stack of the request, innermost frame first, for the viewer: `{"filename":
                ..., "line": ..., "name": ...}`.

        Raises:
            torch.OutOfMemoryError: The memory does not suffice, although all cached memory that can
                be released has been. The message is PyTorch's.
        """
        requested = whole("size_bytes", size_bytes, 0, of="bytes")
        if requested == 0:
            return Block(0, 0, 0)
        segments = self._segments
        size = round_up(requested, MIN_BLOCK_BYTES)  # `round_size`
        chunk = segments.take(size, frames)
        if chunk is None:
            segments.statistics.counts["num_ooms"] += 1
            segments.record("oom", segments.free_bytes, size, frames)
            raise OutOfMemoryError(_out_of_memory(segments, size))
        chunk.requested, chunk.frames, chunk.allocated = requested, frames, True
        segments.record("alloc", chunk.address, requested, frames)
        segments.count_block(chunk, 1)
        block = Block(chunk.address, chunk.size, requested)
        self._chunks[block] = chunk
        return block

    def free(self, block: Block) -> None:
        """Release a block. It is merged with its free neighbors and stays cached. PyTorch's names
        are `free` and `free_block`.

        Raises:
            ValueError: The block was released before, or belongs to another allocator.
        """
        kind("block", block, Block, "a block that allocate returned")
        named = f"the block of {block.size_bytes} bytes at {block.address:#x}"
        if not block.allocated:
            raise ValueError(f"{named} was freed already")
        if block.requested_bytes and block not in self._chunks:
            raise ValueError(
                f"{named} was not allocated by this allocator; free() needs a block that its"
                " allocate() returned"
            )
        block.allocated = False
        if block.requested_bytes == 0:
            return
        chunk = self._chunks.pop(block)
        for action in ("free_requested", "free_completed"):  # with one stream, both happen at once
            self._segments.record(action, chunk.address, chunk.requested, chunk.frames)
        self._segments.count_block(chunk, -1)
        chunk.requested, chunk.frames, chunk.allocated = 0, (), False
        self._segments.give_back(chunk)

    def replay(self, events: Replayable | Iterable[tuple], live: Live | None = None) -> Live:
        """Allocate and release storages as the events say. Return a dict of the blocks that are
        still allocated, by storage.

        Args:
            events: A `Trace`, or tuples ("birth" or "release", storage, bytes) in order. A storage
                is identified by any hashable value. A birth may have a fourth item, the frames.
            live: Dict that an earlier replay returned, from which this one continues. It is updated
                in place.

        Raises:
            torch.OutOfMemoryError: The memory does not suffice, as in `allocate`. The events before
                that one have been replayed.
            ValueError: An event has another kind, or a storage is born twice or released before it
                was born.
        """
        live = {} if live is None else live
        if isinstance(events, Replayable):
            events = events.allocations()
        for number, (what, storage, size_bytes, *frames) in enumerate(events):
            if what not in ("birth", "release"):
                raise ValueError(f"event {number} must be 'birth' or 'release', got {what!r}")
            if (what == "birth") == (storage in live):
                verb, state = ("allocates", "already") if what == "birth" else ("releases", "not")
                raise ValueError(
                    f"event {number} {verb} storage {storage!r}, which is {state} allocated"
                )
            if what == "birth":
                live[storage] = self.allocate(size_bytes, *frames)
            else:
                self.free(live.pop(storage))
        return live

    def empty_cache(self) -> None:
        """Release each cached segment, and each free page of an expandable segment. PyTorch's name
        is `emptyCache`."""
        self._segments.release_cached()

    def memory_stats(self) -> dict[str, int]:
        """Return the figures by their names in `torch.cuda.memory_stats`, such as
        "reserved_bytes.all.peak"."""
        return self._segments.statistics.as_dict()

    def reset_peak_memory_stats(self) -> None:
        """Reset the peaks. Each peak is then the largest value since this call."""
        for statistic in self._segments.statistics.values():
            statistic.peak = statistic.current

    def snapshot(self) -> dict:
        """Return a snapshot in the form of `torch.cuda.memory._snapshot`: segments, their blocks,
        and recorded history."""
        return snapshot_of(self._segments, self._chunks.values())

    def save_snapshot(self, path) -> None:
        """Write the snapshot for pytorch.org/memory_viz, as `torch.cuda.memory._dump_snapshot`
        does."""
        save_snapshot(self.snapshot(), path)


def _out_of_memory(of: Segments, size: int) -> str:
    """Return PyTorch's out-of-memory message, in the form that it has without NVML. With NVML, the
    message also reports the memory of each process."""
    wanted, free, total = map(_size, (of.segment_bytes(size), of.free_bytes, of.total_bytes))
    reserved = of.statistics["reserved_bytes.all"].current
    allocated = of.statistics["allocated_bytes.all"].current
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of {total} "
        f"of which {free} is free. Of the allocated memory {_size(allocated)} is "
        f"allocated by PyTorch, and {_size(reserved - allocated)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _size(count: int) -> str:
    """Return a number of bytes as text. PyTorch's name is `format_size`."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count > unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
