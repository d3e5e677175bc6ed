"""A recipe, applied: the model and optimizer it wants, and its training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from course_lib._check import kind, shown
from course_lib._torch import (
    check_in_training,
    check_no_closure,
    is_symbolic,
    random_numbers_undone,
    tensors_in,
)
from course_lib.accumulation import AccumulatedStep, StepResult, check_loss_sum, split
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import cast
from course_lib.offload import OffloadedOptimizer
from course_lib.schedule import Chain, ScheduledBlocks

from .hugging_face import without_cache
from .loss import (
    LossSum,
    check_loss,
    loss_of,
    samples_in,
    takes_arguments,
    trained,
    warn_if_not_compiled,
)
from .optimizers import LR, class_and_settings
from .recipe import Recipe
from .stages import chain_of_stages, chains_of, runs_stages
from .techniques import APPLIED, TECHNIQUES
from .techniques.checkpoints import block_names
from .techniques.micro_batches import pieces_allowed
from .techniques.technique import all_of


def build(
    make_model: Callable[[], nn.Module],
    recipe: Recipe,
    *,
    lr: float = LR,
    store=None,
    state: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in the recipe's precision, and its optimizer.

    Args:
        make_model: returns a model in fp32, as `torch.nn` makes it.
        recipe: for `precision`, `optimizer`, `update` and `offload_optimizer`.
        lr: of the optimizer.
        store: for the offloaded part of the optimizer; `OffloadedOptimizer`'s own if left out.
        state: make the optimizer's state too, by a step on gradients of zero; else the first step
            makes it.
    """
    model = model_of(make_model, recipe)
    optimizer = optimizer_of(model, recipe, store=store, lr=lr)
    if state:
        make_state(model, optimizer)
    return model, optimizer


def model_of(make_model: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
    """The model in the recipe's precision."""
    check_function("make_model", make_model)
    check_recipe(recipe)
    with _CopiesOfSymbolic() if is_symbolic() else nullcontext():
        model = make_model()
    if isinstance(model, nn.Module) and recipe.precision is not None:
        cast(model, recipe.dtype)
    check_model(model, recipe)
    return model


class _CopiesOfSymbolic(TorchFunctionMode):
    """Mode in which `copy.deepcopy` of a symbolic tensor makes another one, as
    `nn.TransformerEncoder` wants it of its layer's.

    PyTorch would copy along the mode that the tensor belongs to.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__ or not is_symbolic(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            )
        return memo[id(tensor)]


def optimizer_of(
    model: nn.Module, recipe: Recipe, *, store=None, lr: float = LR
) -> torch.optim.Optimizer:
    """The recipe's optimizer, of the parameters that are trained."""
    parameters = trained(model)
    base, settings = class_and_settings(recipe.optimizer, recipe.update)
    if not recipe.has_pages:
        return base(parameters, lr=lr, **settings)
    options = {
        "fraction": recipe.offload_optimizer,
        "page_bytes": recipe.page_bytes,
        "store": store,
    }
    return OffloadedOptimizer(parameters, base, lr=lr, **options, **settings)


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state, as it is from the second step on, by steps on gradients of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = trained(model)
    # for real, one at a time, to take little memory
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
    store=None,
) -> StepResult:
    """One step by the recipe; its gradient is the plain step's, within the recipe's precision.

    A model that was compiled in place (`model.compile()`) runs compiled, and so do compiled blocks,
    with `fullgraph=True` too. Checkpoints inside a compiled model become PyTorch's own, in its
    graph. The schedules "segments" and "optimal" run the blocks instead of the model, so the blocks
    must be compiled. "optimal" measures them as they were written, and refuses blocks wrapped by
    `torch.compile(block)` whose copies compute with the original. `torch.compile(model)` does not
    compile a method `loss` or `loss_sum` of the model, and a warning says so.

    Blocks that run again under checkpoints find the random numbers (those of PyTorch, Python, NumPy
    and generators in attributes of their modules) and the attributes (tensors, arrays, numbers and
    containers of these) of their first run. The first step of a model by a recipe also compares
    checksums of the tensors that both runs save for backward (in a schedule, of their outputs), and
    of the block's parameters and buffers. This takes time, but `MemoryMeter` does not count its
    memory. Later steps, symbolic tensors, and sparse, nested and quantized tensors and tensor
    subclasses are not compared. Checkpoints inside a compiled model restore and compare none of
    this, except for PyTorch's random numbers. Tensors in attributes of a block are copied during
    its first run; the copies of those that it changes are kept for its recomputation.

    Args:
        model: in the recipe's precision, as from `build`.
        optimizer: as from `build`.
        batch: what `course_lib.accumulation.split` takes, and the model's loss.
        recipe: what to use, on any model: nothing of it is taken apart. The checkpoints "segments"
            and "optimal" run the model's own chain, if it has a method `stages(batch)` beside its
            loss (see `course_lib.models.Decoder.stages`), and else blocks that form one (see
            `course_lib.schedule.schedule_blocks`). `in_backward` steps a parameter each time that
            autograd hands over its gradient, which under reentrant checkpoints of the model's own
            may be in parts; blocks that are repeated after it, and use it detached, find the new
            one.
        loss_sum: (model, batch) -> (sum of losses, weight), as for
            `course_lib.accumulation.AccumulatedStep`. Left out, it is `model.loss_sum(batch)`; else
            `model.loss(batch)`, a mean, which takes one micro-batch: over how many tokens or
            samples it goes is not known, so that those of several cannot be added up; else, for a
            Hugging Face model and a dict with labels, the loss of `model(**batch)`, weighed by the
            labels that it counts.
        max_norm: clip the gradient to this norm, as `AccumulatedStep` does.
        store: for offloaded activations; the default of `offload_activations` if left out.

    Returns:
        A `StepResult`; with `model.loss` alone its weight counts samples. Gradients are None
        afterwards. After an error they and the random generators are as before, and no parameter
        has changed, but for those that `in_backward`, or an optimizer that failed itself, has
        stepped.

    Raises:
        TypeError, ValueError: recipe, model and batch do not go together; the message says how.
        RuntimeError: A block that ran again computed other values, since it depends on state that
            is not kept, such as a global variable; the message names the block.
    """
    check_model(model, recipe)
    check_loss(model, recipe, loss_sum)
    warn_if_not_compiled(model, loss_sum)
    kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_no_closure(optimizer)
    check_in_training(optimizer)
    return run_pieces(
        model, optimizer, pieces_of(batch, recipe.micro_batches), recipe, loss_sum, store, max_norm
    )


