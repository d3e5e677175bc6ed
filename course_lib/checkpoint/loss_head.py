"""The output head with its loss, one chunk of tokens at a time, to never hold all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .._check import one_of, whole
from .nonreentrant import checkpoint


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
    """Compute `F.cross_entropy(hidden @ weight.T, targets)` without ever holding all the logits.

    Each chunk of tokens has its own checkpoint. At most chunk * v logits, and the temporaries of
    one step computed from them, are live at a time. The price is one more product hidden @
    weight.T.

    Args:
        hidden: (tokens, h). targets: (tokens,), int64.
        weight: (v, h), or the head itself, as a function that maps each token separately: (chunk,
            h) -> (chunk, v).
        chunk: Number of tokens per chunk, at least 1; the last chunk may be smaller.
        ignore_index: Targets with this value do not count.
        reduction: "mean" over the targets that count, or "sum".
        preserve_rng_state: Must be True for a head that draws random numbers.

    Returns:
        The loss, a scalar, as `F.cross_entropy` returns it, but summed at least in float32.

    Raises:
        ValueError: Shapes do not match, chunk is below 1, or reduction is unknown.
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
    for start in range(0, max(len(hidden), 1), chunk):  # without tokens, one empty chunk
        inputs = hidden[start : start + chunk], weight, targets[start : start + chunk], ignore_index
        losses = checkpoint(
            _token_losses, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        # bfloat16 has 8 significant bits: a sum of thousands of losses would stop growing once a
        # loss is smaller than half a unit in the last place.
        total = total + losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total.to(losses.dtype)


def _token_losses(hidden: Tensor, weight, targets: Tensor, ignore_index: int) -> Tensor:
    logits = weight(hidden) if callable(weight) else hidden @ weight.T  # (chunk, v)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")  # (chunk,)
