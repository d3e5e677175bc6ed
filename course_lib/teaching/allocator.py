"""Figures of the CUDA allocator for an experiment."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def release(device: torch.device) -> None:
    """Give back all that nothing holds any more: of a GPU also cuBLAS's workspaces, and memory kept
    for later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.init()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned


class Allocator:
    """The CUDA allocator's counters, above what was allocated when this was made; needs no GPU
    until it is asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_before = self.requested_before = 0
        release(device)
        if device.type == "cuda":
            self.allocated_before, self.requested_before = self.allocated(), self.requested()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.allocated_before

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) - self.allocated_before

    def requested(self) -> int:
        """The same as allocated, without what the allocator adds to each request."""
        return (
            torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
            - self.requested_before
        )

    def reset(self) -> None:
        """Forget the peaks so far, and give back what lies unused, so that it is not counted as
        reserved."""
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


class BetweenOperators(TorchDispatchMode):
    """The most bytes the CUDA allocator has handed out at the end of an operator, when its
    workspace is free again."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self.peak_bytes = allocator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, self.allocator.allocated())
        return result
