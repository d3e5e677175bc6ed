"""Write the techniques of a recipe as code for Hugging Face's Trainer and for PyTorch's FSDP2."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from course_lib._check import whole
from course_lib.labels import markup, say, text, verbatim

if TYPE_CHECKING:
    # The module `recipe` imports this module, so at run time this module cannot import `recipe`.
    from .recipe import Recipe

#: Maps names in `OPTIMIZERS` to arguments of transformers' `TrainingArguments`.
OPTIMIZER_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "adam": {"optim": "adamw_torch"},
    "sgd": {"optim": "sgd"},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adafactor": {"optim": "adafactor"},
    "lion": {"optim": "lion_32bit"},
    "adam8bit": {"optim": "adamw_bnb_8bit"},
    "muon": {"optim": "adamw_torch"},  # the Trainer lacks Muon
}
_IN_BITSANDBYTES = ("lion", "adam8bit")
_OFFLOAD_OPTIONS = {"min_bytes", "prefetch", "in_flight"}
_SET_BY_FSDP_LINES = ("precision", "ranks", "shard", "blocks")


@dataclass(frozen=True, repr=False)
class TrainerLines:
    """A recipe as arguments of Hugging Face's `TrainingArguments`, with a list of differences.

    A recipe is a set of memory-saving techniques for a training step, and the arguments cannot
    express all of these techniques. `str()` of this object is a call of `TrainingArguments` as
    code, with the differences as comments.

    Attributes:
        arguments: Mapping from the name of each argument to its value. The argument `output_dir`,
            which `TrainingArguments` also needs, is not included.
        differences: Sentences, each on one difference between the recipe's step and the Trainer's
            step with these arguments.
        recipe: Recipe that describes the Trainer's step with these arguments, for an estimate of
            the step's memory. Techniques that the Trainer does not support are left out.
    """

    arguments: Mapping[str, Any]
    differences: Sequence[str]
    recipe: Recipe

    def _call(self) -> str:
        """Return the call of `TrainingArguments` as code."""
        lines = [f"    {name}={_as_code(value)}," for name, value in self.arguments.items()]
        return "\n".join(["TrainingArguments(", '    output_dir="out",', *lines, ")"])

    def __str__(self) -> str:
        return "\n".join([self._call(), *(f"# {say(each)}" for each in self.differences)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{markup(each)}</li>" for each in self.differences)
        return f"<pre><code>{html.escape(self._call())}</code></pre>" + (
            f"<ul>{items}</ul>" if items else ""
        )


def _as_code(value: object) -> str:
    """Return a value as Python code, with strings in double quotes."""
    return repr(value).replace("'", '"')


def trainer_lines(recipe: Recipe, samples: int | None) -> TrainerLines:
    """Return a recipe as arguments of Hugging Face's `TrainingArguments`.

    The result also lists the differences between the Trainer's step and the recipe's step. The
    names of the arguments are those of transformers 5.23, in which `gradient_checkpointing` is
    called `activation_checkpointing`.

    Args:
        recipe: Memory-saving techniques of the training step.
        samples: Number of samples in the whole batch, over all ranks. If it is None, the argument
            `per_device_train_batch_size` is left out.
    """
    arguments: dict[str, Any] = {}
    samples_per_step = None
    if samples is not None:
        whole("samples", samples, 1)
        micro_batch = -(-samples // (recipe.ranks * recipe.micro_batches))
        arguments["per_device_train_batch_size"] = micro_batch
        samples_per_step = micro_batch * recipe.ranks * recipe.micro_batches
    arguments |= {
        "gradient_accumulation_steps": recipe.micro_batches,
        **OPTIMIZER_ARGUMENTS[recipe.optimizer],
    }
    if _sets_update(recipe):
        arguments["optim"] = "adamw_torch_fused"
    if recipe.precision in ("bf16", "autocast"):
        arguments["bf16"] = True
    arguments |= _fsdp_arguments(recipe) | (
        {} if _fsdp_arguments(recipe) else _checkpoint_arguments(recipe)
    )
    differences = tuple(_differences(recipe, samples, samples_per_step))
    return TrainerLines(arguments, differences, _as_trainer_runs_it(recipe))


def _sets_update(recipe: Recipe) -> bool:
    """Return whether the Trainer's argument `optim` can select the recipe's variant of the update.

    The variant is `recipe.update`. The argument can select only the fused variant of AdamW.
    """
    return recipe.optimizer == "adam" and recipe.update == "fused"


def _as_trainer_runs_it(recipe: Recipe) -> Recipe:
    """Return a recipe that describes the step that the Trainer runs for a given recipe.

    Techniques that the Trainer does not have are left out or replaced. For example, every kind of
    checkpoint is replaced by checkpoint="layers".
    """
    layers = recipe.checkpoint != "none"
    # A step of several ranks cannot be estimated under autocast.
    autocast = recipe.precision == "bf16" and recipe.ranks == 1
    return replace(
        recipe,
        precision="autocast" if autocast else recipe.precision,
        accumulate=None,
        optimizer="adam" if recipe.optimizer == "muon" else recipe.optimizer,
        update=recipe.update if _sets_update(recipe) else None,
        offload_optimizer=0.0,
        in_backward=False,
        head_chunk=None,
        checkpoint="layers" if layers else "none",
        first_blocks=None,
        segments=None,
        schedule_bytes=None,
        offload_activations=recipe.offload_activations and layers,
        min_bytes=type(recipe).min_bytes,
        prefetch=None,
        in_flight=None,
        shard="ddp" if recipe.shard == "zero1" else recipe.shard,
    )


def _checkpoint_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the Trainer's arguments that checkpoint all blocks.

    The dict is empty if the recipe has checkpoint="none".
    """
    if recipe.checkpoint == "none":
        return {}
    found: dict[str, Any] = {"activation_checkpointing": True}
    if recipe.offload_activations:
        found["activation_checkpointing_kwargs"] = {"offload": True}
    return found


