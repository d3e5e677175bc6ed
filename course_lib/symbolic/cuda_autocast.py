"""Casts that `torch.autocast` makes on CUDA but not on a CPU.

Symbolic tensors are on the CPU, where autocast does not cast the inputs of the functions in `FP32`.
On CUDA it casts them to fp32, and so does `CudaCasts`. The dtypes of their results were compared
with those of PyTorch's autocast for CUDA on symbolic tensors (`tests/test_budget_precision.py`). No
step under autocast has been measured on a GPU.

Three things are not included: calls of these functions inside other functions of
`torch.nn.functional`, such as the softmax of `multi_head_attention_forward` with `need_weights`;
functions that autocast converts to fp32 on a CPU only, such as pooling in three dimensions; and
functions such as `addcmul`, which convert their inputs to the widest dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch.tensors import map_tensors

# Names of the functions that call an operator of `AT_FORALL_FP32`, of
# `AT_FORALL_FP32_SET_OPT_DTYPE`, or `norm`. For example, `cross_entropy` calls `log_softmax`, and
# `square` calls `pow`.
#
# Source: aten/src/ATen/autocast_mode.h (torch 2.11).
_NAMES = """
acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow __pow__ __rpow__ square __rdiv__ __rtruediv__ softplus layer_norm rms_norm group_norm
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div
l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
pdist cdist renorm logsumexp interpolate prod softmax softmin log_softmax
cross_entropy cumprod cumsum linalg_vector_norm linalg_matrix_norm norm normalize sum
"""
FP32 = frozenset(_NAMES.split())


class CudaCasts(TorchFunctionMode):
    """Mode in which the functions of `FP32` get their 16-bit inputs in fp32 under autocast."""

    # PyTorch does not enter the mode inside `backward`, so checkpoints enter it again.
    when_recomputed = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Functions that are given a dtype convert their input to it themselves.
        if name in FP32 and kwargs.get("dtype") is None and torch.is_autocast_enabled("cpu"):
            args, kwargs = map_tensors(in_fp32, (args, kwargs))
        return func(*args, **kwargs)


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in 16 bits converted to fp32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
