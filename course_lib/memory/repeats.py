"""Stages that a symbolic step runs many times, as a schedule does with equal blocks. Each kind of
stage runs once, and its repetitions are only recorded in the meter's ledger.

A stage makes and releases the same each time: operators, FLOPs, temporaries, and tensors that it
keeps for its backward pass, up to the same operator there. From the second time on these are
therefore only recorded, and the tensors that outlive the run are made without the operators that
led to them. Line by line, the ledger is then equal to that of the step with all operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .._torch import attributes_of, tensors_in
from ..symbolic.shape_cache import Outline, extent, make_fake
from .categories import CategoryTracker
from .timeline import CATEGORIES, Ledger, Record
from .trace import Irregular

# Number that stands for the gradient of the output in `Backward.deaths`.
GRADIENT = -1


@dataclass(frozen=True)
class Made:
    """A storage that outlives the run that made it. `born` and `saved` are lines of that run.

    A view keeps its base alive. This matters because autograd adds in place only to a tensor whose
    storage no other tensor shares.
    """

    outline: Outline
    is_view: bool
    role: str | None
    made_in: str
    born: int
    saved: int | None


@dataclass
class Episode:
    """Lines of the ledger for one run of a stage: one line for each operator, numbered from the
    first.

    Attributes:
        operators: (operator, phase) of each line.
        flops: Dict from line to FLOPs.
        temporaries: Bytes at each line and of each category, of storages that are released by the
            end, an int64 array (lines, categories).
        made: Storages that outlive the run. Those of the returned tensors come first.
    """

    operators: list[tuple[Any, str]]
    flops: dict[int, int]
    temporaries: np.ndarray
    made: list[Made]


@dataclass
class Forward:
    """The forward pass of a stage.

    Attributes:
        episode: Its lines.
        saved: Dict from the index of each given tensor that is held for backward to the line from
            which it is held.
        read_made: Indices in `made` of the storages that are read by the node of the outer graph in
            which the stage runs.
        drew: Whether random numbers were drawn.
        result: The stage's attribute `result`, or None if it has none.
        backward: The backward pass of a stage that was kept, once one has run.
    """

    episode: Episode
    saved: dict[int, int] = field(default_factory=dict)
    read_made: list[int] = field(default_factory=list)
    drew: bool = False
    result: Any = None
    backward: Backward | None = None


@dataclass
class Backward:
    """The backward pass of a stage that was kept.

    Attributes:
        episode: Its lines.
        returned: Places of the gradients in `made`, that of the input first; None for no gradient.
        deaths: Dict from line to the indices in the forward's `made` of the storages that are
            released by then. `GRADIENT` stands for the output's gradient.
        released_made: Dict from the index of each of the forward's `made` to the line from which no
            node needs it.
        released: The same dict for the given tensors.
        gradient: State of the output's gradient.
    """

    episode: Episode
    returned: list[int | None]
    deaths: dict[int, list[int]]
    released_made: dict[int, int]
    released: dict[int, int]
    gradient: Hashable


class Repeats:
    """Runs of a step's equal stages that are known already, and are recorded in a meter's ledger.

    Args:
        ledger, usage: The meter's ledger and category tracker.
        kind_of: Function that returns everything that determines how a stage runs, except its
            input, or None for a stage that is equal to no other.
    """

    def __init__(
        self, ledger: Ledger, usage: CategoryTracker, kind_of: Callable[[nn.Module], Hashable]
    ):
        self.books = Books(ledger, usage)
        self.kind_of = kind_of
        # The keys are weak, because stages hold arguments of their call.
        self.kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self.known: dict[Hashable, Forward | None] = {}

    def forward(
        self,
        stage: nn.Module,
        given: Sequence[Tensor],
        context: Hashable,
        compute: Callable[[], Any],
        drawing: Any = None,
    ) -> Any:
        """Return the result of `compute`, which runs the stage without gradients.

        Args:
            stage: The stage.
            given: The tensors that it computes with, except parameters.
            context: Everything else that determines the result.
            compute: Function that runs the stage.
            drawing: Object whose attribute `seen` is set to True if random numbers are drawn, or
                None.
        """
        key = self._key(stage, given, context, False)
        if key is None or (key in self.known and self.known[key] is None):
            return compute()
        if key not in self.known:
            result, _ = self._first(key, stage, given, compute, lambda result: result)
            if found := self.known[key]:
                found.drew = getattr(drawing, "seen", False)
            return result
        if hasattr(drawing, "seen"):
            drawing.seen |= self.known[key].drew
        return self._again(self.known[key], stage, given)[0]

    def keep(
        self,
        stage: nn.Module,
        given: Sequence[Tensor],
        context: Hashable,
        compute: Callable[[], Any],
        slot: Any,
    ) -> Any:
        """Return the result of `compute`, or an object that replaces it.

        Either object has `output`, a tensor, and `backward()`, which takes the gradient of that
        tensor out of the slot and returns the gradients of the input and of the other tensors.
        """
        key = self._key(stage, given, context, True)
        found = self.known.get(key)
        if key is None or (key in self.known and (found is None or found.backward is None)):
            return compute()
        if found is None:
            kept, records = self._first(key, stage, given, compute, lambda kept: kept.output)
            first = self.known[key]
            return kept if first is None else FirstKept(self.books, first, kept, given, records)
        with torch.enable_grad():
            tensors = self._again(found, stage, given)
        return KeptAgain(self.books, found, tensors, given, slot)

    def _key(self, stage, given, context, keep: bool) -> Hashable:
        """Return the key of a run of the stage, or None if the run cannot be repeated.

        A stage cannot be repeated if its buffers or attributes may change with each run, or if no
        other stage is equal to it.
        """
        if stage not in self.kinds:
            changes = any(True for _ in stage.buffers()) or _holds_tensors(stage)
            self.kinds[stage] = None if changes else self.kind_of(stage)
        node = torch._C._current_autograd_node()
        about = context, keep, node is None, tuple(map(self.books.state, given))
        return self.kinds[stage] and (self.kinds[stage], about)

    def _first(self, key, stage, given, compute, output_of) -> tuple[Any, list[Record | None]]:
        books = self.books
        node = torch._C._current_autograd_node()
        before = [record and record.saved for record in map(books.record, given)]
        result, start, new = books.watched(compute)
        episode, records = None, []
        if type(output := output_of(result)) is FakeTensor:
            episode, records = books.episode(start, new, [output], held=output is not result)
        self.known[key] = found = episode and Forward(episode)
        if found is None:
            return result, records
        found.result = getattr(stage, "result", None)
        if node is not None:
            found.read_made = [j for j, each in enumerate(records) if each.read_by is node]
        for i, record in enumerate(map(books.record, given)):
            if record is not None and before[i] is None and (record.saved or -1) >= start:
                found.saved[i] = record.saved - start
        return result, records

    def _again(self, found: Forward, stage: nn.Module, given) -> list[Tensor]:
        books, usage = self.books, self.books.usage
        with books.ledger.lock:
            node = torch._C._current_autograd_node()
            usage.inputs(None, (), {}, node)
            tensors, start = books.enter(found.episode)
            usage.forget_output()
            usage.note_read([books.record(tensors[j]) for j in found.read_made], node)
            for i, saved in found.saved.items():
                books.record(given[i]).saved = start + saved
        if hasattr(stage, "result"):
            stage.result = found.result
        return tensors


class FirstKept:
    """A stage that is kept for real, and whose backward pass is recorded."""

    def __init__(
        self, books: Books, forward: Forward, kept: Any, given, records: list[Record | None]
    ):
        self.books, self.found, self.kept = books, forward, kept
        self.given, self.records = given, records

    @property
    def output(self) -> Tensor:
        return self.kept.output

    def backward(self) -> tuple[Tensor | None, list[Tensor | None]]:
        books = self.books
        gradient = self.kept.slot.gradient
        if gradient is None:
            return self.kept.backward()
        about, of_gradient = books.about(gradient), books.record(gradient)
        del gradient
        result, start, new = books.watched(self.kept.backward)
        books.usage.leave_node()
        gradients = [result[0], *result[1]]
        there = [tensor for tensor in gradients if tensor is not None]
        episode, _ = books.episode(start, new, there, held=False)
        if episode is None:
            return result
        deaths: dict[int, list[int]] = defaultdict(list)
        for j, record in [*enumerate(self.records), (GRADIENT, of_gradient)]:
            alive = record is None or record.died is None
            deaths[len(episode.operators) if alive else max(0, record.died - start)].append(j)
        places = iter(range(len(there)))
        self.found.backward = Backward(
            episode,
            [None if tensor is None else next(places) for tensor in gradients],
            dict(deaths),
            _released(self.records, start),
            _released(map(books.record, self.given), start),
            about,
        )
        return result


class KeptAgain:
    """Replacement for a stage that is kept. It holds the storages that the stage would hold."""

    def __init__(self, books: Books, forward: Forward, tensors: list[Tensor], given, slot: Any):
        self.books, self.forward, self.given, self.slot = books, forward, given, slot
        self.output: Tensor | None = tensors[0]
        self.alive = dict(enumerate(tensors))

    def backward(self) -> tuple[Tensor | None, list[Tensor | None]]:
        self.output = None
        books, found, alive = self.books, self.forward.backward, self.alive
        alive[GRADIENT] = gradient = self.slot.take()
        if gradient is None or books.about(gradient) != found.gradient:
            raise Irregular
        del gradient
        with books.ledger.lock:
            books.usage.settle()
            released = {
                j: line
                for j, line in found.released_made.items()
                # A release up to line 1 was that of the outer node, so it applies only if this
                # run's outer node still reads the storage.
                if line > 1 or j not in self.forward.read_made or books.is_read(alive[j])
            }
            books.usage.leave_node()
            start = len(books.ledger.operators)
            for j, line in released.items():
                books.release(alive[j], start + line)
            for i, line in found.released.items():
                books.release(self.given[i], start + line)
            made, _ = books.enter(found.episode, alive, found.deaths)
        alive.clear()
        x_gradient, *gradients = [None if j is None else made[j] for j in found.returned]
        return x_gradient, gradients


def _holds_tensors(stage: nn.Module) -> bool:
    """Return whether modules of the stage have tensors in attributes. The arguments of a call do
    not count."""
    modules = getattr(stage, "block", stage).modules()
    return any(True for each in modules for _ in tensors_in(list(attributes_of(each).values())))


def _released(records, start: int) -> dict[int, int]:
    """Return a dict from the index of each record that was released at `start` or later to the line
    of its release."""
    return {
        j: record.released - start
        for j, record in enumerate(records)
        if record is not None and record.released is not None and record.released >= start
    }


class Books:
    """A meter's ledger, from which the lines of one run are read and to which the lines of others
    are added."""

    def __init__(self, ledger: Ledger, usage: CategoryTracker):
        self.ledger, self.usage = ledger, usage

    # ---- state of a tensor

    def record(self, tensor: Tensor) -> Record | None:
        return self.ledger.find(tensor.untyped_storage())

    def state(self, tensor: Tensor) -> Hashable:
        record = self.record(tensor)
        about = record and (record.role, record.made_in, record.saved is None)
        look = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return look, about

    def about(self, gradient: Tensor) -> Hashable:
        """Return the state of a gradient, and the number of tensors that share its storage.
        Autograd adds in place to a gradient whose storage has one holder."""
        storage = gradient.untyped_storage()
        return self.state(gradient), torch._C._storage_Use_Count(storage._cdata)

    def is_read(self, tensor: Tensor) -> bool:
        return self.record(tensor).read_by is not None

    def release(self, tensor: Tensor, line: int) -> None:
        record = self.record(tensor)
        if record.saved is None:
            record.saved = record.born  # pyrefly: ignore[bad-assignment]  # it has a record
        record.released = line
        record.read_by = None

    # ---- lines

    def watched(self, compute: Callable[[], Any]) -> tuple[Any, int, list[Record]]:
        """Return the result of a computation, the number of its first line, and the storages that
        it made."""
        ledger = self.ledger
        with ledger.lock:
            ledger.bury()
            start, first = len(ledger.operators), len(ledger.records)
        result = compute()
        with ledger.lock:
            self.usage.settle()
            ledger.bury()
        return result, start, ledger.records[first:]

    def episode(
        self, start: int, new: list[Record], returned: list[Tensor], held: bool
    ) -> tuple[Episode | None, list[Record | None]]:
        """Return the lines from `start` on, and the records of the storages that were made in them
        and outlive them.

        Returns (None, []) if a storage outlives the lines and cannot be made again, or belongs to
        no returned tensor although `held` is False.
        """
        ledger = self.ledger
        stop = len(self.ledger.operators)
        stay = {id(record): record for record in new if record.died is None and record.bytes}
        records = [self.record(tensor) for tensor in returned]
        names = {id(record) for record in records}
        others = [record for name, record in stay.items() if name not in names]
        made_again = names <= stay.keys() and len(names) == len(records)
        alone = made_again and not any(
            tensor.storage_offset() or extent(tensor) != record.nbytes
            for tensor, record in zip(returned, records, strict=True)
        )
        elsewhere = any(record.account is not ledger.main for record in new)
        if not alone or elsewhere or (others and not held):
            return None, []
        made = [
            _made(record, start, tensor) for record, tensor in zip(records, returned, strict=True)
        ]
        made += [_made(record, start) for record in others]
        flops = {m - start: ledger.flops[m] for m in range(start, stop) if m in ledger.flops}
        rows = _temporaries(new, start, stop)
        return Episode(ledger.operators[start:stop], flops, rows, made), [*records, *others]

    def enter(
        self,
        episode: Episode,
        alive: dict[int, Tensor] | None = None,
        deaths: dict[int, list[int]] | None = None,
    ) -> tuple[list[Tensor], int]:
        """Record an episode in the ledger. Return the tensors that it makes and the number of its
        first line.

        Tensors that are released during the episode are removed from `alive`, at the lines that
        `deaths` gives.
        """
        ledger = self.ledger
        start = len(self.ledger.operators)
        made = {}
        account = ledger.main
        totals = episode.temporaries.sum(1).tolist()
        born: dict[int, list[int]] = defaultdict(list)
        for j, each in enumerate(episode.made):
            born[each.born].append(j)
        for line, operator in enumerate(episode.operators):
            for j in (deaths or {}).get(line, ()):
                alive.pop(j, None)
            ledger.bury()
            ledger.operators.append(operator)
            for j in born.get(line, ()):
                made[j] = self._tensor(episode.made[j], start)
            live = account.live_bytes + totals[line]
            if live > account.peak_bytes:
                account.peak_bytes, account.peak_index = live, start + line
        ledger.flops |= {start + line: flops for line, flops in episode.flops.items()}
        ledger.repeated.append((start, episode.temporaries))
        return [made[j] for j in range(len(made))], start

    def _tensor(self, made: Made, start: int) -> Tensor:
        tensor = make_fake(self.usage.fake_mode, made.outline, [])
        self.ledger.add(tensor.untyped_storage(), self.ledger.main, made.role, made.made_in)
        if made.saved is not None:
            self.record(tensor).saved = start + made.saved
        if not made.is_view:
            return tensor
        view = make_fake(self.usage.fake_mode, made.outline._replace(of=0), [tensor])
        view.base = tensor
        return view


def _made(record: Record, start: int, tensor: Tensor | None = None) -> Made:
    if tensor is None:
        outline = Outline(None, (record.nbytes,), (1,), 0, torch.uint8, record.account.device)
    else:
        outline = Outline(None, tensor.size(), tensor.stride(), 0, tensor.dtype, tensor.device)
    saved = None if record.saved is None else record.saved - start
    is_view = tensor is not None and tensor._is_view()
    return Made(outline, is_view, record.role, record.made_in, record.born - start, saved)


def _temporaries(new: list[Record], start: int, stop: int) -> np.ndarray:
    """Return the bytes at each line and of each category, of storages that have been released."""
    change = np.zeros((stop - start + 1, len(CATEGORIES)), dtype=np.int64)
    for record in new:
        for begin, end, category in record.spans(stop) if record.died is not None else ():
            change[begin - start, CATEGORIES.index(category)] += record.bytes
            change[end - start, CATEGORIES.index(category)] -= record.bytes
    return change.cumsum(0)[:-1]
