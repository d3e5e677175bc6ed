"""Parts of `torch.distributed` that are loaded together with that package."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
