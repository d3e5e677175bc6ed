"""Standard attention as autograd differentiates it, FlashAttention as one autograd function, and what both refuse."""

from __future__ import annotations

import math
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from . import outline, tiled

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale * Q K^T) V with all of the scores at once; autograd saves Q, K, V and the probabilities P.

    Arguments, result and errors are those of `flash_attention`.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """
    q, k, v, scale = _checked(q, k, v, causal, scale)
    (batch, heads, n_q, d), (kv_heads, n_k) = q.shape, k.shape[1:3]
    unseeing = max(0, n_q - n_k) if causal else 0  # rows that see no key; softmax would make them NaN
    rows = n_q - unseeing
    grouped = (batch * kv_heads, heads // kv_heads * rows, d)  # heads that share K and V, one below the other
    keys, values = (x.reshape(batch * kv_heads, n_k, d) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.bmm(q[:, :, unseeing:].reshape(grouped), keys.mT).view(batch, heads, rows, n_k) * scale
        if causal:  # added, not filled in: adding saves nothing for backward
            scores = scores + scores.new_full((rows, n_k), -math.inf).triu(n_k - rows + 1)
        p = scores.softmax(-1)
        o = torch.bmm(p.view(batch * kv_heads, -1, n_k), values).view(batch, heads, rows, d)
    return F.pad(o, (0, 0, unseeing, 0)) if unseeing else o


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    backend: str = "auto",
    attn_mask: None = None,
) -> Tensor:
    """softmax(scale * Q K^T) V in tiles; Q, K, V, the output and one log-sum-exp a row are saved for backward.

    Of the n_q x n_k scores there is one tile at a time, forward and backward. Masks are not supported, nor is dropout:
    `causal` and `kv_heads` are what there is. Under `torch.autocast`, the inputs are cast to its dtype first, as for
    `F.scaled_dot_product_attention`. Sums are in float32 (float64 for float64 inputs), and so is the log-sum-exp.
    A second derivative and `torch.vmap` are refused.

    Args:
        q: (batch, heads, n_q, d), in float32, float64, bfloat16 or float16; of any strides, as k and v.
        k, v: (batch, kv_heads, n_k, d); kv_heads divides heads, and query head h reads K and V of h // (heads /
            kv_heads): grouped-query attention, multi-query for kv_heads = 1.
        causal: query i sees the keys up to i + n_k - n_q (the last query sees them all), as
            `torch.nn.attention.bias.causal_lower_right`. A query that sees no key gives zeros.
        scale: 1 / sqrt(d) if left out.
        block_q, block_k: rows and columns of a tile; the backend's choice if left out.
        backend: "torch", "triton", or "auto": Triton for CUDA tensors where it can run, else torch; for symbolic ones
            an outline of torch, of the same bytes and FLOPs.
        attn_mask: None; it is here to be refused with a reason.

    Returns:
        (batch, heads, n_q, d), in the dtype of q.

    Raises:
        TypeError, ValueError: an argument is not of its kind, or shapes, dtypes or devices do not go together.
        RuntimeError: backend is "triton", which cannot run here for such tensors: the message says why.

    Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691.
    """
    if attn_mask is not None:
        raise TypeError(
            "attn_mask is given, but masks are not supported; causal=True and kv_heads that divide heads are"
        )
    q, k, v, scale = _checked(q, k, v, causal, scale)
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None:
            tiled.check_block(name, block)
    return _Flash.apply(q, k, v, causal, scale, block_q, block_k, _backend(backend, q))[0]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, causal, scale, block_q, block_k, backend):
        with torch.autocast(q.device.type, enabled=False):
            return backend.forward(q, k, v, causal, scale, block_q, block_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.options, ctx.backend = inputs
        o, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, o, lse)

    @staticmethod
    def backward(ctx, grad_o, _):
        return *_FlashBackward.apply(*ctx.saved_tensors, grad_o, *ctx.options, ctx.backend), *[None] * 5

    @staticmethod
    def vmap(info, in_dims, *args):
        raise RuntimeError("flash_attention does not run under torch.vmap; put what is mapped over into its batch")


class _FlashBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is refused also in `torch.func`, not taken for zero."""

    @staticmethod
    def forward(q, k, v, o, lse, grad_o, causal, scale, block_q, block_k, backend):
        with torch.autocast(q.device.type, enabled=False):
            return backend.backward(q, k, v, o, lse, grad_o, causal, scale, block_q, block_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("flash_attention has no second derivative; standard_attention has")

    vmap = _Flash.vmap


def _backend(name: str, q: Tensor) -> ModuleType:
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f'backend is {name!r}; it takes "auto", "torch" or "triton"')
    if name == "auto" and isinstance(q, FakeTensor):
        return outline
    if name == "torch" or (name == "auto" and not q.is_cuda):
        return tiled
    try:
        from . import kernels

        reason = kernels.why_not(q)
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    if reason is None:
        return kernels
    if name == "auto":
        return tiled
    raise RuntimeError(f'backend is "triton", but {reason}; backend="torch" works')


def _checked(q: Any, k: Any, v: Any, causal: Any, scale: Any) -> tuple[Tensor, Tensor, Tensor, float]:
    """The tensors, cast as autocast wants them, and the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it takes a tensor (batch, heads, n, d)")
        if x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{name} is sparse or nested; it takes a dense tensor (batch, heads, n, d)")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it takes 4 dimensions, (batch, heads, n, d)")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; every dimension takes 1 or more")
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}; all three take one device")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype) for x in (q, k, v))
    if q.dtype not in DTYPES:
        raise TypeError(f"q is in {q.dtype}; it takes float32, float64, bfloat16 or float16")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is in {x.dtype}, but q is in {q.dtype}; all three take one dtype")
        if x.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head dimension {x.shape[3]}, but q has {q.shape[3]}; all three take the same")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]}, but q has {q.shape[0]}; all three take the same")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}; both take the same")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k and v have {k.shape[1]} heads, which do not divide q's {q.shape[1]}; they take a divisor")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is a {type(causal).__name__}; it takes True or False, and masks are not supported")
    if scale is None:
        return q, k, v, q.shape[3] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale is {scale!r}; it takes a number, or None for 1 / sqrt(d)")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it takes a finite number, or None for 1 / sqrt(d)")
    return q, k, v, float(scale)
