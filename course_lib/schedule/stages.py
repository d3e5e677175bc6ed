"""Run one stage of a chain under autograd, with a backward that frees memory early.

The module `executor` uses this module to run the stages of a schedule. The module `chain` uses it
to measure each stage.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import describe, function, kind, whole
from course_lib._torch.tensors import map_tensors, tensors_in

# ---- the checks of a stage and of the value between two stages


def as_modules(stages: Sequence[Callable]) -> dict[str, nn.Module]:
    """Return the stages as a dict from name to module; a function is wrapped in a module.

    Args:
        stages: An `nn.Sequential`, or a list of modules and functions. The names in a list are "0",
            "1" and so on.

    Raises:
        TypeError, ValueError: `stages` has another type or is empty, or a stage cannot be called.
    """
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
        name: stage if isinstance(stage, nn.Module) else _FunctionModule(stage)
        for name, stage in named.items()
    }


_identities = itertools.count()


class _FunctionModule(nn.Module):
    """Module that calls a function, and has the function's modules and parameters as its own.

    The stages that a model's `stages` method returns are often methods, partials and lambdas that
    use modules of the model. The wrapper must have these modules as submodules. Otherwise a stage
    that runs again would change their buffers and attributes twice.
    """

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        references = list(dict.fromkeys(_modules_and_parameters(function)))
        # `module_signature` does not compare the code of functions. This number differs for each
        # wrapped function, so that two functions never count as equal. The `id` of the function is
        # not used, because Python may reuse it for another function.
        self.identity = str(next(_identities))
        self.modules_held = nn.ModuleList(
            value for value in references if isinstance(value, nn.Module)
        )
        self.parameters_held = nn.ParameterList(
            value for value in references if isinstance(value, nn.Parameter)
        )

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def _modules_and_parameters(value: Any) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that a function refers to.

    The search covers the arguments of a partial, the object of a method, the variables of a
    closure, and default arguments. If one of these is a list, tuple or dict, its items are searched
    as well.
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
        yield from _modules_and_parameters(part)


def checked_value(name: str, value: Any) -> Any:
    """Check a value that one stage passes to the next, and return it.

    If the value is a tuple of one tensor and Nones, as Hugging Face layers return it, only the
    tensor is returned.

    Args:
        name: Name of the value, for error messages.
        value: A tensor, or a container of tensors.

    Raises:
        TypeError: The value has no tensor, or it has several tensors but not exactly one that is
            floating-point or complex.
    """
    tensors = list(tensors_in(value))
    floating = [tensor for tensor in tensors if differentiable(tensor)]
    if len(tensors) != 1 and len(floating) != 1:
        raise TypeError(
            f"{name} must be one tensor, or a container with exactly one floating-point tensor,"
            f" got {describe(value)} with {len(tensors)} tensors, of which {len(floating)} are"
            " floating-point tensors"
        )
    is_lone_tensor = isinstance(value, tuple) and all(
        item is None or item is tensors[0] for item in value
    )
    return tensors[0] if is_lone_tensor else value


def main_tensor(value: Any) -> Tensor:
    """Return the tensor through which gradients flow from one stage to another.

    Args:
        value: Value that one stage passes to the next: a tensor or a container of tensors. If it
            has a single tensor, this tensor is returned, whatever its data type is. Otherwise, it
            must have exactly one floating-point or complex tensor, and this tensor is returned.
    """
    tensors = list(tensors_in(value))
    return tensors[0] if len(tensors) == 1 else next(filter(differentiable, tensors))


def with_main_tensor(value: Any, replacement: Tensor) -> Any:
    """Return a copy of a value in which `replacement` is the tensor through which gradients flow.

    Args:
        value: Value that one stage passes to the next: a tensor or a container of tensors. Its
            `main_tensor` is replaced.
        replacement: The new tensor.
    """
    old_tensor = main_tensor(value)
    return map_tensors(lambda tensor: replacement if tensor is old_tensor else tensor, value)


def differentiable(tensor: Tensor) -> bool:
    """Return whether a tensor's data type is a floating-point or complex type."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_constants(kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a keyword argument of a stage has a tensor that requires gradients.

    Args:
        kwargs: The keyword arguments, which must be constants.
    """
    for name, value in kwargs.items():
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise ValueError(
                f"{name} must not require gradients, got {describe(value)} that requires gradients:"
                " in a schedule, only the first argument and the parameters of a stage get"
                f" gradients. If {name} needs none, pass {name}.detach(). Otherwise choose"
                " checkpoints without a schedule"
            )


# ---- forward


def run_stage(i: int, stage: nn.Module, value: Any, kwargs: dict) -> Any:
    """Run stage i on the output of stage i-1, and return the input of stage i+1.

    Args:
        i: Number of the stage, for error messages.
        stage: The stage.
        value: Input of the stage.
        kwargs: Constants that the stage receives as keyword arguments.

    Raises:
        RuntimeError: The stage changes its input in place.
        TypeError: The stage returns no tensor, or several tensors, if not
            exactly one of them is floating-point or complex.
    """
    versions = [tensor._version for tensor in tensors_in(value)]
    output = stage(value, **kwargs)
    if [tensor._version for tensor in tensors_in(value)] != versions:
        raise RuntimeError(
            f"stage {i} changed its input in place, but a schedule may need the input again; use an"
            " out-of-place operator instead"
        )
    return checked_value(f"the result of stage {i}", output)


# ---- backward


class GradientSlot:
    """Container in which a stage's backward leaves a gradient for the previous stage's backward.

    This gradient is that of the stage's input, which is the output of the previous stage. The slot
    has the only reference to the gradient, so that autograd can free it after its last use. If the
    gradient were passed to `torch.autograd.grad`, the caller would hold a second reference during
    the whole backward that uses it. Instead, the first node of this backward takes the gradient out
    of the slot.

    Attributes:
        gradient: Gradient of the output of the stage whose backward runs next. None if the slot is
            empty, or if the loss does not use this output.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def take(self) -> Tensor | None:
        """Return the gradient, and leave the slot empty."""
        gradient, self.gradient = self.gradient, None
        return gradient


