"""Tables of all memory that a step needs on a GPU, and of its optimizer state on the host.

An estimate's `peak_bytes` counts only the tensors on the GPU. `GpuMemory` also shows the memory
that PyTorch's allocator reserves, and the memory that CUDA and cuBLAS keep, with the source of each
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.labels import join_labels, text
from course_lib.memory.show import Table

from .device_memory import context_bytes, workspace_bytes
from .estimate import Estimate
from .optimizers import OPTIMIZERS
from .rates import Rates, rates_of
from .search.fit import Estimates


def host_state_bytes(found: Estimate) -> int:
    """Return the bytes that an offloaded optimizer keeps in host memory between training steps.

    These bytes are the optimizer state and the fp32 weights of the parameters that the host
    updates. Copies of gradients and of parameters exist only during a step, and are not counted.
    The result is 0 if the estimated step offloads no optimizer state to host memory.
    """
    if not found.host_parameters:
        # The property `host_state_bytes` in `OPTIMIZERS` raises for an optimizer whose state cannot
        # be offloaded.
        return 0
    return found.host_parameters * OPTIMIZERS[found.recipe.optimizer].host_state_bytes


@dataclass(frozen=True, repr=False)
class GpuMemory(Table):
    """Table of the GPU memory that one training step needs, and of its optimizer state on the host.

    Attributes:
        tensors: Peak of live tensor bytes, as estimated.
        reserved: Largest number of bytes that PyTorch's allocator reserves during the step,
            according to the simulation `CachingAllocator`. The simulation starts with the tensors
            that are live before the step, laid out one after the other.
        reserved_expandable: Number of bytes that the allocator reserves if its option
            `expandable_segments` is on.
        workspace: Bytes of the workspace that cuBLAS allocates and never frees.
        context: Bytes of the CUDA context.
        context_source: Text that names the source of `context`.
        memory_bytes: GPU memory that the step may use, in bytes; None if it is not known.
        host_state: Bytes of host memory for the offloaded optimizer state, and for the fp32 weights
            of the parameters that the host updates.
        host_parameters: Number of parameter elements whose optimizer state is in host memory.
    """

    tensors: int
    reserved: int
    reserved_expandable: int
    workspace: int
    context: int
    context_source: str = ""
    memory_bytes: int | None = None
    host_state: int = 0
    host_parameters: int = 0

    columns = ("on a GPU", "MB", "by")

    @classmethod
    def from_estimate(
        cls, found: Estimate, device: str | Rates, memory_bytes: int | None
    ) -> GpuMemory:
        """Return the table for an estimated step on a GPU.

        Args:
            found: Estimate of the step.
            device: Name in `RATES`, such as "H100", or the rates of another device.
            memory_bytes: GPU memory that the step may use, in bytes; None if it is not known.
        """
        reserved = [found.reserved_bytes(expandable) for expandable in (False, True)]
        source = rates_of(device).context_source
        kept = workspace_bytes(device), context_bytes(device), source
        on_host = host_state_bytes(found), found.host_parameters
        return cls(found.peak_bytes, *reserved, *kept, memory_bytes, *on_host)

    @property
    def left(self) -> int | None:
        """Bytes of GPU memory that remain free during the step; None if `memory_bytes` is None.

        The number is `memory_bytes` minus `reserved`, `workspace` and `context`. It is negative if
        the step does not fit.
        """
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - self.reserved - self.workspace - self.context

    def rows(self) -> list[Sequence]:
        exact = text("the estimate")
        rules = text("the allocator's rules, simulated")
        documented = text("PyTorch's documentation, CUDA semantics: two threads, one stream")
        reported = self.context_source or text("the user's own device")
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
        parts = [self._free_memory_label()] if self.left is not None else []
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

    def _free_memory_label(self) -> str:
        """Return a label that says how many MB the step leaves free, or how many are missing."""
        values = {"memory": f"{self.memory_bytes / 1e6:,.1f}", "left": f"{self.left / 1e6:,.1f}"}
        if self.left < 0:
            values["left"] = f"{-self.left / 1e6:,.1f}"
            return text("this step needs {left} MB more than the available {memory} MB", **values)
        return text("of the {memory} MB, {left} MB are left", **values)


class EstimatesOnGpu(Estimates):
    """Table of estimated training steps on a GPU, with two more columns than `Estimates`.

    The columns show the memory that PyTorch's allocator reserves for each step, and the part of the
    budget that the step leaves unused.

    Args:
        found: Estimates of the steps, one per row.
        rates: Speed of the machine, from which the duration of each step is computed.
        step_budget_bytes: Memory budget of a step in bytes, without the memory that CUDA and cuBLAS
            occupy.
        count: Kind of bytes that is compared with the budget: "tensors" for the bytes of live
            tensors, or "reserved" for the bytes that the allocator reserves.
        title: Caption of the table.
    """

    columns = (Estimates.columns[0], "reserved (MB)", "left (MB)", *Estimates.columns[1:])

    def __init__(
        self,
        found: Iterable[Estimate],
        rates: Rates,
        step_budget_bytes: int,
        count: str,
        title: str,
    ):
        super().__init__(found, rates, title)
        self.step_budget_bytes, self.count = step_budget_bytes, count

    def rows(self) -> list[Sequence]:
        found = []
        for row, each in zip(super().rows(), self, strict=True):
            reserved = each.reserved_bytes()
            left = self.step_budget_bytes - (
                each.peak_bytes if self.count == "tensors" else reserved
            )
            megabytes = (f"{count / 1e6:,.1f}" for count in (reserved, left))
            found.append((row[0], *megabytes, *row[1:]))
        return found
