"""A recipe, applied: the model and optimizer it wants, and its training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import kind, shown
from course_lib._torch import is_symbolic, random_numbers_undone
from course_lib.accumulation import AccumulatedStep, StepResult, check_loss_sum, split
from course_lib.attention import flash_attention
from course_lib.memory import cast
from course_lib.models import Attention, Decoder
from course_lib.offload import OffloadedOptimizer, offload_activations

from .loss import LossSum, altered, check_loss, drop_probability, is_decoder, loss_of, samples_in, trained
from .recipe import Recipe, pieces_allowed

BASES = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
SETTINGS = {"lr": 1e-3, "foreach": False}  # foreach makes temporaries as large as all parameters together


def build(
    make_model: Callable[[], nn.Module], recipe: Recipe, *, lr: float = 1e-3, store=None, state: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in the recipe's precision, and its optimizer.

    Args:
        make_model: returns a model in fp32, as `torch.nn` makes it.
        recipe: for `precision`, `optimizer` and `offload_optimizer`.
        lr: of the optimizer.
        store: for the offloaded part of the optimizer; `OffloadedOptimizer`'s own if left out.
        state: make the optimizer's state too, by a step on gradients of zero; else the first step makes it.
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
    model = make_model()
    if isinstance(model, nn.Module):
        cast(model, recipe.dtype)
    check_model(model, recipe)
    return model


def optimizer_of(model: nn.Module, recipe: Recipe, *, store=None, lr: float = SETTINGS["lr"]) -> torch.optim.Optimizer:
    """The recipe's optimizer, of the parameters that are trained."""
    base, parameters, settings = BASES[recipe.optimizer], trained(model), {**SETTINGS, "lr": lr}
    if recipe.precision == "fp32" and not recipe.offload_optimizer:
        return base(parameters, **settings)
    return OffloadedOptimizer(parameters, base, fraction=recipe.offload_optimizer, store=store, **settings)


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state, as it is from the second step on, by steps on gradients of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = trained(model)
    together = len(parameters) if is_symbolic() else 1  # for real, one at a time, to take little memory
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
    store=None,
) -> StepResult:
    """One step by the recipe; its gradient is the plain step's, within the recipe's precision.

    Args:
        model: in the recipe's precision, as from `build`.
        optimizer: as from `build`.
        batch: what `course_lib.accumulation.split` takes; for a `Decoder`, tokens (b, s + 1).
        recipe: what to use. Checkpoints and `head_chunk` take a `Decoder` as it is made, without forward hooks, and its
            own loss; flash takes modules of `course_lib.models.Attention`; all else takes any model. `in_backward`
            steps a parameter each time that autograd hands over its gradient, which under reentrant checkpoints of the
            model's own may be in parts.
        loss_sum: (model, batch) -> (sum of losses, weight), as for `course_lib.accumulation.AccumulatedStep`. Left out,
            it is `model.loss_sum(batch)`, else `model.loss(batch)`, a mean, which takes one micro-batch: over how many
            tokens or samples it goes is not known, so that those of several cannot be added up.
        store: for offloaded activations; the default of `offload_activations` if left out.

    Returns:
        A `StepResult`; with `model.loss` alone its weight counts samples. Gradients are None afterwards. After an error
        they and the random generators are as before, and no parameter has changed, but for those that `in_backward` has
        stepped.

    Raises:
        TypeError, ValueError: recipe, model and batch do not go together; the message says how.
    """
    check_model(model, recipe)
    check_loss(model, recipe, loss_sum)
    kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    return run_pieces(model, optimizer, pieces_of(batch, recipe.micro_batches), recipe, loss_sum, store)


def run_pieces(model, optimizer, pieces: Iterable[Any], recipe: Recipe, loss_sum=None, store=None) -> StepResult:
    """`train_step` on micro-batches that are there already."""

    def offloading(_, piece) -> tuple[Tensor, float | Tensor]:
        if not recipe.offload_activations:
            return loss_of(model, piece, recipe, loss_sum)
        with offload_activations(store, min_bytes=recipe.min_bytes, keep=[model]):
            return loss_of(model, piece, recipe, loss_sum)

    with applied(model, recipe):
        if not recipe.in_backward:
            return AccumulatedStep(model, optimizer, offloading)(pieces)
        [piece] = pieces
        with random_numbers_undone():
            return _step_in_backward(model, optimizer, offloading, piece)


