"""Gradient accumulation: a training step over micro-batches, with the gradient of the full batch.

`split` cuts a batch into micro-batches. `AccumulatedStep` runs them one after the other, so that
only one micro-batch's activations are live at a time, and then does one optimizer step. The bytes
of parameters, gradients and optimizer state do not depend on the number of micro-batches. The
peak is therefore a constant number of bytes, plus a fixed number of bytes per sample of a
micro-batch. Lesson 05 explains accumulation.

To use this package alone, copy it together with `_batches.py`, `_check.py` and `_torch/`.
"""

from .._batches import split
from .step import AccumulatedStep, StepResult

__all__ = ["AccumulatedStep", "StepResult", "split"]
