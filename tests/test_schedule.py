"""course_lib.schedule: the referee, the schedules, the cheapest one under a budget, and running
them."""

import copy
import itertools
import math
import pickle
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.chains import cheapest_by_search, random_chain
from course_lib._torch import look_of
from course_lib.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop
from course_lib.memory import MemoryMeter, saved_tensors
from course_lib.models import Decoder, deep_mlp, loss_stages, random_tokens
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


def backwards(length: int) -> list[Backward]:
    return [Backward(i) for i in reversed(range(length))]


def test_the_referee_counts_a_small_schedule_as_one_does_by_hand():
    chain = Chain((Stage(1, 2, 10, 30, 3, 5), Stage(4, 8, 20, 50, 1, 7)), 100)
    # Forward 0: 100 + 30 + 3. Forward 1: 130 + 50 + 1. Backward 1: 180 + 20 + 7. Backward 0: 130 +
    # 10 + 5.
    assert simulate(store_all(chain), chain) == Cost(207, 15.0, 2)
    # Forward 0: 100 + 30 + 3. Forward 1: 110 + 50 + 1. Backward 1: 160 + 20 + 7. Forward 0: 120 +
    # 30 + 3.
    assert simulate(segments(chain, 2), chain) == Cost(187, 16.0, 3)


def test_a_uniform_chain_that_stores_all_takes_its_input_every_output_and_one_gradient():
    for length in range(1, 12):
        assert simulate(store_all(Chain.uniform(length)), Chain.uniform(length)) == Cost(
            length + 2, 3.0 * length, length
        )


def test_what_is_made_a_second_time_is_alive_once():
    again = Schedule(
        [
            Forward(0, "input"),
            Forward(0, "input"),
            Forward(0),
            Forward(0),
            Forward(1),
            *backwards(2),
        ]
    )
    # x_0, then with x_1, with a second x_1 meanwhile, S_0 in its place, a second S_0 meanwhile,
    # S_1, the gradient.
    assert simulate(again, Chain.uniform(2)) == Cost(4, 9.0, 5)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(1)], r"action 0, Forward\(stage=1, keep='all'\).*x_1 is not"),
        ([Forward(0, "nothing"), Forward(0)], r"action 1.*input is live, and x_0 is not"),
        ([Forward(0), Backward(0)], r"action 1, Backward\(stage=0\).*Backward\(1\) is next"),
        ([Forward(0), Forward(1, "input"), Backward(1)], r"action 2.*S_1 is not"),
        ([Forward(0), Forward(1), Backward(1), Backward(1)], r"action 3.*Backward\(0\) is next"),
        (
            [Forward(0), Forward(1), Backward(1), Backward(0), Backward(0)],
            r"action 4.*all of them have run",
        ),
        (
            [Forward(0, "nothing"), Forward(1), Backward(1), Backward(0)],
            r"action 3.*S_0 is not",
        ),
        (
            [Forward(0), Forward(0, "nothing"), Forward(1), Backward(1), Backward(0)],
            r"action 4.*x_0 is not",
        ),
        (
            [Forward(0), Forward(1), Backward(1), Forward(1)],
            r"action 3.*does not run again after its backward",
        ),
        ([Forward(0), Forward(1), Backward(1)], r"ends after 3 actions.*Backward\(0\) has not run"),
        ([], r"ends after 0 actions"),
        ([Forward(2)], r"action 0.*stages 0 to 1"),
        ([Forward(-1)], r"action 0.*stages 0 to 1"),
    ],
)
def test_an_illegal_schedule_is_refused_with_the_action_and_the_rule(actions, message):
    with pytest.raises(IllegalSchedule, match=message):
        simulate(Schedule(actions), Chain.uniform(2))


def test_a_schedule_for_another_length_is_refused():
    with pytest.raises(IllegalSchedule, match="Backward\\(3\\) is next"):
        simulate(store_all(Chain.uniform(3)), Chain.uniform(4))
    with pytest.raises(IllegalSchedule, match="stages 0 to 2"):
        simulate(store_all(Chain.uniform(4)), Chain.uniform(3))


# ---- schedules by rule


def test_segments_of_equal_stages_differ_by_at_most_one_stage():
    for length in range(1, 15):
        chain = Chain.uniform(length, saved_bytes=3)
        for count in range(1, length + 1):
            schedule = segments(chain, count)
            # Each segment's backward pass starts where the last forward that keeps all was.
            pairs = itertools.pairwise(schedule)
            ends = [
                now.stage + 1
                for before, now in pairs
                if before[1:] == ("all",) and isinstance(now, Backward)
            ]
            sizes = [end - start for start, end in itertools.pairwise([0, *reversed(ends)])]
            assert len(sizes) == count and sum(sizes) == length and max(sizes) - min(sizes) <= 1
            assert simulate(schedule, chain).forward_steps == length + length - sizes[-1]


