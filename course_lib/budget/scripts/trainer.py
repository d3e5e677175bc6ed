"""Scripts for Hugging Face's Trainer, and the differences between its step and `train_step`.

The Trainer trains models of transformers, also with adapters of peft. Estimates for the Trainer
include these properties of its step (transformers 5.23):

- The optimizer has two parameter groups. The second group has all biases, and the norms' weights.
- Adafactor is the class of transformers. Lion keeps fp32 state for weights of any dtype. 8-bit
  AdamW keeps fp32 state for embeddings.
- With checkpoints, the output of the embedding requires a gradient even if the embedding is frozen,
  so backward runs through all blocks.
- The gradients are clipped to the norm 1, unless `max_grad_norm` has another value.

Three kinds of memory are not included in the estimates: the batch, a few numbers for the log, and
two tables of bitsandbytes (2,048 bytes) if no optimizer state is in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from course_lib._batches import samples_in
from course_lib._check import any_of, describe
from course_lib._hugging_face_losses import has_method
from course_lib.budget.frameworks import OPTIMIZER_ARGUMENTS, trainer_lines
from course_lib.budget.optimizers import Adam8bit, class_and_settings
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import model_of
from course_lib.budget.techniques.precision import sets_parameter_dtype
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import text
from course_lib.symbolic import symbolic

from .framework import Framework
from .settings import cache_lines

if TYPE_CHECKING:
    from course_lib.workload import Source, Workload

# Maps a field of `Recipe` to the end of the error message that rejects a value of this field. The
# end of the message names a framework that can run the value.
_OTHERS = {
    "blocks": "framework='torch' can checkpoint some of the blocks",
    "ranks": "framework='fsdp2' can run several ranks",
    "shard": "framework='fsdp2' can shard a model",
}


class Trainer(Framework):
    """Framework that trains a model with Hugging Face's Trainer in one process.

    Recipes with offloaded activations are rejected, although the Trainer can run them. The reason
    is that the Trainer's step waits for each copy, and this library has no estimate for such a
    step.
    """

    name = "trainer"
    title = text("Hugging Face's Trainer")
    precisions = ("autocast", "bf16-only")
    only: Mapping[str, Collection[Any]] = MappingProxyType(
        {
            "precision": ("fp32", "autocast", "bf16-only", None),
            "optimizer": tuple(name for name in OPTIMIZER_ARGUMENTS if name != "muon"),
            "update": (None, "fused"),
            "offload_optimizer": (0.0,),
            "attention": ("standard", "sdpa", "eager", None),
            "checkpoint": ("none", "layers"),
            "blocks": (None,),
            "first_blocks": (None,),
            "offload_activations": (False,),
            "head_chunk": (None,),
            "in_backward": (False,),
            "accumulate": (None,),
            "ranks": (1,),
            "shard": (None,),
        }
    )
    equal_micro_batches = True
    has_own_step = True
    max_norm = 1.0

    def conflict(self, recipe: Recipe) -> str | None:
        for name, allowed in self.only.items():
            if (value := getattr(recipe, name)) not in allowed:
                other = _OTHERS.get(name) or _other_for(name, value)
                return (
                    f"{name} must be {any_of(map(repr, allowed))} when framework is 'trainer', got"
                    f" {value!r}; {other}"
                )
        if recipe.update == "fused" and recipe.optimizer != "adam":
            return (
                f"update must be None for {recipe.optimizer!r} when framework is 'trainer', got"
                " 'fused'; framework='torch' supports this value"
            )
        return None

    def unsupported_reason(self, workload: Workload) -> str | None:
        from course_lib.workload import is_of_transformers

        model = _symbolic_model(workload)
        with symbolic():
            batch = workload.make_batch()
        if not is_of_transformers(model):
            return (
                "model must be a model of transformers when framework is 'trainer', got"
                f" {describe(model)}; framework='torch' (--for torch in the command) can train it"
            )
        if workload.loss_sum is not None or has_method(model, "loss_sum"):
            return (
                "when framework is 'trainer', loss_sum must be None and the model must have no"
                " method loss_sum, got one of them. The Trainer uses the loss that the model"
                " returns; to use a loss_sum, choose framework='torch'"
            )
        if workload.split is not None:
            return (
                "split must be None when framework is 'trainer', because the Trainer splits batches"
                " itself; to use a split function, choose framework='torch'"
            )
        others = [
            name
            for name, value in (batch.items() if isinstance(batch, Mapping) else ())
            if not isinstance(value, Tensor)
        ]
        if not isinstance(batch, Mapping) or others or samples_in(batch) is None:
            of = f" with {describe(batch[others[0]])} as {others[0]!r}" if others else ""
            return (
                "make_batch must return a dict of tensors with the samples in dimension 0 when"
                f" framework is 'trainer', got {describe(batch)}{of}"
            )
        return None

    def script(self, recipe: Recipe, workload: Workload) -> str:
        if workload.source is None:
            raise ValueError(
                "to write a script, workload.source must be a Source with code that creates the"
                " model and the batch, got None"
            )
        if problem := self.conflict(recipe):
            raise ValueError(problem)
        arguments = _training_arguments(recipe, workload.samples)
        lines = [
            *_imports(workload.source, arguments),
            "",
            *workload.source.lines,
            *([""] if workload.source.lines else []),
            f"model, batch = make_model(){_cast(recipe, workload)}, make_batch()",
        ]
        with symbolic():
            cache = cache_lines(workload.make_model())
        if len(cache) > 1:  # the Trainer itself turns off only the cache of `model.config`
            lines += cache
        if recipe.attention in ("sdpa", "eager"):
            lines.append(f'model.set_attn_implementation("{recipe.attention}")')
        lines += [
            "rows = [dict(zip(batch, row)) for row in zip(*batch.values())]  # your dataset",
            *arguments,
            "trainer = Trainer(model=model, args=arguments, train_dataset=rows)",
            "trainer.train()",
        ]
        return "\n".join(lines)

    # ---- The Trainer's own step

    def for_model(self, model: nn.Module) -> Framework:
        found = copy(self)
        if not _checkpoints_all_blocks(model):
            found.only = MappingProxyType({**self.only, "checkpoint": ("none",)})
        return found

    def model_maker(self, make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        if isinstance(make_model, nn.Module) or not callable(make_model):
            return make_model  # `fit` rejects it

        @wraps(make_model)
        def make_for_trainer() -> nn.Module:
            model = make_model()
            if isinstance(model, nn.Module):
                model._training_code = self
            return model

        return make_for_trainer

    def optimizer(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], recipe: Recipe, lr: float
    ) -> torch.optim.Optimizer:
        base, settings = class_and_settings(recipe.optimizer, recipe.update)
        if recipe.optimizer == "adafactor":
            from transformers.optimization import Adafactor

            base, settings = Adafactor, {"scale_parameter": False, "relative_step": False}
        elif recipe.optimizer == "lion":
            base, settings = _Lion, {}
        groups = _groups(model, parameters)
        if base is Adam8bit:
            groups = [part for group in groups for part in _without_embeddings(model, group)]
        return base([group for group in groups if group["params"]], lr=lr, **settings)

    @contextmanager
    def around_step(self, model: nn.Module, recipe: Recipe) -> Iterator[None]:
        own: Any = _own_model(model)
        if recipe.checkpoint == "none" or own.main_input_name != "input_ids":
            yield
            return
        own.enable_input_require_grads()
        try:
            yield
        finally:
            own.disable_input_require_grads()


def _symbolic_model(workload: Workload) -> nn.Module:
    """Return the model of a workload in its own dtypes, with symbolic tensors (without memory)."""
    with symbolic():
        return model_of(workload.make_model, Recipe(precision=None))


def _cast(recipe: Recipe, workload: Workload) -> str:
    """Return, as Python source, the call that converts the model's dtype; empty if not needed."""
    if not sets_parameter_dtype(recipe, _symbolic_model(workload)):
        return ""
    return ".bfloat16()" if recipe.dtype == torch.bfloat16 else ".float()"


