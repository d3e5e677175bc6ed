"""Memory of a GPU besides a step's tensors: what the allocator reserves and what CUDA keeps.

None of these figures is part of an estimate's `peak_bytes`. Each row of the table names its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.labels import text
from course_lib.memory.show import Table

from .estimate import Estimate
from .rates import Rates
from .search import Estimates

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"
HOPPER = ("H100", "H200")
WITHOUT_CUDA = ("MI300X",)
# Of each cuBLAS handle and stream, kept from the first matrix product on: PyTorch's documentation,
# "CUDA semantics", cuBLAS workspaces. :4096:2:16:8 is 2 * 4096 + 8 * 16 KiB, :4096:8 is 32 MiB.
CUBLAS_BYTES = (2 * 4096 + 8 * 16) << 10
CUBLAS_HOPPER_BYTES = (8 * 4096) << 10
# The figure that nvidia-smi showed for a process with PyTorch 2.10 and CUDA 13.0 that had made its
# context and nothing else, on an RTX 6000 Ada: github.com/unslothai/unsloth-zoo, pull request 1053.
# Kernels are loaded into the context when they are first used.
CONTEXT_BYTES = 426 * MIB


def workspace_bytes(device: str) -> int:
    """Bytes that cuBLAS keeps on a device for one stream; 0 where there is no cuBLAS."""
    if device in WITHOUT_CUDA:
        return 0
    return CUBLAS_HOPPER_BYTES if device in HOPPER else CUBLAS_BYTES


def context_bytes(device: str) -> int:
    """Bytes of the CUDA context; 0 where there is none, as what ROCm keeps is not known here."""
    return 0 if device in WITHOUT_CUDA else CONTEXT_BYTES


def kept_bytes(device: str) -> int:
    """Bytes of a device that no tensor can use: cuBLAS's workspace and the CUDA context."""
    return workspace_bytes(device) + context_bytes(device)


@dataclass(frozen=True, repr=False)
class OnDevice(Table):
    """Bytes of a GPU's memory during a step, by what holds them.

    Attributes:
        tensors: tensor bytes at the peak, as estimated.
        reserved: the most that PyTorch's allocator reserves, by its rules: `CachingAllocator`
            follows one step whose tensors on entry are packed.
        reserved_expandable: the same with expandable segments.
        workspace: bytes that cuBLAS keeps.
        context: bytes of the CUDA context.
        memory_bytes: what there is: the budget, or else the device's memory; None if not known.
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
        """The table of an estimated step on a device of `RATES`."""
        trace = found.trace()
        reserved = [
            trace.allocated(settings).memory_stats()["reserved_bytes.all.peak"]
            for settings in (None, EXPANDABLE)
        ]
        kept = workspace_bytes(device), context_bytes(device)
        return cls(found.peak_bytes, *reserved, *kept, memory_bytes)

    @property
    def left(self) -> int | None:
        """Bytes that the step leaves free, negative where it does not fit; None if not known."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - self.reserved - self.workspace - self.context

    def rows(self) -> list[Sequence]:
        exact = text("the estimate, exact for the CPU's operators")
        rules = text("the allocator's rules, simulated")
        documented = text("PyTorch's documentation, CUDA semantics: one stream")
        reported = text("nvidia-smi, an RTX 6000 Ada, PyTorch 2.10 (unsloth-zoo, #1053)")
        rows = [
            (text("tensors at the peak"), self.tensors, exact),
            (text("reserved, by the allocator's rules"), self.reserved, rules),
            (text("with `expandable_segments`"), self.reserved_expandable, rules),
        ]
        if self.context:
            rows += [
                (text("workspace that cuBLAS keeps"), self.workspace, documented),
                (text("the context of CUDA"), self.context, reported),
            ]
        found: list[Sequence] = [(name, f"{count / 1e6:,.1f}", by) for name, count, by in rows]
        if not self.context:
            found.append((text("what ROCm keeps"), "?", text("not known here, and not counted")))
        return found

    def caption(self) -> str:
        if self.left is None:
            return ""
        values = {"memory": f"{self.memory_bytes / 1e6:,.1f}", "left": f"{self.left / 1e6:,.1f}"}
        if self.left < 0:
            values["left"] = f"{-self.left / 1e6:,.1f}"
            return text("this step needs {left} MB more than the {memory} MB there are", **values)
        return text("of {memory} MB that leaves {left} MB", **values)


class EstimatesOnDevice(Estimates):
    """Estimates as a table with two more columns: the bytes that are reserved for each step on a
    GPU, and the bytes that it leaves of the budget.

    Args:
        found: The estimates.
        rates: Rates of the machine, for the column of seconds.
        device: Name of the device in `RATES`.
        memory_bytes: Budget, or the device's memory.
        title: Caption of the table.
    """

    columns = (Estimates.columns[0], "reserved, MB", "left, MB", *Estimates.columns[1:])

    def __init__(
        self, found: Iterable[Estimate], rates: Rates, device: str, memory_bytes: int, title: str
    ):
        super().__init__(found, rates, title)
        self.room = memory_bytes - kept_bytes(device)

    def rows(self) -> list[Sequence]:
        found = []
        for row, each in zip(super().rows(), self, strict=True):
            reserved = each.reserved_bytes()
            megabytes = (f"{count / 1e6:,.1f}" for count in (reserved, self.room - reserved))
            found.append((row[0], *megabytes, *row[1:]))
        return found
