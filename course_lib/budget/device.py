"""Memory that a step takes beyond its tensors on the GPU: reserved, kept by CUDA, on the host.

An estimate's `peak_bytes` counts only the tensors on the GPU. `OnDevice` shows all of them, with
the source of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.labels import join_labels, text
from course_lib.memory.show import Table

from .estimate import Estimate
from .optimizers import OPTIMIZERS
from .rates import Rates
from .search import Estimates

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"
HOPPER = ("H100", "H200")
WITHOUT_CUDA = ("MI300X",)
# Workspaces of cuBLAS, which are kept from the first matrix products on: one for each thread that
# runs some, of forward and of backward, on one stream. Source: PyTorch's documentation, "CUDA
# semantics", cuBLAS workspaces. The setting :4096:2:16:8 means 2 * 4096 + 8 * 16 KiB, and :4096:8
# means 32 MiB. On an H200 with PyTorch 2.11 a process kept 2 * 32 MiB.
CUBLAS_BYTES = 2 * (2 * 4096 + 8 * 16) << 10
CUBLAS_HOPPER_BYTES = 2 * (8 * 4096) << 10
# nvidia-smi showed this figure for a process with PyTorch 2.10 and CUDA 13.0 that had only created
# its context, on an RTX 6000 Ada. Source: github.com/unslothai/unsloth-zoo, pull request 1053.
# Kernels are loaded into the context when they are first used, so it grows.
CONTEXT_BYTES = 426 * MIB
# Measured on an H200 with PyTorch 2.11, CUDA 13.0 and driver 580.159, as what the device's memory
# in use exceeds the reserved bytes by: 552,402,944 bytes when the context had been created,
# 718,077,952 after a matrix product, and these after training steps in fp32 and bf16.
CONTEXT_HOPPER_BYTES = 806_158_336


def workspace_bytes(device: str) -> int:
    """Return the bytes that cuBLAS keeps on a device for one stream; 0 on AMD devices."""
    if device in WITHOUT_CUDA:
        return 0
    return CUBLAS_HOPPER_BYTES if device in HOPPER else CUBLAS_BYTES


def context_bytes(device: str) -> int:
    """Return the bytes of the CUDA context.

    The result is 0 on AMD devices, because the memory that ROCm keeps is not known.
    """
    if device in WITHOUT_CUDA:
        return 0
    return CONTEXT_HOPPER_BYTES if device in HOPPER else CONTEXT_BYTES


def kept_bytes(device: str) -> int:
    """Return the bytes that no tensor can use: the workspace of cuBLAS and the CUDA context."""
    return workspace_bytes(device) + context_bytes(device)


def host_state_bytes(found: Estimate) -> int:
    """Return the bytes that an offloaded optimizer keeps in host memory between steps.

    The result is 0 if nothing is offloaded to the host. Copies of gradients and of parameters,
    which exist during a step, are not counted.
    """
    if not found.host_parameters:
        # `host_state_bytes` would raise for an optimizer whose state cannot be offloaded.
        return 0
    return found.host_parameters * OPTIMIZERS[found.recipe.optimizer].host_state_bytes


@dataclass(frozen=True, repr=False)
class OnDevice(Table):
    """GPU memory that one step needs, by holder, and the optimizer state in host memory.

    Attributes:
        tensors: Estimated tensor bytes at the peak.
        reserved: Largest number of bytes that PyTorch's allocator reserves. `CachingAllocator`
            simulates it for one step. Before the step, the live tensors are laid out one after the
            other.
        reserved_expandable: Same as `reserved`, but with expandable segments.
        workspace: Bytes that cuBLAS keeps.
        context: Bytes of the CUDA context.
        memory_bytes: Budget, or the device's memory if there is no budget; None if it is not known.
        host_state: Bytes of the offloaded optimizer state and its fp32 weights in host memory.
        host_parameters: Number of parameters that they belong to.
    """

    tensors: int
    reserved: int
    reserved_expandable: int
    workspace: int
    context: int
    memory_bytes: int | None = None
    host_state: int = 0
    host_parameters: int = 0

    columns = ("on a GPU", "MB", "by")

    @classmethod
    def from_estimate(cls, found: Estimate, device: str, memory_bytes: int | None) -> OnDevice:
        """Return the table of an estimated step on a device of `RATES`."""
        reserved = [found.reserved_bytes(settings) for settings in (None, EXPANDABLE)]
        kept = workspace_bytes(device), context_bytes(device)
        on_host = host_state_bytes(found), found.host_parameters
        return cls(found.peak_bytes, *reserved, *kept, memory_bytes, *on_host)

    @property
    def left(self) -> int | None:
        """Bytes that the step leaves free; negative if it does not fit, None if not known."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - self.reserved - self.workspace - self.context

    def rows(self) -> list[Sequence]:
        exact = text("the estimate")
        rules = text("the allocator's rules, simulated")
        documented = text("PyTorch's documentation, CUDA semantics: two threads, one stream")
        reported = (
            text("measured on an H200, PyTorch 2.11")
            if self.context == CONTEXT_HOPPER_BYTES
            else text("nvidia-smi, an RTX 6000 Ada, PyTorch 2.10 (unsloth-zoo, #1053)")
        )
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
            found.append((text("kept by ROCm"), "?", text("not known here, and not counted")))
        return found

    def caption(self) -> str:
        parts = [self._left_in_words()] if self.left is not None else []
        if self.host_state:
            parts.append(
                text(
                    "the host's memory holds {state} MB of optimizer state, {count} bytes per"
                    " parameter",
                    state=f"{self.host_state / 1e6:,.1f}",
                    count=self.host_state // self.host_parameters,
                )
            )
        return join_labels(parts, "; ")

    def _left_in_words(self) -> str:
        values = {"memory": f"{self.memory_bytes / 1e6:,.1f}", "left": f"{self.left / 1e6:,.1f}"}
        if self.left < 0:
            values["left"] = f"{-self.left / 1e6:,.1f}"
            return text("this step needs {left} MB more than the available {memory} MB", **values)
        return text("of the {memory} MB, {left} MB are left", **values)


class EstimatesOnDevice(Estimates):
    """Estimates as a table with two more columns for a GPU.

    One has the bytes that the allocator reserves for each step, and the other has the bytes of the
    budget that the step leaves unused.

    Args:
        found: The estimates.
        rates: Rates of the machine, for the column of seconds.
        device: Name of the device in `RATES`.
        memory_bytes: Budget, or the device's memory.
        title: Caption of the table.
    """

    columns = (Estimates.columns[0], "reserved (MB)", "left (MB)", *Estimates.columns[1:])

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