def _step_in_backward(model, optimizer, loss_sum, piece) -> StepResult:
    """Each parameter is stepped, and its gradient dropped, as soon as backward has it."""

    def step_now(parameter: Tensor) -> None:
        optimizer.step()  # for the one parameter that has a gradient
        parameter.grad = None
        stepped.add(parameter)

    optimized, stepped = {p for group in optimizer.param_groups for p in group["params"]}, set()
    parameters = list({*model.parameters(), *optimized})
    gradients = [p.grad for p in parameters]  # to be put back after an error
    hooks = []
    try:
        for p in parameters:
            p.grad = None
        hooks += [p.register_post_accumulate_grad_hook(step_now) for p in trained(model)]
        loss, weight = check_loss_sum(loss_sum(model, piece))
        mean = loss / weight
        value, weight = (math.nan, math.nan) if is_symbolic() else (float(loss.detach()), float(weight))
        if not is_symbolic() and not (math.isfinite(value) and 0 < weight < math.inf):
            raise ValueError(f"loss {value}, weight {weight}; it takes finite numbers, the weight above 0")
        mean.backward()
        if not stepped & optimized:
            raise RuntimeError("no parameter of the optimizer got a gradient; it takes an optimizer of this model")
        gradients = [None] * len(parameters)
    finally:
        for hook in hooks:
            hook.remove()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    return StepResult(value / weight, weight, None, True)


@contextmanager
def applied(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Inside, the model's attention is the recipe's; afterwards it is as before."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    before = [
        {name: module.__dict__[name] for name in ("fused", "standard") if name in vars(module)} for module in modules
    ]
    try:
        for module in modules:
            module.fused = False
            if recipe.attention == "flash":
                module.standard = partial(flash_attention, causal=module.causal)
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            module.__dict__.pop("standard", None)
            module.__dict__.update(attributes)


def pieces_of(batch: Any, micro_batches: int) -> list[Any]:
    """The batch in so many pieces, equal but for the last.

    Raises:
        ValueError: it cannot be split so; the message says into how many it can.
    """
    whole = next(iter(split(batch, 1 << 62)), None)  # it also says what is wrong with a batch
    samples = 0 if whole is None else samples_in(batch)
    allowed = pieces_allowed(samples)
    if micro_batches not in allowed:
        raise ValueError(f"micro_batches is {micro_batches}; a batch of {samples} samples takes one of {allowed}")
    return list(split(batch, math.ceil(samples / micro_batches)))


# ---- what goes together


def check_function(name: str, made: Any) -> None:
    if isinstance(made, nn.Module) or not callable(made):
        raise TypeError(f"{name} is {shown(made)}; it takes a function without arguments")


def check_recipe(recipe: Any) -> None:
    kind("recipe", recipe, Recipe, "a Recipe")


def check_model(model: Any, recipe: Recipe) -> None:
    """What the recipe asks of the model."""
    check_recipe(recipe)
    kind("model", model, nn.Module, "a torch.nn.Module")
    if not trained(model):
        raise ValueError(f"model is {shown(model)} without parameters that require gradients; it takes one or more")
    if not is_decoder(model):
        for name in ("checkpoint", "head_chunk"):
            if name in recipe.changed():
                got = f"altered Decoder ({altered(model)})" if isinstance(model, Decoder) else type(model).__name__
                takes = "a course_lib.models.Decoder as it is made"
                raise ValueError(f"{name} is {getattr(recipe, name)!r} and the model is a {got}; it takes {takes}")
    if recipe.checkpoint == "segments" and recipe.segments > len(model.layers):
        raise ValueError(f"segments is {recipe.segments}; it takes 1 to {len(model.layers)}, as there are layers")
    if recipe.attention == "flash":
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        if not attentions or drop_probability(attentions):
            problem = "with dropout of probabilities" if attentions else "without course_lib.models.Attention"
            raise ValueError(f"attention is 'flash' and the model is {shown(model)} {problem}; it takes 'standard'")
    for p in model.parameters():
        if p.is_floating_point() and p.dtype != recipe.dtype:
            raise ValueError(
                f"precision is {recipe.precision!r} and the model has {shown(p)}; it takes a model as from build"
            )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
