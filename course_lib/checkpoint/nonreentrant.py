"""The mode without reentry: hooks put an empty slot into the graph for each tensor, and fill all
when one is read.

What a maintainer should know before changing a line here:

- **Slots are known weakly.** The graph holds the slots, and with each a hook that holds the region;
  the region knows the slots by weak references only. So there is no cycle, and a region dies with
  its graph. And a slot that is gone says that nobody will read it any more (a part of the graph was
  freed, or a backward pass inside the function has used it): what belongs there is not kept when it
  is recomputed, and is no error.
- **Reading empties a slot.** With `retain_graph=True` the slots stay, but a recomputed tensor must
  go as soon as it was read, or all of them would be alive at the end of the backward pass.
- **Nesting.** The inputs of an inner checkpoint are saved as those of any operator in the outer
  function are: they are slots of the outer region. Reading one recomputes the outer function first,
  and with it the inner forward pass.
- **Early stop.** Once as many tensors were saved as in the first run, the rest of the function is
  not needed. It is where the last operator writes into what it has saved, as rrelu does.
- **The compiler.** A checkpoint inside code that `torch.compile` compiles becomes PyTorch's own,
  which the compiler puts into its graph (see `_run`). Elsewhere both runs are hidden from the
  compiler (see `uncompiled` and `_checkpointed`), because one run compiled and one not would save
  different tensors.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, noop_context_fn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from .._torch import (
    ObserverMode,
    saves_unset_memory,
    tensors_in,
    torch_func_refused,
    writes_after_saving,
)
from .reentrant import (
    CheckpointFunction,
    Statistics,
    Surroundings,
    kept_inputs,
    with_tensors,
    without_tensors,
)
from .repeatable import Repeatable
from .selective import Hooks, _CachingTorchDispatchMode


class _Slot:
    """Stands in the graph for a tensor that was not kept, and holds it from its recomputation until
    it is read.

    Attributes:
        tensors: which backward pass -> the tensor, or None once it was read.
        unfinished: whether the recomputation ended before the operator that saved the tensor.
        difference: description of how its values differ from those of the first run; empty if they
            do not, or are not compared.
    """

    __slots__ = ("__weakref__", "difference", "tensors", "unfinished")

    def __init__(self):
        self.tensors: dict[Any, Tensor | None] = {}
        self.unfinished, self.difference = False, ""


class _Stop(BaseException):
    """Everything needed has been recomputed. No `Exception`: the function's own handlers should not
    see it."""


class _Keep(torch.autograd.Function):
    """A node that keeps tensors as any operator does: by the hooks of an enclosing checkpoint,
    versions watched."""

    @staticmethod
    def forward(ctx, anchor, tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


# a node is made only where something requires gradients
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)

_group = getattr(torch._C, "_get_graph_exec_group", lambda: None)  # from torch 2.10 on


class Region:
    """One call of a checkpointed function: how to run it again, and the slots that this fills.

    Args:
        compare_metadata: whether to compare what both runs save, beyond how much it is.
        context: for the second run.
        logs: those of both runs, for `debug=True`.

    Attributes:
        outside: the hooks around the first run while it lasts. Not longer: they may reach the
            graph, which holds the region.
    """

    outside: Hooks | None = None

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
        self.surroundings = Surroundings(tensors, preserve_rng_state)
        self.inputs = without_tensors((args, kwargs))
        self.statistics = Statistics(tensors)
        # Its nodes live as long as it does. Running statistics, which the function may change, have
        # nodes of their own.
        apart = self.statistics.copies
        others = [x for i, x in enumerate(tensors) if i not in apart]
        self.kept = _Keep.apply(_ANCHOR, others) if others else None
        self.kept_apart = {i: _Keep.apply(_ANCHOR, [tensors[i]]) for i in apart}
        self.count = len(tensors)
        self.slots: list[weakref.ref[_Slot]] = []
        # the metadata of what each slot stands for, if they are compared
        self.saved: list[tuple | None] = []
        self.complete = False  # whether the forward pass is through
        self.comparison = function.state.comparison if isinstance(function, Repeatable) else None

    def forward(self, args: tuple, kwargs: dict, context: AbstractContextManager) -> Any:
        """The first run, which leaves slots in the graph."""
        self.outside = _users_hooks()
        try:
            with (
                torch_func_refused("a checkpoint"),
                saved_tensors_hooks(self.pack, self.unpack),
                context,
            ):
                result = self.function(*args, **kwargs)
                self.complete = True
        finally:
            self.outside = None
        if not self.complete:
            raise RuntimeError(
                "torch.utils.checkpoint: the forward context provided by context_fn suppressed an"
                " exception raised during the checkpointed forward"
            )
        self.surroundings.check_devices()
        self.statistics.settle()
        return result

    def given(self) -> list[Tensor]:
        """The inputs of the first run; an error if they are not what they were."""

        def kept(node: Tensor | None) -> tuple[Tensor, ...]:
            return () if node is None else kept_inputs(node.grad_fn, self.function)

        changed = {i: copy.clone() for i, copy in self.statistics.copies.items()}
        apart = {i: kept(node)[0] for i, node in self.kept_apart.items() if i not in changed}
        others = iter(kept(self.kept))
        found = changed | apart
        return [found[i] if i in found else next(others) for i in range(self.count)]

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.saved.append(_metadata(tensor) if self.compare_metadata else None)
        if self.comparison is not None:
            self.comparison.note(tensor)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        key = _group()  # the same for backward passes that share a recomputation
        if key is None:
            key = torch._C._current_graph_task_id()
        node = torch._C._current_autograd_node()
        late = writes_after_saving(node)
        if key not in slot.tensors:
            _Recomputation(self, key, to_end=late).run()
        elif late and slot.unfinished:
            _Recomputation(self, key, to_end=True, only=slot).run()
        tensor, slot.tensors[key] = slot.tensors[key], None
        if tensor is None:
            raise CheckpointError(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already"
                " unpacked once. Read ctx.saved_tensors only once in backward. Performing two"
                " backward calls that overlap is not allowed under GraphExecGroup"
            )
        if slot.difference and not saves_unset_memory(node):
            self.comparison.fail(slot.difference)
        if key == -1:  # no backward pass, somebody looks at the graph: keep nothing
            for other in filter(None, (ref() for ref in self.slots)):
                other.tensors.pop(key, None)
        return tensor


def _users_hooks() -> Hooks | None:
    """The innermost hooks on saved tensors but for those of checkpoints."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(owner, _Recomputation):
        return None
    return owner.outside if isinstance(owner, Region) else hooks


