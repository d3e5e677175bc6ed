"""A meter for live tensor bytes: exact, and the same on every machine.

It stands at the dispatcher and sees what every operator returns. It keeps no tensor alive and installs no autograd
hook: a saved-tensor hook would switch off PyTorch's check for in-place changes and forbid `torch.func`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import AccumulateGrad, hooks_active, saved_by
from .show import bytes_text

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "temporary", "input")
PHASES = ("forward", "backward", "optimizer")
CATEGORY_COLORS = {  # Paul Tol's "bright" scheme: colour-blind readers can tell them apart
    "parameter": "#4477AA",
    "buffer": "#66CCEE",
    "gradient": "#EE6677",
    "optimizer": "#AA3377",
    "activation": "#228833",
    "temporary": "#CCBB44",
    "input": "#BBBBBB",
}
# Of the categories that a grey print would show alike.
CATEGORY_HATCHES = {"parameter": "////", "optimizer": "xxxx", "buffer": r"\\\\", "input": "||||"}


class MemoryBudgetExceeded(RuntimeError):
    """An operator took the live bytes over the meter's budget.

    Attributes:
        operator: its name, for example "aten.mm.default".
        live_bytes: bytes live before it.
        wanted_bytes: bytes it made on top of them.
        budget_bytes: the budget.
    """

    def __init__(self, operator: str, live_bytes: int, wanted_bytes: int, budget_bytes: int):
        super().__init__(
            f"{operator} wanted {bytes_text(wanted_bytes)} on top of {bytes_text(live_bytes)} live, "
            f"but the budget is {bytes_text(budget_bytes)}"
        )
        self.operator = operator
        self.live_bytes = live_bytes
        self.wanted_bytes = wanted_bytes
        self.budget_bytes = budget_bytes

    def __reduce__(self):
        return type(self), (self.operator, self.live_bytes, self.wanted_bytes, self.budget_bytes)


@dataclass(frozen=True)
class Sample:
    """What was live right after one operator."""

    operator: str  # "aten.addmm.default"
    phase: str  # one of PHASES
    bytes: dict[str, int]  # every one of CATEGORIES -> bytes

    @property
    def live_bytes(self) -> int:
        return sum(self.bytes.values())


class Timeline(Sequence):
    """One `Sample` per operator, made when asked for."""

    def __init__(self, operators: list[tuple[Any, str]], series: dict[str, np.ndarray]):
        self._operators, self._series = operators, series

    def __len__(self) -> int:
        return len(self._operators)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        operator, phase = self._operators[index]
        return Sample(str(operator), phase, {name: int(values[index]) for name, values in self._series.items()})


class _Storage(weakref.ref):
    """The life of one storage, and the weak reference that notices its end.

    Times are operator numbers. Only later is it known whether a storage was an activation or a temporary, so
    a record keeps dates, and `spans` works out the categories when somebody asks.
    """

    __slots__ = ("born", "bytes", "died", "key", "made_in", "nbytes", "read_by", "released", "role", "saved", "since")

    def __new__(cls, storage, callback, *dates):
        return super().__new__(cls, storage, callback)

    def __init__(self, storage, callback, block_bytes: int, born: int, role: str | None, made_in: str):
        super().__init__(storage, callback)
        self.key: int = storage._cdata
        self.nbytes: int = storage.nbytes()
        self.bytes: int = -(-self.nbytes // block_bytes) * block_bytes
        self.born = born
        self.died: int | None = None
        self.role = role  # parameter, buffer, gradient, optimizer, input; None: activation or temporary
        self.since = born  # when it took that role
        self.made_in = made_in  # "forward", "recomputation" (in backward, with gradients on) or "formula"
        self.saved: int | None = None  # held for backward from here ...
        self.released: int | None = None  # ... to here: the end of the last autograd node that read it
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
            starts = [start for start in starts if start[0] < self.since] + [(self.since, self.role)]
        for (start, category), (stop, _) in zip(starts, [*starts[1:], (end, "")], strict=True):
            if start < min(stop, end):
                yield start, min(stop, end), category


class MemoryMeter(TorchDispatchMode):
    """Count the bytes of live tensors, operator by operator.

    A storage counts once however many views it has, from its creation inside the block to its last reference.
    Storages that were alive before the block count only if they belong to `model` (parameters, buffers, their
    gradients) or to `optimizer` (its state, and master weights that it steps in place of parameters).

    Categories: "parameter", "buffer" and "gradient" (of parameters, once accumulated); "optimizer" (state, master
    weights); "activation" (kept for backward: saved by the graph, or made in the forward pass and read in backward, as
    what checkpointing keeps is; a gradient handed to `backward` counts so too); "input" (made in the block by an
    operator that has no tensor to start from, such as a batch); "temporary" (all else).

    Not counted: what an operator allocates and frees inside itself (workspace: `measure` reports it), tensors made in
    threads that you start yourself, memory that no operator makes (such as `torch.from_numpy`'s), and what the
    kernels generated by `torch.compile` allocate (of those, only the calls that reach ATen are seen).

    Args:
        model: counted from the start, as above.
        optimizer: counted from the start, as above.
        budget_bytes: the most bytes that may be live.
        block_bytes: count each storage rounded up to a multiple of this; 512 is the CUDA allocator's rounding.

    Attributes:
        peak_bytes: the most bytes live at once.

    Raises:
        MemoryBudgetExceeded: the operator named in it took the live bytes over `budget_bytes`. It has run: its inputs
            that it changes in place are changed, its outputs are gone.
        RuntimeError: the same meter is entered twice.
        NotImplementedError: an operator met a tensor whose bytes cannot be seen (oneDNN's opaque layout).

    Example::

        with MemoryMeter(model, optimizer) as meter:
            train_step()
        meter.peak_bytes, meter.at_peak()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        budget_bytes: int | None = None,
        block_bytes: int = 1,
    ):
        super().__init__()
        check_model_and_optimizer(model, optimizer)
        for name, count in (
            ("budget_bytes", 1 if budget_bytes is None else budget_bytes),
            ("block_bytes", block_bytes),
        ):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name} is {count!r}; it takes a whole number of bytes, as an int")
            if count <= 0:
                raise ValueError(f"{name} is {count}; it takes a positive number of bytes")
        self.model = model
        self.optimizer = optimizer
        self.budget_bytes = budget_bytes
        self.block_bytes = block_bytes
        self.entry_bytes = 0  # what model and optimizer held on entry
        self.peak_bytes = 0
        self._peak_index = 0
        self._live = 0
        self._state = "new"  # then "active", then "closed"
        self._operators: list[tuple[Any, str]] = [("(entry)", "forward")]  # (operator, phase); entry is number 0
        self._records: list[_Storage] = []
        self._by_address: dict[int, _Storage] = {}
        self._dead: deque[_Storage] = deque()  # filled by the weak references, in whichever thread a storage dies
        self._lock = threading.RLock()  # autograd runs one thread per device
        self._output: weakref.ref | None = None  # of the last operator, until its autograd node can be seen
        self._node = None  # the autograd node that ran the last operator
        self._read: list[_Storage] = []  # what that node has read so far
        self._step_node: Any = False  # inside an optimizer's step: the autograd node that called it, or None
        self._final_history: dict[str, np.ndarray] | None = None  # worked out once, after the block
        self._hooks: list[Any] = []

    # ---- the block

    def __enter__(self) -> MemoryMeter:
        if self._state != "new":
            raise RuntimeError(f"this MemoryMeter has been entered already ({self._state}); make a new one per block")
        for tensor, role in _belongings(self.model, self.optimizer):
            for storage in _storages(tensor):
                if self._find(storage) is None:
                    self._add(storage, role, "formula")
        self.entry_bytes = self.peak_bytes = self._live
        if self.budget_bytes is not None and self._live > self.budget_bytes:
            raise MemoryBudgetExceeded("what model and optimizer hold on entry", 0, self._live, self.budget_bytes)
        super().__enter__()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._get_rng_state, torch.get_rng_state = torch.get_rng_state, self._counted_rng_state
        self._state = "active"
        return self

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        torch.get_rng_state = self._get_rng_state
        with self._lock:
            self._catch_up()
            for tensor, role in _belongings(self.model, self.optimizer):  # also those that `.to()` put in place
                for storage in _storages(tensor):
                    self._assign(storage, role)
            self._state = "closed"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # autograd asks more often than operators run
            return args[0].fake_device
        if func.namespace in ("profiler", "prim"):  # neither makes a tensor
            return func(*args, **(kwargs or {}))
        if not all(map(_is_plain, types)):
            return NotImplemented  # a wrapper subclass unwraps itself; its inner tensors then pass through here
        node = torch._C._current_autograd_node()
        # In backward, gradients are on only where the forward pass is computed again.
        made_in = "forward" if node is None else "recomputation" if torch.is_grad_enabled() else "formula"
        with self._lock:
            self._settle()
            if node is not self._node:
                self._release()
                self._node = node
            sources = self._inputs(args, kwargs, node, made_in)
        result = func(*args, **kwargs) if kwargs else func(*args)
        with self._lock:
            self._bury()
            before = self._live
            # With gradients on, or in another node, a step's closure runs: the forward and backward passes of LBFGS.
            stepping = node is self._step_node and not torch.is_grad_enabled()
            self._operators.append((func, "optimizer" if stepping else "forward" if node is None else "backward"))
            self._outputs(func, result, sources, made_in)
            if self._live > self.peak_bytes:
                self.peak_bytes, self._peak_index = self._live, len(self._operators) - 1
            wanted = self._live - before
        if self.budget_bytes is not None and wanted > 0 and before + wanted > self.budget_bytes:
            del result  # else the traceback keeps it
            raise MemoryBudgetExceeded(str(func), before, wanted, self.budget_bytes)
        return result

    # ---- one operator

    def _inputs(self, args, kwargs, node, made_in: str) -> set[int]:
        """The addresses of the input storages. What backward reads of the forward pass had been kept for it."""
        sources = set()
        for tensor in _tensors(args, kwargs):
            for storage in _storages(tensor):
                sources.add(storage._cdata)
                record = self._find(storage)
                if record is None:
                    continue
                if record.role in (None, "input"):
                    if type(tensor) is nn.Parameter or (
                        self.model is None and record.role == "input" and tensor.requires_grad and tensor.is_leaf
                    ):
                        record.role, record.since = "parameter", record.born
                kept = record.made_in == "forward" or (record.made_in == "recomputation" and made_in == "formula")
                if node is not None and kept and record.read_by is not node:
                    if record.saved is None:  # held by other means than the graph, as checkpointing does
                        record.saved = record.born
                    record.released, record.read_by = None, node
                    self._read.append(record)
        return sources

    def _outputs(self, func, result, sources: set[int], made_in: str) -> None:
        tensors = _tensors((result,))
        for tensor in tensors:
            for storage in _storages(tensor):
                record = self._find(storage)
                if record is not None:
                    if record.nbytes != storage.nbytes():  # resized in place: one life ends, another begins
                        self._dead.append(record)
                        self._bury()
                        self._add(storage, record.role, record.made_in)
                elif storage._cdata not in sources or (func is _LIFT_FRESH and storage.resizable()):
                    # Data enters a step through an operator that has no tensor to start from.
                    enters = not sources - {storage._cdata} and self._operators[-1][1] == "forward"
                    self._add(storage, "input" if enters else None, made_in)
        # Under hooks the graph holds not the tensors but what the hooks made of them.
        if tensors and made_in != "formula" and not hooks_active():
            self._output = weakref.ref(tensors[0])

    def _settle(self) -> None:
        """What the last operator's autograd node saved, or accumulated, can be seen once the operator is through."""
        now = len(self._operators) - 1
        if self._output is not None:
            output, self._output = self._output(), None
            node = None if output is None else output.grad_fn
            if node is not None:
                for _, tensor in saved_by(node):
                    for storage in _storages(tensor):
                        record = self._find(storage)
                        if record is not None and record.saved is None:
                            record.saved = now
        if isinstance(self._node, AccumulateGrad) and self._node.variable.grad is not None:
            for storage in _storages(self._node.variable.grad):
                self._assign(storage, "gradient", now)

    def _release(self) -> None:
        """The autograd node that read these is through with them."""
        for record in self._read:
            record.released, record.read_by = len(self._operators), None
        self._read.clear()

    def _bury(self) -> None:
        """Take the dead off the books. They were alive up to the last operator."""
        while self._dead:
            record = self._dead.popleft()
            if record.died is None:
                self._live -= record.bytes
                if self._state == "active":
                    record.died = len(self._operators)
                if self._by_address.get(record.key) is record:
                    del self._by_address[record.key]

    def _catch_up(self) -> None:
        self._settle()
        self._release()
        self._node = None
        self._bury()

    # ---- records

    def _find(self, storage) -> _Storage | None:
        record = self._by_address.get(storage._cdata)
        # An address can have a new owner before the death of the last one is on the books.
        return record if record is not None and record() is storage else None

    def _add(self, storage, role: str | None, made_in: str) -> None:
        record = _Storage(storage, self._dead.append, self.block_bytes, len(self._operators) - 1, role, made_in)
        self._by_address[record.key] = record
        self._records.append(record)
        self._live += record.bytes

    def _assign(self, storage, role: str, since: int = 0) -> None:
        record = self._find(storage)
        if record is not None and record.role in (None, "input"):
            record.role, record.since = role, max(since, record.born)

    def _counted_rng_state(self) -> Tensor:
        """`torch.get_rng_state` makes 5,056 bytes without an operator; a checkpoint keeps them until backward."""
        state = self._get_rng_state()
        with self._lock:
            self._bury()
            self._add(state.untyped_storage(), None, "formula")
            if self._live > self.peak_bytes:
                self.peak_bytes, self._peak_index = self._live, len(self._operators) - 1
        return state

    # ---- the optimizer's step

    def _before_step(self, optimizer, args, kwargs) -> None:
        self._step_node = torch._C._current_autograd_node()

    def _after_step(self, optimizer, args, kwargs) -> None:
        self._step_node = False
        with self._lock:
            for tensor in _held_by(optimizer, of_groups=True):
                for storage in _storages(tensor):
                    self._assign(storage, "optimizer")

    # ---- results

    @property
    def live_bytes(self) -> int:
        """Bytes live now; goes on falling after the block, as what was made in it dies."""
        with self._lock:
            if self._state == "active":
                self._catch_up()
            else:
                self._bury()
            return self._live

    def series(self) -> dict[str, np.ndarray]:
        """category -> live bytes after each operator, int64 arrays of one length."""
        return {name: values[1:] for name, values in self._history().items()}

    def phases(self) -> list[str]:
        """The phase of each operator, one of `PHASES`."""
        return [phase for _, phase in self._operators[1:]]

    @property
    def timeline(self) -> Timeline:
        """One `Sample` per operator: its name, its phase, and the live bytes of each category right after it."""
        return Timeline(self._operators[1:], self.series())

    def at_peak(self) -> dict[str, int]:
        """category -> bytes at the moment of `peak_bytes` (the first, if it was reached more than once)."""
        return {name: int(values[self._peak_index]) for name, values in self._history().items()}

    def _history(self) -> dict[str, np.ndarray]:
        if self._final_history is not None:
            return self._final_history
        with self._lock:
            if self._state == "active":
                self._catch_up()
            end = len(self._operators)
            change = {name: np.zeros(end + 1, dtype=np.int64) for name in CATEGORIES}
            for record in self._records:
                for start, stop, category in record.spans(end):
                    change[category][start] += record.bytes
                    change[category][stop] -= record.bytes
        history = {name: np.cumsum(values)[:-1] for name, values in change.items()}
        if self._state == "closed":
            self._final_history = history
        return history

    def plot(self, ax=None):
        """Draw the timeline: live MB (10**6 bytes) of each category, stacked, over operators; the peak is marked.

        Args:
            ax: matplotlib axes; without them, new ones.

        Returns:
            The axes.
        """
        import matplotlib.pyplot as plt

        ax = ax if ax is not None else plt.subplots(figsize=(7.2, 3.2), layout="constrained")[1]
        series = {name: values / 1e6 for name, values in self._history().items() if values.any()}
        steps = np.arange(len(self._operators))
        ax.stackplot(
            steps,
            *series.values(),
            labels=series.keys(),
            colors=[CATEGORY_COLORS[name] for name in series],
            hatch=[CATEGORY_HATCHES.get(name) for name in series] or None,
            edgecolor=(1, 1, 1, 0.35),
            step="post",
            linewidth=0,
        )
        ax.plot(self._peak_index, self.peak_bytes / 1e6, "kv", markersize=5)
        ax.annotate(
            f"{self.peak_bytes / 1e6:,.2f} MB",
            (self._peak_index, self.peak_bytes / 1e6),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
        )
        ax.set(
            xlabel="operators",
            ylabel="live MB",
            xlim=(0, len(steps)),
            ylim=(0, max(self.peak_bytes / 1e6 * 1.15, 1e-6)),
        )
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return ax

    def __repr__(self) -> str:
        if self._state == "new":
            return "MemoryMeter(new)"
        parts = ", ".join(f"{name} {count:,}" for name, count in self.at_peak().items() if count)
        count = len(self._operators) - 1
        return f"MemoryMeter(peak {bytes_text(self.peak_bytes)}: {parts or 'nothing'}; {count} operators)"


