"""Data structures of the simulated caching allocator: figures, chunks of segments, and pools of
chunks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence


class Statistic:
    """A figure of `torch.cuda.memory_stats`: its current value, its peak, and the sums of all
    increases and all decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self):
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount


class Statistics(dict):
    """Dict from a name without its last part, such as "reserved_bytes.all", to its `Statistic`. The
    attribute `counts` holds plain counts."""

    OF_POOLS = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    # Always zero, because they count blocks that `max_split_size_mb` keeps whole.
    OVERSIZE = ("oversize_allocations", "oversize_segments")
    COUNTS = (
        "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
        "num_device_free",
    )  # fmt: skip

    def __init__(self):
        pools = ("all", "small_pool", "large_pool")
        names = [f"{name}.{pool}" for name in self.OF_POOLS for pool in pools]
        super().__init__({name: Statistic() for name in (*names, *self.OVERSIZE)})
        # Maps (name, pool) to the figure of the pool and the figure of all pools.
        self._both = {}
        for name in self.OF_POOLS:
            for pool in pools[1:]:
                self._both[name, pool] = self[f"{name}.{pool}"], self[f"{name}.all"]
        self.counts = dict.fromkeys(self.COUNTS, 0)

    def add(self, name: str, pool: Pool, amount: int) -> None:
        """Add an amount to the figure of the pool and to the figure of all pools."""
        for statistic in self._both[name, pool.name]:
            statistic.add(amount)

    def as_dict(self) -> dict[str, int]:
        """Return all figures and counts by the names of `torch.cuda.memory_stats`."""
        parts = ("current", "peak", "allocated", "freed")
        figures = {f"{name}.{part}": getattr(self[name], part) for name in self for part in parts}
        return figures | self.counts


class Chunk:
    """Part of a segment that is free or holds one block. PyTorch's source calls it `Block`.

    The chunks of a segment are linked in the order of their addresses.
    """

    __slots__ = (
        "address", "allocated", "before", "expandable", "frames", "mapped", "next",
        "pool", "requested", "segment", "segment_frames", "size",
    )  # fmt: skip

    def __init__(self, pool: Pool, segment: int, address: int, size: int, expandable: bool):
        self.pool, self.address, self.size = pool, address, size
        # Segments are numbered in the order in which they were made.
        self.segment = segment
        self.expandable = expandable
        self.mapped = not expandable  # whether memory is mapped to the addresses
        self.before: Chunk | None = None
        self.next: Chunk | None = None
        self.allocated = False
        self.requested = 0
        self.frames: Sequence[Mapping] = ()
        # Call stack of the request for which the segment was made. Only a segment's first chunk has
        # one.
        self.segment_frames = ()

    @property
    def split(self) -> bool:
        return self.before is not None or self.next is not None

    def cut(self, size: int) -> Chunk:
        """Split off the first `size` bytes as a new chunk in front of this one. Return the new
        chunk."""
        front = Chunk(self.pool, self.segment, self.address, size, self.expandable)
        front.mapped = self.mapped
        front.segment_frames, self.segment_frames = self.segment_frames, ()
        front.before, front.next, self.before = self.before, self, front
        if front.before is not None:
            front.before.next = front
        self.address += size
        self.size -= size
        return front

    def absorb(self, other: Chunk | None) -> int:
        """Merge a neighbor into this chunk, if the neighbor is free and mapped like this one.
        Return the neighbor's size, or 0 if it was not merged.

        Source: `try_merge_blocks`.
        """
        if other is None or other.allocated or other.mapped is not self.mapped:
            return 0
        other.pool.remove(other)
        if other is self.before:
            self.address, self.before = other.address, other.before
            self.segment_frames = other.segment_frames
            if self.before is not None:
                self.before.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.before = self
        self.size += other.size
        return other.size


class Pool:
    """Free chunks of one pool, sorted by size, then by the age of their segment, then by address.

    Source: `BlockComparatorSizeCounterAddress` (torch 2.13). Up to 2.11, addresses alone decide
    between chunks of one size. Here each segment has a higher address than all earlier ones, which
    CUDA does not guarantee. In 2.12 the age of the chunk decides.
    """

    def __init__(self, name: str, page_bytes: int):
        self.name = name  # "small_pool" or "large_pool"
        self.page_bytes = page_bytes  # page size of an expandable segment
        self.free: list[tuple[int, int, int, Chunk]] = []
        # Unmapped chunks of expandable segments, sorted by address.
        self.unmapped: list[tuple[int, Chunk]] = []

    def insert(self, chunk: Chunk) -> None:
        if chunk.mapped:
            insort(self.free, (chunk.size, chunk.segment, chunk.address, chunk))
        else:
            insort(self.unmapped, (chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        if chunk.mapped:
            del self.free[bisect_left(self.free, (chunk.size, chunk.segment, chunk.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (chunk.address,))]

    def first_of(self, size: int) -> int:
        """Return the index in `free` at which the chunks of at least this size begin."""
        return bisect_left(self.free, (size,))
