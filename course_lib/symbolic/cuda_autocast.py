"""Make the casts that `torch.autocast` makes on CUDA but not on a CPU.

Symbolic tensors are on the CPU, where autocast does not cast the inputs of the functions in `FP32`.
On CUDA it casts them to fp32, which changes the bytes of a step. The mode `CudaCasts` casts them in
the same way. The dtypes of the results were compared with those of PyTorch's autocast for CUDA on
symbolic tensors (`test_budget_precision.py`). No step under autocast has been measured on a GPU.

`CudaCasts` does not follow autocast for CUDA in three cases:

- A function of `torch.nn.functional` that is not in `FP32` calls a function that is. For example,
  `multi_head_attention_forward` with `need_weights` calls softmax.
- Autocast casts the inputs of a function to fp32 on a CPU, but not on CUDA. An example is pooling
  in three dimensions.
- A function converts its inputs to the widest dtype among them, as `addcmul` does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch.tensors import map_tensors

# Names of the functions whose inputs autocast casts to fp32 on CUDA. Each function calls an
# operator in PyTorch's list `AT_FORALL_FP32` or `AT_FORALL_FP32_SET_OPT_DTYPE`, or the operator
# `norm`. For example, `cross_entropy` calls `log_softmax`, and `square` calls `pow`.
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
    """Function mode that adds the casts to fp32 that autocast makes on CUDA but not on a CPU.

    The mode is for symbolic tensors that stand for CUDA tensors but report the CPU as their device.
    While autocast for the CPU is active, 16-bit inputs of the functions whose names are in `FP32`
    are cast to fp32. A call with an argument `dtype` is left unchanged, because the called function
    converts its input itself.
    """

    # No function mode is active inside `backward`. If a mode has this attribute, checkpoints enter
    # the mode again before they recompute.
    when_recomputed = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # A function with an argument `dtype` converts its input itself.
        if name in FP32 and kwargs.get("dtype") is None and torch.is_autocast_enabled("cpu"):
            args, kwargs = map_tensors(in_fp32, (args, kwargs))
        return func(*args, **kwargs)


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a bf16 or fp16 tensor converted to fp32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
