"""Tests of the results of `measure`, and of the state that it restores after its runs."""

import copy
import gc
import random
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from training_steps import OuterOptimizer, allocations, bytes_of, metered, train

from course_lib.memory import MemoryMeter, measure, saved_tensors
from course_lib.memory.allocator import workspace_by_operator
from course_lib.models import deep_mlp
from course_lib.offload import OffloadedOptimizer


def test_measure_reports_workspace_bytes_of_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    _, _, step = train(model, torch.randn(4, 3, 32, 32))
    found = measure(step, model=model, repeats=1)
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert 0 <= found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    by_operator = found.workspace_by_operator
    assert list(by_operator.values()) == sorted(by_operator.values(), reverse=True)
    assert all(count > 0 for count in by_operator.values())
    if torch.backends.mkldnn.is_available():
        assert any(name.startswith("aten.convolution") for name in by_operator)
    assert found.device == "cpu" and found.seconds > 0


def test_measure_times_and_profiles_step_without_dispatch_modes():
    weight, runs = nn.Parameter(torch.randn(8, 8)), []

    def step():
        profiled = torch.autograd.profiler._is_profiler_enabled
        runs.append((profiled, len(_get_current_dispatch_mode_stack())))
        (weight * 2).sum().backward()

    measure(step, repeats=3)
    assert (True, 0) in runs
    assert runs[-3:] == [(False, 0)] * 3


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_measured_allocator_peak_ignores_blocks_allocated_before_step(size):
    x = torch.randn(size, requires_grad=True)

    def step():
        x.grad = None  # releases the gradient of the previous run
        (x * 2).sum().backward()

    for _ in range(2):  # because addresses decide which blocks an earlier profile has recorded
        found = measure(step, model=nn.Linear(2, 2), repeats=1)
        assert found.peak_bytes <= found.allocator_peak_bytes <= found.peak_bytes + 64


def test_cuda_workspace_equals_memory_allocated_and_freed_within_operator(monkeypatch):
    held = {"current": 500, "peak": 500}

    class FakeAllocator(TorchDispatchMode):
        """Count 700 bytes for a matrix product, which keeps 400. Other operators release 100."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            product = func is torch.ops.aten.mm.default
            held["peak"] = max(held["peak"], held["current"] + (700 if product else 0))
            held["current"] += 400 if product else -100
            return func(*args, **(kwargs or {}))

    def run(mode):
        with FakeAllocator(), mode:
            (torch.ones(2, 2) @ torch.ones(2, 2)).relu()

    cuda, memory = torch.cuda, torch.cuda.memory
    for module in (cuda, memory):  # `memory_stats` is too slow to be called for each operator
        monkeypatch.setattr(module, "memory_stats", None)
    monkeypatch.setattr(
        cuda, "reset_peak_memory_stats", lambda _: held.update(peak=held["current"])
    )
    stats = {"allocated_bytes": {"all": held}}
    monkeypatch.setattr(memory, "memory_stats_as_nested_dict", lambda _: copy.deepcopy(stats))
    assert workspace_by_operator(run, torch.device("cuda")) == {"aten.mm.default": 300}


def test_meter_peak_of_fully_sharded_model_equals_allocator_peak(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), torch.randn(8, 128)
    held = bytes_of(model.parameters())
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    _, optimizer, train_step = train(model, x, optimizer=torch.optim.Adam, foreach=False)

    def step():
        train_step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with MemoryMeter(model, optimizer) as meter:
        entered = meter.at_peak()
        step()
    assert entered["parameter"] == held and entered["optimizer"] == 2 * held + 4 * 8
    allocated = meter.entry_bytes + max(accumulate(allocations(step)))
    assert meter.peak_bytes == pytest.approx(allocated, rel=0.02)


@pytest.mark.parametrize("settles", [True, False])
def test_measure_repeats_step_until_two_peaks_agree_or_warns(settles):
    x, runs = nn.Parameter(torch.randn(64, 64)), []

    def step():
        runs.append(1)
        copies = max(1, 4 - len(runs)) if settles else len(runs)
        (x.repeat(copies, 1) * 2).sum().backward()

    found = measure(step, repeats=1)
    assert len(runs) < 12 and ("no two consecutive runs" in str(found)) == (not settles)
    if settles:
        assert found.peak_bytes == measure(step, repeats=1).peak_bytes and found.notes == ()


def test_measure_without_warmup_measures_first_step():
    def make():
        model = deep_mlp(4, 256)  # so wide that the peak is in the optimizer's step
        return train(model, torch.randn(4, 256), optimizer=torch.optim.Adam, foreach=False)

    model, optimizer, step = make()
    found = measure(step, model=model, optimizer=optimizer, warmup=0, repeats=1)
    # The run for the allocator is also a first step.
    assert found.peak_bytes == pytest.approx(found.allocator_peak_bytes, rel=1e-5)
    model, optimizer, step = make()
    first = metered(step, model, optimizer)
    assert (found.peak_bytes, found.at_peak) == (first.peak_bytes, first.at_peak())


def test_attention_flops_do_not_depend_on_number_of_key_heads():
    q, k, v = (torch.ones(2, heads, 8, 16, requires_grad=True) for heads in (4, 1, 1))

    def step():
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()

    # 2 matrix products in forward, 5 in backward
    assert measure(step, repeats=0).flops == (2 + 5) * 2 * (2 * 4 * 8 * 8 * 16)


def test_measure_rejects_step_without_backward_unless_explicitly_allowed():
    def step():
        nn.Linear(2, 2)(torch.ones(1, 2))

    with pytest.raises(ValueError, match=r"^step must call backward"):
        measure(step, repeats=1)
    assert measure(step, needs_gradient=False, repeats=0).flops == 2 * 2 * 2


def test_measurement_results_display_as_tables_without_optional_packages(monkeypatch):
    for name in ("matplotlib", "IPython", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)  # importing them fails
    model, x = deep_mlp(2, 8), torch.ones(4, 8)
    table = saved_tensors(model, x)
    assert "<table" in table._repr_html_() and "4 saved tensors, 512 bytes" in str(table)
    found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
    assert "<table" in found._repr_html_() and "peak of live tensors" in repr(found)


# ---- state that is restored after the runs


class StatefulModel(nn.Module):
    """Model whose forward pass changes buffers and all random generators."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        random.random(), np.random.rand()
        return self.last(F.dropout(self.norm(self.first(x)), 0.5))


