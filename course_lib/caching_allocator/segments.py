"""Segments of the caching allocator: how memory is reserved, split, merged and released.

A segment is memory that PyTorch requests from CUDA. A chunk is a part of a segment. The rules are
these:

- A requested size is rounded up to a multiple of 512 bytes. A block of up to 1 MiB comes from the
  small pool, and a larger one from the large pool.
- The smallest free chunk that is large enough is used. It is split if at least 512 bytes remain
  in the small pool, or more than 1 MiB in the large pool.
- If there is no such chunk, a segment is requested from CUDA. In the small pool the segment has
  2 MiB. In the large pool it has 20 MiB for a block below 10 MiB, and otherwise the size of the
  block, rounded up to a multiple of 2 MiB. With expandable segments, pages of 2 MiB (small pool) or
  20 MiB (large pool) are mapped instead. They are mapped to the lowest range of free addresses that
  is large enough.
- Freed chunks are merged with their free neighbors and stay reserved.
- If CUDA has no memory left, all segments that are free as a whole are released to CUDA, and the
  request is repeated.

Other settings of PYTORCH_CUDA_ALLOC_CONF than `expandable_segments` are not simulated.

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13. Names in parentheses in the docstrings below
are those of this file. `tests/tools/real_allocator.py` runs the same steps with PyTorch's compiled
code.
"""

from __future__ import annotations

from .device_memory import Chunk, Pool, Statistics

MIB = 1 << 20
# kMinBlockSize: every block size is a multiple of this number.
MIN_BLOCK_BYTES = 512
# kSmallSize: blocks up to this size come from the small pool.
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
# large_segment_size_ (until torch 2.9, kLargeBuffer): size of a segment of the large pool for a
# request below MIN_LARGE_BYTES.
LARGE_SEGMENT_BYTES = 20 * MIB
# kMinLargeAlloc: a new segment for a request of at least this size has the size of the request,
# rounded up.
MIN_LARGE_BYTES = 10 * MIB
# kRoundLarge: the size of a segment for a request of MIN_LARGE_BYTES or more is a multiple of this.
ROUND_LARGE_BYTES = 2 * MIB

# The first segment begins at this address, as on Linux. The simulation would work with any other
# address.
FIRST_ADDRESS = 0x7F00_0000_0000
# Size of a device if no capacity is given: 256 TiB, the size of a 48-bit address space.
ENDLESS_BYTES = 1 << 48


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