def test_segments_of_uneven_stages_have_the_least_peak_of_all_cuts():
    from course_lib.schedule.rules import segment_schedule

    for seed in range(40):
        length = 2 + seed % 6
        chain = random_chain(length, seed, most=9)
        for count in range(1, length + 1):
            cuts = itertools.combinations(range(1, length), count - 1)
            least = min(
                simulate(segment_schedule([0, *cut, length]), chain).peak_bytes for cut in cuts
            )
            assert simulate(segments(chain, count), chain).peak_bytes == least


def test_where_a_stage_saves_four_times_a_boundary_the_best_count_is_twice_the_square_root():
    chain = Chain((Stage(1, 2, 1, 4),) * 16, 1)
    assert sqrt_segments(chain) == segments(chain, 8)


@pytest.mark.parametrize("length", [16, 36, 64, 100])
def test_the_square_root_of_the_length_is_the_best_count_where_a_boundary_costs_as_much_as_a_stage(
    length,
):
    chain = Chain.uniform(length)
    root = math.isqrt(length)
    assert sqrt_segments(chain) == segments(chain, root)
    peaks = [simulate(segments(chain, count), chain).peak_bytes for count in range(1, length + 1)]
    assert simulate(sqrt_segments(chain), chain).peak_bytes - min(peaks) <= 2


def test_the_recursive_schedule_takes_memory_that_grows_with_the_logarithm():
    for length in range(1, 200):
        cost = simulate(recursive(Chain.uniform(length)), Chain.uniform(length))
        assert cost.peak_bytes <= math.ceil(math.log2(length)) + 4
        assert cost.forward_steps <= length * (1 + math.ceil(math.log2(length)) / 2) + 1


def test_binomial_schedules_take_as_many_extra_steps_as_the_closed_form_says():
    for length in range(2, 41):
        chain = Chain.uniform(length)
        for slots in range(1, length):
            schedule = binomial(length, slots)
            r = next(r for r in itertools.count() if math.comb(slots + r, slots) >= length)
            cost = simulate(schedule, chain)
            assert cost.forward_steps - length == r * length - math.comb(slots + r, slots + 1)
            assert len(schedule) == cost.forward_steps + length
            # the slots, one stage's saved bytes, its gradient, one passing
            assert cost.peak_bytes <= slots + 3


@pytest.mark.parametrize(
    ("length", "slots"), [(1, 1), (2, 1), (7, 1), (7, 2), (10, 3), (30, 5), (100, 10), (100, 200)]
)
def test_binomial_schedules_take_as_many_steps_as_those_of_another_package(length, slots):
    peer = pytest.importorskip(
        "checkpoint_schedules", reason="compares with the package checkpoint-schedules"
    )
    steps, backwards = 0, 0
    for action in peer.Revolve(length, min(slots, max(1, length - 1))):
        if isinstance(action, peer.Forward):
            steps += action.n1 - action.n0
        elif isinstance(action, peer.Reverse):
            backwards += action.n1 - action.n0
        elif isinstance(action, peer.EndReverse):
            break
    ours = list(binomial(length, slots))
    assert backwards == length
    assert sum(isinstance(action, Forward) for action in ours) == steps


def test_no_schedule_with_so_many_slots_takes_fewer_steps_than_the_binomial_one():
    best: dict[tuple[int, int], int] = {}
    for length in range(1, 40):
        for slots in range(40):
            if length == 1:
                best[length, slots] = 0
            elif slots:
                ways = range(length - 1 if slots == 1 else 1, length)
                best[length, slots] = min(
                    p + best[length - p, slots - 1] + best[p, slots] for p in ways
                )
                assert len(binomial(length, slots)) - 2 * length == best[length, slots]


# ---- the cheapest


CHAINS = [
    random_chain(length, seed)
    for length, seeds in ((1, 4), (2, 15), (3, 30), (4, 30), (5, 20), (6, 4))
    for seed in range(seeds)
]


def test_the_frontier_is_what_a_search_through_all_persistent_schedules_finds():
    for chain in CHAINS:
        assert [(cost.peak_bytes, cost.time) for cost in frontier(chain)] == cheapest_by_search(
            chain
        )


def test_the_cheapest_schedule_for_every_budget_is_what_a_search_finds():
    for chain in CHAINS:
        points = cheapest_by_search(chain)
        for budget in range(points[0][0], points[-1][0] + 3):
            cost = simulate(optimal(chain, budget), chain)
            assert cost.peak_bytes <= budget
            assert cost.time == min(seconds for peak, seconds in points if peak <= budget)


