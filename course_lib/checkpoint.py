"""Forget activations in the forward pass, and compute them again in the backward pass.

A drop-in for `torch.utils.checkpoint`: the same names, arguments, warnings and errors, written to be read. Replace the
import and nothing else. What differs, and why:

- `use_reentrant` left out means False. The old default silently trains nothing when no input requires gradients.
- An input that was changed in place is an error in both modes; PyTorch's reentrant mode recomputes from the new values.
- A policy that keeps a random operator's output keeps the random numbers after it too; in PyTorch the recomputation
  draws others from there on. CPU offload does what its name says, where eager PyTorch recomputes; a policy's answer
  that means nothing is an error.
- The RNG state of the current device is kept even if no argument lives there, and keyword arguments count as inputs.
- `torch.compile` puts PyTorch's own function into its graphs; around this one it breaks the graph.

Lesson 02 builds both modes from nothing.
"""

from __future__ import annotations

import enum
import os
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from operator import index
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class CheckpointError(torch.utils.checkpoint.CheckpointError):
    """The recomputation did not give what the forward pass had saved.

    A subclass of PyTorch's, so that code that catches that one goes on working after the import is changed.
    """


# ---- what surrounds a function: random numbers, autocast, the default device


class DefaultDeviceType:
    """The device type whose state is kept when no argument is on a device other than the CPU."""

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        """The type that was set; else the accelerator of this machine, or "cpu"."""
        if DefaultDeviceType._default_device_type is None:
            accelerator = torch.accelerator.current_accelerator(True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator else "cpu"
        return DefaultDeviceType._default_device_type


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _infer_device_type(*args: Any) -> str:
    """The one device type, besides the CPU, whose state is kept."""
    types = list(dict.fromkeys(tensor.device.type for tensor in _tensors(args) if tensor.device.type != "cpu"))
    if len(types) > 1:
        warnings.warn(
            "Tensor arguments, excluding CPU tensors, are detected on at least two types of devices. Device state will "
            "only be saved for one of them (CUDA, or else the first); what is random on the others will differ in the "
            f"recomputation, and gradients may be wrong. Device types: {sorted(types)} first device type: {types[0]}",
            stacklevel=2,
        )
    return "cuda" if "cuda" in types else types[0] if types else DefaultDeviceType.get_device_type()


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """The indices of the devices, other than CPU and meta, that the tensors in `args` are on, and their RNG states."""
    device_type = _infer_device_type(*args)
    on_devices = (tensor for tensor in _tensors(args) if tensor.device.type not in ("cpu", "meta"))
    devices = list(dict.fromkeys(tensor.get_device() for tensor in on_devices if tensor.device.type == device_type))
    return devices, _device_states(device_type, devices)


def _device_states(device_type: str, devices: Iterable[int]) -> list[Tensor]:
    module, states = getattr(torch, device_type, None), []
    for device in devices:
        with module.device(device):
            states.append(module.get_rng_state())
    return states


def set_device_states(devices: Iterable[int], states: Iterable[Tensor], *, device_type: str | None = None) -> None:
    """Set the RNG states of devices of one type (by default, `DefaultDeviceType`'s)."""
    module = getattr(torch, DefaultDeviceType.get_device_type() if device_type is None else device_type, None)
    for device, state in zip(devices, states, strict=False):
        with module.device(device):
            module.set_rng_state(state)


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype, bool]:
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return enabled, dtype, torch.is_autocast_cache_enabled()


