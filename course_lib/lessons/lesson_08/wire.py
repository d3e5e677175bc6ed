"""Ranks within one process: collectives on lists, one tensor a rank, and Adam on a piece of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Wire:
    """Collectives that take a list with one tensor a rank, and give such a list.

    Attributes:
        sent_bytes: of one rank so far, as `course_lib.distributed.Communicated` counts.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of all tensors, cut: rank r gets the r-th piece."""
        self.sent_bytes += tensors[0].nbytes
        return [piece.clone() for piece in torch.stack([*tensors]).sum(0).chunk(len(tensors))]

    def all_gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """All pieces, one behind the other: each rank gets the whole."""
        whole = torch.cat([*pieces])
        self.sent_bytes += whole.nbytes
        return [whole.clone() for _ in pieces]

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of all tensors, whole, on each rank: a reduce-scatter, then an all-gather."""
        return self.all_gather(self.reduce_scatter(tensors))


class Adam:
    """Adam on whatever piece of the weights it is given: `adam(piece, gradient)` is the updated piece.

    Its two moments are as long as the first piece.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        self.lr, self.steps, self.moments = lr, 0, []

    def __call__(self, piece: Tensor, gradient: Tensor) -> Tensor:
        if not self.moments:
            self.moments = [torch.zeros_like(piece), torch.zeros_like(piece)]
        first, second = self.moments
        self.steps += 1
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
        size = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        return piece - self.lr / (1 - 0.9**self.steps) * first / size

    @property
    def state_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.moments)
