"""Parts of the caching allocator's books: figures, chunks of segments, pools of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence


class Statistic:
    """A figure of `torch.cuda.memory_stats`: now, at most, all that was added, all taken off."""

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
    """Name without its last part ("reserved_bytes.all") -> `Statistic`; and plain `counts`."""

    OF_POOLS = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    OVERSIZE = ("oversize_allocations", "oversize_segments")
    COUNTS = (
        "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
        "num_device_free",
    )  # fmt: skip

    def __init__(self):
        pools = ("all", "small_pool", "large_pool")
        names = [f"{name}.{pool}" for name in self.OF_POOLS for pool in pools]
        super().__init__({name: Statistic() for name in (*names, *self.OVERSIZE)})
        self._both = {}  # (name, pool) -> its figure, and that of all pools
        for name in self.OF_POOLS:
            for pool in pools[1:]:
                self._both[name, pool] = self[f"{name}.{pool}"], self[f"{name}.all"]
        self.counts = dict.fromkeys(self.COUNTS, 0)

    def add(self, name: str, pool: Pool, amount: int) -> None:
        """Add to the figure of the pool, and to that of all."""
        for statistic in self._both[name, pool.name]:
            statistic.add(amount)

    def as_dict(self) -> dict[str, int]:
        parts = ("current", "peak", "allocated", "freed")
        figures = {f"{name}.{part}": getattr(self[name], part) for name in self for part in parts}
        return figures | self.counts


class Chunk:
    """A stretch of a segment that is free, or holds one block (`Block` in PyTorch's source).

    The chunks of a segment are linked in the order of their addresses.
    """

    __slots__ = (
        "address", "allocated", "before", "expandable", "frames", "free_since", "mapped",
        "next", "pool", "requested", "segment", "segment_frames", "size",
    )  # fmt: skip

    def __init__(self, pool: Pool, segment: int, address: int, size: int, expandable: bool):
        self.pool, self.address, self.size = pool, address, size
        self.segment = segment  # its number, in the order in which segments were made
        self.expandable = expandable
        self.mapped = not expandable  # whether there is memory behind the addresses
        self.before: Chunk | None = None
        self.next: Chunk | None = None
        self.allocated = False
        self.requested = 0
        self.frames: Sequence[Mapping] = ()
        self.segment_frames = ()  # of the first of a segment: who needed it
        self.free_since = 0  # the pool's searches by then, for garbage collection

    @property
    def split(self) -> bool:
        return self.before is not None or self.next is not None

    def cut(self, size: int) -> Chunk:
        """The first `size` bytes become a chunk of their own, in front of this one."""
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
        """Join a neighbour that is free, and mapped like this one; returns its size, or 0.

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
    """The free chunks of one pool: by size, then by the age of their segment, then by address.

    Source: `BlockComparatorSizeCounterAddress` (torch 2.13). Up to 2.11 addresses alone decide
    between chunks of one size; here each segment has a higher one than all before it, which CUDA
    does not promise. In 2.12 it is the age of the chunk.
    """

    def __init__(self, name: str, page_bytes: int):
        self.name = name  # "small_pool" or "large_pool"
        self.page_bytes = page_bytes  # of an expandable segment
        self.free: list[tuple[int, int, int, Chunk]] = []
        self.unmapped: list[tuple[int, Chunk]] = []  # of expandable segments, by address
        self.searches = 0  # counted for garbage collection only

    def insert(self, chunk: Chunk) -> None:
        if chunk.mapped:
            chunk.free_since = self.searches
            insort(self.free, (chunk.size, chunk.segment, chunk.address, chunk))
        else:
            insort(self.unmapped, (chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        if chunk.mapped:
            del self.free[bisect_left(self.free, (chunk.size, chunk.segment, chunk.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (chunk.address,))]

    def first_of(self, size: int) -> int:
        """Index in `free` at which the chunks of at least this size begin."""
        return bisect_left(self.free, (size,))
