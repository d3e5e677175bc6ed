"""Drop activations in the forward pass, and compute them again in the backward pass.

The checkpoint itself is PyTorch's, `torch.utils.checkpoint.checkpoint` without reentrant autograd.
This package adds the following:

- `checkpoint_blocks` checkpoints blocks of any model. It selects them by name and changes the model
  in place.
- `checkpointed_loss` computes an output head and its loss one chunk of tokens at a time.
- If a block changes lists or dicts among its arguments, the recomputation still receives their
  original content. Tensors inside them are saved like tensors that are arguments themselves.
- A block's attributes, and the random number generators of Python and NumPy, can be restored for
  the recomputation (`repeatable.py`).
- The first recomputation of each block is compared with its first run (`comparison.py`).
- A selective-checkpointing policy that returns an invalid value raises an error (`policies.py`).

As in PyTorch, buffers are the block's responsibility: the recomputation updates BatchNorm's running
statistics a second time. Lesson 02 shows this, with a `context_fn` that prevents it.

`course_lib.checkpoint.readable` is a checkpoint in about 350 lines, to read after
lesson 02. It has the reentrant and the non-reentrant mode, and selective checkpointing. Nothing
else in the library uses it.

To use this package alone, copy it together with `_check.py` and `_torch/`.
"""

from .blocks import CheckpointedBlocks, checkpoint_blocks
from .loss_head import checkpointed_loss

__all__ = ["CheckpointedBlocks", "checkpoint_blocks", "checkpointed_loss"]