def test_every_point_of_the_frontier_is_reached_and_one_byte_less_costs_more():
    for seed in range(6):
        chain = random_chain(12, seed)
        points = frontier(chain)
        for before, point in zip([None, *points], points, strict=False):
            cost = simulate(optimal(chain, point.peak_bytes), chain)
            assert (cost.peak_bytes, cost.time) == (point.peak_bytes, point.time)
            if before is not None:
                assert simulate(optimal(chain, point.peak_bytes - 1), chain).time == before.time
        assert points[-1].time == simulate(store_all(chain), chain).time


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_is_not():
    for seed in range(20):
        chain = random_chain(1 + seed % 9, seed)
        least = frontier(chain)[0].peak_bytes
        assert simulate(optimal(chain, least), chain).peak_bytes == least
        for budget in (least - 1, 0, -5):
            with pytest.raises(
                InfeasibleBudget, match=f"budget_bytes is {budget}.* at least {least}$"
            ) as error:
                optimal(chain, budget)
            assert error.value.least_bytes == least and error.value.budget_bytes == budget
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_rounding_never_takes_the_peak_over_the_budget(monkeypatch):
    for seed in range(3):
        chain = random_chain(20, seed, most=100_003)
        most, costs = simulate(store_all(chain), chain).peak_bytes, []
        with pytest.raises(InfeasibleBudget) as error:
            optimal(chain, 1)
        least = error.value.least_bytes
        budgets = [
            least,
            least + 1,
            *(least + (most - least) * i // 7 for i in range(1, 7)),
            most - 1,
            most,
        ]
        for levels in (60, 3000):
            monkeypatch.setattr(planner, "CELLS", 0)
            monkeypatch.setattr(planner, "LEAST_LEVELS", levels)
            costs.append([simulate(optimal(chain, budget), chain) for budget in budgets])
            assert all(
                cost.peak_bytes <= budget for cost, budget in zip(costs[-1], budgets, strict=True)
            )
            points = frontier(chain)
            assert points[0].peak_bytes == least and points[-1] == simulate(store_all(chain), chain)
        coarse, fine = ([cost.time for cost in row] for row in costs)
        assert (
            sum(fine) < sum(coarse)
            and fine[-1] == coarse[-1] == simulate(store_all(chain), chain).time
        )


def test_a_long_regular_chain_loses_little_by_rounding(monkeypatch):
    stages = [Stage(3, 6, 1000, 9000, 10, 1500), Stage(5, 10, 1000, 14000, 20, 3000)] * 10
    chain = Chain((Stage(1, 1, 1000, 1000), *stages, Stage(7, 14, 4, 40_001, 100, 40_003)), 100)
    points = frontier(chain)
    monkeypatch.setattr(planner, "CELLS", 0)
    monkeypatch.setattr(planner, "LEAST_LEVELS", 300)
    for point in points:
        assert simulate(optimal(chain, round(point.peak_bytes * 1.03)), chain).time <= point.time


# for which sums in the order of the actions differ in the last digit
@pytest.mark.parametrize("seed", [16, 25, 26])
def test_times_that_are_no_whole_numbers_make_no_points_of_their_own(seed):
    draw, costs = random.Random(seed), []
    for _ in range(12):
        output = draw.randint(1, 3)
        costs.append((draw.randint(1, 9), draw.randint(1, 9), output, output + draw.randint(0, 3)))
    whole = Chain(tuple(Stage(*cost) for cost in costs), 2)
    tenths = Chain(tuple(Stage(f / 10, b / 10, output, saved) for f, b, output, saved in costs), 2)
    expected = [(point.peak_bytes, point.time) for point in frontier(whole)]
    assert [(point.peak_bytes, round(10 * point.time)) for point in frontier(tenths)] == expected


# ---- execution


class Shifted(nn.Module):
    """A residual block with dropout, so that its random numbers matter."""

    def __init__(self, width: int):
        super().__init__()
        self.wide, self.narrow, self.drop = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Dropout(0.3),
        )

    def forward(self, x):
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(x))))


def mlp(width=16, depth=9):
    return nn.Sequential(*(Shifted(width) for _ in range(depth))), torch.randn(8, width)


def shared():
    block = Shifted(16)
    return nn.Sequential(
        block, nn.Tanh(), block, Shifted(16), block, nn.LayerNorm(16)
    ), torch.randn(8, 16)


def tokens():
    layers = [nn.Embedding(50, 16), *(Shifted(16) for _ in range(4)), nn.Linear(16, 50)]
    return nn.Sequential(*layers), torch.randint(50, (4, 6))


def pyramid(size=16):
    widths = [3, 8, 16, 32]
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers), torch.randn(4, 3, size, size)


def schedules(length: int):
    chain = random_chain(length, 1)
    least = frontier(chain)[0].peak_bytes
    yield from (
        store_all(chain),
        sqrt_segments(chain),
        recursive(chain),
        binomial(length, 2),
        binomial(length, 1),
    )
    yield from (segments(chain, length), optimal(chain, least), optimal(chain, least + 3))


def step(module, x, passes=1):
    """Outputs, gradients and buffers after some passes from one seed."""
    torch.manual_seed(3)
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    outputs = []
    for _ in range(passes):
        output = module(x)
        output.square().sum().backward()
        outputs.append(output.detach())
    drawn = torch.rand(3)
    return [
        *outputs,
        x.grad,
        *(p.grad for p in module.parameters()),
        *(b.clone() for b in module.buffers()),
        drawn,
    ]


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("make", [mlp, shared, tokens, pyramid])
def test_outputs_gradients_and_statistics_equal_the_plain_modules_to_the_bit(make):
    torch.manual_seed(0)
    module, x = make()
    for needs in (False, True)[: 1 + x.is_floating_point()]:
        expected = step(copy.deepcopy(module), x.requires_grad_(needs) if needs else x, passes=2)
        for schedule in schedules(len(module)):
            assert_same_bits(
                step(ScheduledSequential(copy.deepcopy(module), schedule), x, passes=2), expected
            )


