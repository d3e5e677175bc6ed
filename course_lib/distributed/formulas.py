"""ZeRO's formulas, exact to the byte: the bytes that each rank holds and sends.

They need only the shapes of the parameters. Ψ parameters in fp32, trained by Adam on N ranks, need
these bytes per rank (parameters + gradients + optimizer state):

    ddp      4Ψ   + 4Ψ   + 8Ψ      every rank holds everything
    zero1    4Ψ   + 4Ψ   + 8Ψ/N    each parameter's Adam state is on one rank
    fsdp     4Ψ/N + 4Ψ/N + 8Ψ/N    each parameter, gradient and state is cut into N along its
                                   first dimension

The functions below also count bytes that the table leaves out. Adam's step counters take 4 bytes
per parameter tensor. The ranks' shares in zero1 are unequal, because zero1 assigns whole tensors.
If N does not divide a first dimension, fsdp cuts it as `torch.chunk` does. The storages of
parameters and gradients are then padded, so that they are as long on every rank as on the first.
Adam's state has no padding.

The number of bytes that a collective really sends depends on its algorithm. In a ring, each rank
receives only from the previous rank and sends only to the next one. For a tensor of b bytes on N
ranks:

    collective        sent by each rank    counted by `sent_bytes` as
    all-gather        b (N - 1)/N          b
    reduce-scatter    b (N - 1)/N          b
    all-reduce        2b (N - 1)/N         2b; it is a reduce-scatter and an all-gather

`ring_bytes` converts the last column to the bytes of a ring. The broadcasts of zero1, one from each
rank, together send as many bytes as an all-gather.

The ranks of a machine are neighbors in the ring, so only one rank per machine sends to another
machine. If the N ranks are in several machines, b (N - 1)/N bytes therefore leave each machine, and
the same number enters it, regardless of the number of ranks per machine. If several rings share the
work on a tensor, each ring sends its part of these bytes over a separate network card. In an
all-to-all, as in expert parallelism, each rank also sends b (N - 1)/N bytes, but directly to all
other ranks. Within one machine, an all-to-all takes the same time as a ring. Between machines, it
sends many more bytes out of each machine.

Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, sections 5 and 7;
`torch.distributed.fsdp.fully_shard`; the factors of `doc/PERFORMANCE.md` in NVIDIA's nccl-tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from course_lib._check import one_of, whole
from course_lib.checkpoint import checkpoint_blocks

REPLICATED = ("ddp", "zero1")
SHARDED = ("fsdp", "fsdp-keep", "fsdp-checkpoint", "fsdp-bf16", "fsdp-cpu")
MODES = (*REPLICATED, *SHARDED)
STATE = ("parameter", "gradient", "optimizer")
SYNCS = ("last", "each")
STEP_BYTES = 4  # Adam's step counter of a parameter tensor, one fp32 number


@dataclass(frozen=True)
class Weight:
    """The shape and element size of one parameter.

    Attributes:
        rows: Size of the first dimension, along which FSDP shards. 1 for a scalar.
        columns: Number of elements per row.
        item_bytes: Bytes per element.
        trained: Whether the parameter requires gradients.
        name: Name of the parameter in the model.
    """

    rows: int
    columns: int
    item_bytes: int
    trained: bool
    name: str = ""

    @property
    def numbers(self) -> int:
        """Number of elements of the parameter."""
        return self.rows * self.columns

    def share(self, ranks: int, rank: int = 0) -> int:
        """Return the number of elements on one rank if the rows are divided among ranks.

        FSDP's padding is not included. The padding makes the storages of parameters and gradients
        on every rank as long as the share of rank 0, the largest share.

        Args:
            ranks: Number of ranks among which the rows are divided.
            rank: Rank whose elements are counted.
        """
        most = -(-self.rows // ranks)
        return max(0, min(most, self.rows - rank * most)) * self.columns


@dataclass(frozen=True)
class Shapes:
    """The shapes of all parameters of a model. A shared parameter is included once.

    Attributes:
        root: Parameters outside all blocks, such as the embedding.
        blocks: One tuple per block (such as a layer) with the parameters in that block.
        buffer_bytes: Bytes of the floating-point buffers that DDP broadcasts.
    """

    root: tuple[Weight, ...]
    blocks: tuple[tuple[Weight, ...], ...]
    buffer_bytes: int = 0

    @property
    def all(self) -> tuple[Weight, ...]:
        """All parameters: those outside the blocks, then those of each block."""
        return (*self.root, *(weight for block in self.blocks for weight in block))

    @property
    def trained(self) -> tuple[Weight, ...]:
        """Parameters that require gradients. An optimizer step changes only these parameters."""
        return tuple(weight for weight in self.all if weight.trained)

    @property
    def numbers(self) -> int:
        """Number of elements of all parameters together, Ψ in ZeRO's formulas."""
        return sum(weight.numbers for weight in self.all)

    @property
    def updated_bytes(self) -> int:
        """Bytes of the parameters that an optimizer step changes. Mode zero1 broadcasts them."""
        return sum(weight.numbers * weight.item_bytes for weight in self.trained)