def run_pieces(
    model,
    optimizer,
    pieces: Iterable[Any],
    recipe: Recipe,
    loss_sum=None,
    store=None,
    max_norm=None,
) -> StepResult:
    """`train_step` on micro-batches that are there already."""
    if max_norm is not None and recipe.in_backward:
        raise ValueError(
            "max_norm must be None when in_backward is True, because the norm of all gradients is"
            f" never known, got {max_norm}"
        )

    def loss(_, piece) -> tuple[Tensor, float | Tensor]:
        with ExitStack() as stack:
            for technique in APPLIED:
                if technique.around == "forward" and technique.is_used(recipe):
                    stack.enter_context(technique.applied(recipe, model, store))
            pair = loss_of(model, piece, recipe, loss_sum)
        check()
        return pair

    with applied(model, recipe) as check:
        if not recipe.in_backward:
            step = AccumulatedStep(
                model, optimizer, loss, max_norm=max_norm, accumulate=recipe.accumulate
            )
            return step(pieces)
        [piece] = pieces
        with random_numbers_undone():
            return _step_in_backward(model, optimizer, loss, piece)


def _step_in_backward(model, optimizer, loss_sum, piece) -> StepResult:
    """Each parameter is stepped, and its gradient dropped, as soon as backward has it."""

    def step_now(parameter: Tensor) -> None:
        optimizer.step()  # for the one parameter that has a gradient
        parameter.grad = None
        stepped.add(parameter)

    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    stepped = set()
    parameters = list({*model.parameters(), *optimized})
    gradients = [p.grad for p in parameters]  # to be put back after an error
    hooks = []
    try:
        for p in parameters:
            p.grad = None
        hooks += [p.register_post_accumulate_grad_hook(step_now) for p in trained(model)]
        loss, weight = check_loss_sum(loss_sum(model, piece))
        mean = loss / weight
        value, weight = (
            (math.nan, math.nan) if is_symbolic() else (float(loss.detach()), float(weight))
        )
        if not is_symbolic() and not (math.isfinite(value) and 0 < weight < math.inf):
            raise ValueError(
                f"the loss must be finite and the weight finite and above 0, got loss {value}"
                f" and weight {weight}"
            )
        mean.backward()
        if not stepped & optimized:
            raise RuntimeError(
                "no parameter of the optimizer got a gradient; the optimizer must hold"
                " parameters of this model"
            )
        gradients = [None] * len(parameters)
    finally:
        for hook in hooks:
            hook.remove()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    return StepResult(value / weight, weight, None, True)


