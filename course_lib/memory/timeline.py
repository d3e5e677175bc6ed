"""Record when each storage is live, how many bytes it takes, and in which category.

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
        phase: One of `PHASES`.
        bytes: Dict from each of `CATEGORIES` to its bytes.
    """

    operator: str
    phase: str
    bytes: dict[str, int] = field(hash=False)

    @property
    def live_bytes(self) -> int:
        """Live bytes of all categories together."""
        return sum(self.bytes.values())


class Timeline(Sequence):
    """Sequence of one `Sample` per operator.

    The sample objects are made when they are read, because a step may have many thousands.

    Attributes:
        operators: Pair (operator, phase) of each sample.
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
        entry_bytes: Bytes live when the meter's block was entered.
        before_bytes: Bytes live before the current operator.
        live_bytes: Bytes live now.
        peak_bytes: The largest number of bytes live so far.
        peak_index: Number of the point at which `peak_bytes` was first reached.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.entry_bytes = self.before_bytes = self.live_bytes = self.peak_bytes = (
            self.peak_index
        ) = 0


class Record(weakref.ref):
    """Weak reference to a storage, with the points at which its category changes.

    A point is the time right after an operator, given by its number. The reference's callback
    reports that the storage has been freed.
    Only later operators show whether a storage is an activation or a temporary. Therefore a record
    stores points, and `spans` derives the categories from them.

    Attributes:
        account: Account of the storage's device.
        key: Address of the storage, by which `StorageTracker.find` finds the record.
        nbytes: Size of the storage in bytes.
        bytes: `nbytes`, rounded up to a multiple of the meter's `block_bytes`.
        born: Point at which the storage was made.
        died: Point from which it is freed; None as long as it is live.
        role: "parameter", "buffer", "gradient", "optimizer" or "input"; None for an activation or
            a temporary.
        since: Point from which the storage has this role.
        made_in: Pass that made it: "forward", "recomputation" (in backward, with gradients enabled)
            or "elsewhere".
        saved: Point from which the storage is kept for backward; None if it is not.
        released: Point from which backward does not need the storage any more, because the last
            autograd node that read it has ended; None if no node has.
        read_by: Autograd node that is reading the storage now.
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

        Args:
            end: Number of points so far, which is the last `stop` of a storage that is still live.

        Yields:
            `start` and `stop` are numbers of points; `stop` is exclusive.
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
    """Yield the periods in which the storages of the main account are in one category.

    Yields:
        Tuples (storage number, bytes, category, start, stop), as in `course_lib.memory.trace.Span`.
    """
    end = len(tracker.operators)
    for number, record in enumerate(tracker.records):
        for start, stop, category in record.spans(end) if record.account is tracker.main else ():
            yield number, record.bytes, category, start, stop


class StorageTracker:
    """Records of all storages that a meter counts, and the running counts of live bytes.

    Args:
        block_bytes: The bytes of each storage are rounded up to a multiple of this number.
        device: Device whose bytes are reported. With None it is the first accelerator that has a
            counted tensor, or the CPU if there is none.

    Attributes:
        operators: Pair (operator, phase) of each point. Number 0 is the state on entry.
        accounts: Dict from device to its account.
        named: Whether `device` was given.
        main: Account of the device whose bytes are reported.
        flops: Dict from operator number to FLOPs, for operators that have any.
        modules: Dict from operator number to the path of its module, if `paths` is set.
        paths: Function that returns the path of the module that runs, or None if paths are not
            recorded.
        lines: Dict from operator number to (file, line, function) of the user's own code that
            called it.
        records: Records of all storages.
        repeated: List of (number of the first point, int64 array of shape (points, categories)).
            The array contains the bytes of temporaries without records: those of stages that did
            not run, because an equal stage did (`course_lib.budget.traces.equal_stages`).
        lock: Lock for the attributes above, because autograd runs one thread per device.
        closed: Whether the meter's block has ended.
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
        # of the weak references append to it, in any thread.
        self._newly_released: deque[Record] = deque()
        # Record of a storage that `count_as_released` counted as released too early.
        self._to_verify: Record | None = None
        # Result of `history`, which is cached after the end of the block.
        self._final: dict[str, np.ndarray] | None = None

    def account(self, device: torch.device) -> Account:
        """Return the `Account` that counts the live bytes of a device.

        The first call for a device creates its account. The account of the first accelerator
        becomes the main one, unless a device was named.
        """
        device = CPU if device.type == "cpu" else device  # a symbolic tensor can be on "cpu:0"
        if device not in self.accounts:
            self.accounts[device] = Account(device)
            if not self.named and device.type not in ("cpu", "meta") and self.main.device == CPU:
                self.main = self.accounts[device]
        return self.accounts[device]

    def find(self, storage) -> Record | None:
        """Return the record of a live storage, or None if the storage is not counted."""
        record = self._by_address.get(storage._cdata)
        # A new storage can have the address of a storage whose release was not yet processed.
        return record if record is not None and record() is storage else None

    def add(self, storage, account: Account, role: str | None, made_in: str) -> None:
        """Count a new storage from the current point on.

        The arguments `role` and `made_in` are explained in `Record`.
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
        """Count the tensors that exist when the meter's block is entered.

        Args:
            tensors: Pairs (tensor, role), with the roles of `Record`.
        """
        for tensor, role in tensors:
            for storage in storages_of(tensor):
                if self.find(storage) is None:
                    self.add(storage, self.account(tensor.device), role, "elsewhere")
        for account in self.accounts.values():
            account.entry_bytes = account.peak_bytes = account.live_bytes

    def assign(self, tensor: Tensor, role: str, since: int = 0) -> None:
        """Set the role of a tensor's storages from point `since` on.

        A role other than "input" is not replaced.
        """
        for storage in storages_of(tensor):
            record = self.find(storage)
            if record is not None and record.role in (None, "input"):
                record.role, record.since = role, max(since, record.born)

    def close(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Complete the records at the end of the meter's block.

        Args:
            tensors: Pairs (tensor, role) of tensors whose role is determined only now, such as
                parameters that were replaced inside the block.
        """
        self.confirm_released()
        for tensor, role in tensors:
            self.assign(tensor, role)
        self.closed = True

    def add_storage(self, storage) -> None:
        """Count a storage that no operator made, at a point of its own.

        Without its own point, the storage would seem to be live at the same time as storages that
        were released between the last operator and its creation.
        """
        with self.lock:
            self._add_point()
            self.add(storage, self.account(storage.device), None, "elsewhere")
            self.note_peak()

    def resize_storage(self, storage, was_empty: bool | None = None) -> None:
        """Count a resized storage as released and then allocated with its new size.

        A storage that is not yet counted is counted as a new one if it was empty.

        Args:
            storage: The storage, after it was resized.
            was_empty: Whether it was empty before. None if an operator resized it; otherwise the
                change has its own point.
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
        """Remove the storages that have been released since the last point from the live bytes.

        If `count_as_released` counted a storage as released and it is still live, it is counted as
        live again.
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
        """Count a storage as released before the current operator, the last one in `operators`.

        The storage is released soon after the call. If it is still live at the next call of
        `confirm_released`, it is counted as live again.
        """
        self._remove_from_account(record, len(self.operators) - 1)
        self._to_verify = record

    def note_peak(self) -> None:
        for account in self.accounts.values():
            if account.live_bytes > account.peak_bytes:
                account.peak_bytes, account.peak_index = account.live_bytes, len(self.operators) - 1

    def history(self) -> dict[str, np.ndarray]:
        """Return a dict from category to the main account's live bytes at each point.

        The values are int64 arrays with one element per point.
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
