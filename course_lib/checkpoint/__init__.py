"""Drop activations in the forward pass, and compute them again in the backward pass.

The checkpoint itself is PyTorch's, `torch.utils.checkpoint.checkpoint` without reentrant autograd.
This package adds what it lacks:

- `checkpoint_blocks` checkpoints the blocks of any model, chosen by name, in place.
- `checkpointed_loss` computes an output head and its loss one chunk of tokens at a time.
- Lists and dicts among a block's arguments have their original content in the recomputation, and
  all tensors in them are kept as PyTorch keeps tensors that are arguments themselves.
- A block's attributes and the generators of Python and NumPy can be preserved (`repeatable.py`).
- The first recomputation of each block is compared with its first run (`comparison.py`).
- A policy's invalid return values are errors (`policies.py`).

As in PyTorch, buffers are the block's responsibility: the recomputation updates BatchNorm's running
statistics a second time. Lesson 02 shows this, with a `context_fn` that prevents it.

`course_lib.checkpoint.readable` is a checkpoint of 350 lines to read after lesson 02, with the
reentrant and the non-reentrant mode and selective checkpointing. Nothing else in the library uses
it.

To use this package alone, copy it together with `_check.py` and `_torch/`.
"""

from .blocks import CheckpointedBlocks, checkpoint_blocks
from .loss_head import checkpointed_loss

__all__ = ["CheckpointedBlocks", "checkpoint_blocks", "checkpointed_loss"]