def _other_for(name: str, value: Any) -> str:
    """Return the end of an error message, which names code that can run a rejected value."""
    if (name, value) == ("checkpoint", "optimal"):
        return "course_lib.budget.train_step supports this value"
    return "framework='torch' supports this value"


def _training_arguments(recipe: Recipe, samples: int | None) -> list[str]:
    """Return script lines that create the `TrainingArguments`."""
    arguments = trainer_lines(recipe, samples).arguments
    names = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    lines = [
        "arguments = TrainingArguments(",
        f'    output_dir="out", report_to="none", {_keywords(arguments, ["optim", "optim_args"])},',
        f"    {_keywords(arguments, names)},",
    ]
    if "bf16" in arguments:
        # On a CPU, the Trainer rejects bf16=True without use_cpu=True.
        lines.append("    bf16=True, use_cpu=not torch.accelerator.is_available(),")
    if "activation_checkpointing" in arguments:
        older = "gradient_checkpointing before transformers 5.23"
        lines.append(f"    activation_checkpointing=True,  # {older}")
    return [*lines, ")"]


def _keywords(arguments: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return, as Python source, the keyword arguments in `names` that `arguments` contains."""
    given = (f"{name}={arguments[name]!r}" for name in names if name in arguments)
    return ", ".join(given).replace("'", '"')


def _imports(source: Source, arguments: Sequence[str]) -> list[str]:
    """Return the lines with all imports of the script.

    Args:
        source: Code that makes the model and the batch, with the imports of this code.
        arguments: Script lines that create the `TrainingArguments`.
    """
    own, first = "Trainer, TrainingArguments", "from transformers import "
    lines = [f"{line}, {own}" if line.startswith(first) else line for line in source.imports]
    if lines == [*source.imports]:
        lines.append(f"{first}{own}")
    if "import torch" not in lines and any("torch." in line for line in arguments):
        lines.insert(0, "import torch")
    return lines


def _own_model(model: nn.Module) -> nn.Module:
    """Return the model of transformers that a wrapper of peft contains, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _checkpoints_all_blocks(model: nn.Module) -> bool:
    """Return whether the Trainer checkpoints the same blocks as a recipe with blocks=None."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    own: Any = _own_model(model)
    if not own.supports_gradient_checkpointing:
        return False
    layers = {
        name for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)
    }
    try:
        return layers == set(names_of(model, None))
    except ValueError:  # raised if the model has no list of blocks
        return False


# ---- Optimizers


def _groups(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the Trainer's parameter groups: parameters with weight decay, and all others."""
    from transformers import Trainer as HuggingFaceTrainer

    # The method does not use `self`, so no Trainer is created.
    names = set(HuggingFaceTrainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    decayed = {p for name, p in model.named_parameters() if name in names}
    first, rest = ([p for p in parameters if (p in decayed) is each] for each in (True, False))
    return [{"params": first}, {"params": rest}]


def _without_embeddings(model: nn.Module, group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a parameter group into embeddings, whose state is in fp32, and all other parameters."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    first, rest = ([p for p in group["params"] if (p in tables) is each] for each in (True, False))
    return [{"params": first, "optim_bits": 32}, {"params": rest}]


class _Lion(torch.optim.Optimizer):
    """Optimizer that allocates the state of bitsandbytes' 32-bit Lion, to estimate its memory.

    The optimizer changes no parameter. It allocates no temporary tensors, because bitsandbytes runs
    the update as one operator.
    """

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)
