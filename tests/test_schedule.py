"""course_lib.schedule: the referee, the schedules, the cheapest one under a budget, and running
them."""

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
from course_lib._torch.modules import look_of
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, DecoderLayer, loss_stages, random_tokens
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

# ---- the referee


def test_the_referee_counts_small_schedules_as_one_does_by_hand():
    chain = Chain((Stage(1, 2, 10, 30, 3, 5), Stage(4, 8, 20, 50, 1, 7)), 100)
    # Forward 0: 100 + 30 + 3. Forward 1: 110 + 50 + 1. Backward 1: 160 + 20 + 7. Forward 0: 120 +
    # 30 + 3.
    assert simulate(segments(chain, 2), chain) == Cost(187, 16.0, 3)
    # What is made a second time is alive once: x_0, then with x_1, with a second x_1 meanwhile,
    # S_0 in its place, a second S_0 meanwhile, S_1, the gradient.
    again = [*[Forward(0, "input")] * 2, *[Forward(0)] * 2, Forward(1), Backward(1), Backward(0)]
    assert simulate(Schedule(again), Chain.uniform(2)) == Cost(4, 9.0, 5)


ALL = [Forward(0), Forward(1), Backward(1)]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(1)], r"action 0, .*x_1 is not"),
        ([Forward(0, "nothing"), Forward(0)], r"action 1, .*x_0 is not"),
        ([Forward(0), Backward(0)], r"action 1, .*Backward\(1\) is next"),
        ([Forward(0), Forward(1, "input"), Backward(1)], r"action 2, .*S_1 is not"),
        ([*ALL, Backward(1)], r"action 3, .*Backward\(0\) is next"),
        ([*ALL, Backward(0), Backward(0)], r"action 4, .*all of them have run"),
        ([Forward(0, "nothing"), *ALL[1:], Backward(0)], r"action 3, .*S_0 is not"),
        ([Forward(0), Forward(0, "nothing"), *ALL[1:], Backward(0)], r"action 4, .*x_0 is not"),
        ([*ALL, Forward(1)], r"action 3, .*after its backward"),
        (ALL, r"after 3 actions.*Backward\(0\)"),
        ([], r"after 0 actions"),
        ([Forward(2)], r"action 0, .*stages 0 to 1"),
        ([Forward(-1)], r"action 0, .*stages 0 to 1"),
    ],
)
def test_an_illegal_schedule_is_refused_with_the_action_and_the_rule(actions, message):
    with pytest.raises(IllegalSchedule, match=message):
        simulate(Schedule(actions), Chain.uniform(2))


# ---- schedules by rule


def test_segments_of_equal_stages_are_cut_as_numpy_cuts_an_array():
    for count, length in itertools.combinations_with_replacement(range(1, 12), 2):
        parts = [part.tolist() for part in np.array_split(range(length), count)]
        before = [(i, "nothing" if i in part[1:] else "input") for part in parts for i in part]
        actions = list(itertools.starmap(Forward, before[: parts[-1][0]]))
        for part in reversed(parts):
            actions += [*map(Forward, part), *map(Backward, part[::-1])]
        assert segments(Chain.uniform(length), count) == Schedule(actions)


@pytest.mark.parametrize(("length", "saved"), [(16, 1), (100, 1), (16, 4)])
def test_the_best_count_is_the_square_root_of_all_that_is_saved_in_units_of_a_boundary(
    length, saved
):
    chain = Chain.uniform(length, saved_bytes=saved)
    assert sqrt_segments(chain) == segments(chain, math.isqrt(length * saved))
    peaks = [simulate(segments(chain, count), chain).peak_bytes for count in range(1, length + 1)]
    assert simulate(sqrt_segments(chain), chain).peak_bytes - min(peaks) <= 2


