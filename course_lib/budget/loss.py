"""The loss of one micro-batch: its sum and its weight, the model's own or given, with checkpoints
and loss head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import InfeasibleBudget, function, shown
from course_lib._losses import (
    has_loss_sum,
    has_method,
    is_hugging_face,
    own_loss,
    samples_in,  # noqa: F401 - for the package
    takes_arguments,
    wrapped_in,
)
from course_lib._torch import is_symbolic
from course_lib.checkpoint import checkpoint_sequential, checkpointed_loss
from course_lib.models import Decoder, DecoderLayer, Dropout, loss_stages
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal

Recipe = Any  # a `course_lib.budget.Recipe`, whose techniques need what is here
# checkpoints that run a chain: the stages of a decoder, or a model's blocks
CHAINED = ("segments", "optimal")
LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


def loss_of(
    model: nn.Module, batch: Any, recipe: Recipe, loss_sum=None
) -> tuple[Tensor, float | Tensor]:
    """The sum of losses of one micro-batch and its weight."""
    try:
        return _loss_of(model, batch, recipe, loss_sum)
    except AssertionError as error:
        if is_symbolic() or "FakeTensor" not in str(error):
            raise
        got = (
            "the model's code has kept a symbolic tensor of an estimate, as in a cache outside of"
            " the model"
        )
        raise ValueError(
            f"{got}; it takes that cache emptied, or a process without estimates"
        ) from error


def _loss_of(model, batch, recipe: Recipe, loss_sum) -> tuple[Tensor, float | Tensor]:
    if loss_sum is not None:
        return loss_sum(model, batch)
    if is_taken_apart(model, recipe):
        return taken_apart(model, batch, recipe) * batch[:, 1:].numel(), batch[:, 1:].numel()
    return own_loss(model, batch, recipe.micro_batches)


# ---- a decoder, as a chain of stages


def taken_apart(model: Decoder, batch: Tensor, recipe: Recipe) -> Tensor:
    """The mean loss of a decoder, stage by stage."""
    tokens, stages = batch[:, :-1], stages_of(model, batch, recipe)
    if recipe.checkpoint == "optimal":
        return ScheduledSequential(stages, schedule_of(model, batch, recipe)[0])(tokens)
    layers = [stages[i : i + 2] for i in range(1, len(stages) - 1, 2)]
    options = {"use_reentrant": False, "preserve_rng_state": draws(model)}
    return stages[-1](checkpoint_sequential(layers, recipe.segments, stages[0](tokens), **options))


def stages_of(model: Decoder, batch: Tensor, recipe: Recipe) -> nn.Sequential:
    stages = loss_stages(model, batch[:, 1:])
    if recipe.head_chunk:
        stages[-1] = _ChunkedHead(model, batch[:, 1:], recipe.head_chunk)
    return stages


class _ChunkedHead(nn.Module):
    """The last stage of `loss_stages`, a few tokens at a time."""

    def __init__(self, decoder: Decoder, targets: Tensor, chunk: int):
        super().__init__()
        self.norm, self.head, self.chunk = decoder.norm, decoder.head, chunk
        self.register_buffer("targets", targets.flatten(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed_loss(
            self.norm(x).flatten(0, 1), self.head.weight, self.targets, chunk=self.chunk
        )


def is_taken_apart(model: nn.Module, recipe: Recipe) -> bool:
    return recipe.checkpoint in CHAINED and recipe.blocks is None and is_decoder(model)


_chains: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_fastest = lru_cache(64)(optimal)


def fastest(chain: Chain, budget_bytes: int) -> Schedule:
    """The fastest schedule within a recipe's bytes, found once for each chain.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    try:
        return _fastest(chain, budget_bytes)
    except InfeasibleBudget as error:
        told = error.budget_bytes, error.least_bytes, error.told, error.least
        raise InfeasibleBudget(*told, name="schedule_bytes") from None


def chains_of(model: nn.Module, recipe: Recipe) -> dict[Any, Chain]:
    """Where chains of the model's blocks are kept once they are measured."""
    return _chains.setdefault(model, {}).setdefault(recipe.attention, {})


def schedule_of(model: Decoder, batch: Tensor, recipe: Recipe) -> tuple[Schedule, Chain]:
    """The fastest schedule of the stages within the recipe's bytes, found once for all that is
    alike, and their chain.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    tokens = batch[:, :-1]
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in model.parameters())
    autocast = torch.is_autocast_enabled(tokens.device.type) and torch.get_autocast_dtype(
        tokens.device.type
    )
    key = (
        recipe.attention,
        recipe.head_chunk,
        tokens.shape,
        tokens.device,
        parameters,
        autocast,
        draws(model),
    )
    known = _chains.setdefault(model, {})
    if key not in known:
        known[key] = chain_of(stages_of(model, batch, recipe), tokens)
    return fastest(known[key], recipe.schedule_bytes), known[key]


def chain_of(stages: nn.Sequential, tokens: Tensor) -> Chain:
    """What the stages take, found on symbolic copies and out of sight of meters. One layer stands
    for all."""
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
    told = (
        "it takes a loss_sum(model, batch) -> (sum of losses, weight), or such a method of the"
        " model"
    )
    name, pieces = type(wrapped_in(model)).__name__, recipe.micro_batches
    if loss_sum is not None:
        function("loss_sum", loss_sum, "a function (model, batch) -> (sum of losses, weight)")
        takes_arguments("loss_sum", loss_sum, "(model, batch)", model, None)
        if is_taken_apart(model, recipe):
            got = f"checkpoint is {recipe.checkpoint!r} with a loss_sum"
            raise ValueError(f'{got}; it takes a decoder\'s own loss, or blocks="layers.*"')
    elif not has_loss_sum(model) and not has_method(model, "loss") and not is_hugging_face(model):
        raise TypeError(f"model is {shown(model)} without a loss; {told}")
    elif not has_loss_sum(model) and pieces > 1:
        raise ValueError(
            f"micro_batches is {pieces} and {name}.loss is a mean of unknown weight; {told}"
        )
    if (
        recipe.offload_activations
        and recipe.checkpoint in CHAINED
        and not is_taken_apart(model, recipe)
    ):
        got = (
            f"offload_activations is True and checkpoint is {recipe.checkpoint!r} and the model is"
            f" a {name}"
        )
        raise ValueError(
            f'{got}, whose blocks\' inputs the schedule holds; it takes "none" or "layers"'
        )
    if pieces > 1 and mixes_samples(model):
        got = (
            f"micro_batches is {pieces} and the model is a {name} with BatchNorm in training, whose"
            " loss is no sum"
        )
        raise ValueError(f"{got} over samples; it takes 1, or BatchNorm in eval mode")


def mixes_samples(model: nn.Module) -> bool:
    """Whether a sample's loss depends on the others in its batch."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules()
    )


def draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, which a checkpoint must then repeat."""
    return any(
        isinstance(m, (Dropout, nn.Dropout)) and m.p > 0 and m.training for m in model.modules()
    )
