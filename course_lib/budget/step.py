"""Build the model and the optimizer of a recipe, and run a training step with its techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from course_lib._batches import Split, parts_of, samples_in
from course_lib._check import any_of, describe, kind
from course_lib._origin import INITIALIZE, UNINITIALIZED
from course_lib._torch.steps import check_in_training, check_no_closure
from course_lib._torch.symbolic import is_symbolic
from course_lib._torch.tensors import tensors_in
from course_lib.accumulation import AccumulatedStep, StepResult
from course_lib.checkpoint.blocks import names_of
from course_lib.offload import OffloadedOptimizer
from course_lib.schedule import Chain, ScheduledBlocks
from course_lib.symbolic import cast

from .hugging_face import without_cache
from .loss import (
    LossSum,
    check_loss,
    loss_of,
    takes_arguments,
    trainable_parameters,
    warn_if_not_compiled,
)
from .optimizers import LR, OPTIMIZERS, class_and_settings
from .recipe import Recipe
from .stages import chain_of_stages, chains_of, runs_stages
from .techniques import APPLIED, TECHNIQUES
from .techniques.checkpoints import block_names
from .techniques.micro_batches import counts_allowed
from .techniques.precision import autocast_forward, sets_parameter_dtype
from .techniques.technique import combine_checks


def build(
    make_model: Callable[[], nn.Module],
    recipe: Recipe,
    *,
    lr: float = LR,
    store=None,
    state: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create a model in the precision of a recipe, and the optimizer of the recipe.

    Args:
        make_model: Function without arguments that returns a model in fp32.
        recipe: Memory-saving techniques of the training step.
        lr: Learning rate of the optimizer.
        store: Store for the offloaded optimizer state. By default, `OffloadedOptimizer` chooses it:
            a new `DiskStore` for a model on the CPU.
        state: Whether to create the optimizer state now. If not, the first training step creates
            it.

    Returns:
        The pair (model, optimizer).

    Raises:
        TypeError, ValueError: Recipe and model cannot be combined. The message gives the reason.
    """
    model = model_of(make_model, recipe)
    optimizer = optimizer_of(model, recipe, store=store, lr=lr)
    if state:
        make_state(model, optimizer)
    return model, optimizer


