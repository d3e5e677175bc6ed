"""Segments of the caching allocator: how it gets, cuts, joins and gives back memory.

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13, whose names stand in the docstrings below.

- A size is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, else from the large.
- The smallest free chunk that holds it is taken, whole or cut: in the small pool if 512 bytes are
  left, in the large one if more than 1 MiB is.
- If there is none, CUDA is asked for a segment: 2 MiB, 20 MiB, or from 10 MiB on the size itself,
  rounded up to 2 MiB. With expandable segments, for pages of 2 or 20 MiB behind the last one.
- What is freed joins its free neighbours and stays reserved.
- If CUDA has no more, all segments that are free as a whole go back to it, and it is asked again.
- With `max_split_size_mb`, larger blocks are not cut, nor given to smaller requests, nor to those
  that they exceed by 20 MiB; on a full device they go first, and only as many as it takes.

tests/real_allocator.py has PyTorch's compiled code do the same, step by step.
"""

from __future__ import annotations

from .allocator_settings import (
    LARGE_SEGMENT_BYTES,
    MIB,
    MIN_BLOCK_BYTES,
    AllocatorSettings,
    round_up,
)
from .device_memory import Chunk, Pool, Statistics

SMALL_BYTES = MIB  # kSmallSize: blocks up to this come from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request has a segment of its own ...
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: ... of whole 2 MiB

FIRST_ADDRESS = 0x7F00_0000_0000  # as on Linux; any would do
ENDLESS_BYTES = 1 << 48  # a device of no stated capacity: "there is 256TiB of address space"


