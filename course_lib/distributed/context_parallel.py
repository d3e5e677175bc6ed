"""Context parallelism: each rank has a part of the sequence, and keys and values go around a ring.

`RingAttention` is causal attention for one part of the queries. It merges the results for the parts
of the keys by their log-sum-exps, as lesson 06 does with blocks of keys, and saves no scores. The
parts are consecutive, so rank r attends to r + 1 parts, and rank 0 computes the least.

Source: Liu et al. 2023, arXiv:2310.01889 (ring attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.distributed.formulas import Shapes
from course_lib.distributed.measurement import RankUsage, Watch
from course_lib.distributed.prediction import fake_rank
from course_lib.models import Decoder


def scores_of(q: Tensor, k: Tensor, masked: bool) -> Tensor:
    """Return the attention scores of queries and keys, divided by the square root of the head size.

    Args:
        q, k: Queries and keys, of shape (batch, heads, tokens, size).
        masked: Whether to apply the causal mask, which sets a query's scores of later keys to -inf.
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores + torch.full_like(scores, -torch.inf).triu(1) if masked else scores


class RingAttention(torch.autograd.Function):
    """Causal attention of one rank's queries to the keys of all ranks.

    Rank r has part r of the sequence. Each rank sends its keys and values around a ring of the
    ranks.

    The inputs of `apply` are q, k, v, the rank, the number of ranks, and a function such as
    `pass_on`. Each of q, k and v has the shape (batch, heads, tokens / ranks, size). The function
    sends tensors to the next rank and returns the tensors that the previous rank has sent. The
    output of `apply` has the shape of q.
    """

    @staticmethod
    def forward(context, q, k, v, rank, ranks, pass_on):
        context.ring, own = (rank, ranks, pass_on), (k, v)
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        for step in range(ranks):
            part = (rank - step) % ranks  # the part of the sequence that k and v are from
            if part <= rank:
                scores = scores_of(q, k, masked=part == rank)
                merged = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
                out = out * (lse - merged).exp() + (scores - merged).exp() @ v
                lse = merged
            if step < ranks - 1:
                k, v = pass_on(k, v)
        context.save_for_backward(q, *own, out, lse)
        return out

    @staticmethod
    def backward(context, gradient):
        (q, k, v, out, lse), (rank, ranks, pass_on) = context.saved_tensors, context.ring
        row_sums = (gradient * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
        for step in range(ranks):
            part = (rank - step) % ranks
            if part <= rank:
                p = (scores_of(q, k, masked=part == rank) - lse).exp()
                ds = p * (gradient @ v.mT - row_sums) * q.shape[-1] ** -0.5
                dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ gradient
            if step < ranks - 1:
                k, v = pass_on(k, v)
            dk, dv = pass_on(dk, dv)  # dk and dv are back at their own rank after the last step
        return dq, dk, dv, None, None, None


def pass_on(*tensors: Tensor) -> list[Tensor]:
    """Send tensors to the next rank of a ring, and return those that the previous rank has sent.

    Every rank of the process group must call this, with tensors of the same shapes and dtypes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors]
    sends = [dist.P2POp(dist.isend, t.contiguous(), (rank + 1) % ranks) for t in tensors]
    receives = [dist.P2POp(dist.irecv, t, (rank - 1) % ranks) for t in received]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    return received


class ContextParallel:
    """Training of a `Decoder` with context parallelism: each rank computes a part of the sequence.

    Call the object with a batch to do one step on all ranks. The call updates the weights with
    AdamW and returns the mean loss. A `Watch` can measure the steps, as it can measure those of a
    `Trainer`.

    Args:
        model: `Decoder` with equal values on all ranks. It is changed in place.
        lr: Learning rate.
    """

    mode = "cp"

    def __init__(self, model: Decoder, *, lr: float = 1e-3):
        self.model, self.rank, self.ranks = model, dist.get_rank(), dist.get_world_size()
        for layer in model.layers:
            layer.attention.standard = self._attention
        self.optimizer = self.local = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention of this rank's queries; replaces the method `Attention.standard`."""
        return RingAttention.apply(q, k, v, self.rank, self.ranks, pass_on)

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the gradients of the mean loss over the tokens of all ranks.

        Args:
            batch: Dict with the "tokens" and "labels" of all ranks, both of shape (batch, tokens).

        Returns:
            The mean loss, as a scalar tensor.
        """
        count = batch["labels"].numel()
        tokens, labels = (batch[name].chunk(self.ranks, 1)[self.rank] for name in batch)
        positions = self.model.positions.weight[: count // len(tokens)].chunk(self.ranks)
        x = self.model.tokens(tokens) + positions[self.rank]
        for layer in self.model.layers:
            x = layer(x)
        logits = self.model.head(self.model.norm(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
        del logits, x
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        total = loss.detach().double()
        dist.all_reduce(total)
        return total

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Do one training step on a batch, and return the mean loss."""
        loss = self.backward(batch)
        self.update()
        return loss

    def update(self) -> None:
        """Update the weights with AdamW, and set all gradients to None."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def context_sent_bytes(shapes: Shapes, ranks: int, part_bytes: int) -> int:
    """Return the bytes that a rank sends per training step with `ContextParallel`.

    In each layer, keys and values are sent ranks - 1 times in the forward pass and again in the
    backward pass. Their gradients are sent `ranks` times. The gradients of the weights are
    all-reduced, and each of their bytes counts as two, as in `CommunicationCounter`.

    Args:
        shapes: Shapes of the model's parameters.
        ranks: Number of ranks in the ring.
        part_bytes: Bytes of one layer's keys on one rank.
    """
    weights = sum(w.numbers * w.item_bytes for w in shapes.all)
    return len(shapes.blocks) * (4 * (ranks - 1) + 2 * ranks) * part_bytes + 2 * weights


def predict_context_parallel(
    make_model: Callable[[], Any], make_batch: Callable[[], Any], ranks: int, rank: int
) -> RankUsage:
    """Predict one rank's memory, communicated bytes and FLOPs with `ContextParallel`.

    The prediction is for the second training step, at whose start AdamW's state exists. It uses
    symbolic tensors in this process, and starts no other processes.

    Args:
        make_model: Function that builds the `Decoder`.
        make_batch: Function that returns the batch of all ranks, with the whole sequences.
        ranks: Number of ranks in the ring.
        rank: The rank whose step is predicted.
    """
    with fake_rank(ranks, rank), Watch(model := make_model()) as watch:
        trainer = ContextParallel(model)
        batch = make_batch()
        for _ in range(2):
            with watch.step(trainer):
                trainer(batch)
    return watch.taken  # pyrefly: ignore[bad-return]  # not None, since steps were run
