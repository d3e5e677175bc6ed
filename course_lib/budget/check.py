"""Run the training step of a recipe on this machine, and compare its memory with the estimate."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from course_lib.labels import join_labels, text, verbatim
from course_lib.memory import MemoryMeter
from course_lib.memory.allocator import allocator_peak
from course_lib.memory.show import Table, bytes_text
from course_lib.workload import Workload

from .estimate import estimate
from .recipe import Recipe
from .step import build, default_dtype, micro_batches_of, train_step


@dataclass(frozen=True, repr=False)
class MemoryComparison(Table):
    """Table that compares the estimated peak memory of a training step with its measured peak.

    Attributes:
        predicted_bytes: Peak of live tensor bytes according to `estimate`. Offloaded tensors are in
            host memory if the device is a GPU, and in a file otherwise.
        measured_bytes: Peak of live tensor bytes according to `MemoryMeter`.
        allocator_bytes: Peak of allocated bytes according to PyTorch's allocator, read in a second
            step without a meter. Only this peak includes the workspaces of operators and the
            rounding of the allocator.
        device: Device on which the step ran, such as "cpu".
    """

    predicted_bytes: int
    measured_bytes: int
    allocator_bytes: int
    device: str

    columns = ("peak", "bytes", "of the prediction")

    def rows(self):
        found = [(text("predicted"), self.predicted_bytes), (text("measured"), self.measured_bytes)]
        found += [(text("allocator's peak"), self.allocator_bytes)]
        return [
            (name, f"{count:,}", f"{count / self.predicted_bytes:.4f}") for name, count in found
        ]

    def caption(self) -> str:
        parts = [text("the step, run on this machine ({device})", device=verbatim(self.device))]
        if self.device != "cpu":
            parts.append(
                text("on a GPU, flash attention and the optimizer need fewer tensors than on a CPU")
            )
        return join_labels(parts, "; ")

    def as_dict(self) -> dict:
        return asdict(self)


def compare_with_estimate(workload: Workload, recipe: Recipe) -> MemoryComparison:
    """Run the training step of a recipe on this machine, and compare its peak with the estimate.

    The step runs twice: first under a `MemoryMeter`, and then without it to read the allocator's
    peak. If PyTorch finds a GPU, the step runs on it.

    Args:
        workload: Model and batch of the step.
        recipe: Memory-saving techniques that the step uses.

    Raises:
        MemoryError: The estimated peak exceeds the free memory of the GPU, or the host memory if
            there is no GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tier = "host" if device.type == "cuda" else "file"
    options: dict[str, Any] = {"loss_sum": workload.loss_sum, "split": workload.split}
    predicted = estimate(
        workload.make_model, workload.make_batch, recipe, tier=tier, **options
    ).peak_bytes
    if predicted > (there := _memory(device)):
        raise MemoryError(
            f"--check needs {bytes_text(predicted)} for the step, but device {device} has"
            f" only {bytes_text(there)}"
        )
    with torch.device(device):
        model, optimizer = build(workload.make_model, recipe, state=True)
        with default_dtype(recipe.dtype):
            batch = workload.make_batch()
        # The estimate does not count micro-batches, so they are made before the measured step.
        micro_batches = micro_batches_of(batch, recipe.micro_batches, workload.split)
    options["split"] = lambda batch, parts: micro_batches

    def step(*modes) -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            train_step(model, optimizer, batch, recipe, **options)

    with MemoryMeter(model, optimizer) as meter:
        step()
    return MemoryComparison(
        predicted, meter.peak_bytes, meter.entry_bytes + allocator_peak(step, device), str(device)
    )


def _memory(device: torch.device) -> int:
    """Return the bytes of free memory of a GPU, or of total host memory if `device` is a CPU.

    The result is 2**62 if Python cannot query the host's memory, as on Windows.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else 1 << 62
    )