class Segments:
    """Base of both kinds; a device's two pools, and what was reserved for them.

    Attributes:
        total_bytes: of the device.
        allowed_bytes: what the process may reserve of it, or None (`allowed_memory_maximum`).
        history: (action, address or bytes free, size, frames) of all that happened, or None.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None,
        history: list | None,
    ):
        self.settings = settings
        self.history = history
        self.statistics = Statistics()
        self.small = Pool("small_pool", SMALL_SEGMENT_BYTES)
        self.large = Pool("large_pool", settings.large_segment_bytes)
        self.total_bytes = ENDLESS_BYTES if capacity_bytes is None else capacity_bytes
        fraction = settings.memory_fraction
        self.allowed_bytes = None if fraction == 1 else int(fraction * self.total_bytes)
        self._unsplit = settings.max_split_size_bytes  # blocks from here on are not split
        threshold = settings.garbage_collection_threshold
        self._collects = threshold is not None and self.allowed_bytes is not None
        self._address = FIRST_ADDRESS
        self._segments_made = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that the device has left (`cudaMemGetInfo`)."""
        return self.total_bytes - self.statistics["reserved_bytes.all"].current

    def segment_bytes(self, size: int) -> int:
        """Bytes that are asked of CUDA for a block of this size (`get_allocation_size`)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.settings.large_segment_bytes
        return round_up(size, ROUND_LARGE_BYTES)

    def take(self, size: int, frames=()) -> Chunk | None:
        """A chunk for a block of this size, or None: the device is full (`malloc`)."""
        pool = self.small if size <= SMALL_BYTES else self.large
        chunk = self._find(pool, size) or self._reserve_for(pool, size, frames)
        return chunk and self._fit(chunk, size)

    def give_back(self, chunk: Chunk) -> None:
        """The chunk is free: it joins its free neighbours and waits in its pool (`free_block`)."""
        joined = [size for size in map(chunk.absorb, (chunk.before, chunk.next)) if size]
        chunk.pool.insert(chunk)
        if not chunk.expandable:
            self.statistics.add("inactive_split", chunk.pool, chunk.split - len(joined))
            kept = chunk.size if chunk.split else 0
            self.statistics.add("inactive_split_bytes", chunk.pool, kept - sum(joined))

    def count_block(self, chunk: Chunk, sign: int) -> None:
        """A block was handed out (1) or came back (-1)."""
        for name, amount in (
            ("allocation", 1),
            ("allocated_bytes", chunk.size),
            ("active", 1),  # with one stream, what is allocated is active, and nothing else
            ("active_bytes", chunk.size),
            ("requested_bytes", chunk.requested),
        ):
            self.statistics.add(name, chunk.pool, sign * amount)
        if self._is_oversize(chunk.size):
            self.statistics["oversize_allocations"].add(sign)

    def record(self, action: str, address: int, size: int, frames=()) -> None:
        if self.history is not None:
            self.history.append((action, address, size, frames))

    def release_cached(self) -> None:
        """All cached memory that can be given back is (`release_cached_blocks`)."""
        self.statistics.counts["num_sync_all_streams"] += 1
        for pool in (self.large, self.small):
            self._release_free(pool)

    # ---- of `take`

    def _find(self, pool: Pool, size: int) -> Chunk | None:
        """The smallest free chunk that is large enough (`get_free_block`)."""
        if self._collects:
            pool.searches += 1
        index = self._best_fit(pool, size)
        if index == len(pool.free):
            return None
        chunk = pool.free[index][-1]
        if self._unsplit is not None:
            if size < self._unsplit <= chunk.size:
                return None  # it is kept for those who need nearly all of it
            rounding = self.settings.max_non_split_rounding_bytes or LARGE_SEGMENT_BYTES
            if size >= self._unsplit and chunk.size >= size + rounding:
                return None
        pool.remove(chunk)
        return chunk

    def _reserve_for(self, pool: Pool, size: int, frames) -> Chunk | None:
        """New memory; on a full device, after cached memory was given back."""
        if self._collects:
            self._collect_garbage()
        chunk = self._reserve(pool, size, frames)
        if chunk is None and self._release_oversize(pool, size):
            chunk = self._reserve(pool, size, frames)
        if chunk is None:
            self.release_cached()
            self.statistics.counts["num_alloc_retries"] += 1
            chunk = self._reserve(pool, size, frames)
        return chunk

    def _reserve(self, pool: Pool, size: int, frames) -> Chunk | None:
        """New memory, if what is allowed and what is there suffices (`alloc_block`)."""
        reserved = self.statistics["reserved_bytes.all"].current
        allowed = self.allowed_bytes
        if allowed is not None and reserved + self.segment_bytes(size) > allowed:
            return None
        return self._more(pool, size, frames)

    def _fit(self, chunk: Chunk, size: int) -> Chunk:
        """Cut off what is worth keeping (`alloc_found_block`)."""
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
        """`should_split`"""
        if chunk.pool is self.small or chunk.expandable:
            return chunk.size - size >= MIN_BLOCK_BYTES
        return (self._unsplit is None or size < self._unsplit) and chunk.size - size > SMALL_BYTES

    def _is_oversize(self, size: int) -> bool:
        return self._unsplit is not None and size >= self._unsplit

    def _reserved(self, action: str, pool: Pool, address: int, size: int, frames) -> None:
        """Count and record memory that came from CUDA (`size` above 0) or went back to it."""
        self.statistics.add("reserved_bytes", pool, size)
        self.statistics.counts["num_device_alloc" if size > 0 else "num_device_free"] += 1
        self.record(action, address, abs(size), frames)


class CudaMalloc(Segments):
    """Many segments, each from one `cudaMalloc`; one goes back when all of it is free."""

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
        self._count_segment(chunk, 1)
        self._reserved("segment_alloc", pool, chunk.address, size, frames)
        return chunk

    def _release(self, chunk: Chunk) -> None:
        """`release_block`"""
        chunk.pool.remove(chunk)
        self._count_segment(chunk, -1)
        self._reserved("segment_free", chunk.pool, chunk.address, -chunk.size, chunk.segment_frames)

    def _count_segment(self, chunk: Chunk, sign: int) -> None:
        self.statistics.add("segment", chunk.pool, sign)
        if self._is_oversize(chunk.size):
            self.statistics["oversize_segments"].add(sign)

    def _release_free(self, pool: Pool) -> None:
        for chunk in [chunk for *_, chunk in pool.free if not chunk.split]:
            self._release(chunk)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release, only with a limit to splitting, one oversize block that suffices, or the largest
        ones until they do.

        Source: `release_available_cached_blocks`.
        """
        if self._unsplit is None:
            return False
        index = pool.first_of(size)
        if index < len(pool.free):  # it is oversize, or it would have been taken
            self._release(pool.free[index][-1])
            return True
        released = 0
        while released < size and pool.free and self._is_oversize(pool.free[-1][0]):
            released += pool.free[-1][0]
            self._release(pool.free[-1][-1])
        return released >= size

    def _collect_garbage(self) -> None:
        """Release, above the threshold, whole large segments that lay idle for longer than others.

        Source: `garbage_collect_cached_blocks`. Age is counted in searches of the pool.
        """
        threshold = int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        target = self.statistics["reserved_bytes.all"].current - threshold
        whole = [chunk for *_, chunk in self.large.free if not chunk.split]
        reclaimed = 0
        while whole and reclaimed < target:
            ages = {chunk: self.large.searches - chunk.free_since for chunk in whole}
            total = sum(ages.values())
            kept = []
            # All of at least the mean age go, even if fewer would do: it is to be rarely needed.
            for chunk in whole:
                if ages[chunk] * len(whole) >= total:
                    reclaimed += chunk.size
                    self._release(chunk)
                else:
                    kept.append(chunk)
            whole = kept


