"""The loss of one micro-batch: its sum and its weight, the model's own or given, with checkpoints and loss head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import function, shown
from course_lib._torch import tensors_in
from course_lib.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    checkpointed_loss,
    create_selective_checkpoint_contexts,
)
from course_lib.models import Attention, Decoder, DecoderLayer, Dropout, loss_stages
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal

from .recipe import Recipe

PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]  # what "selective" keeps
LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


def loss_of(model: nn.Module, batch: Any, recipe: Recipe, loss_sum=None) -> tuple[Tensor, float | Tensor]:
    """The sum of losses of one micro-batch and its weight, with the recipe's checkpoints and loss head."""
    if loss_sum is not None:
        return loss_sum(model, batch)
    if recipe.checkpoint != "none" or recipe.head_chunk:
        return taken_apart(model, batch, recipe) * batch[:, 1:].numel(), batch[:, 1:].numel()
    if has_loss_sum(model):
        return model.loss_sum(batch)
    return checked_loss(model, model.loss(batch)) * samples_in(batch), samples_in(batch)


def has_loss_sum(model: nn.Module) -> bool:
    """Whether the model says what its loss is a mean over; not so if a newer `loss` hides an older `loss_sum`."""
    for names in (vars(model), *map(vars, type(model).__mro__)):
        if "loss_sum" in names or "loss" in names:
            return "loss_sum" in names
    return callable(getattr(model, "loss_sum", None))  # of what it wraps, as torch.compile does


def taken_apart(model: Decoder, batch: Tensor, recipe: Recipe) -> Tensor:
    """The mean loss of a decoder, stage by stage."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    stages = loss_stages(model, targets)
    if recipe.head_chunk:
        stages[-1] = _ChunkedHead(model, targets, recipe.head_chunk)
    if recipe.checkpoint == "optimal":
        return ScheduledSequential(stages, schedule_of(model, stages, tokens, recipe))(tokens)
    x = stages[0](tokens)
    layers = [stages[i : i + 2] for i in range(1, len(stages) - 1, 2)]
    options = {"use_reentrant": False, "preserve_rng_state": draws(model)}
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


_schedules: WeakKeyDictionary[nn.Module, dict[Any, Schedule]] = WeakKeyDictionary()


def schedule_of(model: Decoder, stages: nn.Sequential, tokens: Tensor, recipe: Recipe) -> Schedule:
    """The fastest schedule of `loss_stages` within the recipe's bytes, found once for all that is alike.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in model.parameters())
    autocast = torch.is_autocast_enabled(tokens.device.type) and torch.get_autocast_dtype(tokens.device.type)
    key = recipe, tokens.shape, tokens.device, parameters, autocast, draws(model)
    known = _schedules.setdefault(model, {})
    if key not in known:
        known[key] = optimal(chain_of(stages, tokens), recipe.schedule_bytes)
    return known[key]


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


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def checked_loss(model: nn.Module, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        got = f"{type(model).__name__}.loss returned {shown(loss)}"
        raise TypeError(f"{got}; it takes a scalar tensor with gradients, the mean over samples")
    return loss


def samples_in(batch: Any) -> int:
    return len(next(tensors_in(batch)))


def is_decoder(model: nn.Module) -> bool:
    """Whether the model's loss is that of `loss_stages`, so that it can be taken apart."""
    return isinstance(model, Decoder) and not altered(model)


def altered(decoder: Decoder) -> str:
    """What of a decoder is not as `Decoder` makes it; "" if all is."""
    for name in ("forward", "loss", "loss_sum"):
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


def check_loss(model: nn.Module, recipe: Recipe, loss_sum: Any) -> None:
    """Whether there is a loss, and its weight is known where micro-batches are to be added up."""
    told = "it takes a loss_sum(model, batch) -> (sum of losses, weight), or such a method of the model"
    if loss_sum is not None:
        function("loss_sum", loss_sum, "a function (model, batch) -> (sum of losses, weight)")
        for name in ("checkpoint", "head_chunk"):
            if name in recipe.changed():
                raise ValueError(f"{name} is {getattr(recipe, name)!r} with a loss_sum; it takes a decoder's own loss")
    elif not has_loss_sum(model) and not callable(getattr(model, "loss", None)):
        raise TypeError(f"model is {shown(model)} without a loss; {told}")
    elif not has_loss_sum(model) and recipe.micro_batches > 1:
        got = f"micro_batches is {recipe.micro_batches} and {type(model).__name__}.loss is a mean of unknown weight"
        raise ValueError(f"{got}; {told}")


def drop_probability(attentions: Iterable[Attention]) -> float:
    drops = [module.drop_probabilities for module in attentions]
    return max((drop.p for drop in drops if drop.training), default=0.0)


def draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, which a checkpoint must then repeat."""
    return any(isinstance(m, (Dropout, nn.Dropout)) and m.p > 0 and m.training for m in model.modules())