def state_of(model, optimizer):
    """Return copies of all values, and the tensors that contain them."""
    _, keys, *rest = np.random.get_state()
    generators = torch.get_rng_state(), random.getstate(), keys.tolist(), rest
    gradients = [p.grad for p in model.parameters()]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *gradients, *model.buffers(), *moments]
    values = model.state_dict(), optimizer.state_dict(), gradients, generators
    return copy.deepcopy(values), tensors


assert_equal = partial(assert_close, rtol=0, atol=0)


@pytest.mark.parametrize(("stepped", "fails"), [(False, False), (True, True)])
def test_measure_restores_model_optimizer_and_generators(stepped, fails):
    model, x = StatefulModel(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    runs = []

    def step():
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.weight.data.add_(1)  # does not increase the version
        optimizer.param_groups[0]["lr"] *= 0.5
        runs.append(1)
        if fails and len(runs) == 3:
            raise ZeroDivisionError

    if stepped:
        step()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    values, tensors = state_of(model, optimizer)
    runs.clear()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        found = measure(step, model=model, optimizer=optimizer, repeats=1)
        assert found.changed_parameters == 0
    values_after, tensors_after = state_of(model, optimizer)
    assert all(a is b for a, b in zip(tensors_after, tensors, strict=True))
    assert_equal(values_after, values)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "stepped", "warmup"),
    [
        (OuterOptimizer, torch.float32, False, 0),
        (OffloadedOptimizer, torch.float32, True, 1),
        (partial(OffloadedOptimizer, fraction=0.5), torch.bfloat16, False, 0),
        (partial(OffloadedOptimizer, fraction=0.5), torch.bfloat16, True, 1),
    ],
)
def test_measure_restores_offloaded_and_wrapped_optimizer_state(optimizer, dtype, stepped, warmup):
    model, x = deep_mlp(2, 16).to(dtype), torch.ones(4, 16, dtype=dtype)
    _, optimizer, step = train(model, x, optimizer=optimizer)
    if stepped:
        step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = measure(step, model=model, optimizer=optimizer, repeats=1, warmup=warmup)
    assert_equal((model.state_dict(), optimizer.state_dict()), before)
    assert found.changed_parameters == 0 and found.notes == ()


def test_measure_without_model_restores_gradients_only():
    model, _, step = train(deep_mlp(2, 16), torch.randn(4, 16), optimizer=torch.optim.Adam)
    gradient = model[0].weight.grad = torch.ones(16, 16)
    found = measure(lambda: model(torch.ones(4, 16)).sum().backward(), repeats=1)
    assert found.changed_parameters == 0 and "changed" not in str(found)
    found = measure(step, repeats=1)
    assert found.changed_parameters == 4 and "the step changed 4 parameters" in str(found)
    assert model[0].weight.grad is gradient and torch.equal(gradient, torch.ones(16, 16))
    assert model[0].bias.grad is None


class CustomKernel(torch.autograd.Function):
    """Function whose input no operator reads, like one that calls its own kernel."""

    forward = staticmethod(lambda ctx, x: torch.ones(x.shape))
    backward = staticmethod(lambda ctx, gradient: torch.ones(gradient.shape))


def test_measure_restores_gradient_of_leaf_used_only_by_custom_function():
    x = torch.randn(4, requires_grad=True)
    before = x.grad = torch.zeros(4)

    def step():
        CustomKernel.apply(x).sum().backward()
        assert x.grad.tolist() == [1] * 4

    measure(step, repeats=1)
    assert x.grad is before and before.tolist() == [0] * 4


def test_measure_releases_leaf_tensor_created_by_step():
    leaves = []

    def step():
        assert all(leaf() is None for leaf in leaves)
        x = torch.ones(8, requires_grad=True)
        leaves.append(weakref.ref(x))
        (x * 2).sum().backward()

    measure(step, repeats=1)


def test_measure_restores_garbage_collection_switch():
    model = nn.Linear(4, 4)
    for switch in (gc.disable, gc.enable):
        switch()
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), repeats=0)
        assert gc.isenabled() == (switch is gc.enable)


def test_measure_keeps_objects_frozen_that_other_code_froze():
    model = nn.Linear(4, 4)
    gc.freeze()
    for _ in range(2):
        measure(lambda: model(torch.ones(1, 4)).sum().backward(), repeats=0)
        assert gc.get_freeze_count()
