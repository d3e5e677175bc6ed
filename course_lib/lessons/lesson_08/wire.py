"""Ranks within one process: collectives on lists with one tensor per rank, and Adam on a shard.

`RECORDED` has the bytes measured on loopback sockets, per rank and step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TENSOR_BYTES = 4_000_000  # bytes of the tensor in the recorded collectives
# Collective -> how often the tensor's bytes are counted; an all-reduce counts as two collectives.
GIVEN_TIMES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

#: Ranks -> mode or collective -> bytes per rank and step, by
#: `course_lib.lessons.lesson_08.loopback`, with torch 2.13.0 and gloo, November 2026.
RECORDED: Mapping[int, Mapping[str, int]] = {
    2: {
        "ddp": 27_543_722,
        "zero1": 41_318_593,
        "fsdp-keep": 41_310_723,
        "fsdp": 53_968_914,
        "fsdp-bf16": 40_758_814,
        "all_reduce": 4_004_802,
        "reduce_scatter": 4_009_132,
        "all_gather": 2_002_414,
    },
    4: {
        "ddp": 41_368_448,
        "zero1": 61_987_740,
        "fsdp-keep": 61_994_208,
        "fsdp": 80_981_279,
        "fsdp-bf16": 61_175_489,
        "hsdp": 67_757_818,
        "all_reduce": 6_008_878,
        "reduce_scatter": 6_009_154,
        "all_gather": 3_004_748,
    },
}


class _ByteCounter:
    """A counter of bytes passed to collectives. Code that uses the wire cannot change the count."""

    def __init__(self) -> None:
        self.__recorded: list[int] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank has sent so far, counted as by `distributed.CommunicationCounter`.

        Each collective counts the bytes of a whole tensor, not of a shard.
        """
        return sum(self.__recorded)

    def _record(self, tensor: Tensor) -> None:
        self.__recorded.append(tensor.nbytes)


class Wire(_ByteCounter):
    """Collectives for ranks that are simulated within one process.

    Each method takes a list with one tensor per rank, and returns a list with one tensor per rank.
    """

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up the tensors of all ranks, and return the r-th shard of the sum for each rank r."""
        self._record(tensors[0])
        return [shard.clone() for shard in torch.stack([*tensors]).sum(0).chunk(len(tensors))]

    def all_gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate the shards of all ranks, and return a copy of the result for each rank."""
        whole = torch.cat([*shards])
        self._record(whole)
        return [whole.clone() for _ in shards]

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Add up the tensors of all ranks, and return a copy of the sum for each rank.

        The attribute `sent_bytes` grows by the bytes of a reduce-scatter and an all-gather.
        """
        return self.all_gather(self.reduce_scatter(tensors))


class RankWire(_ByteCounter):
    """Collectives for a single rank, as the rank itself calls them.

    Each method takes the tensor of the calling rank, and returns the result for this rank. The
    tensors of the other ranks are fixed when the instance is created.

    Args:
        rank: Number of the calling rank.
        shards: Shards of a weight, one per rank, cut along the first dimension. `all_gather` uses
            the shards of the other ranks.
        gradients: Gradients of the whole weight, one per rank. `reduce_scatter` and `all_reduce`
            use the gradients of the other ranks.
    """

    def __init__(self, rank: int, shards: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self._rank, self._shards, self._ranks = rank, [*shards], len(shards)
        self._others = sum(each for r, each in enumerate(gradients) if r != rank)

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the concatenated shards of all ranks.

        Args:
            shard: The calling rank's shard.

        Raises:
            ValueError: The shape is not that of the rank's shard.
        """
        own = self._shards[self._rank]
        if shard.shape != own.shape:
            shapes = tuple(shard.shape), tuple(own.shape)
            raise ValueError(
                f"shard must be the shard of this rank, of shape {shapes[1]}, got shape {shapes[0]}"
            )
        whole = torch.cat(
            [shard if r == self._rank else each for r, each in enumerate(self._shards)]
        )
        self._record(whole)
        return whole.detach()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return the calling rank's shard of the sum of the gradients of all ranks.

        Args:
            tensor: The calling rank's gradient of the whole weight.

        Raises:
            ValueError: The shape is not that of the whole weight.
        """
        total = self._sum(tensor)
        self._record(total)
        return total.chunk(self._ranks)[self._rank].clone()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the gradients of all ranks.

        The attribute `sent_bytes` grows by the bytes of a reduce-scatter and an all-gather.

        Args:
            tensor: The calling rank's gradient of the whole weight.

        Raises:
            ValueError: The shape is not that of the whole weight.
        """
        total = self._sum(tensor)
        self._record(total)
        self._record(total)
        return total

    def _sum(self, tensor: Tensor) -> Tensor:
        if tensor.shape != self._others.shape:
            shapes = tuple(tensor.shape), tuple(self._others.shape)
            raise ValueError(
                f"tensor must be the whole gradient on every rank, of shape {shapes[1]}, got"
                f" shape {shapes[0]}"
            )
        return tensor.detach() + self._others


class Adam:
    """Adam for one shard of the weights. `adam(shard, gradient)` returns the updated shard.

    The moments are created in the first call, with the shape of the shard.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        self.lr, self.steps, self.moments = lr, 0, []

    def __call__(self, shard: Tensor, gradient: Tensor) -> Tensor:
        if not self.moments:
            self.moments = [torch.zeros_like(shard), torch.zeros_like(shard)]
        first, second = self.moments
        self.steps += 1
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
        size = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        return shard - self.lr / (1 - 0.9**self.steps) * first / size

    @property
    def state_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.moments)
