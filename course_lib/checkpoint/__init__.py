"""Forget activations in the forward pass, and compute them again in the backward pass.

A drop-in for `torch.utils.checkpoint`: the same names, arguments, warnings and errors, written to
be read. Replace the import and nothing else; what is no idea of its own (enums, helpers) is
PyTorch's. What differs, and why:

- `use_reentrant` left out means False. The old default silently trains nothing when no input
  requires gradients.
- A tensor that was changed in place is an error in both modes, wherever in the arguments it is;
  PyTorch recomputes from the new values where it is in a container or a keyword argument, and in
  its reentrant mode where the function itself has changed it.
- The recomputation gets lists and dicts as they were at first: what the function puts into them is
  there once.
- A policy that keeps a random operator's output keeps the random numbers after it too; in PyTorch
  the recomputation draws others from there on. CPU offload does what its name says, where eager
  PyTorch recomputes; a policy's answer that means nothing is an error.
- The random numbers of all devices of the inputs are repeated, and those of the current device even
  if no argument lives there.
- In code that `torch.compile` compiles, PyTorch's own function takes over: the compiler puts it
  into its graph (`fullgraph=True` too), keeps random numbers in its own way and computes again what
  the policy does not keep. A compiled function runs compiled inside a checkpoint.
- Inside `torch.func`'s transforms the function is run as if there were no checkpoint, with a
  warning; there PyTorch's forward pass works, its backward pass is an error.

As in PyTorch, buffers are the function's own business: the recomputation updates BatchNorm's
running statistics a second time. Lesson 02 shows this and a `context_fn` that prevents it, and
builds both modes from nothing.

`checkpoint_blocks` checkpoints the blocks of any model, `checkpointed_loss` an output head with its
loss.
"""

# ruff: noqa: F401, F403
import torch.utils.checkpoint

# all that this version of torch has, before what is written here
from torch.utils.checkpoint import *

from .blocks import CheckpointedBlocks, checkpoint_blocks
from .loss_head import checkpointed_loss
from .nonreentrant import checkpoint, set_checkpoint_debug_enabled, set_checkpoint_early_stop
from .reentrant import CheckpointFunction
from .selective import create_selective_checkpoint_contexts
from .sequential import checkpoint_sequential

__all__ = [
    *torch.utils.checkpoint.__all__,
    "CheckpointedBlocks",
    "checkpoint_blocks",
    "checkpointed_loss",
]
