"""Meter for live tensor bytes, which is exact and gives the same result on every machine.

The meter is a dispatch mode, so it sees what every operator returns. It keeps no tensor alive and
installs no autograd hook. A saved-tensor hook would switch off PyTorch's check for in-place changes
and forbid `torch.func`.

Yet the measurement changes the step. While a dispatch mode is active, autograd creates a new tensor
when it adds two gradients that reach the same node. Some gradient formulas (those of `max`,
`gather` and indexing) also create new tensors, instead of writing in place. The meter counts them
as autograd alone would have run them (`CategoryTracker.taken_over`). A few formulas (those of
`prod` and `cumprod`) compute the gradient in another way altogether. The meter counts these as they
run. If that raises the peak above the allocator's, `measure` adds a note to its result.
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
from .._torch.modes import DYNAMO, ObserverMode, disable_current_modes
from .._torch.symbolic import FakeTensor, active_fake_mode, is_symbolic
from .categories import IN_PLACE_WITHOUT_MODES, CategoryTracker, OptimizerPhase
from .compiler import buffers_of_generated_code, compiled_calls
from .flops import flops_of
from .modules import ModulePaths
from .show import bytes_in_english, draw_timeline
from .storages import belongings, check_model_and_optimizer, holds_bytes, storages_without_operators
from .timeline import CATEGORIES, COMPILED_CODE, NO_OPERATOR, Ledger, Timeline, lives
from .trace import ENTRY, Span, Trace

_DEVICE = torch.ops.prim.device.default


class MemoryBudgetExceeded(RuntimeError):
    """Error raised when an operator takes the live bytes over the meter's budget.

    Attributes:
        operator: The operator's name, for example "aten.mm.default".
        live_bytes: Bytes live before the operator.
        wanted_bytes: Bytes that the operator made in addition.
        budget_bytes: The budget.
    """

    def __init__(self, operator: str, live_bytes: int, wanted_bytes: int, budget_bytes: int):
        # All arguments are passed on, so that the error can be pickled.
        super().__init__(operator, live_bytes, wanted_bytes, budget_bytes)
        self.operator, self.live_bytes, self.wanted_bytes, self.budget_bytes = self.args

    def __str__(self) -> str:
        wanted, live, budget = map(
            bytes_in_english, (self.wanted_bytes, self.live_bytes, self.budget_bytes)
        )
        needs = f"{self.operator} needs {wanted} in addition to {live} that are live"
        return f"{needs}, but the budget is {budget}"


class Figures:
    """Figures that a meter reports of its block. All except `peak_bytes_by_device` concern one
    device."""

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes live at once."""
        return self._ledger.main.peak_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes that model and optimizer held when the block was entered."""
        return self._ledger.main.entry_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes live now. After the block the number still falls when a tensor from the block is
        released."""
        with self._ledger.lock:
            self._ledger.bury()
            return self._ledger.main.live_bytes

    @property
    def device(self) -> torch.device:
        """The device of all figures except `peak_bytes_by_device`."""
        return self._ledger.main.device

    @property
    def peak_bytes_by_device(self) -> dict[torch.device, int]:
        """The largest number of bytes live at once on each device, if it is not 0. The devices may
        reach their peaks at different moments."""
        return {
            account.device: account.peak_bytes
            for account in self._ledger.accounts.values()
            if account.peak_bytes
        }

    def series(self) -> dict[str, np.ndarray]:
        """Return a dict from category to the live bytes at each sample of the timeline. The values
        are int64 arrays of equal length."""
        return {name: values[1:] for name, values in self._history().items()}

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and convolutions so far, by the formulas of
        `FlopCounterMode`."""
        return sum(self._ledger.flops.values())

    def trace(self, *, events: bool = True) -> Trace:
        """Return the step's operators in order. The first moment is the state on entry.

        Args:
            events: Whether to include the births and releases of all storages. A trace with sums
                alone takes less time.
        """
        history = self._history()
        with self._ledger.lock:
            operators = [(ENTRY, "forward"), *self._ledger.operators[1:]]
            return Trace(
                operators,
                np.stack([history[name] for name in CATEGORIES], axis=1),
                flops_at=dict(self._ledger.flops),
                modules=dict(self._ledger.modules),
                lines=dict(self._ledger.lines),
                spans=[Span(*life) for life in lives(self._ledger)] if events else None,
            )

    def save_snapshot(self, path: str | os.PathLike) -> None:
        """Write the step for PyTorch's memory viewer. See `Trace.save_snapshot`."""
        self.trace().save_snapshot(path)

    @property
    def moments(self) -> int:
        """The number of moments that a trace of the block has so far."""
        return len(self._ledger.operators)

    @property
    def operator_count(self) -> int:
        """The number of operators that ran."""
        others = (NO_OPERATOR, COMPILED_CODE)
        return sum(operator not in others for operator, _ in self._ledger.operators[1:])

    def phases(self) -> list[str]:
        """Return the phase of each sample of the timeline, one of `PHASES`."""
        return [phase for _, phase in self._ledger.operators[1:]]

    @property
    def timeline(self) -> Timeline:
        """The timeline: one `Sample` per operator, with its name, its phase, and the live bytes of
        each category right after it.

        A storage that no operator makes, such as the state of a generator, has its own sample,
        which is named "(no operator)".
        """
        return Timeline(self._ledger.operators[1:], self.series())

    def at_peak(self) -> dict[str, int]:
        """Return a dict from category to the bytes at the moment when `peak_bytes` was first
        reached."""
        return {
            name: int(values[self._ledger.main.peak_index])
            for name, values in self._history().items()
        }

    def plot(self, ax=None):
        """Draw the timeline on matplotlib axes and mark the peak. Return the axes, which are new
        ones if `ax` is None."""
        return draw_timeline(self._history(), self._ledger.main.peak_index, ax)

    def _history(self) -> dict[str, np.ndarray]:
        with self._ledger.lock:
            self._usage.settle()
            self._ledger.bury()
            return self._ledger.history()

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {count:,}" for name, count in self.at_peak().items() if count)
        return (
            f"MemoryMeter(peak {bytes_in_english(self.peak_bytes)}: {parts or 'nothing'};"
            f" {self.operator_count} operators)"
        )


