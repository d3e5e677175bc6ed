"""Run the operators on symbolic tensors that PyTorch runs for tensors on CUDA.

Symbolic tensors report the CPU as their device. Some functions choose their operator by the device.
Inside `Symbolic(kind="cuda")`, these functions choose the operator for CUDA, so that the tensors
saved for backward have the same bytes as on CUDA. `RULES` corrects results whose dtype or size
differs on CUDA. Whole steps were compared with steps on an H200 with torch 2.11
(`tests/library/test_budget_on_gpu.py`).

`ATTENTION_RULES` determines which attention kernel runs. The rules were compared with the compiled
checks of torch 2.11 and 2.13 (`test_attention_selection.py`). The attribute `measured` of a rule
says whether steps on an H200 have confirmed it.

This module does not model three things: workspaces that an operator allocates and frees, memory
that cuDNN and cuBLAS keep, and cuDNN's CTC loss. The latter runs only for one-dimensional labels of
dtype int32.
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
    """GPU and PyTorch version for which a step is estimated.

    The GPU's compute capability and the PyTorch version determine which attention kernel runs.

    Attributes:
        capability: Compute capability, as `torch.cuda.get_device_capability` returns it. The
            default is that of the H100 and H200.
        torch: PyTorch version as (major, minor). The default is the installed version.
    """

    capability: tuple[int, int] = (9, 0)
    torch: tuple[int, int] = INSTALLED

    def __post_init__(self):
        for name, example in (("capability", (9, 0)), ("torch", (2, 13))):
            pair = getattr(self, name)
            if not (isinstance(pair, tuple) and [type(part) for part in pair] == [int, int]):
                raise TypeError(
                    f"{name} must be a version as two whole numbers, such as {example}, got"
                    f" {pair!r}"
                )


@dataclass(frozen=True)
class Call:
    """A call of `scaled_dot_product_attention`: its arguments, and the GPU on which it runs.

    Attributes:
        query, key, value: Input tensors of the call.
        mask: Argument `attn_mask` of the call, a tensor or None.
        dropout: Dropout probability.
        causal: Whether attention is causal (`is_causal`).
        grouped: Whether key and value may have fewer heads than the query (`enable_gqa`).
        gpu: `Gpu` on which the call runs.
    """

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
        """The three input tensors: query, key and value."""
        return self.query, self.key, self.value

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Features per head of query, key and value, as three numbers."""
        return tuple(x.shape[-1] for x in self.inputs)

    @property
    def needs_backward(self) -> bool:
        """Whether the result requires a gradient, so that tensors are saved for backward."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.inputs)

    def has_dtype(self, *allowed: torch.dtype) -> bool:
        """Return whether query, key and value have the same dtype, and `allowed` contains it."""
        return {x.dtype for x in self.inputs} <= {*allowed} and len(
            {x.dtype for x in self.inputs}
        ) == 1

    def last_strides_are_1(self) -> bool:
        """Return whether query, key, value and mask (if not None) have a last stride of 1."""
        masks = () if self.mask is None else (self.mask,)
        return all(x.stride(-1) == 1 for x in (*self.inputs, *masks))

    def last_strides_are_1_or_one_element(self) -> bool:
        """Return whether all last strides are 1, except that heads of size 1 may have any stride.

        If the head size of the query is above 1, the last strides of query, key, value and mask (if
        not None) must be 1. If the head size is 1, only the last stride of the mask must be 1.
        """
        one = self.query.shape[-1] == 1 and (self.mask is None or self.mask.stride(-1) == 1)
        return one or self.last_strides_are_1()

    def heads_fit(self, *, grouped: bool, equal_kv: bool = True) -> bool:
        """Return whether an attention kernel accepts the batch sizes and the numbers of heads.

        The batch sizes of query, key and value must be equal. If the call allows grouped heads and
        the kernel supports them, the numbers of key heads and of value heads must divide the number
        of query heads. Otherwise query, key and value must have equal numbers of heads.

        Args:
            grouped: Whether the kernel supports fewer key and value heads than query heads.
            equal_kv: Whether the kernel requires as many key heads as value heads.
        """
        (b, q), (b_k, k), (b_v, v) = (x.shape[:2] for x in self.inputs)
        if not b == b_k == b_v:
            return False
        if not (self.grouped and grouped):
            return q == k == v
        return q % k == 0 and q % v == 0 and (k == v or not equal_kv)

    def mask_broadcasts(self) -> bool:
        """Return whether cuDNN's attention kernel accepts the mask.

        A call without a mask is always accepted. A mask must have 2 or 4 dimensions and broadcast
        to the shape of the attention scores, and it must not require a gradient.
        """
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
        """Return the alignment that the memory-efficient kernel requires, in elements.

        Each head size must be a multiple of this number.
        """
        elements = 16 // self.query.itemsize  # tensor cores read 16 bytes at once
        if self.gpu.capability >= (8, 0):
            return max(4, elements)
        return elements if self.gpu.capability >= (7, 0) and self.query.itemsize == 2 else 1


@dataclass(frozen=True)
class AttentionRule:
    """Condition under which certain kernels can run a call of `scaled_dot_product_attention`.

    Attributes:
        kernels: Names of the kernels that require the condition: "cudnn", "flash" or "efficient".
        condition: The condition in words.
        holds: Function that returns whether a `Call` meets the condition.
        function: Name of the C++ function of PyTorch that checks the condition.
        file: Source file of this function, in the folder that `SOURCE` names.
        since: First version of PyTorch that checks the condition, as (major, minor). For a
            condition that is older than version 2.11, it is (2, 11) as well.
        measured: Whether measurements on an H200 with torch 2.11 have confirmed the condition.
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

