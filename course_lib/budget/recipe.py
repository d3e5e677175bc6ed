"""Recipe: the techniques of a training step, as a value that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from course_lib.labels import listed
from course_lib.offload.device import Cuda, Device
from course_lib.offload.optimizer import PAGE_BYTES

from .techniques import TECHNIQUES
from .techniques.offload_activations import MIN_BYTES
from .techniques.precision import PRECISIONS


@dataclass(frozen=True, repr=False)
class Recipe:
    """All that a training step uses to save memory. The default is the plain step.

    Attributes:
        precision: "fp32"; or "bf16" for parameters, gradients and activations, with fp32 master
            weights; None leaves the model in the dtypes that it has, without master weights unless
            the optimizer is offloaded.
        optimizer: "adam" (AdamW), "sgd", "momentum" (SGD with momentum 0.9) or "adafactor"; or
            "adam8bit", which is estimated by a formula of what its state takes, and run where
            bitsandbytes is installed. One for all parameters: a step with several, as a GAN's, is
            no recipe, but `MemoryMeter(model, [a, b])` counts it.
        update: "loop" updates one parameter after the other; "foreach" all at once, with
            temporaries as large as all of them; "fused" in one operator, which Adafactor has not;
            None as PyTorch does by itself, "loop" on a CPU and "foreach" on CUDA.
        offload_optimizer: the fraction of the optimizer's state, masters included, that lives one
            tier down.
        attention: "flash" saves one number a row of scores, in any model that calls
            `F.scaled_dot_product_attention` without masks or dropout, or is made of
            `course_lib.models.Attention`. "standard" has the latter save the scores' softmax, and
            leaves other models as they are; None leaves all as they are. "eager" and "sdpa" are for
            the switch of Hugging Face models (`set_attn_implementation`).
        checkpoint: "none"; "layers", of every block the input; "selective", of every block its
            matrix products; "segments", of so many runs of blocks the input; "optimal", what the
            fastest schedule keeps. The last two run the model's own chain, if it gives one (see
            `course_lib.models.Decoder.stages`); else its blocks have to form one: each has what the
            one before returned.
        blocks: what is checkpointed: a name with wildcards, such as "model.layers.*", or several;
            None takes all lists of like modules (see `course_lib.checkpoint.checkpoint_blocks`), an
            encoder and a decoder both. Where they form no chain, "segments" and "optimal" take a
            name.
        first_blocks: checkpoint only so many, the first ones, through several lists in their order;
            None for all.
        segments: how many, for "segments" alone. The last one is not recomputed.
        schedule_bytes: the most bytes of activations of one micro-batch, for "optimal" alone;
            of its blocks, in models that do not give a chain of their own.
        offload_activations: what is saved for backward goes one tier down; not with "selective" or
            "optimal".
        min_bytes: the smallest storage of activations that goes down.
        prefetch: of activations below, how many storages backward fetches ahead; None for as many
            as the device does by itself, 1 on a CPU and 2 on CUDA. Such an estimate goes by its
            tier: 1 with a file below, 2 with the host.
        in_flight: of activations, how many copies down may be under way; None as for `prefetch`.
            More hide longer copies, and hold more memory.
        page_bytes: of the optimizer's state in a file, master weights included, that are updated at
            once: the step holds three such pages; a parameter with more state is a page by itself.
            Master weights that stay above take gradients in fp32, as many bytes at once.
        head_chunk: tokens of the loss head at a time; None for all at once.
        in_backward: the optimizer steps as each gradient is there, and the gradient goes; takes one
            micro-batch.
        accumulate: "fp32" adds up the gradients of parameters in 16 bits in fp32, 4 bytes a
            parameter in place of 2; None in the parameters' dtype.
        micro_batches: pieces of the batch, equal but for the last; of a rank's batch where there
            are several.
        ranks: devices that share the batch. Such a recipe is estimated, for the rank that holds
            most, and run by `python -m course_lib.distributed`; its update is fused.
        shard: what is cut among the ranks: "ddp" nothing, "zero1" the optimizer's state, "zero2"
            gradients too, and "zero3" parameters too (see `course_lib.budget.rank`); None leaves
            the choice to `fit`.

    Raises:
        TypeError, ValueError: a field is not of its kind, out of its range, or does not go with
            another one.
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
            object.__setattr__(self, "blocks", tuple(self.blocks))  # a recipe can be hashed
        for name, check in (
            (name, check) for each in TECHNIQUES for name, check in each.fields.items()
        ):
            check(name, getattr(self, name))
        if self.ranks > 1 and self.update in (None, "loop"):
            object.__setattr__(self, "update", "fused")
        for technique in TECHNIQUES:
            if problem := technique.conflict(self):
                raise ValueError(problem)
        self._refuse_several_hooks()

    def _refuse_several_hooks(self) -> None:
        """Of several techniques with saved-tensor hooks, all but the innermost would do nothing."""
        changed = self.changed()
        hooked = [t.field for t in TECHNIQUES if t.hooks_saved_tensors and t.field in changed]
        if len(hooked) > 1:
            raise ValueError(
                f"{hooked[0]} cannot be combined with {' or '.join(hooked[1:])}: each of them puts"
                " hooks around what the forward pass saves, and PyTorch runs only the innermost"
                " hooks. Choose one of them"
            )

    def copies(self, tier: str) -> tuple[int, int]:
        """Numbers of storages of activations that are fetched ahead, and that go down at once, with
        such a tier below."""
        own = Cuda.ahead if tier == "host" else Device.ahead
        return (
            own if self.prefetch is None else self.prefetch,
            own if self.in_flight is None else self.in_flight,
        )

    def on(self, tier: str) -> Recipe:
        """The recipe with these numbers in place of None."""
        prefetch, in_flight = self.copies(tier)
        return (
            replace(self, prefetch=prefetch, in_flight=in_flight)
            if self.offload_activations
            else self
        )

    @property
    def has_pages(self) -> bool:
        """Whether the optimizer is an `OffloadedOptimizer`: its state is below, or it has master
        weights."""
        return self.precision == "bf16" or self.offload_optimizer > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model; the default one where the model is left as it is."""
        return PRECISIONS.get(self.precision, torch.get_default_dtype())

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def __str__(self) -> str:
        """A label: "bf16, adam, flash, checkpoint layers, 4 micro-batches"."""
        return listed(words_of(self))

    def changed(self) -> dict[str, object]:
        """The fields that are not as in the plain step."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }


def words_of(recipe: Recipe) -> list[str]:
    """A recipe's parts, as labels."""
    return [word for technique in TECHNIQUES for word in technique.words(recipe)]