# ---- tensors and their storages

_DEVICE = torch.ops.prim.device.default
# What `torch.tensor([...])` calls: it returns its input, and that is new. `torch.from_numpy` calls it too, but what
# NumPy owns cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


def _is_plain(kind: type) -> bool:
    """True for tensors whose own storage is what they hold: all but wrapper subclasses."""
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl or issubclass(kind, FakeTensor)


def _tensors(args, kwargs: Mapping | None = None) -> list[Tensor]:
    """The tensors among an operator's arguments, in lists too."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, such as an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _storages(tensor: Tensor) -> tuple:
    """The storages that hold a tensor's bytes: one, or one for each part of a sparse or wrapper tensor."""
    if tensor.layout is torch.strided:
        if type(tensor) is Tensor or type(tensor) is nn.Parameter or _is_plain(type(tensor)):
            return (tensor.untyped_storage(),)
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise NotImplementedError(
            f"MemoryMeter cannot see the bytes of a tensor with layout {tensor.layout}; it sees strided and sparse ones"
        )
    return tuple(storage for part in parts for storage in _storages(part))


def _belongings(model, optimizer) -> Iterator[tuple[Tensor, str]]:
    """What model and optimizer hold, with the category of each."""
    if model is not None:
        for parameter in model.parameters():
            yield parameter, "parameter"
            if parameter.grad is not None:
                yield parameter.grad, "gradient"
        for buffer in model.buffers():
            yield buffer, "buffer"
    if optimizer is not None:
        for tensor in _held_by(optimizer):
            yield tensor, "optimizer"


def _held_by(optimizer, of_groups: bool = False) -> Iterator[Tensor]:
    """An optimizer's state, and the master weights that it steps in place of the model's parameters.

    With `of_groups`, only the state of the parameters in its groups: an optimizer may be stepped a few at a time. An
    optimizer that keeps its state elsewhere says what it holds by a method `held_tensors`.
    """
    if hasattr(optimizer, "held_tensors"):
        yield from optimizer.held_tensors()
        return
    if of_groups:
        for group in optimizer.param_groups:
            yield from _tensors_in([optimizer.state[p] for p in group["params"] if p in optimizer.state])
    else:
        yield from _tensors_in(optimizer.state)
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if not p.requires_grad and not isinstance(p, nn.Parameter))


def check_model_and_optimizer(model, optimizer) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it takes a torch.nn.Module or None")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it takes a torch.optim.Optimizer or None")