class _Recomputation:
    """Runs a region's function again, and puts the i-th tensor that autograd saves into the i-th
    slot.

    Args:
        key: the backward pass that it is for.
        to_end: run the function to its end, for an operator that writes into what it has saved.
        only: the one slot to fill; all if left out.
    """

    def __init__(self, region: Region, key: Any, *, to_end: bool, only: _Slot | None = None):
        self.region, self.key, self.only = region, key, only
        self.stops = region.early_stop and not (to_end or getattr(region.context, "to_end", False))
        self.count = 0
        self.differences = ""
        self.operator = 0  # number of the operator that saves now, and the slots that it fills
        self.filled: list[_Slot] = []

    def run(self) -> None:
        region = self.region
        args, kwargs = with_tensors(region.inputs, region.given())
        hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        with (
            hooks,
            torch.enable_grad(),
            region.surroundings.restored(),
            region.context,
            suppress(_Stop),
        ):
            uncompiled(region.function, args, kwargs)
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
        # Without its history: a slot that held the graph of the recomputation would be part of a
        # cycle.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.count += 1
        if position < len(region.slots):
            slot, saved = region.slots[position](), region.saved[position]
            # without a slot nobody will read it
            if slot is not None and self.only in (None, slot):
                self.fill(slot, tensor)
                if region.comparison is not None:
                    slot.difference = region.comparison.difference(position, tensor)
                if saved is not None and saved != _metadata(tensor):
                    self.differences += (
                        f"tensor at position {position}:\nsaved metadata: {_shown(saved)}\n"
                        f"recomputed metadata: {_shown(_metadata(tensor))}\n"
                    )
            if self.stops and self.count == len(region.slots):
                for slot in self.filled:
                    slot.unfinished = True
                raise _Stop
        # if not complete: a backward pass inside the function
        elif region.complete and not region.early_stop:
            self.fail(
                "trying to save more tensors during recomputation than during the original forward"
                f" pass.\nNumber of tensors saved during forward: {len(region.slots)}\nOne more:"
                f" {_metadata(tensor)}"
            )
        # the graph of the recomputation holds it too, for a backward pass inside the function
        return tensor

    def fill(self, slot: _Slot, tensor: Tensor) -> None:
        slot.tensors[self.key] = tensor
        slot.unfinished = False
        # counts nodes, of which each operator makes one before it saves
        operator = torch.autograd._get_sequence_nr()
        if operator != self.operator:
            self.operator, self.filled = operator, []
        self.filled.append(slot)

    def fail(self, what: str) -> None:
        logs = self.region.logs
        raise CheckpointError(
            f"torch.utils.checkpoint: {what}\n{self.differences}The function must do the same"
            " whenever it is run. "
            + (
                _operators(*logs)
                if logs
                else "For the operators of both runs, pass `debug=True` to checkpoint"
            )
        )


