"""The accounts of a meter: which storages live when, how many bytes that is, and in which
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

from .storages import storages_of

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "temporary", "input")
PHASES = ("forward", "backward", "optimizer")
CPU = torch.device("cpu")
NO_OPERATOR = "(no operator)"
COMPILED_CODE = "(compiled code)"


@dataclass(frozen=True)
class Sample:
    """Bytes live right after one operator."""

    operator: str  # "aten.addmm.default"
    phase: str  # one of PHASES
    bytes: dict[str, int] = field(hash=False)  # every one of CATEGORIES -> bytes

    @property
    def live_bytes(self) -> int:
        return sum(self.bytes.values())


class Timeline(Sequence):
    """One `Sample` per operator, made when asked for."""

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
    """The bytes live on one device: on entry, before the operator now running, now, and the most so
    far, at which."""

    def __init__(self, device: torch.device):
        self.device = device
        self.entry_bytes = self.before_bytes = self.live_bytes = self.peak_bytes = (
            self.peak_index
        ) = 0


class Record(weakref.ref):
    """The life of one storage, and the weak reference that notices its end.

    Times are operator numbers. Only later is it known whether a storage was an activation or a
    temporary, so a record keeps dates, and `spans` works out the categories when somebody asks.
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
        # parameter, buffer, gradient, optimizer, input; None: activation or temporary
        self.role = role
        self.since = born  # when it took that role
        # "forward", "recomputation" (in backward, with gradients on) or "elsewhere"
        self.made_in = made_in
        self.saved: int | None = None  # held for backward from here ...
        # ... to here: the end of the last autograd node that read it
        self.released: int | None = None
        self.read_by = None  # the node that is reading it now

    def spans(self, end: int) -> Iterator[tuple[int, int, str]]:
        """(from, until, category) through the storage's life; `until` is exclusive."""
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
    """(number, bytes, category, from, until) of each storage of the main account, once for each
    category."""
    end = len(ledger.operators)
    for number, record in enumerate(ledger.records):
        for start, stop, category in record.spans(end) if record.account is ledger.main else ():
            yield number, record.bytes, category, start, stop


class Ledger:
    """Every storage that is counted, operator by operator.

    Attributes:
        operators: (operator, phase); the state on entry is number 0.
        accounts: by device.
        named, main: whether a device was named, and the account that figures are of.
        flops: operator number -> FLOPs, of those that have any.
        modules: operator number -> path of its module, where `paths` tells it.
        paths: tells the path of the module that runs; None where nobody asks for it.
        lines: operator number -> (file, line, function) of the user's own code that asked for it.
        records: of all storages.
        repeated: (number of an operator, bytes of each of `CATEGORIES` from it on), of temporaries
            that have no records (`course_lib.memory.repeats`).
        lock: for all that follows; autograd runs one thread per device.
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
        # A tensor there knows that "cuda" is "cuda:0", or that there is no such device.
        self.main = self.account(CPU if device is None else torch.empty(0, device=device).device)
        self.lock = threading.RLock()
        self.closed = False
        self.records: list[Record] = []
        self.repeated: list[tuple[int, np.ndarray]] = []
        self._by_address: dict[int, Record] = {}
        # filled by the weak references, in whichever thread a storage dies
        self._dead: deque[Record] = deque()
        self._expected: Record | None = None  # taken for dead
        self._final: dict[str, np.ndarray] | None = None  # the history, once no more follows

    def account(self, device: torch.device) -> Account:
        """Account of a device; the first accelerator's becomes the main one, unless another device
        was named."""
        device = CPU if device.type == "cpu" else device  # a symbolic tensor can be on "cpu:0"
        if device not in self.accounts:
            self.accounts[device] = Account(device)
            if not self.named and device.type not in ("cpu", "meta") and self.main.device == CPU:
                self.main = self.accounts[device]
        return self.accounts[device]

    def find(self, storage) -> Record | None:
        record = self._by_address.get(storage._cdata)
        # An address can have a new owner before the death of the last one is on the books.
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
        """Count (tensor, role) that are there on entry."""
        for tensor, role in tensors:
            for storage in storages_of(tensor):
                if self.find(storage) is None:
                    self.add(storage, self.account(tensor.device), role, "elsewhere")
        for account in self.accounts.values():
            account.entry_bytes = account.peak_bytes = account.live_bytes

    def assign(self, tensor: Tensor, role: str, since: int = 0) -> None:
        """The tensor takes this role, if it has none; what entered as an input may turn out to have
        another."""
        for storage in storages_of(tensor):
            record = self.find(storage)
            if record is not None and record.role in (None, "input"):
                record.role, record.since = role, max(since, record.born)

    def close(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """No more operators follow; some (tensor, role) may only now be known."""
        self.bury()
        for tensor, role in tensors:
            self.assign(tensor, role)
        self.closed = True

    def made(self, storage) -> None:
        """A storage that no operator made; it has a moment of its own, since others may have died
        before it."""
        with self.lock:
            self._moment()
            self.add(storage, self.account(storage.device), None, "elsewhere")
            self.note_peak()

    def resized(self, storage, was_empty: bool | None = None) -> None:
        """Record a resized storage as freed and allocated anew; one that was empty may be from
        before.

        `was_empty` is None where an operator did it.
        """
        with self.lock:
            record = self.find(storage)
            if record is None and was_empty:
                self.made(storage)
            elif record is not None and record.nbytes != storage.nbytes():
                if was_empty is not None:
                    self._moment()
                self._dead.append(record)
                self.bury()
                self.add(storage, record.account, record.role, record.made_in)
                self.note_peak()

    def _moment(self) -> None:
        self.bury()
        node = torch._C._current_autograd_node()
        self.operators.append((NO_OPERATOR, "forward" if node is None else "backward"))

    def bury(self) -> None:
        """Take the dead off the books. They were alive up to the last operator."""
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
        """The storage is taken for dead since the operator before the last; if it lives on, `bury`
        takes that back."""
        self._leave(record, len(self.operators) - 1)
        self._expected = record

    def note_peak(self) -> None:
        for account in self.accounts.values():
            if account.live_bytes > account.peak_bytes:
                account.peak_bytes, account.peak_index = account.live_bytes, len(self.operators) - 1

    def history(self) -> dict[str, np.ndarray]:
        """category -> live bytes of the main account on entry and after each operator."""
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
