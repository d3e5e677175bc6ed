"""Standard attention and FlashAttention, as functions of PyTorch tensors.

This module checks the arguments and defines the autograd function of FlashAttention. One of three
modules computes the tiles: `tiled` (plain torch), `launch` (Triton) or `symbolic` (memory and FLOPs
only). Each of them has a `forward` and a `backward` with the same signatures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib import _check
from course_lib._torch.symbolic import is_symbolic

from . import symbolic, tiled

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute softmax(scale * Q K^T) V with all scores in memory at once.

    Autograd saves Q, K, V and the probabilities P, which have n_q x n_k entries per head. The
    arguments, the result and the errors are the same as those of `flash_attention`, except that
    the arguments `block_q`, `block_k` and `backend` do not exist here.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """
    q, k, v = _check_inputs(q, k, v, enable_gqa, attn_mask, dropout_p)
    leading = q.shape[:-2]
    q, k, v = map(_as_4d, (q, k, v))
    shift = _mask_shift(q, k, causal, is_causal)
    scale = _score_scale(q, scale)
    (batch, heads, n_q, d), (_, kv_heads, n_k, d_v) = q.shape, v.shape
    rows_without_keys = min(n_q, max(0, -(shift or 0)))  # the softmax of these rows would be NaN
    rows = n_q - rows_without_keys
    groups = batch * kv_heads
    stacked = heads // max(1, kv_heads) * rows  # rows of all heads that share K and V
    with torch.autocast(q.device.type, enabled=False):
        queries = q[:, :, rows_without_keys:].reshape(groups, stacked, d)
        scores = (
            torch.bmm(queries, k.reshape(groups, n_k, d).mT).view(batch, heads, rows, n_k) * scale
        )
        if shift is not None:
            # The mask is added instead of using masked_fill, because an addition saves nothing for
            # backward.
            scores = scores + scores.new_full((rows, n_k), -math.inf).triu(
                rows_without_keys + shift + 1
            )
        p = scores.softmax(-1).view(groups, stacked, n_k)
        o = torch.bmm(p, v.reshape(groups, n_k, d_v)).view(batch, heads, rows, d_v)
    o = F.pad(o, (0, 0, rows_without_keys, 0)) if rows_without_keys else o
    return _with_shape(o, (*leading, *o.shape[-2:]))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    backend: str = "auto",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute softmax(scale * Q K^T) V in tiles, without all scores in memory at once.

    In forward and in backward, only a few tiles of the n_q x n_k scores are in memory at a time.
    For backward, autograd saves Q, K, V, the output and one log-sum-exp per row of scores.

    The arguments are named as in `F.scaled_dot_product_attention`, but arbitrary masks and dropout
    are not supported. Under `torch.autocast` the inputs are first cast to the autocast dtype, as
    PyTorch does for `F.scaled_dot_product_attention`. Sums and the log-sum-exp are in float32
    (float64 for float64 inputs). Second derivatives and `torch.vmap` are not supported and raise an
    error.

    Args:
        q: Queries, of shape (batch, heads, n_q, d), in float32, float64, bfloat16 or float16. q, k
            and v may have any strides, and may have dimensions of size 0. They may have more or
            fewer leading dimensions, as in (n_q, d), (batch, n_q, d) and (a, b, heads, n_q, d). The
            leading dimensions of k and v must be those of q, except for the number of heads. With
            more than four dimensions, the dimensions before the heads are merged. If the strides of
            a tensor do not allow this merge as a view, the tensor is copied.
        k: Keys, of shape (batch, kv_heads, n_k, d). kv_heads must divide heads, and query head h
            uses head h // (heads / kv_heads) of K and V. This is grouped-query attention, or
            multi-query attention if kv_heads is 1. A tensor with fewer than four dimensions has no
            dimension of heads.
        v: Values, of shape (batch, kv_heads, n_k, d_v).
        causal: Whether query i attends only to keys up to i + n_k - n_q, so that the last query
            attends to all keys, like `torch.nn.attention.bias.causal_lower_right`. The output of a
            query without keys is zero.
        is_causal: Whether query i attends only to keys up to i, as in
            `F.scaled_dot_product_attention`. Cannot be combined with `causal`.
        scale: Number by which the scores are multiplied, by default 1 / sqrt(d).
        enable_gqa: If False, kv_heads must be equal to heads, as in PyTorch. None and True allow
            any kv_heads that divides heads.
        block_q: Number of rows (queries) of a tile, which need not divide n_q. By default the
            backend chooses it. Triton allows 16, 32, 64 and 128.
        block_k: Number of columns (keys) of a tile, which need not divide n_k. By default the
            backend chooses it. Triton allows 16, 32, 64 and 128.
        backend: "torch", "triton" or "auto". "auto" uses Triton for CUDA tensors if Triton can run,
            and otherwise plain torch. For symbolic tensors "auto" counts the bytes and FLOPs of the
            backend that real tensors would use, without running the loops over tiles.
        attn_mask, dropout_p: Must be None and 0, respectively. These arguments exist so that code
            written for PyTorch's function gets an error that explains what is not supported.

    Returns:
        The output, of shape (batch, heads, n_q, d_v), in the dtype of q and with the leading
        dimensions of q.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value, or shapes, dtypes or devices
            do not match.
        RuntimeError: `backend` is "triton", but Triton cannot run on these tensors or this machine.
            The message gives the reason.

    Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691.
    """
    q, k, v = _check_inputs(q, k, v, enable_gqa, attn_mask, dropout_p)
    shift = _mask_shift(q, k, causal, is_causal)
    scale = _score_scale(q, scale)
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None:
            _check.whole(name, block, 1)
    options = tiled.Options(shift, scale, block_q, block_k)
    return _Flash.apply(q, k, v, options, _backend_module(backend, q, k, v))[0]


class _Flash(torch.autograd.Function):
    """Autograd function of FlashAttention.

    Its node saves q, k, v, the output o and the log-sum-exp lse, of shape (batch, heads, n_q).
    """

    @staticmethod
    def forward(q, k, v, options, backend):
        with torch.autocast(q.device.type, enabled=False):
            o, lse = backend.forward(*map(_as_4d, (q, k, v)), options)
        return _with_shape(o, (*q.shape[:-1], v.shape[-1])), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ctx.options, ctx.backend = inputs
        o, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, o, lse)

    @staticmethod
    def backward(ctx, grad_o, _):
        return (
            *_FlashBackward.apply(*ctx.saved_tensors, grad_o, ctx.options, ctx.backend),
            None,
            None,
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        raise RuntimeError(
            "flash_attention cannot be combined with torch.vmap, which torch.func.jacrev and"
            " torch.func.hessian also use; pass tensors with a batch dimension, or call"
            " standard_attention instead"
        )


class _FlashBackward(torch.autograd.Function):
    """The backward pass of FlashAttention, as a separate autograd function.

    Without it, `torch.func` would treat the second derivative as zero instead of raising an error.
    """

    @staticmethod
    def forward(q, k, v, o, lse, grad_o, options, backend):
        with torch.autocast(q.device.type, enabled=False):
            gradients = backend.backward(*map(_as_4d, (q, k, v, o)), lse, _as_4d(grad_o), options)
        return tuple(_with_shape(dx, x.shape) for dx, x in zip(gradients, (q, k, v), strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "flash_attention cannot be differentiated twice; use standard_attention for that"
        )

    vmap = _Flash.vmap


def _backend_module(name: str, q: Tensor, k: Tensor, v: Tensor) -> ModuleType:
    """Return the module that computes the tiles for these tensors with the backend `name`."""
    _check.one_of("backend", name, ("auto", "torch", "triton"))
    if 0 in (*q.shape, *k.shape, *v.shape):
        return tiled  # nothing has to be computed: the result is empty or zero
    if name == "auto" and is_symbolic(q):
        return symbolic
    if name == "torch" or (name == "auto" and not q.is_cuda):
        return tiled
    from . import launch  # not at the top, because importing Triton is slow

    reason = launch.unsupported_reason(q, v)
    if reason is None:
        return launch
    if name == "auto":
        return tiled
    raise RuntimeError(
        f"backend must be 'torch' or 'auto' for these tensors, got 'triton': {reason}"
    )


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: Any, attn_mask: Any, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments, and return q, k and v in the dtype that autocast would use."""
    if attn_mask is not None:
        raise TypeError(
            f"attn_mask must be None, got {_check.describe(attn_mask)}; flash_attention"
            " supports only the causal mask: pass causal=True or is_causal=True instead"
        )
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p}; the recomputation in backward would"
            " drop different weights"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.is_nested or x.layout is not torch.strided or x.dim() < 2:
            actual = "a nested tensor" if x.is_nested else f"{_check.describe(x)}, {x.layout}"
            raise ValueError(
                f"{name} must be a dense tensor of shape (..., n, d), such as (batch, heads, n,"
                f" d), got {actual}"
            )
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
            for x in (q, k, v)
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be in float32, float64, bfloat16 or float16, got {q.dtype}")
    _check_shapes(q, k, v, enable_gqa)
    return q, k, v


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: Any) -> None:
    """Raise an error unless k and v have q's dtype and device, and shapes that match q.

    The number of keys and the head dimension of v may be any numbers. k and v may have fewer heads
    than q only if the tensors have at least four dimensions.
    """
    has_heads = q.dim() > 3
    leading = q.shape[:-2]
    if has_heads and k.dim() == q.dim():
        heads, kv_heads = q.shape[-3], k.shape[-3]
        shared = enable_gqa is None or enable_gqa
        if kv_heads != heads and not (shared and kv_heads and heads % kv_heads == 0):
            allowed = (
                f"a number of heads that divides the {heads} heads of q"
                if shared
                else f"{heads} heads, the same number as q (or pass enable_gqa=True)"
            )
            raise ValueError(f"k must have {allowed}, got {kv_heads} heads")
        leading = (*leading[:-1], kv_heads)
    n_k = k.shape[-2]
    for name, x, shape in (
        ("k", k, (*leading, n_k, q.shape[-1])),
        ("v", v, (*leading, n_k, v.shape[-1])),
    ):
        if (x.shape, x.dtype, x.device) != (shape, q.dtype, q.device):
            allowed = f"shape {shape}, {q.dtype} and device {q.device}, to match the other tensors"
            raise ValueError(f"{name} must have {allowed}, got {_check.describe(x)} on {x.device}")