class _Surroundings:
    """What is global and decides what a function returns, as it was when the function ran first."""

    def __init__(self, preserve_rng_state: bool, inputs: tuple):
        self.preserve_rng_state, self.device_type = preserve_rng_state, _infer_device_type(*inputs)
        kinds = [kind for kind in {"cpu", self.device_type} if torch.amp.is_autocast_available(kind)]
        self.autocast = {kind: _autocast_state(kind) for kind in kinds}
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
        self.default_device = modes[-1].device if modes else nullcontext()
        self.had_device, self.devices = self.device_in_use(), []
        if preserve_rng_state:
            if self.had_device:  # asking a device that nobody has used yet would start it
                used = {tensor.get_device() for tensor in _tensors(inputs) if tensor.device.type == self.device_type}
                self.devices = sorted({getattr(torch, self.device_type).current_device(), *used})
            self.states = self.random_states()

    def device_in_use(self) -> bool:
        return getattr(getattr(torch, self.device_type, None), "_initialized", False)

    def random_states(self) -> tuple[Tensor, list[Tensor]]:
        return torch.get_rng_state(), _device_states(self.device_type, self.devices)

    def set_random_states(self, cpu: Tensor, devices: list[Tensor]) -> None:
        torch.set_rng_state(cpu)
        set_device_states(self.devices, devices, device_type=self.device_type)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was then, inside the block; as it is now, after it."""
        with ExitStack() as stack:
            if self.preserve_rng_state:
                stack.callback(self.set_random_states, *self.random_states())
                self.set_random_states(*self.states)
            for kind, state in self.autocast.items():
                if state != _autocast_state(kind):
                    enabled, dtype, cached = state
                    stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cached))
            stack.enter_context(self.default_device)
            yield

    def check_device(self) -> None:
        """Raise if the function was the first to use the device: what its RNG state was before, nobody knows."""
        if self.preserve_rng_state and not self.had_device and self.device_in_use():
            raise RuntimeError(
                "PyTorch's device state was initialized in the forward pass of a Checkpoint, which is not allowed: its "
                f"RNG state could not be kept. Call torch.{self.device_type}.init() before the first checkpoint"
            )


_TENSOR = object()  # stands for a tensor that autograd keeps


def _kept(node: Any, function: Callable, changed: bool = False) -> tuple[Tensor, ...]:
    """The inputs that a node has saved; an error if they are not what they were."""
    try:
        if not changed:
            return node.saved_tensors
        error = None
    except RuntimeError as caught:
        if "inplace operation" not in str(caught):
            raise
        error = caught
    name = getattr(function, "__qualname__", type(function).__name__)
    raise RuntimeError(
        f"checkpoint: an input of {name} has been modified by an inplace operation since the forward pass began, so "
        "the recomputation would start from other values. Let the function work on a copy: x = x.clone()"
    ) from error


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# ---- reentrant: one autograd node that runs the function again, and a backward pass inside the backward pass


def detach_variable(inputs: tuple) -> tuple:
    """Leaves in place of tensors: detached, each with the `requires_grad` that it had. Other values stay."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"Only tuple of tensors is supported. Got Unsupported input type: {type(inputs).__name__}")
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs)


def check_backward_validity(inputs: Iterable) -> None:
    """Warn if none of the tensors among the inputs requires gradients."""
    if not any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
        warnings.warn(
            "None of the inputs have requires_grad=True. Gradients will be None, those of the parameters too. Pass "
            "use_reentrant=False, or call requires_grad_() on an input",
            stacklevel=2,
        )


class CheckpointFunction(torch.autograd.Function):
    """The reentrant mode: `CheckpointFunction.apply(function, preserve_rng_state, *args)`."""

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, *args):
        check_backward_validity(args)
        ctx.run_function, ctx.surroundings = run_function, _Surroundings(preserve_rng_state, args)
        ctx.args = [_TENSOR if isinstance(x, Tensor) else x for x in args]
        tensors = [x for x in args if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        versions = [_version(x) for x in tensors]
        with torch.no_grad():
            outputs = run_function(*args)
        ctx.changed = versions != [_version(x) for x in tensors]  # autograd itself looks from here on only
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False, or call "
                ".backward() without passing the `inputs` argument."
            )
        tensors = iter(_kept(ctx, ctx.run_function, ctx.changed))
        inputs = detach_variable(tuple(next(tensors) if x is _TENSOR else x for x in ctx.args))
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = ctx.run_function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=False) if _differentiable(y)]
        before = [tuple(grad.shape) for y, grad in pairs if grad is not None]
        after = [tuple(y.shape) for y, grad in pairs if grad is not None]
        if len(outputs) != len(grads) or before != after:
            raise CheckpointError(
                f"checkpoint: the forward pass returned {len(grads)} values, tensors of shapes {before} among them, "
                f"but the recomputation {len(outputs)}, with {after}. The function must do the same whenever it is run"
            )
        if not pairs:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# ---- not reentrant: hooks that put an empty slot into the graph for each tensor, and fill the slots when one is read


