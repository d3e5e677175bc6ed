"""Operators that PyTorch runs for tensors on CUDA and not for tensors on a CPU.

Symbolic tensors are on the CPU. Inside `Symbolic(kind="cuda")`, functions that choose their
operator by the device choose as on CUDA, so that tensors saved for backward have the bytes that
they have there. `RULES` changes results that differ in their dtype. All of it was compared with an
H200 and torch 2.11, operator by operator and in whole steps (`tests/test_cuda_estimates.py`).

Not included are workspaces that an operator allocates and frees, and what cuDNN and cuBLAS keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from .cpu_kernels import Dispatch, make_result

_aten = torch.ops.aten
_attention, _dropout, _rms_norm = F.scaled_dot_product_attention, F.dropout, F.rms_norm
_16_BIT = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that PyTorch chooses on a Hopper GPU.

    These are cuDNN's in 16-bit dtypes, FlashAttention's for the head dimensions that cuDNN does not
    support, and the memory-efficient one otherwise. Where none of them runs, for example in fp32
    with fewer heads of keys than of queries, PyTorch runs several operators and saves the scores.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp.
    """
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    given |= {"scale": scale, "enable_gqa": enable_gqa}
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value), query, key, value, **given
        )
    kernel = _kernel(query, key, value, attn_mask)
    if kernel is None:
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(query, key, value, **given)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            allowed = attn_mask
            attn_mask = torch.zeros_like(allowed, dtype=query.dtype)
            attn_mask.masked_fill_(allowed.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if kernel is _aten._scaled_dot_product_flash_attention:
        return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    more = (False,) if kernel is _aten._scaled_dot_product_cudnn_attention else ()
    return kernel(query, key, value, attn_mask, keeps, dropout_p, is_causal, *more, scale=scale)[0]


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable | None:
    """Return the fused operator that runs on these tensors, or None if there is none."""
    d, grouped = q.shape[-1], q.shape[-3] != k.shape[-3]
    given = [q, k, v] if mask is None else [q, k, v, mask]
    if q.dim() != 4 or {x.dtype for x in (q, k, v)} != {q.dtype} or v.shape[-1] != d:
        return None
    if any(x.stride(-1) != 1 for x in given):
        return None
    if q.dtype in _16_BIT and (mask is None or not mask.requires_grad):
        if d % 8 == 0 and d <= 128:
            return _aten._scaled_dot_product_cudnn_attention
        if d % 8 == 0 and d <= 256 and mask is None:
            return _aten._scaled_dot_product_flash_attention
    aligned = d % (16 // q.itemsize) == 0
    if grouped or not aligned or q.dtype not in (torch.float32, *_16_BIT):
        return None
    return _aten._scaled_dot_product_efficient_attention


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run the operator that saves a mask of one byte per element.

    Source: aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`).
    """
    if has_torch_function((input,)):
        return handle_torch_function(dropout, (input,), input, p, training, inplace)
    if inplace or not training or not 0 < p < 1 or input.numel() == 0:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run one operator, which saves its input and one number in fp32 per row.

    Source: aten/src/ATen/native/layer_norm.cpp (`rms_norm_symint`).
    """
    if has_torch_function((input, weight)):
        return handle_torch_function(
            rms_norm, (input, weight), input, normalized_shape, weight=weight, eps=eps
        )
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, weight, len(normalized_shape))


class _RmsNorm(torch.autograd.Function):
    """The fused operator, which has no symbolic kernel for a CPU."""

    @staticmethod
    def forward(ctx, x, weight, dims):
        rows = x.new_empty(*x.shape[:-dims], *(1,) * dims, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


@contextmanager
def chosen_as_on_cuda() -> Iterator[None]:
    """Replace the functions that choose their operator by the device inside the `with` block."""
    with ExitStack() as stack:
        for function in (scaled_dot_product_attention, dropout, rms_norm):
            stack.enter_context(patch.object(F, function.__name__, function))
        yield


# ---- results with other dtypes


def _fp32_statistics(dispatch: Dispatch, result: tuple) -> tuple:
    """Return the results of a norm with a mean and a standard deviation in fp32.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu and Normalization.cu.
    """
    output, *statistics = result
    if output.dtype not in _16_BIT:
        return result
    return output, *(make_result(dispatch, x.size(), None, x, torch.float32) for x in statistics)


def _seeds_on_the_host(dispatch: Dispatch, result: tuple) -> tuple:
    """Return the results of attention with a seed and an offset that take no memory of the device.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu (`_efficient_attention_forward`).
    """
    output, log_sum_exp, *seeds = result
    return output, log_sum_exp, *(make_result(dispatch, (0,), None, x) for x in seeds)


RULES: dict[Any, Callable[[Dispatch, tuple], tuple]] = {
    _aten.native_layer_norm.default: _fp32_statistics,
    _aten.native_batch_norm.default: _fp32_statistics,
    _aten._scaled_dot_product_efficient_attention.default: _seeds_on_the_host,
}
