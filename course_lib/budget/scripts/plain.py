"""Scripts in plain PyTorch, with the techniques of this library, for any model and one device."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from course_lib.budget.optimizers import LR, OPTIMIZERS
from course_lib.budget.recipe import Recipe
from course_lib.labels import text
from course_lib.offload.optimizer import PAGE_BYTES
from course_lib.symbolic.quantization import quantization_state

from .lines import Lines
from .loop import Loop, checked_lines
from .loss import loss_code, loss_contexts, loss_function_code, loss_is_mean
from .settings import checkpoint_lines, setting_lines

if TYPE_CHECKING:
    from course_lib.workload import Workload

#: Maps names in `OPTIMIZERS` to the module and the name of the class that a script uses.
CLASSES: Mapping[str, tuple[str, str]] = {
    "adam": ("torch.optim", "AdamW"),
    "sgd": ("torch.optim", "SGD"),
    "momentum": ("torch.optim", "SGD"),
    "adafactor": ("torch.optim", "Adafactor"),
    "lion": ("course_lib.budget.optimizers", "Lion"),
    "adam8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "muon": ("course_lib.budget.optimizers", "TwoOptimizers"),
}


class Plain(Loop):
    """Framework whose script is a PyTorch training loop on one device.

    The loop uses the techniques of this library, except checkpoint="optimal". For this checkpoint,
    the loop would have to measure the FLOPs and bytes of the blocks for each micro-batch.
    """

    name = "torch"
    title = text("plain PyTorch")
    precisions = ("bf16",)
    only: Mapping[str, Collection[Any]] = MappingProxyType(
        {
            "precision": ("fp32", "bf16", "bf16-only", None),
            "checkpoint": ("none", "selective", "layers", "segments"),
            "ranks": (1,),
            "shard": (None,),
        }
    )
    alternatives: Mapping[str, str] = MappingProxyType(
        {
            "precision": "framework='trainer' supports this value",
            "attention": "course_lib.budget.train_step supports this value",
            "checkpoint": "course_lib.budget.train_step supports this value",
            "ranks": "framework='fsdp2' can run several ranks",
            "shard": "framework='fsdp2' can shard a model",
        }
    )

    def script(self, recipe: Recipe, workload: Workload) -> str:
        lines = checked_lines(self, recipe, workload)
        return lines.script(
            ['device = "cuda" if torch.cuda.is_available() else "cpu"'],
            [f"model = make_model().to({_to_arguments(lines)})"],
            setting_lines(lines),
            [f"batch = {lines.to_device('make_batch()', _input_dtype(recipe))}"],
            checkpoint_lines(lines),
            _optimizer(lines),
            _accumulation_loop(lines) if _accumulates(recipe) else _plain_loop(lines),
        )


def _input_dtype(recipe: Recipe) -> torch.dtype | None:
    """Return the dtype to which the script converts floating-point inputs; None leaves them."""
    return torch.bfloat16 if recipe.precision in ("bf16", "bf16-only") else None


def _to_arguments(lines: Lines) -> str:
    """Return, as Python source, the arguments of `model.to`: a device, and a dtype if needed."""
    if lines.recipe.precision is None:
        return "device"
    wanted = lines.recipe.dtype
    tensors = (*lines.model.parameters(), *lines.model.buffers())
    same = all(tensor.dtype == wanted for tensor in tensors if tensor.is_floating_point())
    return "device" if same else f"device, {wanted}"


# ---- optimizer


def _optimizer(lines: Lines) -> list[str]:
    """Return script lines that create the optimizer."""
    recipe = lines.recipe
    row = OPTIMIZERS[recipe.optimizer]
    module, name = CLASSES[recipe.optimizer]
    parameters = lines.trained_parameters()
    before: list[str] = []
    options = [_keywords({"lr": LR, **row.updates[recipe.update], **row.settings})]
    if row.select_parameters is not None:
        lines.use(module, name, row.select_parameters.__name__)
        chosen = f"[p for p in {parameters} if (p in matrices) != rest]"
        before = [
            f"matrices = {row.select_parameters.__name__}(model)",
            f'groups = [{{"params": {chosen}, "rest": rest}} for rest in (False, True)]',
        ]
        parameters = "groups"
        rest = f"torch.optim.{CLASSES[row.rest][1]}"
        if settings_of_rest := OPTIMIZERS[row.rest].updates[recipe.update]:
            lines.use("functools", "partial")
            rest = f"partial({rest}, {_keywords(settings_of_rest)})"
        options = [f"lr={LR}", "first=torch.optim.Muon", f"second={rest}"]
    elif module != "torch.optim":
        lines.use(module, name)
    if module == "torch.optim":
        name = f"torch.optim.{name}"
    if not recipe.uses_offloaded_optimizer:
        return [*before, f"optimizer = {name}({parameters}, {', '.join(options)})"]
    lines.use("course_lib.offload", "OffloadedOptimizer")
    options = [f"fraction={recipe.offload_optimizer}", *options]
    if recipe.page_bytes != PAGE_BYTES:
        options.append(f"page_bytes={recipe.page_bytes}")
    return [*before, f"optimizer = OffloadedOptimizer({parameters}, {name}, {', '.join(options)})"]


def _keywords(settings: Mapping[str, Any]) -> str:
    """Return settings as keyword arguments, as Python source."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