def test_only_some_parameters_may_be_trained():
    torch.manual_seed(0)
    module, x = mlp()
    for stage in (0, 1, 5):
        module[stage].requires_grad_(False)
    expected = step(copy.deepcopy(module), x)
    for schedule in schedules(len(module)):
        assert_same_bits(step(ScheduledSequential(module, schedule), x), expected)


def test_gradients_of_some_parameters_can_be_asked_for():
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.randn(2, 4)
    expected = torch.autograd.grad(module(x).square().sum(), list(module[2].parameters()))
    scheduled = ScheduledSequential(module, sqrt_segments(Chain.uniform(5)))
    assert_same_bits(
        torch.autograd.grad(scheduled(x).square().sum(), list(module[2].parameters())), expected
    )
    assert all(parameter.grad is None for parameter in module.parameters())


def test_autocast_of_the_first_run_holds_in_the_recomputation():
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), torch.randn(4, 8)

    def gradients(module):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(x)
        output.float().square().sum().backward()
        return [output, *(parameter.grad for parameter in module.parameters())]

    expected = gradients(copy.deepcopy(module))
    for schedule in schedules(5):
        assert_same_bits(gradients(ScheduledSequential(copy.deepcopy(module), schedule)), expected)


def test_names_and_mode_are_those_of_the_plain_module_and_without_gradients_it_just_runs():
    module = nn.Sequential()
    module.add_module("first", nn.Linear(3, 3))
    module.add_module("second", nn.BatchNorm1d(3))
    module.eval()
    scheduled = ScheduledSequential(module, store_all(Chain.uniform(2)))
    assert list(scheduled.state_dict()) == list(module.state_dict())
    assert not scheduled.training
    with torch.no_grad():
        assert torch.equal(scheduled(torch.ones(2, 3)), module(torch.ones(2, 3)))


def giant(where: int):
    """Six stages, one of which saves far more than the others."""

    class Giant(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

        def forward(self, x):
            return self.down(torch.tanh(torch.sin(self.up(x))))

    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    layers[where] = Giant()
    return nn.Sequential(*layers), torch.randn(256, 64)


def even():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))
    ), torch.randn(256, 64)


def language_model():
    class Block(Shifted):
        def __init__(self):
            super().__init__(32)
            self.drop = nn.Identity()

    return nn.Sequential(
        nn.Embedding(300, 32), *(Block() for _ in range(6)), nn.Linear(32, 300)
    ), torch.randint(300, (8, 64))


def decoder():
    tokens = random_tokens(2, 64, 256)
    model = Decoder(vocabulary=256, hidden=64, heads=4, layers=4, sequence=64, tied=False)
    return loss_stages(model, tokens[:, 1:]), tokens[:, :-1].contiguous()


def funnel(*widths):
    """Stages whose inputs, outputs and insides all differ in size."""
    pairs = itertools.pairwise(widths)
    layers = (
        nn.Sequential(nn.Linear(a, 96), nn.GELU(), nn.Linear(96, b), nn.Sigmoid()) for a, b in pairs
    )
    return nn.Sequential(*layers), torch.randn(64, widths[0])


LOSS_BYTES = 8  # the loss, which is no stage, and its gradient


def measured_peak(run, x) -> int:
    """Of one pass, gradients of parameters being there, with the input, and without the loss."""
    output = run(x)
    output.backward(torch.ones_like(output))
    weight = torch.ones_like(output).detach()
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
        even,
        language_model,
        decoder,
        partial(giant, 0),
        partial(giant, 3),
        partial(giant, 5),
        partial(funnel, 4, 16, 64, 256, 256, 512),
        partial(funnel, 512, 32, 256, 4, 4, 128),
    ],
    ids=[
        "even",
        "language model",
        "decoder",
        "giant first",
        "in the middle",
        "last",
        "widening",
        "uneven",
    ],
)
def test_a_run_peaks_where_the_referee_says_to_the_byte(make):
    torch.manual_seed(0)
    module, x = make()
    chain = Chain.profile(module, x)
    points = frontier(chain)
    rules = [
        store_all(chain),
        segments(chain, 2),
        sqrt_segments(chain),
        recursive(chain),
        binomial(len(chain), 2),
    ]
    plans = [optimal(chain, point.peak_bytes) for point in points[:: max(1, len(points) // 5)]]
    for schedule in [*rules, *plans]:
        assert (
            measured_peak(ScheduledSequential(module, schedule), x)
            == simulate(schedule, chain).peak_bytes
        )


def test_copies_of_buffers_that_change_come_on_top_of_what_the_referee_says():
    module, x = pyramid(32)
    chain, buffers = Chain.profile(module, x), sum(buffer.nbytes for buffer in module.buffers())
    for schedule in (segments(chain, 3), recursive(chain), binomial(len(chain), 2)):
        more = (
            measured_peak(ScheduledSequential(module, schedule), x)
            - simulate(schedule, chain).peak_bytes
        )
        assert 0 < more <= buffers


def residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    return nn.Sequential(*(Block() for _ in range(12))), torch.randn(512, 32)


@pytest.mark.parametrize("make", [even, residual])
def test_referee_run_and_checkpoint_sequential_agree_on_segments(make):
    torch.manual_seed(0)
    module, x = make()
    chain = Chain.profile(module, x)
    for count in (1, 3, 4, 12):
        framework = partial(
            checkpoint_sequential, module, count, use_reentrant=False, preserve_rng_state=False
        )
        expected = measured_peak(lambda x, framework=framework: framework(input=x), x)
        schedule = segments(Chain.uniform(12), count)
        assert simulate(schedule, chain).peak_bytes == expected
        assert measured_peak(ScheduledSequential(module, schedule), x) == expected


def test_casts_of_weights_do_not_outlive_their_stage():
    module, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))),
        torch.randn(16, 64),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = Chain.profile(module, x)
        for schedule in (store_all(chain), segments(chain, 2), recursive(chain)):
            run = ScheduledSequential(module, schedule)
            peak = measured_peak(lambda x, run=run: run(x).float(), x)
            # What becomes float32 outside of the chain, 4 bytes a number, is there with its
            # gradient of 2 bytes.
            assert abs(peak - simulate(schedule, chain).peak_bytes) <= 16 * 64 * 8


