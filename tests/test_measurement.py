"""Results of `measure`."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_steps import NO_WORKSPACE, allocations, bytes_of, optimizer_step, square_mean, train

from course_lib.memory import MemoryMeter, measure, saved_tensors
from course_lib.memory.allocator import workspace_by_operator
from course_lib.models import deep_mlp


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, 2)

    def forward(self, x):
        return self.lstm(x)[0]


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    return train(model, torch.randn(4, 3, 32, 32))


WORKSPACE = {
    "convolutions": (convolutions, "aten.convolution"),
    "LSTM": (lambda: train(LSTM(), torch.randn(16, 8, 32)), "aten.mkldnn_rnn_layer"),
}


@pytest.mark.parametrize("name", ["post-norm, checkpoint", "double backward"])
def test_measure_reports_the_allocators_peak(name):
    model, optimizer, step = NO_WORKSPACE[name]()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert found.peak_bytes == pytest.approx(found.allocator_peak_bytes, rel=1e-3)
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.device == "cpu"
    assert found.seconds > 0


@pytest.mark.parametrize("name", WORKSPACE)
def test_workspace_is_what_the_allocator_sees_above_the_tensors(name):
    make, operator = WORKSPACE[name]
    model, optimizer, step = make()
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert 0 <= found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes
    if torch.backends.mkldnn.is_available():
        assert any(name.startswith(operator) for name in found.workspace_by_operator)
    taken = list(found.workspace_by_operator.values())
    assert taken == sorted(taken, reverse=True)
    assert all(count > 0 for count in taken)


def test_a_peak_above_the_allocators_is_explained():
    weight = nn.Parameter(torch.randn(256, 256))
    found = measure(lambda: (weight * 2).prod(1).sum().backward(), repeats=1)
    assert found.workspace_bytes == found.allocator_peak_bytes - found.peak_bytes < -4 * 256 * 255
    assert (
        f"the meter counts {-found.workspace_bytes:,} bytes more than the allocator"
        in found.caption()
    )
    assert measure(lambda: (weight * 2).exp().sum().backward(), repeats=1).notes == ()


def test_the_runs_for_the_allocator_and_for_the_clock_are_under_no_mode():
    weight, depths = nn.Parameter(torch.randn(8, 8)), []

    def step():
        profiled = torch.autograd.profiler._is_profiler_enabled
        depths.append(
            (profiled, len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        )
        (weight * 2).sum().backward()

    measure(step, repeats=3)
    assert (True, 0) in depths
    assert depths[-3:] == [(False, 0)] * 3  # nor those for the clock


def test_workspace_on_cuda_is_what_the_allocator_held_within_an_operator(monkeypatch):
    held = {"current": 500, "peak": 500}

    class Products(TorchDispatchMode):
        """Each takes 700 bytes and leaves 400; other operators free 100 that were there before."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            product = func is torch.ops.aten.mm.default
            held["peak"] = max(held["peak"], held["current"] + (700 if product else 0))
            held["current"] += 400 if product else -100
            return func(*args, **(kwargs or {}))

    def nested(device):
        return {"allocated_bytes": {"all": dict(held)}}

    def run(mode):
        with Products(), mode:
            (torch.ones(2, 2) @ torch.ones(2, 2)).relu()

    monkeypatch.setattr(torch.cuda, "memory_stats", None)  # too slow to be asked at each operator
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", None)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", nested)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=held["current"])
    )
    assert workspace_by_operator(run, torch.device("cuda")) == {"aten.mm.default": 300}


@pytest.fixture
def one_process():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_fully_sharded_model_is_measured_as_the_allocator_sees_it(one_process):
    from torch.distributed.fsdp import fully_shard

    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), torch.randn(8, 128)
    held = bytes_of(model.parameters())
    for layer in model:
        fully_shard(layer, mesh=one_process)
    fully_shard(model, mesh=one_process)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with MemoryMeter(model, optimizer) as meter:
        entered = meter.at_peak()
        step()
    assert entered["parameter"] == held and entered["optimizer"] == 2 * held + 4 * 8
    seen = meter.entry_bytes + max(accumulate(allocations(step)))
    assert meter.peak_bytes == pytest.approx(seen, rel=0.02)
    found = measure(step, model=model, optimizer=optimizer, repeats=1)
    assert found.peak_bytes <= found.allocator_peak_bytes and found.notes == ()
    assert saved_tensors(model, x).total_bytes > 0


