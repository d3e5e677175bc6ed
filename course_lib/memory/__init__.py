"""Memory of a training step: its bytes by category, measured exactly, and predicted.

`MemoryMeter` counts live tensors operator by operator, `measure` compares variants of a step by one
method, and `saved_tensors` lists the tensors that autograd keeps for backward. The formulas predict
these numbers. `CachingAllocator` follows PyTorch's rules for the memory that a GPU reserves in
addition. Lesson 01 explains them.
"""

from ..symbolic import cast, symbolic
from .caching_allocator import Block, CachingAllocator
from .formulas import attention_saved_bytes, training_state_bytes, transformer_activation_bytes
from .measurement import Measurement, measure
from .meter import MemoryBudgetExceeded, MemoryMeter
from .saved_tensors import SavedTensor, SavedTensors, saved_tensors
from .show import CATEGORY_COLORS, CATEGORY_HATCHES
from .timeline import CATEGORIES, PHASES, Sample, Timeline
from .trace import Event, Trace

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
