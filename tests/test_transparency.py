"""A meter changes nothing in the step, keeps nothing alive, and undoes its hooks after an error."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import checkpoint as reference
from training_steps import at_end, bytes_of, empty_gradients, everything_undone

from course_lib.checkpoint import readable
from course_lib.memory import MemoryMeter
from course_lib.memory.categories import CategoryTracker
from course_lib.models import deep_mlp


def test_autograd_still_notices_changes_in_place():
    x = torch.ones(4, requires_grad=True)
    with MemoryMeter(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_function_transforms_work_under_a_meter():
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
def test_double_backward_through_checkpoints_is_unchanged(module):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)]
    layers = nn.ModuleList(layers)
    expected = gradient_penalty(module, layers)
    with MemoryMeter(layers) as meter:
        found = gradient_penalty(module, layers)
    assert all(map(torch.equal, found, expected)) and meter.at_peak()["gradient"] <= 4 * 2 * 72


def test_reading_a_meter_recomputes_no_checkpoint():
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


def test_reading_a_meter_changes_no_category():
    class Reads(torch.autograd.Function):
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
            Reads.apply(torch.ones(1000, requires_grad=True), read).backward()
        found.append({name: list(values) for name, values in meter.series().items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("swap", [False, True])
def test_model_can_be_converted_in_the_block(swap, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    model = deep_mlp(2, 16)
    before = bytes_of(model.parameters())
    with MemoryMeter(model) as meter:
        model(torch.ones(1, 16)).sum().backward()
        empty_gradients(model)
        model.to(torch.float64)
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        model(torch.ones(1, 16, dtype=torch.float64))
    assert at_end(meter)["parameter"] == meter.live_bytes == 2 * before


def test_meter_can_be_entered_only_once():
    meter = MemoryMeter()
    with meter, pytest.raises(RuntimeError, match="active"), meter:
        pass
    with pytest.raises(RuntimeError, match="closed"), meter:
        pass


def test_exception_in_the_block_undoes_everything():
    with everything_undone(), pytest.raises(ZeroDivisionError), MemoryMeter() as meter:
        state, x = torch.get_rng_state(), torch.ones(10)
        1 / 0  # noqa: B018
    assert meter.live_bytes == meter.peak_bytes == state.nbytes + x.nbytes
    del x
    assert meter.live_bytes == state.nbytes


def fail(*_):
    raise KeyError("injected")


@pytest.mark.parametrize("fails", [False, True])
def test_closed_meter_holds_nothing(fails, monkeypatch):
    refused = pytest.raises(KeyError, match="injected") if fails else nullcontext()
    if fails:
        monkeypatch.setattr(CategoryTracker, "finish", fail)
    model = nn.Linear(4, 4)
    adam = torch.optim.Adam(model.parameters())
    meter = MemoryMeter(model, adam)
    x = torch.randn(2, 4, requires_grad=True)
    with everything_undone(), refused, meter:
        # the node of an autograd function can be referred to weakly, unlike those of operators
        y = reference.checkpoint(model, x, use_reentrant=True)
    gone = [weakref.ref(each) for each in (model, model.weight, adam, y, y.grad_fn)]
    assert meter.live_bytes > 0
    del model, adam, y
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5
    assert meter.live_bytes == 0 < meter.peak_bytes


def test_error_of_the_block_is_raised_if_the_exit_fails_too(monkeypatch):
    monkeypatch.setattr(CategoryTracker, "finish", fail)
    with everything_undone(), pytest.raises(ValueError, match="own") as raised, MemoryMeter():
        raise ValueError("own")
    assert "injected" in raised.value.__notes__[0]
