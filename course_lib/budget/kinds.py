"""Differences between a step on a GPU and one on a CPU.

Every estimate runs on symbolic CPU tensors and counts the tensors that the CPU's operators
save and allocate. It takes the kind of device, "cpu" or "cuda", into account in one respect: the
variant of the update. If a recipe leaves the choice to PyTorch, most optimizers use "foreach" on
CUDA, which allocates temporary tensors as large as all the parameters. The attribute
`default_on_cuda` of each row of `course_lib.budget.optimizers.OPTIMIZERS` states the rule of
`torch.optim.optimizer._default_to_fused_or_foreach`. The table lists the other differences,
according to the source of torch 2.13.

==================  ========================  ===========================  =========================
operator            on a CPU                  on CUDA                      in an estimate
==================  ========================  ===========================  =========================
dropout             saves a mask in the       native_dropout saves one     as on a CPU: 1 or 3
                    input's dtype: 2 or 4     byte per element             bytes per element more
                    bytes per element         (Dropout.cpp)                than on CUDA
scaled_dot_         flash attention: saves    bf16, fp16: flash attention  as on a CPU: with a mask
product_attention,  q, k, v, the output, and  saves the same, plus the     or with dropout, more
forward             one fp32 log-sum-exp per  random seed; fp32 or a       than on CUDA
                    row of scores; with       mask: memory-efficient
                    dropout, the scores in    attention pads the
                    fp32                      log-sum-exp to a multiple
                                              of 32 rows; dropout runs
                                              inside the kernel
                                              (sdp_utils.cpp)
scaled_dot_         allocates nothing else    flash attention sums the     not included
product_attention,                            gradient of q in fp32, a
backward                                      temporary tensor of 4 bytes
                                              per element
                                              (flash_api.cpp)
a recipe's          tiles are tensors         the tiles are inside one     as on a CPU: too high by
attention="flash"                             kernel                       the tiles of one group of
                                                                           heads
layer norm          saves the mean and rstd   saves them in fp32           as on a CPU: with bf16, 4
                    in the input's dtype      (layer_norm_kernel.cu)       bytes per row less than
                                                                           on CUDA
nn.RMSNorm          several products, each    one operator, which saves    as on a CPU: more than
                    of them in fp32           its input and one number     on CUDA
                                              per row (layer_norm.cpp)
convolution, LSTM   oneDNN uses a workspace,  cuDNN uses a workspace and   not included; an LSTM
                    which is not a tensor     a reserve                    that oneDNN fuses raises
                                                                           ValueError
embedding,          backward allocates        backward sorts the indices,  not included
index_put           nothing else              if there are many of them,
                                              with temporary tensors of
                                              16 bytes per index
                                              (Embedding.cu, Indexing.cu)
matrix product      with bf16, oneDNN uses a  cuBLAS uses a workspace:     not included
                    workspace                 `course_lib.budget.device`
==================  ========================  ===========================  =========================

None of these rows has been confirmed on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from .optimizers import OPTIMIZERS
from .recipe import Recipe

KINDS = ("cpu", "cuda")


def on_kind(recipe: Recipe, kind: str) -> Recipe:
    """Return the recipe with the variant of the update that PyTorch uses on a kind of device.

    A recipe that sets `update` is returned unchanged. The kind is "cpu" or "cuda".
    """
    if recipe.update is not None:
        return recipe
    on_cuda = OPTIMIZERS[recipe.optimizer].default_on_cuda
    return replace(recipe, update=on_cuda if kind == "cuda" else "loop")
