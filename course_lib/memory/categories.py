"""Find the category of each storage, such as "activation" or "gradient".

The category follows from the operators that read and make the storage, from the autograd graph,
and from the optimizers.
"""

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
from .timeline import Record, StorageTracker

ADD = torch.ops.aten.add.Tensor
# Without a dispatch mode, the gradient formulas of `max`, `gather`, `x[i]` and others write into a
# tensor of zeros in place. With a mode, these formulas call one of the following operators, which
# makes a new tensor.
_INTO_ZEROS = {
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.put.default,
    torch.ops.aten.masked_scatter.default,
}
IN_PLACE_WITHOUT_MODES = {ADD, *_INTO_ZEROS}
# `torch.tensor([...])` and `torch.from_numpy` call this operator, which returns its input. With
# `torch.tensor`, the input's storage is new, although no operator has made it. With
# `torch.from_numpy`, the storage belongs to NumPy. The two are distinguished because only NumPy's
# storage cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# Operators that make a tensor on an existing storage, which is their second argument.
_FROM_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


class CategoryTracker:
    """Collect the data from which a storage's category, such as "activation", is derived.

    `MemoryMeter` calls `inputs` before each operator and `outputs` after it. The two methods record
    which storages the operator reads and creates, and which storages the autograd graph keeps for
    backward. From these data, `Record.spans` derives the category of each storage at each point of
    the step.

    Args:
        tracker: `StorageTracker` with one `Record` per storage. The methods update its records.
        leaves_are_parameters: Whether a leaf tensor that requires a gradient counts as a parameter
            even if it is not an `nn.Parameter`. A meter without a model passes True.
    """

    def __init__(self, tracker: StorageTracker, leaves_are_parameters: bool):
        self.tracker = tracker
        self.leaves_are_parameters = leaves_are_parameters
        # Fake mode that was active when the meter was entered.
        self.fake_mode: FakeTensorMode | None = None
        # Autograd node that ran the last operator (None in the forward pass), and the index in
        # `tracker.operators` of the first operator that this node ran.
        self.node, self.node_began = None, 0
        # Records of the saved storages that `self.node` has read so far.
        self._storages_read: list[Record] = []
        # First output of the last operator. Its autograd node exists only after the operator has
        # returned, so `settle` examines the node before the next operator.
        self._output: weakref.ref | None = None
        # Autograd numbers its nodes (`_sequence_nr`), separately in each thread. A node was made by
        # the last operator if its number is at least `_oldest` and less than `_newest`. `_next`
        # maps a thread to the lowest number that a node of the thread's next operator can have.
        # `_oldest_of_node` is the lower limit, instead of `_oldest`, for the node of an
        # `autograd.Function`, because such a function makes its node before it runs operators. This
        # limit is 0 in the forward pass. In backward, it is the thread's next number at the time
        # when `self.node` ran its first operator. On a GPU, backward runs in its own thread. There,
        # the numbers of the nodes from the forward pass have no relation to these limits, and
        # `_newest` excludes most of them.
        self._oldest = self._oldest_of_node = self._newest = 0
        self._next: dict[int, int] = {}
        self.buffers = BuffersForBackward()

    def inputs(self, func, args, kwargs, node) -> tuple[str, set[int]]:
        """Record which storages an operator is about to read.

        Call this method before the operator runs.

        Args:
            func, args, kwargs: Operator and its arguments, as `__torch_dispatch__` receives them.
            node: Autograd node that runs the operator; None outside a backward pass.

        Returns:
            A tuple (pass, addresses), which the caller passes to `outputs`. Without a `node`, the
            pass is "forward". In a backward pass with gradients enabled, as when a checkpoint runs
            its forward pass again, it is "recomputation". In any other backward pass it is
            "elsewhere". `addresses` is the set of the addresses of the operator's input storages.
        """
        self.settle()
        thread = threading.get_ident()
        self._oldest, self._next[thread] = (
            self._next.get(thread, 0),
            torch.autograd._get_sequence_nr(),
        )
        if node is not self.node:
            self._oldest_of_node = 0 if node is None else self._next[thread]
            self._finish_node()
            self.node, self.node_began = node, len(self.tracker.operators)
        # Gradients are enabled during backward only in a recomputation or with create_graph=True.
        # The two cannot be distinguished, so both count as recomputations.
        made_in = (
            "forward"
            if node is None
            else "recomputation"
            if torch.is_grad_enabled()
            else "elsewhere"
        )
        if self.buffers and isinstance(node, torch.autograd.function.BackwardCFunction):
            self.note_read(self.buffers.pop_kept_for(node, made_in), node)
        sources = {args[1]._cdata} if func in _FROM_STORAGE else set()
        for tensor in tensors_among(args, kwargs):
            for storage in storages_of(tensor):
                sources.add(storage._cdata)
                record = self.tracker.find(storage)
                if record is None:
                    continue
                if record.role in (None, "input") and self._is_parameter(tensor, record):
                    record.role, record.since = "parameter", record.born
                # A storage of the forward pass was kept for backward if backward reads it. A
                # storage of a recomputation was kept if an operator outside of recomputations reads
                # it in backward.
                kept = record.made_in == "forward" or (
                    record.made_in == "recomputation" and made_in == "elsewhere"
                )
                if node is not None and kept:
                    self.note_read([record], node)
        return made_in, sources

    def note_read(self, records: Iterable[Record], node: Any) -> None:
        """Record that an autograd node reads storages during backward.

        If backward reads a storage, the storage was kept for backward. It therefore counts as an
        activation until the last node that reads it has finished.

        Args:
            records: Records of the storages that the node reads.
            node: Autograd node that is running.
        """
        for record in records:
            if record.read_by is not node:
                # If the graph did not save the storage, other code kept it, such as a checkpoint.
                if record.saved is None:
                    record.saved = record.born
                record.released, record.read_by = None, node
                self._storages_read.append(record)

    def _is_parameter(self, tensor: Tensor, record: Record) -> bool:
        """Return whether a tensor that an operator reads counts as a parameter.

        Args:
            tensor: The tensor.
            record: `Record` of the tensor's storage.
        """
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
        """Count the new storages in an operator's result, and update the sizes of resized storages.

        Call this method after the operator has returned.

        Args:
            func: Operator that has run.
            result: Value that the operator returned.
            sources: Addresses of the operator's input storages, as `inputs` returned them.
            made_in: Pass to which the operator belongs, as `inputs` returned it.
        """
        tracker = self.tracker
        tensors = [t for t in tensors_among((result,)) if not self._is_only_a_shape(t)]
        for tensor in tensors:
            for storage in storages_of(tensor):
                record = tracker.find(storage)
                if record is not None:
                    if record.nbytes != storage.nbytes():
                        tracker.resize_storage(storage)
                elif storage._cdata not in sources or (func is _LIFT_FRESH and storage.resizable()):
                    # The batch and other data are made by operators that have no input tensor.
                    enters = (
                        not sources - {storage._cdata} and tracker.operators[-1][1] == "forward"
                    )
                    tracker.add(
                        storage,
                        tracker.account(tensor.device),
                        "input" if enters else None,
                        made_in,
                    )
        # Under saved-tensor hooks, the graph does not hold the tensors, but the values that the
        # hooks returned. Therefore the output's node is not examined. The node of a view that was
        # changed in place is not examined either: autograd rebuilds it when `grad_fn` is first
        # read. For symbolic tensors, rebuilding runs an operator. Before this operator, the meter
        # would read `grad_fn` again, and the recursion would not end.
        watched = tensors and made_in != "elsewhere" and not hooks_active()
        # A higher-order operator has no `_schema`.
        if watched and tensors[0]._is_view() and hasattr(func, "_schema"):
            watched = not func._schema.is_mutable
        self._output = weakref.ref(tensors[0]) if watched else None
        # The limit has a margin, because autograd can make a few more nodes after the operator has
        # returned, for example after an in-place operator.
        self._newest = torch.autograd._get_sequence_nr() + 8

    def _is_only_a_shape(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a fake tensor that takes no memory in the metered step.

        This is the case if its fake mode was entered inside the meter's block. DTensor makes such
        tensors to find shapes.
        """
        mode = tensor.fake_mode if type(tensor) is FakeTensor else self.fake_mode
        return mode is not self.fake_mode and not isinstance(mode, Symbolic)

    def settle(self) -> None:
        """Record which tensors the last operator saved for backward, and which gradient it wrote.

        PyTorch shows saved tensors and accumulated gradients only after the operator has returned.
        Therefore `inputs` calls this method before the next operator, and the meter calls it before
        computing results.
        """
        now = len(self.tracker.operators) - 1
        output = self._output and self._output()
        if output is not None and output.grad_fn is not None and self._is_new(output.grad_fn):
            for tensor in saved_by(output.grad_fn):
                for storage in storages_of(tensor):
                    record = self.tracker.find(storage)
                    if record is not None and record.saved is None:
                        record.saved = now
        if isinstance(self.node, AccumulateGrad) and self.node.variable.grad is not None:
            self.tracker.assign(self.node.variable.grad, "gradient", now)

    def forget_output(self) -> None:
        """Drop the weak reference to the output of the last operator.

        The meter calls this method before `torch.utils.swap_tensors` runs, because that function
        rejects tensors that have weak references.
        """
        self.settle()
        self._output = None

    def _is_new(self, node) -> bool:
        """Return whether the last operator made this autograd node.

        An operator can also return a tensor with an older node, for example a tensor that was
        saved before. Such a node may have been made under saved-tensor hooks, so its saved tensors
        must not be read.
        """
        function = isinstance(node, torch.autograd.function.BackwardCFunction)
        oldest = self._oldest_of_node if function else self._oldest
        return oldest <= node._sequence_nr() < self._newest

    def finish(self) -> None:
        """Complete the records of all storages when the meter's `with` block ends."""
        self.settle()
        self._finish_node()
        self.node = None

    def _finish_node(self) -> None:
        """Record that the current autograd node is finished and needs no saved storage any more."""
        for record in self._storages_read:
            record.released, record.read_by = len(self.tracker.operators), None
        self._storages_read.clear()

    def overwritten_input(self, func, args, kwargs) -> Record | None:
        """Return the record of the input that autograd would overwrite without a dispatch mode.

        This method decides whether an operator's first argument counts as released when the
        operator returns. The meter must report the bytes that the program needs without the meter.
        Without a dispatch mode, autograd saves memory by writing in place in two cases:

        - Two gradients reach the same autograd node. Autograd adds the second gradient to the first
          one in place.
        - The gradient formula of an operator such as `x[i]` creates a tensor of zeros, and then
          writes the incoming gradient into a part of it.

        While a dispatch mode such as the meter is active, autograd instead calls an operator of
        `IN_PLACE_WITHOUT_MODES`. This operator creates a new tensor and leaves its first argument
        unchanged.

        The method returns a record if the operator meets all of its conditions. These conditions
        apply to every operator:

        - Autograd's engine, not a Python function, called the operator.
        - The first argument is dense (not sparse or nested).
        - The first argument is the only tensor in its storage, and fills the storage.

        One further condition applies to an operator that writes into a tensor of zeros:

        - The currently running backward function has created this tensor.

        Further conditions apply to an operator that adds two gradients:

        - The second gradient is also dense, has the same shape, and has another storage.
        - The currently running backward function produced both gradients, or the first gradient is
          older than the start of this function.
        - The backward pass runs without create_graph=True.

        The caller passes the record to `StorageTracker.count_as_released`. If the storage is still
        live at the next operator, the tracker counts it as live again.

        Args:
            func, args, kwargs: Operator and its arguments, as `__torch_dispatch__` receives them.
                The operator is one of `IN_PLACE_WITHOUT_MODES`.

        Returns:
            The `Record` of the first argument's storage. None if autograd would create a new tensor
            even without a dispatch mode.

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
        record = self.tracker.find(storage)
        if (
            record is None
            or storage in others
            or holders_of(storage) != _ONE_HOLDER
            or record.nbytes != total.nbytes
        ):
            return None
        if func is not ADD:
            return record if record.born >= self.node_began else None
        # The current node can also have produced both gradients. For example, the node of z * z
        # sends two gradients to the node of z.
        edges = self.node.next_functions
        return record if record.born < self.node_began or len(set(edges)) < len(edges) else None


_alone = torch.empty(0)
# Number of holders of a storage that belongs to a single tensor; it depends on the torch version.
_ONE_HOLDER = holders_of(_alone.untyped_storage())


def _called_by_autograd() -> bool:
    """Return whether autograd's engine, and not a Python function, called the current operator.

    This is the case if all Python frames between this module and the engine belong to dispatch
    modes.
    """
    frame = sys._getframe()
    while frame is not None and (
        frame.f_globals.get("__name__") in _WRAPPERS or _belongs_to_mode(frame)
    ):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _belongs_to_mode(frame) -> bool:
    """Return whether a frame runs code of a dispatch mode, judged by the names of its function.

    The frame's `f_locals` are not read, because reading them copies them. The copies would keep
    tensors alive that the function has released.
    """
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    owner_class = frame.f_globals.get(owner)
    return name == "__torch_dispatch__" or (
        isinstance(owner_class, type) and issubclass(owner_class, TorchDispatchMode)
    )


# Names of this module, and of the modules whose functions PyTorch wraps around the methods of
# dispatch modes.
_WRAPPERS = (__name__, *WRAPPERS)


class OptimizerPhase:
    """Detect which operators run inside an optimizer's `step()`, and find the optimizer's state.

    The constructor registers hooks that run before and after the step of every optimizer. After
    each step, the optimizer's state tensors get the category "optimizer" in the tracker. If the
    step of one optimizer calls the step of another, all their operators belong to the outer step.

    Args:
        tracker: `StorageTracker` whose records are updated.
    """

    def __init__(self, tracker: StorageTracker):
        self.tracker = tracker
        self._outermost: torch.optim.Optimizer | None = None
        # Autograd node that ran when the step was called, and the number of records at that time.
        self._node: Any = None
        self._began = 0
        # Optimizers that have stepped in the current backward pass, and the number of that pass.
        self._stepped, self._backward = weakref.WeakSet(), -1
        self._hooks = (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

    def is_running(self, node) -> bool:
        """Return whether the current operator belongs to an optimizer's step.

        Operators of a closure that the step calls, as with `torch.optim.LBFGS`, do not belong to
        the step.

        Args:
            node: Autograd node that runs the operator; None if no backward pass is running.
        """
        # An optimizer's step can call a closure, as LBFGS does. Operators of the closure are
        # excluded: its forward pass runs with gradients enabled, and its backward pass runs in
        # other autograd nodes.
        return self._outermost is not None and node is self._node and not torch.is_grad_enabled()

    def remove(self) -> None:
        """Remove the hooks that this object registered for the steps of all optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._outermost = self._node = None

    def _begin_step(self, optimizer, args, kwargs) -> None:
        """Begin the phase "optimizer"; this is the hook before each optimizer step."""
        if self._outermost is None:
            self._outermost = optimizer
            self._node = current_node()
            self._began = len(self.tracker.records)

    def _end_step(self, optimizer, args, kwargs) -> None:
        """End the phase and find new state; this is the hook after each optimizer step."""
        if self._outermost is optimizer:
            self._outermost = None
        with self.tracker.lock:
            if self._must_search_state(optimizer):
                for tensor in held_by(optimizer, of_groups=True):
                    self.tracker.assign(tensor, "optimizer")

    def _must_search_state(self, optimizer) -> bool:
        """Return whether an optimizer's state must be searched for new tensors after its step.

        If an optimizer steps inside the backward pass, each step updates a single parameter.
        Searching the state of all parameters after each of these steps would take time that grows
        with the square of their number. Therefore the state is searched after an optimizer's first
        step in a backward pass. After a later step, it is searched only if that step made a tensor
        that is still live and may be part of the state.
        """
        backward = current_graph_task_id()  # -1 outside of a backward pass
        if backward != self._backward:
            self._stepped, self._backward = weakref.WeakSet(), backward
        if backward == -1 or optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return True
        new_records = self.tracker.records[self._began :]
        return any(r.nbytes and r.role in (None, "input") and r() is not None for r in new_records)
