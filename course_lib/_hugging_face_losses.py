"""The loss that a model itself computes, as a sum with a weight.

It comes from the model's method `loss_sum` or `loss`, or from a Hugging Face model's forward.

Hugging Face models are recognized by their attributes, so their library is not needed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ._batches import samples_in
from ._check import describe, kind

#: Ways to give a loss with a known weight, for error messages of functions and of commands.
GIVE_LOSS_SUM = (
    "give the model a method loss_sum(batch) that returns (sum of losses, weight), or pass a"
    " function loss_sum(model, batch) that does (to a command, as the attribute loss_sum of the"
    " function that --model names)"
)


def own_loss(model: nn.Module, batch: Any, micro_batches: int = 1) -> tuple[Tensor, float | Tensor]:
    """Return the sum of losses of one of `micro_batches` micro-batches, and its weight.

    A method `loss` is assumed to return a mean over samples. If their number is not known, its
    weight is 1.
    """
    if has_method(model, "loss_sum"):
        return _call(model, "loss_sum", batch)
    if has_method(model, "loss"):
        weight = samples_in(batch) or 1
        return checked_loss(model, _call(model, "loss", batch)) * weight, weight
    return hugging_face_loss(model, batch, micro_batches)


def _call(model: nn.Module, name: str, batch: Any) -> Any:
    """Call a method of the model, or a function that was assigned to it.

    If an assigned function raises an error, a note on the error names it.
    """
    function, method = getattr(model, name), f"{type(wrapped_in(model)).__name__}.{name}"
    takes_arguments(method, function, "(batch), unless a loss_sum(model, batch) is passed", batch)
    try:
        return function(batch)
    except Exception as error:
        if not inspect.ismethod(function):
            error.add_note(
                f"raised in {method}, which is {describe(function)} that was assigned to the model"
                " and is called with the batch"
            )
        raise


def takes_arguments(name: str, function: Any, allowed: str, *arguments: Any) -> None:
    """Raise if a function cannot be called with these arguments; `allowed` describes them."""
    try:
        signature = inspect.signature(
            function.forward if isinstance(function, nn.Module) else function
        )
    except (TypeError, ValueError):  # the function is not written in Python
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        actual = (
            f"{describe(function)} with the arguments"
            f" {signature.replace(return_annotation=signature.empty)}"
        )
        raise TypeError(f"{name} must be callable with {allowed}, got {actual}") from None


def checked_loss(model: nn.Module, loss: Any) -> Tensor:
    """Return the result of a method `loss`, or raise if it is not a scalar with gradients."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise TypeError(
            f"{type(model).__name__}.loss must return a scalar tensor with gradients, the mean over"
            f" samples, got {describe(loss)}"
        )
    return loss


def has_loss_sum(model: nn.Module) -> bool:
    """Return whether the model's loss is a sum, or a mean over a known number of items."""
    if has_method(model, "loss") or has_method(model, "loss_sum"):
        return has_method(model, "loss_sum")
    names = " ".join(kind.__name__ for kind in type(wrapped_in(model)).__mro__)
    return (
        is_hugging_face(model)
        and re.search(MEAN_LOSS_CLASSES, names) is not None
        and not adds_to_loss(model)
    )


def has_method(model: nn.Module, name: str) -> bool:
    """Return whether the model has the method `name`, which is "loss" or "loss_sum".

    A `loss` that the instance or a subclass defines hides an inherited `loss_sum`.

    Some Hugging Face models have an attribute `loss`, a function of outputs and targets. It is not
    a method and is not called.
    """
    hugging_face = is_hugging_face(model)
    own = vars(model).keys() - ({"loss"} if hugging_face else set())
    for names in (own, *map(vars, type(model).__mro__)):
        if "loss_sum" in names or "loss" in names:
            return (
                "loss_sum" in names
                if name == "loss_sum"
                else callable(getattr(model, "loss", None))
            )
    # The attribute belongs to a wrapped model, as under torch.compile, or is a submodule.
    found = getattr(model, name, None)
    return inspect.ismethod(found) or (callable(found) and not hugging_face)


def wrapped_in(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrappers of `torch.compile` and peft.

    A peft model with adapters is recognized by its attribute `peft_config` and its method
    `get_base_model`. Its class shows the task only if a `task_type` was given.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


# ---- Hugging Face models

# Pattern of class names whose losses are means over labels or samples: causal and masked language
# models, encoder-decoders and classifiers
MEAN_LOSS_CLASSES = (
    "CausalLM|LMHeadModel|MaskedLM|Seq2SeqLM|ForConditionalGeneration"
    "|For[A-Za-z]*Classification|MultipleChoice"
)


def is_hugging_face(model: nn.Module) -> bool:
    model = wrapped_in(model)
    return hasattr(model, "config") and type(model).forward is not nn.Module.forward


def adds_to_loss(model: nn.Module) -> bool:
    """Return whether the model adds a term to the mean, such as the loss of experts' routers."""
    return bool(getattr(model.config, "output_router_logits", False))


class _Means(TorchFunctionMode):
    """A mode that records each loss that a model computes as a mean, with its labels."""

    def __init__(self):
        super().__init__()
        # (mean, its labels, the label that is ignored)
        self.means: list[tuple[Tensor, Tensor, int | None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func in (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits):
            target = kwargs["target"] if "target" in kwargs else args[1]
            # a mean over the labels that are not ignored, if all classes have the same weight
            by_class = func is F.cross_entropy
            unequal_weights = by_class and (
                target.is_floating_point() or len(args) > 2 or kwargs.get("weight") is not None
            )
            if kwargs.get("reduction", "mean") == "mean" and not unequal_weights:
                self.means.append(
                    (result, target, kwargs.get("ignore_index", -100) if by_class else None)
                )
        return result


def hugging_face_loss(
    model: nn.Module, batch: Any, micro_batches: int = 1
) -> tuple[Tensor, int | Tensor]:
    """Return the model's own loss times its weight, and the weight.

    The weight is the number of labels over which the loss is a mean, or the number of samples if
    that is not known, or 1 if neither is. The labels are counted as the model itself counts them.

    Raises:
        TypeError: The batch is not a mapping.
        ValueError: The model returns no loss, or there are several micro-batches and the loss is
            not a mean over labels.
    """
    kind("batch", batch, Mapping, "a dict of the model's arguments, including the labels")
    with _Means() as recorder:
        output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output[0]
    name = type(model).__name__
    if loss is None or not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(
            f"batch must contain what {name} needs to return a loss, such as labels, got"
            f" {describe(batch)} of {', '.join(map(str, batch))}; or {GIVE_LOSS_SUM}"
        )
    labels = [(target, ignored) for mean, target, ignored in recorder.means if mean is loss]
    if not labels and micro_batches > 1:
        raise ValueError(
            f"micro_batches must be 1, because the loss of {name} is not a mean over labels, got"
            f" {micro_batches}; or {GIVE_LOSS_SUM}"
        )
    if not labels:
        weight = samples_in(batch) or 1
        return loss * weight, weight
    [(target, ignored)] = labels
    weight = target.numel() if ignored is None else (target != ignored).sum()
    # 16-bit numbers would round the weight
    total = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
    # a mean over no label is NaN
    return total if ignored is None else torch.where(weight > 0, total, 0.0), weight
