"""Private parts of `torch.distributed` for estimates: shapes of DTensors, symbolic collectives.

This module is imported only where it is used, because it loads `torch.distributed`.
"""

from torch.distributed._tools import fake_collectives  # noqa: F401 - registers kernels
from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
