"""Bytes moved one tier down: activations, optimizer state, and the next batch on its way up.

The tier below is real on every machine. For CUDA it is pinned host memory, filled over side
streams; for a CPU it is a file, written and read by a small pool of threads while the main thread
computes. Lesson 04 explains.
"""

from typing import Any

from .activations import offload_activations
from .device import Device
from .optimizer import OffloadedOptimizer, chosen_below
from .prefetch import Prefetcher
from .stores import DiskStore, HostStore, Room, Store, StoreFull, SymbolicStore, Traffic

__all__ = [
    "Device",
    "DiskStore",
    "HostStore",
    "OffloadedOptimizer",
    "Prefetcher",
    "Race",
    "Room",
    "SimulatedDevice",
    "Store",
    "StoreFull",
    "SymbolicStore",
    "Traffic",
    "chosen_below",
    "offload_activations",
]


def __getattr__(name: str) -> Any:
    """`SimulatedDevice` and `Race`, which live in `course_lib.simulated`: that room stands above
    this one, so it is imported only when one of the two is asked for."""
    if name in ("Race", "SimulatedDevice"):
        from course_lib import simulated

        return getattr(simulated, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
