"""A GPU's memory beside a step's tensors: what its allocator reserves, and what others keep.

Each figure says where it is from; none is part of an estimate's `peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.labels import text
from course_lib.memory.show import Table

from .estimate import Estimate

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"
HOPPER = ("H100", "H200")
# Of each cuBLAS handle and stream, kept from the first matrix product on: PyTorch's documentation,
# "CUDA semantics", cuBLAS workspaces. :4096:2:16:8 is 2 * 4096 + 8 * 16 KiB, :4096:8 is 32 MiB.
CUBLAS_BYTES = (2 * 4096 + 8 * 16) << 10
CUBLAS_HOPPER_BYTES = (8 * 4096) << 10
# What nvidia-smi showed of a process with PyTorch 2.10 and CUDA 13.0 that had made its context and
# nothing else, on an RTX 6000 Ada: github.com/unslothai/unsloth-zoo, pull request 1053. Kernels are
# loaded into it as they are first used.
CONTEXT_BYTES = 426 * MIB


def workspace_bytes(device: str) -> int:
    """Bytes that cuBLAS keeps on a device, for one stream."""
    return CUBLAS_HOPPER_BYTES if device in HOPPER else CUBLAS_BYTES


def kept_bytes(device: str) -> int:
    """Bytes of a device that are neither a tensor nor reserved for one."""
    return workspace_bytes(device) + CONTEXT_BYTES


@dataclass(frozen=True, repr=False)
class OnDevice(Table):
    """Bytes that a step takes of a GPU, by whom they are held.

    Attributes:
        tensors: at the peak; exact, of what is estimated.
        reserved: at its peak, by the rules of PyTorch's allocator, followed by `CachingAllocator`
            on one step that begins with what is there on entry, packed.
        reserved_expandable: likewise with expandable segments.
        workspace: of cuBLAS.
        context: of CUDA.
        memory_bytes: what the device has, or None.
    """

    tensors: int
    reserved: int
    reserved_expandable: int
    workspace: int
    context: int
    memory_bytes: int | None = None

    columns = ("on a GPU", "MB", "by")

    @classmethod
    def of(cls, found: Estimate, device: str, memory_bytes: int | None) -> OnDevice:
        trace = found.trace()
        reserved = [
            trace.allocated(settings).memory_stats()["reserved_bytes.all.peak"]
            for settings in (None, EXPANDABLE)
        ]
        kept = workspace_bytes(device), CONTEXT_BYTES
        return cls(found.peak_bytes, *reserved, *kept, memory_bytes)

    def rows(self) -> list[Sequence]:
        rules = text("the allocator's rules, simulated")
        documented = text("PyTorch's documentation, CUDA semantics: one stream")
        reported = text("nvidia-smi, an RTX 6000 Ada, PyTorch 2.10 (unsloth-zoo, #1053)")
        return [
            (name, f"{count / 1e6:,.1f}", by)
            for name, count, by in (
                (text("tensors at the peak"), self.tensors, text("the estimate, exact")),
                (text("reserved, by the allocator's rules"), self.reserved, rules),
                (text("with `expandable_segments`"), self.reserved_expandable, rules),
                (text("workspace that cuBLAS keeps"), self.workspace, documented),
                (text("the context of CUDA"), self.context, reported),
            )
        ]

    def caption(self) -> str:
        if self.memory_bytes is None:
            return ""
        left = self.memory_bytes - self.reserved - self.workspace - self.context
        values = {"memory": f"{self.memory_bytes / 1e6:,.1f}", "left": f"{left / 1e6:,.1f}"}
        return text("of {memory} MB that leaves {left} MB", **values)
