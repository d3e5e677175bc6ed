"""Operators that PyTorch runs for tensors on CUDA and not for tensors on a CPU.

Symbolic tensors are on the CPU. Inside `Symbolic(kind="cuda")`, functions that choose their
operator by the device choose as on CUDA, so that tensors saved for backward have the bytes that
they have there. `RULES` changes results that differ in their dtype. Whole steps were compared with
an H200 and torch 2.11 (`tests/test_cuda_estimates.py`).

`ATTENTION_RULES` decides which kernel of attention runs. It was compared with the compiled checks
of torch 2.11 and 2.13 (`tests/test_cuda_kernels.py`), and its rows say which of them an H200 has
confirmed.

Not included are workspaces that an operator allocates and frees, what cuDNN and cuBLAS keep, and
cuDNN's CTC loss, which runs only for labels in one dimension and of dtype int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from .._torch.modes import autocast_of
from .._torch.tensors import map_tensors
from .cpu_kernels import Dispatch, make_result

_aten = torch.ops.aten
_attention, _dropout, _rms_norm = F.scaled_dot_product_attention, F.dropout, F.rms_norm
_16_BIT = (torch.float16, torch.bfloat16)


# ---- Which kernel of attention runs

_major, _minor = torch.__version__.split(".")[:2]
INSTALLED = int(_major), int(_minor)


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU and its PyTorch on which the choice of an attention kernel depends.

    Attributes:
        capability: Compute capability, as `torch.cuda.get_device_capability` returns it. The
            default is that of the H100 and H200.
        torch: Version of PyTorch whose rules apply; the default is the installed one.
    """

    capability: tuple[int, int] = (9, 0)
    torch: tuple[int, int] = INSTALLED

    def __post_init__(self):
        for name in ("capability", "torch"):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and [type(part) for part in pair] == [int, int]):
                raise TypeError(f"{name} must be two whole numbers such as (9, 0), got {pair!r}")


