"""Where the bytes of a training step go: measured to the byte, and predicted.

`MemoryMeter` counts live tensors operator by operator, `measure` compares arms by one fair method, `saved_tensors`
lists what autograd keeps for backward, and the formulas say what to expect of them. Lesson 01 explains.
"""

from contextlib import AbstractContextManager

from .formulas import attention_saved_bytes, training_state_bytes, transformer_activation_bytes
from .measurement import Measurement, measure
from .meter import (
    CATEGORIES,
    CATEGORY_COLORS,
    CATEGORY_HATCHES,
    PHASES,
    MemoryBudgetExceeded,
    MemoryMeter,
    Sample,
    Timeline,
)
from .saved import SavedTensor, SavedTensors, saved_tensors

__all__ = [
    "CATEGORIES",
    "CATEGORY_COLORS",
    "CATEGORY_HATCHES",
    "PHASES",
    "Measurement",
    "MemoryBudgetExceeded",
    "MemoryMeter",
    "Sample",
    "SavedTensor",
    "SavedTensors",
    "Timeline",
    "attention_saved_bytes",
    "measure",
    "saved_tensors",
    "symbolic",
    "training_state_bytes",
    "transformer_activation_bytes",
]


def symbolic() -> AbstractContextManager:
    """A context in which tensors have shapes, dtypes and storages, but no memory: build a model and step it for free.

    A `MemoryMeter` inside counts the bytes that the same step would take for real. Everything that the step uses must
    be made inside the context, and in its final dtype (`torch.set_default_dtype`): `module.to(dtype)` fails on modules
    with such parameters.

    Example::

        with symbolic():
            model, batch = make_model(), make_batch()
            with MemoryMeter(model) as meter:
                train_step(model, batch)

    Source: `torch._subclasses.FakeTensorMode`.
    """
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()
