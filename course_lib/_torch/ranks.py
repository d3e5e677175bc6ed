"""Private name of `torch.distributed` for training: the wrapper that checkpoints a module.

This module is imported only where it is used, because it loads `torch.distributed`.
"""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
