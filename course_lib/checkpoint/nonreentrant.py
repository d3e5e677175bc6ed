"""The non-reentrant mode of `checkpoint`, which uses saved-tensor hooks, and `checkpoint` itself.

The hooks put an empty slot into the graph for each saved tensor. The first read of a slot
recomputes the tensors and fills all slots.

Maintainers should know the following before they change this file:

- **Weak references to slots.** The graph holds the slots, and with each slot a hook that holds the
  region. The region itself refers to the slots only weakly. So there is no reference cycle, and a
  region is freed with its graph. A slot that no longer exists shows that its tensor will never be
  read: a part of the graph was freed, or a backward pass inside the function has used it. In the
  recomputation such a tensor is not kept, and this is not an error.
- **Reading empties a slot.** With `retain_graph=True` the slots stay, but a recomputed tensor must
  be released as soon as it was read. Otherwise all of them would be live at the end of the backward
  pass.
- **Nesting.** The inputs of an inner checkpoint are saved like those of any other operator in the
  outer function, so they are slots of the outer region. Reading one recomputes the outer function
  first, and with it the inner forward pass.
- **Early stop.** Once the recomputation has saved as many tensors as the first run, the rest of the
  function is not needed, unless the last operator writes into a tensor that it has saved, as rrelu
  does.
- **The compiler.** A checkpoint inside code that `torch.compile` compiles becomes PyTorch's own,
  which the compiler puts into its graph (see `_run`). Everywhere else both runs are hidden from the
  compiler (see `call_uncompiled` and `_run_eagerly`), because a compiled run and an uncompiled run
  would save different tensors.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._torch import (
    ObserverMode,
    tensors_in,
    torch_func_refused,
    writes_after_saving,
)
from .comparison import ComparingHooks, Hooks
from .reentrant import (
    CheckpointFunction,
    GlobalState,
    RunningStatistics,
    saved_inputs,
    with_tensors,
    without_tensors,
)
from .selective import _CachingTorchDispatchMode


class _Slot:
    """An empty place in the graph for a saved tensor, filled between its recomputation and its use.

    Attributes:
        tensors: Backward pass -> the recomputed tensor, or None after it was read.
        unfinished: Whether early stop ended the recomputation before the operator that saved the
            tensor was complete. The operator may still have to write into it.
    """

    __slots__ = ("__weakref__", "tensors", "unfinished")

    def __init__(self):
        self.tensors: dict[Any, Tensor | None] = {}
        self.unfinished = False


class _Stop(BaseException):
    """Exception that ends a recomputation as soon as it has saved everything that is needed.

    It is not an `Exception`, so that handlers in the function do not catch it.
    """


class _SaveInputs(torch.autograd.Function):
    """An autograd node that saves the inputs of a checkpointed function, as an operator would.

    The saved-tensor hooks of an enclosing checkpoint therefore apply to the inputs, and autograd
    detects if they are changed in place.
    """

    @staticmethod
    def forward(ctx, anchor, tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


# An input of `_SaveInputs` that requires gradients; otherwise autograd would not create a node.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)

_graph_exec_group = getattr(
    torch._C, "_get_graph_exec_group", lambda: None
)  # exists since torch 2.10


class Region:
    """One call of a checkpointed function: everything needed to run it again, and its slots.

    Args:
        function, args, kwargs, preserve_rng_state, early_stop: As in `checkpoint`.
        compare_metadata: Whether to compare the metadata of the saved tensors of both runs, not
            only their number.
        context: Context manager of the second run.
        logs: Operator logs of both runs for `debug=True`, or None.

    Attributes:
        enclosing_hooks: The user's saved-tensor hooks around the first run. They are set only
            during that run, because they may refer to the graph, which holds the region.
    """

    enclosing_hooks: Hooks | None = None

    def __init__(
        self,
        function,
        args,
        kwargs,
        preserve_rng_state,
        early_stop,
        compare_metadata,
        context,
        logs,
    ):
        tensors = list(tensors_in((args, kwargs)))
        self.function = function
        self.early_stop = early_stop
        self.compare_metadata = compare_metadata
        self.context, self.logs = context, logs
        self.global_state = GlobalState(tensors, preserve_rng_state)
        self.inputs = without_tensors((args, kwargs))
        self.statistics = RunningStatistics(tensors)
        # The outputs of these nodes are held so that the nodes live as long as the region. Each
        # vector of running statistics has its own node, because the function may change it, and
        # reading a node's tensors raises an error if one of them was changed.
        vectors = self.statistics.copies
        others = [x for i, x in enumerate(tensors) if i not in vectors]
        self.input_node = _SaveInputs.apply(_ANCHOR, others) if others else None
        self.vector_nodes = {i: _SaveInputs.apply(_ANCHOR, [tensors[i]]) for i in vectors}
        self.input_count = len(tensors)
        self.slots: list[weakref.ref[_Slot]] = []
        # metadata of the first run's tensor for each slot, or None if metadata are not compared
        self.metadata: list[tuple | None] = []
        self.complete = False  # whether the forward pass has finished

    def forward(self, args: tuple, kwargs: dict, context: AbstractContextManager) -> Any:
        """Run the function for the first time, with a slot in the graph per saved tensor."""
        self.enclosing_hooks = _user_hooks()
        try:
            with (
                torch_func_refused("a checkpoint"),
                saved_tensors_hooks(self.pack, self.unpack),
                context,
            ):
                result = self.function(*args, **kwargs)
                self.complete = True
        finally:
            self.enclosing_hooks = None
        if not self.complete:
            raise RuntimeError(
                "torch.utils.checkpoint: the forward context provided by context_fn suppressed an"
                " exception raised during the checkpointed forward"
            )
        self.global_state.check_devices()
        self.statistics.drop_unchanged()
        return result

    def original_inputs(self) -> list[Tensor]:
        """Return the input tensors of the first run.

        Running statistics that the first run changed are returned as copies of their old values.

        Raises:
            RuntimeError: Another input was changed in place.
        """

        def tensors_saved_by(node: Tensor | None) -> tuple[Tensor, ...]:
            return () if node is None else saved_inputs(node.grad_fn, self.function)

        changed = {i: copy.clone() for i, copy in self.statistics.copies.items()}
        unchanged = {
            i: tensors_saved_by(node)[0]
            for i, node in self.vector_nodes.items()
            if i not in changed
        }
        vectors = changed | unchanged
        others = iter(tensors_saved_by(self.input_node))
        return [vectors[i] if i in vectors else next(others) for i in range(self.input_count)]

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.metadata.append(_metadata(tensor) if self.compare_metadata else None)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        key = _graph_exec_group()  # backward passes that share a recomputation have the same key
        if key is None:
            key = torch._C._current_graph_task_id()
        node = torch._C._current_autograd_node()
        writes_later = writes_after_saving(node)
        if key not in slot.tensors:
            _Recomputation(self, key, to_end=writes_later).run()
        elif writes_later and slot.unfinished:
            _Recomputation(self, key, to_end=True, only=slot).run()
        tensor, slot.tensors[key] = slot.tensors[key], None
        if tensor is None:
            raise CheckpointError(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already"
                " unpacked once. Read ctx.saved_tensors only once in backward. Performing two"
                " backward calls that overlap is not allowed under GraphExecGroup"
            )
        if key == -1:  # The graph was inspected outside a backward pass, so keep no tensors.
            for other in filter(None, (ref() for ref in self.slots)):
                other.tensors.pop(key, None)
        return tensor


def _user_hooks() -> Hooks | None:
    """Return the innermost saved-tensor hooks that are not those of a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(owner, ComparingHooks):
        owner = getattr(owner.inner[0], "__self__", None)
    if isinstance(owner, _Recomputation):
        return None
    return owner.enclosing_hooks if isinstance(owner, Region) else hooks


