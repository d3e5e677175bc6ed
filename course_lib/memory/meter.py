"""Count the bytes of live tensors exactly, with the same result on every machine.

The meter is a dispatch mode, so it sees what every operator returns. The meter keeps no tensor
alive and installs no autograd hook. A saved-tensor hook would switch off PyTorch's check for
in-place changes and forbid `torch.func`.

Nevertheless the meter changes how a step runs, because autograd works differently while a dispatch
mode is active:

- Autograd creates a new tensor when it adds two gradients that reach the same node. Some gradient
  formulas (those of `max`, `gather` and indexing) also create new tensors instead of writing in
  place. In these cases the meter counts only the bytes that autograd needs without a dispatch mode
  (`CategoryTracker.overwritten_input`).
- A few gradient formulas (those of `prod` and `cumprod`) use another method. The meter counts the
  tensors that this method makes. If the meter's peak is therefore above the allocator's peak,
  `measure` adds a note to its result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from inspect import unwrap
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from .._check import kind, whole
from .._origin import own_line
from .._torch.autograd import current_node
from .._torch.modes import DYNAMO, ObserverMode, disable_current_modes, dispatch_modes
from .._torch.symbolic import FakeTensor, active_fake_mode, is_symbolic
from ..symbolic.mode import Symbolic
from ..symbolic.shape_cache import NOT_FOUND
from .categories import IN_PLACE_WITHOUT_MODES, CategoryTracker, OptimizerPhase
from .compiler import buffers_of_generated_code, compiled_calls
from .flops import flops_of
from .modules import ModulePaths
from .show import bytes_in_english, draw_timeline
from .storages import (
    belongings,
    check_model_and_optimizer,
    owns_storage,
    storages_without_operators,
)
from .timeline import (
    CATEGORIES,
    COMPILED_CODE,
    NO_OPERATOR,
    StorageTracker,
    Timeline,
    category_spans,
)
from .trace import ENTRY, Span, Trace

_DEVICE = torch.ops.prim.device.default


class MemoryBudgetExceeded(RuntimeError):
    """Error raised when the live bytes exceed the budget of a `MemoryMeter` after an operator.

    Attributes:
        operator: Name of the operator, for example "aten.mm.default". The name is "(model and
            optimizer on entry)" if model and optimizer alone exceed the budget.
        live_bytes: Bytes that were live before the operator ran.
        wanted_bytes: Bytes that the operator added to `live_bytes`.
        budget_bytes: Budget of the meter, its argument `budget_bytes`.
    """

    def __init__(self, operator: str, live_bytes: int, wanted_bytes: int, budget_bytes: int):
        # The base class gets all arguments, so that the error can be pickled.
        super().__init__(operator, live_bytes, wanted_bytes, budget_bytes)
        self.operator, self.live_bytes, self.wanted_bytes, self.budget_bytes = self.args

    def __str__(self) -> str:
        wanted, live, budget = map(
            bytes_in_english, (self.wanted_bytes, self.live_bytes, self.budget_bytes)
        )
        if self.operator == ENTRY:
            return f"model and optimizer alone need {wanted}, but the budget is {budget}"
        needs = f"{self.operator} needs {wanted} in addition to {live} that are live"
        return f"{needs}, but the budget is {budget}"


class MeterResults:
    """Results of a `MemoryMeter`, which inherits from this class.

    The results can be read inside the meter's `with` block and after it. All results except
    `peak_bytes_by_device` concern a single device, `device`.
    """

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes that were live at once on `device`."""
        return self._tracker.main.peak_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of the model's and the optimizer's tensors at the start of the `with` block."""
        return self._tracker.main.entry_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now on `device`.

        After the meter's `with` block has ended, the number still falls when a tensor from the
        block is released.
        """
        with self._tracker.lock:
            self._tracker.confirm_released()
            return self._tracker.main.live_bytes

    @property
    def device(self) -> torch.device:
        """The device that all results except `peak_bytes_by_device` concern."""
        return self._tracker.main.device

    @property
    def peak_bytes_by_device(self) -> dict[torch.device, int]:
        """Dict from device to the largest number of bytes that were live on it at once.

        Devices without counted tensors are left out. The devices may reach their peaks at different
        times.
        """
        return {
            account.device: account.peak_bytes
            for account in self._tracker.accounts.values()
            if account.peak_bytes
        }

    def series(self) -> dict[str, np.ndarray]:
        """Return the live bytes of each category after each operator.

        Returns:
            A dict from category, such as "activation", to an int64 array with one element per
            sample of `timeline`.
        """
        return {name: values[1:] for name, values in self._history().items()}

    @property
    def flops(self) -> int:
        """FLOPs of the operators that have run so far.

        The formulas are those of PyTorch's `FlopCounterMode`, except that causal fused attention
        counts only the scores that the causal mask allows.
        """
        return sum(self._tracker.flops.values())

    def trace(self, *, events: bool = True) -> Trace:
        """Return a `Trace`: the operators that have run so far, and the live bytes after each.

        The first point of the trace is the state on entry, before any operator.

        Args:
            events: Whether to include the creation and the release of each storage. With False, the
                trace is made faster, and its `spans` are None.
        """
        history = self._history()
        with self._tracker.lock:
            operators = [(ENTRY, "forward"), *self._tracker.operators[1:]]
            return Trace(
                operators,
                np.stack([history[name] for name in CATEGORIES], axis=1),
                flops_at=dict(self._tracker.flops),
                modules=dict(self._tracker.modules),
                lines=dict(self._tracker.lines),
                spans=[Span(*life) for life in category_spans(self._tracker)] if events else None,
            )

    def save_snapshot(self, path: str | os.PathLike) -> None:
        """Write the metered step to a file for PyTorch's memory viewer, pytorch.org/memory_viz.

        `Trace.save_snapshot` describes the file.

        Args:
            path: File to write.
        """
        self.trace().save_snapshot(path)

    @property
    def points(self) -> int:
        """Number of points of the trace that `trace()` would return now.

        A point is the time right after an operator, or the entry of the `with` block.
        """
        return len(self._tracker.operators)

    @property
    def operator_count(self) -> int:
        """Number of operators that have run inside the meter's block."""
        others = (NO_OPERATOR, COMPILED_CODE)
        return sum(operator not in others for operator, _ in self._tracker.operators[1:])

    def phases(self) -> list[str]:
        """Return the phase of each sample of `timeline`: "forward", "backward" or "optimizer"."""
        return [phase for _, phase in self._tracker.operators[1:]]

    @property
    def timeline(self) -> Timeline:
        """Sequence of one `Sample` per operator.

        A sample has the operator's name, its phase, and the live bytes of each category right after
        the operator. A storage that no operator creates, such as the state of a random number
        generator, has its own sample, which is named "(no operator)".
        """
        return Timeline(self._tracker.operators[1:], self.series())

    def at_peak(self) -> dict[str, int]:
        """Return a dict from category to its live bytes when `peak_bytes` was first reached."""
        return {
            name: int(values[self._tracker.main.peak_index])
            for name, values in self._history().items()
        }

    def plot(self, ax=None):
        """Plot the live bytes of each category over the operators, and mark the peak.

        Args:
            ax: Matplotlib axes to draw on; None creates new axes.

        Returns:
            The axes.
        """
        return draw_timeline(self._history(), self._tracker.main.peak_index, ax)

    def _history(self) -> dict[str, np.ndarray]:
        """Return a dict from category to its live bytes on entry and after each operator."""
        with self._tracker.lock:
            self._usage.settle()
            self._tracker.confirm_released()
            return self._tracker.history()

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {count:,}" for name, count in self.at_peak().items() if count)
        return (
            f"MemoryMeter(peak {bytes_in_english(self.peak_bytes)}: {parts or 'nothing'};"
            f" {self.operator_count} operators)"
        )


