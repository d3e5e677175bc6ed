"""Tests of a meter: its peak against the allocator's, storages, threads, budget, and timeline."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing import assert_close
from torch.utils import checkpoint as reference
from torch.utils.flop_counter import FlopCounterMode
from training_steps import (
    OuterOptimizer,
    allocations,
    at_end,
    bytes_of,
    checkpointed,
    empty_gradients,
    hooks_restored,
    metered,
    mlp,
    one_more_sample,
    step_in_backward,
    train,
)

from course_lib._torch.tensors import tensors_in
from course_lib.checkpoint import readable
from course_lib.memory import (
    CATEGORIES,
    PHASES,
    MemoryBudgetExceeded,
    MemoryMeter,
    measure,
    saved_tensors,
)
from course_lib.memory.categories import CategoryTracker
from course_lib.models import Decoder, deep_mlp, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Bytes of Python numbers that are arguments of operators, which only the allocator counts.
SCALAR_BYTES = 16


def batch_norm_and_pooling():
    pools = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)
    layers = [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(8), *pools]
    return train(nn.Sequential(*layers), torch.randn(8, 8, 32, 32), optimizer=SGD)


def decoder():
    model = Decoder(vocabulary=200, hidden=64, heads=4, layers=2, sequence=32, dropout=0.1)
    return train(model, random_tokens(4, 32, 200)[:, :-1], optimizer=torch.optim.AdamW)


def foreach_sgd():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train(model, torch.randn(4, 256), optimizer=SGD, foreach=True)


# Steps whose operators take no workspace.
STEPS = {
    "in-place ReLU": partial(mlp, partial(nn.ReLU, inplace=True)),
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "decoder": decoder,
    "batch norm and pooling": batch_norm_and_pooling,
    "SGD, foreach": foreach_sgd,
}


@pytest.mark.parametrize("name", STEPS)
def test_meter_peak_equals_allocator_peak_without_workspace(name):
    model, optimizer, step = STEPS[name]()
    step()  # creates the optimizer's state
    for given in ((None, None), (model, optimizer)):
        empty_gradients(model)
        with MemoryMeter(*given) as meter:
            step()
            one_more_sample()
            live = meter.live_bytes
        total = sum(meter.series().values())
        assert total.max() == meter.peak_bytes == sum(meter.at_peak().values())
        samples = [(sample.live_bytes, sample.phase) for sample in meter.timeline]
        assert samples == list(zip(total, meter.phases(), strict=True)) and total[-1] == live
    empty_gradients(model)
    held = bytes_of([*model.parameters(), *model.buffers(), *tensors_in(optimizer.state)])
    assert 0 <= held + max(accumulate(allocations(step))) - meter.peak_bytes <= SCALAR_BYTES


OLDER = torch.ones(100)


def views_of_one_storage():
    x = torch.zeros(100)
    views = [x[:10], x.view(10, 10).t(), x.expand(5, 100), x.detach()]
    yield 400
    del x
    yield 400
    views.clear()
    yield 0


def resized_storage():
    x = torch.zeros(100)
    x.resize_(1000)
    yield 4000
    x.untyped_storage().resize_(0)
    yield 0
    x.untyped_storage().resize_(8000)
    yield 8000


def numpy_arrays():
    x = torch.from_numpy(np.zeros(1000)), torch.as_tensor(np.zeros(1000))
    yield 0
    copied = torch.tensor(np.zeros(1000))
    yield copied.nbytes
    del x
    yield copied.nbytes


def older_storage():
    first_rows = torch.empty(0).set_(OLDER.untyped_storage(), 0, (10,))
    alias = torch.empty(0).set_(OLDER.untyped_storage())
    yield 0
    copied = copy.deepcopy(OLDER)
    yield copied.nbytes
    del first_rows, alias, copied
    yield 0


@pytest.mark.parametrize(
    "operations", [views_of_one_storage, resized_storage, numpy_arrays, older_storage]
)
def test_meter_counts_each_new_storage_once(operations):
    """Compare the live bytes after each operation with those that it yields."""
    with MemoryMeter() as meter:
        counts = [(live, meter.live_bytes) for live in operations()]
    expected, found = zip(*counts, strict=True)
    assert found == expected and meter.peak_bytes >= max(found)


def test_meter_does_not_count_step_in_another_thread():
    (model, _, step), (other, _, other_step) = mlp(), mlp()
    alone = metered(step, model)
    empty_gradients(model)
    thread = threading.Thread(target=other_step)
    with MemoryMeter(model) as meter:
        thread.start()
        step()
        thread.join()
    assert meter.peak_bytes == alone.peak_bytes
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_meter_subtracts_storages_released_in_another_thread():
    with MemoryMeter() as meter:
        held = [torch.ones(100) for _ in range(50)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        for _ in range(50):
            torch.ones(1)
        thread.join()
        assert meter.live_bytes == 0


def test_meter_rounds_storages_up_to_multiples_of_block_bytes():
    with MemoryMeter(block_bytes=512) as meter:
        tensors = torch.ones(1), torch.ones(129)
        assert meter.live_bytes == 512 + 1024
        del tensors
    assert meter.peak_bytes == 1536


@pytest.mark.parametrize("grow", [False, True], ids=["created", "resized"])
def test_storage_allocated_without_operator_appears_in_timeline(grow):
    with MemoryMeter() as meter:
        x = torch.ones(1000)
        y, storage = x * 2, x.new_empty(0).untyped_storage()
        del y
        if grow:
            storage.resize_(5056)
        else:
            storage = torch.get_rng_state().untyped_storage()
    assert storage.nbytes() == 5056
    assert meter.peak_bytes == sum(meter.at_peak().values()) == 4000 + 5056
    assert [sample.live_bytes for sample in meter.timeline] == [4000, 8000, 8000, 9056]
    assert meter.timeline[-1].operator == "(no operator)" and meter.operator_count == 3


def test_fake_tensors_of_inner_fake_tensor_mode_count_zero_bytes():
    with MemoryMeter() as meter:
        held = torch.ones(10)
        with FakeTensorMode():
            shape = torch.empty(1000, 1000)
            shape @ shape
        assert (shape + 1).shape == shape.shape
    assert meter.peak_bytes == held.nbytes
    with FakeTensorMode(), MemoryMeter() as meter:
        held = torch.ones(1000, 1000)
    assert meter.peak_bytes == held.nbytes


def test_measure_counts_and_restores_state_of_several_optimizers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model[0].parameters()), SGD(model[1].parameters())]

    def step():
        model(torch.ones(4, 8)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    before = copy.deepcopy([each.state_dict() for each in optimizers])
    found = measure(step, model=model, optimizer=iter(optimizers), repeats=0)
    assert_close([each.state_dict() for each in optimizers], before, rtol=0, atol=0)
    # Adam's moments and step counts, and momentum
    assert found.at_peak["optimizer"] == 2 * 4 * 72 + 2 * 4 + 4 * 9


# ---- the budget


def metered_step(**options):
    model, x = deep_mlp(3, 32), torch.ones(16, 32)
    model, optimizer, step = train(model, x, optimizer=torch.optim.Adam, foreach=False)
    return step, MemoryMeter(model, optimizer, **options)


@pytest.mark.parametrize("phase", PHASES)
def test_operator_exceeding_memory_budget_raises_in_each_phase(phase):
    step, first = metered_step()
    with first:
        step()
    live = [first.entry_bytes] + [sample.live_bytes for sample in first.timeline]
    highest = [0, *accumulate(live, max)]
    point = next(
        i for i in range(1, len(live)) if live[i] > highest[i] and first.phases()[i - 1] == phase
    )
    step, meter = metered_step(budget_bytes=live[point] - 1)
    with hooks_restored(), pytest.raises(MemoryBudgetExceeded) as caught, meter:
        step()
    error = caught.value
    assert error.operator == first.timeline[point - 1].operator
    assert error.live_bytes + error.wanted_bytes == live[point] == meter.peak_bytes
    assert error.budget_bytes == live[point] - 1 >= error.live_bytes
    assert meter.phases()[-1] == phase
    numbers = error.wanted_bytes, error.live_bytes, error.budget_bytes
    assert all(part in str(error) for part in (error.operator, *map("{:,}".format, numbers)))


def test_model_can_be_trained_after_memory_budget_error():
    model, _, step = train(deep_mlp(3, 32), torch.ones(16, 32))
    first = metered(step, model)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with MemoryMeter(model, budget_bytes=first.peak_bytes - 1):
        with pytest.raises(MemoryBudgetExceeded):
            step()
        model.zero_grad()
        model(torch.ones(1, 32))  # in the same block
    step()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


def test_budget_below_model_bytes_raises_when_meter_is_entered():
    model = nn.Linear(16, 16)
    held = bytes_of(model.parameters())
    meter = MemoryMeter(model, budget_bytes=held - 1)
    raises = pytest.raises(MemoryBudgetExceeded, match="model and optimizer alone need")
    with hooks_restored(), raises as caught, meter:
        pytest.fail("the block ran")
    assert (caught.value.live_bytes, caught.value.wanted_bytes) == (0, held)


def test_memory_budget_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3)))
    assert str(error) == str(MemoryBudgetExceeded("aten.mm.default", 1, 2, 3))


# ---- the step does not change, and nothing stays alive


def test_autograd_detects_in_place_changes_under_meter():
    x = torch.ones(4, requires_grad=True)
    with MemoryMeter(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


def test_torch_func_transforms_give_correct_gradients_under_meter():
    x = torch.randn(3, 4)
    with MemoryMeter():
        found = torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x)
    assert_close(found, 3 * x**2)


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


# ---- phases and plot of the timeline


def phase_order(meter):
    """Return the phases in order, without consecutive repetitions."""
    return [phase for phase, _ in groupby(meter.phases())]


def phases_of(meter, operator):
    return {each.phase for each in meter.timeline if each.operator.startswith(f"aten.{operator}")}


@pytest.mark.parametrize(
    ("optimizer", "fails"),
    [(torch.optim.Adam, False), (OuterOptimizer, False), (OuterOptimizer, True)],
)
def test_optimizer_phase_ends_when_outermost_step_returns(optimizer, fails):
    model, optimizer, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=optimizer)
    with MemoryMeter(model, optimizer) as meter:
        if fails:
            optimizer.base.step = None  # so that the call in the outer step fails
            with pytest.raises(TypeError):
                step()
            del optimizer.base.step
        step()
        with torch.no_grad():
            model(torch.ones(1, 16))
    assert phase_order(meter)[-4:] == ["forward", "backward", "optimizer", "forward"]
    if isinstance(optimizer, OuterOptimizer):
        assert phases_of(meter, "_foreach_mul_") == {"optimizer"}
        assert at_end(meter)["optimizer"] == bytes_of(optimizer.held_tensors())


def test_optimizer_step_in_backward_belongs_to_optimizer_phase():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    step_in_backward(model, torch.optim.Adam(model.parameters(), foreach=False))
    meter = metered(lambda: model(x).sum().backward(), model)
    assert phase_order(meter)[:3] == ["forward", "backward", "optimizer"]
    assert phase_order(meter).count("optimizer") >= 2  # between parts of the backward pass
    assert phases_of(meter, "addcdiv") == {"optimizer"}
    assert phases_of(meter, "mm") == {"backward"}
    # The gradients are never live all together.
    assert meter.series()["gradient"].max() < bytes_of(model.parameters())


def test_optimizer_closure_belongs_to_forward_and_backward_phases():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    meter = metered(lambda: optimizer.step(closure), model, optimizer)
    assert set(meter.phases()) == set(PHASES)
    assert phases_of(meter, "addmm") == {"forward"}


def test_timeline_plot_marks_peak(fresh):
    model, optimizer, step = mlp()
    meter = metered(step, model, optimizer)
    ax = meter.plot()
    (point,), (height,) = ax.lines[0].get_data()
    assert height == meter.peak_bytes / 1e6
    assert meter.timeline[point - 1].live_bytes == meter.peak_bytes
    assert {text.get_text() for text in ax.get_legend().get_texts()} <= set(CATEGORIES)


# ---- the trace


def test_trace_has_same_series_flops_and_events_as_meter():
    model, optimizer, step = mlp()
    step()
    with MemoryMeter(model, optimizer) as meter, FlopCounterMode(display=False) as flops:
        step()
    trace = meter.trace()
    assert len(trace) == meter.operator_count + 1 and np.array_equal(trace.replay(), trace.live)
    for name, values in meter.series().items():
        assert np.array_equal(trace.series()[name][1:], values)
    assert (trace.peak_bytes, trace.at_peak()) == (meter.peak_bytes, meter.at_peak())
    assert meter.flops == trace.flops == flops.get_total_flops()
    assert trace.flops == sum(trace.flops_by_operator().values())
    births: dict = {}
    for event in trace.events():
        # Later events of a storage are its release, or a change of category.
        births.setdefault(event.storage, event)
    assert {event.kind for event in births.values()} == {"birth"}
    assert sum(event.bytes for event in births.values() if event.point == 0) == meter.entry_bytes
    outputs = [event.bytes for event in births.values() if event.operator == "aten.addmm.default"]
    assert outputs == [256 * 128 * 4] * 6
    sums = meter.trace(events=False)
    assert np.array_equal(sums.live, trace.live)
    with pytest.raises(ValueError, match=r"must contain events, got"):
        next(sums.events())


# ---- tensors with several storages: sparse, nested, quantized and wrapper tensors


def nested(layout, **options):
    rows = [torch.randn(length, 16) for length in (30, 20, 14)]
    return torch.nested.nested_tensor(rows, layout=layout, **options)


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
    "bsc": (lambda: compressed(torch.sparse_bsc, 2, 2), (3 + 4) * 8 + 16 * 4),
    "jagged": (lambda: nested(torch.jagged), 64 * 16 * 4 + 4 * 8),
    "nested": (lambda: nested(torch.strided), 64 * 16 * 4 + 3 * (2 + 2 + 1) * 8),
    "masked": (lambda: masked_tensor(torch.ones(4, 4), torch.eye(4) > 0), 16 * 4 + 16),
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
    assert metered(lambda: None, model_with(make())).entry_bytes == expected


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
    assert metered(step).peak_bytes == allocated > 4 * 64 * 16 * 4


def test_saved_bytes_of_jagged_tensor_include_offsets():
    layer = nn.Linear(16, 16)
    jagged, packed = (
        saved_tensors(lambda x: layer(x).sin(), x).total_bytes
        for x in (nested(torch.jagged), torch.ones(64, 16))
    )
    assert jagged == packed + 4 * 8


def test_meter_rejects_tensor_subclass_without_tensor_flatten():
    class Opaque(torch.Tensor):
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
