"""Add LoRA adapters to a model with frozen weights, which may be quantized (QLoRA).

The adapters are those of peft, and the quantized layers are those of bitsandbytes. `with_adapters`
wraps a function that makes a model. Adapters are part of the model, so estimates and recipes need
no special support for them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from course_lib._check import describe, one_of, whole
from course_lib._torch.symbolic import is_symbolic

# Formats of the frozen weights.
BASES = ("fp32", "bf16", "int8", "nf4", "nf4-double")


def with_adapters(
    make_model: Callable[[], nn.Module],
    rank: int,
    *,
    targets: str | Sequence[str] | None = None,
    base: str = "bf16",
) -> Callable[[], nn.Module]:
    """Return a function that makes a model with frozen weights and trainable LoRA adapters.

    An adapted layer has frozen weights W (m, n) and two trainable adapters in fp32, A (rank, n) and
    B (m, rank). It computes x W^T + 2 (x A^T) B^T. Per layer, only rank * (m + n) parameters
    have gradients and optimizer state, instead of m * n.

    To train the model with a `course_lib.budget.Recipe`, set the recipe's field `precision` to None
    or "autocast". With either value, the parameters keep the dtypes that this function sets.
    "autocast" computes in bf16.

    **Checkpoints.** If all weights before a checkpointed block are frozen, the input of the block
    does not require a gradient. With this library's checkpoints, and with PyTorch's if
    `use_reentrant=False`, the adapters inside the block still get gradients. With reentrant
    checkpoints, the adapters get gradients only if you call `model.enable_input_require_grads()`.
    This method makes the output of the embedding require a gradient.
    `gradient_checkpointing_enable` of transformers 5.23 calls `enable_input_require_grads` itself.

    Args:
        make_model: Function without arguments that returns a model in fp32.
        rank: Rank of the adapters.
        targets: Names of the layers that get adapters, or "all-linear" for all linear layers (see
            `target_modules` of peft). None uses the default of peft for the architecture.
        base: Format of the frozen weights. "fp32" and "bf16" apply to all weights. "int8", "nf4"
            and "nf4-double" quantize the weights of linear layers, and all other weights are in
            bf16. The output head and the layers in `_keep_in_fp32_modules` of transformers are not
            quantized. "int8" needs 1 byte per weight and one fp32 scale per row. "nf4" needs half a
            byte per weight and one fp32 scale per 64 weights. "nf4-double" also quantizes the
            scales of "nf4", to 1 byte per scale and one fp32 number per 256 scales. Unless
            `base` is "fp32", floating-point inputs of the model must be in bf16.

    Returns:
        A function without arguments that returns the model. If `make_model` has an attribute
        `make_batch`, `loss_sum` or `split`, the returned function has the same attribute. The
        returned function raises ValueError if peft or bitsandbytes is missing, or if no layer has
        one of the names in `targets`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rank` is below 1, or `base` is not one of the formats above.

    Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(f"make_model must be a function, got {describe(make_model)}")
    if not isinstance(targets, (str, Sequence, type(None))):
        raise TypeError(f"targets must be a str, a list of names or None, got {describe(targets)}")
    make_adapted = partial(_with_adapters, make_model, whole("rank", rank, 1), targets, base)
    one_of("base", base, BASES)
    for name in ("make_batch", "loss_sum", "split"):
        if hasattr(make_model, name):
            setattr(make_adapted, name, getattr(make_model, name))
    return make_adapted


def _with_adapters(make_model: Callable[[], nn.Module], rank: int, targets, base) -> nn.Module:
    """Make the model, freeze and convert its weights, and add adapters (see `with_adapters`)."""
    peft = _package("peft", "adapters")
    model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model must return a torch.nn.Module, got {describe(model)}")
    if hasattr(model, "peft_config"):
        raise ValueError(
            "make_model must return a model without adapters, got"
            f" {describe(model)} with adapters. For this model, leave out with_adapters (in a"
            " command, leave out --lora)"
        )
    if is_symbolic() and not all(map(is_symbolic, model.parameters())):
        # Without this error, the weights of the user's own model would be frozen below.
        raise ValueError(
            "make_model must make a new model at each call for an estimate, got one that existed"
            " before; build the model inside the function"
        )
    model.requires_grad_(False)
    model.to(torch.float32 if base == "fp32" else torch.bfloat16)
    if base not in ("fp32", "bf16"):
        _quantize(model, base)
    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0}
    if targets is not None:
        settings["target_modules"] = targets if isinstance(targets, str) else list(targets)
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    try:
        with warnings.catch_warnings():
            # peft reads an attribute of transformers' models by a deprecated name, which causes a
            # FutureWarning.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, peft.LoraConfig(**settings))
    except (ValueError, re.error) as error:
        shown = "None, and peft has no default for this model" if targets is None else repr(targets)
        linear = ", ".join(sorted(names))
        found = (
            f"the linear layers of this model are {linear}"
            if linear
            else "this model contains no linear layers with names"
        )
        raise ValueError(
            "targets must be 'all-linear', a list of names of layers that peft supports, such as"
            f" linear layers, or a regular expression for such names, got {shown}; {found} (error:"
            f" {error})"
        ) from error


def _quantize(model: nn.Module, base: str) -> None:
    """Replace the linear layers of a model by quantized layers of bitsandbytes, in place.

    The output head and layers that transformers keeps in fp32 are not replaced.

    Args:
        model: The model.
        base: "int8", "nf4" or "nf4-double".
    """
    bnb = _package("bitsandbytes", f"the base {base!r}")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # In this attribute, transformers lists the layers that cast their input to the dtype of their
    # weights. These layers are not quantized, because they would cast their input to the dtype of
    # quantized weights.
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer is not head and not {*name.split(".")} & {*kept}
    ]
    if not layers:
        raise ValueError(
            f"base must be 'fp32' or 'bf16' for a model without linear layers besides its output"
            f" head, got {base!r}"
        )
    for name, layer in layers:
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        settings: dict[str, Any] = {"has_fp16_weights": False}
        weight_class, layer_class = bnb.nn.Int8Params, bnb.nn.Linear8bitLt
        if base != "int8":
            settings = {"compress_statistics": base == "nf4-double", "quant_type": "nf4"}
            weight_class, layer_class = bnb.nn.Params4bit, bnb.nn.Linear4bit
        new = layer_class(*sizes, **settings)
        new.weight = weight_class(layer.weight.detach(), requires_grad=False, **settings)
        new.bias = layer.bias
        model.set_submodule(name, new.to(layer.weight.device))  # `to` quantizes the weight


def _package(name: str, purpose: str) -> ModuleType:
    """Import a package and return it.

    Args:
        name: Name of the package.
        purpose: Purpose of the package, such as "adapters". The error message contains it.

    Raises:
        ValueError: The package is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} must be installed for {purpose}: pip install {name}") from error
