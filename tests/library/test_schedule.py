"""Schedules: simulated costs, rules and optimal search against brute force, and execution."""

import copy
import importlib
import itertools
import math
import pickle
import random
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.chains import random_chain
from course_lib._torch.modules import module_signature
from course_lib.memory import MemoryMeter
from course_lib.models import DecoderLayer
from course_lib.schedule import (
    Backward,
    Chain,
    Cost,
    Forward,
    IllegalSchedule,
    InfeasibleBudget,
    Schedule,
    ScheduledSequential,
    Stage,
    binomial,
    frontier,
    optimal,
    planner,
    recursive,
    schedule_blocks,
    segments,
    simulate,
    sqrt_segments,
    store_all,
)
from course_lib.schedule.stages import as_modules

assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)

# ---- simulated costs


def test_simulated_cost_of_small_schedules_equals_hand_calculation():
    chain = Chain((Stage(1, 2, 10, 30, 3, 5), Stage(4, 8, 20, 50, 1, 7)), 100)
    # Forward 0: 100 + 30 + 3. Forward 1: 110 + 50 + 1. Backward 1: 160 + 20 + 7. Forward 0: 120 +
    # 30 + 3.
    assert simulate(segments(chain, 2), chain) == Cost(187, 16.0, 3)
    # A recomputed tensor replaces its first copy, and both are live during the recomputation.
    again = [*[Forward(0, "input")] * 2, *[Forward(0)] * 2, Forward(1), Backward(1), Backward(0)]
    assert simulate(Schedule(again), Chain.uniform(2)) == Cost(4, 9.0, 5)


START = [Forward(0), Forward(1), Backward(1)]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(1)], r"action 0, .*x_1, which is not live"),
        ([Forward(0, "nothing"), Forward(0)], r"action 1, .*x_0, which is not live"),
        ([Forward(0), Backward(0)], r"action 1, .*Backward\(1\) is next"),
        ([Forward(0), Forward(1, "input"), Backward(1)], r"action 2, .*S_1\), which are not live"),
        ([*START, Backward(1)], r"action 3, .*Backward\(0\) is next"),
        ([*START, Backward(0), Backward(0)], r"action 4, .*all of them have run"),
        (
            [Forward(0, "nothing"), *START[1:], Backward(0)],
            r"action 3, .*S_0\), which are not live",
        ),
        ([Forward(0), Forward(0, "nothing"), *START[1:], Backward(0)], r"action 4, .*x_0, which"),
        ([*START, Forward(1)], r"action 3, .*after its backward"),
        (START, r"after 3 actions.*Backward\(0\)"),
        ([], r"after 0 actions"),
        ([Forward(2)], r"action 0, .*stages 0 to 1"),
        ([Forward(-1)], r"action 0, .*stages 0 to 1"),
    ],
)
def test_invalid_schedule_is_rejected_naming_action_and_violated_rule(actions, message):
    with pytest.raises(IllegalSchedule, match=message):
        simulate(Schedule(actions), Chain.uniform(2))


# ---- schedules by rule


def test_segments_of_equal_stages_equal_numpy_array_split():
    for count, length in itertools.combinations_with_replacement(range(1, 12), 2):
        parts = [part.tolist() for part in np.array_split(range(length), count)]
        before = [(i, "nothing" if i in part[1:] else "input") for part in parts for i in part]
        actions = list(itertools.starmap(Forward, before[: parts[-1][0]]))
        for part in reversed(parts):
            actions += [*map(Forward, part), *map(Backward, part[::-1])]
        assert segments(Chain.uniform(length), count) == Schedule(actions)


@pytest.mark.parametrize(("length", "saved"), [(16, 1), (100, 1), (16, 4)])
def test_sqrt_segments_have_nearly_lowest_peak_of_segment_schedules(length, saved):
    chain = Chain.uniform(length, saved_bytes=saved)
    assert sqrt_segments(chain) == segments(chain, math.isqrt(length * saved))
    peaks = [simulate(segments(chain, count), chain).peak_bytes for count in range(1, length + 1)]
    assert simulate(sqrt_segments(chain), chain).peak_bytes - min(peaks) <= 2


