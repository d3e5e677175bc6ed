"""Segments of the caching allocator: how memory is reserved, split, merged and released.

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13. The docstrings below give the names that this
file uses.

- A size is rounded up to a multiple of 512 bytes. Up to 1 MiB it comes from the small pool, and
  otherwise from the large pool.
- The smallest free chunk that is large enough is taken. It is split if at least 512 bytes remain
  in the small pool, or more than 1 MiB in the large pool.
- If there is no such chunk, a segment is requested from CUDA: 2 MiB for the small pool, 20 MiB for
  sizes below 10 MiB, and otherwise the size rounded up to a multiple of 2 MiB. With expandable
  segments, pages of 2 MiB (small pool) or 20 MiB (large pool) are mapped instead, at the lowest
  free addresses of the segment that suffice.
- Freed chunks are merged with their free neighbors and stay reserved.
- If CUDA has no memory left, all segments that are free as a whole are released to CUDA, and the
  request is repeated.

Other settings of PYTORCH_CUDA_ALLOC_CONF than `expandable_segments` are not simulated.

tests/real_allocator.py runs the same steps with PyTorch's compiled code.
"""

from __future__ import annotations

from .device_memory import Chunk, Pool, Statistics

MIB = 1 << 20
# kMinBlockSize: every block size is a multiple of it.
MIN_BLOCK_BYTES = 512
# kSmallSize: blocks up to this size come from the small pool.
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
# This is large_segment_size_ in the source, and kLargeBuffer until 2.9.
LARGE_SEGMENT_BYTES = 20 * MIB
# kMinLargeAlloc: a request of at least this size has its own segment.
MIN_LARGE_BYTES = 10 * MIB
# kRoundLarge: the size of that segment is a multiple of this.
ROUND_LARGE_BYTES = 2 * MIB

# Segments begin at this address, as on Linux. Any other address would do.
FIRST_ADDRESS = 0x7F00_0000_0000
# Size of a device without a given capacity: "there is 256TiB of address space".
ENDLESS_BYTES = 1 << 48


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


class Segments:
    """Base class of both kinds of segments. It holds a device's two pools and the memory that is
    reserved for them.

    Attributes:
        total_bytes: Memory of the device.
        history: List of (action, address or free bytes, size, frames) of all events, or None if
            events are not recorded.
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
        """Bytes of the device that are not reserved (`cudaMemGetInfo`)."""
        return self.total_bytes - self.statistics["reserved_bytes.all"].current

    def segment_bytes(self, size: int) -> int:
        """Return the size of the segment that is requested from CUDA for a block of this size
        (`get_allocation_size`)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return LARGE_SEGMENT_BYTES
        return round_up(size, ROUND_LARGE_BYTES)

    def take(self, size: int, frames=()) -> Chunk | None:
        """Return a chunk for a block of this size, or None if the device is full (`malloc`)."""
        pool = self.small if size <= SMALL_BYTES else self.large
        chunk = self._find(pool, size) or self._reserve_for(pool, size, frames)
        return chunk and self._fit(chunk, size)

    def give_back(self, chunk: Chunk) -> None:
        """Free a chunk: merge it with its free neighbors and put it into its pool
        (`free_block`)."""
        joined = [size for size in map(chunk.absorb, (chunk.before, chunk.next)) if size]
        chunk.pool.insert(chunk)
        if not chunk.expandable:
            self.statistics.add("inactive_split", chunk.pool, chunk.split - len(joined))
            kept = chunk.size if chunk.split else 0
            self.statistics.add("inactive_split_bytes", chunk.pool, kept - sum(joined))

    def count_block(self, chunk: Chunk, sign: int) -> None:
        """Count a block that was handed out (`sign` is 1) or released (`sign` is -1)."""
        for name, amount in (
            ("allocation", 1),
            ("allocated_bytes", chunk.size),
            ("active", 1),  # with one stream, active and allocated blocks are the same
            ("active_bytes", chunk.size),
            ("requested_bytes", chunk.requested),
        ):
            self.statistics.add(name, chunk.pool, sign * amount)

    def record(self, action: str, address: int, size: int, frames=()) -> None:
        if self.history is not None:
            self.history.append((action, address, size, frames))

    def release_cached(self) -> None:
        """Release all cached memory that can be released (`release_cached_blocks`)."""
        self.statistics.counts["num_sync_all_streams"] += 1
        for pool in (self.large, self.small):
            self._release_free(pool)

    # ---- steps of `take`

    def _find(self, pool: Pool, size: int) -> Chunk | None:
        """Return the smallest free chunk that is large enough, or None (`get_free_block`)."""
        index = self._best_fit(pool, size)
        if index == len(pool.free):
            return None
        chunk = pool.free[index][-1]
        pool.remove(chunk)
        return chunk

    def _reserve_for(self, pool: Pool, size: int, frames) -> Chunk | None:
        """Return a chunk of new memory, or None. If the device is full, cached memory is released
        first."""
        chunk = self._more(pool, size, frames)
        if chunk is None:
            self.release_cached()
            self.statistics.counts["num_alloc_retries"] += 1
            chunk = self._more(pool, size, frames)
        return chunk

    def _fit(self, chunk: Chunk, size: int) -> Chunk:
        """Split off the rest of a chunk if it is worth keeping, and return the chunk for the block
        (`alloc_found_block`)."""
        was_split, pool = chunk.split, chunk.pool
        if not self._worth_splitting(chunk, size):
            if was_split and not chunk.expandable:
                self.statistics.add("inactive_split", pool, -1)
                self.statistics.add("inactive_split_bytes", pool, -chunk.size)
            return chunk
        front = chunk.cut(size)
        pool.insert(chunk)
        if not chunk.expandable:
            self.statistics.add("inactive_split", pool, 0 if was_split else 1)
            self.statistics.add("inactive_split_bytes", pool, -size if was_split else chunk.size)
        return front

    def _worth_splitting(self, chunk: Chunk, size: int) -> bool:
        """Return whether the rest of a chunk is worth splitting off (`should_split`)."""
        if chunk.pool is self.small or chunk.expandable:
            return chunk.size - size >= MIN_BLOCK_BYTES
        return chunk.size - size > SMALL_BYTES

    def _count_reserved(self, action: str, pool: Pool, address: int, size: int, frames) -> None:
        """Count and record memory that came from CUDA (`size` above 0) or went back to it."""
        self.statistics.add("reserved_bytes", pool, size)
        self.statistics.counts["num_device_alloc" if size > 0 else "num_device_free"] += 1
        self.record(action, address, abs(size), frames)