@pytest.mark.parametrize("length", [1, 2, 3, 15, 64, 199])
def test_the_recursive_schedule_takes_memory_that_grows_with_the_logarithm(length):
    cost = simulate(recursive(Chain.uniform(length)), Chain.uniform(length))
    assert cost.peak_bytes <= math.ceil(math.log2(length)) + 4
    assert cost.forward_steps <= length * (1 + math.ceil(math.log2(length)) / 2) + 1


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (2, 1), (7, 2), (30, 5), (100, 200)])
def test_binomial_schedules_take_as_many_steps_as_those_of_another_package(length, slots):
    peer = pytest.importorskip(
        "checkpoint_schedules", reason="compares with the package checkpoint-schedules"
    )
    theirs = itertools.takewhile(
        lambda action: not isinstance(action, peer.EndReverse),
        peer.Revolve(length, min(slots, max(1, length - 1))),
    )
    steps = sum(action.n1 - action.n0 for action in theirs if isinstance(action, peer.Forward))
    assert simulate(binomial(length, slots), Chain.uniform(length)).forward_steps == steps


# ---- the cheapest


@pytest.mark.parametrize("check", ["planned", "ruled"])
def test_budgets_frontiers_and_rules_are_what_exhaustive_searches_find(check, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    difference = getattr(importlib.import_module("fuzz_cases"), check)
    assert [difference(random.Random(seed)) for seed in range(120)] == [0] * 120


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_is_not():
    with pytest.raises(InfeasibleBudget, match=r"is 3, .* at least 4$") as error:
        optimal(Chain.uniform(9), 3)
    assert (error.value.budget_bytes, error.value.least_bytes) == (3, 4)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_rounding_never_takes_the_peak_over_the_budget(monkeypatch):
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


def test_a_long_regular_chain_loses_little_by_rounding(monkeypatch):
    stages = [Stage(3, 6, 1000, 9000, 10, 1500), Stage(5, 10, 1000, 14000, 20, 3000)] * 10
    chain = Chain((Stage(1, 1, 1000, 1000), *stages, Stage(7, 14, 4, 40_001, 100, 40_003)), 100)
    points = frontier(chain)
    monkeypatch.setattr(planner, "CELLS", 0)
    monkeypatch.setattr(planner, "LEAST_LEVELS", 300)
    for point in points[::3]:
        assert simulate(optimal(chain, round(point.peak_bytes * 1.03)), chain).time <= point.time


# for which sums in the order of the actions differ in the last digit
@pytest.mark.parametrize("seed", [16, 25, 26])
def test_rounding_errors_of_times_add_no_points_to_the_frontier(seed):
    draw, costs = random.Random(seed), []
    for _ in range(12):
        output = draw.randint(1, 3)
        costs.append((draw.randint(1, 9), draw.randint(1, 9), output, output + draw.randint(0, 3)))
    whole = Chain(tuple(Stage(*cost) for cost in costs), 2)
    tenths = Chain(tuple(Stage(f / 10, b / 10, output, saved) for f, b, output, saved in costs), 2)
    expected = [(point.peak_bytes, point.time) for point in frontier(whole)]
    assert [(point.peak_bytes, round(10 * point.time)) for point in frontier(tenths)] == expected


# ---- execution


block = partial(DecoderLayer, 16, 2, dropout=0.3)  # its random numbers matter


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


def pyramid(size=16):
    layers = []
    for a, b in itertools.pairwise([3, 8, 16, 32]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers), torch.randn(4, 3, size, size)


def normalized():
    """Layers that compute with buffers, which each pass changes."""
    linears = (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(4))
    layers = (nn.Sequential(linear, nn.BatchNorm1d(8), nn.Tanh()) for linear in linears)
    return nn.Sequential(*layers), torch.randn(16, 8)


def with_hooks():
    """Layers whose weights are computed by hooks before each call."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    nn.utils.weight_norm(layers[0])
    prune.l1_unstructured(layers[1], "weight", 0.5)
    return layers, torch.randn(3, 8, requires_grad=True)


class Buffered(nn.Linear):
    """A layer that computes with buffers and other state, and changes them in all ways."""

    def __init__(self):
        super().__init__(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mean = self.norm.running_mean  # the norm changes an attribute, too
        self.register_buffer("graph", torch.eye(8).to_sparse())
        self.register_buffer("replaced", torch.zeros(8))
        self.register_buffer("written", torch.zeros(8))

    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(8))
            self.calls = 0
        self.calls += 1
        self.late.mul_(1.5)
        self.replaced = self.replaced + x.detach().mean(0)
        self.written.data.add_(x.detach().mean(0))
        y = (self.graph @ super().forward(self.norm(x)).T).T
        return y * (self.late * self.calls) + self.replaced + self.written + self.mean.clone()


def buffered():
    return nn.Sequential(*(Buffered() for _ in range(4))), torch.randn(4, 8)


MAKERS = blocks, partly_frozen, shared, tokens, pyramid, normalized, with_hooks, buffered


def schedules(length: int):
    chain = random_chain(length, 1)
    least = frontier(chain)[0].peak_bytes
    yield from (store_all(chain), sqrt_segments(chain), recursive(chain), binomial(length, 1))
    yield optimal(chain, least + 3)


def step(module, x, autocast=False):
    """Outputs, gradients and buffers after two passes from one seed."""
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


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "autocast"), [(blocks, True), *((make, False) for make in MAKERS)]
)
def test_outputs_gradients_and_statistics_equal_the_plain_modules_to_the_bit(make, autocast):
    def found(schedule=None):
        torch.manual_seed(0)
        module, x = make()
        run = module if schedule is None else ScheduledSequential(module, schedule)
        return step(run, x, autocast)

    expected = found()
    for schedule in schedules(len(make()[0])):
        assert_same_bits(found(schedule), expected)


def test_gradients_of_a_shared_stage_under_autocast_are_added_without_rounding_to_bfloat16():
    """Compared with a chain of copies, where each stage has a gradient of its own."""
    twice = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    module, x = nn.Sequential(twice, nn.Tanh(), twice), torch.randn(8, 16)
    untied = copy.deepcopy(nn.Sequential(twice, nn.Tanh())).append(copy.deepcopy(twice))
    step(untied, x, autocast=True)
    expected = untied[0][0].weight.grad + untied[2][0].weight.grad
    for schedule in schedules(3):
        step(ScheduledSequential(module, schedule), x, autocast=True)
        assert torch.equal(twice[0].weight.grad, expected)
    step(module, x, autocast=True)
    assert not torch.equal(twice[0].weight.grad, expected)


def test_names_and_mode_are_those_of_the_plain_module_and_without_gradients_it_just_runs():
    module = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=nn.BatchNorm1d(3))).eval()
    scheduled = ScheduledSequential(module, store_all(Chain.uniform(2)))
    assert list(scheduled.state_dict()) == list(module.state_dict())
    assert not scheduled.training
    with torch.no_grad():
        assert torch.equal(scheduled(torch.ones(2, 3)), module(torch.ones(2, 3)))


def test_two_passes_at_once_each_find_their_own_buffers():
    linears = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3)]
    module, xs = nn.Sequential(*linears), torch.randn(2, 4, 8)

    def gradients(module):
        for output in [module(x) for x in xs]:
            output.square().sum().backward()
        return [*(p.grad for p in module.parameters()), *module.buffers()]

    scheduled = ScheduledSequential(copy.deepcopy(module), recursive(Chain.uniform(3)))
    assert_same_bits(gradients(scheduled), gradients(module))


# ---- what a run takes


def decoder():
    tokens = random_tokens(2, 16, 256)
    model = Decoder(vocabulary=256, hidden=64, heads=4, layers=2, sequence=16, tied=False)
    return loss_stages(model, tokens[:, 1:]), tokens[:, :-1].contiguous()


def funnel(*widths):
    """Stages of different widths; input, hidden and output widths take turns in `widths`."""
    layers = (
        nn.Sequential(nn.Linear(a, inside), nn.GELU(), nn.Linear(inside, b), nn.Sigmoid())
        for a, inside, b in zip(widths[:-1:2], widths[1::2], widths[2::2], strict=True)
    )
    return nn.Sequential(*layers), torch.randn(64, widths[0])


LOSS_BYTES = 8  # the loss, which is no stage, and its gradient


def measured_peak(run, x) -> int:
    """Peak of one pass with its input but without the loss; parameter gradients exist already."""
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
    "make",
    [
        decoder,
        partial(funnel, 64, 1024, *[64] * 11),
        partial(funnel, *[64] * 11, 1024, 64),
        partial(funnel, 512, 96, 32, 96, 256, 96, 4, 96, 4, 96, 128),
    ],
    ids=["decoder", "giant first", "giant last", "uneven"],
)
def test_a_run_takes_the_bytes_and_flops_that_the_referee_says(make, monkeypatch):
    monkeypatch.setattr(planner, "CELLS", 0)  # a smaller table, which is faster
    module, x = make()
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
        # stages without a product, such as an embedding, count the elements of their output
        assert counter.get_total_flops() == cost.time or make is decoder
    if make is not decoder:  # whose embedding has no floating-point input
        for budget, plan in plans.items():
            with schedule_blocks(module, "*", schedule=lambda its, most=budget: optimal(its, most)):
                assert measured_peak(module, x) == simulate(plan, chain).peak_bytes


def test_one_copy_of_a_changed_buffer_lives_until_the_last_run_of_its_stage():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("counts", torch.zeros(10**6))

        def forward(self, x):
            self.counts.add_(1)
            return x * 2

    def peak(*stages):
        """Peak, in copies of the buffer."""
        run = ScheduledSequential(stages, segments(Chain.uniform(len(stages)), len(stages)))
        return measured_peak(run, torch.ones((), requires_grad=True)) / (4 * 10**6)

    assert 1 <= peak(Counting(), nn.Tanh()) < 1.5
    # the copy has been released when a stage before it runs again
    assert peak(lambda x: x.expand(10**6).exp().sum(), Counting(), nn.Tanh()) < 2.5


def test_copies_of_buffers_that_change_come_on_top_of_what_the_referee_says():
    module, x = pyramid(32)
    chain, buffers = Chain.profile(module, x), sum(buffer.nbytes for buffer in module.buffers())
    for schedule in (segments(chain, 3), recursive(chain)):
        peak = measured_peak(ScheduledSequential(module, schedule), x)
        assert 0 < peak - simulate(schedule, chain).peak_bytes <= buffers


@pytest.mark.parametrize("count", [1, 3, 4, 12])
def test_the_referee_and_checkpoint_sequential_agree_on_segments(count):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))
    module, x = nn.Sequential(*layers), torch.randn(256, 64)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    peak = measured_peak(lambda x: checkpoint_sequential(module, count, x, **options), x)
    chain = Chain.profile(module, x)
    assert simulate(segments(Chain.uniform(12), count), chain).peak_bytes == peak


def test_casts_of_weights_do_not_outlive_their_stage():
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    module, x = nn.Sequential(*layers), torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = Chain.profile(module, x)
        for schedule in (store_all(chain), segments(chain, 2), recursive(chain)):
            run = ScheduledSequential(module, schedule)
            peak = measured_peak(lambda x, run=run: run(x).float(), x)
            # What becomes float32 outside of the chain, 4 bytes a number, is there with its
            # gradient of 2 bytes.
            assert abs(peak - simulate(schedule, chain).peak_bytes) <= 16 * 64 * 8


# ---- profiles


def test_a_profile_counts_the_bytes_and_flops_of_each_stage():
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(2, 4)
    stages = Chain.profile(module, x).stages
    figures = [(each.output_bytes, each.saved_bytes, each.forward_time) for each in stages]
    assert figures == [(64, 64, 2 * 2 * 4 * 8), (64, 64, 16)]
    clocked = Chain.profile(module, x, clock=True).stages
    assert [stage.saved_bytes for stage in clocked] == [64, 64]
    assert all(0 < stage.forward_time < 1 > stage.backward_time > 0 for stage in clocked)


class Applied(nn.Module):
    """A module whose settings are a function and a dict."""

    def __init__(self, function, options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x):
        return self.function(x, **self.options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2)),
        (nn.AdaptiveAvgPool2d((8, 8)), nn.AdaptiveAvgPool2d((4, 4))),
        (nn.ZeroPad2d([0, 0, 0, 0]), nn.ZeroPad2d([0, 0, 2, 2])),
        (Applied(torch.exp, {}), Applied(torch.flatten, {})),
        (Applied(interpolate, {"scale_factor": 1}), Applied(interpolate, {"scale_factor": 2})),
    ],
)
def test_profile_measures_stages_with_other_tuples_functions_or_dicts_separately(one, other):
    """The first of the two keeps the shape of its input, so both get the same input."""
    stages, x = [nn.Identity(), one, other], torch.ones(2, 4, 8, 8, requires_grad=True)
    assert Chain.profile(stages, x, alike=True) == Chain.profile(stages, x)


@pytest.mark.parametrize(
    ("frozen", "looks"), [(0, [0.1, 0.2, 0.0]), (2, [0.1, 0.3, 0.0, 0.1, 0.3])]
)
def test_a_profile_of_stages_that_look_alike_is_that_of_all_from_one_of_each_look(frozen, looks):
    """The first stage returns no input gradient, and each function counts as its own kind.

    `looks` are the dropout rates of the blocks that are profiled.
    """
    runs, blocks, x = [], [], torch.ones(4, 8)
    for i, rate in enumerate((0.1, 0.2, 0.3, 0.0)):
        blocks.append(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)).requires_grad_(i >= frozen))
        blocks[-1].register_forward_hook(lambda *_, rate=rate: runs.append(rate))
    stages = [*blocks, *([torch.tanh, lambda x: x.tanh().exp()] * 2), *blocks]
    full, each = Chain.profile(stages, x), len(runs) // 8
    runs.clear()
    assert Chain.profile(stages, x, alike=True) == full
    assert runs[::each] == looks


def test_a_function_does_not_look_like_one_that_is_gone():
    """A model's `stages` may create new functions for each micro-batch."""

    def look(power):
        (stage,) = as_modules([lambda x: x**power]).values()
        return look_of(stage)

    assert len({look(power) for power in range(8)}) == 8


def test_a_profile_leaves_module_and_random_numbers_as_they_were():
    module, x = pyramid()
    module.append(nn.Dropout())
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    Chain.profile(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


# ---- modules, functions, tuples, constants


class Masked(nn.Module):
    """As a layer of Hugging Face's: takes a mask by name, returns a tuple."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, mask=None):
        return (x + torch.where(mask, self.linear(x), 0.0), None)


class Paired(nn.Linear):
    """Takes and returns a dict, in which one tensor alone is a floating one."""

    def forward(self, pair):
        return {"x": super().forward(pair["x"]).sin(), "where": pair["where"], "name": "pair"}


def one_after_the_other(stages, x, **kwargs):
    for stage in stages:
        x = stage(x, **kwargs)
        x = x[0] if isinstance(x, tuple) else x
    return x


def masked():
    x = torch.randn(4, 8, requires_grad=True)
    return nn.ModuleList(Masked(8) for _ in range(6)), x, {"mask": torch.rand(4, 8) > 0.3}


def paired():
    x = {"x": torch.randn(3, 5, requires_grad=True), "where": torch.arange(3), "name": "pair"}
    return nn.ModuleList(Paired(5, 5) for _ in range(4)), x, {}


@pytest.mark.parametrize("make", [masked, paired])
def test_stages_may_take_masks_and_hand_on_tuples_and_dicts(make):
    stages, x, kwargs = make()
    expected = one_after_the_other(stages, x, **kwargs)
    chain = Chain.profile(list(stages), x, kwargs=kwargs)

    def tensor(value):
        return value["x"] if isinstance(value, dict) else value

    inputs = [tensor(x), *stages.parameters()]
    gradients = torch.autograd.grad(tensor(expected).square().sum(), inputs)
    for given, schedule in itertools.product((stages, list(stages)), schedules(len(chain))):
        run = ScheduledSequential(given, schedule)
        output = run(x, **kwargs)
        assert make is masked or output["where"] is x["where"]
        with torch.no_grad():
            assert_same_bits([tensor(output), tensor(run(x, **kwargs))], [tensor(expected)] * 2)
        assert_same_bits(torch.autograd.grad(tensor(output).square().sum(), inputs), gradients)


def test_functions_train_what_they_hold_and_some_gradients_alone_can_be_asked_for():
    linear, scale, x = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.randn(2, 4)
    stages = [lambda x: linear(x).tanh(), lambda x, scale=scale: x * scale]
    stages += [partial(torch.add, torch.ones(4)), linear.forward]
    run, held = ScheduledSequential(stages, recursive(Chain.uniform(4))), [*linear.parameters()]
    held.append(scale)
    assert {*run.parameters()} == {*held}
    for asked in (held, held[:1]):
        found, expected = (
            torch.autograd.grad(output.sum(), asked)
            for output in (run(x), one_after_the_other(stages, x))
        )
        assert_same_bits(found, expected)
    assert all(parameter.grad is None for parameter in held)


def test_a_stage_that_cuts_the_gradient_leaves_those_before_it_without_any():
    first, last = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
    run = ScheduledSequential([*first, torch.detach, last], segments(Chain.uniform(4), 2))
    run(torch.randn(2, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in first.parameters())
    assert all(parameter.grad is not None for parameter in last.parameters())


# ---- the blocks of a model, in place


def test_blocks_run_by_a_schedule_compute_what_they_do_without_it():
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
                assert torch.equal(inner[3](x), alone)  # in any order, also a block by itself
            model.train()
        assert all("forward" not in vars(each) for each in inner)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_scheduled_blocks_may_have_weights_that_hooks_compute():
    layers, x = with_hooks()
    expected = step(layers, x)
    for schedule in schedules(4):
        with schedule_blocks(layers, "*", schedule=schedule):
            assert_same_bits(step(layers, x), expected)


# ---- bad input


class Aside(nn.Linear):
    """A layer that stores a loss of its own in addition to its output."""

    def forward(self, x):
        self.losses = [super().forward(x).square().mean()]
        return x + super().forward(x)


def changing(other):
    """A function that returns something else the second time."""
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
        (partial(Aside, 2, 2), r"^stage 1 stores .* in losses"),
    ],
)
def test_a_stage_that_cannot_run_again_is_refused(run, make, message):
    stages = nn.Sequential(OrderedDict(as_modules([nn.Linear(2, 2), make(), nn.Tanh()])))
    with pytest.raises(RuntimeError, match=message):
        run(stages, segments(Chain.uniform(3), 3))(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize("run", [ScheduledSequential, in_place])
def test_a_schedule_for_another_number_of_stages_does_not_run(run):
    with pytest.raises(IllegalSchedule, match="stages 0 to 0"):
        run(nn.Sequential(nn.Tanh()), store_all(Chain.uniform(2)))


def test_a_second_backward_through_the_same_pass_is_refused():
    stages = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    loss = ScheduledSequential(stages, segments(Chain.uniform(2), 2))(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has already run"):
        loss.backward()


def test_a_schedule_draws_itself():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    ax = recursive(Chain.uniform(6)).plot()
    assert ax.get_ylim() == (-0.5, 5.5) and ax.get_xlabel() == "time"
    assert ax.get_xlim()[1] == simulate(recursive(Chain.uniform(6)), Chain.uniform(6)).time
    assert segments(Chain.uniform(4), 2).plot(ax, chain=Chain.uniform(4)) is ax
    plt.close("all")
