"""Compute the loss that a model itself defines, as a pair (sum of losses, weight).

The weight is the number of items over which the sum goes, such as tokens. The loss comes from the
model's method `loss_sum` or `loss`, or from the forward pass of a Hugging Face model. Hugging Face
models are recognized by their attributes, so the package transformers is not needed.
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

#: Advice, in error messages, on how to pass a loss whose weight is known.
GIVE_LOSS_SUM = (
    "give the model a method loss_sum(batch) that returns (sum of losses, weight), or pass a"
    " function loss_sum(model, batch) that returns this pair. On the command line, set"
    " loss_sum as an attribute of the function that --model names: make_model.loss_sum = loss_sum"
)


def own_loss(model: nn.Module, batch: Any, micro_batches: int = 1) -> tuple[Tensor, float | Tensor]:
    """Compute a model's own loss for a batch, and return (sum of losses, weight).

    The weight is the number of tokens or samples in the sum. A model's method `loss_sum` returns
    the sum and the weight. A method `loss` must return the mean over the samples, so the weight is
    the number of samples, or 1 if this number is not known. For other models, see
    `hugging_face_loss`.

    Args:
        model: A model with a method `loss_sum` or `loss`, or a Hugging Face model.
        batch: The batch, or one of its micro-batches.
        micro_batches: Number of micro-batches into which the batch was split. If there are several,
            a Hugging Face loss that is not a mean over labels raises a ValueError.
    """
    if has_method(model, "loss_sum"):
        return _call_loss_method(model, "loss_sum", batch)
    if has_method(model, "loss"):
        weight = samples_in(batch) or 1
        return checked_loss(model, _call_loss_method(model, "loss", batch)) * weight, weight
    return hugging_face_loss(model, batch, micro_batches)


def _call_loss_method(model: nn.Module, name: str, batch: Any) -> Any:
    """Return the result of `model.loss(batch)` or `model.loss_sum(batch)`; `name` selects one.

    The attribute may also be a function that was assigned to the model. If such a function raises
    an error, a note on the error says so.
    """
    function, method = getattr(model, name), f"{type(wrapped_in(model)).__name__}.{name}"
    otherwise = "; or pass a function loss_sum(model, batch)"
    takes_arguments(method, function, "(batch)", batch, otherwise=otherwise)
    try:
        return function(batch)
    except Exception as error:
        if not inspect.ismethod(function):
            error.add_note(
                f"raised in {method}, {describe(function)} that was assigned to the model and"
                " is called only with the batch, without the model"
            )
        raise


def takes_arguments(
    name: str, function: Any, allowed: str, *arguments: Any, otherwise: str = ""
) -> None:
    """Raise TypeError if a function cannot be called with the given positional arguments.

    Args:
        name: Name of the function in the message.
        function: The function or module. It is not called.
        allowed: Description of `arguments` in the message, such as "no arguments".
        arguments: Positional arguments that the function must accept.
        otherwise: Advice at the end of the message.
    """
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
        message = f"{name} must be callable with {allowed}, got {actual}{otherwise}"
        raise TypeError(message) from None


def checked_loss(model: nn.Module, loss: Any) -> Tensor:
    """Return a model's own loss; raise TypeError unless it is a scalar that requires gradients."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise TypeError(
            f"{type(model).__name__}.loss must return the mean over samples as a scalar tensor that"
            f" requires gradients, got {describe(loss)}"
        )
    return loss


def has_loss_sum(model: nn.Module) -> bool:
    """Return whether the number of tokens or samples in the model's own loss is known.

    A method `loss_sum` returns the number, and a method `loss` does not. For a Hugging Face model
    without these methods, the number is known under two conditions. The name of the class must show
    that the loss is a mean over labels or samples, and the model must not add a loss of its
    experts' routers.
    """
    if has_method(model, "loss") or has_method(model, "loss_sum"):
        return has_method(model, "loss_sum")
    names = " ".join(kind.__name__ for kind in type(wrapped_in(model)).__mro__)
    return (
        is_hugging_face(model)
        and re.search(MEAN_LOSS_CLASSES, names) is not None
        and not has_auxiliary_loss(model)
    )


