"""One stage under autograd: its checks, its forward, and its backward, which frees memory early."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import function, kind, shown, whole
from course_lib._torch import map_tensors, tensors_in

# ---- the checks of a stage and of the value between two stages


def as_modules(stages: Sequence[Callable]) -> dict[str, nn.Module]:
    """Return the stages by name, as modules."""
    allowed = "an nn.Sequential or a list of modules and functions"
    kind("stages", stages, (nn.Sequential, nn.ModuleList, list, tuple), allowed)
    whole("the number of stages", len(stages), 1)
    named = (
        stages._modules
        if isinstance(stages, nn.Module)
        else {str(i): stage for i, stage in enumerate(stages)}
    )
    for name, stage in named.items():
        function(f"stage {name}", stage, "a module or a function")
    return {
        name: stage if isinstance(stage, nn.Module) else _Function(stage)
        for name, stage in named.items()
    }


_identities = itertools.count()


class _Function(nn.Module):
    """A function as a module, with the modules and parameters that it refers to as its own."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        held = list(dict.fromkeys(_held(function)))
        # Its computation is unknown, so no two functions are treated as alike. `id` is not used,
        # because Python may reuse it for the next function.
        self.identity = str(next(_identities))
        self.modules_held = nn.ModuleList(value for value in held if isinstance(value, nn.Module))
        self.parameters_held = nn.ParameterList(
            value for value in held if isinstance(value, nn.Parameter)
        )

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def _held(value: Any) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that a function refers to.

    They may be in a partial's arguments, a method's object, a closure, defaults, or lists and dicts
    of these.
    """
    if isinstance(value, (nn.Module, nn.Parameter)):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        parts = [value.__self__]
    elif inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, (list, tuple, dict)):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
    for part in parts:
        yield from _held(part)


def handed_on(name: str, value: Any) -> Any:
    """Check the input of the next stage and return it.

    A tuple of one tensor and Nones, as Hugging Face layers return it, becomes that tensor.
    """
    tensors = list(tensors_in(value))
    if len(tensors) != 1 and len([tensor for tensor in tensors if differentiable(tensor)]) != 1:
        raise TypeError(
            f"{name} must be one tensor, or a container with one floating-point tensor,"
            f" got {shown(value)} with {len(tensors)} tensors"
        )
    alone = isinstance(value, tuple) and all(item is None or item is tensors[0] for item in value)
    return tensors[0] if alone else value


def the_tensor(value: Any) -> Tensor:
    """Return the tensor through which gradients flow, from the value between two stages."""
    tensors = list(tensors_in(value))
    return tensors[0] if len(tensors) == 1 else next(filter(differentiable, tensors))


def with_tensor(value: Any, new: Tensor) -> Any:
    """Replace the tensor through which gradients flow."""
    old = the_tensor(value)
    return map_tensors(lambda tensor: new if tensor is old else tensor, value)


def differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def check_constants(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise ValueError(f"{name} must not require a gradient, got {shown(value)} that does")


# ---- forward


def run_stage(
    i: int, stage: nn.Module, value: Any, kwargs: dict, buffers: dict[str, Tensor] | None = None
) -> Any:
    """Run stage i on the output of stage i-1.

    `buffers`, if given, replace the stage's own buffers, which then stay unchanged.
    """
    versions = [tensor._version for tensor in tensors_in(value)]
    if buffers:
        output = torch.func.functional_call(stage, buffers, (value,), kwargs)
    else:
        output = stage(value, **kwargs)
    if [tensor._version for tensor in tensors_in(value)] != versions:
        raise RuntimeError(
            f"stage {i} changed its input in place, but a schedule may need it again; make it out"
            " of place"
        )
    return handed_on(f"what stage {i} returns", output)


# ---- backward


class GradientSlot:
    """The gradient that one stage's backward passes to the next, referenced nowhere else.

    Autograd frees each tensor after its last use, unless its caller holds it. A node of the next
    stage's graph therefore takes the gradient out of this slot.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None  # also None if the output was not used

    def take(self) -> Tensor | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class Kept:
    """Result of a forward that keeps everything: the stage's graph and output.

    `backward` releases the output and then sends the gradient in `slot` through the graph.
    """

    def __init__(
        self,
        i: int,
        stage: nn.Module,
        value: Any,
        kwargs: dict,
        needs: bool,
        buffers: dict[str, Tensor] | None,
        slot: GradientSlot,
    ):
        x = the_tensor(value)
        with torch.enable_grad():
            self.x = x.detach().requires_grad_(needs and differentiable(x))
            # A view, because FlopCounterMode's hook on a module's input fails on a leaf inside
            # autograd.grad.
            self.output = run_stage(
                i, stage, with_tensor(value, self.x.view_as(self.x)), kwargs, buffers
            )
            self.end = _TakeGradient.apply(the_tensor(self.output), slot)
        self.slot = slot
        self.parameters = trained(stage)
        if not {*map(id, _leaves(self.end))} <= {*map(id, (self.x, *self.parameters))}:
            raise RuntimeError(
                f"stage {i} uses a tensor that requires a gradient and is neither its input nor a"
                " parameter that it holds; make it a parameter of a module that is the stage, or"
                " detach it"
            )
        if left := next(_left_behind(stage), None):
            raise RuntimeError(
                f"stage {i} leaves a tensor with a gradient behind in {left}, but only its output"
                " may be used outside a stage; return that tensor, or detach it"
            )

    def backward(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input, if it needs one, and of the stage's parameters."""
        self.output = None
        wanted = [tensor for tensor in (self.x, *self.parameters) if tensor.requires_grad]
        if not self.end.requires_grad or self.slot.gradient is None:
            self.slot.take()
            found = [None] * len(wanted)
        else:
            found = torch.autograd.grad(
                self.end, wanted, torch.empty_like(self.end), allow_unused=True
            )
        return (found[0], list(found[1:])) if self.x.requires_grad else (None, list(found))


class _TakeGradient(torch.autograd.Function):
    """The end of a stage's graph, an empty tensor; its backward starts with the slot's gradient."""

    @staticmethod
    def forward(ctx, output: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return output.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.slot.take(), None


def trained(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def _left_behind(stage: nn.Module) -> Iterator[str]:
    """Yield attributes with a tensor that a run has computed.

    Weights that a hook computes before each run are left out.
    """
    for name, module in stage.named_modules():
        hooks = module._forward_pre_hooks.values()
        # weights of weight_norm, spectral_norm and pruning
        weights = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
        for key in vars(module).keys() - weights:
            if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module)[key])):
                yield f"{name}.{key}".removeprefix("block.").removeprefix(".")


def _leaves(end: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that backward from `end` reaches."""
    waiting = [end.grad_fn]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable
