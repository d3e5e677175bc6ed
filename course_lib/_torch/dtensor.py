"""Private names of `torch.distributed` that estimates with DTensors and collectives use.

This module is imported only where it is used, because it loads `torch.distributed`.
"""

from torch.distributed._tools import fake_collectives  # noqa: F401 - registers kernels
from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
