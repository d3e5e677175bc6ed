"""Devices, and the memory that PyTorch allocates on them."""

import torch

EventType = torch._C._profiler._EventType  # of the allocator's events in a profile


def wait_for(device: torch.device | str) -> None:
    """Block until the device has finished all its work; return at once for a CPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        getattr(torch, device.type).synchronize(device)


def empty_caches() -> None:
    """Free cuBLAS's workspaces, and unused memory that is cached on the GPU and on the host."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    getattr(torch._C, "_host_emptyCache", lambda: None)()