def _fsdp_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the Trainer's arguments that shard the model with FSDP2 and checkpoint its blocks.

    The dict is empty if the recipe shards neither gradients nor parameters.
    """
    if recipe.shard not in ("zero2", "zero3"):
        return {}
    settings = {"reshard_after_forward": recipe.shard == "zero3"}
    if recipe.checkpoint != "none":
        settings["activation_checkpointing"] = True
    return {"fsdp": True, "fsdp_config": settings}


def _differences(
    recipe: Recipe, samples: int | None, samples_per_step: int | None
) -> Iterator[str]:
    """Yield a sentence for each difference between the recipe's step and the Trainer's step.

    Args:
        recipe: Memory-saving techniques of the training step.
        samples: Number of samples in the batch of all ranks; None if it is not known.
        samples_per_step: Number of samples that the Trainer processes per step on all ranks; None
            if it is not known.
    """
    if samples is None:
        yield text(
            "set `per_device_train_batch_size` yourself, because the number of samples in the batch"
            " is not known"
        )
    elif samples_per_step != samples:
        yield text(
            "a step of the Trainer takes {taken} samples instead of {samples}, because all of its"
            " micro-batches have the same size",
            taken=samples_per_step,
            samples=samples,
        )
    if recipe.precision == "bf16":
        yield text(
            "`bf16=True` keeps fp32 weights and makes bf16 copies of them for the step; the recipe"
            " has bf16 weights, and fp32 master weights for the optimizer"
        )
    elif recipe.precision == "bf16-only":
        yield text(
            "the model must be in bf16: {argument}",
            argument=verbatim("from_pretrained(..., dtype=torch.bfloat16)"),
        )
    if recipe.accumulate == "fp32" and recipe.precision != "bf16":
        yield text("the Trainer accumulates gradients in the dtype of the parameters")
    if recipe.update is not None and not _sets_update(recipe):
        yield text("the Trainer leaves the choice between loop, foreach and fused to PyTorch")
    if recipe.optimizer == "muon":
        yield text(
            "the Trainer has no `optim` for Muon: pass `optimizers=(optimizer, None)` with the"
            " optimizer that `build` returns"
        )
    if recipe.optimizer in _IN_BITSANDBYTES:
        yield text("this `optim` needs bitsandbytes and a GPU")
    if recipe.attention in ("flash", "eager", "sdpa"):
        name = "eager" if recipe.attention == "eager" else "sdpa"
        yield text(
            "attention is an argument of the model: {argument}",
            argument=verbatim(f'from_pretrained(..., attn_implementation="{name}")'),
        )
    chosen = recipe.blocks is not None or recipe.first_blocks is not None
    if recipe.checkpoint not in ("none", "layers") or (recipe.checkpoint == "layers" and chosen):
        yield text(
            "the Trainer checkpoints every block, so memory and FLOPs may differ from this recipe's"
        )
    if recipe.offload_activations and recipe.checkpoint == "none":
        yield text(
            "the Trainer offloads activations only together with checkpoints; TRL's `SFTConfig` has"
            " `activation_offloading=True`"
        )
    elif recipe.offload_activations and _OFFLOAD_OPTIONS & recipe.changed_fields().keys():
        yield text("the Trainer's offload has no `min_bytes`, `prefetch` or `in_flight`")
    yield from _differences_of_head_and_optimizer(recipe)


def _differences_of_head_and_optimizer(recipe: Recipe) -> Iterator[str]:
    """Yield the sentences of `_differences` that are about the output head and the optimizer."""
    if recipe.head_chunk is not None:
        yield text(
            "the Trainer computes the loss of all tokens at once, or in parts with"
            " `use_liger_kernel=True`, for models that Liger Kernel supports"
        )
    if recipe.offload_optimizer > 0:
        yield text(
            "the optimizer state stays on the GPU; DeepSpeed moves it to the host, with"
            " `offload_optimizer` in the configuration that `deepspeed=` names"
        )
    if recipe.in_backward:
        yield text(
            "the Trainer updates all parameters after backward, so all gradients are live at once"
        )
    if recipe.shard == "zero1":
        yield text(
            "the Trainer shards the optimizer state alone with DeepSpeed, by `stage: 1` in the"
            " configuration that `deepspeed=` names"
        )


def fsdp_lines(recipe: Recipe, blocks: Sequence[str]) -> str:
    """Return Python code that shards a model with FSDP2, to be pasted into a training script.

    The code expects a variable `model`, and processes that torchrun has started. If the recipe uses
    any checkpoints, the code checkpoints every block. A comment at the end lists the fields of the
    recipe that the code does not implement.

    Args:
        recipe: Memory-saving techniques of the training step. Its `shard` must be "zero2" or
            "zero3".
        blocks: Names of the blocks to shard one by one, as in `model.named_modules()`. Blocks are
            the repeated layers of the model.

    Raises:
        ValueError: `recipe.shard` is neither "zero2" nor "zero3".
    """
    if recipe.shard not in ("zero2", "zero3"):
        raise ValueError(f"shard must be 'zero2' or 'zero3' for FSDP2, got {recipe.shard!r}")
    wrapped = recipe.checkpoint != "none"
    lines = ["from torch.distributed.fsdp import fully_shard"]
    if recipe.precision == "bf16":
        lines = ["import torch", f"{lines[0]}, MixedPrecisionPolicy"]
    if wrapped:
        lines.append(
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import"
            " checkpoint_wrapper"
        )
    options = [f"reshard_after_forward={recipe.shard == 'zero3'}"]
    if recipe.precision == "bf16":
        policy = "MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)"
        options.append(f"mp_policy={policy}")
    lines += ["", f"options = dict({', '.join(options)})"]
    block = "checkpoint_wrapper(block)" if wrapped else "block"
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        lines += [
            f"blocks = model.{parent}" if parent else "blocks = model",
            "for i, block in enumerate(blocks):",
            f"    blocks[i] = fully_shard({block}, **options)",
        ]
    lines.append("fully_shard(model, **options)")
    done = {*_SET_BY_FSDP_LINES, *(["checkpoint"] if recipe.checkpoint == "layers" else [])}
    if left := [
        f"{name}={value!r}" for name, value in recipe.changed_fields().items() if name not in done
    ]:
        fields = verbatim(", ".join(left))
        lines.append(f"# {say(text('not set by these lines: {fields}', fields=fields))}")
    return "\n".join(lines)
