"""Accounts of a meter: which storages are live when, how many bytes they take, and in which
category."""

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
    """Bytes live right after one operator.

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
        return sum(self.bytes.values())


class Timeline(Sequence):
    """Sequence of one `Sample` per operator. A sample is made when it is read."""

    def __init__(self, operators: list[tuple[Any, str]], series: dict[str, np.ndarray]):
        self.operators, self._series = operators, series  # (operator, phase) of each sample

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
    """Bytes that are live on one device.

    Attributes:
        entry_bytes: Bytes live when the block was entered.
        before_bytes: Bytes live before the current operator.
        live_bytes: Bytes live now.
        peak_bytes: The largest number of bytes live so far.
        peak_index: Number of the operator after which `peak_bytes` was first reached.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.entry_bytes = self.before_bytes = self.live_bytes = self.peak_bytes = (
            self.peak_index
        ) = 0


class Record(weakref.ref):
    """Life of one storage, and the weak reference that notices its end.

    Times are operator numbers. Whether a storage is an activation or a temporary is decided only
    later. A record therefore keeps operator numbers, and `spans` derives the categories from them.
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
        # "parameter", "buffer", "gradient", "optimizer" or "input"; None for an activation or a
        # temporary.
        self.role = role
        self.since = born  # operator number from which it has this role
        # "forward", "recomputation" (in backward, with gradients enabled) or "elsewhere".
        self.made_in = made_in
        # The storage is held for backward from the operator `saved` until `released`, the end of
        # the last autograd node that read it.
        self.saved: int | None = None
        self.released: int | None = None
        self.read_by = None  # the autograd node that is reading it now

    def spans(self, end: int) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, category) for each part of the storage's life; `stop` is
        exclusive."""
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


def lives(ledger: Ledger) -> Iterator[tuple[int, int, str, int, int]]:
    """Yield (storage number, bytes, category, start, stop) for each time span that a storage of the
    main account spends in one category."""
    end = len(ledger.operators)
    for number, record in enumerate(ledger.records):
        for start, stop, category in record.spans(end) if record.account is ledger.main else ():
            yield number, record.bytes, category, start, stop


