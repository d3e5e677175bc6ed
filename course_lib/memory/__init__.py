"""Measure exactly, and predict, how many bytes a training step needs in each category.

`MemoryMeter` counts live tensors after every operator. `measure` runs a step several times and
returns its memory, FLOPs and time, so that variants of a step can be compared. `saved_tensors`
lists the tensors that autograd keeps for backward. `training_state_bytes`,
`transformer_activation_bytes` and `attention_saved_bytes` predict bytes by formulas.
`CachingAllocator` simulates PyTorch's allocator of GPU memory, which reserves more bytes than the
live tensors need. Lesson 01 explains all of these.

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

# Maps public names to their modules. A module is imported when one of its names is first used, so a
# user who copies only the meter does not need these modules.
_ON_FIRST_USE = {
    "Block": "course_lib.caching_allocator",
    "CachingAllocator": "course_lib.caching_allocator",
    "Measurement": "course_lib.memory.measurement",
    "measure": "course_lib.memory.measurement",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when the name is first used."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    globals()[name] = value
    return value
