"""The list of the tensors that autograd keeps for backward, compared with a pack hook."""

import weakref
from dataclasses import dataclass

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


def test_each_layer_of_an_mlp_saves_two_activations():
    model, x = deep_mlp(2, 8), torch.randn(4, 8)
    rows = [
        (row.operator, row.argument, row.shape, row.dtype, row.bytes, row.shared_with)
        for row in saved_tensors(model, x)
    ]
    one = ((4, 8), torch.float32, 128, None)
    assert rows == [("AddmmBackward0", "mat1", *one), ("GeluBackward0", "self", *one)] * 2


class ChangesAView(nn.Module):
    def forward(self, x):
        y = x * 2
        y[0].mul_(x[0])
        return y


MODELS = {
    "layer": (DecoderLayer(16, 2, dropout=0.1), (2, 4, 16)),
    "fused": (DecoderLayer(16, 2, fused=True), (2, 4, 16)),
    "batch norm": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), (4, 8)),
    "in-place change of a view": (ChangesAView(), (4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_those_that_a_hook_counts(name):
    model, shape = MODELS[name]
    x = torch.randn(shape, requires_grad=True)
    found = saved_tensors(model, x)
    counted = counted_by_a_hook(model, x, hidden=[*model.parameters(), *model.buffers()])
    assert (found.packed_bytes, found.total_bytes) == counted
    assert sum(row.bytes for row in found if row.shared_with is None) == found.total_bytes > 0
    everything = saved_tensors(model, x, parameters=True)
    assert (everything.packed_bytes, everything.total_bytes) == counted_by_a_hook(model, x)


GLOBAL_MODEL = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()


def test_parameters_and_buffers_are_not_listed_however_the_module_is_called():
    x, model = torch.randn(4, 8), GLOBAL_MODEL
    calls = [model, lambda x: model(x), lambda x: GLOBAL_MODEL(x), model.forward]
    (total,) = {saved_tensors(call, x).total_bytes for call in calls}
    assert {row.argument for row in saved_tensors(model, x) if row.bytes} == {"mat1", "input"}
    listed = saved_tensors(model, x.clone().requires_grad_(), parameters=True)
    arguments = {row.argument: row.bytes for row in listed}
    assert {"running_mean", "running_var"} < arguments.keys()
    assert arguments["mat2"] == model[0].weight.nbytes  # a view of it is saved
    assert listed.total_bytes > total


def test_parameter_that_is_an_argument_is_listed():
    weight = nn.Parameter(torch.randn(8))
    assert saved_tensors(lambda: (weight**2).sum()).total_bytes == 0
    assert saved_tensors(lambda w: (w**2).sum(), weight).total_bytes == weight.nbytes
    (row,) = saved_tensors(lambda parts: (parts["w"] ** 2).sum(), parts={"w": weight})
    assert row.bytes == weight.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_saves_its_input_as_the_formula_predicts(reentrant):
    layer, x = DecoderLayer(32, 4, dropout=0.1), torch.randn(2, 16, 32, requires_grad=True)
    found = saved_tensors(lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    (row,) = [row for row in found if row.bytes]  # torch 2.9 saves an empty tensor too
    assert not reentrant or row.argument == "saved_tensors"  # of an autograd function
    assert (row.shape, row.bytes) == (x.shape, x.nbytes)
    shape = {"sequence": 16, "batch": 2, "hidden": 32, "heads": 4, "dtype_bytes": 4}
    assert found.total_bytes == transformer_activation_bytes(**shape, recompute="full")


def test_view_counts_with_the_storage_that_it_keeps_alive():
    x = torch.randn(100, 100, requires_grad=True)
    (row,) = saved_tensors(lambda x: x[0].exp().sum() + (x[1] ** 2).sum(), x)[1:]
    assert (row.shape, row.bytes) == ((100,), x.nbytes)


def test_tensors_that_the_result_does_not_need_are_not_listed_and_none_is_kept_alive():
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


@dataclass
class Output:
    loss: torch.Tensor
    states: tuple


def test_containers_of_arguments_and_results_are_searched():
    def function(scale, *, x, parts):
        return Output(loss=(x**2).sum() * scale, states=({"a": [parts["y"].exp()]}, 3))

    x, y = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(5))
    rows = saved_tensors(function, 2.0, x=x, parts={"y": y})
    assert {row.operator for row in rows} == {"PowBackward0", "ExpBackward0"}


def test_saved_tensors_refuses_a_result_without_graph():
    with pytest.raises(ValueError, match="function"):
        saved_tensors(lambda x: x * 2, torch.ones(3))


def test_saved_tensors_undoes_its_hooks_after_an_error():
    hooks = len(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        saved_tensors(lambda: 1 / 0)
    assert len(nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_rows_name_the_first_row_with_the_same_storage():
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    rows = saved_tensors(lambda x: [layer(x) for layer in layers], torch.randn(4, 8))
    assert [row.shared_with for row in rows] == [None, 0, 0]