def blocks_of(model: nn.Module, blocks: str | list[str] | None = None) -> tuple[str, ...]:
    """Return the names of the blocks of a model that FSDP shards separately, such as its layers.

    Args:
        model: The model.
        blocks: Names of the blocks, with wildcards such as "layers.*". With None, the model's lists
            of layers are found automatically, as in `checkpoint_blocks`.
    """
    with checkpoint_blocks(model, blocks) as handle:
        return handle.names


def shapes_of(model: nn.Module, blocks: str | list[str] | None = None) -> Shapes:
    """Return the shapes of all parameters of a model, grouped by block.

    Args:
        model: The model, real or symbolic. It must not be sharded.
        blocks: Names of the blocks, with wildcards such as "layers.*". With None, the model's lists
            of layers are found automatically, as in `checkpoint_blocks`.
    """
    names = blocks_of(model, blocks)
    groups: dict[str, list[Weight]] = {name: [] for name in ("", *names)}
    for name, p in model.named_parameters():
        rows = len(p) if p.dim() else 1
        block = next((block for block in names if name.startswith(f"{block}.")), "")
        groups[block].append(
            Weight(rows, p.numel() // max(1, rows), p.itemsize, p.requires_grad, name)
        )
    buffers = sum(b.nbytes for b in model.buffers() if b.is_floating_point() and b.itemsize < 8)
    return Shapes(tuple(groups.pop("")), tuple(map(tuple, groups.values())), buffers)


def held_bytes(shapes: Shapes, mode: str, ranks: int) -> list[dict[str, int]]:
    """Return the bytes of parameters, gradients and AdamW's state on each rank.

    These are the bytes that exist when AdamW steps.

    Args:
        shapes: Shapes of the model's parameters.
        mode: A mode of `Trainer`, such as "ddp" or "fsdp" (see `MODES`).
        ranks: Number of ranks.

    Returns:
        One dict per rank, with the keys "parameter", "gradient" and "optimizer".
    """
    ranks = whole("ranks", ranks, 1)
    cut = one_of("mode", mode, MODES) in SHARDED
    parts = ranks if cut else 1
    parameter = sum(w.share(parts) * w.item_bytes for w in shapes.all)
    gradient = sum(w.share(parts) * w.item_bytes for w in shapes.trained)
    if mode == "zero1":
        moments = [
            _adam_state_bytes((w, w.numbers) for w in own)
            for own in zero1_parts(shapes.trained, ranks)
        ]
    else:
        firsts = [rank if cut else 0 for rank in range(ranks)]
        moments = [
            _adam_state_bytes((w, w.share(parts, first)) for w in shapes.trained)
            for first in firsts
        ]
    return [{"parameter": parameter, "gradient": gradient, "optimizer": state} for state in moments]


def zero1_parts(weights: Iterable[Weight], ranks: int) -> list[list[Weight]]:
    """Divide parameters among ranks, so that each rank has the optimizer state of its part.

    The parameters are assigned one by one, the largest first. Each parameter is assigned to the
    rank with the fewest elements so far.

    Args:
        weights: The parameters that require gradients.
        ranks: Number of ranks.

    Returns:
        One list of parameters per rank.
    """
    parts: list[list[Weight]] = [[] for _ in range(ranks)]
    for weight in sorted(weights, key=lambda w: -w.numbers):
        min(parts, key=lambda part: sum(w.numbers for w in part)).append(weight)
    return parts


def sent_bytes(
    shapes: Shapes,
    mode: str,
    ranks: int,
    *,
    micro_batches: int = 1,
    sync: str = "last",
    bf16: bool = False,
) -> int:
    """Return the bytes that a rank communicates per training step in a mode.

    An all-reduce of n bytes counts as 2n, every other collective as n, as in
    `CommunicationCounter`. A single rank sends nothing. In the following, Ψ is the number of
    elements of all parameters.

    - DDP all-reduces the gradients, which counts as 2Ψ numbers. It also broadcasts the model's
      buffers, such as those of a rotary embedding.
    - zero1 does the same as DDP. It then also broadcasts each updated parameter, which counts as Ψ
      numbers for all parameters together.
    - FSDP gathers each block for its forward pass and, except in mode fsdp-keep, again for its
      backward pass. With the reduce-scatter of the gradients, this is 3Ψ numbers, or 2Ψ in mode
      fsdp-keep. The parameters outside the blocks (embedding, last norm, head) are gathered only
      once in all modes. FSDP keeps them gathered, because backward begins with them.

    Args:
        shapes: Shapes of the model's parameters.
        mode: A mode of `Trainer`, such as "ddp" or "fsdp" (see `MODES`).
        ranks: Number of ranks.
        micro_batches: Number of micro-batches per step.
        sync: With "last", only the last micro-batch reduces gradients. With "each", every
            micro-batch does.
        bf16: Whether weights are gathered in bf16, as in mode fsdp-bf16; ignored in ddp and zero1.

    Example:
        >>> net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(2)))
        >>> sent_bytes(shapes_of(net, "*"), "ddp", ranks=4)
        16000000
    """
    ranks, runs = whole("ranks", ranks, 1), whole("micro_batches", micro_batches, 1)
    reductions = runs if one_of("sync", sync, SYNCS) == "each" else 1
    if one_of("mode", mode, MODES) in REPLICATED:
        each = 2 * sum(w.numbers * w.item_bytes for w in shapes.trained) + shapes.buffer_bytes
        updated = shapes.updated_bytes if mode == "zero1" else 0
        return reductions * each + updated if ranks > 1 else 0

    def gathered_bytes(weights: Iterable[Weight]) -> int:
        half = bf16 or mode == "fsdp-bf16"
        return sum(w.share(ranks) * ranks * (2 if half else w.item_bytes) for w in weights)

    times = 1 if mode == "fsdp-keep" else 2
    gathers = gathered_bytes(shapes.root) + times * sum(map(gathered_bytes, shapes.blocks))
    scattered = sum(w.share(ranks) * ranks * w.item_bytes for w in shapes.trained)
    return runs * gathers + reductions * scattered if ranks > 1 else 0


def ring_bytes(sent: float, ranks: int) -> float:
    """Return the bytes that a rank sends to the next one if collectives use a ring.

    If the ranks are in several machines, this number of bytes leaves each machine, and the same
    number enters it.

    Args:
        sent: Bytes that a rank communicates, as `sent_bytes` counts them.
        ranks: Number of ranks in the ring.

    Example:
        >>> ring_bytes(16_000, ranks=4)
        12000.0
    """
    return sent * (1 - 1 / whole("ranks", ranks, 1))


def _adam_state_bytes(shares: Iterable[tuple[Weight, int]]) -> int:
    """Return the bytes of Adam's state: two moments per element, one step counter per parameter.

    Args:
        shares: Pairs of a parameter and the number of its elements whose state is counted.
    """
    return sum(2 * numbers * weight.item_bytes + STEP_BYTES for weight, numbers in shares)