class Segments:
    """Memory that the allocator has reserved on a device, with pools for small and large blocks.

    A segment is memory that is reserved from CUDA, and a chunk is a part of a segment. This is the
    base class of `CudaMalloc`, whose segments have a fixed size, and of `ExpandableSegments`, whose
    segments grow. A subclass defines how a free chunk is chosen (`_best_fit`), and how memory is
    reserved (`_reserve`) and released (`_release_free`).

    Args:
        capacity_bytes: Memory of the device in bytes; None for no limit.
        history: List to which events are appended; None if events are not recorded.

    Attributes:
        statistics: Statistics of `torch.cuda.memory_stats`.
        small, large: The two pools, which contain the free chunks.
        total_bytes: Memory of the device in bytes; 256 TiB if there is no limit.
        history: List of events (action, address, size, frames); None if events are not recorded. An
            event "oom" has the number of free bytes on the device instead of an address.
    """

    def __init__(self, capacity_bytes: int | None, history: list | None):
        self.history = history
        self.statistics = Statistics()
        self.small = Pool("small_pool", SMALL_SEGMENT_BYTES)
        self.large = Pool("large_pool", LARGE_SEGMENT_BYTES)
        self.total_bytes = ENDLESS_BYTES if capacity_bytes is None else capacity_bytes
        self._address = FIRST_ADDRESS
        self._segments_made = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that the allocator has not reserved (`cudaMemGetInfo` in CUDA)."""
        return self.total_bytes - self.statistics["reserved_bytes.all"].current

    def segment_bytes(self, size: int) -> int:
        """Return the size in bytes of a new segment for a block of `size` bytes.

        This is `get_allocation_size` in PyTorch.
        """
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return LARGE_SEGMENT_BYTES
        return round_up(size, ROUND_LARGE_BYTES)

    def malloc(self, size: int, frames=()) -> Chunk | None:
        """Return a chunk for a block of `size` bytes, or None if the device is full.

        A chunk is a part of a segment. If a free chunk is large enough, the result is this chunk or
        a part of it. Otherwise new memory is reserved. This is `malloc` in PyTorch.

        Args:
            size: Bytes of the block, a multiple of 512.
            frames: Call stack of the request.
        """
        pool = self.small if size <= SMALL_BYTES else self.large
        chunk = self._take_free_chunk(pool, size) or self._reserve_with_retry(pool, size, frames)
        return chunk and self._split_to_size(chunk, size)

    def free(self, chunk: Chunk) -> None:
        """Merge a freed chunk with its free neighbors, and add it to the free chunks of its pool.

        This is `free_block` in PyTorch.
        """
        merged = [size for size in map(chunk.merge, (chunk.previous, chunk.next)) if size]
        chunk.pool.insert(chunk)
        if not chunk.expandable:
            self.statistics.add("inactive_split", chunk.pool, chunk.is_split - len(merged))
            split_bytes = chunk.size if chunk.is_split else 0
            self.statistics.add("inactive_split_bytes", chunk.pool, split_bytes - sum(merged))

    def count_block(self, chunk: Chunk, sign: int) -> None:
        """Update the statistics for a block that was allocated or freed.

        Args:
            chunk: The part of a segment that contains the block.
            sign: 1 for an allocated block, -1 for a freed one.
        """
        for name, change in (
            ("allocation", 1),
            ("allocated_bytes", chunk.size),
            ("active", 1),  # with one stream, active and allocated blocks are the same
            ("active_bytes", chunk.size),
            ("requested_bytes", chunk.requested),
        ):
            self.statistics.add(name, chunk.pool, sign * change)

    def record(self, action: str, address: int, size: int, frames=()) -> None:
        """Append an event to `history`, or do nothing if events are not recorded.

        Args:
            action: Name of the event, such as "alloc".
            address: First address of the memory; for "oom", the number of free bytes on the device.
            size: Size of the memory in bytes.
            frames: Call stack of the request.
        """
        if self.history is not None:
            self.history.append((action, address, size, frames))

    def release_cached(self) -> None:
        """Release all free segments and pages to the device.

        This is `release_cached_blocks` in PyTorch.
        """
        self.statistics.counters["num_sync_all_streams"] += 1
        for pool in (self.large, self.small):
            self._release_free(pool)

    # ---- steps of `malloc`

    def _take_free_chunk(self, pool: Pool, size: int) -> Chunk | None:
        """Remove the best free chunk for a block from `pool` and return it (`get_free_block`).

        The result is None if no free chunk has at least `size` bytes.
        """
        index = self._best_fit(pool, size)
        if index == len(pool.free):
            return None
        chunk = pool.free[index][-1]
        pool.remove(chunk)
        return chunk

    def _reserve_with_retry(self, pool: Pool, size: int, frames) -> Chunk | None:
        """Reserve new memory for a block and return it as a chunk.

        If the device is full, cached memory is released and the request is repeated. The result is
        None if there is still too little memory.
        """
        chunk = self._reserve(pool, size, frames)
        if chunk is None:
            self.release_cached()
            self.statistics.counters["num_alloc_retries"] += 1
            chunk = self._reserve(pool, size, frames)
        return chunk

    def _split_to_size(self, chunk: Chunk, size: int) -> Chunk:
        """Split a chunk if the remainder is large enough, and return the chunk for the block.

        The remainder is put into the pool. This is `alloc_found_block` in PyTorch.
        """
        was_split, pool = chunk.is_split, chunk.pool
        if not self._worth_splitting(chunk, size):
            if was_split and not chunk.expandable:
                self.statistics.add("inactive_split", pool, -1)
                self.statistics.add("inactive_split_bytes", pool, -chunk.size)
            return chunk
        front = chunk.split_off(size)
        pool.insert(chunk)
        if not chunk.expandable:
            self.statistics.add("inactive_split", pool, 0 if was_split else 1)
            self.statistics.add("inactive_split_bytes", pool, -size if was_split else chunk.size)
        return front

    def _worth_splitting(self, chunk: Chunk, size: int) -> bool:
        """Return whether a chunk is split when it is used for a block of `size` bytes.

        This is `should_split` in PyTorch.
        """
        if chunk.pool is self.small or chunk.expandable:
            return chunk.size - size >= MIN_BLOCK_BYTES
        return chunk.size - size > SMALL_BYTES

    def _count_reserved(self, action: str, pool: Pool, address: int, size: int, frames) -> None:
        """Update statistics and history for memory that was reserved or released.

        Args:
            action: Name of the event in the history.
            pool: Pool of the memory.
            address: First address of the memory.
            size: Bytes; positive for reserved memory, negative for released memory.
            frames: Call stack of the request.
        """
        self.statistics.add("reserved_bytes", pool, size)
        self.statistics.counters["num_device_alloc" if size > 0 else "num_device_free"] += 1
        self.record(action, address, abs(size), frames)


class CudaMalloc(Segments):
    """Segments of fixed size, each reserved by one call of `cudaMalloc`.

    A segment can be released only when all of it is free.
    """

    def _best_fit(self, pool: Pool, size: int) -> int:
        """Return the index in `pool.free` of the smallest chunk with at least `size` bytes."""
        return pool.index_of_size(size)

    def _reserve(self, pool: Pool, size: int, frames) -> Chunk | None:
        """Reserve a new segment and return it as one chunk, or None if the device is full."""
        size = self.segment_bytes(size)
        if size > self.free_bytes:
            return None
        chunk = Chunk(pool, self._segments_made, self._address, size, expandable=False)
        chunk.segment_frames = frames
        self._segments_made += 1
        self._address += size
        self.statistics.add("segment", pool, 1)
        self._count_reserved("segment_alloc", pool, chunk.address, size, frames)
        return chunk

    def _release(self, chunk: Chunk) -> None:
        """Release a segment, which is the single chunk `chunk`, to CUDA (`release_block`)."""
        chunk.pool.remove(chunk)
        self.statistics.add("segment", chunk.pool, -1)
        self._count_reserved(
            "segment_free", chunk.pool, chunk.address, -chunk.size, chunk.segment_frames
        )

    def _release_free(self, pool: Pool) -> None:
        """Release those segments of a pool that contain no allocated block."""
        for chunk in [chunk for *_, chunk in pool.free if not chunk.is_split]:
            self._release(chunk)


class ExpandableSegments(Segments):
    """Segments that grow page by page, usually one per pool.

    A segment reserves more addresses than the device has bytes of memory. Pages of memory are
    mapped to addresses when a block needs them.
    """

    def _best_fit(self, pool: Pool, size: int) -> int:
        """Return the index in `pool.free` of the chunk to use for a block of `size` bytes.

        A chunk that can grow counts with the size that it could reach. Therefore chunks that cannot
        grow are used first.
        """
        index = pool.index_of_size(size)
        last = len(pool.free) - 1
        while index < last and _largest_possible_size(
            pool.free[index + 1]
        ) < _largest_possible_size(pool.free[index]):
            index += 1
        return index

    def _reserve(self, pool: Pool, size: int, frames) -> Chunk | None:
        """Map memory for a chunk of at least `size` bytes and return the chunk.

        The result is None if the device has too little memory. Pages that were mapped before the
        memory ran out stay mapped. This is `try_allocate_expandable_block` in PyTorch.
        """
        chunk = self._find_addresses(pool, size)
        if not chunk.mapped:
            chunk = self._map(chunk, min(chunk.size, size), frames)
        while chunk is not None and chunk.size < size:
            chunk = self._map(chunk.next, min(size - chunk.size, chunk.next.size), frames)
        if chunk is not None:
            pool.remove(chunk)
        return chunk

    def _find_addresses(self, pool: Pool, size: int) -> Chunk:
        """Return the first chunk of the lowest range of free addresses with at least `size` bytes.

        The chunks of the range may be mapped or not. If there is no such range, a new segment is
        made. This is `find_expandable_block` in PyTorch.
        """
        for _, chunk in pool.unmapped:
            previous = chunk.previous
            first = chunk if previous is None or previous.allocated else previous
            found_bytes, last = 0, first
            while found_bytes < size and last is not None and not last.allocated:
                found_bytes, last = found_bytes + last.size, last.next
            if found_bytes >= size:
                return first
        page = pool.page_bytes
        address = round_up(self._address, page)
        # As in PyTorch, the segment's addresses span 9/8 of the device's memory.
        size = round_up(self.total_bytes + self.total_bytes // 8, page)
        chunk = Chunk(pool, self._segments_made, address, size, expandable=True)
        self._segments_made += 1
        self._address = address + chunk.size
        pool.insert(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int, frames) -> Chunk | None:
        """Map whole pages to the first `size` bytes of an unmapped chunk (`map_block`).

        Returns:
            The mapped chunk, merged with mapped free neighbors; None if the device has too little
            memory.
        """
        pool = chunk.pool
        size = round_up(size, pool.page_bytes)
        if size > self.free_bytes:
            return None
        pool.remove(chunk)
        address = chunk.address
        if size < chunk.size:
            front = chunk.split_off(size)
            pool.insert(chunk)
            chunk = front
        chunk.mapped = True
        if chunk.previous is None:
            chunk.segment_frames = frames
        chunk.merge(chunk.previous)
        chunk.merge(chunk.next)
        pool.insert(chunk)
        self._count_reserved("segment_map", pool, address, size, frames)
        return chunk

    def _release_free(self, pool: Pool) -> None:
        """Unmap the free pages of a pool's segment."""
        for *_, chunk in list(pool.free):
            self._unmap(chunk)

    def _unmap(self, chunk: Chunk) -> None:
        """Unmap the pages that lie completely within a free chunk (`unmap_block`)."""
        pool, page = chunk.pool, chunk.pool.page_bytes
        first, last = round_up(chunk.address, page), (chunk.address + chunk.size) // page * page
        if first >= last:
            return
        pool.remove(chunk)
        frames = chunk.segment_frames
        if first > chunk.address:
            pool.insert(chunk.split_off(first - chunk.address))
        if last < chunk.address + chunk.size:
            rest, chunk = chunk, chunk.split_off(last - first)
            pool.insert(rest)
        chunk.mapped = False
        chunk.merge(chunk.previous)
        chunk.merge(chunk.next)
        # If the chunk is the whole segment, the segment is released (`release_expandable_segment`).
        if chunk.is_split:
            pool.insert(chunk)
        self._count_reserved("segment_unmap", pool, first, first - last, frames)


def _largest_possible_size(entry: tuple) -> int:
    """Return the size in bytes that a free chunk can reach.

    A chunk can grow if unmapped addresses follow it. Otherwise, the result is its present size.

    Args:
        entry: Item of `Pool.free`.
    """
    chunk = entry[-1]
    return chunk.size + (chunk.next.size if chunk.next is not None and not chunk.next.mapped else 0)