def _as_4d(x: Tensor) -> Tensor:
    """Return the tensor as (batch, heads, n, d).

    With fewer than four dimensions there is a single head. With more, all dimensions before the
    heads are merged into the batch.
    """
    if x.dim() > 4:
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    while x.dim() < 4:
        x = x.unsqueeze(-3)
    return x


def _with_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a four-dimensional result to `shape`; this undoes the reshaping of `_as_4d`."""
    return x if x.shape == torch.Size(shape) else x.reshape(shape)


def _mask_shift(q: Tensor, k: Tensor, causal: bool, is_causal: bool) -> int | None:
    """Return the mask's shift: query i attends to keys up to i + shift. None without a mask."""
    if causal and is_causal:
        raise ValueError(
            "is_causal and causal cannot both be True: is_causal aligns the mask at the top left,"
            " as F.scaled_dot_product_attention does, and causal at the bottom right, so that the"
            " last query attends to all keys"
        )
    return k.shape[-2] - q.shape[-2] if causal else 0 if is_causal else None


def _score_scale(q: Tensor, scale: float | None) -> float:
    """Return the number by which scores are multiplied, 1 / sqrt(d) if `scale` is None."""
    return max(1, q.shape[-1]) ** -0.5 if scale is None else _check.number("scale", scale)
