"""Tests of `saved_tensors`, whose bytes are compared with those that a pack hook counts."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from course_lib.memory import MemoryMeter, saved_tensors, transformer_activation_bytes
from course_lib.models import DecoderLayer, deep_mlp


def counted_by_a_hook(function, *args, hidden=()):
    """Return the bytes of all packed tensors, and of their storages, each counted once."""
    hidden = {tensor.untyped_storage().data_ptr() for tensor in hidden}
    packed, held = [], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in hidden:
            packed.append(tensor.nbytes)
            held[storage.data_ptr()] = storage
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)
    total = sum(storage.nbytes() for storage in held.values())
    del result
    return sum(packed), total


def test_saved_tensors_lists_two_activations_per_mlp_layer():
    model, x = deep_mlp(2, 8), torch.randn(4, 8)
    rows = [
        (row.operator, row.argument, row.shape, row.dtype, row.bytes, row.shared_with)
        for row in saved_tensors(model, x)
    ]
    one = ((4, 8), torch.float32, 128, None)
    assert rows == [("AddmmBackward0", "mat1", *one), ("GeluBackward0", "self", *one)] * 2


class InPlaceOnView(nn.Module):
    def forward(self, x):
        y = x * 2
        y[0].mul_(x[0])
        return y


MODELS = {
    "layer": (DecoderLayer(16, 2, dropout=0.1), (2, 4, 16)),
    "fused": (DecoderLayer(16, 2, fused=True), (2, 4, 16)),
    "batch norm": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), (4, 8)),
    "in-place change of a view": (InPlaceOnView(), (4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_tensors_bytes_equal_bytes_passed_to_pack_hook(name):
    model, shape = MODELS[name]
    x = torch.randn(shape, requires_grad=True)
    found = saved_tensors(model, x)
    counted = counted_by_a_hook(model, x, hidden=[*model.parameters(), *model.buffers()])
    assert (found.packed_bytes, found.total_bytes) == counted
    assert sum(row.bytes for row in found if row.shared_with is None) == found.total_bytes > 0
    everything = saved_tensors(model, x, parameters=True)
    assert (everything.packed_bytes, everything.total_bytes) == counted_by_a_hook(model, x)


GLOBAL_MODEL = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()


def test_saved_tensors_omits_parameters_unless_requested():
    x, model = torch.randn(4, 8), GLOBAL_MODEL
    calls = [model, lambda x: model(x), lambda x: GLOBAL_MODEL(x), model.forward]
    (total,) = {saved_tensors(call, x).total_bytes for call in calls}
    assert {row.argument for row in saved_tensors(model, x) if row.bytes} == {"mat1", "input"}
    listed = saved_tensors(model, x.clone().requires_grad_(), parameters=True)
    arguments = {row.argument: row.bytes for row in listed}
    assert {"running_mean", "running_var"} < arguments.keys()
    assert arguments["mat2"] == model[0].weight.nbytes  # a view of it is saved
    assert listed.total_bytes > total


def test_saved_tensors_lists_parameter_passed_as_argument():
    weight = nn.Parameter(torch.randn(8))
    assert saved_tensors(lambda: (weight**2).sum()).total_bytes == 0
    assert saved_tensors(lambda w: (w**2).sum(), weight).total_bytes == weight.nbytes
    (row,) = saved_tensors(lambda parts: (parts["w"] ** 2).sum(), parts={"w": weight})
    assert row.bytes == weight.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_saved_tensors_of_checkpoint_lists_only_its_input(reentrant):
    layer, x = DecoderLayer(32, 4, dropout=0.1), torch.randn(2, 16, 32, requires_grad=True)
    found = saved_tensors(lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    (row,) = [row for row in found if row.bytes]  # torch 2.9 also saves an empty tensor
    assert not reentrant or row.argument == "saved_tensors"  # an attribute of autograd functions
    assert (row.shape, row.bytes) == (x.shape, x.nbytes)
    shape = {"sequence": 16, "batch": 2, "hidden": 32, "heads": 4, "dtype_bytes": 4}
    assert found.total_bytes == transformer_activation_bytes(**shape, recompute="full")


def test_saved_tensors_lists_tensors_of_result_graph_and_releases_them():
    x, results = torch.ones(3, requires_grad=True), []

    def function(x):
        x.sin()  # its graph is released at once
        y = x.exp().softmax(0).tanh()  # each operator saves its own result
        results.append(weakref.ref(y.untyped_storage()))
        return y

    with MemoryMeter() as meter:
        rows = saved_tensors(function, x)
        assert results[0]() is None
        assert meter.live_bytes == 0
    operators = [row.operator for row in rows]
    assert operators == ["ExpBackward0", "SoftmaxBackward0", "TanhBackward0"]


def test_saved_tensors_rejects_result_without_graph():
    with pytest.raises(ValueError, match="function"):
        saved_tensors(lambda x: x * 2, torch.ones(3))


def test_saved_tensors_with_same_storage_refer_to_first_listed():
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    rows = saved_tensors(lambda x: [layer(x) for layer in layers], torch.randn(4, 8))
    assert [row.shared_with for row in rows] == [None, 0, 0]
