"""Differences between a step on a GPU and one on a CPU.

Every estimate runs on symbolic CPU tensors. With the kind "cuda", it counts what the step takes on
a GPU:

- Functions that choose their operator by the device run CUDA's operators (`cuda_kernels` of
  `course_lib.symbolic`): attention, dropout and the norms. Which kernel of attention runs depends
  on the GPU, the argument `gpu` of `estimate`. Flash attention of this package runs as a kernel and
  has no tensors for its tiles.
- 8-bit layers of bitsandbytes run the product that it runs on CUDA, by its source (0.50).
- Under autocast more functions run in fp32 (`course_lib.symbolic.cuda_autocast`). This has not been
  measured on a GPU.
- If a recipe leaves the variant of the update to PyTorch, most optimizers use "foreach", which
  allocates temporary tensors as large as all the parameters. The attribute `default_on_cuda` of
  each row of `course_lib.budget.optimizers.OPTIMIZERS` states the rule of
  `torch.optim.optimizer._default_to_fused_or_foreach`.
- What PyTorch keeps on the host does not count: the states of random generators, and an
  optimizer's number of steps unless its update is fused.

On an H200 with torch 2.11 all steps of `tests/h200_steps.csv` took what is estimated, to the byte,
except for models that make some tensors on the CPU, or ask for their device, themselves.

An operator may allocate more while it runs. This workspace is not a tensor and is not included. On
the same H200:

======================================  =========================================================
operator                                workspace
======================================  =========================================================
matrix product                          32 MiB per thread, kept: `budget.device_memory`; with a
                                        bias 1 MiB more
softmax, backward                       as many bytes as its result
scaled_dot_product_attention, backward  cuDNN: q in fp32 and its log-sum-exp, both padded;
                                        memory-efficient: q, and its log-sum-exp
embedding, backward                     85 bytes per index (8,192 indices)
x[indices], backward                    49 bytes per index (8,192 indices)
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
    """Return the recipe with the variant of the update that PyTorch uses on a kind of device.

    A recipe that sets `update` is returned unchanged, and so is one whose optimizer leaves some
    parameters to another one, which may have other variants. The kind is "cpu" or "cuda".
    """
    row = OPTIMIZERS[recipe.optimizer]
    if recipe.update is not None or row.rest is not None:
        return recipe
    return replace(recipe, update=row.default_on_cuda if kind == "cuda" else "loop")
