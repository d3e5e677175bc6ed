"""Differences between the memory of a training step on a GPU and on a CPU.

Every estimate runs on symbolic CPU tensors. With the kind "cuda", an estimate counts the tensors
that the step would have on a GPU:

- Attention, dropout and the norms run the operators that PyTorch runs for them on CUDA
  (`cuda_kernels` of `course_lib.symbolic`). The attention kernel depends on the GPU, which the
  argument `gpu` of `estimate` selects. `flash_attention` of this library runs as one kernel, so it
  has no tensors for its tiles.
- 8-bit layers of bitsandbytes run the matrix product that bitsandbytes 0.50 runs on CUDA according
  to its source code.
- Under autocast, more functions run in fp32 than on a CPU (`course_lib.symbolic.cuda_autocast`).
  This has not been measured on a GPU.
- If a recipe leaves the variant of the update to PyTorch, most optimizers use "foreach", which
  allocates temporary tensors as large as all the parameters. The attribute `default_on_cuda` of
  each row of `course_lib.budget.optimizers.OPTIMIZERS` states the rule of
  `torch.optim.optimizer._default_to_fused_or_foreach`.
- Tensors that PyTorch keeps on the host are not counted: the states of random generators, and an
  optimizer's number of steps unless its update is fused.

On an H200 with PyTorch 2.11, the steps listed in `tests/tools/h200_steps.csv` needed exactly the
estimated number of bytes. The only exceptions were steps of models that create tensors on the CPU
or query the device of a tensor.

While an operator runs, it may allocate additional memory, its workspace. A workspace is not a
tensor, so estimates do not include it. These workspaces were measured on the same H200:

======================================  =========================================================
operator                                workspace
======================================  =========================================================
matrix product                          32 MiB per thread, never freed (`budget.device_memory`);
                                        1 MiB more with a bias
softmax, backward                       as many bytes as its result
scaled_dot_product_attention, backward  cuDNN kernel: q in fp32 and its log-sum-exp, both padded;
                                        memory-efficient kernel: q and its log-sum-exp
embedding, backward                     85 bytes per index (measured with 8,192 indices)
x[indices], backward                    49 bytes per index (measured with 8,192 indices)
convolution, backward                   6.8 MB (fp32, 8 x 16 x 64 x 64, 3 x 3)
LSTM                                    10 MB (fp32, 64 units, 32 steps of 8 samples)
======================================  =========================================================
"""

from __future__ import annotations

from dataclasses import replace

from .optimizers import OPTIMIZERS
from .recipe import Recipe

KINDS = ("cpu", "cuda")


def on_kind(recipe: Recipe, kind: str) -> Recipe:
    """Return the recipe with an explicit variant of the optimizer update.

    If `recipe.update` is None, PyTorch chooses the variant by the kind of device. The result has
    the variant that PyTorch would choose: "loop" on a CPU, and on CUDA the variant
    `default_on_cuda` in the optimizer's row of `OPTIMIZERS`.

    In two cases the recipe is returned unchanged: if it sets `update` already, or if its optimizer
    leaves some parameters to a second optimizer, as Muon does.

    Args:
        recipe: Recipe of the training step, whose field `optimizer` names the optimizer.
        kind: Kind of device, "cpu" or "cuda".
    """
    row = OPTIMIZERS[recipe.optimizer]
    if recipe.update is not None or row.rest is not None:
        return recipe
    return replace(recipe, update=row.default_on_cuda if kind == "cuda" else "loop")
