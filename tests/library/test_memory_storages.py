"""Tests of tensors with several storages: sparse, nested, quantized and wrapper tensors."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from training_steps import allocations, at_end, hooks_restored, one_more_sample

from course_lib.memory import MemoryMeter, saved_tensors

pytestmark = pytest.mark.filterwarnings("ignore")


def nested(layout, **options):
    rows = [torch.randn(length, 16) for length in (30, 20, 14)]
    return torch.nested.nested_tensor(rows, layout=layout, **options)


def masked():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(4, 4), torch.eye(4) > 0)


def quantized_per_channel():
    scales, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    return torch.quantize_per_channel(torch.randn(64, 64), scales, zeros, 0, torch.qint8)


def compressed(layout, *block):
    ends, indices, values = torch.tensor([0, 2, 4]), torch.tensor([0, 1] * 2), torch.ones(4, *block)
    return torch.sparse_compressed_tensor(ends, indices, values, layout=layout)


# Name of a layout -> (function that makes a tensor, bytes of all storages of the tensor)
LAYOUTS = {
    "complex": (lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), 128),
    "coo": (lambda: torch.ones(4, 4).to_sparse(), 16 * (2 * 8 + 4)),
    "csr": (lambda: compressed(torch.sparse_csr), (3 + 4) * 8 + 4 * 4),
    "csc": (lambda: compressed(torch.sparse_csc), (3 + 4) * 8 + 4 * 4),
    "bsr": (lambda: compressed(torch.sparse_bsr, 2, 2), (3 + 4) * 8 + 16 * 4),
    "bsc": (lambda: compressed(torch.sparse_bsc, 2, 2), (3 + 4) * 8 + 16 * 4),
    "jagged": (lambda: nested(torch.jagged), 64 * 16 * 4 + 4 * 8),
    "nested": (lambda: nested(torch.strided), 64 * 16 * 4 + 3 * (2 + 2 + 1) * 8),
    "masked": (masked, 16 * 4 + 16),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8), 8),
    "quantized per channel": (quantized_per_channel, 64 * 64 + 64 * (8 + 8)),
}


def model_with(tensor):
    model = nn.Module()
    model.register_buffer("held", tensor)
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_meter_counts_all_storages_of_each_tensor_layout(name):
    make, expected = LAYOUTS[name]
    with MemoryMeter(model_with(make())) as meter:
        assert meter.entry_bytes == expected


def test_meter_counts_values_and_indices_of_sparse_gradient():
    embedding = nn.Embedding(100, 4, sparse=True)
    with MemoryMeter(embedding) as meter:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        one_more_sample()
    assert at_end(meter)["gradient"] == 3 * 8 + 3 * 4 * 4


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "leaf"])
def test_meter_peak_of_nested_tensor_step_equals_allocator_peak(layout, leaf):
    layer = nn.Linear(16, 16, bias=False)

    def step():
        x = nested(layout, requires_grad=leaf)
        y = layer(x * x + x)
        y.to_padded_tensor(0.0).square().sum().backward()

    step()
    layer.zero_grad()
    allocated = max(accumulate(allocations(step)))
    layer.zero_grad()
    with MemoryMeter() as meter:
        step()
    assert meter.peak_bytes == allocated > 4 * 64 * 16 * 4


def test_saved_bytes_of_jagged_tensor_include_offsets():
    layer = nn.Linear(16, 16)
    jagged, packed = (
        saved_tensors(lambda x: layer(x).sin(), x).total_bytes
        for x in (nested(torch.jagged), torch.ones(64, 16))
    )
    assert jagged == packed + 4 * 8


def test_meter_counts_inner_tensors_of_wrapper_subclass():
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    model = nn.Module()
    model.weight = nn.Parameter(two.TwoTensor(torch.ones(100), torch.ones(100)))
    with MemoryMeter(model) as meter:
        y = model.weight * 2
        assert meter.live_bytes == 1600
        y.sum().backward()
    assert meter.entry_bytes == at_end(meter)["gradient"] == 800
    assert [sample.operator for sample in meter.timeline[:2]] == ["aten.mul.Tensor"] * 2


def test_meter_rejects_tensor_subclass_without_tensor_flatten():
    class Opaque(torch.Tensor):
        __slots__ = ("inner",)

        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    meter = MemoryMeter(model_with(Opaque()))
    with pytest.raises(NotImplementedError, match=r"bytes of Opaque .*flatten"):
        meter.__enter__()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_meter_rejects_opaque_layout_and_restores_hooks():
    raises = pytest.raises(NotImplementedError, match=r"layout .* got torch\._mkldnn")
    with hooks_restored(), raises, MemoryMeter():
        torch.randn(4, 4).to_mkldnn()