class _Recomputation:
    """Another run of a region's function, which fills the region's slots.

    The i-th tensor that autograd saves goes into the i-th slot.

    Args:
        key: The backward pass that needs the tensors.
        to_end: Whether to run the function to its end without early stop, because an operator
            writes into a tensor that it has saved.
        only: The only slot to fill, or None to fill all.
    """

    def __init__(self, region: Region, key: Any, *, to_end: bool, only: _Slot | None = None):
        self.region, self.key, self.only = region, key, only
        self.stops = region.early_stop and not (to_end or getattr(region.context, "to_end", False))
        self.count = 0
        self.differences = ""
        self.operator = 0  # sequence number of the operator that saved last
        self.filled: list[_Slot] = []  # the slots of this operator's tensors

    def run(self) -> None:
        region = self.region
        args, kwargs = with_tensors(region.inputs, region.original_inputs())
        hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        with (
            hooks,
            torch.enable_grad(),
            region.global_state.restore(),
            region.context,
            suppress(_Stop),
        ):
            call_uncompiled(region.function, args, kwargs)
        if self.count < len(region.slots):
            self.fail(
                "A different number of tensors was saved during the original forward and"
                " recomputation.\nNumber of tensors saved during forward:"
                f" {len(region.slots)}\nNumber of tensors saved during recomputation: {self.count}"
            )
        if self.differences:
            self.fail(
                "Recomputed values for the following tensors have different metadata than during"
                " the forward pass."
            )

    def pack(self, tensor: Tensor) -> Tensor:
        region, position = self.region, self.count
        # The tensor is detached, because a slot that held the graph of the recomputation would form
        # a reference cycle.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.count += 1
        if position < len(region.slots):
            slot, metadata = region.slots[position](), region.metadata[position]
            # `slot` is None if the graph has released it; then nothing will read its tensor.
            if slot is not None and self.only in (None, slot):
                self.fill(slot, tensor)
                if metadata is not None and metadata != _metadata(tensor):
                    self.differences += (
                        f"tensor at position {position}:\n"
                        f"saved metadata: {_metadata_dict(metadata)}\n"
                        f"recomputed metadata: {_metadata_dict(_metadata(tensor))}\n"
                    )
            if self.stops and self.count == len(region.slots):
                for slot in self.filled:
                    slot.unfinished = True
                raise _Stop
        # If the forward pass is not complete, this recomputation is for a backward pass inside the
        # function, and additional tensors are allowed.
        elif region.complete and not region.early_stop:
            self.fail(
                "trying to save more tensors during recomputation than during the original forward"
                f" pass.\nNumber of tensors saved during forward: {len(region.slots)}\nFirst"
                f" additional tensor: {_metadata(tensor)}"
            )
        # The graph of the recomputation saves the tensor for a backward pass inside the function.
        return tensor

    def fill(self, slot: _Slot, tensor: Tensor) -> None:
        slot.tensors[self.key] = tensor
        slot.unfinished = False
        # The sequence number counts nodes, and each operator creates one before it saves tensors.
        operator = torch.autograd._get_sequence_nr()
        if operator != self.operator:
            self.operator, self.filled = operator, []
        self.filled.append(slot)

    def fail(self, problem: str) -> None:
        logs = self.region.logs
        raise CheckpointError(
            f"torch.utils.checkpoint: {problem}\n{self.differences}The function must do the same"
            " whenever it is run. "
            + (
                _logs_message(*logs)
                if logs
                else "For the operators of both runs, pass `debug=True` to checkpoint"
            )
        )


