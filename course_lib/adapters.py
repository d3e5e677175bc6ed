"""LoRA adapters on a frozen base, which may be quantized (QLoRA), by peft and bitsandbytes.

`with_adapters` wraps a function that makes a model. Estimates, recipes and the command treat the
model with adapters as any other: adapters belong to the model, not to the recipe.
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

BASES = ("fp32", "bf16", "int8", "nf4", "nf4-double")


def with_adapters(
    make_model: Callable[[], nn.Module],
    rank: int,
    *,
    targets: str | Sequence[str] | None = None,
    base: str = "bf16",
) -> Callable[[], nn.Module]:
    """Return a function that makes the model with a frozen base and trainable LoRA adapters.

    A layer with weights W (m, n) computes x W^T + s (x A^T) B^T with adapters A (rank, n) and B
    (m, rank) in fp32. Only A and B have gradients and optimizer state: rank * (m + n) elements
    instead of m * n. Use recipes with `precision=None`, which keeps the dtypes of the model, or
    "autocast", which also keeps them and computes in bf16.

    **Checkpoints.** Gradients reach the adapters inside a checkpointed block even if the input of
    the block requires none, with this library's checkpoints and with PyTorch's if
    `use_reentrant=False`. Reentrant checkpoints give no gradients there. With them, call
    `model.enable_input_require_grads()`, so that the output of the embedding requires a gradient.
    `gradient_checkpointing_enable` of transformers 5.23 calls it itself.

    Args:
        make_model: Function without arguments that returns a model in fp32.
        rank: Rank of the adapters.
        targets: Names of the layers that get adapters, as peft's `target_modules`; or
            "all-linear". None uses peft's choice for the architecture.
        base: Format of the frozen weights. "fp32" and "bf16" apply to all of them. The other
            formats apply to the linear layers, except the output head and the layers that
            transformers lists in `_keep_in_fp32_modules`, and all other weights are in bf16: "int8"
            takes 1 byte per weight and one fp32 scale per row; "nf4" half a byte per weight and one
            fp32 scale per 64 weights; "nf4-double" stores these scales in 1 byte each, with one
            fp32 scale per 256 of them. Except with "fp32", a model that takes floating-point
            inputs needs them in bf16.

    Returns:
        A function with the attributes `make_batch`, `loss_sum` and `split` of `make_model`. It
        raises ValueError if peft or bitsandbytes is missing, or if no layer has one of the names.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rank` or `base` is out of its range.

    Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(f"make_model must be a function, got {describe(make_model)}")
    if not isinstance(targets, (str, Sequence, type(None))):
        raise TypeError(f"targets must be a str, a list of names or None, got {describe(targets)}")
    made = partial(_with_adapters, make_model, whole("rank", rank, 1), targets, base)
    one_of("base", base, BASES)
    for name in ("make_batch", "loss_sum", "split"):
        if hasattr(make_model, name):
            setattr(made, name, getattr(make_model, name))
    return made


def _with_adapters(make_model: Callable[[], nn.Module], rank: int, targets, base) -> nn.Module:
    peft = _package("peft", "adapters")
    model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model must return a torch.nn.Module, got {describe(model)}")
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"make_model must return a model without adapters, got {describe(model)}; leave out"
            " with_adapters (--lora in the command)"
        )
    if is_symbolic() and not all(map(is_symbolic, model.parameters())):
        # Otherwise the user's own model would be frozen.
        raise ValueError(
            "make_model must make a new model at each call for an estimate, got one that existed"
            " before; pass a function that builds it"
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
            # peft reads an attribute of transformers' models by its former name.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, peft.LoraConfig(**settings))
    except (ValueError, re.error) as error:
        given = "None, and peft has no default for this model" if targets is None else repr(targets)
        raise ValueError(
            "targets must name layers of the model, such as its linear layers"
            f" {', '.join(sorted(names))}, got {given} ({error})"
        ) from error


def _quantize(model: nn.Module, base: str) -> None:
    """Replace the linear layers of a model, except the output head, by those of bitsandbytes."""
    bnb = _package("bitsandbytes", f"the base {base!r}")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # transformers lists layers that cast their input to the dtype of their weights.
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
    """Return the imported package.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} must be installed for {purpose}: pip install {name}") from error