def test_measure_warms_up_until_two_runs_take_the_same():
    x, runs = nn.Parameter(torch.randn(64, 64)), []

    def step():
        runs.append(1)
        (x.repeat(max(1, 4 - len(runs)), 1) * 2).sum().backward()

    found = measure(step, repeats=1)
    assert found.workspace_bytes >= 0
    assert found.peak_bytes == measure(step, repeats=1).peak_bytes
    assert found.notes == ()


def test_a_step_that_never_takes_the_same_twice_is_noted():
    x, runs = nn.Parameter(torch.randn(8, 8)), []

    def step():
        runs.append(1)
        (x.repeat(len(runs), 1) * 2).sum().backward()

    found = measure(step, repeats=1)
    assert len(runs) < 12
    assert "no two runs took the same" in str(found)


def test_a_distributed_model_is_measured_with_its_buckets_as_they_stay(one_process):
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    )
    x = torch.randn(8, 64)
    found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
    assert 0 <= found.workspace_bytes < 0.01 * found.peak_bytes and found.notes == ()


@pytest.mark.parametrize("warmup", [0, 1])
def test_warmup_0_measures_the_first_step_ever(warmup):
    def make():
        # its peak is in the optimizer's step
        return optimizer_step(torch.optim.Adam, foreach=False)

    model, optimizer, step = make()
    found = measure(step, model=model, optimizer=optimizer, warmup=warmup, repeats=1)
    assert found.at_peak["parameter"] == bytes_of(model.parameters())
    # in its run it's a first step too
    assert found.peak_bytes == pytest.approx(found.allocator_peak_bytes, rel=1e-5)
    assert found.workspace_bytes >= 0
    model, optimizer, step = make()
    with MemoryMeter(model, optimizer) as first:
        step()
    if warmup == 0:
        assert found.peak_bytes == first.peak_bytes
        assert found.at_peak == first.at_peak()


@pytest.mark.parametrize("keys", [4, 2, 1])
def test_the_flops_of_attention_do_not_depend_on_how_many_heads_share_their_keys(keys):
    q, k, v = (torch.ones(2, heads, 8, 16, requires_grad=True) for heads in (4, keys, keys))
    with MemoryMeter() as meter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    assert meter.flops == 7 * 2 * (2 * 4 * 8 * 8 * 16)  # products of matrices, 2 and 5 of them


def test_the_flops_of_an_mlp_are_those_of_its_matrix_products():
    depth, width, batch = 4, 32, 8
    model, x = deep_mlp(depth, width), torch.randn(batch, width)
    found = measure(lambda: model(x).sum().backward(), model=model, repeats=1)
    # 2*b*n*n forward, as many for the weight's gradient, and for the input's, which the first layer
    # does not need.
    assert found.flops == (3 * depth - 1) * 2 * batch * width * width
    forward = measure(lambda: model(x).sum(), model=model, repeats=1, needs_gradient=False)
    assert forward.flops == depth * 2 * batch * width * width


def test_a_step_that_leaves_no_gradient_is_an_error():
    with pytest.raises(
        ValueError, match=r"^step must call backward\(\) .*, got one without a backward pass"
    ):
        measure(lambda: nn.Linear(2, 2)(torch.ones(1, 2)), repeats=1)


def test_measure_finds_the_same_whichever_arm_comes_first():
    def measured(order):
        model, x = deep_mlp(6, 64), torch.randn(64, 64)
        optimizer = torch.optim.Adam(model.parameters())

        def step(forward):
            square_mean(forward(x)).backward()
            optimizer.step()

        arms = {"plain": model, "forgetful": lambda x: checkpoint(model, x, use_reentrant=False)}
        found = {
            n: measure(lambda n=n: step(arms[n]), model=model, optimizer=optimizer, repeats=1)
            for n in order
        }
        return {name: replace(one, seconds=0) for name, one in found.items()}

    assert measured(["plain", "forgetful"]) == measured(["forgetful", "plain"])


@pytest.mark.parametrize("size", [1_000, 10_000, 100_000])
def test_what_was_made_before_a_run_and_dies_in_it_does_not_lower_the_allocators_peak(size):
    x = torch.randn(size, requires_grad=True)

    def step():
        # frees what the last run has made; some such blocks an earlier profile has seen being made
        x.grad = None
        (x * 2).sum().backward()

    for _ in range(6):  # which ones, addresses decide
        found = measure(step, model=nn.Linear(2, 2), repeats=1)
        assert found.peak_bytes <= found.allocator_peak_bytes <= found.peak_bytes + 64