class KeptStage:
    """A stage's output and graph, after a forward that keeps everything for its backward.

    Args:
        i, stage, value, kwargs: Number of the stage, the stage itself, its input and its keyword
            arguments, as in `run_stage`.
        needs_gradient: Whether the backward computes the gradient of the input.
        slot: Container of the gradient of the output. The caller puts the gradient into the slot
            before it calls `backward`, and `backward` takes it out.

    Raises:
        RuntimeError: The stage changes its input in place, stores a tensor with a graph in an
            attribute, or uses a tensor that requires gradients but is neither the stage's input nor
            one of its parameters.
        TypeError: The stage returns no tensor, or several tensors, if not
            exactly one of them is floating-point or complex.
    """

    def __init__(
        self,
        i: int,
        stage: nn.Module,
        value: Any,
        kwargs: dict,
        needs_gradient: bool,
        slot: GradientSlot,
    ):
        x = main_tensor(value)
        with torch.enable_grad():
            self.x = x.detach().requires_grad_(needs_gradient and differentiable(x))
            # The stage receives a view, because FlopCounterMode puts a hook on each module's input.
            # This hook fails in `torch.autograd.grad` if the input is a leaf.
            self.output = run_stage(
                i, stage, with_main_tensor(value, self.x.view_as(self.x)), kwargs
            )
            self.end = _TakeGradient.apply(main_tensor(self.output), slot)
        self.slot = slot
        self.parameters = trainable_parameters(stage)
        if not {*map(id, _reached_leaves(self.end))} <= {*map(id, (self.x, *self.parameters))}:
            raise RuntimeError(
                f"stage {i} uses a tensor that requires a gradient, but this tensor is neither the"
                " input nor a parameter of the stage; make the stage a module with this tensor as"
                " a parameter, or detach the tensor"
            )
        if attribute := next(_attributes_with_graph(stage), None):
            raise RuntimeError(
                f"stage {i} stores in `{attribute}` a tensor that requires a gradient, but"
                " gradients flow only through the output of a stage; return this tensor as a part"
                " of the output, or detach it"
            )

    def backward(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward of the stage, and release its output.

        The gradient of the output is taken from the `slot` that was passed to the constructor.

        Returns:
            The gradient of the input, and a list of the gradients of the parameters. A gradient is
            None if it is not needed.
        """
        self.output = None
        inputs = [tensor for tensor in (self.x, *self.parameters) if tensor.requires_grad]
        if not self.end.requires_grad or self.slot.gradient is None:
            self.slot.take()
            gradients = [None] * len(inputs)
        else:
            gradients = torch.autograd.grad(
                self.end, inputs, torch.empty_like(self.end), allow_unused=True
            )
        return (
            (gradients[0], list(gradients[1:])) if self.x.requires_grad else (None, list(gradients))
        )


class _TakeGradient(torch.autograd.Function):
    """Last node of a stage's graph, whose output is an empty tensor.

    Its backward takes the gradient of the stage's output from the `GradientSlot`.
    """

    @staticmethod
    def forward(ctx, output: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return output.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.slot.take(), None


def trainable_parameters(stage: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a stage that require gradients."""
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def _attributes_with_graph(stage: nn.Module) -> Iterator[str]:
    """Yield the names of attributes in which a run has stored a tensor with an autograd graph.

    Weights that a hook computes before each run are skipped.
    """
    for name, module in stage.named_modules():
        hooks = module._forward_pre_hooks.values()
        # Names of the weights that the hooks of weight_norm, spectral_norm and pruning compute.
        weights = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
        for key in vars(module).keys() - weights:
            if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module)[key])):
                yield f"{name}.{key}".removeprefix("block.").removeprefix(".")


def _reached_leaves(end: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that the backward of `end` reaches."""
    waiting = [end.grad_fn]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable
