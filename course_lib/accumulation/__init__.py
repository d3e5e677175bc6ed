"""The batch in pieces: a training step over micro-batches whose gradient is that of the full batch.

`split` cuts a batch into micro-batches; `AccumulatedStep` runs them one after the other, so that
only one piece's activations are alive at a time, and takes one optimizer step. The parameters, the
optimizer's state and the gradients stay as large as they are: peak bytes are a floor plus so many
bytes a sample of the micro-batch. Lesson 05 explains.
"""

from .step import AccumulatedStep, StepResult, check_loss_sum, split

__all__ = ["AccumulatedStep", "StepResult", "check_loss_sum", "split"]
