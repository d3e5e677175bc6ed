"""Simulate PyTorch's caching allocator of GPU memory.

`CachingAllocator` replays the allocations of a whole trace, or makes single allocations, and
reserves memory by PyTorch's rules. It shows how much GPU memory PyTorch reserves for a step in
addition to the bytes of the step's tensors. Lesson 01 uses it to show how memory becomes
fragmented.
"""

from .allocator import Block, CachingAllocator

__all__ = ["Block", "CachingAllocator"]
