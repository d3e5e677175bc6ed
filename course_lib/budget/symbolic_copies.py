"""Copy an existing model, batch and optimizer, with symbolic tensors instead of real tensors.

Symbolic tensors have shapes but need no memory. `estimate` runs the training step on the copies, so
the originals do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from course_lib._check import describe
from course_lib._torch.modes import disable_current_modes
from course_lib._torch.steps import check_in_training, check_no_closure
from course_lib.checkpoint.blocks import blocks_in_place
from course_lib.symbolic.quantization import copy_parameter_subclasses, is_parameter_subclass

from .loss import trainable_parameters
from .optimizers import OPTIMIZERS
from .recipe import Recipe
from .step import check_function, check_recipe

Optimizer = torch.optim.Optimizer
UNCHANGED = Recipe(precision=None, attention=None)
PASS_FUNCTIONS = (
    "instead of a model and a batch, pass two functions without arguments: one that returns the"
    " model, and one that returns the batch. In place of an optimizer, pass a Recipe, or a"
    " function that takes the parameters and returns an optimizer"
)


class Functions(NamedTuple):
    """Functions that create the model, the batch and the optimizer of an estimated training step.

    Attributes:
        make_model: Function without arguments that returns the model.
        make_batch: Function without arguments that returns the batch.
        recipe: Memory-saving techniques of the step.
        make_optimizer: Function (model, kind of device) that returns the optimizer. The kind is
            "cpu" or "cuda". The attribute is None if `recipe` determines the optimizer.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    recipe: Recipe
    make_optimizer: Callable[[nn.Module, str], Optimizer] | None


def functions_of(model: Any, batch: Any, recipe: Any) -> Functions:
    """Convert the first three arguments of `estimate` to functions that create these objects.

    An existing model, batch or optimizer is converted to a function that returns a symbolic copy of
    it, that is, a copy whose tensors need no memory.

    Args:
        model: Existing model, or function that returns the model.
        batch: Existing batch, or function that returns the batch.
        recipe: `Recipe`, existing optimizer, or function that creates an optimizer for a list of
            parameters.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or the optimizer has no parameters of
            the model.
    """
    make_optimizer = None
    existing = model if isinstance(model, nn.Module) else None
    if existing is not None:
        _check_model(existing)
    copies = _Copies(existing, recipe if isinstance(recipe, Optimizer) else None)
    if existing is None:
        check_function("model", model)
    if not callable(batch) or isinstance(batch, Tensor):
        make_batch = copies.of_batch(batch)
    else:
        check_function("batch", batch)
        make_batch = batch
    if isinstance(recipe, Optimizer):
        _check_optimizer(existing, recipe)
        make_optimizer, recipe = copies.optimizer_for, UNCHANGED
    elif callable(recipe):
        make_optimizer, recipe = _optimizer_maker(recipe), UNCHANGED
    check_recipe(recipe)
    return Functions(copies.model if existing else model, make_batch, recipe, make_optimizer)


def _check_model(model: nn.Module) -> None:
    """Raise ValueError if a copy of the model would run a different step than the model."""
    if names := blocks_in_place(model):
        raise ValueError(
            "model must not have blocks that are run by checkpoint_blocks or by a schedule, got"
            f" {names[0]!r}: the estimate copies the model, and the copy loses its checkpoints."
            " Pass a function that returns the model with checkpoints. Or pass the model without"
            " checkpoints, together with a recipe such as Recipe(checkpoint='layers')"
        )
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model must have no hooks on parameters, got hooks on {name}: the estimate runs"
                " a copy of the model, and hooks are not copied."
                f" {PASS_FUNCTIONS[0].upper()}{PASS_FUNCTIONS[1:]}"
            )


#: Names of optimizer classes that cannot run on symbolic tensors. Each is mapped to the name of an
#: optimizer in `OPTIMIZERS` that needs the same memory.
_RECIPE_OPTIMIZERS = {"Adafactor": "adafactor"}
_RECIPE_OPTIMIZERS |= dict.fromkeys(
    ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"), "adam8bit"
)


