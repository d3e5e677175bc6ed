"""Memory of a training step: where its bytes go, measured to the byte, and predicted.

`MemoryMeter` counts live tensors operator by operator, `measure` compares arms by one fair method,
`saved_tensors` lists what autograd keeps for backward, and the formulas say what to expect of them.
`CachingAllocator` follows PyTorch's rules for what a GPU reserves beyond that. Lesson 01 explains.
"""

from .allocator_settings import AllocatorSettings
from .caching_allocator import Block, CachingAllocator
from .formulas import attention_saved_bytes, training_state_bytes, transformer_activation_bytes
from .measurement import Measurement, measure
from .meter import MemoryBudgetExceeded, MemoryMeter
from .saved_tensors import SavedTensor, SavedTensors, saved_tensors
from .show import CATEGORY_COLORS, CATEGORY_HATCHES
from .symbols import cast, symbolic
from .timeline import CATEGORIES, PHASES, Sample, Timeline
from .trace import Event, Trace

__all__ = [
    "CATEGORIES",
    "CATEGORY_COLORS",
    "CATEGORY_HATCHES",
    "PHASES",
    "AllocatorSettings",
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
