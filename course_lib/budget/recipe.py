"""What a training step uses: a value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from course_lib._check import kind, number, one_of, whole
from course_lib.labels import listed, text
from course_lib.offload.device import Cuda, Device
from course_lib.offload.optimizer import PAGE_BYTES

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("adam", "sgd", "momentum", "adafactor", "adam8bit")
ALL_ABOVE = ("adafactor", "adam8bit")  # whose state is small, and is not offloaded
UPDATES = ("loop", "foreach", "fused")
ATTENTIONS = ("standard", "flash")
SWITCHED = ("eager", "sdpa")  # by a model's own switch
MIN_BYTES = 1 << 20
CHECKPOINTS = ("none", "selective", "layers", "segments", "optimal")
SHARDS = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, repr=False)
class Recipe:
    """All that a training step uses to save memory. The default is the plain step.

    Attributes:
        precision: "fp32"; or "bf16" for parameters, gradients and activations, with fp32 master weights; None leaves
            the model in the dtypes that it has, without master weights unless the optimizer is offloaded.
        optimizer: "adam" (AdamW), "sgd", "momentum" (SGD with momentum 0.9) or "adafactor"; or "adam8bit", which is
            estimated by a formula of what its state takes, and run where bitsandbytes is installed. One for all
            parameters: a step with several, as a GAN's, is no recipe, but `MemoryMeter(model, [a, b])` counts it.
        update: "loop" updates one parameter after the other; "foreach" all at once, with temporaries as large as all of
            them; "fused" in one operator, which Adafactor has not.
        offload_optimizer: the fraction of the optimizer's state, masters included, that lives one tier down.
        attention: "flash" saves one number a row of scores, in any model that calls `F.scaled_dot_product_attention`
            without masks or dropout, or is made of `course_lib.models.Attention`. "standard" has the latter save the
            scores' softmax, and leaves other models as they are; None leaves all as they are. "eager" and "sdpa" are
            for the switch of Hugging Face models (`set_attn_implementation`).
        checkpoint: "none"; "layers", of every block the input; "selective", of every block its matrix products;
            "segments", of so many runs of blocks the input; "optimal", what the fastest schedule keeps. The last two
            take a `Decoder`, or a model whose blocks form a chain: each has what the one before returned.
        blocks: what is checkpointed: a name with wildcards, such as "model.layers.*", or several;
            None takes all lists of like modules (see `course_lib.checkpoint.checkpoint_blocks`), an encoder and a
            decoder both. Where they form no chain, "segments" and "optimal" take a name.
        first_blocks: checkpoint only so many, the first ones, through several lists in their order; None for all.
        segments: how many, for "segments" alone. The last one is not recomputed.
        schedule_bytes: the most bytes of activations of one micro-batch, for "optimal" alone; in models other than a
            `Decoder`, of its blocks.
        offload_activations: what is saved for backward goes one tier down; not with "selective" or "optimal".
        min_bytes: the smallest storage of activations that goes down.
        prefetch: of activations below, how many storages backward fetches ahead; None for as many as the device does by
            itself, 1 on a CPU and 2 on CUDA. Such an estimate goes by its tier: 1 with a file below, 2 with the host.
        in_flight: of activations, how many copies down may be under way; None as for `prefetch`. More hide longer
            copies, and hold more memory.
        page_bytes: of the optimizer's state in a file, master weights included, that are updated at once: the step
            holds three such pages; a parameter with more state is a page by itself. Master weights that stay above take
            gradients in fp32, as many bytes at once.
        head_chunk: tokens of the loss head at a time; None for all at once.
        in_backward: the optimizer steps as each gradient is there, and the gradient goes; takes one micro-batch.
        accumulate: "fp32" adds up the gradients of parameters in 16 bits in fp32, 4 bytes a parameter in place of 2;
            None in the parameters' dtype.
        micro_batches: pieces of the batch, equal but for the last; of a rank's batch where there are several.
        ranks: devices that share the batch. Such a recipe is estimated, for the rank that holds most, and run by
            `python -m course_lib.distributed`; its update is fused.
        shard: what is cut among the ranks: "ddp" nothing, "zero1" the optimizer's state, "zero2" gradients too, and
            "zero3" parameters too (see `course_lib.budget.rank`); None leaves the choice to `fit`.

    Raises:
        TypeError, ValueError: a field is not of its kind, out of its range, or does not go with another one.
    """

    precision: str | None = "fp32"
    optimizer: str = "adam"
    update: str = "loop"
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
        known = {
            "precision": (*PRECISIONS, None),
            "optimizer": OPTIMIZERS,
            "update": UPDATES,
            "attention": (*ATTENTIONS, *SWITCHED, None),
            "checkpoint": CHECKPOINTS,
            "accumulate": ("fp32", None),
            "shard": (*SHARDS, None),
        }
        for name, options in known.items():
            one_of(name, getattr(self, name), options)
        number("offload_optimizer", self.offload_optimizer, 0, 1)
        for name in ("offload_activations", "in_backward"):
            kind(name, getattr(self, name), bool, "True or False")
        for name in ("segments", "schedule_bytes", "head_chunk", "first_blocks"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        whole("micro_batches", self.micro_batches, 1)
        whole("ranks", self.ranks, 1)
        whole("min_bytes", self.min_bytes, 0)
        whole("page_bytes", self.page_bytes, 1, of="bytes")
        for name in ("prefetch", "in_flight"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0)
        _check_blocks(self)
        _check_together(self)
        _check_ranks(self)

    def copies(self, tier: str) -> tuple[int, int]:
        """How many storages of activations are fetched ahead, and how many go down at once, with such a tier below."""
        own = Cuda.ahead if tier == "host" else Device.ahead
        return own if self.prefetch is None else self.prefetch, own if self.in_flight is None else self.in_flight

    def on(self, tier: str) -> Recipe:
        """The recipe with these numbers in place of None."""
        prefetch, in_flight = self.copies(tier)
        return replace(self, prefetch=prefetch, in_flight=in_flight) if self.offload_activations else self

    @property
    def has_pages(self) -> bool:
        """Whether the optimizer is an `OffloadedOptimizer`: its state is below, or it has master weights."""
        return self.precision == "bf16" or self.offload_optimizer > 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the model; the default one where the model is left as it is."""
        return PRECISIONS.get(self.precision, torch.get_default_dtype())

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def __str__(self) -> str:
        """A label: "bf16, adam, flash, checkpoint layers, 4 micro-batches"."""
        return listed(words_of(self))

    def changed(self) -> dict[str, object]:
        """The fields that are not as in the plain step."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


# ---- what goes together


def _check_blocks(recipe: Recipe) -> None:
    if isinstance(recipe.blocks, list):
        object.__setattr__(recipe, "blocks", tuple(recipe.blocks))  # a recipe can be hashed
    for name in recipe.blocks if isinstance(recipe.blocks, tuple) and recipe.blocks else [recipe.blocks]:
        kind("blocks", name, (str, type(None)), "a name with wildcards, several, or None")
    for name, takes in (("blocks", CHECKPOINTS[1:]), ("first_blocks", CHECKPOINTS[1:3])):
        if getattr(recipe, name) is not None and recipe.checkpoint not in takes:
            got = f'{name} is {getattr(recipe, name)!r} and checkpoint is "{recipe.checkpoint}"'
            raise ValueError(f"{got}; it takes None unless that is {' or '.join(map(repr, takes))}")


def _check_together(recipe: Recipe) -> None:
    for name, owner in (("segments", "segments"), ("schedule_bytes", "optimal")):
        if (getattr(recipe, name) is not None) != (recipe.checkpoint == owner):
            got = f'{name} is {getattr(recipe, name)} and checkpoint is "{recipe.checkpoint}"'
            raise ValueError(f'{got}; it takes a number where that is "{owner}", and None elsewhere')
    if recipe.offload_activations and recipe.checkpoint in ("selective", "optimal"):
        got = f'offload_activations is True and checkpoint is "{recipe.checkpoint}", which holds its tensors itself'
        raise ValueError(f'{got}; it takes "none", "layers" or "segments"')
    if recipe.in_backward and recipe.micro_batches > 1:
        got = f"in_backward is True and micro_batches is {recipe.micro_batches}, whose gradients must be added up"
        raise ValueError(f"{got}; it takes 1 micro-batch")
    if recipe.in_backward and recipe.accumulate:
        raise ValueError('accumulate is "fp32" and in_backward is True, which adds nothing up; it takes None')
    updates = {"adafactor": ("loop", "foreach"), "adam8bit": ("loop",)}.get(recipe.optimizer, UPDATES)
    if recipe.update not in updates:
        got = f'update is "{recipe.update}" and optimizer is "{recipe.optimizer}"'
        raise ValueError(f"{got}; it takes {' or '.join(map(repr, updates))}")
    if recipe.optimizer in ALL_ABOVE and recipe.offload_optimizer:
        got = f'offload_optimizer is {recipe.offload_optimizer} and optimizer is "{recipe.optimizer}", of a small state'
        raise ValueError(f"{got}; it takes 0")


def _check_ranks(recipe: Recipe) -> None:
    if recipe.ranks > 1 and recipe.update == "loop":
        object.__setattr__(recipe, "update", "fused")
    if recipe.ranks == 1 and recipe.shard:
        raise ValueError(f'shard is "{recipe.shard}" and ranks is 1; it takes None, or 2 ranks or more')
    known = {"precision": PRECISIONS, "optimizer": ("adam",), "checkpoint": ("none", "selective", "layers")}
    known |= {"update": ("fused",), "offload_optimizer": (0,), "offload_activations": (False,)}
    known |= {"in_backward": (False,), "head_chunk": (None,), "accumulate": (None,), "first_blocks": (None,)}
    for name, values in known.items() if recipe.ranks > 1 else ():
        if getattr(recipe, name) not in values:
            got = f"{name} is {getattr(recipe, name)!r} and ranks is {recipe.ranks}"
            raise ValueError(f"{got}; it takes {' or '.join(map(repr, values))}")


# ---- in words


def words_of(recipe: Recipe) -> list[str]:
    """A recipe's parts, as labels."""
    words = [recipe.precision or text("own precision"), recipe.optimizer]
    if recipe.optimizer == "adam8bit":
        words[-1] = text("{optimizer} (by a formula)", optimizer=recipe.optimizer)
    if recipe.update != "loop":
        words[-1] += f" {recipe.update}"
    if recipe.offload_optimizer == 1:
        words.append(text("optimizer offloaded"))
    elif recipe.offload_optimizer:
        words.append(text("{share:.0%} of optimizer offloaded", share=recipe.offload_optimizer))
    if recipe.page_bytes != PAGE_BYTES and recipe.has_pages:
        words.append(text("pages of {size}", size=_binary(recipe.page_bytes)))
    if recipe.attention not in ("standard", None):
        words.append(recipe.attention)
    if recipe.checkpoint != "none":
        words.append(_checkpoints(recipe))
    if recipe.offload_activations and recipe.min_bytes == MIN_BYTES:
        words.append(text("activations offloaded"))
    elif recipe.offload_activations:
        words.append(text("activations offloaded from {least} bytes on", least=recipe.min_bytes))
    if recipe.offload_activations and recipe.prefetch is not None:
        words.append(text("{count} fetched ahead", count=recipe.prefetch))
    if recipe.offload_activations and recipe.in_flight is not None:
        words.append(text("{count} in flight", count=recipe.in_flight))
    if recipe.head_chunk:
        words.append(text("head in chunks of {tokens}", tokens=recipe.head_chunk))
    if recipe.in_backward:
        words.append(text("steps in backward"))
    if recipe.accumulate:
        words.append(text("fp32 sums"))
    if recipe.micro_batches > 1:
        words.append(text("{count} micro-batches", count=recipe.micro_batches))
    if recipe.ranks > 1:
        words.append(text("{shard} on {count} ranks", shard=recipe.shard or "?", count=recipe.ranks))
    return words


def _binary(nbytes: int) -> str:
    """In the largest unit of which they are a whole number."""
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if nbytes % size == 0)
    return f"{nbytes // size:,} {unit}"


def _checkpoints(recipe: Recipe) -> str:
    more = {"segments": f" {recipe.segments}", "optimal": f" {(recipe.schedule_bytes or 0) / 1e6:,.1f} MB"}
    words = text("checkpoint {kind}", kind=recipe.checkpoint + more.get(recipe.checkpoint, ""))
    if recipe.checkpoint == "layers":  # alone it is a label, and would be said in Chinese
        words = text("checkpoint layers")
    if recipe.first_blocks is not None:
        words = text("{checkpoint} first {count}", checkpoint=words, count=recipe.first_blocks)
    if recipe.blocks is not None:
        blocks = recipe.blocks if isinstance(recipe.blocks, str) else " ".join(recipe.blocks)
        words = text("{checkpoint} of {blocks}", checkpoint=words, blocks=blocks)
    return words


def pieces_allowed(samples: int) -> list[int]:
    """The numbers of micro-batches into which so many samples can be split, equal but for the last."""
    return [m for m in range(1, samples + 1) if math.ceil(samples / math.ceil(samples / m)) == m]