def _check_estimable(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer cannot run on symbolic tensors, which have no values."""
    name, home = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if name in _RECIPE_OPTIMIZERS:
        raise ValueError(
            "the optimizer of an estimate must not read the values of tensors, because symbolic"
            f" tensors have none, got {describe(optimizer)}. Name this optimizer in a recipe"
            " instead of passing it: Recipe(precision=None, attention=None,"
            f" optimizer={_RECIPE_OPTIMIZERS[name]!r})"
        )
    if home == "bitsandbytes":
        raise ValueError(
            "an estimate does not support optimizers of bitsandbytes, because they cannot run on"
            f" symbolic tensors, got {describe(optimizer)}. Measure the step with"
            " course_lib.memory.MemoryMeter instead"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ValueError(
            f"the optimizer must not wrap another optimizer, got {describe(optimizer)}; pass the"
            " inner optimizer instead, which is its attribute `optimizer`"
        )


def _check_optimizer(model: nn.Module | None, optimizer: Optimizer) -> None:
    """Raise an error if an optimizer cannot be used in an estimate of the model's training step.

    Raises:
        TypeError: `model` is None, although an optimizer needs an existing model.
        ValueError: The optimizer has no parameters of the model, or it cannot run on symbolic
            tensors.
    """
    if model is None:
        raise TypeError(
            "when model is a function, recipe must be a Recipe, an optimizer class, or a function"
            f" that creates an optimizer, got an existing optimizer ({describe(optimizer)}). An"
            " existing optimizer cannot hold the parameters of a model that is created later. Pass"
            " the existing model as model, or the class of the optimizer as recipe"
        )
    _check_estimable(optimizer)
    check_no_closure(optimizer)
    check_in_training(optimizer)
    own = set(model.parameters())
    if not any(p in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"optimizer must hold parameters of the model, got {describe(optimizer)} that has none"
            " of them"
        )


def optimizer_name(optimizer: Optimizer | Callable) -> str:
    """Return the name of an optimizer's class, or of the function that creates the optimizer.

    For a `functools.partial`, it is the name of the wrapped function or class.
    """
    function = getattr(optimizer, "func", optimizer)
    return getattr(function, "__name__", type(optimizer).__name__)


def _optimizer_maker(function: Callable[[list[nn.Parameter]], Optimizer]) -> Callable:
    """Return a function for `Functions.make_optimizer` that calls the user's function.

    The user's function creates an optimizer for a list of parameters. The returned function passes
    it the trainable parameters of the model, and checks that the optimizer can be estimated.
    """

    def make_optimizer(model: nn.Module, kind: str) -> Optimizer:
        made = function(trainable_parameters(model))
        if not isinstance(made, Optimizer):
            raise TypeError(
                "recipe must be a Recipe, an optimizer or a function that takes a list of"
                " parameters and returns an optimizer, got a function that returned"
                f" {describe(made)}"
            )
        _check_estimable(made)
        check_no_closure(made)
        return _select_update_variant(kind, made)

    return make_optimizer


def _select_update_variant(kind: str, optimizer: Optimizer) -> Optimizer:
    """Set the variant of the optimizer update that PyTorch would use on a kind of device.

    Without this function, PyTorch would use the variant for a CPU, because symbolic parameters are
    on the CPU.
    """
    if kind == "cuda":
        loops = [row.base for row in OPTIMIZERS.values() if row.default_on_cuda == "loop"]
        for group in optimizer.param_groups:
            undecided = group.get("foreach", False) is None and not group.get("fused")
            if undecided and not group.get("differentiable") and type(optimizer) not in loops:
                group["foreach"] = True
    return optimizer


class _Copies(TorchFunctionMode):
    """Mode in which `copy.deepcopy` makes symbolic copies of real tensors.

    A symbolic copy has the shape and dtype of a tensor, but needs no memory. If several tensors
    share one storage, their copies also share one storage. Tensors of integers or booleans are
    copied with their values, and so are tensors without dimensions.

    Args:
        existing: Model to copy, or None.
        optimizer: Optimizer to copy, or None.
    """

    def __init__(self, existing: nn.Module | None, optimizer: Optimizer | None):
        super().__init__()
        self._model, self._optimizer = existing, optimizer
        # Maps the address of each real storage to a symbolic tensor with the same number of bytes.
        self._storages: dict[int, Tensor] = {}
        self._optimizer_copy: Optimizer | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._symbolic(tensor).requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def model(self) -> nn.Module:
        """Return a copy of the model with symbolic tensors, which need no memory.

        The optimizer is copied with the model, and `optimizer_for` returns its copy.
        """
        both = self._model, self._optimizer
        parameters = list(self._parameters())
        model, self._optimizer_copy = self._copy("model and optimizer", both, parameters)
        return model

    def _parameters(self) -> Iterable[nn.Parameter]:
        """Yield the parameters of the model and of the optimizer."""
        yield from self._model.parameters()
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            yield from group["params"]

    def optimizer_for(self, model: nn.Module, kind: str) -> Optimizer:
        """Return the copy of the optimizer that belongs to the last copy of the model."""
        return _select_update_variant(kind, self._optimizer_copy)

    def of_batch(self, batch: Any) -> Callable[[], Any]:
        """Return a function that returns a copy of the batch with symbolic tensors."""
        return lambda: self._copy("batch", batch)

    def _copy(self, name: str, given: Any, parameters: Iterable[nn.Parameter] = ()) -> Any:
        """Return a copy of an object in which the tensors are symbolic and need no memory.

        Args:
            name: Name of the object in error messages.
            given: Object to copy.
            parameters: Parameters in the object, which are copied first.
        """
        self._storages = {}
        try:
            # `copy.deepcopy` of a parameter calls no function that this mode could replace.
            # Therefore the parameters are copied here, before the object that contains them.
            own = [p for p in parameters if not is_parameter_subclass(type(p))]
            memo: dict[int, Any] = {
                id(p): nn.Parameter(self._symbolic(p), p.requires_grad) for p in own
            }
            with self:
                copy_parameter_subclasses(self._without_values, parameters, memo)
                for p in own:
                    vars(memo[id(p)]).update(copy.deepcopy(vars(p), memo))
                if own and self._optimizer is not None:
                    self._copy_optimizer(memo)
                return copy.deepcopy(given, memo)
        except Exception as error:
            raise ValueError(
                f"{name} must support copy.deepcopy for an estimate, got"
                f" {type(error).__name__} ({error}); {PASS_FUNCTIONS}"
            ) from error

    def _copy_optimizer(self, memo: dict[int, Any]) -> None:
        """Add a copy of the optimizer to `memo`, with attributes that `copy.deepcopy` leaves out.

        Hooks are not copied. If a learning-rate scheduler has wrapped the method `step`, the copy
        has the unwrapped method.
        """
        made = memo[id(self._optimizer)] = object.__new__(type(self._optimizer))
        for name, value in vars(self._optimizer).items():
            if name != "step":
                hooks = name.endswith("_hooks")
                vars(made)[name] = type(value)() if hooks else copy.deepcopy(value, memo)

    def _symbolic(self, tensor: Tensor) -> Tensor:
        """Return a symbolic copy of a tensor, or a copy with values if a step may read them.

        A symbolic copy has the same shape but needs no memory. Tensors without dimensions keep
        their values, and so do tensors of integers or booleans. An exception is a tensor of
        integers that shares its storage with a tensor that was copied without values.
        """
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise TypeError(
                "an estimate supports only dense tensors of the classes torch.Tensor and"
                f" nn.Parameter, got {describe(tensor)}"
            )
        with disable_current_modes():
            shared = tensor.untyped_storage()._cdata in self._storages
            if not (tensor.is_floating_point() or tensor.is_complex() or shared):
                # Symbolic tensors are on the CPU, even in an estimate for a GPU.
                return tensor.detach().to("cpu", copy=True)
            value = tensor.item() if tensor.dim() == 0 else None
        if value is not None:
            # A tensor without dimensions keeps its value, because optimizers store their number of
            # steps in such a tensor and read its value.
            return torch.tensor(value, dtype=tensor.dtype)
        return self._without_values(tensor)

    def _without_values(self, tensor: Tensor) -> Tensor:
        """Return a symbolic tensor with the dtype, shape and strides of a tensor.

        If several tensors share one storage, their copies also share one storage.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8)
        count = storage.nbytes() // tensor.itemsize
        numbers = self._storages[storage._cdata][: count * tensor.itemsize].view(tensor.dtype)
        geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
        return numbers.as_strided(*geometry).detach()
