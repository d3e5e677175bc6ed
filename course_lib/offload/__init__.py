"""Bytes moved one tier down: activations, optimizer state, and the next batch on its way up.

The tier below is real on every machine. For CUDA it is pinned host memory, filled over side
streams; for a CPU it is a file, written and read by a small pool of threads while the main thread
computes. Lesson 04 explains.
"""

from .activations import offload_activations
from .device import Device
from .optimizer import OffloadedOptimizer, chosen_below
from .prefetch import Prefetcher
from .simulated import Race, SimulatedDevice
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
