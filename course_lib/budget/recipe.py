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

    The default settings use no technique. A step with these settings is called the baseline.

    A *block* is a repeated layer of the model. A *chain* is a sequence of functions, each of which
    takes the output of the previous one. The *lower tier* is the place of offloaded tensors: host
    memory for a model on a GPU, and a file for a model on a CPU.

    Attributes:
        precision: Dtypes of the step. "fp32" uses float32 throughout. "bf16" has parameters,
            gradients and activations in bfloat16, and fp32 master weights. "bf16-only" has
            parameters, gradients and optimizer state in bfloat16, without master weights.
            "autocast" has parameters, gradients and optimizer state in float32, except that a model
            with any frozen parameter is not converted. It runs `model.forward` under
            `torch.autocast` in bfloat16 and converts the output to float32, as Hugging Face's
            Trainer does with `bf16=True`. None keeps the dtypes of the model. With None, master
            weights exist only if `offload_optimizer` is above 0.
        optimizer: "adam" (AdamW), "sgd", "momentum" (SGD with momentum 0.9), "adafactor", "lion",
            "adam8bit" or "muon". An estimate computes the state of "adam8bit" by a formula; a real
            step requires bitsandbytes. With "muon", Muon updates the matrices of the model's
            blocks, and AdamW all other parameters (see `optimizers.matrices_of_blocks`). A step
            with several optimizers, as in a GAN, cannot be written as a recipe. To measure such a
            step, use `MemoryMeter(model, [optimizer_1, optimizer_2])`.
        update: Variant of the optimizer update. "loop" updates one parameter after the other.
            "foreach" updates all parameters at once, with temporary tensors as large as all
            parameters together. "fused" updates all parameters in one operator. None is PyTorch's
            own choice: "loop" on a CPU and, for most optimizers, "foreach" on CUDA.
            `course_lib.budget.optimizers.OPTIMIZERS` lists the variants of each optimizer.
        offload_optimizer: Fraction of the optimizer state, including master weights, that is stored
            in the lower tier; from 0 to 1.
        attention: Implementation of attention. "flash" saves a single number per query and head
            instead of the attention probabilities. It works in models that are built from
            `course_lib.models.Attention`, and in models that call `F.scaled_dot_product_attention`
            without masks or dropout. "standard" saves the attention probabilities in models that
            are built from `course_lib.models.Attention`, and leaves other models unchanged. "eager"
            and "sdpa" select an implementation of a Hugging Face model, by its method
            `set_attn_implementation`. None leaves every model unchanged.
        checkpoint: Activations that are saved for backward. All other activations are recomputed.
            "none" saves all activations. "layers" saves the input of every block. "selective" saves
            the outputs of the matrix products in every block. "segments" saves the input of every
            segment (several consecutive blocks). "optimal" chooses the saved activations so that
            the step is as fast as it can be within `schedule_bytes`. "segments" and "optimal" run
            the chain that the model's method `stages` returns (see
            `course_lib.models.Decoder.stages`). If the model has no such method, if `blocks` is
            given, or if the precision is "autocast", the blocks themselves must form a chain.
        blocks: Names of the blocks to checkpoint, as a tuple of names or as a single name. A name
            may contain wildcards, as in "model.layers.*". None selects the blocks of all lists of
            blocks in the model (see `course_lib.checkpoint.checkpoint_blocks`), for example those
            of an encoder and of a decoder. If the blocks of all lists do not form one chain,
            "segments" and "optimal" need the names of the blocks of one list.
        first_blocks: Number of blocks to checkpoint, counted from the first block of the model.
            None checkpoints all blocks.
        segments: Number of segments, only with checkpoint="segments". The last segment is not
            recomputed.
        schedule_bytes: Limit in bytes for the activations of one micro-batch, only with
            checkpoint="optimal". If the chain consists of blocks, activations outside of the blocks
            are not counted.
        offload_activations: Whether the tensors saved for backward are moved to the lower tier.
            Cannot be combined with checkpoint="selective" or "optimal".
        min_bytes: Size in bytes of the smallest storage that `offload_activations` offloads.
        prefetch: Number of storages of offloaded activations that backward fetches ahead. None
            stands for 1 on a CPU and 2 on CUDA. In an estimate, None stands for 1 with the tier
            "file", and 2 with the tier "host".
        in_flight: Largest number of copies of activations to the lower tier that run at once. None
            stands for 1 or 2, by the same rule as in `prefetch`. A larger number hides longer
            copies, but needs more memory.
        page_bytes: Size of a page in bytes. Optimizer state in a file, including master weights, is
            updated page by page, and three pages are in memory at once. If the state of one
            parameter is larger than a page, this state is updated as one page. For master weights
            on the device, the gradients are converted to fp32 in parts of this size.
        head_chunk: Number of tokens per chunk in which the output head and the loss are computed.
            None computes them for all tokens at once.
        in_backward: Whether the optimizer updates each parameter as soon as its gradient is
            complete, and then releases the gradient. Requires micro_batches=1.
        accumulate: "fp32" accumulates the gradients of 16-bit parameters in fp32, with 4 bytes per
            parameter instead of 2. None accumulates them in the dtype of the parameters.
        micro_batches: Number of micro-batches into which the batch is split. All micro-batches have
            the same size, except that the last one may be smaller. With several ranks, each rank
            splits its share of the batch.
        ranks: Number of devices that share the batch. With several ranks, an estimate is for the
            rank that needs the most memory, `python -m course_lib.distributed` runs the step, and
            `update` is always "fused".
        shard: Tensors that are sharded across the ranks. "ddp" shards no tensors. "zero1" shards
            the optimizer state, "zero2" also the gradients, and "zero3" also the parameters (see
            `course_lib.budget.traces.rank_trace`). With one rank, `shard` must be None. With
            several ranks, None makes `fit` try all values, and is an error in `estimate`.

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
            # A recipe must be hashable, and a list is not hashable.
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
        """Return the pair (`prefetch`, `in_flight`), in which each None is replaced by a number.

        Args:
            tier: Lower tier, where offloaded tensors are stored: "file", or "host" for host memory.
                None is replaced by 1 for "file" and by 2 for "host".
        """
        own = Cuda.ahead if tier == "host" else Device.ahead
        return (
            own if self.prefetch is None else self.prefetch,
            own if self.in_flight is None else self.in_flight,
        )

    def for_tier(self, tier: str) -> Recipe:
        """Return the recipe with `prefetch` and `in_flight` set to numbers if they are None.

        The numbers are those that the method `copies` returns. A recipe without offloaded
        activations is returned unchanged.

        Args:
            tier: Lower tier, where offloaded tensors are stored: "file", or "host" for host memory.
        """
        prefetch, in_flight = self.copies(tier)
        return (
            replace(self, prefetch=prefetch, in_flight=in_flight)
            if self.offload_activations
            else self
        )

    @property
    def uses_offloaded_optimizer(self) -> bool:
        """Whether the step of this recipe uses the class `OffloadedOptimizer`.

        This class offloads optimizer state. It also keeps master weights, offloaded or not. The
        value is True if `offload_optimizer` is above 0, or if the precision is "bf16", which has
        master weights.
        """
        return self.precision == "bf16" or self.offload_optimizer > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's parameters; PyTorch's default dtype if `precision` is None."""
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
        """Return Python code that shards a model with PyTorch's FSDP2, as set in the field `shard`.

        A comment at the end lists the fields of the recipe that the code does not implement.

        Args:
            blocks: Names of the blocks (the repeated layers of the model), as in
                `model.named_modules()`. The code shards each block separately.

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
        """Return the fields that differ from their defaults, as a dict from name to value."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }


def technique_labels(recipe: Recipe) -> list[str]:
    """Return labels of the techniques that a recipe uses, such as "flash" and "4 micro-batches"."""
    return [word for technique in TECHNIQUES for word in technique.labels(recipe)]
