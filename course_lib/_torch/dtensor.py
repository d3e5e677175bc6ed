"""Shapes of DTensors, and collectives of symbolic tensors; imported only where they are used."""

from torch.distributed._tools import fake_collectives  # noqa: F401 - registers kernels
from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
