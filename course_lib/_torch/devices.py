"""Helpers for devices: wait for their work, and free cached memory."""

import torch

# Types of the events in a profile. Events of the type `Allocation` come from the allocator.
EventType = torch._C._profiler._EventType


def wait_for(device: torch.device | str) -> None:
    """Wait until a device has finished all its work; do nothing for a CPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        getattr(torch, device.type).synchronize(device)


def empty_caches() -> None:
    """Free cuBLAS's workspaces, and unused memory that is cached on the GPU and on the host."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    getattr(torch._C, "_host_emptyCache", lambda: None)()