@torch._disable_dynamo
def uncompiled(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function out of the compiler's sight.

    A backward pass may run while `torch.compile` looks at frames (compiled autograd, or a compiled
    function that calls `backward`). It would compile what the recomputation runs, and a compiled
    graph saves other tensors than the first run did. A function of the module, since the decorator
    keeps what it decorates alive: no region should be in there.
    """
    return function(*args, **kwargs)


def _metadata(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _shown(metadata: tuple) -> dict:
    return dict(zip(("shape", "dtype", "device"), metadata, strict=True))


# ---- for `debug=True`: the operators of both runs

_NOT_THE_USERS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


class OperatorLog(ObserverMode):
    """Writes down each operator, with the line of code that called it."""

    def __enter__(self):
        self.lines: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
        self.lines.append(f"  {func}({_brief(args)}) -> {_brief(result)}\n      {place}")
        return result


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return ", ".join(map(_brief, value)) if isinstance(value, (list, tuple)) else str(value)


def _operators(forward: OperatorLog, recomputation: OperatorLog) -> str:
    hint = (
        "You are seeing this error because you passed `debug=True` to checkpoint: look for the"
        " first operator that differs. `detach` may, and the recomputation ends as soon as it has"
        " what it needs."
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


# ---- the public functions: what they take, and which mode runs it

NOT_EXPLICIT = (
    "the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended,"
    " and is what leaving it out means here; in PyTorch it means True, or is an error, depending on"
    " the version."
)

overrides: dict[str, bool | None] = {"early_stop": None, "debug": None}


@contextmanager
def _override(name: str, value: bool | None) -> Iterator[None]:
    before, overrides[name] = overrides[name], value
    try:
        yield
    finally:
        overrides[name] = before


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager:
    """Overrides `early_stop` of every checkpoint whose forward pass runs inside the block."""
    return _override("early_stop", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager:
    """Overrides `debug` of every checkpoint whose forward pass runs inside the block; None leaves
    it as passed."""
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
    """Run `function(*args, **kwargs)`, keep its inputs instead of its activations, and run it again
    for backward.

    In code that `torch.compile` compiles, this is PyTorch's checkpoint, which the compiler puts
    into its graph, `fullgraph=True` or not. Only `function`, its arguments and `context_fn` mean
    something there: the graph always repeats random numbers and computes the same in both runs.
    Where the graph breaks inside `function`, PyTorch's checkpoint runs it uncompiled. A function
    that is compiled itself runs compiled both times.

    Args:
        function: must do the same in both runs. Left out, what is returned is a decorator.
        use_reentrant: True runs the function without a graph, and then again with a backward pass
            inside the backward pass: an input must require gradients, and `torch.autograd.grad`
            cannot be used. False builds the graph and leaves its saved tensors out: all ways to go
            backward work. Of the remaining arguments all but the next are for False only.
        preserve_rng_state: give the second run the random numbers of the first, on the CPU, the
            devices of the inputs and the current device.
        context_fn: returns two contexts, one for each run.
        determinism_check: "default" compares shapes, dtypes and devices of what both runs save;
            "none" only counts.
        debug: let a `CheckpointError` list the operators of both runs.
        early_stop: end the second run as soon as everything needed is there.
        respect_saved_tensors_hooks: whether what a selective checkpoint keeps goes through the
            hooks on saved tensors around it, such as `torch.autograd.graph.save_on_cpu`. None is
            False, without the warning of newer versions of PyTorch.
        **kwargs: the function's, for use_reentrant=False.

    Raises:
        ValueError: arguments that don't go together.
        CheckpointError: (in the backward pass) both runs did not save the same.
        RuntimeError: (in the backward pass) an input was changed in place.

    Running statistics among the inputs (vectors without gradients, as of `F.instance_norm`) may be
    changed by the function, and change once; all such vectors are copied during the first run.
    `F.batch_norm` changes them a second time, as in PyTorch.

    Source: Chen et al. 2016, arXiv:1604.06174; behaviour as of torch 2.13, arguments as of 2.14.

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
    return partial(_decorated, options)


def _decorated(options: dict[str, Any], function: Callable) -> Callable:
    @wraps(function, updated=())  # a module's attributes are not the wrapper's
    def run(*args, **kwargs):
        return _run(function, args, kwargs, options)

    return run


def _run(function: Callable, args: tuple, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        # The compiler has its own way to keep random numbers, and its graph computes the same in
        # both runs, so the other options mean nothing there.
        if options["context_fn"] is noop_context_fn:
            return torchs_checkpoint(function, *args, use_reentrant=False, **kwargs)
        return torchs_checkpoint(
            function, *args, use_reentrant=False, context_fn=options["context_fn"], **kwargs
        )
    return _checkpointed(function, args, kwargs, **options)


# The compiler does not look inside: it would break its graph at the hooks, but then compile the
# frames of the function, and its graphs save other tensors than the recomputation, which runs
# uncompiled. This decorator loads the compiler when the function is first called;
# `torch.compiler.disable` does so when this module is imported.
@torch._disable_dynamo
def _checkpointed(
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
        # the two functions above, and two frames of the decorator
        warnings.warn(f"torch.utils.checkpoint: {NOT_EXPLICIT}", stacklevel=6)
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        own = context_fn is not noop_context_fn or debug is not False
        if own or respect_saved_tensors_hooks is not None:
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
            "checkpoint: inside a transform of torch.func, activations are kept", stacklevel=6
        )
        return function(*args, **kwargs)
    if respect_saved_tensors_hooks and isinstance(forward_context, _CachingTorchDispatchMode):
        forward_context.hooks = _users_hooks()
    how = preserve_rng_state, early_stop, determinism_check == "default", recompute_context, logs
    return Region(function, args, kwargs, *how).forward(args, kwargs, forward_context)
