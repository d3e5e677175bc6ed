"""Record when each storage is live, how many bytes it takes, and which category it has.

A point is the time right after an operator. Points are numbered; number 0 is the state on entry.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib._torch.autograd import current_node

from .storages import storages_of

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "temporary", "input")
PHASES = ("forward", "backward", "optimizer")
CPU = torch.device("cpu")
NO_OPERATOR = "(no operator)"
COMPILED_CODE = "(compiled code)"


@dataclass(frozen=True)
class Sample:
    """Live bytes of each category right after one operator.

    Attributes:
        operator: Name of the operator, such as "aten.addmm.default".
        phase: "forward", "backward" or "optimizer".
        bytes: Dict from category, such as "activation", to its live bytes. The keys are
            `CATEGORIES`.
    """

    operator: str
    phase: str
    bytes: dict[str, int] = field(hash=False)

    @property
    def live_bytes(self) -> int:
        """Sum of the live bytes of all categories."""
        return sum(self.bytes.values())


class Timeline(Sequence):
    """Live bytes after each operator of a step, as a sequence of `Sample` objects.

    A step can have many thousands of operators, so each `Sample` is created only when it is read.

    Args:
        operators: List of pairs (operator, phase), one per sample.
        series: Dict from category to an array of its live bytes, with one element per sample.

    Attributes:
        operators: List of pairs (operator, phase), one per sample.
    """

    def __init__(self, operators: list[tuple[Any, str]], series: dict[str, np.ndarray]):
        self.operators, self._series = operators, series

    def __len__(self) -> int:
        return len(self.operators)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        operator, phase = self.operators[index]
        return Sample(
            str(operator),
            phase,
            {name: int(values[index]) for name, values in self._series.items()},
        )


class Account:
    """Running count of the bytes that are live on one device.

    Attributes:
        device: Device whose bytes are counted.
        entry_bytes: Bytes that were live when the `with` block of the `MemoryMeter` was entered.
        before_bytes: Bytes that were live before the current operator.
        live_bytes: Bytes that are live now.
        peak_bytes: The largest number of bytes that were live at once so far.
        peak_index: Index in `StorageTracker.operators` of the operator after which `peak_bytes` was
            first reached. It is 0 if the peak was reached on entry.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.entry_bytes = self.before_bytes = self.live_bytes = self.peak_bytes = (
            self.peak_index
        ) = 0


