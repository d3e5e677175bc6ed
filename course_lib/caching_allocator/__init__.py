"""PyTorch's allocator of GPU memory, simulated by its rules.

`CachingAllocator` replays the events of a trace, or takes single allocations, and reserves memory
as PyTorch does. Lesson 01 shows how fragments arise.
"""

from .allocator import Block, CachingAllocator

__all__ = ["Block", "CachingAllocator"]