class _Slot:
    """Stands in the graph for a tensor that was not kept, and holds it from its recomputation until it is read."""

    __slots__ = ("__weakref__", "tensors")

    def __init__(self):
        self.tensors: dict[Any, Tensor | None] = {}  # which backward pass -> the tensor, or None once it was read


class _Stop(BaseException):
    """Everything needed has been recomputed. No `Exception`: the function's own handlers should not see it."""


class _Keep(torch.autograd.Function):
    """A node that keeps tensors as any operator does: through the hooks of an enclosing checkpoint, versions watched.

    A nested checkpoint's inputs are therefore slots of the one around it; reading them recomputes that one first.
    """

    @staticmethod
    def forward(ctx, anchor, tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # a node is made only where something requires gradients


class _Region:
    """One call of a checkpointed function: how to run it again, and the slots that this fills.

    The graph holds the slots, and with each a hook that holds the region; the region knows the slots only weakly. So
    there is no cycle: the region dies with the graph, and what nobody will read any more is not filled.
    """

    def __init__(self, function, args, kwargs, preserve_rng_state, early_stop, check, context, logs):
        self.function, self.early_stop, self.check, self.context, self.logs = function, early_stop, check, context, logs
        self.surroundings = _Surroundings(preserve_rng_state, (args, kwargs))
        self.args = [_TENSOR if isinstance(x, Tensor) else x for x in args]
        self.kwargs = {name: _TENSOR if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self.kept = _Keep.apply(_ANCHOR, tensors) if tensors else None  # its node lives as long as it does
        self.slots: list[weakref.ref[_Slot]] = []
        self.saved: list[dict | None] = []  # what each slot stands for
        self.complete = False  # whether the forward pass is through

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.saved.append(_metadata(tensor) if self.check else None)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        group = _group()  # backward passes that share a recomputation: the same key for all of them
        number = torch._C._current_graph_task_id()
        key = group if group is not None else number
        try:
            if key == -1:  # no backward pass, somebody looks at the graph: recompute, return this one, keep nothing
                return _Recomputation(self, key, only=slot).run()
            if key not in slot.tensors:
                _Recomputation(self, key).run()
            tensor, slot.tensors[key] = slot.tensors[key], None
            if tensor is None:
                raise CheckpointError(
                    "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once, "
                    "and it was freed then. If you are calling ctx.saved_tensors in backward, make sure to do so only "
                    "once. Performing two backward calls that overlap is not allowed under GraphExecGroup"
                )
            return tensor
        except CheckpointError as error:
            if self.logs is None:
                raise
            raise CheckpointError(_report(error, *self.logs)) from error


_group = getattr(torch._C, "_get_graph_exec_group", lambda: None)  # from torch 2.10 on, as is the next line
GraphExecGroup = getattr(torch.utils.checkpoint, "GraphExecGroup", None)  # sets a mark that lies in torch._C


class _Recomputation:
    """Runs a region's function again, and puts the i-th tensor that autograd saves into the i-th slot.

    Args:
        key: the backward pass that it is for.
        only: fill no slot, but return the tensor that belongs to this one.
    """

    def __init__(self, region: _Region, key: Any, only: _Slot | None = None):
        self.region, self.key, self.only, self.found = region, key, only, None
        self.count, self.differences = 0, ""

    def run(self) -> Tensor | None:
        region = self.region
        tensors = iter(_kept(region.kept.grad_fn, region.function) if region.kept is not None else ())
        args = [next(tensors) if x is _TENSOR else x for x in region.args]
        kwargs = {name: next(tensors) if x is _TENSOR else x for name, x in region.kwargs.items()}
        hooks = saved_tensors_hooks(self.pack, _as_it_is)
        with hooks, torch.enable_grad(), region.surroundings.restored(), region.context, suppress(_Stop):
            region.function(*args, **kwargs)
        if self.count < len(region.slots):
            self.fail(
                "A different number of tensors was saved during the original forward and recomputation.\n"
                f"Number of tensors saved during forward: {len(region.slots)}\n"
                f"Number of tensors saved during recomputation: {self.count}"
            )
        if self.differences:
            self.fail(
                "Recomputed values for the following tensors have different metadata than during the forward pass."
            )
        return self.found

    def pack(self, tensor: Tensor) -> Tensor:
        region, position = self.region, self.count
        # Without its history: a slot that held the graph of the recomputation would be part of a cycle.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.count += 1
        if position < len(region.slots):
            slot = region.slots[position]()
            if slot is not None:  # else a backward pass inside the function has freed it
                self.fill(slot, tensor, position)
            if region.early_stop and self.count == len(region.slots):
                raise _Stop
        elif region.complete and not region.early_stop:  # if not complete: a backward pass inside the function
            self.fail(
                "trying to save more tensors during recomputation than during the original forward pass.\n"
                f"Number of tensors saved during forward: {len(region.slots)}\nOne more: {_metadata(tensor)}"
            )
        return tensor  # the graph of the recomputation holds it too, for a backward pass inside the function

    def fill(self, slot: _Slot, tensor: Tensor, position: int) -> None:
        saved = self.region.saved[position]
        if saved is not None and saved != _metadata(tensor):
            saved, found = (dict(zip(("shape", "dtype", "device"), x, strict=True)) for x in (saved, _metadata(tensor)))
            self.differences += (
                f"tensor at position {position}:\nsaved metadata: {saved}\nrecomputed metadata: {found}\n"
            )
        if self.only is None:
            slot.tensors.setdefault(self.key, tensor)
        elif slot is self.only:
            self.found = tensor

    def fail(self, what: str) -> None:
        raise CheckpointError(
            f"torch.utils.checkpoint: {what}\n{self.differences}The function must do the same whenever it is run. For "
            "the operators of both runs, pass `debug=True` or use `set_checkpoint_debug_enabled(True)`"
        )


def _metadata(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# ---- the public functions

_overrides: dict[str, bool | None] = {"early_stop": None, "debug": None}


@contextmanager
def _override(name: str, value: bool | None) -> Iterator[None]:
    before, _overrides[name] = _overrides[name], value
    try:
        yield
    finally:
        _overrides[name] = before


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager:
    """Overrides `early_stop` of every checkpoint whose forward pass runs inside the block."""
    return _override("early_stop", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager:
    """Overrides `debug` of every checkpoint whose forward pass runs inside the block; None leaves it as passed."""
    return _override("debug", enabled)


def noop_context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Two contexts that do nothing: the default for `context_fn`."""
    return nullcontext(), nullcontext()


def _warn_not_explicit(name: str) -> None:
    warnings.warn(
        f"{name}: the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended, and is "
        "what leaving it out means here; in PyTorch it means True, or is an error, depending on the version.",
        stacklevel=3,
    )


def checkpoint(
    function: Callable,
    *args,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs,
) -> Any:
    """Run `function(*args, **kwargs)`, keep its inputs instead of its activations, and run it again for backward.

    Args:
        function: must do the same in both runs.
        use_reentrant: True runs the function without a graph, and then again as a whole, with a backward pass inside
            the backward pass: an input must require gradients, and `torch.autograd.grad` cannot be used. False builds
            the graph in the forward pass and leaves its saved tensors out: all ways to go backward work. The remaining
            arguments are for False only.
        context_fn: returns two contexts, one for each run.
        determinism_check: "default" compares shapes, dtypes and devices of what both runs save; "none" only counts.
        debug: let a `CheckpointError` list the operators of both runs.
        early_stop: end the second run as soon as everything needed is there.
        **kwargs: the function's (for use_reentrant=False), and `preserve_rng_state` (default True): give the second
            run the random numbers of the first, on the CPU, the devices of the inputs and the current device.

    Returns:
        What the function returns.

    Raises:
        ValueError: arguments that don't go together.
        CheckpointError: (in the backward pass) both runs did not save the same.
        RuntimeError: (in the backward pass) an input was changed in place.

    Source: Chen et al. 2016, arXiv:1604.06174; behaviour as of torch 2.13.
    """
    if use_reentrant is None:
        _warn_not_explicit("torch.utils.checkpoint")
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        if context_fn is not noop_context_fn or debug is not False:
            raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
        return CheckpointFunction.apply(function, preserve_rng_state, *args)

    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check should be one of ['default', 'none'], but got {determinism_check}")
    logs = None
    if debug if _overrides["debug"] is None else _overrides["debug"]:
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        logs = _OperatorLog(), _OperatorLog()
    forward_context, recompute_context = context_fn() if logs is None else logs
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    early_stop = early_stop if _overrides["early_stop"] is None else _overrides["early_stop"]
    check = determinism_check == "default"
    region = _Region(function, args, kwargs, preserve_rng_state, early_stop, check, recompute_context, logs)
    with saved_tensors_hooks(region.pack, region.unpack), forward_context:
        result = function(*args, **kwargs)
        region.complete = True
    if not region.complete:
        raise RuntimeError(
            "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised during "
            "the checkpointed forward, so there is nothing to return"
        )
    region.surroundings.check_device()
    return result


def checkpoint_sequential(functions, segments: int, input: Tensor, use_reentrant: bool | None = None, **kwargs) -> Any:
    """Run functions one after the other, with a checkpoint around each segment of them but the last.

    Args:
        functions: a `torch.nn.Sequential`, or a list (or `ModuleList`) of modules or functions.
        segments: from 1 to the number of functions. All have the same length; the last takes what is left over.
        input: what the first function takes.
        use_reentrant, preserve_rng_state: as for `checkpoint`.

    Raises:
        ValueError: there are no functions, or fewer than segments; other keyword arguments.
        TypeError: more than one input.
    """
    if isinstance(use_reentrant, Tensor):
        raise TypeError("checkpoint_sequential takes one input, but a second tensor was passed (as use_reentrant)")
    if use_reentrant is None:
        _warn_not_explicit("torch.utils.checkpoint.checkpoint_sequential")
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    functions = list(functions)
    if not 1 <= index(segments) <= len(functions):
        raise ValueError(f"segments is {segments}; for {len(functions)} functions it takes 1 to {len(functions)}")
    size = len(functions) // segments
    options = {"use_reentrant": bool(use_reentrant), "preserve_rng_state": preserve_rng_state}
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_in_a_row(functions[start : start + size]), input, **options)
    return _in_a_row(functions[size * (segments - 1) :])(input)


def _in_a_row(functions: list) -> Callable:
    def forward(x):
        for function in functions:
            x = function(x)
        return x

    return forward


def checkpointed_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T, targets)`, without ever holding all the logits.

    Each chunk of tokens has a checkpoint of its own, so that at no time more than chunk * v logits, and what one step
    makes of them, are alive. One more product hidden @ weight.T is the price.

    Args:
        hidden: (tokens, h). weight: (v, h). targets: (tokens,), int64.
        chunk: tokens at a time, at least 1; the last chunk may be smaller.
        ignore_index: targets of this value don't count.
        reduction: "mean" over the targets that count, or "sum".

    Returns:
        The loss, a scalar, as `F.cross_entropy` gives it.

    Raises:
        ValueError: shapes that don't go together, a chunk below 1, or another reduction.
        TypeError: targets are not int64.
    """
    if not (
        hidden.dim() == weight.dim() == 2 and targets.shape == hidden.shape[:1] and hidden.shape[1:] == weight.shape[1:]
    ):
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}; "
            "it takes (tokens, h), (v, h) and (tokens,)"
        )
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are {targets.dtype}; cross-entropy takes class indices in torch.int64")
    if index(chunk) < 1:
        raise ValueError(f"chunk is {chunk}; it takes at least 1 token")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it takes 'mean' or 'sum'")
    total = 0.0
    for start in range(0, max(len(hidden), 1), chunk):  # no tokens: one empty chunk
        inputs = hidden[start : start + chunk], weight, targets[start : start + chunk], ignore_index
        losses = checkpoint(_token_losses, *inputs, use_reentrant=False, preserve_rng_state=False)
        total = total + losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total.to(losses.dtype)


def _token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits = hidden @ weight.T  # (chunk, v)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")  # (chunk,)


# ---- debug=True


class _OperatorLog(TorchDispatchMode):
    """Writes down each operator, with the line of code that called it."""

    def __enter__(self):
        self.lines: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
        self.lines.append(f"  {func}({_brief(args)}) -> {_brief(result)}\n      {place}")
        return result


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return ", ".join(map(_brief, value)) if isinstance(value, (list, tuple)) else str(value)


def _report(error: CheckpointError, forward: _OperatorLog, recomputation: _OperatorLog) -> str:
    hint = (
        "You are seeing this error because you passed `debug=True` to checkpoint, and the original forward and the "
        "recomputation did not save the same tensors. Look for the first operator that differs; `detach` may, and the "
        "recomputation ends as soon as it has what it needs."
    )
    ran = "Operations executed during"
    lines = [hint, f"{ran} the original forward:", *forward.lines, f"{ran} recomputation:", *recomputation.lines]
    return f"{error}\n\n" + "\n".join(lines)


# ---- selective checkpointing: keep what some operators return, recompute the rest


class CheckpointPolicy(enum.Enum):
    """What becomes of an operator's output.

    SAVE keeps it, RECOMPUTE computes it again, CPU_OFFLOAD keeps it in the CPU's memory and copies it back. MUST and
    PREFER differ for compilers only, which may overrule the latter.
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5


class SelectiveCheckpointContext:
    """What a policy is told besides the operator and its arguments.

    Attributes:
        is_recompute: always False; policies are asked in the forward pass only.
        op_output: what the operator returned.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None):
        self.is_recompute, self.op_output = is_recompute, op_output


# Operators that the two runs need not call equally often: the hooks detach, and look at shapes.
SAC_IGNORED_OPS = {torch.ops.aten.detach.default, torch.ops.prim.device.default, *FunctionalTensor.metadata_fns}


class _Cached:
    """One value that an operator returned, kept."""

    def __init__(self, value: Any, offload: bool):
        self.device = self.version = None
        if isinstance(value, Tensor) and offload and value.device.type != "cpu":
            self.device, value = value.device, value.to("cpu")
        elif isinstance(value, Tensor):
            # Detached, since the value itself will get a history that leads back here. With this dispatch key on,
            # the alias shares the version counter, by which a change in place is noticed.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                value = value.detach()
            self.version = _version(value)
        self.val = value

    def get(self, allow_mutation: bool) -> Any:
        if self.version is not None and self.val._version != self.version and not allow_mutation:
            raise RuntimeError(
                "Tensor cached during selective activation checkpoint has been mutated: an operator changed it in "
                f"place after the policy had kept it (shape {tuple(self.val.shape)}). Use an operator that makes a new "
                "tensor, let the policy recompute this one, or pass allow_cache_entry_mutation=True"
            )
        return self.val if self.device is None else self.val.to(self.device)


_RECOMPUTE, _USED = object(), object()


class _CachingTorchDispatchMode(TorchDispatchMode):
    """The forward pass: asks the policy, and keeps what it says. Named as PyTorch's, which other libraries look for."""

    def __init__(self, policy: Callable, storage: dict):
        super().__init__()
        # operator -> what became of its first, second, ... output; (operator, which) -> the RNG states after it
        self.policy, self.storage = policy, storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        before = torch.get_rng_state() if random else None
        result = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
        policy = _policy(self.policy(context, func, *args, **kwargs), func).name
        entry = _RECOMPUTE
        if not policy.endswith("RECOMPUTE"):
            entry = tree_map(lambda value: _Cached(value, policy.endswith("OFFLOAD")), result)
            if random and (states := _states_after(before, result)) is not None:
                self.storage[func, len(self.storage[func])] = states
        self.storage[func].append(entry)
        return result


def _states_after(before: Tensor, result: Any) -> tuple | None:
    """The RNG states that follow an operator; those that the recomputation must go on with if it skips it."""
    device_type = _infer_device_type(result)
    devices, states = get_device_states(result)
    now = torch.get_rng_state()
    return None if not devices and torch.equal(before, now) else (now, devices, states, device_type)


def _policy(answer: Any, func: Any) -> CheckpointPolicy:
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if isinstance(answer, torch.utils.checkpoint.CheckpointPolicy):
        return CheckpointPolicy[answer.name]
    if not isinstance(answer, CheckpointPolicy):
        raise TypeError(f"the policy returned {answer!r} for {func}; it takes a CheckpointPolicy or a bool")
    return answer


class _CachedTorchDispatchMode(TorchDispatchMode):
    """The recomputation: returns what was kept, once, instead of computing it."""

    def __init__(self, storage: dict, allow_cache_entry_mutation: bool = False):
        super().__init__()
        self.storage, self.allow_cache_entry_mutation = storage, allow_cache_entry_mutation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self):
        self.counts: dict[Any, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        entries, position = self.storage.get(func, ()), self.counts[func]
        self.counts[func] += 1
        if position >= len(entries):
            raise RuntimeError(
                f"{func} encountered during backward but not found in storage: the forward pass ran it {len(entries)} "
                "times, the recomputation more often. The function must do the same whenever it is run"
            )
        entry = entries[position]
        if entry is _RECOMPUTE:
            return func(*args, **(kwargs or {}))
        if entry is _USED:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any region computed under "
                "selective activation checkpoint: what it kept is freed as soon as it has been used"
            )
        entries[position] = _USED
        if (func, position) in self.storage:
            cpu, devices, device_states, device_type = self.storage.pop((func, position))
            torch.set_rng_state(cpu)
            set_device_states(devices, device_states, device_type=device_type)
        return tree_map(lambda cached: cached.get(self.allow_cache_entry_mutation), entry)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable | list, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Two contexts, for `checkpoint(..., context_fn=partial(create_selective_checkpoint_contexts, policy))`.

    Args:
        policy_fn_or_list: `policy(context, operator, *args, **kwargs)` with a `SelectiveCheckpointContext`, which
            returns a `CheckpointPolicy` (or a bool: keep it?); or a list of operators to keep, such as
            `[torch.ops.aten.mm.default]`. Asked in the forward pass only.
        allow_cache_entry_mutation: don't check whether what was kept has been changed in place.

    Raises:
        ValueError: something in the list is not an `OpOverload`.
        TypeError: neither a list nor a function; or (in the forward pass) a policy's answer that means nothing.
    """
    policy = policy_fn_or_list
    if isinstance(policy, list):
        for op in policy:
            if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
                raise ValueError(
                    f"Expected op in `op_list` to be an OpOverload but got: {op} of type {type(op)}. If it is an "
                    "OpOverloadPacket, please update the OpOverloadPacket to a specific OpOverload: not "
                    "`torch.ops.aten.mm` but `torch.ops.aten.mm.default`"
                )
        operators = frozenset(policy)
        policy = lambda context, op, *args, **kwargs: op in operators  # noqa: E731
    elif not callable(policy):
        raise TypeError("policy_fn_or_list must be either a function or a list of ops.")
    storage: dict = defaultdict(list)
    forward = _CachingTorchDispatchMode(policy, storage)
    return forward, _CachedTorchDispatchMode(storage, allow_cache_entry_mutation)