# A kernel can run for a call if all rules for this kernel hold. The rules follow two of PyTorch's
# files: the header `sdp_utils_cpp.h` at the tags v2.11.0 and v2.13.0, and `cuda/sdp_utils.cpp` at
# the later commit 001f694. Where that commit differs from the tags, the rules follow the compiled
# functions in PyTorch's wheels for CUDA 13. These wheels have cuDNN 9.19 (torch 2.11) and 9.20
# (torch 2.13); older versions of cuDNN have other limits. Rules for nested tensors and for AMD's
# GPUs are left out.
ATTENTION_RULES = (
    AttentionRule(
        FLASH,
        "the compute capability is from 8.0 to 12.1",
        lambda call: (8, 0) <= call.gpu.capability <= (12, 1),
        "check_flash_attention_hardware_support",
    ),
    AttentionRule(
        EFFICIENT,
        "the compute capability is from 5.0 to 12.1",
        lambda call: (5, 0) <= call.gpu.capability <= (12, 1),
        "check_mem_efficient_hardware_support",
    ),
    AttentionRule(
        FUSED,
        "query, key and value have 4 dimensions",
        lambda call: all(x.dim() == 4 for x in call.inputs),
        "check_tensor_shapes",
        _SHARED,
    ),
    AttentionRule(
        CUDNN + FLASH,
        "query, key and value are in fp16 or bf16",
        lambda call: call.has_dtype(*_16_BIT),
        "check_dtypes_low_precision",
        measured=True,
    ),
    AttentionRule(
        EFFICIENT,
        "query, key and value are in fp32, fp16 or, from capability 8.0 on, bf16",
        lambda call: call.has_dtype(
            torch.float32, *(_16_BIT if call.gpu.capability >= (8, 0) else _16_BIT[:1])
        ),
        "can_use_mem_efficient_attention",
        measured=True,
    ),
    AttentionRule(
        FLASH,
        "there is no mask",
        lambda call: call.mask is None,
        "check_for_attn_mask",
        _SHARED,
    ),
    AttentionRule(
        CUDNN,
        ("the mask needs no gradient and has 2 or 4 dimensions, each of full size or of size 1"),
        lambda call: call.mask_broadcasts(),
        "check_attn_mask_shape",
        _SHARED,
    ),
    AttentionRule(
        FLASH,
        "without a mask, causal attention has as many queries as keys",
        lambda call: not call.causal or call.query.shape[-2] == call.key.shape[-2],
        "check_flash_causal_non_square_seqlens",
    ),
    AttentionRule(
        FUSED,
        "no sequence is empty",
        lambda call: call.query.shape[-2] > 0 and call.key.shape[-2] > 0,
        "check_nonzero_sequence_lengths_dense",
        _SHARED,
    ),
    AttentionRule(
        EFFICIENT,
        "the last stride of query, key, value and mask is 1",
        lambda call: call.last_strides_are_1(),
        "check_last_dim_stride_equals_1_dense<false>",
        _SHARED,
        measured=True,
    ),
    AttentionRule(
        CUDNN + FLASH,
        (
            "the last stride of the mask is 1, and the last strides of query, key and value"
            " are 1 unless the head size is 1"
        ),
        lambda call: call.last_strides_are_1_or_one_element(),
        "check_last_dim_stride_equals_1_dense<true>",
        _SHARED,
    ),
    AttentionRule(
        CUDNN,
        (
            "batch sizes are equal, and the numbers of heads of key and value are equal to"
            " that of the query, or divide it with enable_gqa=True"
        ),
        lambda call: call.heads_fit(grouped=True, equal_kv=False),
        "check_batch_size_and_num_heads_dense<true, false>",
        _SHARED,
        measured=True,
    ),
    AttentionRule(
        FLASH,
        "as for cuDNN, and the numbers of heads of key and value are equal",
        lambda call: call.heads_fit(grouped=True),
        "check_batch_size_and_num_heads_dense<true, true>",
        _SHARED,
    ),
    AttentionRule(
        EFFICIENT,
        "batch sizes and numbers of heads are equal",
        lambda call: call.heads_fit(grouped=False),
        "check_batch_size_and_num_heads_dense<false, true>",
        _SHARED,
        measured=True,
    ),
    AttentionRule(
        CUDNN,
        (
            "head sizes are at most 128, or at most 256 on capability 9.0, or 192 for query"
            " and key with 128 for value on capability 10"
        ),
        lambda call: (
            max(call.head_sizes) <= (256 if call.gpu.capability == (9, 0) else 128)
            or (call.gpu.capability[0] == 10 and call.head_sizes == (192, 192, 128))
        ),
        "check_cudnn_tensor_shapes",
    ),
    AttentionRule(
        CUDNN,
        "head sizes are multiples of 8",
        lambda call: not any(d % 8 for d in call.head_sizes),
        "check_cudnn_tensor_shapes",
    ),
    AttentionRule(
        CUDNN,
        "there is more than one key and, with dropout, more than one query",
        lambda call: call.key.shape[-2] != 1 and not (call.dropout and call.query.shape[-2] == 1),
        "check_cudnn_tensor_shapes",
    ),
    AttentionRule(
        CUDNN,
        "batch size and heads are at most 65,535",
        lambda call: max(call.query.shape[:2]) <= 65_535,
        "check_cudnn_tensor_shapes",
        since=(2, 13),
    ),
    AttentionRule(
        CUDNN,
        "the dropout probability is a multiple of 1/16",
        lambda call: (16 * call.dropout).is_integer(),
        "check_cudnn_dropout",
        since=(2, 13),
    ),
    AttentionRule(
        CUDNN,
        "deterministic algorithms are off, or only give a warning",
        lambda call: (
            not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "check_cudnn_deterministic",
    ),
    AttentionRule(
        FLASH,
        "head sizes are equal and at most 256; PyTorch pads them to a multiple of 8",
        lambda call: len({*call.head_sizes}) == 1 and call.head_sizes[0] <= 256,
        "check_head_dim_size_flash",
    ),
    AttentionRule(
        FLASH,
        (
            "in training on a capability of 8.6 to 8.9, 12.0 or 12.1, head sizes are at"
            " most 192, or above 224 without dropout"
        ),
        lambda call: (
            not call.needs_backward
            or not any(a <= call.gpu.capability <= b for a, b in _LITTLE_SHARED_MEMORY)
            or call.head_sizes[0] <= 192
            or (call.head_sizes[0] > 224 and not call.dropout)
        ),
        "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
    ),
    AttentionRule(
        EFFICIENT,
        (
            "the head sizes of query and key are equal, and all head sizes are multiples of"
            " the kernel's alignment"
        ),
        lambda call: (
            call.head_sizes[0] == call.head_sizes[1]
            and all(d > 0 and d % call.alignment() == 0 for d in call.head_sizes)
        ),
        "check_head_dim_size_mem_efficient",
    ),
    AttentionRule(
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
_LITTLE_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))


def kernels_in_order(gpu: Gpu) -> tuple[str, ...]:
    """Return the names of the fused attention kernels in the order in which PyTorch tries them.

    cuDNN's kernel comes first on GPUs of compute capability 9.x and 10.x (before torch 2.13, only
    9.0, 9.3, 10.0 and 10.3). On other GPUs, PyTorch would try cuDNN's kernel only after the unfused
    operators. These can always run, so the result does not contain cuDNN's kernel.

    Source: cuda/sdp_utils.cpp, `check_prefer_cudnn_attention` and `priority_order`.
    """
    major, minor = gpu.capability
    first = major in (9, 10) and (minor in (0, 3) or gpu.torch >= (2, 13))
    return FUSED if first else FLASH + EFFICIENT


def may_run(kernel: str, call: Call) -> bool:
    """Return whether a call meets all conditions of a fused attention kernel.

    Args:
        kernel: "cudnn", "flash" or "efficient".
        call: The call of `scaled_dot_product_attention`.
    """
    return all(
        rule.holds(call)
        for rule in ATTENTION_RULES
        if kernel in rule.kernels and call.gpu.torch >= rule.since
    )


def attention_kernel(call: Call) -> str:
    """Return the name of the attention kernel that PyTorch runs for a call.

    Returns:
        "cudnn", "flash" or "efficient" for a fused kernel. "math" stands for several unfused
        operators, which save the attention probabilities for backward.
    """
    kernels = kernels_in_order(call.gpu)
    return next((kernel for kernel in kernels if may_run(kernel, call)), "math")


# The GPU for which `scaled_dot_product_attention` chooses a kernel.
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
    """Run attention on symbolic tensors with the operator that PyTorch would choose on a GPU.

    This function replaces PyTorch's function of the same name inside `Symbolic(kind="cuda")`, and
    has the same arguments. `ATTENTION_RULES` and the attribute `gpu` of the `Symbolic` mode
    determine which operator runs.

    Source: attention.cpp (`scaled_dot_product_attention`), in `SOURCE`.
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal}
    options |= {"scale": scale, "enable_gqa": enable_gqa}
    if has_torch_function((query, key, value)):
        given = query, key, value, attn_mask
        return handle_torch_function(
            scaled_dot_product_attention, (query, key, value), *given, **options
        )
    # Autocast does not cast the inputs of the operators below, so they are cast here.
    if dtype := autocast_of(query):
        query, key, value, attn_mask = map_tensors(
            lambda x: x.to(dtype) if x.is_floating_point() else x, (query, key, value, attn_mask)
        )
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, _GPU.get())
    kernel = attention_kernel(call)
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(query, key, value, attn_mask, **options)
    if kernel == "flash":
        return _flash_attention(call, scale)
    mask = _float_mask(call)
    flags = call.needs_backward, dropout_p, is_causal
    if kernel == "cudnn":
        run = _aten._scaled_dot_product_cudnn_attention
        return run(query, key, value, mask, *flags, False, scale=scale)[0]
    if mask is not None:
        mask = _align_mask(mask)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    run = _aten._scaled_dot_product_efficient_attention
    return run(query, key, value, mask, *flags, scale=scale)[0]


def _flash_attention(call: Call, scale: float | None) -> Tensor:
    """Run FlashAttention with head sizes padded to a multiple of 8, and return the unpadded result.

    The operator saves the padded query, key, value and result for backward.
    """
    d = call.query.shape[-1]
    padded = [F.pad(x, (0, -d % 8)) if d % 8 else x for x in call.inputs]
    scale = d**-0.5 if scale is None else scale
    run = _aten._scaled_dot_product_flash_attention
    return run(*padded, call.dropout, call.causal, False, scale=scale)[0][..., :d]


def _float_mask(call: Call) -> Tensor | None:
    """Return a call's mask as a tensor to be added to the scores, or None if there is no mask.

    In a boolean mask, True (which allows attention) becomes 0, and False becomes minus infinity.
    """
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    mask = torch.zeros_like(call.mask, dtype=call.query.dtype)
    return mask.masked_fill_(call.mask.logical_not(), -torch.inf)


def _align_mask(mask: Tensor) -> Tensor:
    """Return the mask with the strides that the memory-efficient attention kernel needs.

    All strides except the last must be multiples of 8. If the mask has other strides, the result is
    a view of a padded copy.
    """
    if not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


# ---- Other functions that choose by the device


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout with `native_dropout`, the operator that PyTorch runs on CUDA.

    The operator saves a mask of one byte per element for backward. Inside `Symbolic(kind="cuda")`
    this function replaces `F.dropout`, which would run other operators because symbolic tensors
    report the CPU as their device.

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
    """Run RMSNorm as a single fused operator, as PyTorch does on CUDA.

    For backward, the operator saves its input, its weight and one fp32 number per normalized row.
    Inside `Symbolic(kind="cuda")` this function replaces `F.rms_norm`, which runs several operators
    on a CPU.

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
    """Replacement of PyTorch's fused RMSNorm operator, which has no symbolic kernel for a CPU.

    It saves the same tensors for backward as the operator on CUDA. Its results have no values.
    """

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
def choose_operators_as_on_cuda(gpu: Gpu) -> Iterator[None]:
    """Inside a `with` block, let attention, dropout and RMSNorm run the operators for CUDA.

    In the block, the functions `scaled_dot_product_attention`, `dropout` and `rms_norm` of this
    module replace those of `torch.nn.functional`. PyTorch's own functions would run operators for
    the CPU, because symbolic tensors report the CPU as their device.

    Args:
        gpu: GPU that determines which attention kernel runs.
    """
    with ExitStack() as stack:
        stack.callback(_GPU.reset, _GPU.set(gpu))
        for function in (scaled_dot_product_attention, dropout, rms_norm):
            stack.enter_context(patch.object(F, function.__name__, function))
        yield


# ---- results with other dtypes


def _fp32_statistics(dispatch: Dispatch, result: tuple) -> tuple:
    """Return the results of a norm, with statistics in fp32.

    The norm saves these statistics for backward, and on CUDA they are in fp32. If the output is not
    in fp16 or bf16, nothing is changed.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu and Normalization.cu.
    """
    output, *statistics = result
    if output.dtype not in _16_BIT:
        return result
    return output, *(make_result(dispatch, x.size(), None, x, torch.float32) for x in statistics)


def _empty_seeds(dispatch: Dispatch, result: tuple) -> tuple:
    """Return the results of memory-efficient attention with an empty seed and an empty offset.

    The real kernel returns the random generator's seed and offset in host memory, so they take no
    memory of the GPU.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu (`_efficient_attention_forward`).
    """
    output, log_sum_exp, *seeds = result
    return output, log_sum_exp, *(make_result(dispatch, (0,), None, x) for x in seeds)


# Functions (dispatch, symbolic result) that return the corrected result for CUDA.
RULES: dict[Any, Callable[[Dispatch, tuple], tuple]] = {
    _aten.native_layer_norm.default: _fp32_statistics,
    _aten.native_batch_norm.default: _fp32_statistics,
    _aten._scaled_dot_product_efficient_attention.default: _empty_seeds,
}
