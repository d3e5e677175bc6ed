"""A simulated device: it runs on the CPU, has a clock, and detects races between its streams.

It is a tool for tests and lessons. It implements the interface of `Device` in `course_lib.offload`.
"""

from .device import Race, SimulatedDevice

__all__ = ["Race", "SimulatedDevice"]