@contextmanager
def applied(model: nn.Module, recipe: Recipe) -> Iterator[Callable[[], None]]:
    """Let the model do, inside the block, what the recipe says, in place; afterwards it is as
    before.

    What is yielded is to be called after a forward pass: it raises if that has bypassed what was
    put in.
    """
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        entered = [
            stack.enter_context(each.applied(recipe, model))
            for each in APPLIED
            if each.around == "step" and each.is_used(recipe)
        ]
        yield all_of(entered)


def chain_of(
    model: nn.Module, piece: Any, recipe: Recipe, loss_sum: LossSum | None = None
) -> Chain:
    """The chain that the recipe's schedule is for, of one micro-batch: the model's own; or its
    blocks, as a forward pass finds them that goes no further than to the first."""
    found: list[Chain] = []

    def noted(chain: Chain) -> None:
        found.append(chain)
        raise _Found

    plain = replace(recipe, checkpoint="none", schedule_bytes=None, blocks=None)
    with applied(model, plain):
        if runs_stages(model, recipe):
            return chain_of_stages(model, piece, recipe)
        names = names_of(model, block_names(recipe))
        with suppress(_Found), ScheduledBlocks(model, names, noted, chains_of(model, recipe)):
            loss_of(model, piece, plain, loss_sum)
    return found[0]


class _Found(Exception):
    """End of a forward pass of which no more is needed."""


def pieces_of(batch: Any, micro_batches: int) -> list[Any]:
    """The batch in so many pieces, equal but for the last.

    Raises:
        ValueError: it cannot be split so; the message says into how many it can.
    """
    whole = next(iter(split(batch, 1 << 62)), None)  # it also says what is wrong with a batch
    if whole is None:
        raise ValueError(
            f"batch must contain at least one sample, got {shown(batch)} without samples"
        )
    _check_device(
        "batch",
        ["a tensor" for tensor in tensors_in(batch) if tensor.device.type == "meta"],
        'Leave out torch.device("meta") in make_batch. An estimate needs no memory for the batch',
    )
    samples = samples_in(batch)
    allowed = pieces_allowed(samples)
    if micro_batches not in allowed:
        raise ValueError(
            f"micro_batches must be one of {', '.join(map(str, allowed))} for a batch of"
            f" {samples} samples, got {micro_batches}"
        )
    return list(split(batch, math.ceil(samples / micro_batches)))


# ---- what goes together


def check_function(name: str, made: Any) -> None:
    if isinstance(made, nn.Module) or not callable(made):
        raise TypeError(f"{name} must be a function without arguments, got {shown(made)}")
    takes_arguments(name, made, "no arguments")


def check_recipe(recipe: Any) -> None:
    kind("recipe", recipe, Recipe, "a Recipe")


def check_model(model: Any, recipe: Recipe) -> None:
    """Check that the model has what the recipe asks of it."""
    check_recipe(recipe)
    kind("model", model, nn.Module, "a torch.nn.Module")
    if not trained(model):
        raise ValueError(
            f"model must have parameters that require gradients, got {shown(model)} without any"
        )
    _check_device(
        "model",
        [name for name, tensor in _tensors_of(model) if tensor.device.type == "meta"],
        'Leave out torch.device("meta") in make_model, or call model.to_empty(device="cpu") there'
        " and initialize the model. An estimate needs no memory in either case",
    )
    for technique in TECHNIQUES:
        if problem := technique.refuse(recipe, model):
            raise ValueError(problem)


def _check_device(argument: str, on_meta: list[str], way_out: str) -> None:
    """Check that no tensor is on the meta device, where a step computes no values."""
    if on_meta:
        more = f" and {len(on_meta) - 1} more" if len(on_meta) > 1 else ""
        raise ValueError(
            f"{argument} must be on a device that holds values, got {on_meta[0]}{more} on the meta"
            f" device. {way_out}"
        )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters and buffers of a model, with the tensors."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
