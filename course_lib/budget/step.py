"""A recipe, applied: the model and optimizer it wants, its loss, and its training step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from course_lib.accumulation import AccumulatedStep, StepResult, check_optimizer, random_numbers_undone, split
from course_lib.attention import flash_attention
from course_lib.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    checkpointed_loss,
    create_selective_checkpoint_contexts,
)
from course_lib.models import Attention, Decoder, DecoderLayer, Dropout, loss_stages
from course_lib.offload import OffloadedOptimizer, offload_activations
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal

from .recipe import Recipe, pieces_allowed

BASES = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
SETTINGS = {"lr": 1e-3, "foreach": False}  # foreach makes temporaries as large as all parameters together
PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]  # what "selective" keeps

optimal = lru_cache(maxsize=64)(optimal)


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
        _cast(model, recipe.dtype) if detect_fake_mode() else model.to(recipe.dtype)
    check_model(model, recipe)
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)` for symbolic tensors, which cannot be given other data: new ones take their place."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None or not old.is_floating_point() or old.dtype == dtype:
                continue
            if old not in made:
                new = old.detach().to(dtype)
                made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(module, name, made[old])


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
    together = len(parameters) if detect_fake_mode() else 1  # for real, one at a time, to take little memory
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
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, recipe: Recipe, *, store=None
) -> StepResult:
    """One step by the recipe; its gradient is the plain step's, within the recipe's precision.

    Args:
        model: in the recipe's precision, as from `build`; `model.loss(batch)` is a mean over samples of equal weight.
        optimizer: as from `build`.
        batch: what `course_lib.accumulation.split` takes; for a `Decoder`, tokens (b, s + 1).
        recipe: what to use. Checkpoints and `head_chunk` take a `Decoder` as it is made, without forward hooks; flash
            takes modules of `course_lib.models.Attention`; all else takes any model. `in_backward` steps a parameter
            each time that autograd hands over its gradient, which under reentrant checkpoints of the model's own may
            be in parts.
        store: for offloaded activations; the default of `offload_activations` if left out.

    Returns:
        A `StepResult`; its weight counts samples. Gradients are None afterwards. After an error they and the random
        generators are as before, and no parameter has changed, but for those that `in_backward` has stepped.

    Raises:
        TypeError, ValueError: recipe, model and batch do not go together; the message says how.
    """
    check_model(model, recipe)
    check_optimizer(optimizer)
    return run_pieces(model, optimizer, pieces_of(batch, recipe.micro_batches), recipe, store)


def run_pieces(model, optimizer, pieces: Iterable[Any], recipe: Recipe, store=None) -> StepResult:
    """`train_step` on micro-batches that are there already."""

    def loss_sum(_, piece) -> tuple[Tensor, int]:
        samples = samples_in(piece)
        with offload_activations(store, keep=[model]) if recipe.offload_activations else nullcontext():
            return checked_loss(model, loss_of(model, piece, recipe)) * samples, samples

    with applied(model, recipe):
        if not recipe.in_backward:
            return AccumulatedStep(model, optimizer, loss_sum)(pieces)
        [piece] = pieces
        with random_numbers_undone():
            return _step_in_backward(model, optimizer, loss_sum, piece)


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
        loss, samples = loss_sum(model, piece)
        value = math.nan if detect_fake_mode() is not None else float(loss.detach()) / samples
        if detect_fake_mode() is None and not math.isfinite(value):
            raise ValueError(f"the loss is {value}; it takes a finite number")
        (loss / samples).backward()
        if not stepped & optimized:
            raise RuntimeError("no parameter of the optimizer got a gradient; it takes an optimizer of this model")
        gradients = [None] * len(parameters)
    finally:
        for hook in hooks:
            hook.remove()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    return StepResult(value, samples, None, True)


# ---- one model, one micro-batch


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


def loss_of(model: nn.Module, batch: Any, recipe: Recipe) -> Tensor:
    """The mean loss of one micro-batch, with the recipe's checkpoints and loss head."""
    if recipe.checkpoint == "none" and not recipe.head_chunk:
        return model.loss(batch)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    stages = loss_stages(model, targets)
    if recipe.head_chunk:
        stages[-1] = _ChunkedHead(model, targets, recipe.head_chunk)
    if recipe.checkpoint == "optimal":
        return ScheduledSequential(stages, schedule_of(stages, tokens, recipe.schedule_bytes))(tokens)
    x = stages[0](tokens)
    layers = [stages[i : i + 2] for i in range(1, len(stages) - 1, 2)]
    options = {"use_reentrant": False, "preserve_rng_state": _draws(model)}
    if recipe.checkpoint == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
    if recipe.checkpoint == "segments":
        x = checkpoint_sequential(layers, recipe.segments, x, **options)
    else:
        for layer in layers:
            x = layer(x) if recipe.checkpoint == "none" else checkpoint(layer, x, **options)
    return stages[-1](x)


