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
    """Return the bytes that an offloaded optimizer keeps in host memory between steps.

    The result is 0 if nothing is offloaded to the host. Copies of gradients and of parameters,
    which exist during a step, are not counted.
    """
    if not found.host_parameters:
        # The row's `host_state_bytes` raises for an optimizer whose state cannot be offloaded.
        return 0
    return found.host_parameters * OPTIMIZERS[found.recipe.optimizer].host_state_bytes


@dataclass(frozen=True, repr=False)
class GpuMemory(Table):
    """Table of the GPU memory that one step needs, and of the optimizer state in host memory.

    Attributes:
        tensors: Estimated tensor bytes at the peak.
        reserved: Largest number of bytes that PyTorch's allocator reserves during the step.
            `CachingAllocator` simulates the allocator. The simulation begins with the tensors that
            are live before the step, laid out one after the other.
        reserved_expandable: Same as `reserved`, but with expandable segments.
        workspace: Bytes of the workspace that cuBLAS keeps.
        context: Bytes of the CUDA context.
        context_source: Text that names the source of `context`.
        memory_bytes: Bytes of the device that the step may use; None if they are not known.
        host_state: Bytes of the offloaded optimizer state and its fp32 weights in host memory.
        host_parameters: Number of parameters whose state is offloaded.
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
        """Return the table of an estimated step on a device: a name in `RATES`, or `Rates`."""
        reserved = [found.reserved_bytes(expandable) for expandable in (False, True)]
        source = rates_of(device).context_source
        kept = workspace_bytes(device), context_bytes(device), source
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
    """Table of estimates with two additional columns for a GPU.

    The columns show the memory that PyTorch's allocator reserves for each step, and the part of the
    budget that the step leaves unused.

    Args:
        found: The estimates.
        rates: Rates of the machine, which convert an estimate into seconds.
        step_budget_bytes: Budget for the step, without the memory that CUDA keeps.
        count: Quantity that must fit, as in `fit`.
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