class MemoryMeter(MeterResults, ObserverMode):
    """Context manager that counts the bytes of live tensors, operator by operator.

    A storage counts once, however many views it has. A storage that is created inside the `with`
    block counts until its last reference is released. A storage from before the block counts only
    if it belongs to `model` (parameters, buffers, gradients) or to `optimizer` (state, master
    weights).

    A tensor is in the first of these categories that fits:

    - "parameter", "buffer" and "gradient": the model's tensors, and the gradients of parameters
      once they are accumulated. The quantization state of a bitsandbytes weight counts as
      "parameter", as the weight itself does.
    - "optimizer": the optimizer's state and its master weights. Master weights are tensors that the
      optimizer updates instead of the parameters.
    - "input": tensors that an operator without input tensors creates in the forward pass, such as a
      batch. They stay in this category even if they are saved for backward.
    - "activation": tensors kept for backward. Either the autograd graph saved them, or the forward
      pass created them and backward reads them, like the tensors that checkpointing keeps. The
      category includes a gradient that is passed to `backward` as an argument.
    - "temporary": all other tensors.

    The meter does not count:

    - memory that an operator allocates and frees internally (its workspace, which `measure`
      reports);
    - tensors made in threads that you start yourself;
    - memory that is allocated without an operator, such as that of `torch.from_numpy` or a bare
      `torch.UntypedStorage`. However, the meter does count three kinds of such memory: states of
      random number generators, copies by `copy.deepcopy`, and storages that FSDP empties and fills.

    A function that `torch.compile` has compiled remains compiled inside the block and afterwards.
    The meter counts the outputs of the operators that the compiled code calls, and the buffers that
    TorchInductor's code allocates in Python. The timeline names these buffers "(compiled code)".
    The meter does not count the buffers of two kinds of code: code that is C++ as a whole
    (Inductor's option `cpp_wrapper`), and replayed CUDA graphs (mode "reduce-overhead"). The memory
    of the compilation itself is not counted either, so call the function once before the block. In
    a `symbolic()` context a compiled function runs uncompiled, and its uncompiled operators are
    counted.

    While a dispatch mode such as the meter is active, the backward passes of `prod` and `cumprod`
    use another formula. This formula makes a few more tensors than the usual one, and the meter
    counts these tensors.

    All results except `peak_bytes_by_device` concern one device. For example, results for a GPU do
    not include tensors in host memory. Fake tensors count as 0 bytes if their fake mode is entered
    inside the block. DTensor, for example, enters such a mode.

    Args:
        model: Model whose tensors are counted from the start of the block; None for no model. The
            meter releases its reference at the end of the block.
        optimizer: One optimizer or several, whose state is counted from the start of the block;
            None for no optimizer. The meter releases its references at the end of the block.
        budget_bytes: The largest number of bytes that may be live; None for no limit.
        device: The device that the results concern. The default is the first accelerator that has a
            counted tensor, or the CPU if no accelerator has a counted tensor. "meta" tensors count
            only with `device="meta"`.
        block_bytes: Granularity in bytes. The size of each storage is rounded up to a multiple of
            this number. The CUDA allocator rounds to multiples of 512.
        module_paths: Whether `trace` shows in which module of `model` each operator ran. An
            operator of the backward pass has the module of its forward operator.
        source_lines: Whether `trace` shows the line of your own code that ran each operator. An
            operator of the backward pass has the line of `backward()`.

    Raises:
        MemoryBudgetExceeded: An operator increased the live bytes beyond `budget_bytes`. The error
            names the operator. The operator's in-place changes remain, and its outputs are
            released.
        RuntimeError: The same meter is entered twice.
        NotImplementedError: An operator read or returned a tensor whose storages cannot be found,
            such as a tensor with oneDNN's opaque layout. After this or any other error, the meter
            is closed and holds no tensors.

    Attributes:
        ran_compiled: Whether a function compiled by `torch.compile` was called inside the block.

    Example:
        >>> layer, rows = nn.Linear(1000, 1000, bias=False), torch.randn(10, 1000)
        >>> with MemoryMeter(layer) as meter:
        ...     layer(rows).sum().backward()
        >>> meter.peak_bytes
        8000008
        >>> meter.at_peak()["parameter"]
        4000000
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        budget_bytes: int | None = None,
        device: torch.device | str | None = None,
        block_bytes: int = 1,
        module_paths: bool = False,
        source_lines: bool = True,
    ):
        super().__init__()
        optimizers = check_model_and_optimizer(model, optimizer)
        kind("device", device, (torch.device, str, type(None)), "a torch.device, its name or None")
        self.model, self.optimizers = model, optimizers  # released at the end of the block
        self.budget_bytes = (
            budget_bytes
            if budget_bytes is None
            else whole("budget_bytes", budget_bytes, 1, of="bytes")
        )
        self._state = "new"  # "new", "active" or "closed"
        self.ran_compiled = False
        self._tracker = StorageTracker(whole("block_bytes", block_bytes, 1, of="bytes"), device)
        self._usage = CategoryTracker(self._tracker, leaves_are_parameters=model is None)
        self._module_paths = (
            kind("module_paths", module_paths, bool, "True or False") and model is not None
        )
        self._source_lines = kind("source_lines", source_lines, bool, "True or False")
        self._undo = ExitStack()

    def __enter__(self) -> MemoryMeter:
        if self._state != "new":
            raise RuntimeError(
                f"this MemoryMeter has been entered already ({self._state}); make a new"
                " MemoryMeter for each `with` block"
            )
        self._tracker.add_all(self._belongings())
        if self.budget_bytes is not None and self.entry_bytes > self.budget_bytes:
            raise MemoryBudgetExceeded(ENTRY, 0, self.entry_bytes, self.budget_bytes)
        self._usage.fake_mode = active_fake_mode()
        super().__enter__()
        self._optimizer_phase = OptimizerPhase(self._tracker)
        self._undo.callback(self._optimizer_phase.remove)
        self._undo.enter_context(
            storages_without_operators(
                self, self._tracker.add_storage, self._tracker.resize_storage
            )
        )
        swap = partial(self._swap_tensors, torch.utils.swap_tensors)
        self._undo.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        # Compiled code is observed only if it can run. A symbolic step never calls compiled code. A
        # real step can call it if Dynamo is already loaded, or if the first operator under this
        # meter loads Dynamo (then `_should_skip_dynamo` returns True).
        if not is_symbolic() and (DYNAMO in sys.modules or self._should_skip_dynamo()):
            self._undo.enter_context(buffers_of_generated_code(self, self._count_buffer))
            self._undo.enter_context(compiled_calls(self._note_compiled_call))
        if self._module_paths:
            self._tracker.paths = self._undo.enter_context(ModulePaths(self.model))
        self._state = "active"
        return self

    def _swap_tensors(self, swap: Callable, *tensors: Tensor) -> None:
        """Call PyTorch's function `swap_tensors`, passed as `swap`, on tensors of the step.

        PyTorch's function rejects tensors that have weak references. Therefore the meter first
        drops its weak reference to the last operator's output.
        """
        with self._tracker.lock:
            self._usage.forget_output()
        swap(*tensors)

    def _belongings(self) -> Iterator[tuple[Tensor, str]]:
        """Yield pairs (tensor, category) of the tensors of the model and the optimizers."""
        return belongings(self.model, self.optimizers)

    def __exit__(self, kind, error, traceback) -> None:
        super().__exit__(kind, error, traceback)
        try:
            self._undo.close()
            with self._tracker.lock:
                self._usage.finish()
                # The code inside the block can have put new tensors into the model, for example
                # with `.to()`.
                self._tracker.close(self._belongings())
        except Exception as own:
            if error is None:
                raise
            error.add_note(
                f"after this error, MemoryMeter could not finish its measurement either: {own}"
            )
        finally:
            # The old `CategoryTracker` can hold an autograd node and records of storages. It is
            # replaced to release them.
            self._usage = CategoryTracker(self._tracker, self._usage.leaves_are_parameters)
            self._tracker.closed = True
            self.model = None
            self.optimizers = ()
            self._state = "closed"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # This check comes first because autograd calls this operator, `prim.device`, more often
        # than all other operators together.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        # Operators in these namespaces make no tensors.
        if func.namespace in ("profiler", "prim"):
            return func(*args, **(kwargs or {}))
        if not all(map(owns_storage, types)):
            # After NotImplemented, PyTorch calls the wrapper subclass. The subclass runs the
            # operator on its inner tensors, which calls this method again.
            return NotImplemented
        tracker = self._tracker
        usage = self._usage
        node = current_node()
        with tracker.lock:
            made_in, sources = usage.inputs(func, args, kwargs, node)
            overwritten_input = (
                usage.overwritten_input(func, args, kwargs)
                if func in IN_PLACE_WITHOUT_MODES
                else None
            )
        result = self._run(func, args, kwargs)
        with tracker.lock:
            self._begin_point(func, node)
            if flops := flops_of(func, args, kwargs, result):
                tracker.flops[len(tracker.operators) - 1] = flops
            if overwritten_input is not None:
                tracker.count_as_released(overwritten_input)
            usage.outputs(func, result, sources, made_in)
            tracker.note_peak()
            exceeded = self._budget_error(func)
        if exceeded is not None:
            del result  # otherwise the error's traceback would keep the result alive
            raise exceeded
        return result

    def _run(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        """Run an operator under the dispatch modes that were entered before this meter."""
        return func(*args, **kwargs) if kwargs else func(*args)

    def _begin_point(self, func: Any, node: Any) -> None:
        """Add an operator to the timeline, with its phase, module and line of code.

        Storages that are recorded before the next call belong to this operator.

        Args:
            func: The operator, or `COMPILED_CODE`.
            node: Autograd node that runs the operator; None in the forward pass.
        """
        tracker = self._tracker
        tracker.confirm_released()
        tracker.main.before_bytes = tracker.main.live_bytes
        phase = (
            "optimizer"
            if self._optimizer_phase.is_running(node)
            else "forward"
            if node is None
            else "backward"
        )
        tracker.operators.append((func, phase))
        if tracker.paths is not None and (path := tracker.paths(node)):
            tracker.modules[len(tracker.operators) - 1] = path
        if self._source_lines and (line := own_line(sys._getframe(2))):
            tracker.lines[len(tracker.operators) - 1] = line

    def _budget_error(self, func: Any) -> MemoryBudgetExceeded | None:
        """Return the error to raise if the last operator exceeded the budget, else None."""
        before, live = self._tracker.main.before_bytes, self._tracker.main.live_bytes
        if self.budget_bytes is None or live <= max(before, self.budget_bytes):
            return None
        return MemoryBudgetExceeded(str(func), before, live - before, self.budget_bytes)

    def _count_buffer(self, storage: torch.UntypedStorage) -> None:
        """Count a buffer that compiler-generated code has allocated."""
        node = current_node()
        # Modes are disabled, because the meter itself runs operators when it reads the parts of a
        # sparse tensor. These operators do not belong to the step.
        with disable_current_modes(), self._tracker.lock:
            made_in, _ = self._usage.inputs(None, (), {}, node)
            self._begin_point(COMPILED_CODE, node)
            # No operator returns the buffer, and compiled code reads it without operators.
            # Therefore `buffers` determines later whether the buffer was kept for backward.
            self._tracker.add(storage, self._tracker.account(storage.device), None, made_in)
            self._usage.buffers.add(self._tracker.records[-1], made_in)
            self._tracker.note_peak()
            exceeded = self._budget_error(COMPILED_CODE)
        if exceeded is not None:
            raise exceeded

    def _note_compiled_call(self) -> None:
        self.ran_compiled = True


class UnguardedMeter(MemoryMeter):
    """`MemoryMeter` for symbolic steps, with less overhead per operator.

    Unlike `MemoryMeter`, this class has no guard that keeps `torch.compile` from compiling the
    meter itself. A symbolic step, whose tensors have shapes but no data, does not need the guard,
    because it calls no compiled code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> MemoryMeter:
        modes = dispatch_modes()
        # If the symbolic mode is the only mode that was entered before the meter, `_run` reads
        # results from this mode's cache and does not call PyTorch's dispatcher.
        self._symbolic = modes[0] if len(modes) == 1 and type(modes[0]) is Symbolic else None
        return super().__enter__()

    def _run(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        if self._symbolic is not None and active_fake_mode() is self._symbolic:
            result = self._symbolic.cached_result(func, args, kwargs)
            if result is not NOT_FOUND:
                return result
        return super()._run(func, args, kwargs)

    __torch_dispatch__ = unwrap(MemoryMeter.__torch_dispatch__)
