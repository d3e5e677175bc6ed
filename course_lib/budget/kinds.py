"""Differences between a step on a GPU and one on a CPU.

Every estimate runs on symbolic tensors of the CPU, and counts what operators keep and make there.
Of two kinds of device, "cpu" and "cuda", one thing is estimated for itself: the update, which
PyTorch makes "foreach" on CUDA where nobody says otherwise, with a temporary copy more of what it
updates (`torch.optim.optimizer._default_to_fused_or_foreach`; Adafactor alone does not). What else
differs, by the source of torch 2.13, and what an estimate makes of it:

==================  =======================  ==========================  =======================
operator            on a CPU                 on CUDA                     in an estimate
==================  =======================  ==========================  =======================
dropout             saves a mask in the      native_dropout saves one    as on a CPU: with
                    input's dtype, 4 or 2    byte an element             "cuda" 3 bytes or 1 an
                    bytes an element         (Dropout.cpp)               element too many
attention by        flash: saves q, k, v,    flash in 16 bits: the       as on a CPU; a mask or
scaled_dot_         output, one fp32 number  same, and a seed; memory-   dropout on CUDA saves
product_attention   a row of scores; with    efficient in fp32 or with   less than is counted
                    dropout the scores,      a mask: rows rounded up
                    in fp32                  to 32; dropout inside the
                                             kernel (sdp_utils.cpp)
its backward        nothing                  flash adds up the gradient  not covered
                                             of q in fp32: a temporary
                                             of 4 bytes an element
                                             (flash_api.cpp)
attention="flash"   tiles, as tensors        one kernel                  as on a CPU: the tiles
of a recipe                                                              of one group too many
layer norm          mean and deviation in    in fp32                     as on a CPU: with bf16
                    the input's dtype        (layer_norm_kernel.cu)      4 bytes a row too few
nn.RMSNorm          products one by one,     one operator, saves its     as on a CPU: too many
                    in fp32                  input and a number a row
                                             (layer_norm.cpp)
convolution, LSTM   workspace of oneDNN,     workspace and reserve of    not covered; an LSTM
                    no tensors               cuDNN                       fused by oneDNN is
                                                                         refused
embedding,          nothing                  many indices are sorted:    not covered
index_put           (backward)               temporaries of 16 bytes
                                             each (Embedding.cu,
                                             Indexing.cu)
matrix products     workspace of oneDNN      workspace of cuBLAS: see    not covered
                    with bf16                `course_lib.budget.device`
==================  =======================  ==========================  =======================

No line of it has been confirmed on a GPU here.
"""

from __future__ import annotations

from dataclasses import replace

from .recipe import Recipe

KINDS = ("cpu", "cuda")


def on_kind(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with the update that PyTorch makes on such a device, where it names none."""
    if recipe.update is not None:
        return recipe
    together = kind == "cuda" and recipe.optimizer in ("adam", "sgd", "momentum")
    return replace(recipe, update="foreach" if together else "loop")