class Ledger:
    """Record of every storage that is counted, operator by operator.

    Attributes:
        operators: (operator, phase) of each moment. Number 0 is the state on entry.
        accounts: Dict from device to its account.
        named, main: Whether a device was named, and the account whose figures are reported.
        flops: Dict from operator number to FLOPs, for operators that have any.
        modules: Dict from operator number to the path of its module, if `paths` is set.
        paths: Function that returns the path of the module that runs, or None if paths are not
            recorded.
        lines: Dict from operator number to (file, line, function) of the user's own code that
            called it.
        records: Records of all storages.
        repeated: List of (number of the first operator, int64 array of shape (moments,
            categories)). The array holds the bytes of temporaries that have no records
            (`course_lib.budget.traces.equal_stages`).
        lock: Lock for the attributes above. Autograd runs one thread per device.
    """

    def __init__(self, block_bytes: int, device: torch.device | str | None):
        self.block_bytes = block_bytes
        self.operators: list[tuple[Any, str]] = [("(entry)", "forward")]
        self.flops: dict[int, int] = {}
        self.modules: dict[int, str] = {}
        self.paths: Callable[[Any], str] | None = None
        self.lines: dict[int, tuple[str, int, str]] = {}
        self.accounts: dict[torch.device, Account] = {}
        self.named = device is not None
        # A tensor on the device shows that "cuda" is "cuda:0", or raises if there is no such
        # device.
        self.main = self.account(CPU if device is None else torch.empty(0, device=device).device)
        self.lock = threading.RLock()
        self.closed = False
        self.records: list[Record] = []
        self.repeated: list[tuple[int, np.ndarray]] = []
        self._by_address: dict[int, Record] = {}
        # Weak references append their records here, in whichever thread a storage is released.
        self._dead: deque[Record] = deque()
        self._expected: Record | None = (
            None  # counted as released until `bury` checks whether it is
        )
        # Result of `history`, cached when no more operators follow.
        self._final: dict[str, np.ndarray] | None = None

    def account(self, device: torch.device) -> Account:
        """Return the account of a device.

        The first accelerator's account becomes the main one, unless another device was named.
        """
        device = CPU if device.type == "cpu" else device  # a symbolic tensor can be on "cpu:0"
        if device not in self.accounts:
            self.accounts[device] = Account(device)
            if not self.named and device.type not in ("cpu", "meta") and self.main.device == CPU:
                self.main = self.accounts[device]
        return self.accounts[device]

    def find(self, storage) -> Record | None:
        """Return the record of a live storage, or None if it is not counted."""
        record = self._by_address.get(storage._cdata)
        # A new storage can have the address of one whose release has not been recorded yet.
        return record if record is not None and record() is storage else None

    def add(self, storage, account: Account, role: str | None, made_in: str) -> None:
        record = Record(
            storage,
            self._dead.append,
            account,
            self.block_bytes,
            len(self.operators) - 1,
            role,
            made_in,
        )
        self.records.append(record)
        self._enter(record)

    def add_all(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Count the tensors that exist on entry, given as pairs (tensor, role)."""
        for tensor, role in tensors:
            for storage in storages_of(tensor):
                if self.find(storage) is None:
                    self.add(storage, self.account(tensor.device), role, "elsewhere")
        for account in self.accounts.values():
            account.entry_bytes = account.peak_bytes = account.live_bytes

    def assign(self, tensor: Tensor, role: str, since: int = 0) -> None:
        """Give a tensor this role if it has none, or if it was counted as an input so far."""
        for storage in storages_of(tensor):
            record = self.find(storage)
            if record is not None and record.role in (None, "input"):
                record.role, record.since = role, max(since, record.born)

    def close(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Finish the records at the end of the block. The pairs (tensor, role) give roles that are
        known only after the last operator."""
        self.bury()
        for tensor, role in tensors:
            self.assign(tensor, role)
        self.closed = True

    def add_storage(self, storage) -> None:
        """Count a storage that no operator made. It has its own moment, because other storages may
        have been released before it."""
        with self.lock:
            self._moment()
            self.add(storage, self.account(storage.device), None, "elsewhere")
            self.note_peak()

    def resize_storage(self, storage, was_empty: bool | None = None) -> None:
        """Record a resized storage as released and allocated again. A storage that was empty and is
        not yet counted is counted as a new one.

        `was_empty` is None if an operator resized the storage.
        """
        with self.lock:
            record = self.find(storage)
            if record is None and was_empty:
                self.add_storage(storage)
            elif record is not None and record.nbytes != storage.nbytes():
                if was_empty is not None:
                    self._moment()
                self._dead.append(record)
                self.bury()
                self.add(storage, record.account, record.role, record.made_in)
                self.note_peak()

    def _moment(self) -> None:
        self.bury()
        node = current_node()
        self.operators.append((NO_OPERATOR, "forward" if node is None else "backward"))

    def bury(self) -> None:
        # Remove released storages from the accounts. They were live up to the last operator.
        if self._expected is not None:
            expected, self._expected = self._expected, None
            if expected() is not None:
                expected.died = None
                self._enter(expected)
                self.note_peak()
        while self._dead:
            record = self._dead.popleft()
            if record.died is None:
                self._leave(record, len(self.operators) if not self.closed else None)

    def expect_end(self, record: Record) -> None:
        """Count a storage as released before the current operator, which is the last in
        `operators`. If the storage is still live at the next `bury`, it is counted as live
        again."""
        self._leave(record, len(self.operators) - 1)
        self._expected = record

    def note_peak(self) -> None:
        for account in self.accounts.values():
            if account.live_bytes > account.peak_bytes:
                account.peak_bytes, account.peak_index = account.live_bytes, len(self.operators) - 1

    def history(self) -> dict[str, np.ndarray]:
        """Return a dict from category to the live bytes of the main account, on entry and after
        each operator."""
        if self._final is not None:
            return self._final
        end = len(self.operators)
        change = {name: np.zeros(end + 1, dtype=np.int64) for name in CATEGORIES}
        for _, nbytes, category, start, stop in lives(self):
            change[category][start] += nbytes
            change[category][stop] -= nbytes
        history = {name: np.cumsum(values)[:-1] for name, values in change.items()}
        for (start, rows), (column, name) in product(self.repeated, enumerate(CATEGORIES)):
            history[name][start : start + len(rows)] += rows[:, column]
        self._final = history if self.closed else None
        return history

    def _enter(self, record: Record) -> None:
        self._by_address[record.key] = record
        record.account.live_bytes += record.bytes

    def _leave(self, record: Record, died: int | None) -> None:
        record.account.live_bytes -= record.bytes
        record.died = died
        if self._by_address.get(record.key) is record:
            del self._by_address[record.key]