class CudaMalloc(Segments):
    """Many segments, each from one `cudaMalloc`. A segment can be released when all of it is
    free."""

    def _best_fit(self, pool: Pool, size: int) -> int:
        return pool.first_of(size)

    def _more(self, pool: Pool, size: int, frames) -> Chunk | None:
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
        """Release a segment to CUDA (`release_block`)."""
        chunk.pool.remove(chunk)
        self.statistics.add("segment", chunk.pool, -1)
        self._count_reserved(
            "segment_free", chunk.pool, chunk.address, -chunk.size, chunk.segment_frames
        )

    def _release_free(self, pool: Pool) -> None:
        for chunk in [chunk for *_, chunk in pool.free if not chunk.split]:
            self._release(chunk)


class ExpandableSegments(Segments):
    """One segment per pool, with more addresses than the device has memory. Memory is mapped to the
    addresses page by page."""

    def _best_fit(self, pool: Pool, size: int) -> int:
        """Return the index in `free` of the chunk to use. A chunk that can grow counts with the
        size that it could reach, so that chunks that cannot grow are used first."""
        index = pool.first_of(size)
        last = len(pool.free) - 1
        while index < last and _could_be(pool.free[index + 1]) < _could_be(pool.free[index]):
            index += 1
        return index

    def _more(self, pool: Pool, size: int, frames) -> Chunk | None:
        """Map memory for a chunk of this size and return the chunk, or None
        (`try_allocate_expandable_block`). If memory runs out, pages that are already mapped stay
        mapped."""
        chunk = self._room(pool, size)
        if not chunk.mapped:
            chunk = self._map(chunk, min(chunk.size, size), frames)
        while chunk is not None and chunk.size < size:
            chunk = self._map(chunk.next, min(size - chunk.size, chunk.next.size), frames)
        if chunk is not None:
            pool.remove(chunk)
        return chunk

    def _room(self, pool: Pool, size: int) -> Chunk:
        """Return the chunk at the lowest free addresses that suffice, mapped or not
        (`find_expandable_block`)."""
        for _, chunk in pool.unmapped:
            before = chunk.before
            first = chunk if before is None or before.allocated else before
            room, last = 0, first
            while room < size and last is not None and not last.allocated:
                room, last = room + last.size, last.next
            if room >= size:
                return first
        page = pool.page_bytes
        address = round_up(self._address, page)
        # PyTorch reserves addresses for "1 1/8 the total memory".
        size = round_up(self.total_bytes + self.total_bytes // 8, page)
        chunk = Chunk(pool, self._segments_made, address, size, expandable=True)
        self._segments_made += 1
        self._address = address + chunk.size
        pool.insert(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int, frames) -> Chunk | None:
        """Map whole pages to the first `size` bytes of a chunk. Return the chunk, or None if the
        memory does not suffice.

        Source: `map_block`.
        """
        pool = chunk.pool
        size = round_up(size, pool.page_bytes)
        if size > self.free_bytes:
            return None
        pool.remove(chunk)
        address = chunk.address
        if size < chunk.size:
            front = chunk.cut(size)
            pool.insert(chunk)
            chunk = front
        chunk.mapped = True
        if chunk.before is None:
            chunk.segment_frames = frames
        chunk.absorb(chunk.before)
        chunk.absorb(chunk.next)
        pool.insert(chunk)
        self._count_reserved("segment_map", pool, address, size, frames)
        return chunk

    def _release_free(self, pool: Pool) -> None:
        for *_, chunk in list(pool.free):
            self._unmap(chunk)

    def _unmap(self, chunk: Chunk) -> None:
        """Unmap the pages that lie within a free chunk (`unmap_block`)."""
        pool, page = chunk.pool, chunk.pool.page_bytes
        first, last = round_up(chunk.address, page), (chunk.address + chunk.size) // page * page
        if first >= last:
            return
        pool.remove(chunk)
        frames = chunk.segment_frames
        if first > chunk.address:
            pool.insert(chunk.cut(first - chunk.address))
        if last < chunk.address + chunk.size:
            rest, chunk = chunk, chunk.cut(last - first)
            pool.insert(rest)
        chunk.mapped = False
        chunk.absorb(chunk.before)
        chunk.absorb(chunk.next)
        # If the chunk is the whole segment, the segment is released (`release_expandable_segment`).
        if chunk.split:
            pool.insert(chunk)
        self._count_reserved("segment_unmap", pool, first, first - last, frames)


def _could_be(of: tuple) -> int:
    chunk = of[-1]
    return chunk.size + (chunk.next.size if chunk.next is not None and not chunk.next.mapped else 0)
