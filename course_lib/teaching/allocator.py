"""Byte counters of the CUDA allocator, which the GPU experiments of the lessons read."""

import gc

import torch

from course_lib._torch.devices import empty_caches
from course_lib._torch.modes import TorchDispatchMode


def release(device: torch.device) -> None:
    """Free GPU memory that PyTorch's allocator has cached, and the workspaces of cuBLAS.

    Python's garbage collector runs first. On a CPU, the function does nothing.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.init()
        empty_caches()


class Allocator:
    """Counters of the CUDA allocator that do not count earlier allocations.

    An instance remembers how many bytes are allocated when it is created, and subtracts this number
    from later readings. On a CPU an instance can be created, but its counters cannot be read.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_before = self.requested_before = 0
        release(device)
        if device.type == "cuda":
            self.allocated_before, self.requested_before = (
                self.allocated_bytes(),
                self.requested_bytes(),
            )

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.allocated_before

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) - self.allocated_before

    def requested_bytes(self) -> int:
        """Return the bytes requested for live tensors, before the allocator rounds them up."""
        return (
            torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
            - self.requested_before
        )

    def reset(self) -> None:
        """Reset the peak counters to the current values, and return cached memory to the driver."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, int]:
        requested = torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]
        return {
            "max_memory_allocated_bytes": (
                torch.cuda.max_memory_allocated(self.device) - self.allocated_before
            ),
            "max_memory_reserved_bytes": (
                torch.cuda.max_memory_reserved(self.device) - self.allocated_before
            ),
            "max_memory_requested_bytes": requested - self.requested_before,
        }


class PeakBetweenOperators(TorchDispatchMode):
    """A dispatch mode that records the peak of allocated bytes, read at the end of each operator.

    The peak is in the attribute `peak_bytes`. It does not include the workspaces of operators,
    because an operator has freed its workspace when it ends.

    Args:
        allocator: Allocator from which the bytes are read.
    """

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self.peak_bytes = allocator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, self.allocator.allocated_bytes())
        return result
