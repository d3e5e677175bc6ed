"""Cached results of symbolic operators against `FakeTensorMode`."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib._torch.symbolic import is_symbolic
from course_lib.budget.step import default_dtype
from course_lib.memory import symbolic
from course_lib.memory.meter import UnguardedMeter
from course_lib.symbolic import cpu_kernels


def outlines(function):
    """Return attributes of the results of a function of two tensors, and their shared storages."""
    inputs = [torch.empty(4, 6, dtype=torch.bfloat16) for _ in range(2)]
    results = function(*inputs)
    return [
        (
            (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
            (tensor._is_view(), tensor.requires_grad, set(vars(tensor))),
            (torch._C._dispatch_keys(tensor), tensor.untyped_storage().nbytes()),
            [x.untyped_storage()._cdata == tensor.untyped_storage()._cdata for x in inputs],
            [x is tensor for x in inputs],
        )
        for tensor in (results if isinstance(results, (tuple, list)) else [results])
    ]


OPERATORS = {
    "a matrix product": lambda x, y: x @ y.T,
    "a view of a part": lambda x, y: x[1:, 2:].T,
    "in place": lambda x, y: x.add_(y),
    "integers": lambda x, y: x.long() + 1,
    "a number": lambda x, y: x.long() + 1.0,
    "a boolean": lambda x, y: x.long() + True,
    "several": lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "parts": lambda x, y: x.split(2),
    "parts without a storage of the input": lambda x, y: (x + y).unbind(),
    "a list": lambda x, y: torch.cat([x, y, x.T.contiguous().T]),
    # a tensor of one element is contiguous and channels-last at once
    "channels last": lambda x, y: [
        torch.empty(n, n, n, n).clone(memory_format=torch.channels_last) for n in (1, 2)
    ],
    "strides kept": lambda x, y: (x.T + y.T).relu(),
    "the default dtype": lambda x, y: x.long() / 2,
    "resized": lambda x, y: x.resize_(2, 3),
    "out": lambda x, y: torch.mul(x, 2, out=y),
}


@pytest.mark.parametrize("meter", [nullcontext, UnguardedMeter])
@pytest.mark.parametrize("name", OPERATORS)
def test_cached_symbolic_results_equal_results_of_fake_tensor_mode(name, meter):
    with FakeTensorMode():
        expected = outlines(OPERATORS[name])
    with symbolic(), meter():
        for _ in range(3):
            assert outlines(OPERATORS[name]) == expected


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_data_pointer_of_symbolic_tensor_from_cache_is_zero():
    with symbolic():
        x = torch.empty(3)
        assert [(x * 2).data_ptr() for _ in range(3)] == [0] * 3


@pytest.mark.parametrize("meter", [nullcontext, UnguardedMeter])
def test_symbolic_shape_cache_distinguishes_default_dtypes_and_inference_mode(meter):
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype), symbolic(), meter():
            assert (torch.empty(5, dtype=torch.int64).relu() / 2).dtype == dtype
    with symbolic(), meter():
        x = torch.empty(5)
        for inside in (False, True, False, True):
            with torch.inference_mode(inside):
                assert not x[1:].is_inference() and (x + 1).is_inference() == inside


@pytest.mark.parametrize("meter", [nullcontext, UnguardedMeter])
def test_symbolic_values_survive_copies_until_write_in_every_run(meter):
    with symbolic(), meter():
        for _ in range(3):
            x = torch.ones(3, 3)
            assert (x.tril() == 0).tolist() == [
                [False, True, True],
                [False, False, True],
                [False] * 3,
            ]
            x.mul_(2)
            assert is_symbolic(x == 1)


@pytest.mark.parametrize("meter", [nullcontext, UnguardedMeter])
def test_operator_of_inexact_bytes_warns_in_every_run(meter, monkeypatch):
    inexact = cpu_kernels.Inexact("keeps hidden memory", "run it outside")
    monkeypatch.setitem(cpu_kernels.INEXACT, torch.ops.aten.special_bessel_j0.default, inexact)
    with symbolic(), meter():
        for _ in range(3):
            with pytest.warns(UserWarning, match="bessel_j0.* keeps hidden memory"):
                torch.special.bessel_j0(torch.empty(3))


@pytest.mark.parametrize("meter", [nullcontext, UnguardedMeter])
def test_results_inside_another_fake_mode_belong_to_that_mode(meter):
    other = FakeTensorMode()
    with symbolic() as mode, meter():
        for _ in range(2):
            x = torch.empty(4, 6)
            assert (x + x).fake_mode is mode
            with other:
                x = torch.empty(4, 6)
                assert (x + x).fake_mode is other
