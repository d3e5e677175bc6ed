"""Run only one of several equal forward passes of stages, in a step on symbolic tensors.

Symbolic tensors have shapes but no values. A stage is a module of a chain (modules that are called
in order), such as a block of the model. A schedule runs most stages several times without
gradients, and the blocks of a model are often equal. Each run of equal stages has the
same operators, FLOPs and temporaries, and leaves one output of the same size. Therefore only the
first run of each kind of stage is computed. For each later run, the operators of the first run are
added to the records of the memory meter again. The output is created without running the operators.
The records then equal, operator by operator, those of a step that runs all operators.

Runs that keep tensors for a backward pass, and the backward passes, are always computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from course_lib._torch.autograd import current_node
from course_lib._torch.modules import attributes_of
from course_lib._torch.symbolic import FakeTensor
from course_lib._torch.tensors import tensors_in
from course_lib.memory.categories import CategoryTracker
from course_lib.memory.timeline import CATEGORIES, Record, StorageTracker
from course_lib.symbolic.shape_cache import Outline, extent, make_fake


@dataclass(frozen=True)
class ForwardRun:
    """Recorded forward pass of one stage, which can be replayed for equal stages.

    A stage is one module of a chain. To replay a pass is to add its points and bytes to a memory
    meter without running its operators. A point is one operator, and points are numbered from 0 at
    the first operator of the pass.

    Attributes:
        operators: Pair (operator, phase) of each point.
        flops: Dict from point to FLOPs. Points without FLOPs are left out.
        temporaries: Live bytes of the temporary storages, which the pass both creates and releases.
            An int64 array of shape (points, categories), with the categories in the order of
            `CATEGORIES`.
        outline: Shape, strides, dtype and device of the output.
        role: Role of the output's storage, as in the attribute `role` of `Record`. None means an
            activation or a temporary.
        made_in: Pass that created the output's storage, as in the attribute `made_in` of `Record`.
        born: Point at which the output's storage is created.
        drew: Whether the pass drew random numbers.
        result: Value that the pass stored in `stage.result`. Each replay stores it in the attribute
            `result` of the replayed stage. None if the stage has no such attribute.
    """

    operators: list[tuple[Any, str]]
    flops: dict[int, int]
    temporaries: np.ndarray
    outline: Outline
    role: str | None
    made_in: str
    born: int
    drew: bool
    result: Any


class ForwardPassCache:
    """Cache of forward passes of stages, which are replayed for equal stages.

    A stage is one module of a chain. To replay a pass is to add its operators and bytes to a memory
    meter without running the operators.

    Args:
        tracker: `StorageTracker` of the memory meter, which records all storages.
        usage: `CategoryTracker` of the memory meter, which determines the category of each storage,
            such as "activation".
        kind_of: Function that takes a stage and returns a hashable value. Two stages with the same
            value are equal: they run the same operators for the same input. The value None means
            that no other stage is equal.
    """

    def __init__(
        self,
        tracker: StorageTracker,
        usage: CategoryTracker,
        kind_of: Callable[[nn.Module], Hashable],
    ):
        self.tracker, self.usage, self.kind_of = tracker, usage, kind_of
        # The keys are weak references, so that a stage and the arguments that it holds can be
        # released.
        self.kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        # The value None marks a run that must be computed each time.
        self.cache: dict[Hashable, ForwardRun | None] = {}

    def forward(
        self,
        stage: nn.Module,
        given: Sequence[Tensor],
        context: Hashable,
        compute: Callable[[], Any],
        drawing: Any = None,
    ) -> Any:
        """Return the output of a stage that runs without gradients.

        If an equal stage has run before, and its recorded pass can be replayed, the pass is
        replayed. The output is then a new symbolic tensor with the same shape. Otherwise `compute`
        runs the stage.

        Args:
            stage: Stage to run: a module of a chain (modules that are called in order).
            given: Tensors that the stage reads, except its parameters.
            context: Hashable tuple of the remaining settings that determine the output: whether the
                stage is the last one, whether its input needs a gradient, and whether autocast is
                on.
            compute: Function without arguments that runs the stage and returns its output.
            drawing: Active dispatch mode that sets its attribute `seen` to True when random numbers
                are drawn. A replay of a pass that drew random numbers also sets `seen` to True.
                None if random draws need not be noticed.
        """
        key = self._key(stage, given, context)
        if key not in self.cache:
            return self._compute(key, stage, given, compute, drawing)
        found = self.cache[key]
        if found is None:
            return compute()
        if hasattr(drawing, "seen"):
            drawing.seen |= found.drew
        if hasattr(stage, "result"):
            stage.result = found.result
        with self.tracker.lock:
            return self._replay_record(found)

    def _key(self, stage: nn.Module, given: Sequence[Tensor], context: Hashable) -> Hashable:
        """Return the key that equal runs share, or None if the run must always be computed.

        A run must always be computed if it may change the stage's buffers, or tensors in attributes
        of the stage.
        """
        if stage not in self.kinds:
            changes = any(True for _ in stage.buffers()) or _holds_tensors(stage)
            self.kinds[stage] = None if changes else self.kind_of(stage)
        kind = self.kinds[stage]
        if kind is None:
            return None
        in_backward = current_node() is not None
        return kind, context, in_backward, tuple(map(self._input_signature, given))

    def _input_signature(self, tensor: Tensor) -> Hashable:
        """Return the properties of an input that determine the operators and bytes of a run."""
        record = self._record(tensor)
        about = record and (record.role, record.made_in, record.saved is None)
        look = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return look, about

    def _record(self, tensor: Tensor) -> Record | None:
        """Return the record that the memory meter's tracker has of a tensor's storage, or None."""
        return self.tracker.find(tensor.untyped_storage())

    # ---- The first run of a kind

    def _compute(self, key, stage, given, compute, drawing) -> Any:
        """Run the stage, store its operators and bytes in the cache, and return its result."""
        if key is None:
            return compute()
        tracker = self.tracker
        with tracker.lock:
            tracker.confirm_released()
            start, first = len(tracker.operators), len(tracker.records)
        result = compute()
        with tracker.lock:
            self.usage.settle()
            tracker.confirm_released()
        self.cache[key] = None
        new = tracker.records[first:]
        output = self._record(result) if type(result) is FakeTensor else None
        if output is None or not self._can_be_recreated(result, output, new):
            return result

        stop = len(tracker.operators)
        self.cache[key] = ForwardRun(
            operators=tracker.operators[start:stop],
            flops={m - start: tracker.flops[m] for m in range(start, stop) if m in tracker.flops},
            temporaries=_temporaries(new, start, stop),
            outline=Outline(None, result.size(), result.stride(), 0, result.dtype, result.device),
            role=output.role,
            made_in=output.made_in,
            born=output.born - start,
            drew=getattr(drawing, "seen", False),
            result=getattr(stage, "result", None),
        )
        return result

    def _can_be_recreated(self, result: Tensor, output: Record, new: list[Record]) -> bool:
        """Return whether later runs can create the output without running the operators.

        This is possible if the run leaves only the output's storage, and the output fills this
        storage.
        """
        left = [record for record in new if record.died is None and record.bytes]
        fills = result.storage_offset() == 0 and extent(result) == output.nbytes
        on_device = all(record.account is self.tracker.main for record in new)
        return left == [output] and fills and on_device

    # ---- Later runs

    def _replay_record(self, found: ForwardRun) -> Tensor:
        """Replay an earlier run of an equal stage, and return a new symbolic output.

        The operators, FLOPs and bytes of the earlier run are added to the memory meter's tracker.
        """
        tracker, usage = self.tracker, self.usage
        usage.inputs(None, (), {}, current_node())
        tracker.confirm_released()
        start = len(tracker.operators)
        tracker.operators += found.operators[: found.born + 1]
        output = make_fake(usage.fake_mode, found.outline, [])
        tracker.add(output.untyped_storage(), tracker.main, found.role, found.made_in)
        tracker.operators += found.operators[found.born + 1 :]
        tracker.flops |= {start + point: flops for point, flops in found.flops.items()}
        tracker.repeated.append((start, found.temporaries))
        return output


def _holds_tensors(stage: nn.Module) -> bool:
    """Return whether a module of the stage has an attribute with tensors.

    Parameters and buffers do not count, nor do the attributes of a wrapper, which hold arguments of
    the call.
    """
    modules = getattr(stage, "block", stage).modules()
    return any(True for each in modules for _ in tensors_in(list(attributes_of(each).values())))


def _temporaries(new: list[Record], start: int, stop: int) -> np.ndarray:
    """Return the live bytes of the storages that a run both created and released, at each point.

    Args:
        new: Records of the storages that the run created.
        start, stop: Bounds of the run's points in the tracker. A point is one operator.

    Returns:
        An int64 array of shape (points, categories).
    """
    change = np.zeros((stop - start + 1, len(CATEGORIES)), dtype=np.int64)
    for record in new:
        for begin, end, category in record.spans(stop) if record.died is not None else ():
            change[begin - start, CATEGORIES.index(category)] += record.bytes
            change[end - start, CATEGORIES.index(category)] -= record.bytes
    return change.cumsum(0)[:-1]