def test_the_counted_flops_are_the_simulated_ones():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(7)]
    module, x = nn.Sequential(*layers), torch.randn(4, 8)
    chain = Chain.profile(module, x)
    for schedule in (store_all(chain), segments(chain, 3), recursive(chain), binomial(7, 2)):
        with FlopCounterMode(display=False) as counter:
            ScheduledSequential(module, schedule)(x).sum().backward()
        assert counter.get_total_flops() == simulate(schedule, chain).time


def test_a_profile_counts_the_bytes_and_flops_of_each_stage():
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(2, 4)
    linear, tanh = Chain.profile(module, x).stages
    assert (linear.output_bytes, linear.saved_bytes, linear.forward_time) == (64, 64, 2 * 2 * 4 * 8)
    assert (tanh.output_bytes, tanh.saved_bytes, tanh.forward_time) == (64, 64, 16)
    assert Chain.profile(module, x) == Chain.profile(module, x)
    clocked = Chain.profile(module, x, clock=True).stages
    assert [stage.saved_bytes for stage in clocked] == [64, 64]
    assert all(
        0 < time < 1 for stage in clocked for time in (stage.forward_time, stage.backward_time)
    )


class Blocks(nn.Module):
    """Linear layers, and how often they have run."""

    def __init__(self, *, frozen=0, rates=(0.1, 0.2, 0.3, 0.0)):
        super().__init__()
        self.runs = []
        self.blocks = nn.ModuleList(self.block(rate) for rate in rates)
        for p in itertools.islice(self.parameters(), 2 * frozen):
            p.requires_grad_(False)

    def block(self, rate):
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate))
        block.register_forward_hook(lambda *_: self.runs.append(rate))
        return block


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_profile_of_stages_that_look_alike_is_that_of_all_from_one_of_each_look(frozen):
    """The first has no gradient to hand on; functions look like themselves alone."""
    model, x = Blocks(frozen=frozen), torch.ones(4, 8)
    stages = [*model.blocks, *([torch.tanh, lambda x: x.tanh().exp()] * 2), *model.blocks]
    full, runs = Chain.profile(stages, x), len(model.runs)
    model.runs.clear()
    assert Chain.profile(stages, x, alike=True) == full
    each = runs // 8
    # none trains before it; trained alone, and with one before; and each with a rate of zero
    looks = {0: [0.1, 0.2, 0.0], 2: [0.1, 0.3, 0.0, 0.1, 0.3]}[frozen]
    assert model.runs[::each] == looks


def test_a_function_does_not_look_like_one_that_is_gone():
    """As those that a model's `stages` makes anew for each micro-batch."""

    def look(power):
        (stage,) = as_modules([lambda x: x**power]).values()
        return look_of(stage)

    assert len({look(power) for power in range(8)}) == 8


def test_a_profile_leaves_module_and_random_numbers_as_they_were():
    torch.manual_seed(0)
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
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, mask=None):
        return (x + self.norm(torch.where(mask, self.linear(x), 0.0)), None)


def one_after_the_other(stages, x, **kwargs):
    for stage in stages:
        x = stage(x, **kwargs)
        x = x[0] if isinstance(x, tuple) else x
    return x


