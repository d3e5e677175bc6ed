"""Recipe: the memory-saving techniques of a training step, as an immutable value.

Creating a `Recipe` raises an error if a field is invalid or if fields cannot be combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from course_lib.labels import join_labels
from course_lib.offload.device import Cuda, Device
from course_lib.offload.optimizer import PAGE_BYTES

from .frameworks import TrainerLines, fsdp_lines, trainer_lines
from .techniques import TECHNIQUES
from .techniques.offload_activations import MIN_BYTES
from .techniques.precision import PRECISIONS


@dataclass(frozen=True, repr=False)
class Recipe:
    """Settings of all memory-saving techniques of a training step.

    The default is the baseline, which uses none of them.

    Attributes:
        precision: "fp32"; or "bf16" for parameters, gradients and activations in bfloat16 with fp32
            master weights. "autocast" has parameters, gradients and optimizer state in fp32, and
            runs `model.forward` under `torch.autocast` in bfloat16 and returns its output in fp32,
            as Hugging Face's Trainer does with `bf16=True`. A model with frozen parameters keeps
            its dtypes under autocast. "bf16-only" has parameters, gradients and optimizer state in
            bfloat16, without master weights. None keeps the dtypes of the model, without master
            weights unless the optimizer is offloaded.
        optimizer: "adam" (AdamW), "sgd", "momentum" (SGD with momentum 0.9), "adafactor", "lion",
            "adam8bit" or "muon". The state of "adam8bit" is estimated by a formula, and its real
            step requires bitsandbytes. "muon" updates the matrices of the model's blocks, and AdamW
            updates all other parameters (see `optimizers.matrices_of_blocks`). In all other cases
            one optimizer updates all parameters. A step with several optimizers, as in a GAN,
            cannot be written as a recipe, but `MemoryMeter(model, [a, b])` measures it.
        update: "loop" updates one parameter after the other. "foreach" updates all at once, with
            temporaries as large as all parameters together. "fused" updates all in one operator.
            None is PyTorch's own choice: "loop" on a CPU and, for most optimizers, "foreach" on
            CUDA. `course_lib.budget.optimizers.OPTIMIZERS` lists the variants of each optimizer.
        offload_optimizer: Fraction of the optimizer state, master weights included, that is kept in
            the lower tier.
        attention: "flash" saves one number per row of scores. It works in any model that calls
            `F.scaled_dot_product_attention` without masks or dropout, or that is built from
            `course_lib.models.Attention`. "standard" saves the softmax of the scores in models that
            are built from `course_lib.models.Attention`, and leaves all other models unchanged.
            None leaves all models unchanged. "eager" and "sdpa" call the method
            `set_attn_implementation` of Hugging Face models.
        checkpoint: "none"; "layers" saves the input of every block; "selective" saves the matrix
            products of every block; "segments" saves the input of every segment, a run of
            consecutive blocks; "optimal" saves what the fastest schedule within `schedule_bytes`
            keeps. "segments" and "optimal" run the model's own chain if it defines one (see
            `course_lib.models.Decoder.stages`) and the precision is not "autocast". Otherwise its
            blocks must form a chain, in which the input of each block is the output of the previous
            one.
        blocks: Names of the blocks to checkpoint: one name with wildcards, such as
            "model.layers.*", or several. None selects all lists of blocks (see
            `course_lib.checkpoint.checkpoint_blocks`), for example both an encoder and a decoder.
            If these do not form one chain, "segments" and "optimal" need the names of one list.
        first_blocks: Number of blocks to checkpoint, counted through all lists of blocks from the
            first block on. None checkpoints all blocks.
        segments: Number of segments; only with checkpoint="segments". The last segment is not
            recomputed.
        schedule_bytes: Limit in bytes for the activations of one micro-batch; only with
            checkpoint="optimal". In a model without a chain of its own, only the activations of
            the blocks count.
        offload_activations: Whether the tensors saved for backward are moved to the lower tier.
            Cannot be combined with checkpoint="selective" or "optimal".
        min_bytes: Size in bytes of the smallest storage that `offload_activations` offloads.
        prefetch: Number of storages of offloaded activations that backward fetches ahead. None uses
            the default of the device, which is 1 on a CPU and 2 on CUDA. An estimate uses the
            default of the tier, which is 1 for "file" and 2 for "host".
        in_flight: Number of copies of activations to the lower tier that may be in flight at once.
            None uses the same defaults as `prefetch`. More copies in flight hide longer copies and
            need more memory.
        page_bytes: Size in bytes of a page. Optimizer state in a file, master weights included, is
            updated one page at a time, and the step holds three pages in memory. A parameter with
            more state is a page by itself. Master weights that stay on the device need their
            gradients in fp32, and these are also made in parts of this size.
        head_chunk: Number of tokens per chunk of the loss head. None runs it on all tokens at once.
        in_backward: Whether the optimizer updates each parameter as soon as its gradient is
            complete and then releases the gradient. Requires a single micro-batch.
        accumulate: "fp32" accumulates the gradients of 16-bit parameters in fp32, with 4 bytes per
            parameter instead of 2. None accumulates them in the dtype of the parameters.
        micro_batches: Number of micro-batches into which the batch is split. All have the same size
            except the last one, unless a function `split` makes them. With several ranks, each rank
            splits its share of the batch.
        ranks: Number of devices that share the batch. A recipe with several ranks is estimated for
            the rank that needs the most memory, and run by `python -m course_lib.distributed`. Its
            `update` is always "fused".
        shard: Tensors that are sharded across the ranks: none with "ddp", the optimizer state with
            "zero1", the gradients as well with "zero2", and the parameters as well with "zero3"
            (see `course_lib.budget.traces.rank_trace`). None leaves the choice to `fit`.

    Raises:
        TypeError, ValueError: A field has the wrong type, is out of its range, or cannot be
            combined with another field.
    """

    precision: str | None = "fp32"
    optimizer: str = "adam"
    update: str | None = None
    offload_optimizer: float = 0.0
    attention: str | None = "standard"
    checkpoint: str = "none"
    blocks: str | tuple[str, ...] | None = None
    first_blocks: int | None = None
    segments: int | None = None
    schedule_bytes: int | None = None
    offload_activations: bool = False
    min_bytes: int = MIN_BYTES
    prefetch: int | None = None
    in_flight: int | None = None
    page_bytes: int = PAGE_BYTES
    head_chunk: int | None = None
    in_backward: bool = False
    accumulate: str | None = None
    micro_batches: int = 1
    ranks: int = 1
    shard: str | None = None

    def __post_init__(self):
        if isinstance(self.blocks, list):
            # A tuple is hashable, so the recipe is too.
            object.__setattr__(self, "blocks", tuple(self.blocks))
        for name, check in (
            (name, check) for each in TECHNIQUES for name, check in each.fields.items()
        ):
            check(name, getattr(self, name))
        if self.ranks > 1 and self.update in (None, "loop"):
            object.__setattr__(self, "update", "fused")
        for technique in TECHNIQUES:
            if problem := technique.conflict(self):
                raise ValueError(problem)
        self._reject_several_hooks()

    def _reject_several_hooks(self) -> None:
        """Raise ValueError if several techniques put saved-tensor hooks around the forward pass.

        PyTorch would run only the innermost hooks.
        """
        changed = self.changed_fields()
        hooked = [t.field for t in TECHNIQUES if t.hooks_saved_tensors and t.field in changed]
        if len(hooked) > 1:
            raise ValueError(
                f"{hooked[0]} cannot be combined with {' or '.join(hooked[1:])}: each of them puts"
                " saved-tensor hooks around the forward pass, and PyTorch runs only the innermost"
                " hooks. Choose one of them"
            )

    def copies(self, tier: str) -> tuple[int, int]:
        """Return `prefetch` and `in_flight`, with None replaced by the default of the tier."""
        own = Cuda.ahead if tier == "host" else Device.ahead
        return (
            own if self.prefetch is None else self.prefetch,
            own if self.in_flight is None else self.in_flight,
        )

    def for_tier(self, tier: str) -> Recipe:
        """Return the recipe with `prefetch` and `in_flight` set to the result of `copies`.

        A recipe without offloaded activations is returned unchanged.
        """
        prefetch, in_flight = self.copies(tier)
        return (
            replace(self, prefetch=prefetch, in_flight=in_flight)
            if self.offload_activations
            else self
        )

    @property
    def uses_offloaded_optimizer(self) -> bool:
        """Whether the optimizer is an `OffloadedOptimizer`.

        This is the case if some of its state is offloaded or if it has master weights.
        """
        return self.precision == "bf16" or self.offload_optimizer > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model; PyTorch's default dtype if `precision` is None."""
        return PRECISIONS.get(self.precision, torch.get_default_dtype())

    def as_training_arguments(self, samples: int | None) -> TrainerLines:
        """Return this recipe as arguments of Hugging Face's `TrainingArguments`.

        The result also lists the differences between the Trainer's step and the recipe's step.

        Example:
            >>> Recipe(checkpoint="layers", micro_batches=4).as_training_arguments(samples=8)
            TrainingArguments(
                output_dir="out",
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4,
                optim="adamw_torch",
                activation_checkpointing=True,
            )

        Args:
            samples: Number of samples in the batch; None if it is not known.
        """
        return trainer_lines(self, samples)

    def as_fsdp2(self, blocks: Sequence[str]) -> str:
        """Return lines of code that shard a model with PyTorch's FSDP2 as this recipe does.

        Args:
            blocks: Names of the blocks, as in `model.named_modules()`.

        Raises:
            ValueError: `shard` is neither "zero2" nor "zero3".
        """
        return fsdp_lines(self, blocks)

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self.changed_fields().items())
        return f"Recipe({', '.join(fields)})"

    def __str__(self) -> str:
        """Return a label such as "bf16, adam, flash, checkpoint layers, 4 micro-batches"."""
        return join_labels(technique_labels(self))

    def changed_fields(self) -> dict[str, object]:
        """Return the fields that differ from the baseline, as a dict from name to value."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }


def technique_labels(recipe: Recipe) -> list[str]:
    """Return the labels of the techniques that the recipe uses."""
    return [word for technique in TECHNIQUES for word in technique.labels(recipe)]
