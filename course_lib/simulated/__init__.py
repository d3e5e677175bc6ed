"""A simulated device: it runs on the CPU, has a clock, and detects races between its streams.

It is a tool for tests and lessons. It implements the interface of `course_lib.offload.Device`, so
code that offloads tensors runs on it unchanged. `device` has the device itself, `operators` the
modes that observe PyTorch, `race_detector` the checks, and `lanes` the plots.
"""

from .device import Race, SimulatedDevice

__all__ = ["Race", "SimulatedDevice"]
