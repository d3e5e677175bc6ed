"""The loss of one micro-batch: its sum and its weight, the model's own or given, with checkpoints and loss head."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from course_lib._check import function, kind, shown
from course_lib._torch import tensors_in
from course_lib.checkpoint import checkpoint_sequential, checkpointed_loss
from course_lib.models import Decoder, DecoderLayer, Dropout, loss_stages
from course_lib.schedule import Chain, Schedule, ScheduledSequential, optimal

from .attention import configs_of
from .recipe import Recipe

CHAINED = ("segments", "optimal")  # checkpoints that run the stages of a decoder, and not its forward
LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


def loss_of(model: nn.Module, batch: Any, recipe: Recipe, loss_sum=None) -> tuple[Tensor, float | Tensor]:
    """The sum of losses of one micro-batch and its weight."""
    if loss_sum is not None:
        return loss_sum(model, batch)
    if recipe.checkpoint in CHAINED:
        return taken_apart(model, batch, recipe) * batch[:, 1:].numel(), batch[:, 1:].numel()
    if has_method(model, "loss_sum"):
        return model.loss_sum(batch)
    if has_method(model, "loss"):
        return checked_loss(model, model.loss(batch)) * samples_in(batch), samples_in(batch)
    return hugging_face_loss(model, batch, recipe)


def has_loss_sum(model: nn.Module) -> bool:
    """Whether it is known what the model's loss is a mean over."""
    if has_method(model, "loss") or has_method(model, "loss_sum"):
        return has_method(model, "loss_sum")
    names = " ".join(kind.__name__ for kind in type(model).__mro__)
    return is_hugging_face(model) and re.search(WEIGHED, names) is not None and not adds_to_loss(model)


def has_method(model: nn.Module, name: str) -> bool:
    """Whether the model has a `loss` or `loss_sum`; a newer `loss` hides an older `loss_sum`."""
    for names in (vars(model), *map(vars, type(model).__mro__)):
        if "loss_sum" in names or "loss" in names:
            return "loss_sum" in names if name == "loss_sum" else callable(getattr(model, "loss", None))
    return callable(getattr(model, name, None))  # of what it wraps, as torch.compile does


# ---- Hugging Face models, known by what they have: this library does not need theirs

# Their losses are means over labels or samples: of causal and masked language models, encoder-decoders, classifiers.
WEIGHED = "CausalLM|LMHeadModel|MaskedLM|Seq2SeqLM|ForConditionalGeneration|For[A-Za-z]*Classification|MultipleChoice"


def is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and type(model).forward is not nn.Module.forward


def adds_to_loss(model: nn.Module) -> bool:
    """Whether the loss is more than a mean: experts' routers add one that is not over tokens."""
    return bool(getattr(model.config, "output_router_logits", False))


class _Means(TorchFunctionMode):
    """Notes which means of losses a model takes, and over how many labels each goes."""

    def __init__(self):
        super().__init__()
        self.means: list[tuple[Tensor, Tensor, int | None]] = []  # (mean, its labels, the label that does not count)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func in (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits):
            target = kwargs["target"] if "target" in kwargs else args[1]
            by_class = func is F.cross_entropy  # a mean over the labels that count, if all classes weigh the same
            odd = by_class and (target.is_floating_point() or len(args) > 2 or kwargs.get("weight") is not None)
            if kwargs.get("reduction", "mean") == "mean" and not odd:
                self.means.append((result, target, kwargs.get("ignore_index", -100) if by_class else None))
        return result


def hugging_face_loss(model: nn.Module, batch: Any, recipe: Recipe) -> tuple[Tensor, int | Tensor]:
    """The model's own loss, a mean, times the number of labels that it goes over, as the model itself counts them."""
    kind("batch", batch, Mapping, "a dict that is the model's arguments, labels among them")
    with _Means() as noted:
        output = model(**batch)
    loss = output["loss"] if isinstance(output, Mapping) else output[0]
    name = type(model).__name__
    if loss is None or not isinstance(loss, Tensor) or loss.dim():
        got = f"batch is {shown(batch)} of {', '.join(map(str, batch))}, for which {name} returns no loss"
        raise ValueError(f"{got}; it takes labels too, or a loss_sum(model, batch)")
    found = [(target, ignored) for mean, target, ignored in noted.means if mean is loss]
    if not found and recipe.micro_batches > 1:
        got = f"micro_batches is {recipe.micro_batches} and the loss of {name} is no mean over labels"
        raise ValueError(f"{got}; it takes 1, or a loss_sum(model, batch) -> (sum of losses, weight)")
    if not found:
        return loss * samples_in(batch), samples_in(batch)
    [(target, ignored)] = found
    weight = target.numel() if ignored is None else (target != ignored).sum()
    total = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight  # 16 bits would round the weight
    return total if ignored is None else torch.where(weight > 0, total, 0.0), weight  # a mean over none is NaN


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, no keys and values are kept for tokens to come, which nothing in training reads."""
    configs = configs_of(model, "use_cache")
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value


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
        return checkpointed_loss(self.norm(x).flatten(0, 1), self.head.weight, self.targets, chunk=self.chunk)


_chains: WeakKeyDictionary[nn.Module, dict[Any, Chain]] = WeakKeyDictionary()
_optimal = lru_cache(64)(optimal)


def schedule_of(model: Decoder, batch: Tensor, recipe: Recipe) -> tuple[Schedule, Chain]:
    """The fastest schedule of the stages within the recipe's bytes, found once for all that is alike, and their chain.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    tokens = batch[:, :-1]
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in model.parameters())
    autocast = torch.is_autocast_enabled(tokens.device.type) and torch.get_autocast_dtype(tokens.device.type)
    key = recipe.attention, recipe.head_chunk, tokens.shape, tokens.device, parameters, autocast, draws(model)
    known = _chains.setdefault(model, {})
    if key not in known:
        known[key] = chain_of(stages_of(model, batch, recipe), tokens)
    return _optimal(known[key], recipe.schedule_bytes), known[key]


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
    name, pieces = type(model).__name__, recipe.micro_batches
    if loss_sum is not None:
        function("loss_sum", loss_sum, "a function (model, batch) -> (sum of losses, weight)")
        if recipe.checkpoint in CHAINED:
            raise ValueError(f"checkpoint is {recipe.checkpoint!r} with a loss_sum; it takes a decoder's own loss")
    elif not has_loss_sum(model) and not has_method(model, "loss") and not is_hugging_face(model):
        raise TypeError(f"model is {shown(model)} without a loss; {told}")
    elif not has_loss_sum(model) and pieces > 1:
        raise ValueError(f"micro_batches is {pieces} and {name}.loss is a mean of unknown weight; {told}")
    if pieces > 1 and mixes_samples(model):
        got = f"micro_batches is {pieces} and the model is a {name} with BatchNorm in training, whose loss is no sum"
        raise ValueError(f"{got} over samples; it takes 1, or BatchNorm in eval mode")


def mixes_samples(model: nn.Module) -> bool:
    """Whether a sample's loss depends on the others in its batch."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())


def draws(model: nn.Module) -> bool:
    """Whether a forward pass draws random numbers, which a checkpoint must then repeat."""
    return any(isinstance(m, (Dropout, nn.Dropout)) and m.p > 0 and m.training for m in model.modules())