class MemoryMeter(Figures, ObserverMode):
    """Context manager that counts the bytes of live tensors, operator by operator.

    A storage counts once, however many views it has, from its creation inside the block until its
    last reference is released. Storages from before the block count only if they belong to `model`
    (parameters, buffers and their gradients) or to `optimizer` (its state, and master weights that
    it steps instead of parameters).

    The categories are:

    - "parameter", "buffer" and "gradient": the model's tensors, and the gradients of parameters
      once they are accumulated. A quantized weight of bitsandbytes is counted with the state of its
      quantization.
    - "optimizer": the optimizer's state and master weights.
    - "activation": tensors kept for backward. Either the graph saved them, or the forward pass made
      them and backward reads them, as with tensors that checkpointing keeps. A gradient that is
      passed to `backward` counts as well.
    - "input": tensors that an operator without input tensors made in the block, such as a batch.
    - "temporary": all other tensors.

    The meter does not count memory that an operator allocates and frees internally (the workspace,
    which `measure` reports), tensors made in threads that you start yourself, and memory that is
    allocated without an operator, such as that of `torch.from_numpy` or a bare
    `torch.UntypedStorage`. Exceptions, which it does count, are the states of random number
    generators, copies by `copy.deepcopy`, and storages that FSDP empties and fills.

    A function that `torch.compile` has compiled runs compiled inside the block, and afterwards too.
    The meter counts the outputs of the operators that the compiled code calls, and the buffers that
    TorchInductor's code allocates in Python. The timeline names these "(compiled code)". The meter
    does not count the buffers of code that is C++ as a whole (Inductor's option `cpp_wrapper`) or
    that is replayed as a CUDA graph (mode "reduce-overhead"). It does not count what the compiler
    itself allocates when it compiles, so call the function once before the block. In a `symbolic()`
    context a compiled function runs uncompiled, and its uncompiled operators are counted.

    While a meter, or any other dispatch mode, is active, the backward passes of `prod` and
    `cumprod` use another formula. It takes up to a few tensors more than the formula without a
    mode, and the meter counts these.

    All figures except `peak_bytes_by_device` concern one device. On a GPU, for example, they do not
    include tensors that the step keeps in host memory. Fake tensors of a mode that is entered
    inside the block hold no memory and count as 0 bytes. DTensor uses such tensors to find shapes.

    Args:
        model, optimizer: The model and one optimizer or several, counted from the start as
            described above. The meter releases them at the end of the block.
        budget_bytes: The largest number of bytes that may be live.
        device: The device whose bytes are counted. The default is the first accelerator with a
            tensor that counts, and the CPU as long as there is none. "meta" tensors count only if
            that device is named.
        block_bytes: Granularity in bytes. The bytes of each storage are rounded up to a multiple of
            it. That of the CUDA allocator is 512.
        module_paths: Whether `trace` shows in which module of `model` each operator ran. An
            operator of the backward pass has the module of its forward operator.
        source_lines: Whether `trace` shows the line of your own code that ran each operator. An
            operator of the backward pass has the line of `backward()`.

    Raises:
        MemoryBudgetExceeded: The operator that the error names took the live bytes over
            `budget_bytes`. The operator has run: inputs that it changes in place are changed, and
            its outputs are released.
        RuntimeError: The same meter is entered twice.
        NotImplementedError: An operator read or returned a tensor whose storages cannot be found,
            such as one with oneDNN's opaque layout. After this or any other error the meter is
            closed and holds no tensors.

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
        self.model, self.optimizers = model, optimizers
        self.budget_bytes = (
            budget_bytes
            if budget_bytes is None
            else whole("budget_bytes", budget_bytes, 1, of="bytes")
        )
        self._state = "new"  # "new", "active" or "closed"
        self.ran_compiled = False
        self._ledger = Ledger(whole("block_bytes", block_bytes, 1, of="bytes"), device)
        self._usage = CategoryTracker(self._ledger, leaves_are_parameters=model is None)
        self._module_paths = (
            kind("module_paths", module_paths, bool, "True or False") and model is not None
        )
        self._source_lines = kind("source_lines", source_lines, bool, "True or False")
        self._undo = ExitStack()

    def __enter__(self) -> MemoryMeter:
        if self._state != "new":
            raise RuntimeError(
                f"this MemoryMeter has been entered already ({self._state}); make a new one per"
                " block"
            )
        self._ledger.add_all(self._belongings())
        if self.budget_bytes is not None and self.entry_bytes > self.budget_bytes:
            raise MemoryBudgetExceeded(ENTRY, 0, self.entry_bytes, self.budget_bytes)
        self._usage.fake_mode = active_fake_mode()
        super().__enter__()
        self._optimizer_phase = OptimizerPhase(self._ledger)
        self._undo.callback(self._optimizer_phase.remove)
        self._undo.enter_context(
            storages_without_operators(self, self._ledger.add_storage, self._ledger.resize_storage)
        )
        swap = partial(self._swap_tensors, torch.utils.swap_tensors)
        self._undo.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        # Compiled code is watched only if it can run. A symbolic step calls none. In other steps
        # the compiler must be loaded, either before or by this meter's own operators.
        if not is_symbolic() and (DYNAMO in sys.modules or self._should_skip_dynamo()):
            self._undo.enter_context(buffers_of_generated_code(self, self._count_buffer))
            self._undo.enter_context(compiled_calls(self._called_compiled))
        if self._module_paths:
            self._ledger.paths = self._undo.enter_context(ModulePaths(self.model))
        self._state = "active"
        return self

    def _swap_tensors(self, swap: Callable, *tensors: Tensor) -> None:
        # It may exchange the output of the last operator with a parameter or buffer.
        with self._ledger.lock:
            self._usage.forget_output()
        swap(*tensors)

    def _belongings(self) -> Iterator[tuple[Tensor, str]]:
        return belongings(self.model, self.optimizers)

    def __exit__(self, kind, error, traceback) -> None:
        super().__exit__(kind, error, traceback)
        try:
            self._undo.close()
            with self._ledger.lock:
                self._usage.finish()
                # This includes tensors that `.to()` put into the model inside the block.
                self._ledger.close(self._belongings())
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"MemoryMeter could not close its records: {own}")
        finally:
            # A new tracker holds no node, no tensor and no record.
            self._usage = CategoryTracker(self._ledger, self._usage.leaves_are_parameters)
            self._ledger.closed = True
            self.model = None
            self.optimizers = ()
            self._state = "closed"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Autograd calls `prim.device` more often than all other operators run, so it comes first.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        # Operators in these namespaces make no tensors.
        if func.namespace in ("profiler", "prim"):
            return func(*args, **(kwargs or {}))
        if not all(map(holds_bytes, types)):
            # A wrapper subclass unwraps itself, and its inner tensors then come through here.
            return NotImplemented
        ledger = self._ledger
        usage = self._usage
        node = current_node()
        with ledger.lock:
            made_in, sources = usage.inputs(func, args, kwargs, node)
            taken_over = (
                usage.taken_over(func, args, kwargs) if func in IN_PLACE_WITHOUT_MODES else None
            )
        result = func(*args, **kwargs) if kwargs else func(*args)
        with ledger.lock:
            self._begin_moment(func, node)
            if flops := flops_of(func, args, kwargs, result):
                ledger.flops[len(ledger.operators) - 1] = flops
            if taken_over is not None:
                ledger.expect_end(taken_over)
            usage.outputs(func, result, sources, made_in)
            ledger.note_peak()
            exceeded = self._budget_error(func)
        if exceeded is not None:
            del result  # the traceback would keep the result alive
            raise exceeded
        return result

    def _begin_moment(self, func: Any, node: Any) -> None:
        """Begin the moment of an operator or of compiled code, to which the next records belong."""
        ledger = self._ledger
        ledger.bury()
        ledger.main.before_bytes = ledger.main.live_bytes
        phase = (
            "optimizer"
            if self._optimizer_phase.is_running(node)
            else "forward"
            if node is None
            else "backward"
        )
        ledger.operators.append((func, phase))
        if ledger.paths is not None and (path := ledger.paths(node)):
            ledger.modules[len(ledger.operators) - 1] = path
        if self._source_lines and (line := own_line(sys._getframe(2))):
            ledger.lines[len(ledger.operators) - 1] = line

    def _budget_error(self, func: Any) -> MemoryBudgetExceeded | None:
        """Return the error to raise if the last operator took the live bytes over the budget, else
        None."""
        before, live = self._ledger.main.before_bytes, self._ledger.main.live_bytes
        if self.budget_bytes is None or live <= max(before, self.budget_bytes):
            return None
        return MemoryBudgetExceeded(str(func), before, live - before, self.budget_bytes)

    def _count_buffer(self, storage: torch.UntypedStorage) -> None:
        """Count a buffer that compiler-generated code has allocated."""
        node = current_node()
        # Reading the parts of a sparse tensor runs operators, which do not belong to the step.
        with disable_current_modes(), self._ledger.lock:
            made_in, _ = self._usage.inputs(None, (), {}, node)
            self._begin_moment(COMPILED_CODE, node)
            # Compiled code reads its buffers without operators.
            self._ledger.add(storage, self._ledger.account(storage.device), None, made_in)
            self._usage.buffers.add(self._ledger.records[-1], made_in)
            self._ledger.note_peak()
            exceeded = self._budget_error(COMPILED_CODE)
        if exceeded is not None:
            raise exceeded

    def _called_compiled(self) -> None:
        self.ran_compiled = True


class UnguardedMeter(MemoryMeter):
    """Meter without the guards against compilation, which slow down every operator of a symbolic
    step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = unwrap(MemoryMeter.__torch_dispatch__)
