"""Symbolic tensors, which are PyTorch's fake tensors."""

from functools import partial
from typing import Any

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
LOG = fake_tensor.__name__  # name of the log
active_fake_mode = partial(_get_dispatch_mode, _TorchDispatchModeKey.FAKE)
allow_data_pointers = torch._C._set_warn_deprecated_on_mutable_data_ptr
refuse_data_pointers = torch._C._set_throw_on_mutable_data_ptr


def is_symbolic(*tensors: Any) -> bool:
    """Return whether one of the tensors is symbolic (`course_lib.symbolic`).

    Without arguments, return whether new tensors are symbolic.
    """
    if not tensors:
        return detect_fake_mode() is not None
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def counted_kind() -> str:
    """Return the kind of device whose tensors are counted, "cpu" or "cuda".

    The kind is "cuda" in a symbolic mode of this kind, although all of the mode's tensors are on
    the CPU. In this mode, tensors that a step on CUDA would keep on the host must not be counted.
    """
    return getattr(detect_fake_mode(), "kind", "cpu")
