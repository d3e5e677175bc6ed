"""Stages that a symbolic step runs many times over, as a schedule does with equal blocks: run once,
and from then on entered in the meter's books alone.

What a stage makes and lets go of is the same each time: operators, FLOPs, temporaries, and what it
keeps for its backward, until which operator there. So the second time these are written down, and
the tensors that stay are made without the operators that led to them. The books are then those of
the step with all operators, line by line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .categories import CategoryTracker
from .growth import Irregular
from .shape_cache import Outline, extent, make_fake
from .timeline import CATEGORIES, Ledger, Record

GRADIENT = -1  # that of the output, among what dies in a backward
_active: list[Repeats] = []


def active() -> Repeats | None:
    """Those of the meter that is active; None where every stage is to run."""
    return _active[-1] if _active else None


@dataclass(frozen=True)
class Made:
    """A storage that outlives what made it; `born` and `saved` are numbers of operators there.

    A view holds its base: autograd adds nothing to a tensor in place whose storage another one has.
    """

    outline: Outline
    is_view: bool
    role: str | None
    made_in: str
    born: int
    saved: int | None


@dataclass
class Episode:
    """The lines of the books of one forward or backward of a stage, numbered from its first
    operator.

    Attributes:
        operators: (operator, phase) of each line.
        flops: line -> FLOPs.
        temporaries: bytes at each line and of each category, of what is gone at the end.
        made: what stays; tensors that are returned come first.
        read, saved: which of the given tensors this node of the outer graph reads; which are held
            for backward, since which line.
        read_made: which of `made` this node reads.
        drew, result: whether random numbers were drawn; the `result` of a stage that has such.
        returned: the places in `made` of what a backward returns, None for no gradient.
        deaths: line -> which of the forward's `made` are gone by then; `GRADIENT` too.
        released_made, released: which of these, and of the given, no node needs, since which line.
        gradient: what the gradient of the output was like.
    """

    operators: list[tuple[Any, str]]
    flops: dict[int, int]
    temporaries: np.ndarray
    made: list[Made]
    read: list[int] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    read_made: list[int] = field(default_factory=list)
    drew: bool = False
    result: Any = None
    returned: list[int | None] = field(default_factory=list)
    deaths: dict[int, list[int]] = field(default_factory=dict)
    released_made: dict[int, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    gradient: Hashable = None


class Repeats:
    """The episodes of one step under a meter of symbolic tensors.

    Args:
        ledger, usage: the meter's.
        kind_of: what decides how a stage runs, its input aside; None for one that is like no other.
    """

    def __init__(
        self, ledger: Ledger, usage: CategoryTracker, kind_of: Callable[[nn.Module], Hashable]
    ):
        self.ledger, self.usage, self.kind_of = ledger, usage, kind_of
        # stages hold arguments of their call
        self.kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self.forwards: dict[Hashable, Episode | None] = {}
        self.backwards: dict[Hashable, Episode | None] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, they are the active ones."""
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)

    # ---- forward

    def forward(
        self,
        stage: nn.Module,
        given: Sequence[Tensor],
        context: Hashable,
        compute: Callable[[], Any],
        drawing: Any = None,
    ) -> Any:
        """What `compute`, the stage without gradients, returns.

        Args:
            given: the tensors that it computes with, parameters aside.
            context: what else decides.
            drawing: has `seen` set where random numbers are drawn.
        """
        key = self._key(stage, given, context, False)
        if key is None or (key in self.forwards and self.forwards[key] is None):
            return compute()
        if key not in self.forwards:
            result, _ = self._first(key, stage, given, compute, lambda result: result)
            if self.forwards[key] is not None:
                self.forwards[key].drew = getattr(drawing, "seen", False)
            return result
        episode = self.forwards[key]
        if hasattr(drawing, "seen"):
            drawing.seen |= episode.drew
        return self._forward_again(episode, stage, given)[0]

    def keep(
        self,
        stage: nn.Module,
        given: Sequence[Tensor],
        context: Hashable,
        compute: Callable[[], Any],
        slot: Any,
    ) -> Any:
        """What `compute` returns, or what stands for it: an object with `output`, the tensor, and
        `backward()`, which takes the gradient of that out of the slot."""
        key = self._key(stage, given, context, True)
        if key is None or (key in self.forwards and self.backwards.get(key) is None):
            return compute()
        if key not in self.forwards:
            kept, records = self._first(key, stage, given, compute, lambda kept: kept.output)
            return First(self, key, kept, given, records) if self.forwards[key] else kept
        with torch.enable_grad():
            tensors = self._forward_again(self.forwards[key], stage, given)
        read = self.forwards[key].read_made
        return Again(self, self.backwards[key], tensors, given, slot, read)

    def _key(self, stage, given, context, keep: bool) -> Hashable:
        """None where the stage is to run: its buffers may change with each run."""
        if stage not in self.kinds:
            changes = any(True for _ in stage.buffers())
            self.kinds[stage] = None if changes else self.kind_of(stage)
        kind = self.kinds[stage]
        node = torch._C._current_autograd_node()
        return kind and (kind, context, keep, node is None, tuple(map(self._state, given)))

    def _first(self, key, stage, given, compute, output_of) -> tuple[Any, list[Record]]:
        node = torch._C._current_autograd_node()
        before = [record and record.saved for record in map(self._record, given)]
        result, start, new = self._watched(compute)
        episode, records = None, []
        if type(output := output_of(result)) is FakeTensor:
            episode, records = self._episode(start, new, [output], held=output is not result)
        self.forwards[key] = episode
        if episode is not None:
            episode.result = getattr(stage, "result", None)
            if node is not None:
                episode.read_made = [j for j, each in enumerate(records) if each.read_by is node]
            for i, record in enumerate(map(self._record, given)):
                if record is not None and node is not None and record.read_by is node:
                    episode.read.append(i)
                if record is not None and before[i] is None and (record.saved or -1) >= start:
                    episode.saved[i] = record.saved - start
        return result, records

    def _forward_again(self, episode: Episode, stage: nn.Module, given) -> list[Tensor]:
        with self.ledger.lock:
            node = torch._C._current_autograd_node()
            self.usage.inputs(None, [given[i] for i in episode.read], {}, node)
            tensors, start = self._entered(episode, {})
            self.usage.forget_output()
            self.usage.note_read([self._record(tensors[j]) for j in episode.read_made], node)
            for i, saved in episode.saved.items():
                self._record(given[i]).saved = start + saved
        if hasattr(stage, "result"):
            stage.result = episode.result
        return tensors

    # ---- backward

    def first_backward(self, first: First) -> Any:
        gradient = first.kept.slot.gradient
        if gradient is None:
            return first.kept.backward()
        about, records = self._about(gradient), [*first.records, self._record(gradient)]
        del gradient
        found, start, new = self._watched(first.kept.backward)
        self.usage.leave_node()
        results = [found[0], *found[1]]
        there = [tensor for tensor in results if tensor is not None]
        episode, _ = self._episode(start, new, there, held=False)
        self.backwards[first.key] = episode
        if episode is None:
            return found
        order, end = iter(range(len(there))), len(episode.operators)
        episode.gradient = about
        episode.returned = [None if tensor is None else next(order) for tensor in results]
        deaths: dict[int, list[int]] = defaultdict(list)
        for j, record in zip([*range(len(first.records)), GRADIENT], records, strict=True):
            alive = record is None or record.died is None
            deaths[end if alive else max(0, record.died - start)].append(j)
        episode.deaths = dict(deaths)
        episode.released_made = _released(dict(enumerate(first.records)), start)
        episode.released = _released(dict(enumerate(map(self._record, first.given))), start)
        return found

    def backward_again(self, again: Again) -> Any:
        episode, alive = again.episode, again.alive
        alive[GRADIENT] = gradient = again.slot.take()
        if gradient is None or self._about(gradient) != episode.gradient:
            raise Irregular
        del gradient
        with self.ledger.lock:
            self.usage.settle()
            released = {
                j: moment
                for j, moment in episode.released_made.items()
                # up to line 1 it was the outer node that still had it
                if moment > 1 or j not in again.read or self._record(alive[j]).read_by is not None
            }
            self.usage.leave_node()
            start = len(self.ledger.operators)
            for j, moment in released.items():
                self._release(alive[j], start + moment)
            for i, moment in episode.released.items():
                self._release(again.given[i], start + moment)
            made, _ = self._entered(episode, alive)
        alive.clear()
        x_gradient, *gradients = [None if j is None else made[j] for j in episode.returned]
        return x_gradient, gradients

    def _release(self, tensor: Tensor, moment: int) -> None:
        record = self._record(tensor)
        record.saved = record.born if record.saved is None else record.saved
        record.released, record.read_by = moment, None

    # ---- the books

    def _watched(self, compute: Callable[[], Any]) -> tuple[Any, int, list[Record]]:
        """What is computed, the number of its first operator, and the storages that it made."""
        ledger = self.ledger
        with ledger.lock:
            ledger.bury()
            start, first = len(ledger.operators), len(ledger.records)
        result = compute()
        with ledger.lock:
            self.usage.settle()
            ledger.bury()
        return result, start, ledger.records[first:]

    def _episode(
        self, start: int, new: list[Record], returned: list[Tensor], held: bool
    ) -> tuple[Episode | None, list[Record]]:
        """And the records of what it has made; None where something stays that cannot be made
        again."""
        ledger, stop = self.ledger, len(self.ledger.operators)
        rows = np.zeros((stop - start + 1, len(CATEGORIES)), dtype=np.int64)
        for record in new:
            for begin, end, category in record.spans(stop) if record.died is not None else ():
                column = CATEGORIES.index(category)
                rows[begin - start, column] += record.bytes
                rows[end - start, column] -= record.bytes
        stay = {id(record): record for record in new if record.died is None and record.bytes}
        records = [self._record(tensor) for tensor in returned]
        others = [record for key, record in stay.items() if key not in set(map(id, records))]
        if (
            {*map(id, records)} - stay.keys()  # of a tensor that was there before
            or len({*map(id, records)}) < len(records)
            or (others and not held)
            or any(record.account is not ledger.main for record in new)
            or any(
                tensor.storage_offset() or extent(tensor) != record.nbytes
                for tensor, record in zip(returned, records, strict=True)
            )
        ):
            return None, []
        outlines = [Outline(None, t.size(), t.stride(), 0, t.dtype, t.device) for t in returned] + [
            Outline(None, (r.nbytes,), (1,), 0, torch.uint8, r.account.device) for r in others
        ]
        records += others
        made = [
            Made(
                outline,
                j < len(returned) and returned[j]._is_view(),
                record.role,
                record.made_in,
                record.born - start,
                None if record.saved is None else record.saved - start,
            )
            for j, (outline, record) in enumerate(zip(outlines, records, strict=True))
        ]
        flops = {m - start: ledger.flops[m] for m in range(start, stop) if m in ledger.flops}
        return Episode(ledger.operators[start:stop], flops, rows.cumsum(0)[:-1], made), records

    def _entered(self, episode: Episode, alive: dict[int, Tensor]) -> tuple[list[Tensor], int]:
        """The tensors that an episode makes, once it stands in the books, and the number of its
        first operator. What dies in it goes from `alive`."""
        ledger, start, made = self.ledger, len(self.ledger.operators), {}
        account, totals = ledger.main, episode.temporaries.sum(1).tolist()
        born: dict[int, list[int]] = defaultdict(list)
        for j, each in enumerate(episode.made):
            born[each.born].append(j)
        for moment, operator in enumerate(episode.operators):
            for j in episode.deaths.get(moment, ()):
                alive.pop(j, None)
            ledger.bury()
            ledger.operators.append(operator)
            for j in born.get(moment, ()):
                each = episode.made[j]
                made[j] = self._tensor(each)
                ledger.add(made[j].untyped_storage(), account, each.role, each.made_in)
                if each.saved is not None:
                    self._record(made[j]).saved = start + each.saved
            live = account.live_bytes + totals[moment]
            if live > account.peak_bytes:
                account.peak_bytes, account.peak_index = live, start + moment
        ledger.flops |= {start + moment: flops for moment, flops in episode.flops.items()}
        ledger.repeated.append((start, episode.temporaries))
        return [made[j] for j in range(len(made))], start

    def _tensor(self, made: Made) -> Tensor:
        base = make_fake(self.usage.fake_mode, made.outline, [])
        if not made.is_view:
            return base
        view = make_fake(self.usage.fake_mode, made.outline._replace(of=0), [base])
        view.base = base
        return view

    def _record(self, tensor: Tensor) -> Record | None:
        return self.ledger.find(tensor.untyped_storage())

    def _state(self, tensor: Tensor) -> Hashable:
        record = self._record(tensor)
        about = record and (record.role, record.made_in, record.saved is None)
        look = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return look, about

    def _about(self, gradient: Tensor) -> Hashable:
        storage = gradient.untyped_storage()
        return self._state(gradient), torch._C._storage_Use_Count(storage._cdata)


def _released(records: dict[int, Record | None], start: int) -> dict[int, int]:
    return {
        j: record.released - start
        for j, record in records.items()
        if record is not None and record.released is not None and record.released >= start
    }


class First:
    """A stage that was kept for real, whose backward will be watched."""

    def __init__(self, repeats: Repeats, key: Hashable, kept: Any, given, records: list[Record]):
        self.repeats, self.key, self.kept = repeats, key, kept
        self.given, self.records = given, records

    @property
    def output(self) -> Tensor:
        return self.kept.output

    def backward(self) -> Any:
        return self.repeats.first_backward(self)


class Again:
    """What stands for a stage that is kept: what it would hold."""

    def __init__(
        self,
        repeats: Repeats,
        episode: Episode,
        tensors: list[Tensor],
        given: Sequence[Tensor],
        slot: Any,
        read: list[int],
    ):
        self.repeats, self.episode, self.given, self.slot = repeats, episode, given, slot
        self.read = read
        self.output, self.alive = tensors[0], dict(enumerate(tensors))

    def backward(self) -> Any:
        self.output = None
        return self.repeats.backward_again(self)