@torch._disable_dynamo
def call_uncompiled(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function without letting `torch.compile` compile it.

    A backward pass may run while `torch.compile` examines frames (compiled autograd, or a compiled
    function that calls `backward`). The compiler would then compile the recomputation, and a
    compiled graph saves other tensors than the first run did. This is a module-level function,
    because the decorator keeps the decorated function alive. A method would keep its region alive.
    """
    return function(*args, **kwargs)


def _metadata(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _metadata_dict(metadata: tuple) -> dict:
    return dict(zip(("shape", "dtype", "device"), metadata, strict=True))


# ---- for `debug=True`: the operators of both runs

_LIBRARY_FOLDERS = tuple(f"{Path(path).parent}{os.sep}" for path in (torch.__file__, __file__))


class OperatorLog(ObserverMode):
    """Record each operator with the line of code that called it."""

    def __enter__(self):
        self.lines: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
        self.lines.append(f"  {func}({_short(args)}) -> {_short(result)}\n      {place}")
        return result


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return ", ".join(map(_short, value)) if isinstance(value, (list, tuple)) else str(value)


def _logs_message(forward: OperatorLog, recomputation: OperatorLog) -> str:
    hint = (
        "You are seeing this error because you passed `debug=True` to checkpoint: look for the"
        " first operator that differs. Additional `detach` operators are not an error, and the"
        " recomputation ends as soon as it has saved everything that is needed."
    )
    ran = "Operations executed during"
    lines = [
        hint,
        f"{ran} the original forward:",
        *forward.lines,
        f"{ran} recomputation:",
        *recomputation.lines,
    ]
    return "\n".join(lines)


# ---- the public functions: argument checks and the choice of the mode

USE_REENTRANT_WARNING = (
    "the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended,"
    " and is the default here. In PyTorch, leaving it out means True or raises an error, depending"
    " on the version."
)

# Values set by the two functions below; None keeps the value that was passed to each checkpoint.
overrides: dict[str, bool | None] = {"early_stop": None, "debug": None}


@contextmanager
def _override(name: str, value: bool | None) -> Iterator[None]:
    previous, overrides[name] = overrides[name], value
    try:
        yield
    finally:
        overrides[name] = previous


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager:
    """Override `early_stop` of every checkpoint whose forward pass runs inside the `with` block."""
    return _override("early_stop", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager:
    """Override `debug` of every checkpoint whose forward pass runs inside the `with` block.

    None keeps the value that was passed to each checkpoint.
    """
    return _override("debug", enabled)


def checkpoint(
    function: Callable | None = None,
    *args,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[
        [], tuple[AbstractContextManager, AbstractContextManager]
    ] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs,
) -> Any:
    """Run `function(*args, **kwargs)`, drop its activations, and run it again for backward.

    In code that `torch.compile` compiles, this is PyTorch's checkpoint, which the compiler puts
    into its graph, with or without `fullgraph=True`. Only `function`, its arguments and
    `context_fn` have an effect there, because the graph always repeats random numbers and computes
    the same in both runs. If the graph breaks inside `function`, PyTorch's checkpoint runs it
    uncompiled. A function that is compiled itself runs compiled both times.

    Args:
        function: Function to run; it must do the same in both runs. If it is left out, a decorator
            is returned.
        use_reentrant: True runs the function without a graph, and later runs it again with a
            backward pass inside the backward pass. An input must then require gradients, and
            `torch.autograd.grad` cannot be used. False builds the graph without its saved tensors,
            and every kind of backward pass works. All further arguments except
            `preserve_rng_state` are for False only.
        preserve_rng_state: Whether the second run gets the random numbers of the first, on the CPU,
            the devices of the inputs and the current device.
        context_fn: Function that returns two context managers, for the first run and the second.
        determinism_check: "default" compares shapes, dtypes and devices of the tensors that both
            runs save. "none" compares only their number.
        debug: Whether a `CheckpointError` lists the operators of both runs.
        early_stop: Whether to end the second run as soon as it has saved everything needed.
        respect_saved_tensors_hooks: Whether the tensors that a selective checkpoint keeps go
            through the saved-tensor hooks around it, such as `torch.autograd.graph.save_on_cpu`.
            None means False, and does not give the warning of newer versions of PyTorch.
        **kwargs: Keyword arguments of the function, for use_reentrant=False.

    Returns:
        The result of `function(*args, **kwargs)`, or a decorator without `function`.

    Raises:
        ValueError: Arguments cannot be combined, or have an invalid value.
        CheckpointError: (In the backward pass) the second run saved fewer tensors, or tensors that
            `determinism_check` refuses. Other numbers in the same shapes are not noticed.
        RuntimeError: (In the backward pass) an input was changed in place.

    The function may change running statistics among its inputs, which are vectors without
    gradients, as in `F.instance_norm`. The recomputation does not change them a second time. All
    such vectors are copied during the first run. `F.batch_norm` is an exception: it changes them a
    second time, as in PyTorch.

    Source: Chen et al. 2016, arXiv:1604.06174; behavior as of torch 2.13, arguments as of 2.14.

    Example:
        >>> layer, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
        >>> checkpoint(layer, x, use_reentrant=False).sum().backward()
    """
    options = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
    }
    if function is not None or args:
        return _run(function, args, kwargs, options)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    return partial(_decorate, options)


def _decorate(options: dict[str, Any], function: Callable) -> Callable:
    @wraps(function, updated=())  # do not copy a module's attributes to the wrapper
    def run(*args, **kwargs):
        return _run(function, args, kwargs, options)

    return run


def _run(function: Callable, args: tuple, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        # The compiler repeats random numbers in its own way, and its graph computes the same in
        # both runs, so the other options have no effect there.
        if options["context_fn"] is noop_context_fn:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=options["context_fn"], **kwargs
        )
    return _run_eagerly(function, args, kwargs, **options)


# The compiler must not trace this function. It would break the graph at the saved-tensor hooks but
# still compile the frames of `function`. The compiled graph would then save different tensors from
# the recomputation, which runs uncompiled. `torch._disable_dynamo` loads the compiler only when the
# function is first called; `torch.compiler.disable` would load it when this module is imported.
@torch._disable_dynamo
def _run_eagerly(
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    use_reentrant: bool | None,
    preserve_rng_state: bool,
    context_fn: Callable,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    respect_saved_tensors_hooks: bool | None,
) -> Any:
    if use_reentrant is None:
        # `stacklevel` skips the two callers in this file and two frames of the decorator.
        warnings.warn(f"torch.utils.checkpoint: {USE_REENTRANT_WARNING}", stacklevel=6)
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        non_default = context_fn is not noop_context_fn or debug is not False
        if non_default or respect_saved_tensors_hooks is not None:
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported"
                " when use_reentrant=False."
            )
        return CheckpointFunction.apply(function, preserve_rng_state, *args)

    if determinism_check not in ("default", "none"):
        raise ValueError(
            f"determinism_check should be one of ['default', 'none'], but got {determinism_check}"
        )
    early_stop = early_stop if overrides["early_stop"] is None else overrides["early_stop"]
    debug = debug if overrides["debug"] is None else overrides["debug"]
    if debug and context_fn is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    logs = (OperatorLog(), OperatorLog()) if debug else None
    forward_context, recompute_context = logs or context_fn()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch._C._are_functorch_transforms_active():
        warnings.warn(
            "checkpoint: inside a transform of torch.func the function runs without a checkpoint,"
            " so its activations are kept",
            stacklevel=6,
        )
        return function(*args, **kwargs)
    if respect_saved_tensors_hooks and isinstance(forward_context, _CachingTorchDispatchMode):
        forward_context.hooks = _user_hooks()
    region = Region(
        function,
        args,
        kwargs,
        preserve_rng_state,
        early_stop,
        determinism_check == "default",
        recompute_context,
        logs,
    )
    return region.forward(args, kwargs, forward_context)
