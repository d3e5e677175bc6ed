"""Categories of storages, told from what operators, the autograd graph and optimizers do with
it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .compiler import BuffersForBackward
from .concrete_ints import Symbolic
from .storages import AccumulateGrad, held_by, hooks_active, saved_by, storages_of, tensors_among
from .timeline import Ledger, Record

ADD = torch.ops.aten.add.Tensor
# Formulas of `max`, `gather`, `x[i]` and others write into zeros: in place, or by these where a
# mode is active.
_INTO_ZEROS = {
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.put.default,
    torch.ops.aten.masked_scatter.default,
}
IN_PLACE_WITHOUT_MODES = {ADD, *_INTO_ZEROS}
# What `torch.tensor([...])` calls: it returns its input, and that is new. `torch.from_numpy` calls
# it too, but what NumPy owns cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_FROM_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


class CategoryTracker:
    """Writes into the ledger what operators read and make, and what the graph keeps."""

    def __init__(self, ledger: Ledger, leaves_are_parameters: bool):
        self.ledger = ledger
        self.leaves_are_parameters = leaves_are_parameters
        self.fake_mode: FakeTensorMode | None = None  # in which the block stands
        self.node = None  # the autograd node that ran the last operator ...
        self.node_began = 0  # ... and the number of its first one
        self._read: list[Record] = []  # what that node has read so far
        # of the last operator: its autograd node can be seen after it
        self._output: weakref.ref | None = None
        # Autograd numbers the nodes that a thread makes: the last operator made those from
        # `_oldest` on, the next one those from `_next[thread]` on. A Function makes its own before
        # it runs, `_oldest_of_node` at the earliest.
        self._oldest = self._oldest_of_node = 0
        self._next: dict[int, int] = {}
        self.buffers = BuffersForBackward()

    def inputs(self, func, args, kwargs, node) -> tuple[str, set[int]]:
        """The pass to which an operator belongs, and the addresses of its input storages; to be
        asked before it runs."""
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
        # In backward, gradients are on only where the forward pass is computed again.
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
                # What backward reads of the forward pass had been kept for it.
                kept = record.made_in == "forward" or (
                    record.made_in == "recomputation" and made_in == "elsewhere"
                )
                if node is not None and kept:
                    self.note_read([record], node)
        return made_in, sources

    def note_read(self, records: Iterable[Record], node: Any) -> None:
        """A node of backward reads what had been kept for it."""
        for record in records:
            if record.read_by is not node:
                # held by other means than the graph, as checkpointing does
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
                        ledger.resized(storage)
                elif storage._cdata not in sources or (func is _LIFT_FRESH and storage.resizable()):
                    # Data enters a step through an operator that has no tensor to start from.
                    enters = not sources - {storage._cdata} and ledger.operators[-1][1] == "forward"
                    ledger.add(
                        storage, ledger.account(tensor.device), "input" if enters else None, made_in
                    )
        # Under hooks the graph holds not the tensors but what the hooks made of them. After a
        # change in place, a view's node is made anew by whoever asks first: symbolically by an
        # operator, and to ask within that would never end.
        watched = tensors and made_in != "elsewhere" and not hooks_active()
        watched = watched and not (_is_mutable(func) and tensors[0]._is_view())
        self._output = weakref.ref(tensors[0]) if watched else None

    def _is_a_shape_alone(self, tensor: Tensor) -> bool:
        """Whether it is a fake tensor of a mode entered inside the block, as DTensor does to find
        shapes: no memory."""
        mode = tensor.fake_mode if type(tensor) is FakeTensor else self.fake_mode
        return mode is not self.fake_mode and not isinstance(mode, Symbolic)

    def settle(self) -> None:
        """Record what the last operator's autograd node saved, or accumulated, which is to be seen
        only once the operator is through."""
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

    def _is_new(self, node) -> bool:
        """Whether the last operator made the node; an older one, as a saved result has, may be made
        under hooks."""
        function = isinstance(node, torch.autograd.function.BackwardCFunction)
        return node._sequence_nr() >= (self._oldest_of_node if function else self._oldest)

    def finish(self) -> None:
        """No more operators follow."""
        self.settle()
        self.leave_node()

    def leave_node(self) -> None:
        """The next operator is of another autograd node."""
        self._release()
        self.node, self._oldest_of_node = None, 0

    def forget_output(self) -> None:
        """The last operator's output stays unseen."""
        self._output = None

    def _release(self) -> None:
        """The autograd node that read these is through with them."""
        for record in self._read:
            record.released, record.read_by = len(self.ledger.operators), None
        self._read.clear()

    def taken_over(self, func, args, kwargs) -> Record | None:
        """The storage that would take up the result if no dispatch mode were active.

        Autograd adds gradients that meet at a node in place, and some formulas write into zeros in
        place, unless a mode is active: then they call operators that make a new tensor
        (`IN_PLACE_WITHOUT_MODES`). The meter is a mode; so that it reports what the program takes
        without it, it counts such a result as that first argument. Autograd's own calls are told
        from others by who calls (no Python function), and by the first argument: one tensor alone
        holds its storage, which it fills, and it dies with the call (`Ledger.expect_end`). Of a
        sum, the node now running did not make it in its formula; zeros it did.

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
            or _holders(storage) != _ONE_HOLDER
            or record.nbytes != total.nbytes
        ):
            return None
        if func is not ADD:
            return record if record.born >= self.node_began else None
        # Two gradients of one node can meet: those of z in z * z.
        edges = self.node.next_functions
        return record if record.born < self.node_began or len(set(edges)) < len(edges) else None


def _holders(storage: torch.UntypedStorage) -> int:
    """Count of a storage's holders: the tensors that share it, and its Python object, which counts
    as one or as none by the version of torch."""
    return torch._C._storage_Use_Count(storage._cdata)


def _holders_of_one() -> int:
    alone = torch.empty(0)
    storage = alone.untyped_storage()
    return _holders(storage)


_ONE_HOLDER = _holders_of_one()


def _called_by_autograd() -> bool:
    """True if no Python code but dispatch modes stands between the operator and autograd's
    engine."""
    frame = sys._getframe(3)  # beyond taken_over and the mode that asks
    while frame is not None and (frame.f_globals.get("__name__") in _WRAPPERS or _of_a_mode(frame)):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _of_a_mode(frame) -> bool:
    """Whether the frame is a mode's, told by names: to look at its `f_locals` copies them, and
    keeps alive what its function lets go of."""
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    found = frame.f_globals.get(owner)
    return name == "__torch_dispatch__" or (
        isinstance(found, type) and issubclass(found, TorchDispatchMode)
    )


# what PyTorch puts around modes
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame", "torch._ops")


class OptimizerPhase:
    """Knows when an optimizer steps: within another optimizer's step, only the outermost opens and
    closes the phase."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._outermost: torch.optim.Optimizer | None = None
        self._node: Any = None  # the autograd node that called it
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def running(self, node) -> bool:
        # With gradients on, or in another node, a step's closure runs: the forward and backward
        # passes of LBFGS.
        return self._outermost is not None and node is self._node and not torch.is_grad_enabled()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._outermost = self._node = None

    def _before(self, optimizer, args, kwargs) -> None:
        if self._outermost is None:
            self._outermost = optimizer
            self._node = torch._C._current_autograd_node()

    def _after(self, optimizer, args, kwargs) -> None:
        if self._outermost is optimizer:
            self._outermost = None
        with self.ledger.lock:
            for tensor in held_by(optimizer, of_groups=True):
                self.ledger.assign(tensor, "optimizer")


def _is_mutable(func: Any) -> bool:
    return hasattr(func, "_schema") and func._schema.is_mutable  # False for one of higher order
