"""A loss that is computed one chunk of tokens at a time: `checkpointed_loss`.

Each chunk of the output head and its loss has a checkpoint, so the logits of all tokens are never
in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._check import one_of, whole


def checkpointed_loss(
    hidden: Tensor,
    weight: Tensor | Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    chunk: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    preserve_rng_state: bool = False,
) -> Tensor:
    """Compute `F.cross_entropy(hidden @ weight.T, targets)` without keeping all logits in memory.

    Each chunk of tokens has its own checkpoint. At any time, only the logits of one chunk (chunk *
    vocabulary values) and the temporaries of one operator on them are live. In return, `hidden @
    weight.T` is computed a second time, in the backward pass.

    Args:
        hidden: Hidden states, of shape (tokens, h).
        weight: Weight of the output head, of shape (vocabulary, h). Alternatively, the head itself:
            a function from hidden states of shape (chunk, h) to logits of shape (chunk,
            vocabulary). The function must compute the logits of a token from that token alone.
        targets: Target tokens, of shape (tokens,) and dtype int64.
        chunk: Number of tokens per chunk, at least 1; the last chunk may be smaller.
        ignore_index: Target value of tokens whose loss does not count.
        reduction: "mean" for the mean loss of the tokens that count, or "sum" for the sum of their
            losses.
        preserve_rng_state: Whether the recomputation draws the same random numbers as the first
            run. Must be True for a head that draws random numbers.

    Returns:
        The loss, a scalar with the dtype that `F.cross_entropy` returns. The losses of the tokens
        are summed in float32, or in their own dtype if that is wider.

    Raises:
        TypeError, ValueError: Shapes do not match, chunk is not a whole number of at least 1, or
            reduction is unknown.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        shapes = tuple(hidden.shape), tuple(targets.shape)
        raise ValueError(
            "hidden and targets must be of shape (tokens, h) and (tokens,), got"
            f" {shapes[0]} and {shapes[1]}"
        )
    chunk = whole("chunk", chunk, 1, of="tokens")
    one_of("reduction", reduction, ("mean", "sum"))
    total = 0.0
    for start in range(0, max(len(hidden), 1), chunk):  # a batch without tokens is one empty chunk
        inputs = hidden[start : start + chunk], weight, targets[start : start + chunk], ignore_index
        losses = checkpoint(
            _token_losses, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        # The sum is not in bfloat16, which has 8 significant bits: after some hundred tokens, each
        # further loss would be rounded away.
        total = total + losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total.to(losses.dtype)


def _token_losses(hidden: Tensor, weight, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the loss of each token of a chunk, of shape (chunk,)."""
    logits = weight(hidden) if callable(weight) else hidden @ weight.T  # (chunk, v)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")  # (chunk,)