# ---- training


def _accumulates(recipe: Recipe) -> bool:
    """Return whether the script's training loop must call an `AccumulatedStep`."""
    # In a plain loop, the variable `loss` stays alive while the optimizer updates the parameters.
    # With segments, the autograd graph of the loss would keep the constant arguments of the blocks
    # in memory.
    scheduled = recipe.checkpoint == "segments"
    accumulated = recipe.micro_batches > 1 or recipe.accumulate is not None
    return accumulated or scheduled or recipe.in_backward


def _plain_loop(lines: Lines) -> list[str]:
    """Return the lines of a training loop with a single micro-batch and no `AccumulatedStep`."""
    defined: list[str] = []
    prepared, expression = loss_code(lines)
    if prepared:  # put into a function, whose local tensors are released when it returns
        defined, name = loss_function_code(lines, parts=1)
        expression = f"{name}(model, batch)"
    result, mean, shown = "loss, weight", "(loss / weight)", "(loss / weight)"
    if loss_is_mean(lines):
        result, mean, shown = "loss", "loss", "loss"
    forward = [f"{result} = {expression}"]
    around = loss_contexts(lines)
    if around and not prepared:
        forward = [f"with {', '.join(around)}:", *(f"    {line}" for line in forward)]
    inside = [*forward, f"{mean}.backward()", "optimizer.step()", "optimizer.zero_grad()"]
    inside.append(f'print(f"step {{step}}: loss {{{shown}.item():.4f}}")')
    if any(True for _ in quantization_state(lines.model)):
        # The autograd graph of bitsandbytes' 8-bit layers keeps tensors after backward. Deleting
        # the loss releases the graph.
        inside.append("del loss")
    return [*defined, "for step in range(2):", *(f"    {line}" for line in inside)]


def _accumulation_loop(lines: Lines) -> list[str]:
    """Return the lines of a training loop that calls an `AccumulatedStep`."""
    lines.use("course_lib.accumulation", "AccumulatedStep")
    recipe, workload = lines.recipe, lines.workload
    if recipe.micro_batches == 1:
        parts = "[batch]"
    elif workload.split is not None:
        parts = f"make_model.split(batch, {recipe.micro_batches})"
    else:
        lines.use("course_lib.accumulation", "split")
        parts = f"split(batch, {math.ceil(workload.samples / recipe.micro_batches)})"
    options = "" if recipe.accumulate is None else f', accumulate="{recipe.accumulate}"'
    options += ", in_backward=True" if recipe.in_backward else ""
    defined, name = loss_function_code(lines, parts=recipe.micro_batches)
    return [
        *defined,
        f"train_step = AccumulatedStep(model, optimizer, {name}{options})",
        "for step in range(2):",
        f'    print(f"step {{step}}: loss {{train_step({parts}).loss:.4f}}")',
    ]