class ExpandableSegments(Segments):
    """One segment per pool, of more addresses than the device has memory, which is put behind them
    page by page.
    """

    def _best_fit(self, pool: Pool, size: int) -> int:
        """A chunk that could grow counts as large as it could become: others are used up first."""
        index = pool.first_of(size)
        last = len(pool.free) - 1
        while index < last and _could_be(pool.free[index + 1]) < _could_be(pool.free[index]):
            index += 1
        return index

    def _more(self, pool: Pool, size: int, frames) -> Chunk | None:
        """`try_allocate_expandable_block`; what was mapped before memory ran out stays."""
        chunk = self._room(pool, size)
        if not chunk.mapped:
            chunk = self._map(chunk, min(chunk.size, size), frames)
        while chunk is not None and chunk.size < size:
            chunk = self._map(chunk.next, min(size - chunk.size, chunk.next.size), frames)
        if chunk is not None:
            pool.remove(chunk)
        return chunk

    def _room(self, pool: Pool, size: int) -> Chunk:
        """The lowest free addresses that suffice, mapped or not (`find_expandable_block`)."""
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
        size = round_up(self.total_bytes + self.total_bytes // 8, page)  # "1 1/8 the total memory"
        chunk = Chunk(pool, self._segments_made, address, size, expandable=True)
        self._segments_made += 1
        self._address = address + chunk.size
        pool.insert(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int, frames) -> Chunk | None:
        """Put memory behind the first `size` bytes, in whole pages; None if there is too little.

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
        self._reserved("segment_map", pool, address, size, frames)
        return chunk

    def _release_free(self, pool: Pool) -> None:
        for *_, chunk in list(pool.free):
            self._unmap(chunk)

    def _unmap(self, chunk: Chunk) -> None:
        """Take away the memory of the pages that lie within a free chunk (`unmap_block`)."""
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
        if chunk.split:  # else the whole segment is given up (`release_expandable_segment`)
            pool.insert(chunk)
        self._reserved("segment_unmap", pool, first, first - last, frames)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        return False  # expandable chunks are skipped there

    def _collect_garbage(self) -> None:
        pass  # as they are there


def _could_be(of: tuple) -> int:
    chunk = of[-1]
    return chunk.size + (chunk.next.size if chunk.next is not None and not chunk.next.mapped else 0)
