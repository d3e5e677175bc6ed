"""Offloading to the lower tier: saved activations, optimizer state, and prefetching of batches.

`offload_activations` moves activations that autograd saves, `OffloadedOptimizer` keeps the state of
any optimizer in a `HostStore` or a `DiskStore`, and `Prefetcher` copies the next batch early.

The lower tier is real on every machine. For CUDA it is pinned host memory, with copies on side
streams. For a CPU it is a file, which a small pool of threads writes and reads while the main
thread computes. Lesson 04 explains how it works.
"""

from typing import Any

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
    "Race",
    "Reservation",
    "SimulatedDevice",
    "Store",
    "StoreFull",
    "SymbolicStore",
    "Traffic",
    "chosen_below",
    "offload_activations",
]


def __getattr__(name: str) -> Any:
    """Import `SimulatedDevice` and `Race` on first use.

    They live in `course_lib.simulated`, which itself imports this package.
    """
    if name in ("Race", "SimulatedDevice"):
        from course_lib import simulated

        return getattr(simulated, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
