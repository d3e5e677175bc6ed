"""Run a training step on symbolic tensors, which have shapes, dtypes and storages but no values.

A symbolic tensor takes no memory. Inside `symbolic()` a model can be built and trained for a step,
and a `MemoryMeter` of `course_lib.memory` counts the bytes that the same step needs on real
tensors. The storage of each result has the size that the CPU kernel allocates. Small tensors of
integers keep their values, because steps read them.

`Symbolic` is the dispatch mode that `symbolic()` enters. `cast` converts the dtype of a module with
real or symbolic tensors. `Gpu` describes the GPU for which a step is estimated.
"""

from .conversion import cast
from .cuda_kernels import Gpu
from .mode import Symbolic, symbolic

__all__ = ["Gpu", "Symbolic", "cast", "symbolic"]