class _ChunkedHead(nn.Module):
    """The last stage of `loss_stages`, a few tokens at a time."""

    def __init__(self, decoder: Decoder, targets: Tensor, chunk: int):
        super().__init__()
        self.norm, self.head, self.chunk = decoder.norm, decoder.head, chunk
        self.register_buffer("targets", targets.flatten(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed_loss(self.norm(x).flatten(0, 1), self.head.weight, self.targets, chunk=self.chunk)


def schedule_of(stages: nn.Sequential, tokens: Tensor, schedule_bytes: int) -> Schedule:
    """The fastest schedule of `loss_stages` within so many bytes; raises `course_lib.schedule.InfeasibleBudget`."""
    return optimal(chain_of(stages, tokens), schedule_bytes)


def chain_of(stages: nn.Sequential, tokens: Tensor) -> Chain:
    """What the stages take, found on symbolic copies and out of sight of meters. One layer stands for all."""
    mode = detect_fake_mode()
    probe = nn.Sequential(stages[0], *stages[1:3], stages[-1])
    with _disable_current_modes():
        if mode is None:
            mode = FakeTensorMode()
            with FakeCopyMode(mode):
                probe, tokens = copy.deepcopy((probe, tokens.detach()))
        with mode:
            first, attention, feedforward, last = Chain.profile(probe, tokens).stages
    layers = len(stages) // 2 - 1
    return Chain((first, *(attention, feedforward) * layers, last), tokens.nbytes)


# ---- batches and models


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def checked_loss(model: nn.Module, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        grad = " without gradients" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise TypeError(
            f"{type(model).__name__}.loss returned {kind}{grad}; it takes a scalar tensor that requires gradients, "
            "the mean over samples"
        )
    return loss


def samples_in(batch: Any) -> int:
    return len(next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)))


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


def is_decoder(model: nn.Module) -> bool:
    """Whether the model's loss is that of `loss_stages`, so that it can be taken apart."""
    return isinstance(model, Decoder) and not _altered(model)


def _altered(decoder: Decoder) -> str:
    """What of a decoder is not as `Decoder` makes it; "" if all is."""
    for name in ("forward", "loss"):
        if getattr(type(decoder), name) is not getattr(Decoder, name) or name in vars(decoder):
            return f"{name} is its own"
    if type(decoder.head) is not nn.Linear or decoder.head.bias is not None:
        return "head is not a Linear without bias"
    for name, layer in decoder.layers.named_children():
        if type(layer) is not DecoderLayer or "forward" in vars(layer):
            return f"layers.{name} is a {type(layer).__name__} with a forward of its own"
        if not layer.norm_first:
            return f"layers.{name} has norm_first=False"
    for module in (decoder, *decoder.layers):
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{type(module).__name__} has forward hooks, which would not run"
    return ""


def check_function(name: str, function: Any) -> None:
    if not callable(function) or isinstance(function, nn.Module):
        raise TypeError(f"{name} is a {type(function).__name__}; it takes a function without arguments")


def check_recipe(recipe: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it takes a Recipe")


def check_model(model: Any, recipe: Recipe) -> None:
    """What the recipe asks of the model."""
    check_recipe(recipe)
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {kind}; it takes a torch.nn.Module")
    if not callable(getattr(model, "loss", None)):
        raise TypeError(f"{kind} has no method loss(batch), the mean over samples; it takes one")
    if not trained(model):
        raise ValueError(f"{kind} has no parameter that requires gradients; it takes one or more")
    if not is_decoder(model):
        for name in ("checkpoint", "head_chunk"):
            if name in recipe.changed():
                altered = isinstance(model, Decoder) and f"this one is altered: {_altered(model)}"
                raise ValueError(
                    f"{name} is {getattr(recipe, name)!r}, which takes a course_lib.models.Decoder, "
                    f"but {altered or f'the model is a {kind}'}"
                )
    if recipe.checkpoint == "segments" and recipe.segments > len(model.layers):
        raise ValueError(f"segments is {recipe.segments}; this decoder takes 1 to {len(model.layers)}, its layers")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if recipe.attention == "flash":
        if not attentions:
            raise ValueError(
                f'attention is "flash", which takes modules of course_lib.models.Attention, but {kind} has none'
            )
        dropped = drop_probability(attentions)
        if dropped:
            raise ValueError(
                f'attention is "flash", but the model drops probabilities out (p = {dropped}); flash takes 0'
            )
    for p in model.parameters():
        if p.is_floating_point() and p.dtype != recipe.dtype:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}, but the recipe's precision is "
                f'"{recipe.precision}"; make the model with build(make_model, recipe)'
            )


def drop_probability(attentions: Iterable[Attention]) -> float:
    drops = [module.drop_probabilities for module in attentions]
    return max((drop.p for drop in drops if drop.training), default=0.0)


def _draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, which a checkpoint must then repeat."""
    return any(isinstance(m, (Dropout, nn.Dropout)) and m.p > 0 and m.training for m in model.modules())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
