"""A process group of one process, for tests of distributed training without ranks."""

from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def single_process_group():
    """Create a process group of one process, and destroy it at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
