"""A meter changes nothing in the step, keeps nothing alive, and undoes its hooks after an error."""

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from training_steps import (
    NO_WORKSPACE,
    at_end,
    bytes_of,
    empty_gradients,
    everything_undone_afterwards,
    mlp,
)

from course_lib.checkpoint import checkpoint as readable_checkpoint
from course_lib.memory import MemoryMeter
from course_lib.memory.categories import CategoryTracker
from course_lib.models import deep_mlp


def test_autograd_still_notices_a_change_in_place():
    x = torch.ones(4, requires_grad=True)
    with MemoryMeter(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_function_transforms_work():
    x = torch.randn(3, 4)

    def run():
        return torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x)

    with MemoryMeter() as meter:
        found = run()
    assert_close(found, run(), rtol=0, atol=0)
    assert meter.peak_bytes > 0


@pytest.mark.parametrize("name", ["post-norm, checkpoint", "post-norm, reentrant checkpoint"])
def test_gradients_are_the_same_to_the_bit(name):
    model, _, step = NO_WORKSPACE[name]()
    start, found = copy.deepcopy(model.state_dict()), []
    for context in (nullcontext(), MemoryMeter(model)):
        model.load_state_dict(start)
        empty_gradients(model)
        torch.manual_seed(1)
        with context:
            step()
        found.append([p.grad for p in model.parameters()])
    for plain, metered in zip(*found, strict=True):
        assert torch.equal(plain, metered)


def test_a_checkpoint_is_computed_again_once_and_only_in_backward():
    layer, calls = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)), []
    layer.register_forward_pre_hook(
        lambda *_: calls.append(torch._C._current_autograd_node() is not None)
    )
    x = torch.randn(4, 16)
    with MemoryMeter(layer) as meter:
        y = checkpoint(layer, x, use_reentrant=False)
        z = y * 2 + y
        assert meter.live_bytes and meter.at_peak() and len(meter.timeline) > 0
        z.sum()
        assert calls == [False]
        z.sum().backward()
    assert calls == [False, True]


def test_no_tensor_is_kept_alive():
    model, x = nn.Linear(8, 8), torch.randn(8, 8, requires_grad=True)
    with MemoryMeter():
        y = model(x.exp())
        y.sum().backward()
        held = [
            weakref.ref(tensor.untyped_storage())
            for tensor in (y, x.grad, model.weight, torch.ones(3))
        ]
        x.grad = None
        del y, model
        torch.ones(1)
        assert [storage() for storage in held] == [None] * 4


def test_a_meter_that_is_done_lets_go_of_model_and_optimizer():
    model, optimizer, step = mlp()
    with MemoryMeter(model, optimizer) as meter:
        step()
    gone = [weakref.ref(model[0].weight), weakref.ref(optimizer), weakref.ref(model)]
    held = meter.live_bytes
    del model, optimizer, step
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert held > 0 == meter.live_bytes
    assert sum(meter.at_peak().values()) == meter.peak_bytes


def test_reading_the_live_bytes_changes_no_category():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, reading):
            ctx.kept, ctx.reading = x * 2, reading
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            found = gradient * ctx.kept
            if ctx.reading:
                assert meter.live_bytes and meter.series() and meter.at_peak()
            return found * 3, None

    found = []
    for reading in (False, True):
        with MemoryMeter() as meter:
            Reads.apply(torch.ones(1000, requires_grad=True), reading).backward()
        found.append([list(values) for values in meter.series().values()])
    assert found[0] == found[1]


@pytest.mark.parametrize("swap", [False, True])
def test_a_model_can_be_moved_in_the_block(swap):
    model = deep_mlp(2, 16)
    before = bytes_of(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with MemoryMeter(model) as meter:
            model(torch.ones(1, 16)).sum().backward()
            empty_gradients(model)
            model.to(torch.float64)
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            assert meter.live_bytes == 2 * before
            model(torch.ones(1, 16, dtype=torch.float64))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert at_end(meter)["parameter"] == meter.live_bytes == 2 * before


def test_a_meter_is_entered_once():
    meter = MemoryMeter()
    with (
        meter,
        pytest.raises(RuntimeError, match=r"has been entered already \(active\); make a new one"),
        meter,
    ):
        pass
    with pytest.raises(RuntimeError, match=r"has been entered already \(closed\)"), meter:
        pass


def test_an_exception_in_the_block_undoes_everything():
    with everything_undone_afterwards():
        with pytest.raises(ZeroDivisionError), MemoryMeter() as meter:
            state, x = torch.get_rng_state(), torch.ones(10)
            assert meter.live_bytes == meter.peak_bytes == state.nbytes + x.nbytes
            1 / 0  # noqa: B018
        later = MemoryMeter()
        with MemoryMeter(), later:
            pass
    assert meter.live_bytes == state.nbytes + x.nbytes
    del x
    assert meter.live_bytes == state.nbytes


@contextmanager
def exit_fails(monkeypatch):
    def fail(self):
        raise KeyError("injected")

    monkeypatch.setattr(CategoryTracker, "finish", fail)
    yield
    monkeypatch.undo()


class Watched(torch.autograd.Function):
    """An identity whose node can be referred to weakly, unlike those of operators."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_meter_whose_exit_fails_is_closed_and_holds_nothing(monkeypatch):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    adam = torch.optim.Adam(model.parameters())
    meter = MemoryMeter(model, adam)
    with (
        everything_undone_afterwards(),
        exit_fails(monkeypatch),
        pytest.raises(KeyError, match="injected"),
        meter,
    ):
        y = Watched.apply(model(x))
        node = weakref.ref(y.grad_fn)
    assert (meter.model, meter.optimizers) == (None, ())
    gone = weakref.ref(model), weakref.ref(adam), weakref.ref(y)
    del model, adam, y
    gc.collect()
    assert [ref() for ref in (*gone, node)] == [None] * 4
    with pytest.raises(RuntimeError, match="entered already"), meter:
        pass
    assert meter.peak_bytes > 0


def test_the_error_of_the_block_is_seen_where_the_exit_fails_too(monkeypatch):
    with (
        everything_undone_afterwards(),
        exit_fails(monkeypatch),
        pytest.raises(ValueError, match="own") as raised,
        MemoryMeter(),
    ):
        torch.ones(3)
        raise ValueError("own")
    assert raised.value.__notes__ == ["MemoryMeter could not close its records: 'injected'"]


def gradient_penalty(layers, run):
    """A step with double backward: each layer by `run(layer, x)`."""
    x = y = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for layer in layers:
        y = run(layer, y)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    return [parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("through", [checkpoint, readable_checkpoint], ids=["torch", "course_lib"])
def test_double_backward_through_checkpoints_runs_under_a_meter_as_without(through):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    expected = gradient_penalty(layers, lambda layer, x: layer(x))
    layers.zero_grad()
    with MemoryMeter(layers) as meter:
        found = gradient_penalty(layers, lambda layer, x: through(layer, x, use_reentrant=False))
    assert all(map(torch.equal, found, expected)) and meter.at_peak()["gradient"] <= 4 * 2 * 72
