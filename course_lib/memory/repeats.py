"""Forward passes of equal stages, of which a symbolic step runs one per kind.

A schedule runs most of its stages several times without gradients, and the blocks of a model are
often equal. Such a run allocates and releases the same each time: operators, FLOPs, temporaries and
one output. It is therefore computed once per kind of stage. Later runs are only recorded: the
meter's ledger gets the same lines, and the output is made without the operators that led to it.
Line by line, the ledger equals that of the step with all operators.

Runs that keep tensors for a backward pass, and the backward passes, are always computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ForwardRun:
    """What one run of a stage adds to a ledger. Lines are numbered from the first of the run.

    Attributes:
        operators: (operator, phase) of each line.
        flops: Dict from line to FLOPs.
        temporaries: Bytes of the storages that are released by the end, an int64 array of shape
            (lines, categories).
        outline: Shape, strides, dtype and device of the output.
        role, made_in: Attributes of the record of the output's storage.
        is_view: Whether the output is a view. A view keeps its base alive, which matters because
            autograd adds in place only to a tensor whose storage no other tensor shares.
        born: Line at which the output's storage is made.
        saved: Dict from the index of each given tensor, or -1 for the output, to the line from
            which it is held for backward.
        is_read: Whether the node of the outer graph in which the stage runs reads the output.
        drew: Whether random numbers were drawn.
        result: The stage's attribute `result`, or None if it has none.
    """

    operators: list[tuple[Any, str]]
    flops: dict[int, int]
    temporaries: np.ndarray
    outline: Outline
    role: str | None
    made_in: str
    is_view: bool
    born: int
    saved: dict[int, int]
    is_read: bool
    drew: bool
    result: Any


class Repeats:
    """Forward passes that are known already, and are recorded in a meter's ledger.

    Args:
        ledger, usage: The meter's ledger and category tracker.
        kind_of: Function that returns everything that determines how a stage runs, except its
            input, or None for a stage that is equal to no other.
    """

    def __init__(
        self, ledger: Ledger, usage: CategoryTracker, kind_of: Callable[[nn.Module], Hashable]
    ):
        self.ledger, self.usage, self.kind_of = ledger, usage, kind_of
        # The keys are weak, because stages hold arguments of their call.
        self.kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        # None stands for a run that cannot be recorded.
        self.known: dict[Hashable, ForwardRun | None] = {}

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
        key = self._key(stage, given, context)
        if key not in self.known:
            return self._computed(key, stage, given, compute, drawing)
        found = self.known[key]
        if found is None:
            return compute()
        if hasattr(drawing, "seen"):
            drawing.seen |= found.drew
        if hasattr(stage, "result"):
            stage.result = found.result
        with self.ledger.lock:
            return self._recorded(found, given)

    def _key(self, stage: nn.Module, given: Sequence[Tensor], context: Hashable) -> Hashable:
        """Return the key of a run of the stage.

        A stage is equal to no other if its buffers or attributes may change with each run.
        """
        if stage not in self.kinds:
            changes = any(True for _ in stage.buffers()) or _holds_tensors(stage)
            self.kinds[stage] = None if changes else self.kind_of(stage)
        kind = self.kinds[stage]
        if kind is None:
            return None
        in_backward = torch._C._current_autograd_node() is not None
        return kind, context, in_backward, tuple(map(self._state, given))

    def _state(self, tensor: Tensor) -> Hashable:
        """Return everything about a given tensor that determines the run's lines."""
        record = self._record(tensor)
        about = record and (record.role, record.made_in, record.saved is None)
        look = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return look, about

    def _record(self, tensor: Tensor) -> Record | None:
        return self.ledger.find(tensor.untyped_storage())

    # ---- The first run of a kind

    def _computed(self, key, stage, given, compute, drawing) -> Any:
        """Run the stage, remember the lines that it adds to the ledger, and return its result."""
        if key is None:
            return compute()
        ledger = self.ledger
        with ledger.lock:
            ledger.bury()
            start, first = len(ledger.operators), len(ledger.records)
        was_saved = [record and record.saved for record in map(self._record, given)]
        result = compute()
        with ledger.lock:
            self.usage.settle()
            ledger.bury()
        self.known[key] = None
        new = ledger.records[first:]
        output = self._record(result) if type(result) is FakeTensor else None
        if output is None or not self._can_be_made(result, output, new):
            return result

        stop = len(ledger.operators)
        saved = {}
        for i, record in enumerate(map(self._record, given)):
            if record is not None and record.saved is not None and was_saved[i] is None:
                saved[i] = record.saved - start
        if output.saved is not None:
            saved[-1] = output.saved - start
        node = torch._C._current_autograd_node()
        self.known[key] = ForwardRun(
            operators=ledger.operators[start:stop],
            flops={m - start: ledger.flops[m] for m in range(start, stop) if m in ledger.flops},
            temporaries=_temporaries(new, start, stop),
            outline=Outline(None, result.size(), result.stride(), 0, result.dtype, result.device),
            role=output.role,
            made_in=output.made_in,
            is_view=result._is_view(),
            born=output.born - start,
            saved=saved,
            is_read=node is not None and output.read_by is node,
            drew=getattr(drawing, "seen", False),
            result=getattr(stage, "result", None),
        )
        return result

    def _can_be_made(self, result: Tensor, output: Record, new: list[Record]) -> bool:
        """Return whether the output is the only storage that a run leaves, and fills it."""
        left = [record for record in new if record.died is None and record.bytes]
        fills = result.storage_offset() == 0 and extent(result) == output.nbytes
        on_device = all(record.account is self.ledger.main for record in new)
        return left == [output] and fills and on_device

    # ---- Later runs

    def _recorded(self, found: ForwardRun, given: Sequence[Tensor]) -> Tensor:
        """Add the lines of a run to the ledger, and return its output."""
        ledger, usage, account = self.ledger, self.usage, self.ledger.main
        node = torch._C._current_autograd_node()
        usage.inputs(None, (), {}, node)
        ledger.bury()
        start, before = len(ledger.operators), account.live_bytes
        ledger.operators += found.operators[: found.born + 1]
        output = make_fake(usage.fake_mode, found.outline, [])
        ledger.add(output.untyped_storage(), account, found.role, found.made_in)
        ledger.operators += found.operators[found.born + 1 :]
        ledger.flops |= {start + line: flops for line, flops in found.flops.items()}
        ledger.repeated.append((start, found.temporaries))

        live = before + found.temporaries.sum(1)
        live[found.born :] += account.live_bytes - before
        peak = int(live.argmax())
        if live[peak] > account.peak_bytes:
            account.peak_bytes, account.peak_index = int(live[peak]), start + peak

        usage.forget_output()
        tensors = [*given, output]
        for i, line in found.saved.items():
            self._record(tensors[i]).saved = start + line
        if found.is_read:
            usage.note_read([self._record(output)], node)
        if not found.is_view:
            return output
        view = make_fake(usage.fake_mode, found.outline._replace(of=0), [output])
        view.base = output
        return view


def _holds_tensors(stage: nn.Module) -> bool:
    """Return whether modules of the stage have tensors in attributes. The arguments of a call do
    not count."""
    modules = getattr(stage, "block", stage).modules()
    return any(True for each in modules for _ in tensors_in(list(attributes_of(each).values())))


def _temporaries(new: list[Record], start: int, stop: int) -> np.ndarray:
    """Return the bytes at each line and of each category, of storages that have been released."""
    change = np.zeros((stop - start + 1, len(CATEGORIES)), dtype=np.int64)
    for record in new:
        for begin, end, category in record.spans(stop) if record.died is not None else ():
            change[begin - start, CATEGORIES.index(category)] += record.bytes
            change[end - start, CATEGORIES.index(category)] -= record.bytes
    return change.cumsum(0)[:-1]
