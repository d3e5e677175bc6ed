"""The list of the tensors that autograd keeps for backward, compared with a pack hook."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.memory import MemoryMeter, saved_tensors, transformer_activation_bytes
from course_lib.models import DecoderLayer, deep_mlp


def count_packs(function, *args, hidden=()):
    """The independent oracle: (bytes of every packed tensor, bytes of their storages counted
    once)."""
    hidden = {tensor.untyped_storage().data_ptr() for tensor in hidden}
    packed, held = 0, {}

    def pack(tensor):
        nonlocal packed
        address = tensor.untyped_storage().data_ptr()
        if address not in hidden:
            packed += tensor.nbytes
            held[address] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)
    total = sum(storage.nbytes() for storage in held.values())
    del result
    return packed, total


def test_each_layer_keeps_two_activations():
    model, x = deep_mlp(2, 8), torch.randn(4, 8)
    rows = [
        (row.operator, row.argument, row.shape, row.dtype, row.bytes, row.shared_with)
        for row in saved_tensors(model, x)
    ]
    one = ((4, 8), torch.float32, 128, None)
    assert rows == [("AddmmBackward0", "mat1", *one), ("GeluBackward0", "self", *one)] * 2
    for depth in (2, 5, 9):
        assert saved_tensors(deep_mlp(depth, 8), x).total_bytes == 2 * depth * x.nbytes


def models_to_save():
    return {
        "mlp": (deep_mlp(3, 16), (4, 16)),
        "layer": (DecoderLayer(16, 2, dropout=0.1), (2, 4, 16)),
        "layer, no dropout": (DecoderLayer(16, 2, norm_first=False), (2, 4, 16)),
        "fused": (DecoderLayer(16, 2, fused=True), (2, 4, 16)),
        "batch norm": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), (4, 8)),
    }


@pytest.mark.parametrize("name", models_to_save())
def test_saved_bytes_are_those_that_hooks_count(name):
    model, shape = models_to_save()[name]
    x = torch.randn(shape)
    found = saved_tensors(model, x)
    torch.manual_seed(0)
    packed, total = count_packs(model, x, hidden=[*model.parameters(), *model.buffers()])
    assert (found.packed_bytes, found.total_bytes) == (packed, total)
    assert sum(row.bytes for row in found if row.shared_with is None) == found.total_bytes
    everything = saved_tensors(model, x, parameters=True)
    assert (everything.packed_bytes, everything.total_bytes) == count_packs(model, x)


def test_a_storage_that_several_operators_save_counts_once():
    x = torch.randn(4, 8)
    projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    found = saved_tensors(lambda x: [project(x) for project in projections], x)
    assert [row.shared_with for row in found] == [None, 0, 0]
    assert (found.total_bytes, found.packed_bytes) == (x.nbytes, 3 * x.nbytes)


def test_parameters_are_told_by_storage():
    x = torch.randn(4, 8, requires_grad=True)
    layer = nn.Linear(8, 8)
    assert [row.argument for row in saved_tensors(layer, x)] == ["mat1"]
    rows = saved_tensors(layer, x, parameters=True)
    assert [(row.argument, row.bytes) for row in rows] == [
        ("mat1", x.nbytes),
        ("mat2", layer.weight.nbytes),
    ]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    # frozen: only its weight is saved, for the input's gradient
    assert list(saved_tensors(layer, x)) == []
    assert saved_tensors(layer, x, parameters=True).total_bytes == layer.weight.nbytes


model_in_a_global = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()


def test_buffers_of_modules_are_not_listed_however_the_function_comes_by_them():
    x, model = torch.randn(4, 8), model_in_a_global
    ways = [model, lambda x: model(x), lambda x: model_in_a_global(x), model.forward]
    totals = [saved_tensors(way, x).total_bytes for way in ways]
    assert totals == [totals[0]] * len(ways)
    assert {row.argument for row in saved_tensors(model, x) if row.bytes} == {"mat1", "input"}
    listed = saved_tensors(model, x, parameters=True)
    assert {"running_mean", "running_var"} <= {row.argument for row in listed}
    assert listed.total_bytes > totals[0]


def test_what_is_given_as_an_argument_is_listed_even_if_it_is_a_parameter():
    weight = nn.Parameter(torch.randn(8))
    assert saved_tensors(lambda w: (w**2).sum(), weight).total_bytes == weight.nbytes
    assert saved_tensors(lambda: (weight**2).sum()).total_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_its_input_as_the_formula_says(reentrant):
    layer, x = DecoderLayer(32, 4, dropout=0.1), torch.randn(2, 16, 32, requires_grad=True)
    found = saved_tensors(lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    rows = [row for row in found if row.bytes]  # torch 2.9: and an empty one
    assert [(row.shape, row.bytes) for row in rows] == [(x.shape, x.nbytes)]
    shape = {"sequence": 16, "batch": 2, "hidden": 32, "heads": 4}
    assert found.total_bytes == transformer_activation_bytes(
        **shape, recompute="full", dtype_bytes=4
    )


def test_an_autograd_function_lists_what_it_saves_for_backward():
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    (row,) = saved_tensors(Exponential.apply, torch.ones(3, requires_grad=True))
    assert (row.operator, row.argument, row.bytes) == ("ExponentialBackward", "saved_tensors", 12)


def test_a_view_counts_with_the_storage_that_it_keeps_alive():
    x = torch.randn(100, 100, requires_grad=True)
    (row,) = saved_tensors(lambda x: x[0].exp().sum() + (x[1] ** 2).sum(), x)[1:]
    assert (row.shape, row.bytes) == ((100,), x.nbytes)


def test_an_in_place_change_of_a_view_is_listed():
    def function(x):
        y = x * 2
        y[0].mul_(x[0])
        return y

    x = torch.randn(4, 8, requires_grad=True)
    found = saved_tensors(function, x)
    assert (found.packed_bytes, found.total_bytes) == count_packs(function, x)
    assert found.total_bytes > 0


def test_what_the_result_does_not_need_is_not_listed():
    def function(x):
        x.exp()  # its graph dies at once
        return x.tanh()

    assert [row.operator for row in saved_tensors(function, torch.ones(3, requires_grad=True))] == [
        "TanhBackward0"
    ]


def test_saved_tensors_keeps_nothing_alive():
    x, results = torch.ones(3, requires_grad=True), []

    def function(x):
        y = x.exp().softmax(0).tanh()  # each saves its own result
        results.append(weakref.ref(y.untyped_storage()))
        return y

    with MemoryMeter() as meter:
        saved_tensors(function, x)
        assert results[0]() is None
        assert meter.live_bytes == 0


@dataclass
class Output:
    loss: torch.Tensor
    states: tuple


def test_keyword_arguments_are_listed_and_outputs_in_dataclasses_are_followed():
    def function(scale, *, x, parts):
        return Output(loss=(x**2).sum() * scale, states=(parts["y"].exp(),))

    x, y = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(5))
    found = saved_tensors(function, 2.0, x=x, parts={"y": y})
    assert {(row.operator, row.shape) for row in found} == {
        ("PowBackward0", (3,)),
        ("ExpBackward0", (5,)),
    }
    found = saved_tensors(lambda x: {"a": [x.exp()], "b": (x.tanh(), 3)}, x)
    assert {row.operator for row in found} == {"ExpBackward0", "TanhBackward0"}
    (row,) = saved_tensors(lambda parts: (parts["y"] ** 2).sum(), parts={"y": y})
    assert row.bytes == y.nbytes  # a parameter, but given


def test_saved_tensors_says_what_is_wrong():
    with pytest.raises(ValueError, match="nothing that requires a gradient"):
        saved_tensors(lambda x: x * 2, torch.ones(3))
    with pytest.raises(
        TypeError, match="function must be a module or a function that returns tensors, got 3"
    ):
        saved_tensors(3)
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        saved_tensors(lambda: 1 / 0)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
