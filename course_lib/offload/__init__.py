"""Offload activations and optimizer state to a lower tier: host memory or a file.

`offload_activations` moves activations that autograd saves. `OffloadedOptimizer` keeps the state of
an optimizer in host memory or in a file. `Prefetcher` copies the next batches ahead of time.

For CUDA tensors the lower tier is pinned host memory, and side streams run the copies. For CPU
tensors the lower tier is a file. A small pool of threads writes and reads this file while the main
thread computes. Offloading therefore runs on every machine. Lesson 04 explains how it works.

To use this package alone, copy it together with `_check.py` and `_torch/`.
"""

from .activations import offload_activations
from .device import Device
from .optimizer import OffloadedOptimizer, chosen_below
from .prefetch import Prefetcher
from .stores import DiskStore, HostStore, Reservation, Store, StoreFull, SymbolicStore, Traffic

__all__ = [
    "Device",
    "DiskStore",
    "HostStore",
    "OffloadedOptimizer",
    "Prefetcher",
    "Reservation",
    "Store",
    "StoreFull",
    "SymbolicStore",
    "Traffic",
    "chosen_below",
    "offload_activations",
]