@pytest.mark.parametrize("length", [1, 2, 3, 15, 64, 199])
def test_recursive_schedule_has_logarithmic_peak(length):
    cost = simulate(recursive(Chain.uniform(length)), Chain.uniform(length))
    assert cost.peak_bytes <= math.ceil(math.log2(length)) + 4
    assert cost.forward_steps <= length * (1 + math.ceil(math.log2(length)) / 2) + 1


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (2, 1), (7, 2), (30, 5), (100, 200)])
def test_binomial_schedule_has_forward_steps_of_checkpoint_schedules_package(length, slots):
    peer = pytest.importorskip(
        "checkpoint_schedules", reason="compares with the package checkpoint-schedules"
    )
    theirs = itertools.takewhile(
        lambda action: not isinstance(action, peer.EndReverse),
        peer.Revolve(length, min(slots, max(1, length - 1))),
    )
    steps = sum(action.n1 - action.n0 for action in theirs if isinstance(action, peer.Forward))
    assert simulate(binomial(length, slots), Chain.uniform(length)).forward_steps == steps


# ---- optimal schedules


@pytest.mark.parametrize("check", ["solver_error", "rule_error"])
def test_optimal_schedules_equal_exhaustive_search_on_random_chains(check, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    difference = getattr(importlib.import_module("fuzz_cases"), check)
    assert [difference(random.Random(seed)) for seed in range(120)] == [0] * 120


def test_infeasible_schedule_budget_raises_naming_smallest_feasible_budget():
    with pytest.raises(InfeasibleBudget, match=r"is 3, .* at least 4 bytes$") as error:
        optimal(Chain.uniform(9), 3)
    assert (error.value.budget_bytes, error.value.least_bytes) == (3, 4)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_schedule_from_rounded_bytes_never_exceeds_budget(monkeypatch):
    monkeypatch.setattr(planner, "CELLS", 0)
    chain = random_chain(20, 0, most=100_003)
    most, times = simulate(store_all(chain), chain), []
    with pytest.raises(InfeasibleBudget) as error:
        optimal(chain, 1)
    least = error.value.least_bytes
    budgets = np.linspace(least, most.peak_bytes, 7).astype(int).tolist()
    for levels in (60, 3000):
        monkeypatch.setattr(planner, "LEAST_LEVELS", levels)
        costs = [simulate(optimal(chain, budget), chain) for budget in budgets]
        assert all(a.peak_bytes <= budget for a, budget in zip(costs, budgets, strict=True))
        times.append([cost.time for cost in costs])
        points = frontier(chain)
        assert points[0].peak_bytes == least and points[-1] == costs[-1] == most
    assert sum(times[1]) < sum(times[0])


# ---- execution


block = partial(DecoderLayer, 16, 2, dropout=0.3)


def blocks():
    layers = nn.Sequential(*(block(seed=seed) for seed in range(6)))
    return layers, torch.randn(2, 4, 16, requires_grad=True)


def partly_frozen():
    module, x = blocks()
    for stage in (0, 1, 5):
        module[stage].requires_grad_(False)
    return module, x.detach()


def shared():
    twice = block()
    layers = [twice, nn.Tanh(), twice, block(seed=2), nn.LayerNorm(16)]
    return nn.Sequential(*layers), torch.randn(2, 4, 16)


def tokens():
    layers = [nn.Embedding(50, 16), *(block() for _ in range(4)), nn.Linear(16, 50)]
    return nn.Sequential(*layers), torch.randint(50, (4, 6))


def with_hooks():
    """Return layers whose weights are computed by hooks before each call."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    nn.utils.weight_norm(layers[0])
    prune.l1_unstructured(layers[1], "weight", 0.5)
    return layers, torch.randn(3, 8, requires_grad=True)


class Buffered(nn.Linear):
    """Layer that computes with buffers, and changes them in several ways."""

    def __init__(self):
        super().__init__(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mean = self.norm.running_mean  # changed by the norm
        self.register_buffer("graph", torch.eye(8).to_sparse())
        self.register_buffer("replaced", torch.zeros(8))

    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(8))
        self.late.mul_(1.5)
        self.replaced = self.replaced + x.detach().mean(0)
        y = (self.graph @ super().forward(self.norm(x)).T).T
        return y * self.late + self.replaced + self.mean.clone()


def buffered():
    return nn.Sequential(*(Buffered() for _ in range(4))), torch.randn(4, 8)


MAKERS = blocks, partly_frozen, shared, tokens, with_hooks, buffered


def schedules(length: int):
    chain = random_chain(length, 1)
    least = frontier(chain)[0].peak_bytes
    yield from (store_all(chain), sqrt_segments(chain), recursive(chain), binomial(length, 1))
    yield optimal(chain, least + 3)


def step(module, x, autocast=False):
    """Return outputs, gradients and buffers of two passes from one seed."""
    torch.manual_seed(3)
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    outputs = []
    for _ in range(2):
        with torch.autocast("cpu", enabled=autocast):
            outputs.append(module(x))
        outputs[-1].square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in module.parameters())]
    buffers = [b.to_dense().clone() for b in module.buffers()]
    return [*outputs, *gradients, *buffers, torch.rand(3)]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "autocast"), [(blocks, True), *((make, False) for make in MAKERS)]
)
def test_scheduled_outputs_gradients_and_buffers_equal_baseline_bit_for_bit(make, autocast):
    def found(schedule=None):
        torch.manual_seed(0)
        module, x = make()
        run = module if schedule is None else ScheduledSequential(module, schedule)
        return step(run, x, autocast)

    expected = found()
    for schedule in schedules(len(make()[0])):
        assert_same_bits(found(schedule), expected)


def test_scheduled_module_preserves_parameter_names_training_mode_and_inference_output():
    module = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=nn.BatchNorm1d(3))).eval()
    scheduled = ScheduledSequential(module, store_all(Chain.uniform(2)))
    assert list(scheduled.state_dict()) == list(module.state_dict())
    assert not scheduled.training
    with torch.no_grad():
        assert torch.equal(scheduled(torch.ones(2, 3)), module(torch.ones(2, 3)))


def test_two_forward_passes_before_backward_restore_separate_buffers():
    linears = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3)]
    module, xs = nn.Sequential(*linears), torch.randn(2, 4, 8)

    def gradients(module):
        for output in [module(x) for x in xs]:
            output.square().sum().backward()
        return [*(p.grad for p in module.parameters()), *module.buffers()]

    scheduled = ScheduledSequential(copy.deepcopy(module), recursive(Chain.uniform(3)))
    assert_same_bits(gradients(scheduled), gradients(module))


# ---- bytes and FLOPs of a run


def funnel(*widths):
    """Return stages with alternating boundary and hidden widths."""
    layers = (
        nn.Sequential(nn.Linear(a, inside), nn.GELU(), nn.Linear(inside, b), nn.Sigmoid())
        for a, inside, b in zip(widths[:-1:2], widths[1::2], widths[2::2], strict=True)
    )
    return nn.Sequential(*layers), torch.randn(64, widths[0])


LOSS_BYTES = 8  # the loss, which is not a stage, and its gradient


def measured_peak(run, x) -> int:
    """Return the peak of a pass, without the loss; parameter gradients exist already."""
    output = run(x)
    weight = torch.ones_like(output)
    output.backward(weight)
    del output
    with MemoryMeter() as meter:
        output = run(x)
        if output.dim():
            output = (output * weight).sum()  # the gradient of the output is as large as the output
        output.backward()
    return meter.peak_bytes + x.nbytes - LOSS_BYTES


@pytest.mark.parametrize(
    "widths",
    [
        (64, 1024, *[64] * 11),
        (*[64] * 11, 1024, 64),
        (512, 96, 32, 96, 256, 96, 4, 96, 4, 96, 128),
    ],
    ids=["giant first", "giant last", "uneven"],
)
def test_scheduled_run_has_simulated_peak_and_flops(widths, monkeypatch):
    monkeypatch.setattr(planner, "CELLS", 0)  # a smaller table, which is faster
    module, x = funnel(*widths)
    chain = Chain.profile(module, x)
    points = frontier(chain)
    budgets = points[0].peak_bytes, points[len(points) // 2].peak_bytes
    rules = segments(chain, 2), recursive(chain), binomial(len(chain), 2)
    plans = {budget: optimal(chain, budget) for budget in budgets}
    for schedule in (*rules, *plans.values()):
        run = ScheduledSequential(module, schedule)
        cost = simulate(schedule, chain)
        assert measured_peak(run, x) == cost.peak_bytes
        with FlopCounterMode(display=False) as counter:
            run(x).sum().backward()
        assert counter.get_total_flops() == cost.time
    for budget, plan in plans.items():
        with schedule_blocks(module, "*", schedule=lambda its, most=budget: optimal(its, most)):
            assert measured_peak(module, x) == simulate(plan, chain).peak_bytes


def test_buffer_copy_is_released_after_last_run_of_its_stage():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("counts", torch.zeros(10**6))

        def forward(self, x):
            self.counts.add_(1)
            return x * 2

    def peak(*stages):
        """Return the peak, in copies of the buffer."""
        run = ScheduledSequential(stages, segments(Chain.uniform(len(stages)), len(stages)))
        return measured_peak(run, torch.ones((), requires_grad=True)) / (4 * 10**6)

    assert 1 <= peak(Counting(), nn.Tanh()) < 1.5
    # The copy is released before an earlier stage runs again.
    assert peak(lambda x: x.expand(10**6).exp().sum(), Counting(), nn.Tanh()) < 2.5


@pytest.mark.parametrize("count", [1, 4])
def test_simulated_peak_equals_peak_of_pytorch_checkpoint_sequential(count):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))
    module, x = nn.Sequential(*layers), torch.randn(256, 64)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    peak = measured_peak(lambda x: checkpoint_sequential(module, count, x, **options), x)
    chain = Chain.profile(module, x)
    assert simulate(segments(Chain.uniform(12), count), chain).peak_bytes == peak


def test_autocast_weight_copies_are_released_after_their_stage():
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    module, x = nn.Sequential(*layers), torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = Chain.profile(module, x)
        for schedule in (store_all(chain), segments(chain, 2), recursive(chain)):
            run = ScheduledSequential(module, schedule)
            peak = measured_peak(lambda x, run=run: run(x).float(), x)
            # The float32 output outside of the chain and its gradient are live.
            assert abs(peak - simulate(schedule, chain).peak_bytes) <= 16 * 64 * 8


# ---- profiles


def test_chain_profile_counts_bytes_and_flops_of_each_stage():
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(2, 4)
    stages = Chain.profile(module, x).stages
    costs = [(each.output_bytes, each.saved_bytes, each.forward_time) for each in stages]
    assert costs == [(64, 64, 2 * 2 * 4 * 8), (64, 64, 16)]
    clocked = Chain.profile(module, x, clock=True).stages
    assert all(stage.forward_time > 0 < stage.backward_time for stage in clocked)


class Applied(nn.Module):
    """Module with a function and a dict as attributes."""

    def __init__(self, function, options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x):
        return self.function(x, **self.options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2)),
        (nn.ZeroPad2d([0, 0, 0, 0]), nn.ZeroPad2d([0, 0, 2, 2])),
        (Applied(torch.exp, {}), Applied(torch.flatten, {})),
        (Applied(interpolate, {"scale_factor": 1}), Applied(interpolate, {"scale_factor": 2})),
    ],
)
def test_chain_profile_distinguishes_stages_with_different_attributes(one, other):
    """Profile two stages with the same input, because the first one keeps its shape."""
    stages, x = [nn.Identity(), one, other], torch.ones(2, 4, 8, 8, requires_grad=True)
    assert Chain.profile(stages, x, alike=True) == Chain.profile(stages, x)


@pytest.mark.parametrize(
    ("frozen", "rates"), [(0, [0.1, 0.2, 0.0]), (2, [0.1, 0.3, 0.0, 0.1, 0.3])]
)
def test_chain_profile_runs_one_of_several_equal_stages(frozen, rates):
    """Compare with a full profile; `rates` are the dropout rates of the profiled blocks."""
    runs, blocks, x = [], [], torch.ones(4, 8)
    for i, rate in enumerate((0.1, 0.2, 0.3, 0.0)):
        blocks.append(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)).requires_grad_(i >= frozen))
        blocks[-1].register_forward_hook(lambda *_, rate=rate: runs.append(rate))
    stages = [*blocks, *([torch.tanh, lambda x: x.tanh().exp()] * 2), *blocks]
    full, each = Chain.profile(stages, x), len(runs) // 8
    runs.clear()
    assert Chain.profile(stages, x, alike=True) == full
    assert runs[::each] == rates


def test_chain_profile_distinguishes_functions_with_different_captured_values():
    """Create functions like a model's `stages`, which returns new ones for each micro-batch."""

    def look(power):
        (stage,) = as_modules([lambda x: x**power]).values()
        return module_signature(stage)

    assert len({look(power) for power in range(8)}) == 8


def test_chain_profile_leaves_module_and_random_state_unchanged():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), torch.randn(4, 8)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    Chain.profile(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


# ---- modules, functions, tuples, constants


class Masked(nn.Module):
    """Layer that takes a mask by name and returns a tuple, as in Hugging Face models."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, mask=None):
        return (x + torch.where(mask, self.linear(x), 0.0), None)


def run_plainly(stages, x, **kwargs):
    for stage in stages:
        x = stage(x, **kwargs)
        x = x[0] if isinstance(x, tuple) else x
    return x


def test_scheduled_stages_may_accept_masks_and_return_tuples():
    stages, x = nn.ModuleList(Masked(8) for _ in range(6)), torch.randn(4, 8, requires_grad=True)
    mask = torch.rand(4, 8) > 0.3
    expected = run_plainly(stages, x, mask=mask)
    chain = Chain.profile(list(stages), x, kwargs={"mask": mask})
    inputs = [x, *stages.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    for modules, schedule in itertools.product((stages, list(stages)), schedules(len(chain))):
        run = ScheduledSequential(modules, schedule)
        output = run(x, mask=mask)
        with torch.no_grad():
            assert_same_bits([output, run(x, mask=mask)], [expected] * 2)
        assert_same_bits(torch.autograd.grad(output.square().sum(), inputs), gradients)


def test_parameters_used_by_function_stages_get_correct_gradients():
    linear, scale, x = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.randn(2, 4)
    stages = [lambda x: linear(x).tanh(), lambda x, scale=scale: x * scale]
    stages += [partial(torch.add, torch.ones(4)), linear.forward]
    run = ScheduledSequential(stages, recursive(Chain.uniform(4)))
    parameters = [*linear.parameters(), scale]
    assert {*run.parameters()} == {*parameters}
    for wanted in (parameters, parameters[:1]):
        found, expected = (
            torch.autograd.grad(output.sum(), wanted) for output in (run(x), run_plainly(stages, x))
        )
        assert_same_bits(found, expected)
    assert all(parameter.grad is None for parameter in parameters)


def test_stages_before_detach_get_no_gradient():
    first, last = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
    run = ScheduledSequential([*first, torch.detach, last], segments(Chain.uniform(4), 2))
    run(torch.randn(2, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in first.parameters())
    assert all(parameter.grad is not None for parameter in last.parameters())


# ---- the blocks of a model, in place


def test_scheduled_blocks_equal_unscheduled_blocks_bit_for_bit():
    inner, x = blocks()
    model = nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 3))
    expected, alone = step(model, x), model.eval()[1][3](x)
    model.train()
    for schedule in schedules(len(inner)):
        with schedule_blocks(model, "1.*", schedule=schedule) as handle:
            assert handle.names == tuple(f"1.{i}" for i in range(6))
            assert_same_bits(step(model, x), expected)
            with torch.no_grad():
                assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))
                assert torch.equal(inner[3](x), alone)  # a block by itself
            model.train()
        assert all("forward" not in vars(each) for each in inner)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_scheduled_blocks_with_weights_computed_by_hooks_equal_baseline():
    layers, x = with_hooks()
    expected = step(layers, x)
    for schedule in schedules(4):
        with schedule_blocks(layers, "*", schedule=schedule):
            assert_same_bits(step(layers, x), expected)


# ---- errors


class StoresLoss(nn.Linear):
    """Layer that stores a loss in an attribute."""

    def forward(self, x):
        self.losses = [super().forward(x).square().mean()]
        return x + super().forward(x)


def changing(other):
    """Return a function whose later calls apply `other` to its output."""
    runs = []

    def stage(x):
        runs.append(x)
        return x * 2 if len(runs) == 1 else other(x * 2)

    return stage


HIDDEN = torch.ones(2, requires_grad=True)


def in_place(stages, schedule):
    schedule_blocks(stages, "*", schedule=schedule)
    return stages


@pytest.mark.parametrize("run", [ScheduledSequential, in_place])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(nn.ReLU, inplace=True), "stage 1 changed its input in place"),
        (partial(changing, lambda x: x[:1]), r"stage 1 returned .* when it ran again"),
        (partial(changing, torch.Tensor.double), r"stage 1 returned .* when it ran again"),
        (lambda: lambda x: x * HIDDEN, "stage 1 uses a tensor that requires a gradient"),
        (partial(StoresLoss, 2, 2), r"^stage 1 stores in `losses`"),
    ],
)
def test_schedule_rejects_stage_that_cannot_be_recomputed(run, make, message):
    stages = nn.Sequential(OrderedDict(as_modules([nn.Linear(2, 2), make(), nn.Tanh()])))
    with pytest.raises(RuntimeError, match=message):
        run(stages, segments(Chain.uniform(3), 3))(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize("run", [ScheduledSequential, in_place])
def test_schedule_for_another_number_of_stages_is_rejected(run):
    with pytest.raises(IllegalSchedule, match="stages 0 to 0"):
        run(nn.Sequential(nn.Tanh()), store_all(Chain.uniform(2)))


def test_second_backward_through_same_scheduled_forward_is_rejected():
    stages = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    loss = ScheduledSequential(stages, segments(Chain.uniform(2), 2))(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has already run"):
        loss.backward()