def model_of(make_model: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
    """Create a model in the precision of a recipe, and check that it supports the recipe.

    Args:
        make_model: Function without arguments that returns a model in fp32.
        recipe: Memory-saving techniques of the training step.

    Raises:
        TypeError, ValueError: The model does not support the recipe. The message gives the reason.
    """
    check_function("make_model", make_model)
    check_recipe(recipe)
    with _CopiesOfSymbolic() if is_symbolic() else nullcontext():
        model = make_model()
    if isinstance(model, nn.Module) and sets_parameter_dtype(recipe, model):
        cast(model, recipe.dtype)
    check_model(model, recipe)
    return model


class _CopiesOfSymbolic(TorchFunctionMode):
    """Mode in which `copy.deepcopy` of a symbolic tensor returns a symbolic tensor.

    Symbolic tensors have shapes but no values. `nn.TransformerEncoder`, for example, copies the
    parameters of its layer. Without this mode, PyTorch would also copy the symbolic mode that the
    tensor belongs to.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__ or not is_symbolic(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            # If several tensors share one storage, their copies also share one storage.
            storage, wholes = tensor.untyped_storage(), memo.setdefault("symbolic storages", {})
            if storage._cdata not in wholes:
                elements = storage.nbytes() // tensor.itemsize
                wholes[storage._cdata] = tensor.detach().new_empty(elements)
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            copied = wholes[storage._cdata].view(tensor.dtype).as_strided(*place).detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            )
        return memo[id(tensor)]


def optimizer_of(
    model: nn.Module,
    recipe: Recipe,
    *,
    store=None,
    lr: float = LR,
    whole_model: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Create the optimizer of a recipe for the trainable parameters of a model or of a part of it.

    Args:
        model: Model, or a part of one.
        recipe: Memory-saving techniques of the training step.
        store: Store for the offloaded optimizer state. By default, `OffloadedOptimizer` chooses it:
            a new `DiskStore` for a model on the CPU.
        lr: Learning rate.
        whole_model: Whole model, if `model` is only a part of it. An optimizer such as Muon chooses
            its parameters by their position in the whole model.
    """
    parameters: list[Any] = trainable_parameters(model)
    if is_symbolic() and (code := _framework_of(whole_model or model)) is not None:
        # The framework's optimizer may differ from the recipe's in its class or parameter groups.
        made = code.optimizer(whole_model or model, parameters, recipe, lr)
        if made is not None:
            return made
    if (takes := OPTIMIZERS[recipe.optimizer].select_parameters) is not None:
        taken = takes(whole_model or model)
        first, rest = ([p for p in parameters if (p in taken) is each] for each in (True, False))
        groups = {"params": first, "rest": False}, {"params": rest, "rest": True}
        parameters = [group for group in groups if group["params"]]
    base, settings = class_and_settings(recipe.optimizer, recipe.update)
    if not recipe.uses_offloaded_optimizer:
        return base(parameters, lr=lr, **settings)
    options = {
        "fraction": recipe.offload_optimizer,
        "page_bytes": recipe.page_bytes,
        "store": store,
    }
    return OffloadedOptimizer(parameters, base, lr=lr, **options, **settings)


def _framework_of(model: nn.Module) -> Any:
    """Return the `Framework` with which `Framework.model_maker` marked a model, or None.

    Estimates of a marked model run the framework's training step. Without a mark, estimates run the
    step of `train_step`.
    """
    return getattr(model, "_training_code", None)


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state that exists from the second training step on.

    To create the state, the optimizer runs steps on zero gradients with a learning rate of 0.
    Afterwards the gradients are None.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = trainable_parameters(model)
    # On real tensors, parameters are updated one at a time, so that only one gradient is in memory.
    together = len(parameters) if is_symbolic() else 1
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for start in range(0, len(parameters), together):
            for p in parameters[start : start + together]:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for p in parameters[start : start + together]:
                p.grad = None
    finally:
        for p in parameters:
            p.grad = None
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    *,
    loss_sum: LossSum | None = None,
    max_norm: float | None = None,
    split: Split | None = None,
    store=None,
) -> StepResult:
    """Run one training step that follows the recipe: forward, backward and optimizer update.

    The gradient equals that of the baseline, the step without any technique, within the recipe's
    precision.

    **Compiled models.** A model that was compiled in place (`model.compile()`) runs compiled, and
    so do compiled blocks, even with `fullgraph=True`. Checkpoints inside a compiled model become
    PyTorch's own checkpoints in its graph. With checkpoint="segments" or "optimal", compile each
    block in place (`block.compile()`) instead of the model, because the step runs the blocks one by
    one. "optimal" raises ValueError for a block compiled with `torch.compile(block)`, unless the
    step runs the model's method `stages` (see `recipe`). `torch.compile(model)` does not compile a
    method `loss` or `loss_sum` of the model. If the step uses this method, a warning says that the
    method runs uncompiled.

    **Recomputation.** Before a checkpointed block runs again, the state that it had before its
    first run is restored:

    - random generators of PyTorch, Python and NumPy, including those in attributes of the block's
      modules;
    - attributes of the block's modules that are tensors, arrays, numbers, or containers of these.

    To restore tensors in attributes, the step copies these tensors before the first run. After this
    run, it keeps only the copies of tensors that have changed. Inside a compiled model, only
    PyTorch's random numbers are restored.

    **Comparison.** The first step that runs a model with a recipe compares the recomputation of
    each block with the first run of the block. It compares checksums of the tensors saved for
    backward or of the block's outputs. It also checks that the recomputation does not change the
    block's parameters and buffers. The comparison takes time, but `MemoryMeter` does not count its
    memory. Later steps with the same model and recipe compare nothing. Checkpoints inside a
    compiled model are never compared, and neither are tensor subclasses and symbolic, sparse,
    nested and quantized tensors.

    **Errors.** After an error, gradients and random generators have the values that they had before
    the step. No parameter has changed, with two exceptions: parameters that were already updated
    during backward (see the recipe's field `in_backward`), and parameters that the optimizer
    changed before it raised an error itself.

    Args:
        model: Model in the recipe's precision, as `build` returns it.
        optimizer: Optimizer, as `build` returns it.
        batch: Batch that the model's loss accepts. For several micro-batches without `split`, it
            must be a batch that `course_lib.accumulation.split` can split.
        recipe: Memory-saving techniques of the step. With "segments" and "optimal", the step runs
            the functions that the model's method `stages(batch)` returns (see
            `course_lib.models.Decoder.stages`). Without this method, each block must take the
            output of the previous block as its input (see `course_lib.schedule.schedule_blocks`).
            The limits of `in_backward` are listed in `course_lib.accumulation.AccumulatedStep`.
        loss_sum: Function (model, batch) -> (sum of losses, weight), as in
            `course_lib.accumulation.AccumulatedStep`. The weight is the number by which the sum is
            divided, such as the number of tokens. The default is `model.loss_sum(batch)` if the
            model has this method, and `model.loss(batch)` otherwise. `model.loss` returns a mean,
            which allows only one micro-batch: the number of tokens or samples in the mean is not
            known, so the means of several micro-batches cannot be added up. For a Hugging Face
            model without these methods, the batch must be a dict with labels. The default is then
            the loss of `model(**batch)`, weighted by the number of labels that the loss counts.
        max_norm: Norm to which the gradient is clipped, as in `AccumulatedStep`; None for no
            clipping.
        split: Function (batch, parts) -> list of `parts` batches. It is needed for a batch with a
            tensor whose first dimension is not the samples, such as packed sequences, graphs and
            boxes of objects. It is called only for several micro-batches. An estimate does not
            count the tensors that `split` creates.
        store: Store for offloaded activations. By default, activations are offloaded to host memory
            from a GPU, and to a file from a CPU.

    Returns:
        A `StepResult`. If the loss is `model.loss`, the attribute `weight` is the number of
        samples, or 1 if the batch has a tensor whose first dimension is not the samples. The
        gradients of the model are None afterwards.

    Raises:
        TypeError, ValueError: Recipe, model and batch cannot be combined. The message gives the
            reason.
        RuntimeError: A recomputed block computed different values, because it depends on state that
            is not restored, such as a global variable. The message names the block.
    """
    check_model(model, recipe)
    check_loss(model, recipe, loss_sum)
    warn_if_not_compiled(model, loss_sum)
    kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_no_closure(optimizer)
    check_in_training(optimizer)
    return run_micro_batches(
        model,
        optimizer,
        micro_batches_of(batch, recipe.micro_batches, split),
        recipe,
        loss_sum,
        store,
        max_norm,
    )


