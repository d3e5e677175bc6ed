"""A simulated GPU that runs on the CPU, has a clock, and detects races between its streams.

`SimulatedDevice` is a tool for tests and lessons. It has the interface of
`course_lib.offload.Device`, so code that offloads tensors runs on it unchanged. The modules are:

- `device`: the simulated device.
- `operators`: modes that report PyTorch's operators to the race detector.
- `race_detector`: records accesses to memory and finds races.
- `lanes`: plots of what each stream did when.
"""

from .device import Race, SimulatedDevice

__all__ = ["Race", "SimulatedDevice"]