@dataclass(frozen=True)
class Call:
    """Arguments of `scaled_dot_product_attention`, and the GPU on which it runs."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    gpu: Gpu

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def head_sizes(self) -> tuple[int, ...]:
        return tuple(x.shape[-1] for x in self.inputs)

    @property
    def keeps(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.inputs)

    def has_dtype(self, *allowed: torch.dtype) -> bool:
        return {x.dtype for x in self.inputs} <= {*allowed} and len(
            {x.dtype for x in self.inputs}
        ) == 1

    def last_strides_are_1(self) -> bool:
        masks = () if self.mask is None else (self.mask,)
        return all(x.stride(-1) == 1 for x in (*self.inputs, *masks))

    def last_strides_are_1_or_one_element(self) -> bool:
        # A head of one element may have any stride, but the mask may not.
        one = self.query.shape[-1] == 1 and (self.mask is None or self.mask.stride(-1) == 1)
        return one or self.last_strides_are_1()

    def heads_fit(self, *, grouped: bool, equal_kv: bool = True) -> bool:
        (b, q), (b_k, k), (b_v, v) = (x.shape[:2] for x in self.inputs)
        if not b == b_k == b_v:
            return False
        if not (self.grouped and grouped):
            return q == k == v
        return q % k == 0 and q % v == 0 and (k == v or not equal_kv)

    def mask_broadcasts(self) -> bool:
        if self.mask is None:
            return True
        full = (*self.query.shape[:-1], self.key.shape[-2])
        wanted = full if self.mask.dim() == 4 else full[2:]
        return (
            not self.mask.requires_grad
            and self.mask.dim() in (2, 4)
            and all(n in (1, m) for n, m in zip(self.mask.shape, wanted, strict=True))
        )

    def alignment(self) -> int:
        """Return the number that must divide the head sizes of the memory-efficient kernel."""
        whole = 16 // self.query.itemsize  # 16 bytes, which tensor cores read at once
        if self.gpu.capability >= (8, 0):
            return max(4, whole)
        return whole if self.gpu.capability >= (7, 0) and self.query.itemsize == 2 else 1


@dataclass(frozen=True)
class Rule:
    """Condition under which a kernel of attention may run.

    Attributes:
        kernels: Kernels that require it.
        condition: The condition in words.
        holds: Whether a call meets the condition.
        function: Function of PyTorch that checks it.
        file: File with this function, in `SOURCE`.
        since: (2, 11) if both versions of `SOURCE` check it; (2, 13) if only the later one does.
        measured: Whether steps on an H200 with torch 2.11 depended on it and agreed.
    """

    kernels: tuple[str, ...]
    condition: str
    holds: Callable[[Call], bool]
    function: str
    file: str = "cuda/sdp_utils.cpp"
    since: tuple[int, int] = (2, 11)
    measured: bool = False


CUDNN, FLASH, EFFICIENT = ("cudnn",), ("flash",), ("efficient",)
FUSED = CUDNN + FLASH + EFFICIENT
SOURCE = "pytorch/pytorch, aten/src/ATen/native/transformers, tags v2.11.0 and v2.13.0"
_SHARED = "sdp_utils_cpp.h"

# A kernel may run if all its rows hold. The header `sdp_utils_cpp.h` was read at both tags, and
# `cuda/sdp_utils.cpp` at commit 001f694, which is later. The rows in which it differs from the tags
# follow the compiled functions of both wheels for CUDA 13. These wheels have cuDNN 9.19 (torch
# 2.11) and 9.20 (torch 2.13); older ones have other limits. Rules for nested tensors and for AMD's
# GPUs are left out.
ATTENTION_RULES = (
    Rule(
        FLASH,
        "the compute capability is from 8.0 to 12.1",
        lambda call: (8, 0) <= call.gpu.capability <= (12, 1),
        "check_flash_attention_hardware_support",
    ),
    Rule(
        EFFICIENT,
        "the compute capability is from 5.0 to 12.1",
        lambda call: (5, 0) <= call.gpu.capability <= (12, 1),
        "check_mem_efficient_hardware_support",
    ),
    Rule(
        FUSED,
        "query, key and value have 4 dimensions",
        lambda call: all(x.dim() == 4 for x in call.inputs),
        "check_tensor_shapes",
        _SHARED,
    ),
    Rule(
        CUDNN + FLASH,
        "query, key and value are in fp16 or bf16",
        lambda call: call.has_dtype(*_16_BIT),
        "check_dtypes_low_precision",
        measured=True,
    ),
    Rule(
        EFFICIENT,
        "query, key and value are in fp32, fp16 or, from capability 8.0 on, bf16",
        lambda call: call.has_dtype(
            torch.float32, *(_16_BIT if call.gpu.capability >= (8, 0) else _16_BIT[:1])
        ),
        "can_use_mem_efficient_attention",
        measured=True,
    ),
    Rule(
        FLASH,
        "there is no mask",
        lambda call: call.mask is None,
        "check_for_attn_mask",
        _SHARED,
    ),
    Rule(
        CUDNN,
        "the mask needs no gradient and has 2 or 4 dimensions, each full or 1",
        lambda call: call.mask_broadcasts(),
        "check_attn_mask_shape",
        _SHARED,
    ),
    Rule(
        FLASH,
        "without a mask, causal attention has as many queries as keys",
        lambda call: not call.causal or call.query.shape[-2] == call.key.shape[-2],
        "check_flash_causal_non_square_seqlens",
    ),
    Rule(
        FUSED,
        "no sequence is empty",
        lambda call: call.query.shape[-2] > 0 and call.key.shape[-2] > 0,
        "check_nonzero_sequence_lengths_dense",
        _SHARED,
    ),
    Rule(
        EFFICIENT,
        "the last stride of query, key, value and mask is 1",
        lambda call: call.last_strides_are_1(),
        "check_last_dim_stride_equals_1_dense<false>",
        _SHARED,
        measured=True,
    ),
    Rule(
        CUDNN + FLASH,
        "the last stride of the mask is 1, and that of query, key and value or their head size",
        lambda call: call.last_strides_are_1_or_one_element(),
        "check_last_dim_stride_equals_1_dense<true>",
        _SHARED,
    ),
    Rule(
        CUDNN,
        "batch sizes are equal, and heads too, or those of key and value divide those of the query",
        lambda call: call.heads_fit(grouped=True, equal_kv=False),
        "check_batch_size_and_num_heads_dense<true, false>",
        _SHARED,
        measured=True,
    ),
    Rule(
        FLASH,
        "as for cuDNN, and key and value have equally many heads",
        lambda call: call.heads_fit(grouped=True),
        "check_batch_size_and_num_heads_dense<true, true>",
        _SHARED,
    ),
    Rule(
        EFFICIENT,
        "batch sizes and numbers of heads are equal",
        lambda call: call.heads_fit(grouped=False),
        "check_batch_size_and_num_heads_dense<false, true>",
        _SHARED,
        measured=True,
    ),
    Rule(
        CUDNN,
        "head sizes are at most 256 on Hopper (192 and 128 for the value on capability 10), else"
        " 128",
        lambda call: (
            max(call.head_sizes) <= (256 if call.gpu.capability == (9, 0) else 128)
            or (call.gpu.capability[0] == 10 and call.head_sizes == (192, 192, 128))
        ),
        "check_cudnn_tensor_shapes",
    ),
    Rule(
        CUDNN,
        "head sizes are multiples of 8",
        lambda call: not any(d % 8 for d in call.head_sizes),
        "check_cudnn_tensor_shapes",
    ),
    Rule(
        CUDNN,
        "there are several keys, and with dropout several queries",
        lambda call: call.key.shape[-2] != 1 and not (call.dropout and call.query.shape[-2] == 1),
        "check_cudnn_tensor_shapes",
    ),
    Rule(
        CUDNN,
        "batch size and heads are at most 65,535",
        lambda call: max(call.query.shape[:2]) <= 65_535,
        "check_cudnn_tensor_shapes",
        since=(2, 13),
    ),
    Rule(
        CUDNN,
        "the dropout probability is a multiple of 1/16",
        lambda call: (16 * call.dropout).is_integer(),
        "check_cudnn_dropout",
        since=(2, 13),
    ),
    Rule(
        CUDNN,
        "PyTorch is not told to be deterministic, or only to warn",
        lambda call: (
            not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "check_cudnn_deterministic",
    ),
    Rule(
        FLASH,
        "head sizes are equal and at most 256; PyTorch pads them to a multiple of 8",
        lambda call: len({*call.head_sizes}) == 1 and call.head_sizes[0] <= 256,
        "check_head_dim_size_flash",
    ),
    Rule(
        FLASH,
        "training on capability 8.6, 8.9, 12.0 or 12.1 has head sizes up to 192, or over 224"
        " without dropout",
        lambda call: (
            not call.keeps
            or not any(a <= call.gpu.capability <= b for a, b in _SMALL_SHARED_MEMORY)
            or call.head_sizes[0] <= 192
            or (call.head_sizes[0] > 224 and not call.dropout)
        ),
        "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
    ),
    Rule(
        EFFICIENT,
        "the head sizes of query and key are equal, and all are multiples of 16 bytes",
        lambda call: (
            call.head_sizes[0] == call.head_sizes[1]
            and all(d > 0 and d % call.alignment() == 0 for d in call.head_sizes)
        ),
        "check_head_dim_size_mem_efficient",
    ),
    Rule(
        EFFICIENT,
        "query, key and value begin at a multiple of 16 bytes, from capability 8.0 on",
        lambda call: (
            call.gpu.capability < (8, 0)
            or not any(x.storage_offset() % call.alignment() for x in call.inputs if x.numel())
        ),
        "check_data_ptr_alignment_mem_efficient",
        since=(2, 13),
    ),
)
_SMALL_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))


def kernels_in_order(gpu: Gpu) -> tuple[str, ...]:
    """Return the fused kernels of attention in the order in which PyTorch tries them.

    cuDNN comes first on capability 9 and 10, for 2.11 only with minor version 0 or 3. Elsewhere it
    comes after the fallback to several operators, so it never runs.

    Source: cuda/sdp_utils.cpp, `check_prefer_cudnn_attention` and `priority_order`.
    """
    major, minor = gpu.capability
    first = major in (9, 10) and (minor in (0, 3) or gpu.torch >= (2, 13))
    return FUSED if first else FLASH + EFFICIENT


def may_run(kernel: str, call: Call) -> bool:
    """Return whether all rules of a fused kernel hold for a call."""
    return all(
        rule.holds(call)
        for rule in ATTENTION_RULES
        if kernel in rule.kernels and call.gpu.torch >= rule.since
    )


def attention_kernel(call: Call) -> str:
    """Return the kernel that PyTorch runs for a call: "cudnn", "flash", "efficient" or "math".

    "math" stands for several operators, which save the scores.
    """
    kernels = kernels_in_order(call.gpu)
    return next((kernel for kernel in kernels if may_run(kernel, call)), "math")


_GPU: ContextVar[Gpu] = ContextVar("gpu")


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
    """Run the kernel that PyTorch chooses on the GPU of the mode, by `ATTENTION_RULES`.

    Source: attention.cpp (`scaled_dot_product_attention`), in `SOURCE`.
    """
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    given |= {"scale": scale, "enable_gqa": enable_gqa}
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value), query, key, value, **given
        )
    # The operators below do not pass through autocast.
    if dtype := autocast_of(query):
        query, key, value, attn_mask = map_tensors(
            lambda x: x.to(dtype) if x.is_floating_point() else x, (query, key, value, attn_mask)
        )
        given["attn_mask"] = attn_mask
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, _GPU.get())
    kernel = attention_kernel(call)
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(query, key, value, **given)
    if kernel == "flash":
        return _flash_attention(call, scale)
    mask = _float_mask(call)
    options = call.keeps, dropout_p, is_causal
    if kernel == "cudnn":
        run = _aten._scaled_dot_product_cudnn_attention
        return run(query, key, value, mask, *options, False, scale=scale)[0]
    if mask is not None:
        mask = _align_mask(mask)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    run = _aten._scaled_dot_product_efficient_attention
    return run(query, key, value, mask, *options, scale=scale)[0]


def _flash_attention(call: Call, scale: float | None) -> Tensor:
    """Run FlashAttention, which saves query, key, value and result as it gets them: padded."""
    d = call.query.shape[-1]
    padded = [F.pad(x, (0, -d % 8)) if d % 8 else x for x in call.inputs]
    scale = d**-0.5 if scale is None else scale
    run = _aten._scaled_dot_product_flash_attention
    return run(*padded, call.dropout, call.causal, False, scale=scale)[0][..., :d]


def _float_mask(call: Call) -> Tensor | None:
    """Return the mask of a call in the query's dtype, with 0 where attention is allowed."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    mask = torch.zeros_like(call.mask, dtype=call.query.dtype)
    return mask.masked_fill_(call.mask.logical_not(), -torch.inf)


def _align_mask(mask: Tensor) -> Tensor:
    """Return a mask whose strides are multiples of 8, a view of a padded copy where needed."""
    if not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


# ---- Other functions that choose by the device


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
def chosen_as_on_cuda(gpu: Gpu) -> Iterator[None]:
    """Replace the functions that choose their operator by the device inside the `with` block."""
    with ExitStack() as stack:
        stack.callback(_GPU.reset, _GPU.set(gpu))
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
