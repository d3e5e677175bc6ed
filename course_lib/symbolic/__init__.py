"""Training steps without memory: tensors have shapes, dtypes and storages, but no values.

Inside `symbolic()` a model can be built and trained for a step, and `cast` converts its dtype. A
`MemoryMeter` of `course_lib.memory` counts the bytes that the same step takes on real tensors. For
this, results have the storages that the CPU kernels give them. Small tensors of integers keep their
values, because steps read them. `Symbolic` is the mode that `symbolic()` enters.
"""

from .conversion import cast
from .cuda_kernels import Gpu
from .mode import Symbolic, symbolic

__all__ = ["Gpu", "Symbolic", "cast", "symbolic"]
