"""Bytes of sparse, nested, quantized and wrapper tensors, which hold several storages."""

import pytest
import torch
from torch import nn
from training_steps import at_end, everything_undone_afterwards, one_more_sample, run_under

from course_lib.memory import MemoryMeter, measure, saved_tensors
from course_lib.memory.allocator import allocator_peak
from course_lib.memory.storages import storages_of


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_count_with_their_indices_and_values():
    with MemoryMeter() as meter:
        coo = torch.eye(8).to_sparse()
        assert meter.live_bytes == coo._indices().nbytes + coo._values().nbytes == 8 * 2 * 8 + 8 * 4
        del coo
        csr = torch.eye(8).to_sparse_csr()
        parts = csr.crow_indices(), csr.col_indices(), csr.values()
        assert meter.live_bytes == sum(part.untyped_storage().nbytes() for part in parts)
    embedding = nn.Embedding(100, 4, sparse=True)
    with MemoryMeter(embedding) as meter:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        one_more_sample()
    assert at_end(meter)["gradient"] == 3 * 8 + 3 * 4 * 4


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
def test_an_opaque_tensor_is_a_clear_error_after_which_everything_is_undone():
    refused = pytest.raises(NotImplementedError, match=r"cannot see .* with layout torch\._mkldnn")
    with everything_undone_afterwards(), refused, MemoryMeter():
        torch.randn(4, 4).to_mkldnn()


def nested(layout):
    rows = [torch.randn(length, 16) for length in (30, 20, 14)]
    return lambda **options: torch.nested.nested_tensor(rows, layout=layout, **options), rows


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("leaf", [False, True], ids=["data", "leaf"])
def test_a_step_on_nested_tensors_takes_what_the_allocator_saw(layout, leaf):
    made, _ = nested(layout)
    layer = nn.Linear(16, 16, bias=False)

    def step():
        x = made(requires_grad=leaf)
        y = layer(x * x + x)
        y.to_padded_tensor(0.0).square().sum().backward()

    step()
    layer.zero_grad()
    seen = allocator_peak(lambda *modes: run_under(step, *modes), torch.device("cpu"))
    layer.zero_grad()
    with MemoryMeter() as meter:
        step()
    assert meter.peak_bytes == seen > 4 * 64 * 16 * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_step_takes_the_packed_one_and_its_offsets():
    made, rows = nested(torch.jagged)
    layer = nn.Linear(16, 16)

    def jagged():
        layer(made()).sin().values().square().sum().backward()

    def packed():
        layer(torch.cat(rows)).sin().square().sum().backward()

    found, dense = (measure(step, model=layer, repeats=1) for step in (jagged, packed))
    offsets = made().offsets().nbytes
    assert offsets == 4 * 8
    assert found.peak_bytes == found.allocator_peak_bytes == dense.peak_bytes + offsets
    kept = saved_tensors(lambda x: layer(x).sin(), made())
    dense_kept = saved_tensors(lambda x: layer(x).sin(), torch.cat(rows))
    assert kept.total_bytes == dense_kept.total_bytes + offsets


def without_flattening():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(4, 4), torch.eye(4) > 0)


def per_channel(bits):
    scales, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    return torch.quantize_per_channel(torch.randn(64, 64), scales, zeros, 0, bits)


def compressed(layout, *block):
    ends, indices, values = torch.tensor([0, 2, 4]), torch.tensor([0, 1] * 2), torch.ones(4, *block)
    return torch.sparse_compressed_tensor(ends, indices, values, layout=layout)


# what a tensor holds on a CPU -> a closed form of its bytes
HELD = {
    "complex": (lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), 128),
    "coo": (lambda: torch.ones(4, 4).to_sparse(), 16 * (2 * 8 + 4)),
    "csr": (lambda: compressed(torch.sparse_csr), (3 + 4) * 8 + 4 * 4),
    "csc": (lambda: compressed(torch.sparse_csc), (3 + 4) * 8 + 4 * 4),
    "bsr": (lambda: compressed(torch.sparse_bsr, 2, 2), (3 + 4) * 8 + 16 * 4),
    "bsc": (lambda: compressed(torch.sparse_bsc, 2, 2), (3 + 4) * 8 + 16 * 4),
    "jagged": (lambda: nested(torch.jagged)[0](), 64 * 16 * 4 + 4 * 8),
    "nested": (lambda: nested(torch.strided)[0](), 64 * 16 * 4 + 3 * (2 + 2 + 1) * 8),
    "masked": (without_flattening, 16 * 4 + 16),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8), 8),
    "quantized per channel": (lambda: per_channel(torch.qint8), 64 * 64 + 64 * (8 + 8)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD)
def test_a_tensor_of_each_layout_is_counted_with_all_that_it_holds(name):
    make, expected = HELD[name]
    held = {storage._cdata: storage.nbytes() for storage in storages_of(make())}
    assert sum(held.values()) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_names_no_tensor_is_a_clear_error():
    class Opaque(torch.Tensor):
        __slots__ = ("inner",)

        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    with pytest.raises(NotImplementedError, match=r"bytes of a Opaque: give its class .*flatten"):
        storages_of(Opaque())


def test_the_inner_tensors_of_a_wrapper_subclass_count():
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    with MemoryMeter() as meter:
        x = two.TwoTensor(torch.ones(100), torch.ones(100))
        y = x * 2
        assert meter.live_bytes == 1600
        del x, y
        assert meter.live_bytes == 0
    assert [sample.operator for sample in meter.timeline] == ["aten.ones.default"] * 2 + [
        "aten.mul.Tensor"
    ] * 2
    parameter = nn.Parameter(two.TwoTensor(torch.ones(100), torch.ones(100)))
    model = nn.Module()
    model.weight = parameter
    with MemoryMeter(model) as meter:
        (parameter * 2).sum().backward()
    assert meter.entry_bytes == 800
    assert at_end(meter)["gradient"] > 0
