"""The caching allocator once more, slow and obvious: lists of runs, scanned from the start for
every question.

It keeps no figures. Rules as in `course_lib.caching_allocator.segments`;
one stream.
"""

MIB = 1 << 20
FREE = None


def up(size, step):
    return -(-size // step) * step


class ObviousAllocator:
    """`segments` is a list of (pool, runs); a run is [bytes, who holds it or FREE, whether memory
    is behind it]."""

    def __init__(self, capacity, expandable=False):
        self.capacity, self.expandable = capacity, expandable
        self.segments = []

    def allocate(self, name, requested):
        """True if there was room."""
        size = up(requested, 512)
        pool = "small" if size <= MIB else "large"
        for attempt in (lambda: True, self.empty_cache):
            found = attempt() and (self.fitting(pool, size) or self.reserve(pool, size))
            if found:
                self.hand_out(*found, size, name)
                return True
        return False

    def free(self, name):
        for _, runs in self.segments:
            for run in runs:
                if run[1] == name:
                    run[1] = FREE
        self.join()

    def empty_cache(self):
        if not self.expandable:
            self.segments = [each for each in self.segments if not self.is_free(each)]
            return True
        for pool, runs in self.segments:
            page, at, pieces = self.page(pool), 0, []
            for size, holder, mapped in runs:
                first, last = up(at, page), (at + size) // page * page
                if holder is FREE and mapped and first < last:
                    pieces += [
                        [first - at, FREE, True],
                        [last - first, FREE, False],
                        [at + size - last, FREE, True],
                    ]
                else:
                    pieces.append([size, holder, mapped])
                at += size
            runs[:] = [piece for piece in pieces if piece[0]]
        self.join()
        self.segments = [(pool, runs) for pool, runs in self.segments if len(runs) > 1]
        return True

    def is_free(self, segment):
        return [holder for _, holder, _ in segment[1]] == [FREE]

    # ---- where a block goes

    def fitting(self, pool, size):
        """(runs, index) of the free run to use."""
        found = [
            (run[0], order, index, runs)
            for order, (of, runs) in enumerate(self.segments)
            for index, run in enumerate(runs)
            if of == pool and run[1] is FREE and run[2] and run[0] >= size
        ]
        found.sort(key=lambda item: item[:3])
        if self.expandable:
            while len(found) > 1 and self.grown(*found[1][2:]) < self.grown(*found[0][2:]):
                found.pop(0)
        return (found[0][3], found[0][2]) if found else None

    def page(self, pool):
        return 2 * MIB if pool == "small" else 20 * MIB

    def grown(self, index, runs):
        follows = runs[index + 1] if index + 1 < len(runs) else [0, FREE, True]
        return runs[index][0] + (0 if follows[2] else follows[0])

    def reserve(self, pool, size):
        if self.expandable:
            return self.expand(pool, size)
        segment = 2 * MIB if pool == "small" else 20 * MIB if size < 10 * MIB else up(size, 2 * MIB)
        if segment > self.capacity - self.total():
            return None
        self.segments.append((pool, [[segment, FREE, True]]))
        return self.segments[-1][1], 0

    def expand(self, pool, size):
        page = self.page(pool)
        runs, start = self.addresses(pool, size) or (None, 0)
        if runs is None:
            runs = [[up(self.capacity + self.capacity // 8, page), FREE, False]]
            self.segments.append((pool, runs))
        if sum(run[0] for run in runs) < size:
            return None  # more than the device has
        at = start
        while sum(run[0] for run in runs[start:at]) < size:
            if not runs[at][2]:
                held = sum(run[0] for run in runs[start:at])
                wanted = up(min(size - held, runs[at][0]), page)
                if wanted > self.capacity - self.total():
                    self.join()
                    return None
                rest = runs[at][0] - wanted
                runs[at : at + 1] = [[wanted, FREE, True]] + ([[rest, FREE, False]] if rest else [])
            at += 1
        self.join()
        return runs, start

    def addresses(self, pool, size):
        """Return the lowest free range that suffices; its first or second run has no memory yet."""
        for of, runs in self.segments:
            for start in range(len(runs)):
                stop = start
                while stop < len(runs) and runs[stop][1] is FREE:
                    stop += 1
                unmapped = [not run[2] for run in runs[start : min(stop, start + 2)]]
                if of == pool and any(unmapped) and sum(run[0] for run in runs[start:stop]) >= size:
                    return runs, start
        return None

    def hand_out(self, runs, index, size, name):
        rest = runs[index][0] - size
        split = rest >= 512
        in_large_pool = any(pool == "large" and of is runs for pool, of in self.segments)
        if in_large_pool and not self.expandable:
            split = rest > MIB
        whole = [[size + rest, name, True]]
        runs[index : index + 1] = [[size, name, True], [rest, FREE, True]] if split else whole

    def join(self):
        for _, runs in self.segments:
            index = 0
            while index + 1 < len(runs):
                this, that = runs[index : index + 2]
                if this[1] is FREE and that[1] is FREE and this[2] == that[2]:
                    runs[index : index + 2] = [[this[0] + that[0], FREE, this[2]]]
                else:
                    index += 1

    def total(self):
        """Bytes that have memory behind them."""
        return sum(size for _, runs in self.segments for size, _, mapped in runs if mapped)

    def layout(self):
        """Each contiguous mapped range: its pool, and its blocks as +bytes if held, -bytes if
        free."""
        ranges = []
        for pool, runs in self.segments:
            before = False
            for size, holder, mapped in runs:
                if mapped:
                    if not before:
                        ranges.append([pool])
                    ranges[-1].append(f"{'-' if holder is FREE else '+'}{size}")
                before = mapped
        return ranges