def run_micro_batches(
    model,
    optimizer,
    micro_batches: Iterable[Any],
    recipe: Recipe,
    loss_sum=None,
    store=None,
    max_norm=None,
) -> StepResult:
    """Run one training step that follows the recipe, on a batch that is already split.

    Args:
        model: Model in the recipe's precision, as `build` returns it.
        optimizer: Optimizer, as `build` returns it.
        micro_batches: Micro-batches of the step.
        recipe: Memory-saving techniques of the step.
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the number by
            which the sum is divided, such as the number of tokens. None uses the model's own loss.
        store: Store for offloaded activations. By default, activations are offloaded to host memory
            from a GPU, and to a file from a CPU.
        max_norm: Norm to which the gradient is clipped; None for no clipping.
    """

    def loss(_, micro_batch) -> tuple[Tensor, float | Tensor]:
        with ExitStack() as stack:
            for technique in APPLIED:
                if technique.around == "forward" and technique.is_used(recipe):
                    stack.enter_context(technique.apply(recipe, model, store))
            loss_and_weight = loss_of(model, micro_batch, recipe, loss_sum)
        check()
        return loss_and_weight

    with apply_techniques(model, recipe) as check:
        step = AccumulatedStep(
            model,
            optimizer,
            loss,
            max_norm=max_norm,
            accumulate=recipe.accumulate,
            in_backward=recipe.in_backward,
        )
        return step(micro_batches)


@contextmanager
def apply_techniques(model: nn.Module, recipe: Recipe) -> Iterator[Callable[[], None]]:
    """Apply the techniques of a recipe to a model, in place, inside the `with` block.

    Techniques that surround a single forward pass, such as offloaded activations, are not applied
    here. `run_micro_batches` applies them to each micro-batch.

    Yields:
        A function without arguments, to be called after each forward pass. It raises an error if
        any of the techniques was not used in the forward pass.
    """
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        if (code := _framework_of(model)) is not None:
            stack.enter_context(code.around_step(model, recipe))
        entered = [
            stack.enter_context(each.apply(recipe, model))
            for each in APPLIED
            if each.around == "step" and each.is_used(recipe)
        ]
        if recipe.precision == "autocast":
            entered.append(stack.enter_context(autocast_forward(model)))
        yield combine_checks(entered)