def test_layers_that_take_masks_and_return_tuples_can_be_stages():
    torch.manual_seed(0)
    layers, mask = nn.ModuleList(Masked(8) for _ in range(6)), torch.rand(4, 8) > 0.3
    x = torch.randn(4, 8, requires_grad=True)
    expected = one_after_the_other(layers, x, mask=mask)
    inputs = [x, *layers.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    chain = Chain.profile(layers, x, kwargs={"mask": mask})
    for stages in (layers, list(layers)):
        for schedule in (
            store_all(chain),
            segments(chain, 3),
            recursive(chain),
            optimal(chain, 10**6),
        ):
            run = ScheduledSequential(stages, schedule)
            output = run(x, mask=mask)
            assert torch.equal(output, expected)
            assert_same_bits(torch.autograd.grad(output.square().sum(), inputs), gradients)
            with torch.no_grad():
                assert torch.equal(run(x, mask=mask), expected)


def test_what_goes_with_the_floating_tensor_goes_through_all_stages():
    def stage(linear, pair):
        return {"x": linear(pair["x"]).sin(), "where": pair["where"], "name": "pair"}

    torch.manual_seed(0)
    linears = [nn.Linear(5, 5) for _ in range(4)]
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    stages = [partial(stage, linear) for linear in linears]
    pair = {"x": torch.randn(3, 5, requires_grad=True), "where": torch.arange(3), "name": "pair"}
    expected = one_after_the_other(stages, pair)
    gradients = torch.autograd.grad(expected["x"].sum(), [pair["x"], *parameters])
    chain = Chain.profile(stages, pair)
    for schedule in (store_all(chain), recursive(chain)):
        output = ScheduledSequential(stages, schedule)(pair)
        assert torch.equal(output["x"], expected["x"]) and output["where"] is pair["where"]
        assert_same_bits(
            torch.autograd.grad(output["x"].sum(), [pair["x"], *parameters]), gradients
        )


def test_functions_train_what_they_hold_and_nothing_else_in_silence():
    torch.manual_seed(0)
    linear, scale, x = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.randn(2, 4)
    stages = [
        lambda x: linear(x).tanh(),
        lambda x, scale=scale: x * scale,
        partial(torch.add, torch.ones(4)),
    ]
    stages.append(linear.forward)
    run = ScheduledSequential(stages, recursive(Chain.uniform(4)))
    assert {*run.parameters()} == {*linear.parameters(), scale}
    run(x).sum().backward()
    found = [parameter.grad.clone() for parameter in (*linear.parameters(), scale)]
    expected = torch.autograd.grad(
        one_after_the_other(stages, x).sum(), [*linear.parameters(), scale]
    )
    assert_same_bits(found, expected)

    hidden = torch.ones(4, requires_grad=True)
    run = ScheduledSequential([linear, lambda x: x * hidden], store_all(Chain.uniform(2)))
    with pytest.raises(RuntimeError, match="stage 1 uses a tensor that requires a gradient"):
        run(x)


def test_a_stage_that_cuts_the_gradient_leaves_those_before_it_without_any():
    class Cut(nn.Module):
        def forward(self, x):
            return x.detach()

    module, x = (
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Cut(), nn.Linear(3, 3)),
        torch.randn(2, 3),
    )
    ScheduledSequential(module, segments(Chain.uniform(4), 2))(x).sum().backward()
    assert [parameter.grad is None for parameter in module.parameters()] == [True] * 4 + [False] * 2


def test_buffers_are_as_before_the_first_run_when_a_stage_runs_again():
    torch.manual_seed(0)

    def block():
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Tanh()
        )

    module, x = nn.Sequential(*(block() for _ in range(5))), torch.randn(16, 8)
    expected = step(copy.deepcopy(module), x, passes=2)
    for schedule in schedules(5):
        assert_same_bits(
            step(ScheduledSequential(copy.deepcopy(module), schedule), x, passes=2), expected
        )


def test_two_passes_at_once_each_find_their_own_buffers():
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3))
    )
    xs = torch.randn(2, 4, 8)

    def gradients(module):
        first, second = module(xs[0]), module(xs[1])
        first.square().sum().backward()
        second.square().sum().backward()
        return [*(p.grad for p in module.parameters()), *module.buffers()]

    expected = gradients(copy.deepcopy(module))
    assert_same_bits(
        gradients(ScheduledSequential(copy.deepcopy(module), recursive(Chain.uniform(3)))), expected
    )


# ---- the blocks of a model, in place


def test_blocks_run_by_a_schedule_compute_what_they_do_without_it():
    torch.manual_seed(0)
    blocks, x = mlp()
    model = nn.Sequential(nn.Linear(16, 16), blocks, nn.Linear(16, 3))
    expected = step(copy.deepcopy(model), x, passes=2)
    for schedule in schedules(len(blocks)):
        with schedule_blocks(model, "1.*", schedule=schedule) as handle:
            assert handle.names == tuple(f"1.{i}" for i in range(9))
            assert_same_bits(step(model, x, passes=2), expected)
            with torch.no_grad():
                assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))
            model.train()
        assert all("forward" not in vars(block) for block in blocks)