def has_method(model: nn.Module, name: str) -> bool:
    """Return whether the model's own loss is its method `name`, which is "loss" or "loss_sum".

    If a model has both methods, its loss is the method that the instance or the most derived class
    defines. For example, a subclass that defines `loss` does not use a `loss_sum` that it inherits.

    Some Hugging Face models have an attribute `loss` that is a function of outputs and targets.
    Such an attribute does not count as a method.
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
    # No class of the model defines the attribute. It can still be a method of a wrapped model,
    # which torch.compile's wrapper returns, or a submodule.
    found = getattr(model, name, None)
    return inspect.ismethod(found) or (callable(found) and not hugging_face)


def wrapped_in(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of `torch.compile` and peft.

    A peft model is recognized by its attribute `peft_config` and its method `get_base_model`,
    because its class depends on whether a `task_type` was given. A model without wrappers is
    returned unchanged.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


# ---- Hugging Face models

# Matches names of classes whose loss is a mean over labels or samples: causal and masked language
# models, encoder-decoders and classifiers.
MEAN_LOSS_CLASSES = (
    "CausalLM|LMHeadModel|MaskedLM|Seq2SeqLM|ForConditionalGeneration"
    "|For[A-Za-z]*Classification|MultipleChoice"
)


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model counts as a Hugging Face model.

    The model inside its wrappers must have an attribute `config` and a forward method.
    """
    model = wrapped_in(model)
    return hasattr(model, "config") and type(model).forward is not nn.Module.forward


def has_auxiliary_loss(model: nn.Module) -> bool:
    """Return whether a Hugging Face model adds a loss of its experts' routers to the mean loss."""
    return bool(getattr(model.config, "output_router_logits", False))


class _MeanLossRecorder(TorchFunctionMode):
    """Function mode that records the mean losses that a model computes, and their labels.

    Attributes:
        means: Tuples (mean loss, labels, value of the labels that the mean ignores). The last item
            is None for a loss that ignores no labels.
    """

    def __init__(self):
        super().__init__()
        self.means: list[tuple[Tensor, Tensor, int | None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func in (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits):
            target = kwargs["target"] if "target" in kwargs else args[1]
            # The result is a mean over the labels that are not ignored, unless the classes have
            # different weights or the labels are probabilities.
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
    """Compute the loss of a Hugging Face model for a batch, and return (sum of losses, weight).

    The weight is the number of labels over which the model's loss is a mean, counted as the model
    itself counts them. If the loss is not such a mean, the weight is the number of samples, or 1 if
    this number cannot be determined. The sum is the model's loss times the weight.

    Args:
        model: The model, which is called with the items of the batch as keyword arguments.
        batch: A mapping, such as a dict, that contains the labels.
        micro_batches: Number of micro-batches into which the batch was split.

    Raises:
        TypeError: The batch is not a mapping.
        ValueError: The model returns no loss, or there are several micro-batches and the loss is
            not a mean over labels.
    """
    kind("batch", batch, Mapping, "a dict of the model's arguments, including the labels")
    with _MeanLossRecorder() as recorder:
        output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output[0]
    name = type(model).__name__
    if loss is None or not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(
            f"{name} must return a loss, but it returned none for a batch with the keys"
            f" {', '.join(map(str, batch))}. Add what the model needs for its loss to the batch,"
            f" usually labels, or {GIVE_LOSS_SUM}"
        )
    labels = [(target, ignored) for mean, target, ignored in recorder.means if mean is loss]
    if not labels and micro_batches > 1:
        raise ValueError(
            f"micro_batches must be 1 for {describe(model)}, got {micro_batches}: the loss of this"
            f" model is not a mean over labels. To use several micro-batches, {GIVE_LOSS_SUM}"
        )
    if not labels:
        weight = samples_in(batch) or 1
        return loss * weight, weight
    [(target, ignored)] = labels
    weight = target.numel() if ignored is None else (target != ignored).sum()
    # The multiplication is in fp32, because 16-bit numbers would round the weight.
    total = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
    # If all labels are ignored, the model's mean is NaN, and the sum must be 0.
    return total if ignored is None else torch.where(weight > 0, total, 0.0), weight