class Record(weakref.ref):
    """Weak reference to a storage, with the points that determine its category at each time.

    A point is the time right after an operator, given by the operator's number. Point 0 is the
    entry of the meter's block. A record stores points instead of a category, because only later
    operators show whether a storage is an activation or a temporary. `spans` derives the categories
    from the points.

    Args:
        storage: Storage to which the record refers.
        callback: Function that is called with the record when the storage has been freed.
        account: `Account` of the storage's device.
        block_bytes: Granularity in bytes. The attribute `bytes` is rounded up to a multiple of this
            number.
        born, role, made_in: Initial values of the attributes `born`, `role` and `made_in`.

    Attributes:
        account: `Account` of the storage's device.
        key: Address of the storage, by which `StorageTracker.find` finds the record.
        nbytes: Size of the storage in bytes.
        bytes: `nbytes`, rounded up to a multiple of `block_bytes`.
        born: Point at which the storage was made.
        died: First point at which the storage is no longer live; None while it is live.
        role: "parameter", "buffer", "gradient", "optimizer" or "input"; None for an activation or a
            temporary.
        since: First point at which the storage has the role `role`.
        made_in: Pass in which the storage was made: "forward", "recomputation" (in backward, with
            gradients enabled) or "elsewhere" (all other cases).
        saved: First point at which the storage is kept for backward; None if it is not kept.
        released: First point at which backward no longer needs the storage, because the last
            autograd node that read it has finished. None before this point.
        read_by: Autograd node that is reading the storage now; None if no node is reading it.
    """

    __slots__ = ("account", "born", "bytes", "died", "key", "made_in",
                 "nbytes", "read_by", "released", "role", "saved", "since")  # fmt: skip

    def __new__(cls, storage, callback, *dates):
        return super().__new__(cls, storage, callback)

    def __init__(
        self,
        storage,
        callback,
        account,
        block_bytes: int,
        born: int,
        role: str | None,
        made_in: str,
    ):
        super().__init__(storage, callback)
        self.account: Account = account
        self.key: int = storage._cdata
        self.nbytes: int = storage.nbytes()
        self.bytes: int = -(-self.nbytes // block_bytes) * block_bytes
        self.born = born
        self.died: int | None = None
        self.role = role
        self.since = born
        self.made_in = made_in
        self.saved: int | None = None
        self.released: int | None = None
        self.read_by = None

    def spans(self, end: int) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, category) for each period in which the storage is in one category.

        A point is the time right after an operator. Points are counted from 0, which is the entry
        of the meter's block. `start` is the index of the first point of the period, and `stop` is
        the index of the first point after the period.

        Args:
            end: Number of points so far. A period that has not ended yet has this number as its
                `stop`.
        """
        end = end if self.died is None else self.died
        starts = [(self.born, "temporary")]
        if self.saved is not None:
            starts.append((self.saved, "activation"))
            if self.released is not None:
                starts.append((self.released, "temporary"))
        if self.role is not None:
            starts = [start for start in starts if start[0] < self.since] + [
                (self.since, self.role)
            ]
        for (start, category), (stop, _) in zip(starts, [*starts[1:], (end, "")], strict=True):
            if start < min(stop, end):
                yield start, min(stop, end), category


def category_spans(tracker: StorageTracker) -> Iterator[tuple[int, int, str, int, int]]:
    """Yield the periods in which each storage has one category.

    Args:
        tracker: Tracker with the records of the storages. Only the storages on its reported device,
            `tracker.main.device`, are included.

    Yields:
        Tuples (storage number, bytes, category, start, stop), as in `course_lib.memory.trace.Span`.
        A point is the time right after an operator. `start` is the number of the first point of the
        period, and `stop` is the number of the first point after the period.
    """
    end = len(tracker.operators)
    for number, record in enumerate(tracker.records):
        for start, stop, category in record.spans(end) if record.account is tracker.main else ():
            yield number, record.bytes, category, start, stop


class StorageTracker:
    """Records of all storages that a meter counts, and the number of live bytes per device.

    A point is the time right after an operator. Point 0 is the entry of the meter's `with` block.

    Args:
        block_bytes: Granularity in bytes. The size of each storage is rounded up to a multiple of
            this number.
        device: Device whose bytes are reported. With None it is the first accelerator that has a
            counted tensor, or the CPU if there is none.

    Attributes:
        operators: List of pairs (operator, phase), one per point. The first pair is ("(entry)",
            "forward").
        accounts: Dict from device to the `Account` that counts its live bytes.
        named: True if a device was passed as the argument `device`, False if it was None.
        main: `Account` of the device whose bytes are reported.
        flops: Dict from point to the FLOPs of the operator. Operators without FLOPs have no entry.
        modules: Dict from point to the path of the module that ran the operator. Empty if `paths`
            is None.
        paths: Function that takes an autograd node and returns the path of the running module. None
            if paths are not recorded.
        lines: Dict from point to (file, line, function) of the user's own code that ran the
            operator.
        records: List of the `Record` of each storage, including storages that have been freed.
        repeated: List with the temporaries of forward passes that an estimate skips. A stage is one
            of the modules that a checkpointed model calls in order. An estimate runs only one of
            several equal stages. For each skipped forward pass of an equal stage, the list has a
            pair (first point of the pass, live bytes of its temporaries). The bytes are an int64
            array of shape (points, categories).
        lock: Lock for the attributes above, because autograd runs one thread per device.
        closed: Whether the meter's `with` block has ended.
    """

    def __init__(self, block_bytes: int, device: torch.device | str | None):
        self.block_bytes, self.named = block_bytes, device is not None
        self.operators: list[tuple[Any, str]] = [("(entry)", "forward")]
        self.flops: dict[int, int] = {}
        self.modules: dict[int, str] = {}
        self.paths: Callable[[Any], str] | None = None
        self.lines: dict[int, tuple[str, int, str]] = {}
        self.accounts: dict[torch.device, Account] = {}
        # An empty tensor on the device turns "cuda" into "cuda:0", and raises an error if there is
        # no such device.
        self.main = self.account(CPU if device is None else torch.empty(0, device=device).device)
        self.lock, self.closed = threading.RLock(), False
        self.records: list[Record] = []
        self.repeated: list[tuple[int, np.ndarray]] = []
        self._by_address: dict[int, Record] = {}
        # Records of released storages that `confirm_released` has not yet processed. The callbacks
        # of the weak references append to this deque, in any thread.
        self._newly_released: deque[Record] = deque()
        # Record of a storage that `count_as_released` has counted as released. The next call of
        # `confirm_released` checks whether the storage is still live.
        self._to_verify: Record | None = None
        # Result of `history`, which is cached after the end of the block.
        self._final: dict[str, np.ndarray] | None = None

    def account(self, device: torch.device) -> Account:
        """Return the `Account` that counts the live bytes of a device.

        The first call for a device creates its account. If the tracker was made without a device,
        the first accelerator becomes the device whose bytes are reported (`main`).
        """
        device = CPU if device.type == "cpu" else device  # a symbolic tensor can be on "cpu:0"
        if device not in self.accounts:
            self.accounts[device] = Account(device)
            if not self.named and device.type not in ("cpu", "meta") and self.main.device == CPU:
                self.main = self.accounts[device]
        return self.accounts[device]

    def find(self, storage) -> Record | None:
        """Return the `Record` of a live storage, or None if the storage is not counted."""
        record = self._by_address.get(storage._cdata)
        # A new storage can have the address of a storage whose release was not yet processed.
        return record if record is not None and record() is storage else None

    def add(self, storage, account: Account, role: str | None, made_in: str) -> None:
        """Create the `Record` of a new storage and count its bytes as live.

        The storage counts from the last point that is in `operators` now.

        Args:
            storage: The storage.
            account: `Account` of the storage's device.
            role: Role of the storage, such as "parameter"; None for an activation or a temporary.
            made_in: Pass in which the storage was made: "forward", "recomputation" or "elsewhere".
        """
        record = Record(
            storage,
            self._newly_released.append,
            account,
            self.block_bytes,
            len(self.operators) - 1,
            role,
            made_in,
        )
        self.records.append(record)
        self._add_to_account(record)

    def add_all(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Count the tensors that exist when the meter's `with` block is entered.

        Args:
            tensors: Pairs (tensor, role). A role is "parameter", "buffer", "gradient" or
                "optimizer".
        """
        for tensor, role in tensors:
            for storage in storages_of(tensor):
                if self.find(storage) is None:
                    self.add(storage, self.account(tensor.device), role, "elsewhere")
        for account in self.accounts.values():
            account.entry_bytes = account.peak_bytes = account.live_bytes

    def assign(self, tensor: Tensor, role: str, since: int = 0) -> None:
        """Set the role, such as "gradient", of a tensor's storages.

        A storage that already has a role other than "input" keeps its old role.

        Args:
            tensor: Tensor whose storages get the role.
            role: New role: "parameter", "buffer", "gradient" or "optimizer".
            since: Index in `operators` of the operator after which the storages have the role. With
                0, they have the role from their creation on.
        """
        for storage in storages_of(tensor):
            record = self.find(storage)
            if record is not None and record.role in (None, "input"):
                record.role, record.since = role, max(since, record.born)

    def close(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """End the tracking: process the last releases and set the roles of the given tensors.

        Call this method at the end of the meter's `with` block.

        Args:
            tensors: Pairs (tensor, role) of tensors whose role is determined only at the end, such
                as parameters that were replaced inside the block. A role is, for example,
                "parameter".
        """
        self.confirm_released()
        for tensor, role in tensors:
            self.assign(tensor, role)
        self.closed = True

    def add_storage(self, storage) -> None:
        """Count a storage that no operator made, and add an entry for it to `operators`.

        The entry is necessary, because otherwise the storage would seem to be live at the same time
        as storages that were released before it was made.
        """
        with self.lock:
            self._add_point()
            self.add(storage, self.account(storage.device), None, "elsewhere")
            self.note_peak()

    def resize_storage(self, storage, was_empty: bool | None = None) -> None:
        """Count a resized storage as released and then allocated with its new size.

        A storage that was empty and is not yet counted is counted as a new storage.

        Args:
            storage: The storage, after it was resized.
            was_empty: Whether the storage was empty before it was resized. With True or False, an
                entry for the change is added to `operators`. None means that an operator resized
                the storage, so that `operators` has an entry already.
        """
        with self.lock:
            record = self.find(storage)
            if record is None and was_empty:
                self.add_storage(storage)
            elif record is not None and record.nbytes != storage.nbytes():
                if was_empty is not None:
                    self._add_point()
                self._newly_released.append(record)
                self.confirm_released()
                self.add(storage, record.account, record.role, record.made_in)
                self.note_peak()

    def _add_point(self) -> None:
        # A change that no operator made gets its own point.
        self.confirm_released()
        node = current_node()
        self.operators.append((NO_OPERATOR, "forward" if node is None else "backward"))

    def confirm_released(self) -> None:
        """Subtract the bytes of storages that have been released since the last call.

        If `count_as_released` was called for a storage that is still live, this method counts the
        storage as live again.
        """
        if self._to_verify is not None:
            expected, self._to_verify = self._to_verify, None
            if expected() is not None:
                expected.died = None
                self._add_to_account(expected)
                self.note_peak()
        while self._newly_released:
            record = self._newly_released.popleft()
            if record.died is None:
                self._remove_from_account(record, len(self.operators) if not self.closed else None)

    def count_as_released(self, record: Record) -> None:
        """Count a storage as released at the current operator, although it is still live.

        The current operator is the last one in `operators`. Call this method if the storage is
        expected to be released before the next operator. If the storage is still live at the next
        call of `confirm_released`, that call counts it as live again.
        """
        self._remove_from_account(record, len(self.operators) - 1)
        self._to_verify = record

    def note_peak(self) -> None:
        for account in self.accounts.values():
            if account.live_bytes > account.peak_bytes:
                account.peak_bytes, account.peak_index = account.live_bytes, len(self.operators) - 1

    def history(self) -> dict[str, np.ndarray]:
        """Return the live bytes of each category on the reported device, after each operator.

        Returns:
            A dict from category to an int64 array with one element per pair in `operators`.
        """
        if self._final is not None:
            return self._final
        end = len(self.operators)
        change = {name: np.zeros(end + 1, dtype=np.int64) for name in CATEGORIES}
        for _, nbytes, category, start, stop in category_spans(self):
            change[category][start] += nbytes
            change[category][stop] -= nbytes
        history = {name: np.cumsum(values)[:-1] for name, values in change.items()}
        for (start, rows), (column, name) in product(self.repeated, enumerate(CATEGORIES)):
            history[name][start : start + len(rows)] += rows[:, column]
        self._final = history if self.closed else None
        return history

    def _add_to_account(self, record: Record) -> None:
        self._by_address[record.key] = record
        record.account.live_bytes += record.bytes

    def _remove_from_account(self, record: Record, died: int | None) -> None:
        record.account.live_bytes -= record.bytes
        record.died = died
        if self._by_address.get(record.key) is record:
            del self._by_address[record.key]
