"""Data structures of the simulated allocator: statistics, chunks of segments, and their pools."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence


class Statistic:
    """One quantity in `torch.cuda.memory_stats`, such as the reserved bytes of all pools.

    Attributes:
        current: The current value.
        peak: The largest value since the last reset of the peaks, or since the start if the peaks
            were never reset.
        allocated: Sum of all increases of the value.
        freed: Sum of all decreases of the value, as a positive number.
    """

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self):
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, change: int) -> None:
        """Change the value by a positive or negative number, and update the other attributes."""
        self.current += change
        if change > 0:
            self.allocated += change
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= change


class Statistics(dict):
    """Dict from a name such as "reserved_bytes.all" to its `Statistic`.

    Attributes:
        counters: Dict from the name of an event, such as "num_ooms", to the number of times that it
            has happened.
    """

    # Quantities that PyTorch counts per pool.
    POOL_STATISTICS = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    # These statistics count blocks that the setting `max_split_size_mb` keeps whole. They are
    # always zero, because the simulation has no such setting.
    ALWAYS_ZERO = ("oversize_allocations", "oversize_segments")
    COUNTERS = (
        "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
        "num_device_free",
    )  # fmt: skip

    def __init__(self):
        pools = ("all", "small_pool", "large_pool")
        names = [f"{name}.{pool}" for name in self.POOL_STATISTICS for pool in pools]
        super().__init__({name: Statistic() for name in (*names, *self.ALWAYS_ZERO)})
        # Maps (name, pool) to the statistic of this pool and the statistic of all pools.
        self._pool_and_total = {}
        for name in self.POOL_STATISTICS:
            for pool in pools[1:]:
                self._pool_and_total[name, pool] = self[f"{name}.{pool}"], self[f"{name}.all"]
        self.counters = dict.fromkeys(self.COUNTERS, 0)

    def add(self, name: str, pool: Pool, change: int) -> None:
        """Add a change to the statistic of one pool and to the statistic of all pools.

        Args:
            name: Name from `POOL_STATISTICS`, such as "reserved_bytes".
            pool: The pool in which the change took place.
            change: Positive or negative number of bytes, or of blocks or segments.
        """
        for statistic in self._pool_and_total[name, pool.name]:
            statistic.add(change)

    def as_dict(self) -> dict[str, int]:
        """Return all statistics and counters under their names in `torch.cuda.memory_stats`."""
        parts = ("current", "peak", "allocated", "freed")
        values = {f"{name}.{part}": getattr(self[name], part) for name in self for part in parts}
        return values | self.counters


class Chunk:
    """Contiguous part of a segment, which is either free or contains one block.

    A segment is memory that the allocator reserves from CUDA. A block is memory that the allocator
    has returned for one storage, and it fills a whole chunk. The chunks of a segment form a linked
    list in the order of their addresses.

    PyTorch's source code does not distinguish chunks from blocks. Its struct `Block` corresponds to
    this class, and represents free parts of a segment as well.

    Attributes:
        pool: Pool of the segment.
        segment: Number of the segment, counted from 0 in the order in which segments are made.
        address, size: First address, and size in bytes.
        expandable: Whether the segment is expandable, that is, grows page by page.
        mapped: Whether memory is mapped to the addresses; always True unless `expandable`.
        previous, next: Neighboring chunks in the segment; None at the ends of the segment.
        allocated: Whether the chunk contains a block.
        requested: Bytes that were requested for the block; 0 for a free chunk.
        frames: Call stack of the request for the block; empty for a free chunk.
        segment_frames: Call stack of the request for which the segment was made. Empty for all
            chunks of a segment except the first.
    """

    __slots__ = (
        "address", "allocated", "expandable", "frames", "mapped", "next",
        "pool", "previous", "requested", "segment", "segment_frames", "size",
    )  # fmt: skip

    def __init__(self, pool: Pool, segment: int, address: int, size: int, expandable: bool):
        self.pool, self.address, self.size = pool, address, size
        self.segment = segment
        self.expandable = expandable
        self.mapped = not expandable
        self.previous: Chunk | None = None
        self.next: Chunk | None = None
        self.allocated = False
        self.requested = 0
        self.frames: Sequence[Mapping] = ()
        self.segment_frames = ()

    @property
    def is_split(self) -> bool:
        """Whether the segment contains other chunks besides this one."""
        return self.previous is not None or self.next is not None

    def split_off(self, size: int) -> Chunk:
        """Split off the first `size` bytes of this chunk as a new chunk; return the new chunk."""
        front = Chunk(self.pool, self.segment, self.address, size, self.expandable)
        front.mapped = self.mapped
        front.segment_frames, self.segment_frames = self.segment_frames, ()
        front.previous, front.next, self.previous = self.previous, self, front
        if front.previous is not None:
            front.previous.next = front
        self.address += size
        self.size -= size
        return front

    def merge(self, other: Chunk | None) -> int:
        """Merge a neighboring chunk into this one, if possible.

        Merging is possible if the neighbor is free, and if memory is mapped to both chunks or to
        none of them.

        Args:
            other: Previous or next chunk; None at the end of the segment.

        Returns:
            The neighbor's size in bytes, or 0 if it was not merged.

        Source: `try_merge_blocks`.
        """
        if other is None or other.allocated or other.mapped is not self.mapped:
            return 0
        other.pool.remove(other)
        if other is self.previous:
            self.address, self.previous = other.address, other.previous
            self.segment_frames = other.segment_frames
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.previous = self
        self.size += other.size
        return other.size


class Pool:
    """Free chunks of the small or the large pool of reserved memory.

    A chunk is a part of a segment, and it is mapped if its addresses have memory. Mapped chunks are
    sorted by size, then by the age of their segment (oldest first), then by address. PyTorch sorts
    them in this way from torch 2.13 on (`BlockComparatorSizeCounterAddress`). Chunks of the same
    size are sorted by the age of the chunk in torch 2.12, and by address in older versions. Sorting
    by address gives the same order as torch 2.13 if each new segment has a higher address than all
    earlier segments. This holds in the simulation, but CUDA does not guarantee it.

    Args:
        name: "small_pool" or "large_pool".
        page_bytes: Page size in bytes of the pool's expandable segment.

    Attributes:
        free: Sorted list of tuples (size, segment number, address, chunk) of the mapped chunks.
        unmapped: Sorted list of tuples (address, chunk) of the chunks without mapped memory, which
            only expandable segments have.
    """

    def __init__(self, name: str, page_bytes: int):
        self.name = name
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, int, Chunk]] = []
        self.unmapped: list[tuple[int, Chunk]] = []

    def insert(self, chunk: Chunk) -> None:
        """Add a free chunk to `free`, or to `unmapped` if no memory is mapped to it."""
        if chunk.mapped:
            insort(self.free, (chunk.size, chunk.segment, chunk.address, chunk))
        else:
            insort(self.unmapped, (chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk from the list that contains it, `free` or `unmapped`."""
        if chunk.mapped:
            del self.free[bisect_left(self.free, (chunk.size, chunk.segment, chunk.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (chunk.address,))]

    def index_of_size(self, size: int) -> int:
        """Return the index in `free` of the smallest chunk with at least `size` bytes.

        The result is the length of `free` if all chunks are smaller.
        """
        return bisect_left(self.free, (size,))
