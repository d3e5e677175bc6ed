"""Category of each storage, found from what operators, the autograd graph and optimizers do with
it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._torch.autograd import AccumulateGrad, current_graph_task_id, current_node
from .._torch.modes import WRAPPERS, TorchDispatchMode
from .._torch.symbolic import FakeTensor, FakeTensorMode
from .._torch.tensors import holders_of, tensors_among
from ..symbolic import Symbolic
from .compiler import BuffersForBackward
from .storages import held_by, hooks_active, saved_by, storages_of
from .timeline import Ledger, Record

ADD = torch.ops.aten.add.Tensor
# The gradient formulas of `max`, `gather`, `x[i]` and others write into a tensor of zeros, in
# place. If a dispatch mode is active, they call one of these operators, which makes a new tensor.
_INTO_ZEROS = {
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.put.default,
    torch.ops.aten.masked_scatter.default,
}
IN_PLACE_WITHOUT_MODES = {ADD, *_INTO_ZEROS}
# `torch.tensor([...])` calls this operator. It returns its input, whose storage is new.
# `torch.from_numpy` calls it too, but a storage that NumPy owns cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_FROM_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


class CategoryTracker:
    """Tracker that records which storages operators read and make, and which the graph keeps."""

    def __init__(self, ledger: Ledger, leaves_are_parameters: bool):
        self.ledger = ledger
        self.leaves_are_parameters = leaves_are_parameters
        # The fake mode that was active when the meter was entered.
        self.fake_mode: FakeTensorMode | None = None
        # The autograd node that ran the last operator, and the number of its first operator.
        self.node = None
        self.node_began = 0
        # Records of saved storages that this node has read.
        self._read: list[Record] = []
        # First output of the last operator. Its autograd node exists only after the operator has
        # returned.
        self._output: weakref.ref | None = None
        # Autograd numbers the nodes that each thread makes. The last operator made the nodes from
        # number `_oldest` on, and the next one will make those from `_next[thread]` on. An
        # `autograd.Function` makes its node before it runs, with the number `_oldest_of_node` at
        # the earliest. A node of another thread may have any number, so `_newest` excludes most of
        # them: on a GPU, backward runs in a thread of its own.
        self._oldest = self._oldest_of_node = self._newest = 0
        self._next: dict[int, int] = {}
        self.buffers = BuffersForBackward()

    def inputs(self, func, args, kwargs, node) -> tuple[str, set[int]]:
        """Note the input storages of an operator. Call this before the operator runs.

        Returns:
            The pass to which the operator belongs ("forward", "recomputation" or "elsewhere"), and
            the addresses of its input storages.
        """
        self.settle()
        thread = threading.get_ident()
        self._oldest, self._next[thread] = (
            self._next.get(thread, 0),
            torch.autograd._get_sequence_nr(),
        )
        if node is not self.node:
            self._oldest_of_node = 0 if node is None else self._next[thread]
            self._release()
            self.node, self.node_began = node, len(self.ledger.operators)
        # Gradients that are enabled during backward are taken as the sign of a recomputation. A
        # backward pass with create_graph=True is treated in the same way.
        made_in = (
            "forward"
            if node is None
            else "recomputation"
            if torch.is_grad_enabled()
            else "elsewhere"
        )
        if self.buffers and isinstance(node, torch.autograd.function.BackwardCFunction):
            self.note_read(self.buffers.read_by(node, made_in), node)
        sources = {args[1]._cdata} if func in _FROM_STORAGE else set()
        for tensor in tensors_among(args, kwargs):
            for storage in storages_of(tensor):
                sources.add(storage._cdata)
                record = self.ledger.find(storage)
                if record is None:
                    continue
                if record.role in (None, "input") and self._is_parameter(tensor, record):
                    record.role, record.since = "parameter", record.born
                # If backward reads a storage from the forward pass, the storage was kept for
                # backward.
                kept = record.made_in == "forward" or (
                    record.made_in == "recomputation" and made_in == "elsewhere"
                )
                if node is not None and kept:
                    self.note_read([record], node)
        return made_in, sources

    def note_read(self, records: Iterable[Record], node: Any) -> None:
        """Record that a backward node reads storages that were kept for it."""
        for record in records:
            if record.read_by is not node:
                # The storage may be held by something other than the graph, for example by
                # checkpointing.
                if record.saved is None:
                    record.saved = record.born
                record.released, record.read_by = None, node
                self._read.append(record)

    def _is_parameter(self, tensor: Tensor, record: Record) -> bool:
        if type(tensor) is nn.Parameter or (
            type(tensor) is FakeTensor and hasattr(tensor, "_is_param")
        ):
            return True
        return (
            self.leaves_are_parameters
            and record.role == "input"
            and tensor.requires_grad
            and tensor.is_leaf
        )

    def outputs(self, func, result, sources: set[int], made_in: str) -> None:
        ledger = self.ledger
        tensors = [t for t in tensors_among((result,)) if not self._is_a_shape_alone(t)]
        for tensor in tensors:
            for storage in storages_of(tensor):
                record = ledger.find(storage)
                if record is not None:
                    if record.nbytes != storage.nbytes():
                        ledger.resize_storage(storage)
                elif storage._cdata not in sources or (func is _LIFT_FRESH and storage.resizable()):
                    # Data enters a step through an operator that has no input tensor.
                    enters = not sources - {storage._cdata} and ledger.operators[-1][1] == "forward"
                    ledger.add(
                        storage, ledger.account(tensor.device), "input" if enters else None, made_in
                    )
        # Under saved-tensor hooks the graph holds only what the hooks returned, so the
        # node of the output is not examined. After an in-place change of a view, autograd rebuilds
        # the view's node when `grad_fn` is first read. For symbolic tensors, rebuilding runs an
        # operator, which would read `grad_fn` again without end.
        watched = tensors and made_in != "elsewhere" and not hooks_active()
        # A higher-order operator has no `_schema`.
        if watched and tensors[0]._is_view() and hasattr(func, "_schema"):
            watched = not func._schema.is_mutable
        self._output = weakref.ref(tensors[0]) if watched else None
        # Autograd makes a few nodes after the operator, such as that of an in-place change.
        self._newest = torch.autograd._get_sequence_nr() + 8

    def _is_a_shape_alone(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a fake tensor of a mode that was entered inside the block.
        DTensor makes such tensors to find shapes, and they take no memory."""
        mode = tensor.fake_mode if type(tensor) is FakeTensor else self.fake_mode
        return mode is not self.fake_mode and not isinstance(mode, Symbolic)

    def settle(self) -> None:
        """Record which tensors the last operator's autograd node saved, or which gradient it
        accumulated. Both are visible only after the operator has returned."""
        now = len(self.ledger.operators) - 1
        output = self._output and self._output()
        if output is not None and output.grad_fn is not None and self._is_new(output.grad_fn):
            for tensor in saved_by(output.grad_fn):
                for storage in storages_of(tensor):
                    record = self.ledger.find(storage)
                    if record is not None and record.saved is None:
                        record.saved = now
        if isinstance(self.node, AccumulateGrad) and self.node.variable.grad is not None:
            self.ledger.assign(self.node.variable.grad, "gradient", now)

    def forget_output(self) -> None:
        """Drop the weak reference to the last output, which `torch.utils.swap_tensors` refuses."""
        self.settle()
        self._output = None

    def _is_new(self, node) -> bool:
        """Return whether the last operator made the node. An older node, such as that of a saved
        result, may have been made under saved-tensor hooks."""
        function = isinstance(node, torch.autograd.function.BackwardCFunction)
        oldest = self._oldest_of_node if function else self._oldest
        return oldest <= node._sequence_nr() < self._newest

    def finish(self) -> None:
        """Complete the records after the last operator."""
        self.settle()
        self._release()
        self.node = None

    def _release(self) -> None:
        """Mark the storages that the current autograd node has read as no longer needed by it."""
        for record in self._read:
            record.released, record.read_by = len(self.ledger.operators), None
        self._read.clear()

    def taken_over(self, func, args, kwargs) -> Record | None:
        """Return the record of the input into which autograd would write the result if no dispatch
        mode were active, or None if autograd would make a new tensor in that case too.

        Autograd adds gradients that meet at a node in place, and some gradient formulas write into
        a tensor of zeros in place. If a dispatch mode is active, both call operators that make a
        new tensor instead (`IN_PLACE_WITHOUT_MODES`). The meter is such a mode. To report the bytes
        that the program takes without it, the meter counts such a result in the storage of the
        operator's first argument.

        Three properties identify autograd's own calls. No Python function called the operator. The
        first argument is the only tensor in its storage, and it fills the storage. And this storage
        is released when the call returns, which `Ledger.expect_end` checks. In addition, the
        tensor of zeros must have been made by the node that is running. The first argument of a sum
        must be older, unless two gradients of that node are added.

        Source: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`), and
        `areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp.
        """
        if (
            self.node is None
            or (func is ADD and (kwargs or torch.is_grad_enabled()))
            or not _called_by_autograd()
        ):
            return None
        total, new = args[0], args[1] if func is ADD else args[0]
        if not all(
            isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested
            for t in (total, new)
        ):
            return None
        if total.shape != new.shape:
            return None
        (storage,), others = storages_of(total), storages_of(new) if func is ADD else ()
        record = self.ledger.find(storage)
        if (
            record is None
            or storage in others
            or holders_of(storage) != _ONE_HOLDER
            or record.nbytes != total.nbytes
        ):
            return None
        if func is not ADD:
            return record if record.born >= self.node_began else None
        # Two gradients from one node can also meet, as the two gradients of z in z * z do.
        edges = self.node.next_functions
        return record if record.born < self.node_began or len(set(edges)) < len(edges) else None


