"""Data structures of the simulated allocator: statistics, chunks of segments, and their pools."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence


class Statistic:
    """One quantity of `torch.cuda.memory_stats`, such as the reserved bytes of all pools.

    Attributes:
        current: The current value.
        peak: The largest value so far.
        allocated: Sum of all increases.
        freed: Sum of all decreases.
    """

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self):
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, change: int) -> None:
        """Add a positive or negative change to the value."""
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
        counters: Dict from the name of an event, such as "num_ooms", to the number of its
            occurrences.
    """

    # Quantities that PyTorch counts per pool.
    POOL_STATISTICS = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    # Always zero, because they count blocks that the setting `max_split_size_mb` keeps whole.
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
        """Add a change to the statistic of a pool and to that of all pools together.

        Args:
            name: One of `POOL_STATISTICS`.
            pool: The pool in which the change took place.
            change: Bytes or number of blocks, positive or negative.
        """
        for statistic in self._pool_and_total[name, pool.name]:
            statistic.add(change)

    def as_dict(self) -> dict[str, int]:
        """Return all statistics and counters under their names in `torch.cuda.memory_stats`."""
        parts = ("current", "peak", "allocated", "freed")
        values = {f"{name}.{part}": getattr(self[name], part) for name in self for part in parts}
        return values | self.counters


class Chunk:
    """Contiguous part of a segment that is free or holds one block (`Block` in PyTorch's source).

    The chunks of a segment form a linked list in the order of their addresses.

    Attributes:
        pool: Pool of the segment.
        segment: Number of the segment. Segments are numbered in the order in which they were made.
        address, size: First address, and size in bytes.
        expandable: Whether the segment is an expandable one.
        mapped: Whether memory is mapped to the addresses; always True unless `expandable`.
        previous, next: Neighbors in the segment; None at its ends.
        allocated: Whether the chunk holds a block.
        requested: Bytes that were requested for the block; 0 for a free chunk.
        frames: Call stack of that request.
        segment_frames: Call stack of the request for which the segment was made. Only a segment's
            first chunk has one.
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
        """Whether the chunk is only a part of its segment."""
        return self.previous is not None or self.next is not None

    def split_off(self, size: int) -> Chunk:
        """Split off the first `size` bytes of this chunk as a new chunk, and return the new one."""
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
        """Merge a neighbor into this chunk, if the neighbor is free and both or neither are mapped.

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
    """Free chunks of the small or the large pool.

    Mapped chunks are sorted by size, then by the age of their segment (oldest first), then by
    address. PyTorch sorts them in this way from torch 2.13 on
    (`BlockComparatorSizeCounterAddress`). In 2.12 the age of the chunk decides between chunks of
    the same size. Up to 2.11 the address decides, which gives the same order here, because each
    simulated segment has a higher address than all earlier ones. CUDA does not guarantee that.

    Args:
        name: "small_pool" or "large_pool".
        page_bytes: Page size of the pool's expandable segment.

    Attributes:
        free: Tuples (size, segment number, address, chunk) of the mapped chunks, sorted.
        unmapped: Tuples (address, chunk) of the unmapped chunks of expandable segments, sorted.
    """

    def __init__(self, name: str, page_bytes: int):
        self.name = name
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, int, Chunk]] = []
        self.unmapped: list[tuple[int, Chunk]] = []

    def insert(self, chunk: Chunk) -> None:
        """Add a free chunk to `free` or, if it is not mapped, to `unmapped`."""
        if chunk.mapped:
            insort(self.free, (chunk.size, chunk.segment, chunk.address, chunk))
        else:
            insort(self.unmapped, (chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk from `free` or `unmapped`."""
        if chunk.mapped:
            del self.free[bisect_left(self.free, (chunk.size, chunk.segment, chunk.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (chunk.address,))]

    def index_of_size(self, size: int) -> int:
        """Return the index in `free` of the first chunk with at least `size` bytes."""
        return bisect_left(self.free, (size,))
