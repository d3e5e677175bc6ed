"""A simulated device: it runs on the CPU, has a clock, and detects races between its streams.

An instrument for tests and lessons, above `course_lib.offload`, whose `Device` it implements.
"""

from .device import Race, SimulatedDevice

__all__ = ["Race", "SimulatedDevice"]
