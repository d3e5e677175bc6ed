"""Cached results of symbolic operators equal those that `FakeTensorMode` makes."""

import pytest
import torch
from torch._functorch import config as functorch
from torch._subclasses import fake_tensor as _fake

from course_lib.memory import symbolic


def _outlines(function, *shapes, **options):
    """What an operator makes of such tensors, and in whose storage it lies."""
    given = [torch.empty(shape, **options) for shape in shapes]
    made = function(*given)
    found = []
    for tensor in made if isinstance(made, (tuple, list)) else [made]:
        storage = tensor.untyped_storage()
        lies_in = [i for i, x in enumerate(given) if x.untyped_storage()._cdata == storage._cdata]
        same = [i for i, x in enumerate(given) if x is tensor]
        look = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor._is_view(),
        )
        kinds = torch._C._dispatch_keys(tensor), tensor.requires_grad, set(vars(tensor))
        found.append((*look, storage.nbytes(), lies_in, same, *kinds))
    return found


OUTLINED = {
    "a product": lambda x, y: x @ y.T,
    "a view of a part": lambda x, y: x[1:, 2:].T,
    "a view of a transpose": lambda x, y: x.T[1:],
    "in place": lambda x, y: x.add_(y),
    "in place of a part": lambda x, y: x[1:].mul_(2),
    "whole numbers": lambda x, y: x.long() + 1,
    "a number": lambda x, y: x.long() + 1.0,
    "a truth value": lambda x, y: x.long() + True,
    "several": lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "parts": lambda x, y: x.split(2),
    "parts without a storage of the input": lambda x, y: (x + y).unbind(),
    "a list": lambda x, y: torch.cat([x, y, x.T.contiguous().T]),
    "strides kept": lambda x, y: (x.T + y.T).relu(),
    "expanded": lambda x, y: x[:1].expand(5, 6),
    "by the default dtype": lambda x, y: x.long() / 2,
    "resized": lambda x, y: x.resize_(2, 3),
    "transposed in place": lambda x, y: x.t_(),
    "out": lambda x, y: torch.mul(x, 2, out=y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OUTLINED)
def test_what_is_remembered_of_an_operator_is_what_the_framework_makes_of_it(name, dtype):
    function = OUTLINED[name]
    with _fake.FakeTensorMode():
        expected = _outlines(function, (4, 6), (4, 6), dtype=dtype)
    with symbolic():
        assert [_outlines(function, (4, 6), (4, 6), dtype=dtype) for _ in range(3)] == [
            expected
        ] * 3


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_what_is_remembered_has_no_address_just_as_what_is_made_first(allowed):
    found = []
    with functorch.patch(fake_tensor_allow_unsafe_data_ptr_access=allowed), symbolic():
        x = torch.empty(3)
        for _ in range(3):
            try:
                found.append((x * 2).data_ptr())
            except RuntimeError:
                found.append("refused")
    assert found == [0 if allowed else "refused"] * 3


def test_what_is_remembered_is_told_apart_by_all_that_decides_it():
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            with symbolic():
                assert (torch.empty(5, dtype=torch.int64).relu() / 2).dtype == dtype
        finally:
            torch.set_default_dtype(before)
    with symbolic():
        x = torch.empty(5)
        for _ in range(2):
            assert not x[1:].is_inference() and not (x + 1).is_inference()
            with torch.inference_mode():
                assert not x[1:].is_inference() and (x + 1).is_inference()