@pytest.mark.parametrize(
    "make", [even, partial(giant, 3), partial(funnel, 4, 16, 64, 256, 256, 512)]
)
def test_blocks_in_place_peak_where_the_referee_says_to_the_byte(make):
    torch.manual_seed(0)
    module, x = make()
    chain = Chain.profile(module, x)
    points = frontier(chain)
    for point in (points[0], points[len(points) // 2]):
        seen = []

        def fastest(measured, budget=point.peak_bytes, seen=seen):
            seen.append(measured)
            return optimal(measured, budget)

        with schedule_blocks(module, "*", schedule=fastest):
            peak = measured_peak(module, x)
        assert set(seen) == {chain}
        assert peak == point.peak_bytes


# ---- bad input


def test_a_schedule_for_another_number_of_stages_does_not_run():
    with pytest.raises(IllegalSchedule, match="stages 0 to 0"):
        ScheduledSequential(nn.Sequential(nn.Tanh()), store_all(Chain.uniform(2)))


def test_a_second_backward_through_the_same_pass_is_refused():
    scheduled = ScheduledSequential(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()), segments(Chain.uniform(2), 2)
    )
    loss = scheduled(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this backward pass has already run"):
        loss.backward()


def test_a_stage_that_changes_its_input_is_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="stage 1 changed its input in place"):
        ScheduledSequential(module, segments(Chain.uniform(3), 2))(torch.ones(1, 2))


@pytest.mark.parametrize(
    "other", [lambda x: x[:1], torch.Tensor.double], ids=["a shape that broadcasts", "a dtype"]
)
def test_a_stage_that_returns_something_else_the_second_time_is_refused(other):
    runs = []

    def changing(x):
        runs.append(x)
        return x * 2 if len(runs) == 1 else other(x * 2)

    stages = [nn.Linear(2, 2), changing, torch.tanh]
    loss = ScheduledSequential(stages, segments(Chain.uniform(3), 3))(torch.ones(2, 2)).sum()
    with pytest.raises(RuntimeError, match=r"stage 1 returned .* when it ran again"):
        loss.backward()


class Aside(nn.Linear):
    """A layer with a loss of its own, beside what it returns."""

    def forward(self, x):
        self.losses = [super().forward(x).square().mean()]
        return x + super().forward(x)


def test_a_stage_that_leaves_a_loss_beside_what_it_returns_is_refused():
    x = torch.randn(3, 8, requires_grad=True)
    for schedule in schedules(4):
        layers = nn.Sequential(*(Aside(8, 8) for _ in range(4)))
        with pytest.raises(
            RuntimeError,
            match=r"^stage \d stores a tensor that requires a gradient in losses[^\n]*$",
        ):
            ScheduledSequential(layers, schedule)(x).sum().backward()
        with (
            schedule_blocks(layers, "*", schedule=schedule),
            pytest.raises(RuntimeError, match="requires a gradient in losses"),
        ):
            layers(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_compute_are_not_left_behind():
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    nn.utils.weight_norm(layers[0])
    prune.l1_unstructured(layers[1], "weight", 0.5)
    x = torch.randn(3, 8, requires_grad=True)
    expected = step(layers, x)
    for schedule in schedules(4):
        with schedule_blocks(layers, "*", schedule=schedule):
            assert_same_bits(step(layers, x), expected)


def test_a_schedule_draws_itself():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = recursive(Chain.uniform(6)).plot()
    assert ax.get_ylim() == (-0.5, 5.5) and ax.get_xlabel() == "time"
    assert ax.get_xlim()[1] == simulate(recursive(Chain.uniform(6)), Chain.uniform(6)).time
    assert segments(Chain.uniform(4), 2).plot(ax, chain=Chain.uniform(4)) is ax
    plt.close("all")


# ---- what you may have read: the claims of lesson 03, and what it says of segments and compilers

B = 100_000  # bytes of one activation of these networks
INPUT, ONES = torch.linspace(-1, 1, 25_000).view(1000, 25), torch.ones(1000, 25)


def layered(depth: int, activation=nn.GELU) -> nn.Sequential:
    modules = deep_mlp(depth=depth, width=25, activation=activation)
    layers = nn.Sequential(
        *(nn.Sequential(*pair) for pair in zip(modules[::2], modules[1::2], strict=True))
    )
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layers


def peak_of(run) -> int:
    with MemoryMeter() as meter:
        (run(INPUT) * ONES).sum().backward()
    return meter.peak_bytes


def flops_of(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run(INPUT).sum().backward()
    return counter.get_total_flops()


def in_segments(layers, cuts, x):
    *firsts, last = itertools.pairwise(cuts)
    for start, end in firsts:
        x = checkpoint(layers[start:end], x, use_reentrant=False, preserve_rng_state=False)
    return layers[slice(*last)](x)


def peak_of_cuts(cuts) -> int:
    return (
        max(
            j * B + (end - start) * 2 * B for j, (start, end) in enumerate(itertools.pairwise(cuts))
        )
        + B
    )


def test_the_peak_of_segments_is_what_the_lesson_predicts_for_any_cut():
    layers = layered(12)
    for seed in range(25):
        draw = random.Random(seed)
        cuts = [0, *sorted(draw.sample(range(1, 12), draw.randint(0, 7))), 12]
        measured = peak_of(lambda x, cuts=cuts: in_segments(layers, cuts, x))
        assert measured == pytest.approx(peak_of_cuts(cuts), abs=64)


def test_segments_that_get_shorter_peak_lower_than_any_balanced_ones():
    # as lesson 03 finds them for 100 layers
    sizes = [10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1]
    cuts = list(itertools.accumulate(sizes, initial=0))
    layers = layered(100)
    tapered = peak_of(lambda x: in_segments(layers, cuts, x))
    balanced = []
    for k in range(1, 101):
        balanced.append(
            peak_of_cuts(
                list(itertools.accumulate([100 // k + (j < 100 % k) for j in range(k)], initial=0))
            )
        )
    assert tapered == pytest.approx(21 * B, abs=64) and min(balanced) == 27 * B
    extra = flops_of(lambda x: in_segments(layers, cuts, x)) / flops_of(layers)
    assert 1.32 < extra < 4 / 3


def test_ten_segments_of_a_hundred_layers_save_less_than_the_square_root_says_and_cost_more():
    layers = layered(100, nn.Tanh)
    ten = partial(checkpoint_sequential, layers, 10, use_reentrant=False, preserve_rng_state=False)
    saving = 1 - peak_of(lambda x: ten(input=x)) / peak_of(layers)
    assert saving < 1 - 2 / math.sqrt(100) < 1 - math.sqrt(100) / 100
    extra = flops_of(lambda x: ten(input=x)) / flops_of(layers) - 1
    assert 2 * math.sqrt(100) / 100 < extra < 1 / 3


def test_detaching_the_output_of_a_segment_keeps_gradients_from_the_earlier_ones():
    layers, x = layered(8), INPUT
    layers.zero_grad()
    for start in (0, 2, 4):
        x = checkpoint(layers[start : start + 2], x, use_reentrant=False).detach().requires_grad_()
    layers[6:](x).sum().backward()
    assert [layer[0].weight.grad is not None for layer in layers] == [False] * 6 + [True] * 2


def compiled(module, x, budget: float):
    """The compiler's two graphs, run as they are, each value given up after its last use."""

    def releasing(graph, _):
        def run(values):
            return torch.fx.Interpreter(graph).boxed_run(values)

        run._boxed_call = True
        return run

    from torch._functorch.aot_autograd import aot_module
    from torch._functorch.config import patch
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with patch(activation_memory_budget=budget):
        result = aot_module(module, releasing, releasing, min_cut_rematerialization_partition)
        result(x).sum().backward()
    return result


def test_the_compilers_peak_rises_again_where_its_budget_gets_small():
    layers = layered(16)
    runs = [compiled(layers, INPUT, budget) for budget in (1, 0.75, 0.25, 0)]
    saved = [saved_tensors(run, INPUT).total_bytes for run in runs]
    peaks = [peak_of(run) for run in runs]
    assert saved == sorted(saved, reverse=True) and saved[-1] == B
    assert peaks[1] < peaks[2] < peaks[3] and peaks[3] == pytest.approx(peaks[0], rel=0.01)
    assert peak_of(lambda x: in_segments(layers, [0, 4, 8, 12, 16], x)) < peaks[1]


def test_the_compilers_peak_depends_on_which_bytes_are_saved_not_on_how_many(monkeypatch):
    from torch._functorch import partitioners

    def spread(sizes, flops, most):
        keep = list(range(1, len(sizes), 2))[:7]
        return 0.0, keep, [i for i in range(len(sizes)) if i not in keep]

    layers = layered(16)
    solved = compiled(layers, INPUT, 0.25)
    monkeypatch.setattr(partitioners, "dp_knapsack", spread)
    evenly = compiled(layers, INPUT, 0.25)
    assert saved_tensors(evenly, INPUT).total_bytes == saved_tensors(solved, INPUT).total_bytes
    assert flops_of(evenly) == flops_of(solved)
    assert peak_of(evenly) < 0.6 * peak_of(solved)


def test_whole_stages_end_at_the_frontier_and_single_operators_go_below():
    tokens = random_tokens(2, 64, 256)
    decoder = Decoder(vocabulary=256, hidden=64, heads=4, layers=4, sequence=64, tied=False)
    module, x = loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chain = Chain.profile(module, x)
    points = frontier(chain)
    # A scheduled stage hands on the gradients of its parameters together; plain backward one by
    # one.
    together = max(sum(parameter.nbytes for parameter in stage.parameters()) for stage in module)

    def least_flops(peak_bytes):
        return min(
            (point.time for point in points if point.peak_bytes <= peak_bytes), default=math.inf
        )

    def cost(run):
        with MemoryMeter() as meter:
            run(x).backward()
        with FlopCounterMode(display=False) as counter:
            run(x).backward()
        return meter.peak_bytes + x.nbytes, counter.get_total_flops()

    with set_checkpoint_early_stop(False):
        for count in (1, 2, 3, 5, 10):
            run = partial(
                checkpoint_sequential, module, count, use_reentrant=False, preserve_rng_state=False
            )
            peak, flops = cost(lambda x, run=run: run(input=x))
            # the embedding's elements are no FLOPs
            assert flops >= least_flops(peak + together) * 0.999
    peak, flops = cost(compiled(module, x, 0.5))
    assert flops < least_flops(peak) * 0.99
