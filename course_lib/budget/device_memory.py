"""GPU memory that no tensor can use: the workspace of cuBLAS and the CUDA context."""

from __future__ import annotations

from .rates import Rates, rates_of

# cuBLAS allocates one workspace per thread and stream at the thread's first matrix product, and
# never frees it. A step on one stream has two such threads, one for forward and one for backward.
# The environment variable CUBLAS_WORKSPACE_CONFIG sets the size of a workspace: ":4096:2:16:8"
# means 2 * 4096 + 8 * 16 KiB, and ":4096:8" means 8 * 4096 KiB. On an H200 with PyTorch 2.11, a
# process kept 2 * 32 MiB. Source: PyTorch's documentation, "CUDA semantics", cuBLAS workspaces.
CUBLAS_BYTES = 2 * (2 * 4096 + 8 * 16) << 10
CUBLAS_LARGE_BYTES = 2 * (8 * 4096) << 10


def workspace_bytes(device: str | Rates) -> int:
    """Return the bytes of the workspace that cuBLAS keeps on a GPU for steps on one stream.

    The result is 64 MiB on Hopper GPUs (compute capability 9.0), 16.25 MiB on other NVIDIA GPUs,
    and 0 on devices without CUDA. With a PyTorch version above 2.11, it is 64 MiB on all GPUs whose
    major compute capability is 9, 10 or 12.

    Args:
        device: Name in `RATES`, or the rates of another device.

    Source: `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp.
    """
    gpu = rates_of(device).gpu
    if gpu is None:
        return 0
    is_large = gpu.capability == (9, 0) or (
        gpu.torch > (2, 11) and gpu.capability[0] in (9, 10, 12)
    )
    return CUBLAS_LARGE_BYTES if is_large else CUBLAS_BYTES


def context_bytes(device: str | Rates) -> int:
    """Return the bytes of GPU memory that the CUDA context of a process occupies.

    The result is 0 on a device without CUDA. This includes AMD GPUs, for which the memory that ROCm
    occupies is not known.

    Args:
        device: Name in `RATES`, or the rates of another device.
    """
    return rates_of(device).context_bytes or 0


def kept_bytes(device: str | Rates) -> int:
    """Return the bytes of GPU memory that the CUDA context and the workspace of cuBLAS occupy.

    Tensors cannot use this memory. The result is 0 on a device without CUDA.

    Args:
        device: Name in `RATES`, or the rates of another device.
    """
    return workspace_bytes(device) + context_bytes(device)
