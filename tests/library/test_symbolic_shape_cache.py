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


def layouts(shape):
    """Yield tensors of a shape with several strides."""
    x = torch.ones(shape)
    yield x
    yield torch.ones(*shape, 2)[..., 0]
    if len(shape) > 1:
        yield x.transpose(0, 1).contiguous().transpose(0, 1)
    if len(shape) == 4:
        yield x.contiguous(memory_format=torch.channels_last)


SHAPES = (1, 1, 1, 1), (3, 4), (5, 2, 2), (1, 4), (4, 1, 3), (0, 3), (1, 3, 1, 2), (2, 3, 4, 5)
ELEMENTWISE = {
    "add": lambda x: x + x,
    "add to an expanded": lambda x: x + x[:1],
    "copy": lambda x: x.clone(),
    "copy to channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "zeros in channels last": lambda x: torch.zeros_like(x, memory_format=torch.channels_last),
    "convert": lambda x: x.to(torch.bfloat16),
    "compare": lambda x: x > 0,
    "choose a number": lambda x: torch.where(x > 0, x, 2.0),
    "power of a number": lambda x: torch.pow(2.0, x),
    "in place": lambda x: x.lerp_(x, 0.1),
    "fill": lambda x: x.normal_(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_symbolic_elementwise_results_have_strides_of_real_kernels(name):
    def results():
        for shape in SHAPES:
            for x in layouts(shape) if len(shape) == 4 or "channels" not in name else ():
                y = ELEMENTWISE[name](x)
                yield y.shape, y.stride(), y.dtype, y.untyped_storage().nbytes(), y is x

    with symbolic():
        found = list(results())
    assert found == list(results())
