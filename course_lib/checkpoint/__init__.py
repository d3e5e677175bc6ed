"""Drop activations in the forward pass, and compute them again in the backward pass.

This package is a drop-in replacement for `torch.utils.checkpoint`: it has the same names,
arguments, warnings and errors, and is written to be read. Only the import has to change. Enums and
helpers without ideas of their own are PyTorch's. These things differ, for the given reasons:

- If `use_reentrant` is left out, it is False. With the old default, a model silently does not train
  if no input requires gradients.
- A tensor that was changed in place is an error in both modes, wherever in the arguments it is.
  PyTorch recomputes from the new values if the tensor is in a container or a keyword argument, and,
  in its reentrant mode, if the function itself has changed it.
- The recomputation gets lists and dicts with their original content. If the function appends an
  item to a list, the recomputation therefore does not append it a second time.
- A policy that keeps a random operator's output also keeps the random numbers after it. In PyTorch
  the recomputation draws different numbers from there on.
- A policy's CPU offload really offloads; eager PyTorch recomputes instead. If a policy returns an
  invalid value, this is an error.
- The recomputation draws the same random numbers on the devices of all inputs, and on the current
  device even if no input is on it.
- In code that `torch.compile` compiles, PyTorch's own function is used. The compiler puts it into
  its graph (also with `fullgraph=True`), repeats random numbers in its own way, and recomputes the
  outputs that the policy does not keep. A compiled function runs compiled inside a checkpoint.
- Inside a transform of `torch.func` the function runs without a checkpoint, with a warning. In
  PyTorch the forward pass works there, and the backward pass raises an error.

As in PyTorch, buffers are the function's responsibility: the recomputation updates BatchNorm's
running statistics a second time. Lesson 02 shows this, with a `context_fn` that prevents it, and
builds both modes from scratch.

Two functions are not in PyTorch: `checkpoint_blocks` checkpoints the blocks of any model, and
`checkpointed_loss` checkpoints an output head with its loss.
"""

# ruff: noqa: F401, F403
import torch.utils.checkpoint

# Import everything that this version of torch exports; the imports below replace a part of it.
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
