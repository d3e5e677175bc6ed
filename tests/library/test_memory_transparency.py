"""Tests that a meter does not change the step, keeps nothing alive, and removes its hooks."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import checkpoint as reference
from training_steps import at_end, bytes_of, empty_gradients, hooks_restored, one_more_sample

from course_lib.checkpoint import readable
from course_lib.memory import MemoryMeter
from course_lib.memory.categories import CategoryTracker


def test_autograd_detects_in_place_changes_under_meter():
    x = torch.ones(4, requires_grad=True)
    with MemoryMeter(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_torch_func_transforms_give_correct_gradients_under_meter():
    x = torch.randn(3, 4)
    with MemoryMeter() as meter:
        found = torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x)
    assert_close(found, 3 * x**2)
    assert meter.peak_bytes > 0


def gradient_penalty(module, layers):
    """Return the gradients of a loss with double backward through checkpoints."""
    torch.manual_seed(1)
    x = y = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for layer in layers:
        y = module.checkpoint(layer, y, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    found = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    return found


@pytest.mark.parametrize("module", [reference, readable], ids=["torch", "course_lib"])
def test_double_backward_through_checkpoints_is_unchanged_under_meter(module):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)]
    layers = nn.ModuleList(layers)
    expected = gradient_penalty(module, layers)
    with MemoryMeter(layers) as meter:
        found = gradient_penalty(module, layers)
    assert all(map(torch.equal, found, expected)) and meter.at_peak()["gradient"] <= 4 * 2 * 72


def test_reading_meter_does_not_recompute_checkpoint():
    layer, calls = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)), []
    layer.register_forward_pre_hook(
        lambda *_: calls.append(torch._C._current_autograd_node() is not None)
    )
    with MemoryMeter(layer) as meter:
        y = reference.checkpoint(layer, torch.randn(4, 16), use_reentrant=False)
        loss = (y * 2 + y).sum()
        assert meter.live_bytes and meter.at_peak() and len(meter.timeline) > 0
        assert calls == [False]
        loss.backward()
    assert calls == [False, True]


def test_reading_meter_during_backward_does_not_change_categories():
    class ReadsMeter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, read):
            ctx.kept, ctx.read = x * 2, read
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            found = gradient * ctx.kept
            ctx.read()
            return found * 3, None

    found = []
    for read in (lambda: None, lambda: (meter.live_bytes, meter.series(), meter.at_peak())):
        with MemoryMeter() as meter:
            ReadsMeter.apply(torch.ones(1000, requires_grad=True), read).backward()
        found.append({name: list(values) for name, values in meter.series().items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("swap", [False, True], ids=["assign", "swap"])
@pytest.mark.parametrize("nested", [False, True], ids=["one meter", "two meters"])
@pytest.mark.parametrize("norm", [nn.GELU(), nn.BatchNorm1d(16)], ids=["no buffers", "buffers"])
def test_meter_counts_model_converted_or_loaded_under_it(norm, nested, swap, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    model = nn.Sequential(nn.Linear(16, 16), norm).float()
    values = {name: value + 1 for name, value in model.state_dict().items()}
    with MemoryMeter() if nested else nullcontext(), MemoryMeter(model) as meter:
        model(torch.ones(2, 16)).sum().backward()
        empty_gradients(model)
        model.load_state_dict(values)
        assert_close(dict(model.state_dict()), values)
        model.to(torch.float64)
        model(torch.ones(2, 16, dtype=torch.float64))
        one_more_sample()
    assert at_end(meter)["parameter"] == bytes_of(model.parameters())
    assert at_end(meter)["buffer"] == bytes_of(model.buffers())
    assert meter.live_bytes == bytes_of(model.state_dict().values())


def test_entering_meter_twice_raises():
    meter = MemoryMeter()
    with meter, pytest.raises(RuntimeError, match="active"), meter:
        pass
    with pytest.raises(RuntimeError, match="closed"), meter:
        pass


def fail(*_):
    raise KeyError("injected")


@pytest.mark.parametrize("fails", [False, True])
def test_closed_meter_holds_no_reference_to_model_or_tensors(fails, monkeypatch):
    raises = pytest.raises(KeyError, match="injected") if fails else nullcontext()
    if fails:
        monkeypatch.setattr(CategoryTracker, "finish", fail)
    model = nn.Linear(4, 4)
    adam = torch.optim.Adam(model.parameters())
    meter = MemoryMeter(model, adam)
    x = torch.randn(2, 4, requires_grad=True)
    with hooks_restored(), raises, meter:
        # The node of an autograd function can be weakly referenced, unlike those of operators.
        y = reference.checkpoint(model, x, use_reentrant=True)
    references = [weakref.ref(each) for each in (model, model.weight, adam, y, y.grad_fn)]
    assert meter.live_bytes > 0
    del model, adam, y
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert meter.live_bytes == 0 < meter.peak_bytes


def test_error_inside_meter_is_raised_even_if_exit_fails(monkeypatch):
    monkeypatch.setattr(CategoryTracker, "finish", fail)
    with hooks_restored(), pytest.raises(ValueError, match="block") as raised, MemoryMeter():
        raise ValueError("block")
    assert "injected" in raised.value.__notes__[0]