def chain_of(
    model: nn.Module, micro_batch: Any, recipe: Recipe, loss_sum: LossSum | None = None
) -> Chain:
    """Measure the FLOPs and bytes of a model's stages, from which a schedule is computed.

    A schedule decides which activations are saved and which are recomputed. The model is measured
    for one micro-batch as a chain, that is, as stages that run one after the other. The times in
    the chain are numbers of FLOPs. The stages come from the model's method `stages` if the step
    runs it (see `runs_stages`). Otherwise the stages are the model's blocks.

    Args:
        model: Model to train.
        micro_batch: Micro-batch to measure.
        recipe: Memory-saving techniques of the step.
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the number by
            which the sum is divided, such as the number of tokens. None uses the model's own loss.
    """
    found: list[Chain] = []

    def note_chain(chain: Chain) -> None:
        found.append(chain)
        raise _ChainFound

    plain = replace(recipe, checkpoint="none", schedule_bytes=None, blocks=None)
    with apply_techniques(model, plain):
        if runs_stages(model, recipe):
            return chain_of_stages(model, micro_batch, recipe)
        names = names_of(model, block_names(recipe))
        with (
            suppress(_ChainFound),
            ScheduledBlocks(model, names, note_chain, chains_of(model, recipe)),
        ):
            loss_of(model, micro_batch, plain, loss_sum)
    return found[0]


class _ChainFound(Exception):
    """Exception that `chain_of` raises to end a forward pass when the chain has been measured."""


def micro_batches_of(batch: Any, micro_batches: int, split: Split | None = None) -> list[Any]:
    """Split a batch into a list of micro-batches.

    Args:
        batch: Batch to split.
        micro_batches: Number of micro-batches.
        split: Function (batch, parts) -> list of `parts` batches, which can differ in size. By
            default, the batch is cut along the first dimension of its tensors. All micro-batches
            then have the same number of samples, except that the last one may have fewer.

    Raises:
        TypeError, ValueError: The batch cannot be split into this number of micro-batches. The
            message lists the possible numbers, or names the object that cannot be split.
    """
    samples = samples_in(batch)
    if samples == 0:
        raise ValueError(
            f"batch must contain at least one sample, got {describe(batch)} without samples"
        )
    _reject_meta_tensors(
        "batch",
        ["a tensor" for tensor in tensors_in(batch) if tensor.device.type == "meta"],
        'Leave out torch.device("meta") in make_batch. An estimate needs no memory for the batch',
    )
    if split is None and samples is not None and micro_batches not in counts_allowed(samples):
        raise ValueError(
            f"micro_batches must be {any_of(counts_allowed(samples))} for a batch of {samples}"
            f" sample{'s' * (samples > 1)}, got {micro_batches}"
        )
    return parts_of(batch, micro_batches, split)


# ---- Checks of model and recipe


def check_function(name: str, value: Any) -> None:
    """Raise TypeError if `value` is not a function that can be called without arguments.

    Args:
        name: Name of the argument that is checked, for the error message.
        value: Value of this argument.
    """
    if isinstance(value, nn.Module) or not callable(value):
        raise TypeError(f"{name} must be a function without arguments, got {describe(value)}")
    takes_arguments(name, value, "no arguments")


def check_recipe(recipe: Any) -> None:
    """Raise TypeError if `recipe` is not a `Recipe`."""
    kind("recipe", recipe, Recipe, "a Recipe")


def check_model(model: Any, recipe: Recipe) -> None:
    """Raise an error if a model cannot run a training step with the recipe.

    Raises:
        TypeError: `model` is not a module, or `recipe` is not a `Recipe`.
        ValueError: The model has uninitialized parameters, no trainable parameters, or tensors on
            the meta device; or it does not support a technique of the recipe.
    """
    check_recipe(recipe)
    kind("model", model, nn.Module, "a torch.nn.Module")
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise ValueError(f"{UNINITIALIZED}. {INITIALIZE}")
    if not trainable_parameters(model):
        raise ValueError(
            f"model must have parameters that require gradients, got {describe(model)} without any"
        )
    _reject_meta_tensors(
        "model",
        [name for name, tensor in _tensors_of(model) if tensor.device.type == "meta"],
        'Leave out torch.device("meta") in make_model, or call model.to_empty(device="cpu") there'
        " and initialize the model. An estimate needs no memory in either case",
    )
    for technique in TECHNIQUES:
        if problem := technique.unsupported_reason(recipe, model):
            raise ValueError(problem)


def _reject_meta_tensors(argument: str, on_meta: list[str], advice: str) -> None:
    """Raise ValueError if a tensor is on the meta device, where a step computes no values.

    Args:
        argument: Name of the argument that contains the tensors, such as "model".
        on_meta: Descriptions of the tensors that are on the meta device. If the list is empty, no
            error is raised.
        advice: Advice for the end of the message.
    """
    if on_meta:
        more = f" and {len(on_meta) - 1} more" if len(on_meta) > 1 else ""
        raise ValueError(
            f"{argument} must be on a device that holds values, got {on_meta[0]}{more} on the meta"
            f" device. {advice}"
        )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter and buffer of a model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set PyTorch's default dtype inside the `with` block, and restore it afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
