"""Private names for PyTorch's fake tensors, which this library calls symbolic tensors."""

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
LOG = fake_tensor.__name__  # name of the logger for errors of operators on fake tensors
active_fake_mode = partial(_get_dispatch_mode, _TorchDispatchModeKey.FAKE)
# Functions that set whether reading a tensor's data pointer is allowed or raises an error.
allow_data_pointers = torch._C._set_warn_deprecated_on_mutable_data_ptr
refuse_data_pointers = torch._C._set_throw_on_mutable_data_ptr


def is_symbolic(*tensors: Any) -> bool:
    """Return whether any of the arguments is a symbolic tensor.

    Without arguments, return whether a symbolic mode is active, so that new tensors are symbolic.
    """
    if not tensors:
        return detect_fake_mode() is not None
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def tracked_device_kind() -> str:
    """Return "cuda" inside `Symbolic(kind="cuda")`, and otherwise "cpu".

    All tensors of this mode report the CPU as their device, so their attribute `device` does not
    show whether they stand for tensors on a GPU.
    """
    return getattr(detect_fake_mode(), "kind", "cpu")