_alone = torch.empty(0)
_ONE_HOLDER = holders_of(_alone.untyped_storage())


def _called_by_autograd() -> bool:
    """Return whether all Python frames between this module and autograd's engine belong to dispatch
    modes."""
    frame = sys._getframe()
    while frame is not None and (frame.f_globals.get("__name__") in _WRAPPERS or _of_a_mode(frame)):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _of_a_mode(frame) -> bool:
    """Return whether a frame belongs to a dispatch mode, judged by names alone. Reading the frame's
    `f_locals` would copy them, and so keep tensors alive that the function has released."""
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    found = frame.f_globals.get(owner)
    return name == "__torch_dispatch__" or (
        isinstance(found, type) and issubclass(found, TorchDispatchMode)
    )


# This module, and those of the functions in which PyTorch wraps dispatch modes.
_WRAPPERS = (__name__, *WRAPPERS)


class OptimizerPhase:
    """Tracker of whether an optimizer is stepping.

    If an optimizer steps within another optimizer's step, only the outermost one begins and ends
    the phase.
    """

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._outermost: torch.optim.Optimizer | None = None
        # The autograd node in which the step was called, and the number of records at that time.
        self._node: Any = None
        self._began = 0
        # The optimizers that have stepped in the current backward pass, and the number of the pass.
        self._stepped, self._backward = weakref.WeakSet(), -1
        self._hooks = (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

    def is_running(self, node) -> bool:
        """Return whether an operator that this autograd node runs belongs to an optimizer's
        step."""
        # If gradients are enabled, or the node is another one, the step's closure is running: the
        # forward and backward passes of LBFGS, for example.
        return self._outermost is not None and node is self._node and not torch.is_grad_enabled()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._outermost = self._node = None

    def _begin_step(self, optimizer, args, kwargs) -> None:
        if self._outermost is None:
            self._outermost = optimizer
            self._node = current_node()
            self._began = len(self.ledger.records)

    def _end_step(self, optimizer, args, kwargs) -> None:
        if self._outermost is optimizer:
            self._outermost = None
        with self.ledger.lock:
            for tensor in held_by(optimizer, of_groups=True) if self._is_due(optimizer) else ():
                self.ledger.assign(tensor, "optimizer")

    def _is_due(self, optimizer) -> bool:
        """Return whether an optimizer's state is to be looked at after its step.

        Steps in backward update one parameter each. If each of them were followed by a look at the
        state of all parameters, the time would grow with the square of their number. Therefore, if
        an optimizer has stepped before in the same backward pass, its state is looked at only if
        the step made a tensor that is still live and has no role.
        """
        backward = current_graph_task_id()  # -1 outside of a backward pass
        if backward != self._backward:
            self._stepped, self._backward = weakref.WeakSet(), backward
        if backward == -1 or optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return True
        made = self.ledger.records[self._began :]
        return any(r.nbytes and r.role in (None, "input") and r() is not None for r in made)
