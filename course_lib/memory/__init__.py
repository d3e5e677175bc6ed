"""Memory of a training step: its bytes by category, measured exactly, and predicted.

`MemoryMeter` counts live tensors operator by operator, `measure` compares variants of a step by one
method, and `saved_tensors` lists the tensors that autograd keeps for backward. The formulas predict
these numbers. `CachingAllocator` follows PyTorch's rules for the memory that a GPU reserves in
addition. Lesson 01 explains them.

To use the meter alone, copy it together with `symbolic/`, `_check.py`, `_origin.py` and
`_torch/`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..symbolic import cast, symbolic
from .formulas import attention_saved_bytes, training_state_bytes, transformer_activation_bytes
from .meter import MemoryBudgetExceeded, MemoryMeter
from .saved_tensors import SavedTensor, SavedTensors, saved_tensors
from .show import CATEGORY_COLORS, CATEGORY_HATCHES
from .timeline import CATEGORIES, PHASES, Sample, Timeline
from .trace import Event, Trace

if TYPE_CHECKING:
    from course_lib.caching_allocator import Block, CachingAllocator

    from .measurement import Measurement, measure

__all__ = [
    "CATEGORIES",
    "CATEGORY_COLORS",
    "CATEGORY_HATCHES",
    "PHASES",
    "Block",
    "CachingAllocator",
    "Event",
    "Measurement",
    "MemoryBudgetExceeded",
    "MemoryMeter",
    "Sample",
    "SavedTensor",
    "SavedTensors",
    "Timeline",
    "Trace",
    "attention_saved_bytes",
    "cast",
    "measure",
    "saved_tensors",
    "symbolic",
    "training_state_bytes",
    "transformer_activation_bytes",
]

# A copy of the meter needs none of these.
_ON_FIRST_USE = {
    "Block": "course_lib.caching_allocator",
    "CachingAllocator": "course_lib.caching_allocator",
    "Measurement": "course_lib.memory.measurement",
    "measure": "course_lib.memory.measurement",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    globals()[name] = value
    return value
